"""A model on disk: its configuration, format, weights and manifest, opened and checked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.comparison import difference
from qwen3vl_bridge.checkpoint.conversion_plan import (
    check_tensors,
    check_vocab_padding,
    drop_unexpected,
    naming_of,
    tensors_of,
)
from qwen3vl_bridge.checkpoint.formats import megatron
from qwen3vl_bridge.checkpoint.formats.dcp_metadata import read_metadata
from qwen3vl_bridge.checkpoint.formats.dcp_reader import DcpTensors
from qwen3vl_bridge.checkpoint.formats.huggingface import HUGGINGFACE, HFWeights, contents_of, find_model, has_weights
from qwen3vl_bridge.checkpoint.formats.layouts import FsdpDtensor, HuggingFace, TensorLayout, TorchDist
from qwen3vl_bridge.checkpoint.formats.tensors import SegmentReader, Shape, TensorSource, main_dtype
from qwen3vl_bridge.io.files import CheckpointError, expanded, read_object, write_object
from qwen3vl_bridge.registry import family_of, family_of_provider
from qwen3vl_bridge.weights.rows import MARK, Dimensions, ExpertLayout, WeightRow, expand, expert_layout_of

MANIFEST = "qwen3vl_bridge.json"
TOOL = "qwen3vl_bridge"


def tool() -> dict[str, str]:
    """Name and version of the tool that wrote a result, for its manifest."""
    versions = {}
    for name in ("qwen3vl-bridge", "torch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return {"tool": TOOL, "version": versions["qwen3vl-bridge"], "torch": versions["torch"]}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a result; empty if it does not exist."""
    path = folder / MANIFEST
    return read_object(path) if path.is_file() else {}


class ModelConfig:
    """A model's configuration: `raw` is its `config.json`, and `vocabulary` its number of tokens, whatever the rows in
    its `dimensions` are; `tied` is whether the output layer is the embedding.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read `folder/config.json`; a CheckpointError if it is missing, another model's, or lacks a field."""
        self.folder = folder = Path(folder)
        path = folder / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} is not a Hugging Face model: it has no config.json; {contents_of(folder)}")
        self.raw = read_object(path)
        try:
            self.family = family_of(self.raw)
        except ValueError as error:
            raise CheckpointError(f"{path} {error}") from error
        try:
            self.family.check(self.raw)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        self.dimensions = self.family.dimensions(self.raw)
        self.vocabulary = self.dimensions["vocab"]
        self.tied = not self.dimensions["untied"]

    def expert_layout(self, shapes: Mapping[str, Shape]) -> ExpertLayout:
        """Format of the model's experts for tensors of these shapes, a CheckpointError if unknown; any if dense."""
        if not self.dimensions.indices["moe_layers"]:
            return self.family.released_experts
        try:
            return expert_layout_of(self.family.rows, shapes, self.dimensions)
        except ValueError as error:
            raise CheckpointError(f"{self.folder}: {error}") from error

    def having(self, names: Collection[str]) -> ModelConfig:
        """The configuration of a checkpoint with tensors of these names, which may lack optional parts of the model."""
        changed = copy(self)
        changed.raw = dict(self.family.config_of(self.raw, names))
        changed.dimensions = self.family.dimensions(changed.raw).with_vocab(self.dimensions["vocab"])
        return changed

    def with_vocab(self, rows: int) -> ModelConfig:
        """The same with a vocabulary of this many rows."""
        changed = copy(self)
        changed.dimensions = self.dimensions.with_vocab(rows)
        return changed

    def write(self, folder: Path, dtype: str | None = None, quantization: Mapping[str, Any] | None = None) -> None:
        """Write what differs from a folder's `config.json`; unless the dtype is None, for weights in it, quantized or
        not.
        """
        raw, path = self.raw if dtype is None else _with_dtype(self.raw, dtype), folder / "config.json"
        if dtype is not None:
            raw.pop("quantization_config", None)
            raw |= {} if quantization is None else {"quantization_config": dict(quantization)}
        if raw != read_object(path):
            write_object(path, raw)

    def rows(self, experts: ExpertLayout | None = None) -> list[WeightRow]:
        """The weight table, expanded for this model."""
        return list(expand(self.family.rows(experts), self.dimensions))


