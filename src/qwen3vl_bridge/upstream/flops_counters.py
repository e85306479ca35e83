"""Counters from which Megatron-Bridge computes the FLOPs that it logs.

Changed: six private attributes of `GlobalState`, which the training loop sets to zero before each step and sums over
ranks after it. The public function that adds to them, `accumulate_flops_metadata`, includes padding tokens, treats a
row as one sequence, and reads device tensors. Delete this module when Megatron-Bridge has a function that takes counts.
"""

from __future__ import annotations

from megatron.bridge.training.state import GlobalState


def add_operations(
    state: GlobalState, *, tokens: int, token_pairs: int, patches: int, cross_tokens: int, cross_pairs: int
) -> None:
    """Add a microbatch to the counters of a run, which Megatron-Bridge then sums over data-parallel ranks.

    Args:
        state: Megatron-Bridge's state of the run.
        tokens: sum of the lengths of sequences.
        token_pairs: sum of the squared lengths of sequences.
        patches: patches of images and videos.
        cross_tokens: added to the counter that Megatron-Bridge reads as sequence lengths of cross-attention.
        cross_pairs: added to the counter that Megatron-Bridge reads as products of lengths in cross-attention.
    """
    for name, amount in {
        "_flops_seqlen_sum": tokens,
        "_flops_seqlen_sq_sum": token_pairs,
        "_flops_vision_patches": patches,
        "_flops_cross_seqlen_sum": cross_tokens,
        "_flops_cross_seqlen_product_sum": cross_pairs,
    }.items():
        setattr(state, name, getattr(state, name, 0) + amount)
    state._flops_requires_global_reduce = True
