"""Choice of the next token from logits: the most likely one, or a random one after the filters of transformers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.inference.sampling.torch_sampling import TorchSampling
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Settings of `generate`, with the names, the meaning and the order of transformers' logits processors.

    Attributes:
        do_sample: whether to draw tokens at random; False chooses the most likely token.
        temperature: divides the logits. Above 0.
        top_k: keep only the k most likely tokens; 0 keeps all.
        top_p: of these, keep the fewest most likely tokens whose probabilities sum to at least `top_p`; 1 keeps all.
        seed: seed of the drawn tokens. None for 0.

    Raises:
        ValueError: a setting is outside its range, or has no effect because `do_sample` is False.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        names = ("temperature", "top_k", "top_p", "seed")
        changed = [name for name in names if getattr(self, name) != getattr(Sampling, name)]
        if changed and not self.do_sample:
            have = "have" if len(changed) > 1 else "has"
            raise ValueError(
                f"{' and '.join(changed)} {have} an effect only with do_sample=True, but it is False: set it to True"
            )
        if not self.temperature > 0:
            raise ValueError(
                f"temperature is {self.temperature}, expected more than 0; for greedy decoding set do_sample=False"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}, expected 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, expected more than 0 and at most 1")

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Return one token id per row, [b], for logits [b, vocabulary]."""
        if not self.do_sample:
            return logits.argmax(-1)
        return torch.multinomial(self.filter(logits).softmax(-1), 1, generator=generator)[:, 0]

    def filter(self, logits: Tensor) -> Tensor:
        """Return logits [b, vocabulary] float32 divided by the temperature, minus infinity for excluded tokens."""
        top_k = min(self.top_k, logits.size(-1))
        logits = TorchSampling.filter_logits(logits.float(), self.temperature, top_k, 0.0)
        # megatron-core applies one of the filters in a call, and reads 0 as "all tokens".
        return logits if self.top_p == 1 else TorchSampling.filter_logits(logits, 1.0, 0, self.top_p)
