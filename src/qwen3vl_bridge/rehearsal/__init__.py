"""A run on a GPU that computes nothing: what it would allocate, launch and send, on a machine without one."""
