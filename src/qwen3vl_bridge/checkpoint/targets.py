"""Models to be written: the files of their weights, and the files around them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.conversion_plan import Plan
from qwen3vl_bridge.checkpoint.formats import megatron
from qwen3vl_bridge.checkpoint.formats.dcp_metadata import read_metadata
from qwen3vl_bridge.checkpoint.formats.dcp_reader import DcpTensors
from qwen3vl_bridge.checkpoint.formats.dcp_writer import DcpLayout
from qwen3vl_bridge.checkpoint.formats.huggingface import (
    HUGGINGFACE,
    HFWeights,
    copy_side_files,
    shard_files,
    write_index,
)
from qwen3vl_bridge.checkpoint.formats.layouts import TRANSFORMER_ENGINE, FsdpDtensor, TorchDist
from qwen3vl_bridge.checkpoint.formats.tensors import TensorSpec, main_dtype
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig
from qwen3vl_bridge.checkpoint.topology import Topology, holders
from qwen3vl_bridge.io.files import CheckpointError
from qwen3vl_bridge.weights.rows import Dimensions, ExpertLayout, WeightRow

# Modules for which megatron-core stores a state in addition to their weights, here always None, and asks for it on
# loading. The first do so in either layer spec, the others are Transformer Engine's.
_LINEAR = re.compile(r"linear_(qkv|proj|fc1|fc2)|(in|out|eh)_proj")
_NORM = re.compile(r"(\w+_layernorm|patch_norm|out_norm|enorm|hnorm)")


class HFOutput:
    """The files of a Hugging Face model to be written, as an `Output` of a conversion."""

    inner = "."

    def __init__(self, plan: Plan, config: ModelConfig, settings: dict[str, Any], max_shard_bytes: int) -> None:
        """Lay out a model; `settings` are values for its manifest.

        Raises:
            CheckpointError: a maximum size that is not positive.
        """
        if max_shard_bytes < 1:
            raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}, expected 1 or more")
        self._plan, self._config, self._max_shard_bytes = plan, config, max_shard_bytes
        self.files = shard_files(plan.tasks, max_shard_bytes)
        self.settings = {"format": HUGGINGFACE} | settings

    def finish(self, root: Path, digest: str) -> None:
        """Write the files of a model's folder other than weights."""
        write_index(root, self._plan.tasks, self._max_shard_bytes)
        copy_side_files(self._config.folder, root)
        self._config.write(root, main_dtype(self._plan.specs.values()))

    def open(self, root: Path) -> HFWeights:
        """The written weights, read again."""
        return HFWeights(root)


