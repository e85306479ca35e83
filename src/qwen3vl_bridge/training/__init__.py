"""Training: the forward step, and callbacks and checkpoints of a run in Megatron-Bridge's loop.

What lives here: the step, its configuration and callbacks, other people's batches as ours; checkpoints, figures, what
is done around the optimizer's step in folders of their own. What may not: the loop, which is Megatron-Bridge's; the
model, reading data.
"""
