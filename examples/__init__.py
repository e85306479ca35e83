"""Runnable examples. What lives here: one package an example. What may not: code that `src/` imports."""
