"""Model families, each in its own folder, and beside the folders what they share.

Legend of shapes in this package: b rows, s local sequence length, h hidden size, d head dimension, N vision patches, M
= N / merge^2 vision tokens, K vision tokens of this rank, t DeepStack features.
"""
