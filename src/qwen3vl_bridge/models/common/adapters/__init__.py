"""Low-rank adapters: into a model, and out to Hugging Face."""
