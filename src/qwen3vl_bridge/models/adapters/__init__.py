"""Low-rank adapters: inserted into a model, and exported to Hugging Face."""