@dataclass(frozen=True)
class MegatronTarget:
    """A Megatron checkpoint to be written.

    Attributes:
        ckpt_format: "fsdp_dtensor" or "torch_dist".
        naming: layer spec of its names, "transformer_engine" or "local".
        topology: parallel sizes for which it is laid out.
        config: the model's configuration.
        hf_model: source of the configuration.
        experts: format of experts in the Hugging Face model; an export uses the same.
        vocab_divisor: the padding's divisor per tensor-parallel rank, for the vocabulary's rows.
        float32_of_hf: dtype in the Hugging Face model of the parameters that the model keeps in float32.
    """

    ckpt_format: str
    naming: str
    topology: Topology
    config: ModelConfig
    hf_model: str
    experts: ExpertLayout
    vocab_divisor: int | None = None
    float32_of_hf: str | None = None

    @property
    def dimensions(self) -> Dimensions:
        """The model's, with the padding of its vocabulary."""
        dimensions = self.config.dimensions
        if self.vocab_divisor is None:
            return dimensions
        step = self.vocab_divisor * self.topology.tp
        return dimensions.with_vocab(-(-dimensions["vocab"] // step) * step)

    @property
    def layout(self) -> FsdpDtensor | TorchDist:
        """How its format lays out the weights."""
        if self.ckpt_format == megatron.TORCH_DIST:
            return TorchDist.of(self.dimensions)
        return FsdpDtensor(self.dimensions, self.naming)

    def check(self) -> None:
        """Raise a CheckpointError if the options do not fit each other or the model."""
        if self.ckpt_format not in megatron.FORMATS:
            raise CheckpointError(f"ckpt_format is {self.ckpt_format!r}, expected {' or '.join(megatron.FORMATS)}")
        FsdpDtensor(self.config.dimensions, self.naming)  # refuses an unknown naming
        vocabulary = self.config.dimensions["vocab"]
        if self.vocab_divisor is not None and not 1 <= self.vocab_divisor <= vocabulary:
            raise CheckpointError(
                f"--make-vocab-size-divisible-by is {self.vocab_divisor}, expected 1 to {vocabulary}, the vocabulary"
            )
        self.topology.check_numbers()  # before one of them is a divisor
        self.topology.check(self.dimensions, stages=self.ckpt_format == megatron.TORCH_DIST)

    def laid_out(self, plan: Plan) -> DcpLayout:
        """All files with tensors, and the byte items that a loader needs."""
        dcp, layout = DcpLayout(), self.layout
        held, chunks = holders(self.config.rows(), layout, self.topology), []
        for task in plan.tasks:
            key = megatron.key_of(task.target.name, self.ckpt_format)
            spec, position = TensorSpec(key, task.target.dtype, task.target.shape), 0
            for owner, offsets, sizes in self.topology.chunks(spec, task.leading, held.get(task.target.name)):
                chunks.append((owner, spec, offsets, sizes, task.segments, position))
                position += math.prod(sizes)
        # What a rank reads is stored together, in few files.
        for _, *chunk in sorted(chunks, key=itemgetter(0)):
            dcp.add_chunk(*chunk)
        if isinstance(layout, FsdpDtensor):
            for key, value in megatron.BYTE_ITEMS.items():
                dcp.add_bytes(key, value)
            return dcp
        dcp.add_bytes(*megatron.COMMON_STATE)
        for key in _extra_states(self.config.rows(), layout, with_norms=self.naming == TRANSFORMER_ENGINE):
            dcp.add_bytes(key, [None])
        return dcp


class MegatronOutput:
    """The files of a Megatron checkpoint to be written, as an `Output` of a conversion."""

    inner = megatron.iteration_folder(Path(), 0).name

    def __init__(self, plan: Plan, target: MegatronTarget) -> None:
        self._names, self._target = [task.target.name for task in plan.tasks], target
        self._dcp = target.laid_out(plan)
        self.files = self._dcp.files
        self.settings: dict[str, Any] = {
            "format": target.ckpt_format,
            "layer_spec": target.naming,
            "hf_model": target.hf_model,
            "expert_layout": target.experts.name if target.dimensions.indices["moe_layers"] else None,
            "float32_as": target.float32_of_hf,
            "vocab_divisor": target.vocab_divisor,
            "topology": asdict(target.topology),
        }

    def finish(self, root: Path, digest: str) -> None:
        """Write all files except those with tensors and the manifest."""
        target, folder = self._target, megatron.iteration_folder(root, 0)
        config, ckpt_format = target.config, target.ckpt_format
        paths = {megatron.key_of(name, ckpt_format): megatron.path_of(name, ckpt_format) for name in self._names}
        self._dcp.write_metadata(folder, paths, digest)
        copy_side_files(config.folder, folder / megatron.HF_FILES)
        config.write(folder / megatron.HF_FILES)
        contents = megatron.run_config(
            config.raw,
            target.hf_model,
            ckpt_format,
            provider=config.family.provider,
            vocabulary=config.vocabulary,
            rows=target.dimensions["vocab"],
            vocab_divisor=target.vocab_divisor,
        )
        megatron.write_run_files(root, folder, contents, ckpt_format)

    def open(self, root: Path) -> DcpTensors:
        """The written tensors, read again; a CheckpointError if they differ from the layout."""
        metadata = read_metadata(megatron.iteration_folder(root, 0))
        if set(metadata.byte_items) != set(self._dcp.byte_items):
            raise CheckpointError(f"{metadata.folder}: the metadata differ from what was to be written")
        return DcpTensors(metadata, megatron.model_keys(metadata, self._target.ckpt_format))


def _extra_states(rows: Collection[WeightRow], layout: TorchDist, *, with_norms: bool) -> Iterator[str]:
    """Keys of the states that megatron-core stores in addition to weights.

    Source: megatron-core 0.19, `make_sharded_tensors_for_checkpoint` and the modules' own `_extra_state`.
    """
    seen: set[str] = set()
    for row in rows:
        name, stacked = layout.name(row)
        module = name.rpartition(".")[0]
        last = module.rpartition(".")[2]
        if not (_LINEAR.fullmatch(last) or (with_norms and _NORM.fullmatch(last))):
            continue
        numbers, counts = zip(*stacked or ((0, 1),), strict=True)
        shard = "_".join(".".join(map(str, values)) for values in (numbers, counts))
        key = f"{module}._extra_state/shard_{shard}"
        if key not in seen:
            seen.add(key)
            yield key
