"""Training: the forward step, and callbacks and checkpoints of a run in Megatron-Bridge's loop.

What lives here: the step, its configuration and callbacks, conversion of other batches to ours; checkpoints, metrics,
and actions around the optimizer's step in subfolders. What may not: the loop, which is Megatron-Bridge's; the model,
reading data.
"""
