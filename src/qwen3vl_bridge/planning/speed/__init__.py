"""Step time: operations, pipeline stages, exchange of gradients."""
