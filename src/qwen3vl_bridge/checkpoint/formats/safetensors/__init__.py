"""Hugging Face safetensors: the folder, its reader, its writer."""
