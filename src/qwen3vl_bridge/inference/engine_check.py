"""Check that an inference engine reads every tensor of an exported model or adapter, and finds every one it needs.

vLLM and SGLang skip many tensors silently and leave weights uninitialized that are missing. For them, the tensors that
`engines.py` and the weight table expect are compared with the headers of the files. transformers and `peft` load the
folder themselves, on torch's meta device.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.huggingface import HFWeights, find_model
from qwen3vl_bridge.checkpoint.formats.tensors import Shape, TensorSpec
from qwen3vl_bridge.config.hf_config import fp8_block
from qwen3vl_bridge.core.files import CheckpointError, expanded, read_object
from qwen3vl_bridge.inference.engines import ENGINES, FUSED, Engine
from qwen3vl_bridge.lazy import is_installed
from qwen3vl_bridge.peft.adapter_rows import CONFIG, HF_PREFIX, WEIGHTS, adapter_names, adapter_row
from qwen3vl_bridge.registry import Family, family_of
from qwen3vl_bridge.upstream.library_logs import quiet_libraries
from qwen3vl_bridge.weights import fp8
from qwen3vl_bridge.weights.rows import (
    LINEAR_IN,
    LINEAR_OUT,
    Dimensions,
    ExpertLayout,
    PackedExpert,
    WeightRow,
    detect_expert_layout,
    expand,
)

TRANSFORMERS = "transformers"
_SCALES = ("_scale_inv", ".weight_scale", ".input_scale")
_MAX_LISTED = 20
# Fields of `adapter_config.json` that engines do not support, with the values that change nothing.
_ADAPTER_FIELDS = {"peft_type": ("LORA",), "modules_to_save": ([],), "lora_bias": (False,), "bias": ("none",)}


@dataclass(frozen=True)
class EngineReport:
    """The result of `check_for_engine`."""

    engine: str  # name and version that the check holds for
    folder: str
    tensors: int  # number of tensors in the folder
    faults: tuple[str, ...]  # what is wrong and what to do
    notes: tuple[str, ...]  # what else a user has to know, such as options of the server

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return vars(self) | {"faults": list(self.faults), "notes": list(self.notes)}


def check_for_engine(folder: str | Path, engine: str, *, base_model: str | Path | None = None) -> EngineReport:
    """Check whether an inference engine can load a folder with a model or with adapters, and return a report.

    Args:
        folder: folder of a Hugging Face model, or of adapters in the format of `peft`.
        engine: "vllm", "sglang" or "transformers".
        base_model: for adapters, folder or hub id of the base model; None for the one that `adapter_config.json` names.

    Raises:
        CheckpointError: the folder is not readable, or is of a model that the engine's description does not cover.
    """
    path = expanded(folder)
    has_adapters = (path / CONFIG).is_file()
    if base_model is not None and not has_adapters:
        raise CheckpointError(f"--base-model is {base_model}, but {path} is not a folder of adapters: omit the option")
    weights = HFWeights(path, WEIGHTS if has_adapters else None, dequantize=False).specs
    model_folder = path
    if has_adapters:
        base = base_model or read_object(path / CONFIG).get("base_model_name_or_path")
        if not base:
            raise CheckpointError(f"{path / CONFIG} names no base model; set --base-model to its folder or hub id")
        model_folder = find_model(base, weights=engine == TRANSFORMERS)
    if engine == TRANSFORMERS:
        title, faults, notes = _load_with_transformers(path, model_folder if has_adapters else None, weights)
    else:
        model, description = _Model(model_folder), ENGINES[engine]
        title = f"{description.title} {description.version} (described on {description.read_on})"
        if model.kind not in description.layouts:
            known = ", ".join(description.layouts)
            raise CheckpointError(
                f"{title} cannot be checked for model_type {model.kind!r}, only for {known}; --engine transformers "
                "checks every model that transformers loads"
            )
        if has_adapters:
            faults, notes = _check_adapters(path / CONFIG, model, weights, description)
        else:
            faults, notes = _check_model(model, weights, description), []
    return EngineReport(title, str(path), len(weights), tuple(faults), tuple(notes))


class _Model:
    """The tensors and the quantization of a model, as its `config.json` describes them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "config.json"
        raw = read_object(self.path)
        self.quantization: Mapping[str, Any] | None = raw.pop("quantization_config", None)
        if not isinstance(self.quantization, dict | None):
            raise CheckpointError(f"{self.path}: quantization_config is {self.quantization!r}, expected an object")
        try:
            self.family: Family = family_of(raw)
            self.family.check(raw)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {error}") from error
        self.raw, self.kind = raw, str(raw["model_type"])
        self.dimensions: Dimensions = self.family.dimensions(raw)

    def rows(self, experts: ExpertLayout | None = None) -> list[WeightRow]:
        return list(expand(self.family.rows(experts), self.dimensions))

    def tensors(self, experts: ExpertLayout | None = None) -> dict[str, Shape]:
        """Return the shapes of the unquantized tensors by name."""
        return {
            name: shape
            for row in self.rows(experts)
            for name, shape in zip(row.hf, row.hf_shapes(self.dimensions), strict=True)
        }


