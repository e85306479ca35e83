"""The command lines: convert, adapters, data, plan."""
