"""Separate vision and language ranks (dist-train): both modules, their payload, step, checkpoint, evaluation."""
