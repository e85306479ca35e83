"""Models to be written: the files of their weights, and the files around them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

from qwen3vl_bridge.checkpoint.conversion_plan import Plan
from qwen3vl_bridge.checkpoint.formats import megatron
from qwen3vl_bridge.checkpoint.formats.dcp_metadata import read_metadata
from qwen3vl_bridge.checkpoint.formats.dcp_reader import DcpTensors
from qwen3vl_bridge.checkpoint.formats.dcp_writer import DcpLayout
from qwen3vl_bridge.checkpoint.formats.huggingface import (
    HUGGINGFACE,
    HFWeights,
    copy_side_files,
    one_file,
    shards,
    write_index,
)
from qwen3vl_bridge.checkpoint.formats.layouts import TRANSFORMER_ENGINE, FsdpDtensor, HuggingFace, TorchDist
from qwen3vl_bridge.checkpoint.formats.planned_files import OutputFile
from qwen3vl_bridge.checkpoint.formats.tensors import main_dtype
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig
from qwen3vl_bridge.checkpoint.topology import Topology, holders
from qwen3vl_bridge.io.files import CheckpointError
from qwen3vl_bridge.weights.rows import ExpertLayout, WeightRow

# Modules for which megatron-core stores a state in addition to their weights, here always None, and asks for it on
# loading. The first do so in either layer spec, the others are Transformer Engine's.
_LINEAR = re.compile(r"linear_(qkv|proj|fc1|fc2)|(in|out|eh)_proj")
_NORM = re.compile(r"(\w+_layernorm|patch_norm|out_norm|enorm|hnorm)")


@dataclass
class HFTarget:
    """A Hugging Face model to be written, as an `Output` of a conversion once it is laid out."""

    config: ModelConfig
    experts: ExpertLayout
    settings: dict[str, Any]  # for the manifest
    max_shard_bytes: int  # of a file of weights
    float32_as: str | None = None  # dtype of the parameters that the model keeps in float32; None for that of others
    inner: ClassVar[str] = "."

    def __post_init__(self) -> None:
        if self.max_shard_bytes < 1:
            raise CheckpointError(f"max_shard_bytes is {self.max_shard_bytes}, expected 1 or more")
        self.settings = {"format": HUGGINGFACE} | self.settings
        self.layout = HuggingFace(self.config.dimensions)

    def lay_out(self, plan: Plan) -> None:
        """Plan the files of a plan's tensors."""
        self._shards = shards(plan.tasks, self.max_shard_bytes)
        self.files = [one_file(name, tasks) for name, tasks in self._shards.items()]

    def finish(self, root: Path, digest: str) -> None:
        """Write the files of a model's folder other than weights."""
        write_index(root, self._shards)
        copy_side_files(self.config.folder, root)
        self.config.write(root, main_dtype(task.target for tasks in self._shards.values() for task in tasks))

    def open(self, root: Path) -> HFWeights:
        """The written weights, read again."""
        return HFWeights(root)


