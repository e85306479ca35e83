"""Training: the forward step for any Megatron loop, and a small loop of our own for machines without CUDA.

What lives here: steps, losses, other people's batches as ours, the loop and its checkpoints. What may not: the model,
reading data.
"""
