"""Self attention that uses precomputed rotary angles.

What lives here: a subclass of megatron-core's. What may not: angles (`models/common/rope.py`), core attention
(`segments.py`, `context_parallel.py`), the selection of layer specs (`models/common/layer_specs.py`).
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.models.common.rope import rotate

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn


class RotarySelfAttention(SelfAttention):
    """Self attention whose rotary argument contains the angles of its local tokens, for padded and packed rows.

    Megatron applies rotary embeddings after it has removed the batch dimension of packed rows, and then looks up
    positions by segment and context-parallel rank. Our angles are already local, so queries and keys are rotated right
    after the QKV projection.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Like SelfAttention.forward; `rotary_pos_emb` is from `rope.rotation`."""
        # key_value_states is unused in self attention; it passes the angles to get_query_key_value_tensors.
        return super().forward(
            hidden_states, attention_mask, rotary_pos_emb, inference_context, rotary_pos_emb=None, **kwargs
        )

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """Query, key and value [s, b, heads, d], with query and key rotated by the angles in `key_value_states`."""
        query, key, *rest = super().get_query_key_value_tensors(hidden_states, None, **kwargs)
        if key_value_states is None:
            return query, key, *rest
        return *rotate(query, key, key_value_states), *rest

    def fused_projection(self) -> tuple[nn.Module, list[int]]:
        """`linear_qkv`, and its rows in each query group: of queries, of gates if there are any, of keys, of values."""
        head, heads = self.config.kv_channels, self.config.num_attention_heads // self.config.num_query_groups
        queries = [heads * head] * (2 if self.config.attention_output_gate else 1)
        return self.linear_qkv, [*queries, head, head]