@dataclass
class MegatronTarget:
    """A Megatron checkpoint to be written, as an `Output` of a conversion once it is laid out."""

    ckpt_format: str  # "fsdp_dtensor" or "torch_dist"
    naming: str  # layer spec of its names, "transformer_engine" or "local"
    topology: Topology  # parallel sizes for which it is laid out
    config: ModelConfig
    hf_model: str  # source of the configuration
    experts: ExpertLayout  # in the Hugging Face model; an export uses the same
    vocab_divisor: int | None = None  # the padding's divisor per tensor-parallel rank, for the vocabulary's rows
    float32_of_hf: str | None = None  # dtype in the Hugging Face model of the parameters that are kept in float32
    inner: ClassVar[str] = megatron.iteration_folder(Path(), 0).name
    float32_as: ClassVar = "float32"  # as in the running model

    def __post_init__(self) -> None:
        """Raise a CheckpointError if the options do not fit each other or the model."""
        self.dimensions, divisor = self.config.dimensions, self.vocab_divisor
        vocabulary = self.dimensions["vocab"]
        if self.ckpt_format not in megatron.FORMATS:
            raise CheckpointError(f"ckpt_format is {self.ckpt_format!r}, expected {' or '.join(megatron.FORMATS)}")
        if divisor is not None and not 1 <= divisor <= vocabulary:
            raise CheckpointError(
                f"--make-vocab-size-divisible-by is {divisor}, expected 1 to {vocabulary}, the vocabulary"
            )
        if divisor is not None:
            step = divisor * self.topology.tp
            self.dimensions = self.dimensions.with_vocab(-(-vocabulary // step) * step)
        self.topology.check(self.dimensions, stages=self.ckpt_format == megatron.TORCH_DIST)
        named = FsdpDtensor(self.dimensions, self.naming)  # refuses an unknown naming
        self.layout = TorchDist.of(self.dimensions) if self.ckpt_format == megatron.TORCH_DIST else named

    @property
    def settings(self) -> dict[str, Any]:
        """Values for the manifest."""
        return {
            "format": self.ckpt_format,
            "layer_spec": self.naming,
            "hf_model": self.hf_model,
            "expert_layout": self.experts.name if self.dimensions.indices["moe_layers"] else None,
            "float32_as": self.float32_of_hf,
            "vocab_divisor": self.vocab_divisor,
            "topology": asdict(self.topology),
        }

    @property
    def files(self) -> list[OutputFile]:
        """The files with tensors."""
        return self.dcp.files

    def lay_out(self, plan: Plan) -> None:
        """Plan all files with tensors, and the byte items that a loader needs."""
        self.dcp = DcpLayout()
        held, chunks = holders(self.config.rows(), self.layout, self.topology), []
        for task in plan.tasks:
            name, position = task.target.name, 0
            spec = replace(task.target, name=megatron.key_of(name, self.ckpt_format))
            for owner, offsets, sizes in self.topology.chunks(spec, task.leading, held.get(name)):
                chunks.append((owner, spec, offsets, sizes, task.segments, position))
                position += math.prod(sizes)
        # What a rank reads is stored together, in few files.
        for _, *chunk in sorted(chunks, key=itemgetter(0)):
            self.dcp.add_chunk(*chunk)
        items = megatron.BYTE_ITEMS
        if isinstance(self.layout, TorchDist):
            with_norms = self.naming == TRANSFORMER_ENGINE
            states = _extra_states(self.config.rows(), self.layout, with_norms=with_norms)
            items = dict([megatron.COMMON_STATE]) | {key: [None] for key in states}
        for key, value in items.items():
            self.dcp.add_bytes(key, value)

    def finish(self, root: Path, digest: str) -> None:
        """Write all files except those with tensors and the manifest."""
        folder, config = megatron.iteration_folder(root, 0), self.config
        self.dcp.write_metadata(folder, megatron.path_of, digest)
        copy_side_files(config.folder, folder / megatron.HF_FILES)
        config.write(folder / megatron.HF_FILES)
        contents = megatron.run_config(
            config.raw,
            self.hf_model,
            self.ckpt_format,
            provider=config.family.provider,
            vocabulary=config.vocabulary,
            rows=self.dimensions["vocab"],
            vocab_divisor=self.vocab_divisor,
        )
        megatron.write_run_files(root, folder, contents, self.ckpt_format)

    def open(self, root: Path) -> DcpTensors:
        """The written tensors, read again; a CheckpointError if they differ from the layout."""
        metadata = read_metadata(megatron.iteration_folder(root, 0))
        if set(metadata.byte_items) != set(self.dcp.byte_items):
            raise CheckpointError(f"{metadata.folder}: the metadata differ from what was to be written")
        return DcpTensors(metadata, megatron.model_keys(metadata, self.ckpt_format))


def _extra_states(rows: Collection[WeightRow], layout: TorchDist, *, with_norms: bool) -> Iterable[str]:
    """Keys of the states that megatron-core stores in addition to weights.

    Source: megatron-core 0.19, `make_sharded_tensors_for_checkpoint` and the modules' own `_extra_state`.
    """
    keys: dict[str, None] = {}
    for row in rows:
        name, stacked = layout.name(row)
        module = name.rpartition(".")[0]
        last = module.rpartition(".")[2]
        if _LINEAR.fullmatch(last) or (with_norms and _NORM.fullmatch(last)):
            numbers, counts = zip(*stacked or ((0, 1),), strict=True)
            shard = "_".join(".".join(map(str, values)) for values in (numbers, counts))
            keys[f"{module}._extra_state/shard_{shard}"] = None
    return keys
