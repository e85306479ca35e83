"""Estimate the memory of each rank of a run, and find parallel layouts that fit, before anything starts.

`estimate.py` adds the bytes of `model_states.py` (weights, gradients, optimizer) and `activations.py`. `proposals.py`
tries parallel layouts. `from_config.py` reads the configuration of a run. Only the standard library is needed (and rich
for printing), so estimates take no time to import. `docs/scaling.md` states formulas and assumptions.
"""
