"""The planner: memory of a rank (`memory`), time of a step (`speed`), and which splits fit, before anything starts.

What lives here: estimates from only a configuration. Standard library only (rich for printing), so that it answers at
once. What may not: torch, Megatron, models; names and shapes of parameters, which are the weight table's
(`models/*/table.py`). `docs/memory.md` states formulas and assumptions.
"""