def _check_model(model: _Model, found: Mapping[str, TensorSpec], engine: Engine) -> list[str]:
    """Return a message for each fault of a model that `engine` could not load correctly."""
    faults, layout = [], None
    for field in engine.fields.get(model.kind, ()):
        if field not in model.raw["text_config"]:
            faults.append(f"{model.path}: text_config.{field} is missing, and {engine.title} has no default; add it")
    if model.raw.get("tie_word_embeddings"):
        found = {name: spec for name, spec in found.items() if name != "lm_head.weight"}  # engines skip a copy
    if allowed := engine.layouts[model.kind]:
        shapes = {name: spec.shape for name, spec in found.items()}
        try:
            layout = detect_expert_layout(model.family.rows, shapes, model.dimensions)
        except ValueError:
            # Some tensors of experts are missing or wrong: compare with the layout that has most names in common.
            layout = max(allowed, key=lambda one: len(model.tensors(one).keys() & found.keys()))
        if layout not in allowed:
            faults.append(
                f"experts are stored as {layout.value}, {engine.title} reads {' or '.join(x.value for x in allowed)}; "
                f"export with --expert-layout {allowed[0].name.lower()}"
            )
    expected = model.tensors(layout)
    scales, in_fp8, more = _expected_scales(model, expected, engine)
    faults += more
    if _is_modelopt(model.quantization) and layout not in (None, ExpertLayout.PER_EXPERT):
        faults.append(f"experts are stored as {layout.value}; ModelOpt's scales are read for single experts only")
    return [*faults, *_compare(found, expected | scales, in_fp8, engine)]


def _expected_scales(
    model: _Model, expected: Mapping[str, Shape], engine: Engine
) -> tuple[dict[str, Shape], set[str], list[str]]:
    """Return the shapes of scales by name, the names of tensors in FP8, and faults of `quantization_config`."""
    settings = model.quantization
    if settings is None:
        return {}, set(), []
    if modelopt := _is_modelopt(settings):
        if (algorithm := settings.get("quant_algo")) != "FP8":
            raise CheckpointError(f"{model.path}: quant_algo is {algorithm!r}, and only FP8 can be checked")
        block, excluded = None, settings.get("ignore", settings.get("exclude_modules")) or []
    else:
        try:
            block = fp8_block(settings)
        except ValueError as error:
            raise CheckpointError(f"{model.path}: {error}") from error
        excluded = settings.get("modules_to_not_convert") or []
    if not isinstance(excluded, list) or not all(isinstance(pattern, str) for pattern in excluded):
        raise CheckpointError(
            f"{model.path}: modules that are not quantized are {excluded!r}, expected a list of names"
        )
    weights = {name.removesuffix(".weight"): name for name, shape in expected.items() if _is_matrix(name, shape)}
    modules = {module: re.sub(r"(\.mlp\.experts)\..*", r"\1", module) for module in weights}  # as the engine has them
    answers = {module: engine.quantizes(module, excluded, wildcards=modelopt) for module in set(modules.values())}
    quantized = [module for module in weights if answers[modules[module]]]
    faults, scales = list(_check_fused(model, weights, expected, {*quantized}, block[0] if block else 1)), {}
    for module in quantized:
        name, shape = weights[module], expected[weights[module]]
        if modelopt:
            scales |= {f"{module}.weight_scale": (), f"{module}.input_scale": ()}
        else:
            scales[name + fp8.SCALES] = fp8.scales_shape(shape, block or (shape[-2], shape[-1]))
    return scales, {weights[module] for module in quantized}, faults


