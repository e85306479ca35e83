"""The callers' interface: arguments in a caller's convention become `ModelInputs`, outputs go back in it."""
