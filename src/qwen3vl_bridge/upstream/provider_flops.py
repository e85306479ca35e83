"""The FLOPs of a training step, for the TFLOP/s that Megatron-Bridge logs.

Defined: `_get_num_floating_point_operations_with_runtime_stats`, a method of a provider that Megatron-Bridge calls by
this private name. Without it Megatron-Bridge uses a formula that counts neither a vision tower nor segments of packed
rows. Delete this module when the method has a public name.
"""

from __future__ import annotations

from typing import Any


class CountsOperations:
    """Mixin for a provider that counts the FLOPs of its model."""

    def operations_of_step(self, **statistics: Any) -> float:
        """Return the FLOPs of a training step, given Megatron-Bridge's statistics of the global batch."""
        raise NotImplementedError

    def _get_num_floating_point_operations_with_runtime_stats(self, **statistics: Any) -> float:
        return self.operations_of_step(**statistics)
