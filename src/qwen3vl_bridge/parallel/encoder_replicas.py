"""Data-parallel replicas of the two dist-train modules, and which vision replica encodes for which language replica.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Replicas:
    """Numbers of replicas of both modules, one a multiple of the other; paired as in megatron-core's bridge.

    Attributes:
        vision: replicas of the vision tower.
        language: replicas of the language model.
    """

    vision: int
    language: int

    def check(self, where: str = "") -> None:
        """Refuse numbers that cannot be paired.

        Args:
            where: source of the numbers, appended to the message.

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
        """Number of vision replicas that divide the images of one microbatch."""
        return max(self.vision // self.language, 1)

    @property
    def language_per_encoder(self) -> int:
        """Number of language replicas that one vision replica serves."""
        return max(self.language // self.vision, 1)

    @property
    def ratio(self) -> int | None:
        """Vision replicas per language replica, as in Megatron-Bridge's setting; None below 1."""
        return self.encoders if self.vision >= self.language else None

    def language_replicas_of(self, vision: int) -> range:
        """The language replicas that a vision replica encodes for."""
        first = vision // self.encoders * self.language_per_encoder
        return range(first, first + self.language_per_encoder)

    def share_of(self, vision: int) -> int:
        """Index of the part of a microbatch's images that a vision replica encodes."""
        return vision % self.encoders