def _check_fused(
    model: _Model, weights: Mapping[str, str], expected: Mapping[str, Shape], quantized: set[str], rows: int
) -> Iterator[str]:
    """Yield a message for each fault in the quantization of layers that engines fuse, such as q, k and v.

    Either all or none of the fused layers may be quantized. A quantization block must not contain rows of two layers.
    Source: vLLM, `is_layer_skipped`, `validate_fp8_block_shape` and `validate_fp8_block_shape_moe`.

    Args:
        weights: name of the weight of each module, by module.
        expected: shape of each weight, by name.
        quantized: the modules that the engine expects in FP8.
        rows: number of rows of a quantization block.
    """
    width = model.dimensions.sizes.get("moe_ffn", 0)
    crossed = [f"{each}: {width} rows" for each in quantized if width % rows and each.endswith("experts.gate_up_proj")]
    for module in weights:
        layer, _, last = module.rpartition(".")
        parts = next(([f"{layer}.{part}" for part in group] for group in FUSED if group[0] == last), [])
        taken = [part for part in parts if part in quantized]
        if taken and taken != parts:
            yield (
                f"{', '.join(parts)} are one layer for engines, and only {', '.join(taken)} is in FP8; quantize all or "
                "none"
            )
        counts = {part: expected[weights[part]][0] for part in taken[:-1]}
        crossed += (f"{part}: {count} rows" for part, count in counts.items() if count % rows)
    yield from _describe({(f"not multiples of the block's {rows} rows", "do not quantize them"): crossed})


def _is_modelopt(quantization: Mapping[str, Any] | None) -> bool:
    return quantization is not None and quantization.get("quant_method") == "modelopt"


def _is_matrix(name: str, shape: Shape) -> bool:
    """Return whether a tensor is the weight of a linear layer, or of packed experts."""
    return len(shape) == 2 or (len(shape) == 3 and ".mlp.experts." in name)


def _compare(
    found: Mapping[str, TensorSpec], expected: Mapping[str, Shape], in_fp8: Collection[str], engine: Engine
) -> Iterator[str]:
    """Yield messages about tensors that are missing, not read by the engine, or of an unexpected shape or dtype."""
    lists = "quantization_config and its list of modules that are not quantized must describe the file"
    problems: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, shape in expected.items():
        spec = found.get(name)
        if spec is None:
            if name.endswith(_SCALES):
                advice = lists
            elif name.startswith("mtp."):
                advice = "export a model with them, or set text_config.mtp_num_hidden_layers to 0 in config.json"
            else:
                advice = f"{engine.title} would compute with uninitialized weights: export the model again"
            problems["missing", advice].append(f"{name} {list(shape)}")
        # A scale of a full matrix may have the shape [] or [1].
        elif spec.shape != shape and (shape, spec.shape) != ((), (1,)):
            problems["of another shape than config.json says", "export the model again"].append(
                f"{name}: found {list(spec.shape)}, expected {list(shape)}"
            )
        elif (spec.dtype == fp8.E4M3) != (name in in_fp8):
            wanted = fp8.E4M3 if name in in_fp8 else "no quantized dtype"
            problems["of another dtype", lists].append(f"{name}: found {spec.dtype}, expected {wanted}")
    for name in (name for name in found if name not in expected):
        advice = lists if name.endswith(_SCALES) else "remove or rename them"
        problems[f"not read by {engine.title}", advice].append(name)
    yield from _describe(problems)


