"""Open a model on disk: its configuration, format, weights and manifest, and check that they fit each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.conversion_plan import (
    check_tensors,
    check_vocab_padding,
    drop_unexpected,
    find_naming,
    tensors_of,
)
from qwen3vl_bridge.checkpoint.formats import megatron
from qwen3vl_bridge.checkpoint.formats.dcp import DcpTensors, read_metadata
from qwen3vl_bridge.checkpoint.formats.huggingface import (
    HUGGINGFACE,
    HFWeights,
    describe_contents,
    find_model,
    has_weights,
)
from qwen3vl_bridge.checkpoint.formats.layouts import FsdpDtensor, HuggingFace, TensorLayout, TorchDist
from qwen3vl_bridge.checkpoint.formats.tensors import Shape, SliceReader, TensorSource, compare_streams, main_dtype
from qwen3vl_bridge.core.files import CheckpointError, expanded, read_object, write_object
from qwen3vl_bridge.registry import family_of, family_of_provider
from qwen3vl_bridge.weights.rows import (
    ADAPTER_MARK,
    Dimensions,
    ExpertLayout,
    TensorSlice,
    WeightRow,
    detect_expert_layout,
    expand,
)

MANIFEST = "qwen3vl_bridge.json"
TOOL = "qwen3vl_bridge"


def describe_tool() -> dict[str, str]:
    """Return the entries by which a manifest names its writer: this package, its version, and the version of torch."""
    versions = {}
    for name in ("qwen3vl-bridge", "torch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return {"tool": TOOL, "version": versions["qwen3vl-bridge"], "torch": versions["torch"]}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest in a checkpoint's folder; an empty dict if there is none."""
    path = folder / MANIFEST
    return read_object(path) if path.is_file() else {}


class ModelConfig:
    """The configuration of a Hugging Face model, read from `config.json`.

    Attributes:
        folder: the folder with `config.json`.
        raw: the contents of `config.json`.
        family: the model family.
        dimensions: the sizes in the weight table; "vocab" may include padding rows.
        vocabulary: number of tokens, without padding.
        tied: whether the output layer has the weight of the embedding.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read `folder/config.json`; raise CheckpointError if it is missing, incomplete, or of an unknown model."""
        self.folder = folder = Path(folder)
        path = folder / "config.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} is not a Hugging Face model: it has no config.json; {describe_contents(folder)}"
            )
        self.raw = read_object(path)
        try:
            self.family = family_of(self.raw)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        try:
            self.family.check(self.raw)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        self.dimensions = self.family.dimensions(self.raw)
        self.vocabulary = self.dimensions["vocab"]
        self.tied = not self.dimensions["untied"]

    def expert_layout(self, shapes: Mapping[str, Shape]) -> ExpertLayout:
        """Return the expert layout of the tensors in `shapes` (by name); raise CheckpointError for an unknown one."""
        if not self.dimensions.indices["moe_layers"]:
            return self.family.released_experts  # a dense model: not used
        try:
            return detect_expert_layout(self.family.rows, shapes, self.dimensions)
        except ValueError as error:
            raise CheckpointError(f"{self.folder}: {error}") from error

    def for_tensors(self, names: Collection[str]) -> ModelConfig:
        """Return the configuration without the optional components that have no tensor in `names`."""
        changed = copy(self)
        changed.raw = dict(self.family.config_of(self.raw, names))
        changed.dimensions = self.family.dimensions(changed.raw).with_vocab(self.dimensions["vocab"])
        return changed

    def with_vocab(self, rows: int) -> ModelConfig:
        """Return a copy of the configuration with `rows` vocabulary rows."""
        changed = copy(self)
        changed.dimensions = self.dimensions.with_vocab(rows)
        return changed

    def write(
        self,
        folder: Path,
        dtype: str | None = None,
        quantization: Mapping[str, Any] | None = None,
        *,
        has_fp8_table: bool = False,
    ) -> None:
        """Write `config.json` to a folder if it differs from the existing file.

        Args:
            folder: the folder.
            dtype: dtype to write to all fields for the dtype of weights; None to write the configuration unchanged,
                without regard to the next two arguments.
            quantization: value of `quantization_config`; None to remove this field.
            has_fp8_table: whether the n-gram table is in FP8. If not, the field with its dtype is removed.
        """
        raw, path = self.raw if dtype is None else _with_dtype(self.raw, dtype), folder / "config.json"
        if dtype is not None:
            raw.pop("quantization_config", None)
            raw |= {} if quantization is None else {"quantization_config": dict(quantization)}
            if not has_fp8_table and self.family.fp8_table_field is not None:
                raw["text_config"].pop(self.family.fp8_table_field, None)
        if raw != read_object(path):
            write_object(path, raw)

    def rows(self, experts: ExpertLayout | None = None) -> list[WeightRow]:
        """Return the expanded weight table: one entry for each Megatron parameter of the model.

        `experts` is how a Hugging Face checkpoint stores experts; None for the layout of released checkpoints.
        """
        return list(expand(self.family.rows(experts), self.dimensions))


