"""Settings of a run's objective."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

PREFERENCE, RETRIEVAL = ("dpo", "kto"), ("embedding", "reranker")
_PREFERENCE_SETTINGS = ("beta", "loss_type", "reference_logps", "reference_model")
# The settings that each kind of objective reads.
_SETTINGS: dict[str, tuple[str, ...]] = {
    "sft": (),
    "dpo": (*_PREFERENCE_SETTINGS, "label_smoothing", "rpo_alpha"),
    "kto": (*_PREFERENCE_SETTINGS, "desirable_weight", "undesirable_weight"),
    "embedding": ("temperature", "matryoshka_dims", "false_negative_margin", "max_documents"),
    "reranker": (),
}
LOSS_TYPES: dict[str, tuple[str, ...]] = {"dpo": ("sigmoid", "robust", "ipo"), "kto": ("kto", "apo_zero_unpaired")}
# Names of the logged metrics: those of TRL for preference data.
_METRICS: dict[str, tuple[str, ...]] = {
    "sft": (),
    "dpo": ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen",
            "logps/rejected"),
    "kto": ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl"),
    "embedding": ("accuracy", "similarity/positive", "similarity/negative"),
    "reranker": ("accuracy", "score/positive", "score/negative"),
}  # fmt: skip
UNITS = {"dpo": "pairs", "kto": "answers", "embedding": "queries", "reranker": "documents"}


@dataclass(kw_only=True)
class ObjectiveConfig:
    """What a run trains its model to do (docs/objectives.md).

    Attributes:
        kind: "sft" trains on the answers of conversations; "dpo" (direct preference optimization) prefers the chosen to
            the rejected answers of pairs; "kto" prefers desirable to undesirable answers; "embedding" brings the
            embeddings of queries and their documents together (InfoNCE); "reranker" scores documents for queries.
        loss_type: for "dpo": "sigmoid", "robust" (against wrong labels) or "ipo"; for "kto": "kto" or
            "apo_zero_unpaired". None: the first of them.
        beta: "dpo" and "kto": how much the model is kept near the reference model; for "ipo" the regularization
            parameter tau.
        label_smoothing: "dpo": probability that chosen and rejected answers are swapped in the data, from 0 to below
            0.5. Not for "ipo".
        rpo_alpha: "dpo": weight of the mean loss of the chosen answer's tokens, which is added to the loss of a pair;
            None for no such term.
        desirable_weight: "kto": weight of desirable answers.
        undesirable_weight: "kto": weight of undesirable answers.
        reference_logps: "dpo" and "kto": folder with log-probabilities of the answers under the reference model,
            written by `qwen3vl data score`. None: the reference is the model without its adapters.
        reference_model: "dpo" and "kto": weights of the reference model that computed `reference_logps`; None for the
            initial weights of the run, `checkpoint.pretrained_checkpoint`.
        temperature: "embedding": similarities are divided by this number.
        matryoshka_dims: "embedding": sizes of shorter embeddings, such as [256, 1024], which are the first numbers of
            the full one. The loss is the mean over these and the full embedding. None: only the full embedding.
        false_negative_margin: "embedding": leave out documents whose similarity to the query exceeds that of the
            positive document by more than this number. None: leave out none.
        max_documents: "embedding": maximum number of documents of a row, including queries. Each data-parallel rank
            sends this many embeddings to the others; those that are missing are zero.
    """

    kind: Literal["sft", "dpo", "kto", "embedding", "reranker"] = "sft"
    loss_type: str | None = None
    beta: float = 0.1
    label_smoothing: float = 0.0
    rpo_alpha: float | None = None
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reference_logps: str | None = None
    reference_model: str | None = None
    temperature: float = 0.02
    matryoshka_dims: list[int] | None = None
    false_negative_margin: float | None = None
    max_documents: int = 256

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss compares the model with a reference model."""
        return self.kind in PREFERENCE

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the names of the logged metrics."""
        return _METRICS[self.kind]

    @property
    def unit(self) -> str:
        """Return what the loss is averaged over, in the plural."""
        return UNITS[self.kind]

    @property
    def formula(self) -> str:
        """Return `loss_type`, or its default for the kind."""
        return self.loss_type or LOSS_TYPES[self.kind][0]

    def used(self) -> dict[str, Any]:
        """Return the settings that the kind reads, by name."""
        given = {name: getattr(self, name) for name in _SETTINGS[self.kind]}
        return given | ({"loss_type": self.formula} if "loss_type" in given else {})

    def ignored(self) -> list[str]:
        """Return the names of settings that are not the default and that the kind does not read."""
        read = ("kind", *_SETTINGS[self.kind])
        return [f.name for f in fields(self) if f.name not in read and getattr(self, f.name) != f.default]


def objective_of(cfg: Any) -> ObjectiveConfig | None:
    """Return the settings of a run's objective; None for supervised training."""
    objective = getattr(cfg, "objective", None)  # Megatron-Bridge's own configuration has none
    return objective if objective is not None and objective.kind != "sft" else None
