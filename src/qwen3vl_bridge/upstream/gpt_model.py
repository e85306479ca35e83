"""The output computation of megatron-core's GPT model, after the decoder, as a public method to override.

Overridden: `GPTModel._postprocess`. Callers and the combined schedule call it with their own arguments, so a default
`output_processor` and our loss of multi-token prediction can be added nowhere else. Delete this module when GPTModel
has a default `output_processor`, or a method for losses of its hidden states.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import Tensor


class OutputGPTModel(GPTModel):
    """GPTModel with a public method for its output, which a subclass can override."""

    def compute_output(self, hidden_states: Tensor, **arguments: Any) -> Any:
        """Return the logits of hidden states after the final norm, or losses [rows, tokens] if `labels` are given."""
        return super()._postprocess(hidden_states, **arguments)

    def _postprocess(self, hidden_states: Tensor, **arguments: Any) -> Any:
        return self.compute_output(hidden_states, **arguments)
