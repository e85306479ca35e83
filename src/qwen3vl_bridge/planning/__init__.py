"""The planner: the memory of each rank of a run, and which splits fit, before anything starts.

Estimates need only a configuration, and no package outside the standard library (rich for printing), so that they are
there at once. `docs/memory.md` states formulas and assumptions.
"""
