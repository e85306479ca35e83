"""The planner: what a rank holds (`memory`), how long a step takes (`speed`), which splits fit, before anything starts.

What lives here: estimates from a configuration alone. Standard library only (rich where it prints), so that it answers
at once. What may not: torch, Megatron, models; names and shapes of parameters, which are the weight table's
(`models/*/table.py`). `docs/memory.md` states formulas and assumptions.
"""
