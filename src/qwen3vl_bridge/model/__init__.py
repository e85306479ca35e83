"""The Megatron Qwen3-VL model.

What lives here: modules. What may not: reading data, checkpoints, or process-group calls (those are `parallel.py`'s).

Legend of shapes in this package: b rows, s local sequence length, h hidden size, d head dimension, N vision patches,
M = N / merge^2 vision tokens, K vision tokens of this rank, t DeepStack taps.
"""
