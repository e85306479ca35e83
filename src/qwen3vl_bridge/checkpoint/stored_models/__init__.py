"""Models on disk: folder, configuration and weights together, in either world."""
