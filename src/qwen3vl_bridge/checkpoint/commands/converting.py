"""The common part of import, export and reformatting: converting a model from one format to another."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from qwen3vl_bridge.checkpoint.engine.planned_conversion import Conversion, Output
from qwen3vl_bridge.checkpoint.formats.layouts import TensorLayout
from qwen3vl_bridge.checkpoint.planning.plan import Plan, make_plan
from qwen3vl_bridge.checkpoint.stored_models.stored_model import StoredModel
from qwen3vl_bridge.io.paths import place
from qwen3vl_bridge.weights.rows import ExpertLayout


class Target(Protocol):
    """The model to be written, in one format.

    Attributes:
        layout: how the format lays out the weights.
        experts: format of its experts, or, for Megatron's formats, that of a later export.
        float32_as: dtype of the parameters that the model keeps in float32; None for the same as of others.
    """

    @property
    def layout(self) -> TensorLayout: ...  # noqa: D102
    @property
    def experts(self) -> ExpertLayout: ...  # noqa: D102
    @property
    def float32_as(self) -> str | None: ...  # noqa: D102

    def output(self, plan: Plan) -> Output:
        """The files of the result."""
        ...


def convert(
    name: str,
    origin: str | Path,
    path: str | Path,
    source: StoredModel,
    target: Target,
    *,
    torch_dtype: str | None = None,
    drop_vocab_padding: bool = False,
) -> Conversion:
    """Plan a conversion.

    Args:
        name: name of the command.
        origin: the source, in the user's words.
        path: path of the result.
        source: the model that is read.
        target: the model that is written.
        torch_dtype: to cast the weights to, except those of `target.float32_as`; None to keep their dtypes.
        drop_vocab_padding: whether rows beyond the vocabulary may be left out if they are not zero.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of another shape, or rows would be lost.
    """
    rows, where = source.config.rows(target.experts), str(source.folder)
    dtypes = dict(dtype=torch_dtype, float32_as=target.float32_as)
    plan = make_plan(rows, source.layout, target.layout, source.tensors.specs, where=where, **dtypes)
    padding = source.check_padding(source.config.dimensions["vocab"], drop=drop_vocab_padding)
    folders, notes = (source.folder, source.config.folder), [*padding, *source.notes]
    return Conversion(name, str(origin), place(path), plan, source.tensors, folders, target.output(plan), notes)
