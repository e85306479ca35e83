"""Reading and writing files, for all packages.

What lives here: results that are either complete or absent, paths, JSON and YAML within limits, their common error.
"""
