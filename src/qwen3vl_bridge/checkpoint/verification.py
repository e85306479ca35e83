"""Verify: whether a Megatron checkpoint equals its source, bit for bit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.comparison import Difference, checksums, differences
from qwen3vl_bridge.checkpoint.conversion import tasks_of
from qwen3vl_bridge.checkpoint.conversion_plan import Task, make_plan
from qwen3vl_bridge.checkpoint.formats.planned_files import share
from qwen3vl_bridge.checkpoint.formats.tensors import Segments, Slice, TensorSource
from qwen3vl_bridge.checkpoint.processes import Progress, Ranks
from qwen3vl_bridge.checkpoint.stored_models import MANIFEST, StoredModel, open_model, open_stored
from qwen3vl_bridge.io.files import CheckpointError
from qwen3vl_bridge.weights.rows import WeightRow


@dataclass(frozen=True)
class VerifyReport:
    """A comparison of a Megatron checkpoint with another one, with a Hugging Face model or with its checksums.

    Attributes:
        tensors: number of tensors compared.
        nbytes: number of their bytes, as the checkpoint stores them.
        differences: the tensors that differ; empty if none does.
        notes: information for the user.
    """

    tensors: int
    nbytes: int
    differences: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether no tensor differs."""
        return not self.differences

    def as_dict(self) -> dict[str, Any]:
        """The report as values for JSON."""
        return {"same": self.same, **asdict(self)}


def verify_checkpoint(
    hf_model: str | Path,
    megatron_path: str | Path,
    *,
    iteration: int | None = None,
    drop_vocab_padding: bool = False,
    progress: bool = False,
    ranks: Ranks | None = None,
) -> VerifyReport:
    """Compare a checkpoint of either format with the model from which it was imported, or to which it was exported.

    If the checkpoint has another dtype, the model's weights are cast to it as in an import. So a checkpoint in float32
    that was exported to bfloat16 counts as different wherever that export rounded. Weights that one side stores minus
    one count as equal if either side is the other, rounded once.

    Args:
        hf_model: the model's folder, or a hub id.
        megatron_path: the checkpoint's root folder or an iteration's folder.
        iteration: the iteration; None for the latest.
        drop_vocab_padding: whether the checkpoint's rows beyond the vocabulary may be other than zero; otherwise they
            are an error.
        progress: whether to show progress on standard error.
        ranks: the processes that share the work; each of them makes the same call.

    Raises:
        CheckpointError: one of them is damaged, they have different tensors, or they are of two models.
    """
    model = open_model(hf_model, trust_remote_code=True)  # no files are copied
    stored = open_stored(megatron_path, iteration, model.folder, trust_remote_code=True)
    return _compared(stored, model, model.rows, drop_vocab_padding, progress, ranks or Ranks())


def verify_reformatted(
    megatron_path: str | Path,
    new_path: str | Path,
    *,
    hf_model: str | Path | None = None,
    iteration: int | None = None,
    drop_vocab_padding: bool = False,
    progress: bool = False,
    ranks: Ranks | None = None,
) -> VerifyReport:
    """Compare a checkpoint with another that was made from it, in either format; differences are by the other's names.

    Arguments are those of `verify_checkpoint`, except:

    Args:
        new_path: the other's root folder or an iteration's folder.
        hf_model: folder or hub id of a model whose configuration to use; None for the one in the first.
        iteration: iteration of the first one; None for the latest.
        drop_vocab_padding: whether rows of the first one's vocabulary that the other lacks may be other than zero;
            otherwise they are an error.
    """
    # No files are copied, so there is nothing to trust.
    source = open_stored(megatron_path, iteration, hf_model, trust_remote_code=True).with_padding()
    target = open_stored(new_path, None, hf_model or source.config.folder, trust_remote_code=True).with_padding()
    return _compared(source, target, source.config.rows(), drop_vocab_padding, progress, ranks or Ranks())


def _compared(
    source: StoredModel, target: StoredModel, rows: list[WeightRow], drop: bool, progress: bool, ranks: Ranks
) -> VerifyReport:
    """Compare the tensors of a target with what a conversion of the source makes of them."""
    specs = source.tensors.specs
    plan = make_plan(rows, source.layout, target.layout, specs, where=str(source.folder))
    # Both sides must be complete before a comparison means anything.
    make_plan(rows, target.layout, source.layout, target.tensors.specs, where=str(target.folder), dtype="float32")
    # If the target has more rows than the source, the plan has zeros to compare them with.
    padding = source.check_padding(target.config.dimensions["vocab"], drop=drop)
    tasks = tasks_of(plan, ranks)

    def compare() -> list[Difference]:
        nbytes = sum(task.target.nbytes for task in tasks)
        with Progress("verify", nbytes, shown=progress and ranks.first) as meter:
            return list(differences(tasks, source.tensors, target.tensors, meter))

    found = [entry for part in ranks.all_gather(compare) for entry in part]
    # Targets that are a source tensor plus a number are the same if the inverse is exact.
    inverse: dict[str, Task] = {}
    for task in plan.tasks:
        match list(task.segments):
            case [Slice(name, 0, length, plus)] if plus and length == specs[name].numel:
                segments = Segments([Slice(task.target.name, 0, length, -plus)])
                inverse[task.target.name] = Task(specs[name], segments)
    meter = Progress("verify", 0, shown=False)
    different = [
        entry
        for entry in found
        if entry.name not in inverse or any(differences([inverse[entry.name]], target.tensors, source.tensors, meter))
    ]
    return VerifyReport(
        len(plan.tasks), _nbytes(source.tensors), tuple(different), (*padding, *source.notes, *target.notes)
    )


def verify_checksums(
    megatron_path: str | Path, *, iteration: int | None = None, progress: bool = False, ranks: Ranks | None = None
) -> VerifyReport:
    """Compare a checkpoint with the checksums in its own manifest; arguments are those of `verify_checkpoint`.

    Raises:
        CheckpointError: it is damaged, or was written without checksums.
    """
    stored, ranks = open_stored(megatron_path, iteration), ranks or Ranks()
    specs, expected = stored.tensors.specs, stored.manifest.get("sha256")
    if not isinstance(expected, dict) or expected.keys() != specs.keys():
        found = "no checksums" if not expected else "checksums of other tensors"
        raise CheckpointError(
            f"{stored.folder / MANIFEST} holds {found}, expected those of all {len(specs)} tensors, as "
            "a conversion with --checksums writes them; or give --hf-model to compare the checkpoint with its source"
        )
    mine = share(list(specs), [spec.nbytes for spec in specs.values()], ranks.rank, ranks.size)

    def check() -> dict[str, str]:
        nbytes = sum(specs[name].nbytes for name in mine)
        with Progress("checksums", nbytes, shown=progress and ranks.first) as meter:
            return checksums(mine, stored.tensors, meter)

    found = {name: value for part in ranks.all_gather(check) for name, value in part.items()}
    different = (Difference(name, None, None, specs[name].numel) for name in specs if found[name] != expected[name])
    return VerifyReport(len(specs), _nbytes(stored.tensors), tuple(different))


def _nbytes(tensors: TensorSource) -> int:
    return sum(spec.nbytes for spec in tensors.specs.values())
