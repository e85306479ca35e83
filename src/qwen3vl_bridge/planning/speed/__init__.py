"""Step time: FLOPs, pipeline stages, exchange of gradients."""