def _with_dtype(raw: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a copy of a `config.json` in which every field for the dtype of the weights is `dtype`.

    from_pretrained loads weights in the dtype of the configuration, so it must be the dtype of most weights.
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
    """Raise CheckpointError if two configurations describe different models. The message lists their differences.

    Dtypes, dropout, initialization and maximum length may differ.
    """
    found, expected = config.family.fields(config.raw), other.family.fields(other.raw)
    _compare_fields(config, found, expected, found | expected, other.folder / "config.json")


def check_model_of_run(config: ModelConfig, run: Mapping[str, Any], path: Path) -> bool:
    """Check that a configuration describes the model that a run has trained.

    Args:
        config: the configuration.
        run: contents of the run's `run_config.yaml`.
        path: path of this file, for errors.

    Returns:
        True if `run` contains fields of the model to compare with; False if it contains none, so nothing was checked.

    Raises:
        CheckpointError: the file describes another model. The message lists the fields that differ.
    """
    model = run.get("model")
    if not isinstance(model, Mapping):
        return False
    found = config.family.fields(config.raw)
    if family_of_provider(model.get("_target_")) is None:
        expected = config.family.fields_of_run(model, found)
        _compare_fields(config, found, expected, expected, path)
        return bool(expected)
    hf_config = model.get("hf_config")  # a conversion has written the complete `config.json` there
    try:
        if not isinstance(hf_config, Mapping):
            raise ValueError(f"the configuration is {hf_config!r:.80}, expected an object")
        family = family_of(hf_config)
        family.check(hf_config)
    except ValueError as error:
        raise CheckpointError(f"{path}, model.hf_config: {error}") from error
    expected = family.fields(hf_config)
    _compare_fields(config, found, expected, found | expected, path)
    return True


def _compare_fields(
    config: ModelConfig, found: Mapping[str, Any], expected: Mapping[str, Any], names: Iterable[str], path: Path
) -> None:
    """Raise CheckpointError if one of the fields in `names` differs between two configurations."""
    names = [name for name in names if found.get(name) != expected.get(name)]
    if names:
        lines = [f"{name} is {found.get(name)!r}, expected {expected.get(name)!r}" for name in names]
        first = f"{config.folder / 'config.json'} describes another model than {path}:"
        raise CheckpointError("\n  ".join([first, *lines]))


@dataclass(frozen=True)
class StoredModel:
    """A Hugging Face model or a Megatron checkpoint on disk, opened for reading."""

    folder: Path  # of the Hugging Face model, or of an iteration
    ckpt_format: str  # "huggingface", "fsdp_dtensor" or "torch_dist"
    tensors: TensorSource  # the weights, with the names of the format
    config: ModelConfig
    experts: ExpertLayout  # how the Hugging Face model stores experts; for Megatron: the model that was imported
    manifest: dict[str, Any] = field(default_factory=dict)  # empty unless a conversion wrote the model
    notes: list[str] = field(default_factory=list)  # for the user

    @property
    def rows(self) -> list[WeightRow]:
        """Return the expanded weight table: one entry for each Megatron parameter of the model."""
        return self.config.rows(self.experts)

    @property
    def layout(self) -> TensorLayout:
        """Return the layout of the weights: which tensors of this format store each Megatron parameter."""
        return find_layout(self.ckpt_format, self.rows, self.config.dimensions, self.tensors.specs)

    @property
    def float32_as(self) -> str | None:
        """Return the dtype that Megatron's float32 parameters have in the Hugging Face model; None if unknown."""
        if self.ckpt_format != HUGGINGFACE:
            return self.manifest.get("float32_as")
        names = (name for row in self.rows if row.float32 for name in row.hf if name in self.tensors.specs)
        return next((self.tensors.specs[name].dtype for name in names), None)

    def float32_in_export(self, torch_dtype: str | None) -> str | None:
        """Return the dtype that an export to `torch_dtype` (None: no cast) gives Megatron's float32 parameters."""
        if torch_dtype is None:
            return self.float32_as
        return "float32" if self.float32_as in (None, "float32") else torch_dtype

    @property
    def vocab_divisor(self) -> int | None:
        """Return the `make_vocab_size_divisible_by` that the checkpoint was converted with; None for no padding."""
        found = self.manifest.get("vocab_divisor")
        if found is not None and type(found) is not int:
            raise CheckpointError(f"{self.folder / MANIFEST}: vocab_divisor is {found!r}, expected a number")
        return found

    def check(self) -> None:
        """Raise CheckpointError if tensors are missing, unexpected, or of other shapes than `config` requires."""
        rows, layout = self.rows, self.layout
        vocabulary = {name for row in rows if row.is_vocabulary for name in layout.tensors(row)}
        problem = f"{self.folder} does not have the tensors that its config.json requires"
        longer = vocabulary if layout.pads_vocabulary else ()
        check_tensors(self.tensors.specs, tensors_of(rows, layout), problem, may_be_longer=longer)

    def with_padding(self) -> StoredModel:
        """Return the model with a `config` in which the size of the vocabulary includes padding rows."""
        names = [row.megatron for row in self.config.family.rows() if row.is_vocabulary]
        shapes = [self.tensors.specs[name].shape for name in names if name in self.tensors.specs]
        rows = max((shape[0] for shape in shapes if shape), default=0)
        config = self.config if rows <= self.config.dimensions["vocab"] else self.config.with_vocab(rows)
        return replace(self, config=config)

    def check_padding(self, vocabulary: int, *, drop: bool) -> list[str]:
        """Check that vocabulary rows from index `vocabulary` on are zero; see `check_vocab_padding`. Return notes."""
        return check_vocab_padding(self.tensors, self.rows, self.layout, vocabulary, where=self.folder, drop=drop)


def find_layout(
    ckpt_format: str, rows: Collection[WeightRow], dimensions: Dimensions, names: Collection[str]
) -> TensorLayout:
    """Return the `TensorLayout` for the format and the tensor names of a checkpoint. `rows`: expanded weight table."""
    if ckpt_format == megatron.TORCH_DIST:
        return TorchDist.from_names(rows, dimensions, names)
    return HuggingFace(dimensions) if ckpt_format == HUGGINGFACE else FsdpDtensor(dimensions, find_naming(rows, names))


def open_model(hf_model: str | Path, *, strict: bool = True, trust_remote_code: bool = False) -> StoredModel:
    """Open a Hugging Face model.

    Args:
        hf_model: a folder or a hub id.
        strict: whether to keep tensors that the model does not have, so that they cause an error later; otherwise they
            are ignored.
        trust_remote_code: whether the model's folder may contain code. It is never run here.

    Raises:
        CheckpointError: the model does not exist, its family is not supported, or its files are damaged.
    """
    folder = find_model(hf_model, trust_remote_code=trust_remote_code)
    config, weights, notes = ModelConfig(folder), HFWeights(folder), []
    modules = {name.partition(".")[0] for row in config.family.rows() for name in row.hf}
    notes += (f"{path} is not read: {weights.why_unread()}" for path in weights.unread_files(modules))
    config = config.for_tensors(weights.specs)
    notes += _take_constants(config, weights)
    if quantized := sum(spec.scales is not None for spec in weights.specs.values()):
        notes.append(f"{quantized} of {len(weights.specs)} tensors are in FP8; they are multiplied by their scales")
    if config.tied:  # the output layer is missing, or has the bytes of the embedding
        original = next(row.hf[0] for row in config.family.rows() if row.is_vocabulary and row.condition is None)
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


def _take_constants(config: ModelConfig, weights: HFWeights) -> list[str]:
    """Check the constants of a Hugging Face model and remove them from `weights.specs`; return notes.

    Constants are tensors that can be computed from `config.json`, so Megatron checkpoints do not contain them and
    exports compute them. They may be missing, because some programs do not write them.

    Raises:
        CheckpointError: a constant differs from the value computed from `config.json`. Hashes would then select other
            rows of the n-gram tables than those that were trained.
    """
    constants = config.family.constants(config.raw)
    if not constants:
        return []
    missing = [name for name in constants if name not in weights.specs]
    with SliceReader(weights) as reader:
        for name, expected in constants.items():
            if (spec := weights.specs.get(name)) is None:
                continue
            found: Any = spec.describe()
            if (spec.dtype, spec.shape) == ("int64", (len(expected),)):
                found = tuple(reader.read_elements([TensorSlice(name, 0, spec.numel)], "int64").tolist())
            if found != expected:
                shown = list(found) if isinstance(found, tuple) else found
                raise CheckpointError(
                    f"{weights.folder}, tensor {name}: found {shown}, expected the int64 values {list(expected)}, "
                    "which follow from config.json"
                )
            del weights.specs[name]
    if not missing:
        return []
    return [f"{len(missing)} of {len(constants)} constants are missing, such as {missing[0]}; an export writes them"]


def _check_copy(weights: HFWeights, folder: Path, name: str, original: str) -> None:
    """Raise CheckpointError if tensor `name` is not an exact copy of tensor `original`."""
    spec, other = weights.specs[name], weights.specs[original]
    if spec.describe() != other.describe():
        found = f"{spec.describe()}, not {other.describe()}"
    else:
        with SliceReader(weights) as left, SliceReader(weights) as right:
            different = compare_streams(left.read_tensor(name), right.read_tensor(original), spec.dtype)
        found = different and f"{different[0]} of {spec.numel} elements differ, the first is number {different[1]}"
    if found is not None:
        raise CheckpointError(
            f"{folder}: config.json sets tie_word_embeddings to true, but {name} differs from {original}: {found}. "
            f"Remove {name}, or set tie_word_embeddings to false"
        )


def write_config_of_weights(hf_model: str | Path) -> None:
    """Correct a folder's `config.json` to fit its weights: their dtype, and which optional components exist."""
    config, found = ModelConfig(hf_model), HFWeights(Path(hf_model)).specs
    config.for_tensors(found).write(config.folder, main_dtype(found.values()))


def open_stored(
    path: str | Path,
    iteration: int | None = None,
    hf_model: str | Path | None = None,
    *,
    trust_remote_code: bool = False,
) -> StoredModel:
    """Open a Megatron checkpoint of either format.

    Args:
        path: the checkpoint's root folder, or an iteration's folder.
        iteration: the iteration; None for the latest.
        hf_model: folder or hub id of a model with the configuration; None for the configuration in the checkpoint.
        trust_remote_code: whether `hf_model` may contain code.

    Raises:
        CheckpointError: the checkpoint does not exist, is damaged, or has no configuration, or `hf_model` is another
            model.
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
        notes = compare_with_stored(config, folder)
    manifest, contents = read_manifest(folder), read_metadata(folder)
    keys = megatron.model_keys(contents, ckpt_format)
    if adapter := next((name for name in keys if ADAPTER_MARK in name), None):
        raise CheckpointError(
            f"{folder} holds adapters such as {adapter}, expected a complete model; use `qwen3vl adapters` for adapters"
        )
    tensors = DcpTensors(contents, keys)
    config = config.for_tensors(tensors.specs)
    return StoredModel(folder, ckpt_format, tensors, config, _find_experts(config, manifest, folder), manifest, notes)


def own_config(folder: Path) -> ModelConfig | None:
    """Return the Hugging Face configuration in an iteration's folder; None if there is none."""
    hf_files = folder / megatron.HF_FILES
    return ModelConfig(hf_files) if (hf_files / "config.json").is_file() else None


def compare_with_stored(config: ModelConfig, folder: Path) -> list[str]:
    """Check that a configuration describes the model in a Megatron checkpoint.

    The configuration is compared with `hf/config.json` in the checkpoint, or else with its `run_config.yaml`.

    Args:
        config: the configuration.
        folder: the iteration's folder.

    Returns:
        A list with one note if the checkpoint has neither file to compare with, else an empty list.

    Raises:
        CheckpointError: the configuration describes another model.
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
        f"none, and {why}. The shapes match, but heads, rotary embedding and DeepStack layers may differ"
    ]


def _find_experts(config: ModelConfig, manifest: dict[str, Any], folder: Path) -> ExpertLayout:
    """Return the expert layout that an export uses by default.

    It is the layout of the weights next to `config.json`. If there are no weights, it is the layout that the manifest
    names. If the manifest names none, it is the layout of the released models.
    """
    if not config.dimensions.indices["moe_layers"]:
        return config.family.released_experts
    if has_weights(config.folder):
        shapes = {name: spec.shape for name, spec in HFWeights(config.folder).specs.items()}
        return config.for_tensors(shapes).expert_layout(shapes)
    name = manifest.get("expert_layout")
    if name is None:
        return config.family.released_experts
    if not isinstance(name, str) or name not in ExpertLayout.__members__:
        expected = ", ".join(ExpertLayout.__members__)
        raise CheckpointError(f"{folder / MANIFEST}: expert_layout is {name!r}, expected {expected}")
    return ExpertLayout[name]