def _describe(problems: Mapping[tuple[str, str], list[str]]) -> Iterator[str]:
    """Yield a message for each key (problem, advice) of `problems`, with its list of tensors."""
    for (problem, advice), tensors in problems.items():
        if not tensors:
            continue
        more = f"\n    ... and {len(tensors) - _MAX_LISTED} more" if len(tensors) > _MAX_LISTED else ""
        lines = "".join(f"\n    {entry}" for entry in tensors[:_MAX_LISTED])
        yield f"{len(tensors)} tensors are {problem}; {advice}:{lines}{more}"


def _check_adapters(
    path: Path, model: _Model, found: Mapping[str, TensorSpec], engine: Engine
) -> tuple[list[str], list[str]]:
    """Return the faults of adapters, and notes. `path` is their `adapter_config.json`."""
    config, merge = read_object(path), "merge the adapters with `qwen3vl adapters merge`"
    if config.get("use_dora"):
        return [f"{engine.title} has no DoRA; {merge}"], []
    faults, notes, needed = [], [], set()
    rank, ranks = config.get("r"), config.get("rank_pattern") or {}
    if type(rank) is not int:
        raise CheckpointError(f"{path}: r is {rank!r}, expected a whole number, the rank of the adapters")
    if not isinstance(ranks, dict) or not all(type(number) is int for number in ranks.values()):
        raise CheckpointError(f"{path}: rank_pattern is {ranks!r}, expected an object of integers by pattern")
    # An engine that reads no rank of a layer scales by lora_alpha / r.
    scaling = {} if engine.rank_per_layer else {"use_rslora": (False,)}
    for field, harmless in (_ADAPTER_FIELDS | scaling).items():
        if (value := config.get(field)) not in (None, *harmless):
            faults.append(f"adapter_config.json has {field}={value!r}, which {engine.title} does not support; {merge}")
    if not engine.rank_per_layer and (ranks or config.get("alpha_pattern")):
        faults.append(f"{engine.title} reads neither rank_pattern nor alpha_pattern; {merge}")
    expected = _adapter_shapes(model, rank, ranks)
    adapted = re.compile(engine.adapted[model.kind])
    needed |= {name for name in expected if _is_targeted(name, config) and adapted.fullmatch(_layer_of(name))}
    if not found:
        faults.append("the file has no tensors; export the adapters again")
    problems: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, spec in found.items():
        layer = _layer_of(name)
        if name not in expected:
            advice = "set --base-model to the model that was trained"
            problems["of no layer of the base model", advice].append(name)
            continue
        if not adapted.fullmatch(layer):
            problems[f"of layers whose adapters {engine.title} does not read", merge].append(name)
            continue
        # Adapters of packed experts are read only for both of their tensors together.
        parts = (".base_layer", "") if layer.endswith(".experts") else ("",)
        needed |= {f"{HF_PREFIX}{layer}{part}.lora_{side}.weight" for part in parts for side in "AB"}
        if spec.shape != expected[name]:
            problems["of another shape than the base model and the rank say", "export the adapters again"].append(
                f"{name}: found {list(spec.shape)}, expected {list(expected[name])}"
            )
    if missing := sorted(needed - found.keys()):
        problems["missing", "export the adapters again"] = missing
    if engine.max_rank is not None and (largest := max([rank, *ranks.values()])) > engine.max_rank:
        notes.append(f"start the server with --max-lora-rank {largest}")
    if engine.tower_adapters and any(".visual." in name for name in needed):
        notes.append(f"start the server with {engine.tower_adapters}, or adapters of the vision tower are ignored")
    return [*faults, *_describe(problems)], notes


