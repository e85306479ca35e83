"""Separate vision and language ranks (dist-train): modules and payload, joint steps, checkpoints of one model."""