def _with_dtype(raw: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A configuration with `dtype` in all places that state the weights' dtype.

    from_pretrained loads in the dtype of the configuration, so it has to be that of most of the written weights.
    """
    changed = {}
    for key, value in raw.items():
        if isinstance(value, dict):
            value = _with_dtype(value, dtype)
        elif key in ("dtype", "torch_dtype") and value is not None:
            value = dtype
        changed[key] = value
    return changed


def check_same_model(config: ModelConfig, other: ModelConfig) -> None:
    """Raise a CheckpointError that lists the fields in which two configurations differ, if they are of two models.

    Dtypes, dropout, initialisation and maximum length may differ.
    """
    found, expected = config.family.fields(config.raw), other.family.fields(other.raw)
    _compare(config, found, expected, found | expected, other.folder / "config.json")


def check_model_of_run(config: ModelConfig, run: Mapping[str, Any], path: Path) -> bool:
    """As `check_same_model`, of the model that a run has trained, of whose file these are contents and path.

    Returns whether the file describes the model.
    """
    model = run.get("model")
    if not isinstance(model, Mapping):
        return False
    found = config.family.fields(config.raw)
    if family_of_provider(model.get("_target_")) is None:
        expected = config.family.fields_of_run(model, found)
        _compare(config, found, expected, expected, path)
        return bool(expected)
    hf_config = model.get("hf_config")  # a conversion has written a whole `config.json`
    try:
        if not isinstance(hf_config, Mapping):
            raise ValueError(f"the configuration is {hf_config!r:.80}, expected an object")
        family = family_of(hf_config)
        family.check(hf_config)
    except ValueError as error:
        raise CheckpointError(f"{path}, model.hf_config: {error}") from error
    expected = family.fields(hf_config)
    _compare(config, found, expected, found | expected, path)
    return True


def _compare(
    config: ModelConfig, found: Mapping[str, Any], expected: Mapping[str, Any], names: Iterable[str], path: Path
) -> None:
    """Check some fields of a configuration against those of another."""
    names = [name for name in names if found.get(name) != expected.get(name)]
    if names:
        lines = [f"{name} is {found.get(name)!r}, expected {expected.get(name)!r}" for name in names]
        first = f"{config.folder / 'config.json'} describes another model than {path}:"
        raise CheckpointError("\n  ".join([first, *lines]))


@dataclass(frozen=True)
class StoredModel:
    """A model's folder, format, configuration and weights, and what was noticed on opening it."""

    folder: Path  # the model's, or an iteration's
    ckpt_format: str  # "huggingface", "fsdp_dtensor" or "torch_dist"
    tensors: TensorSource  # the weights, by the format's names
    config: ModelConfig
    experts: ExpertLayout  # how it holds its experts, or, in Megatron's formats, how the model it comes from did
    manifest: dict[str, Any] = field(default_factory=dict)  # empty where something other than a conversion wrote it
    notes: list[str] = field(default_factory=list)  # what the user should know

    @property
    def rows(self) -> list[WeightRow]:
        """The weight table, expanded for this model."""
        return self.config.rows(self.experts)

    @property
    def layout(self) -> TensorLayout:
        """How its format lays out the weights."""
        return layout_of(self.ckpt_format, self.rows, self.config.dimensions, self.tensors.specs)

    @property
    def float32_as(self) -> str | None:
        """Dtype in the Hugging Face model of the parameters that its model keeps in float32; None if it is unknown."""
        if self.ckpt_format != HUGGINGFACE:
            return self.manifest.get("float32_as")
        names = (name for row in self.rows if row.float32 for name in row.hf if name in self.tensors.specs)
        return next((self.tensors.specs[name].dtype for name in names), None)

    def float32_in_export(self, torch_dtype: str | None) -> str | None:
        """The same in a Hugging Face model made from this one with weights cast to a dtype, unless that is None."""
        if torch_dtype is None:
            return self.float32_as
        return "float32" if self.float32_as in (None, "float32") else torch_dtype

    @property
    def vocab_divisor(self) -> int | None:
        """What its vocabulary was padded to a multiple of, for each tensor-parallel rank; None where it was not."""
        found = self.manifest.get("vocab_divisor")
        if found is not None and type(found) is not int:
            raise CheckpointError(f"{self.folder / MANIFEST}: vocab_divisor is {found!r}, expected a number")
        return found

    def check(self) -> None:
        """Raise a CheckpointError that lists missing, unexpected and misshapen tensors, by the configuration."""
        rows, layout = self.rows, self.layout
        vocabulary = {name for row in rows if row.of_vocabulary for name in layout.tensors(row)}
        problem = f"{self.folder} does not have the tensors that its config.json requires"
        longer = vocabulary if layout.pads_vocabulary else ()
        check_tensors(self.tensors.specs, tensors_of(rows, layout), problem, may_be_longer=longer)

    def with_padding(self) -> StoredModel:
        """The same, with a configuration whose vocabulary counts all rows that are there.

        Where one of its tensors has fewer than another, planning refuses it.
        """
        names = [row.megatron for row in self.config.family.rows() if row.of_vocabulary]
        shapes = [self.tensors.specs[name].shape for name in names if name in self.tensors.specs]
        rows = max((shape[0] for shape in shapes if shape), default=0)
        config = self.config if rows <= self.config.dimensions["vocab"] else self.config.with_vocab(rows)
        return replace(self, config=config)

    def check_padding(self, vocabulary: int, *, drop: bool) -> list[str]:
        """As `check_vocab_padding`, of all rows beyond a vocabulary."""
        return check_vocab_padding(self.tensors, self.rows, self.layout, vocabulary, where=self.folder, drop=drop)


def layout_of(
    ckpt_format: str, rows: Collection[WeightRow], dimensions: Dimensions, names: Collection[str]
) -> TensorLayout:
    """How a format lays out expanded rows, in a checkpoint with tensors of these names."""
    if ckpt_format == megatron.TORCH_DIST:
        return TorchDist.found(rows, dimensions, names)
    return HuggingFace(dimensions) if ckpt_format == HUGGINGFACE else FsdpDtensor(dimensions, naming_of(rows, names))


def open_model(hf_model: str | Path, *, strict: bool = True, trust_remote_code: bool = False) -> StoredModel:
    """Open a Hugging Face model.

    Args:
        hf_model: a folder or a hub id.
        strict: whether tensors that the model does not have are kept, so that they become errors; otherwise they are
            ignored.
        trust_remote_code: whether the model may contain code.

    Raises:
        CheckpointError: it does not exist, is of no supported family, or its files are damaged.
    """
    folder = find_model(hf_model, trust_remote_code=trust_remote_code)
    config, weights, notes = ModelConfig(folder), HFWeights(folder), []
    config = config.having(weights.specs)
    if quantized := len(weights.scales):
        notes.append(
            f"{quantized} of {len(weights.specs)} tensors are in FP8; their values are the products with their scales"
        )
    if config.tied:  # then it has only the embedding, or an output layer of the same bytes
        original = next(row.hf[0] for row in config.family.rows() if row.of_vocabulary and row.condition is None)
        for name in (row.hf[0] for row in config.family.rows() if row.condition == "untied"):
            if name in weights.specs and original in weights.specs:
                _check_copy(weights, folder, name, original)
                del weights.specs[name]
                notes.append(f"{name} is a copy of {original}, to which config.json ties it; it was not converted")
    experts = config.expert_layout({name: spec.shape for name, spec in weights.specs.items()})
    model = StoredModel(folder, HUGGINGFACE, weights, config, experts, notes=notes)
    if not strict:
        notes.extend(drop_unexpected(weights, model.rows, model.layout))
    return model


def _check_copy(weights: HFWeights, folder: Path, name: str, original: str) -> None:
    spec, other = weights.specs[name], weights.specs[original]
    if spec.describe() != other.describe():
        found = f"{spec.describe()}, not {other.describe()}"
    else:
        with SegmentReader(weights) as left, SegmentReader(weights) as right:
            found = difference(name, spec.numel, spec.dtype, left.tensor(name), right.tensor(original))
    if found is not None:
        raise CheckpointError(
            f"{folder}: config.json has tie_word_embeddings true, but {name} is not {original}: {found}; "
            f"expected the same bytes, or no {name}, or tie_word_embeddings false"
        )


def write_config_of_weights(hf_model: str | Path) -> None:
    """Correct a folder's `config.json` to its weights: whether optional parts are there, and their dtype."""
    config, found = ModelConfig(hf_model), HFWeights(Path(hf_model)).specs
    config.having(found).write(config.folder, main_dtype(found.values()))


def open_stored(
    path: str | Path,
    iteration: int | None = None,
    hf_model: str | Path | None = None,
    *,
    trust_remote_code: bool = False,
) -> StoredModel:
    """Open a Megatron checkpoint of either format.

    Args:
        path: its root folder, or an iteration's folder.
        iteration: the iteration; None for the latest.
        hf_model: folder or hub id of a model whose configuration to use; None for the one in the checkpoint.
        trust_remote_code: whether that model may contain code.

    Raises:
        CheckpointError: it does not exist, is damaged, has no configuration, or one of another model.
    """
    folder = megatron.find_iteration(expanded(path), iteration)
    ckpt_format = megatron.format_of(folder)
    own, notes = own_config(folder), []
    if hf_model is None:
        if own is None:
            raise CheckpointError(f"{folder} has no {megatron.HF_FILES}/config.json; name the model with --hf-model")
        config = own
    else:
        config = ModelConfig(find_model(hf_model, weights=False, trust_remote_code=trust_remote_code))
        notes = compared_with_stored(config, folder)
    manifest, contents = read_manifest(folder), read_metadata(folder)
    keys = megatron.model_keys(contents, ckpt_format)
    if adapter := next((name for name in keys if MARK in name), None):
        raise CheckpointError(
            f"{folder} holds adapters such as {adapter}, expected a complete model; use `qwen3vl adapters` for adapters"
        )
    tensors = DcpTensors(contents, keys)
    config = config.having(tensors.specs)
    return StoredModel(folder, ckpt_format, tensors, config, _experts(config, manifest, folder), manifest, notes)


def own_config(folder: Path) -> ModelConfig | None:
    """The configuration in an iteration's folder; None if there is none."""
    hf_files = folder / megatron.HF_FILES
    return ModelConfig(hf_files) if (hf_files / "config.json").is_file() else None


def compared_with_stored(config: ModelConfig, folder: Path) -> list[str]:
    """Check a configuration for a checkpoint against the checkpoint's own, or without one against its run's file; a
    CheckpointError if it is another model's. Returns a line of text if there is none, and no file that describes the
    model.
    """
    if (own := own_config(folder)) is not None:
        check_same_model(config, own)
        return []
    path, run = folder / megatron.RUN_CONFIG, {}
    why = f"no {path.name} that describes a model"
    if path.is_file():
        try:
            run = megatron.read_run_config(folder)
        except CheckpointError as error:
            why = str(error)
    if check_model_of_run(config, run, path):
        return []
    return [
        f"{config.folder / 'config.json'} could not be compared with the checkpoint's configuration: {folder} has "
        f"none, and {why}. The shapes match, but heads, rotary embedding and DeepStack taps may be another model's"
    ]


def _experts(config: ModelConfig, manifest: dict[str, Any], folder: Path) -> ExpertLayout:
    """Format of experts: that of the configuration's model, else the manifest's, else that of the released ones."""
    if not config.dimensions.indices["moe_layers"]:
        return config.family.released_experts
    if has_weights(config.folder):
        shapes = {name: spec.shape for name, spec in HFWeights(config.folder).specs.items()}
        return config.having(shapes).expert_layout(shapes)
    name = manifest.get("expert_layout")
    if name is None:
        return config.family.released_experts
    if not isinstance(name, str) or name not in ExpertLayout.__members__:
        expected = ", ".join(ExpertLayout.__members__)
        raise CheckpointError(f"{folder / MANIFEST}: expert_layout is {name!r}, expected {expected}")
    return ExpertLayout[name]
