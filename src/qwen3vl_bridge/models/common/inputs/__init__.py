"""The callers' interface: converts arguments in a caller's convention to `ModelInputs`, and outputs back."""
