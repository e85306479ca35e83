"""What families share: attention, rotary embeddings, vision tower, layer specs, router, freezing, FLOPs."""
