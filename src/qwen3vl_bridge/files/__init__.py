"""What reading and writing files takes, whoever does it.

What lives here: results that are there wholly or not at all, paths, JSON and YAML within limits, their one error.
"""
