"""Separate vision and language ranks (dist-train): modules and payload, runs of both."""
