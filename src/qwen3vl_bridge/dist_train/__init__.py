"""Training with separate vision and language ranks (`dist_train`)."""
