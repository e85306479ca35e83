"""Data-parallel replicas of two modules on ranks of their own, and who encodes pictures for whom.

What lives here: the split as plain numbers, for training and the planner. Standard library only. What may
not: settings (`models/common/settings/encoder_parallel.py`), ranks within a replica.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Replicas:
    """Those of both modules, one number a multiple of the other; paired as megatron-core's bridge pairs them.

    Attributes:
        vision: of the tower.
        language: of the language model.
    """

    vision: int
    language: int

    def check(self, where: str = "") -> None:
        """Refuse numbers that cannot be paired.

        Args:
            where: they come from, for the message.

        Raises:
            ValueError: neither is a multiple of the other.
        """
        few, many = sorted((self.vision, self.language))
        if many % few:
            raise ValueError(
                f"the vision tower has {self.vision} data-parallel replicas and the language model {self.language}, "
                f"expected one number to be a multiple of the other{where}"
            )

    @property
    def encoders(self) -> int:
        """Replicas of the tower that share the pictures of one microbatch."""
        return max(self.vision // self.language, 1)

    @property
    def language_per_encoder(self) -> int:
        """Language replicas that one of the tower's encodes for."""
        return max(self.language // self.vision, 1)

    @property
    def ratio(self) -> int | None:
        """The tower's for each of the language model's, as Megatron-Bridge has it; None below 1."""
        return self.encoders if self.vision >= self.language else None

    def language_replicas_of(self, vision: int) -> range:
        """The language replicas that a replica of the tower encodes for."""
        first = vision // self.encoders * self.language_per_encoder
        return range(first, first + self.language_per_encoder)

    def share_of(self, vision: int) -> int:
        """Which of the shares of a microbatch's pictures a replica of the tower encodes."""
        return vision % self.encoders
