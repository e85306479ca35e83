"""The digits demo and its report."""
