"""The planner: the memory of each rank of a run, and which splits fit, before anything starts.

`estimate.py` adds up the bytes of `model_states.py` (weights, gradients, optimizer; host memory while a checkpoint is
saved) and `activations.py`; `proposals.py` tries splits, and `from_config.py` reads a run's configuration. Estimates
need only that, and no package outside the standard library (rich for printing), so that they are there at once.
`docs/memory.md` states formulas and assumptions.
"""