def _layer_of(name: str) -> str:
    """Return the name of the layer that an adapter adapts, given the name of the adapter's tensor in `peft`."""
    return name.removeprefix(HF_PREFIX).rpartition(".lora_")[0].removesuffix(".base_layer")


def _is_targeted(name: str, config: Mapping[str, Any]) -> bool:
    """Return True if `target_modules` in `adapter_config.json` lists the layer of an adapter's tensor.

    Return False for experts and MTP, and if the configuration selects layers by patterns or indices.
    """
    targets = config.get("target_modules")
    if not isinstance(targets, list) or config.get("layers_to_transform") or config.get("exclude_modules"):
        return False  # a pattern, or layers that only `peft` selects
    layer = _layer_of(name)
    is_usual = ".experts" not in layer and not layer.startswith("mtp.")
    return is_usual and any(f".{layer}".endswith(f".{target}") for target in targets)


def _adapter_shapes(model: _Model, rank: int, ranks: Mapping[str, int]) -> dict[str, Shape]:
    """Return the shape of every tensor that an adapter of the model can have, by the name in the file of `peft`.

    Args:
        rank: rank of adapters that no pattern in `ranks` matches.
        ranks: `rank_pattern` of `adapter_config.json`: pattern for names of layers -> rank.
    """
    shapes: dict[str, Shape] = {}
    for row in [*model.rows(), *model.rows(ExpertLayout.PER_EXPERT)]:
        for name, shape in zip(row.hf, row.hf_shapes(model.dimensions), strict=True):
            layer = name.removesuffix(".weight")
            dim = next((n for key, n in ranks.items() if re.fullmatch(rf"(.*\.)?({key})", layer)), rank)
            if isinstance(row, PackedExpert):
                for kind in (LINEAR_IN, LINEAR_OUT):
                    (shapes[adapter_names(row, kind)[0]],) = adapter_row(row, kind, dim).hf_shapes(model.dimensions)
            elif name.endswith(".weight") and len(shape) == 2:
                prefix = f"{HF_PREFIX}{layer}.lora_"
                shapes |= {f"{prefix}A.weight": (dim, shape[1]), f"{prefix}B.weight": (shape[0], dim)}
    return shapes


def _load_with_transformers(
    folder: Path, base: Path | None, names: Collection[str]
) -> tuple[str, list[str], list[str]]:
    """Load a model, or adapters on the model in `base`, on the meta device. Return the version, faults and notes."""
    import transformers

    if base is not None and not is_installed("peft"):
        raise CheckpointError("peft is not installed, with which transformers loads adapters: pip install peft")
    title = f"transformers {transformers.__version__} (loaded)"
    quiet_libraries()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of values that are not copied to the meta device
            result: Any = transformers.AutoModelForImageTextToText.from_pretrained(
                base or folder, output_loading_info=True, device_map={"": "meta"}
            )
            model, found = result
            if base is not None:
                from peft import PeftConfig, PeftModel

                config = PeftConfig.from_pretrained(str(folder))
                loaded = PeftModel(model, config).load_adapter(str(folder), "default", torch_device="cpu")
                missing = [key for key in loaded.missing_keys if ".lora_" in key]
                found = {"missing_keys": missing, "unexpected_keys": loaded.unexpected_keys}
    except Exception as error:  # whatever the loader raises is its verdict
        return title, [f"{folder} does not load: {type(error).__name__}: {error}"], []
    problems = {}
    for kind, keys in found.items():
        experts = any(".experts." in str(key) for key in keys)
        advice = "export again, with another --expert-layout" if experts else "export again"
        problems[kind.replace("_", " "), advice] = sorted(map(str, keys))
    skipped = sum(name.startswith("mtp.") for name in names)
    notes = [f"transformers has no multi-token prediction and skips {skipped} tensors mtp.*"] if skipped else []
    return title, list(_describe(problems)), notes
