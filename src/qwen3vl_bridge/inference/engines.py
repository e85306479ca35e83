"""Describe what vLLM and SGLang read of a model and of adapters: expert layouts, quantized modules, adapted layers.

Names and shapes of tensors are in the weight tables. An `Engine` describes which of them an engine reads, and how. The
descriptions were made from the source of one version of each engine, and hold for this version. vLLM's loaders were
also run on a CPU with tiny models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from qwen3vl_bridge.weights.rows import ExpertLayout

# Layers that an engine computes as one, by the last part of their names: all of them are quantized, or none.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
_ATTENTION = r"model\.language_model\.layers\.\d+\.self_attn\.[qkvo]_proj"
_LINEAR_ATTENTION = r"model\.language_model\.layers\.\d+\.linear_attn\."
_MLP = r"model\.language_model\.layers\.\d+\.mlp\.((shared_expert\.)?(gate|up|down)_proj"
_TOWER = r"model\.visual\..*(attn\.(qkv|proj)|linear_fc[12])"
_EXPERT = r"experts\.\d+\.(gate|up|down)_proj"
# Weights with two dimensions or more that engines never quantize, besides those of convolutions.
_NEVER_QUANTIZED = r"lm_head|.*\.(embed_tokens|pos_embed|patch_embed\.proj|conv1d|mlp\.gate|mlp\.shared_expert_gate)"
_RELEASED_3_5 = (ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT, ExpertLayout.OUTPUT_MAJOR, ExpertLayout.PER_EXPERT)


@dataclass(frozen=True)
class Engine:
    """Description of what one version of an inference engine reads. Modules have Hugging Face's names."""

    title: str
    version: str
    read_on: str  # date on which the description was made
    # Expert layouts by model_type, the one to export first. Models without experts have none.
    layouts: Mapping[str, tuple[ExpertLayout, ...]]
    fields: Mapping[str, tuple[str, ...]]  # by model_type: fields of text_config that have no default
    unquantized: str  # pattern of modules that stay unquantized, whatever the list of excluded modules says
    adapted: Mapping[str, str]  # by model_type: pattern of modules whose adapters are read
    rank_per_layer: bool  # whether rank_pattern and alpha_pattern are read
    # Whether an entry of the list of excluded modules excludes a module; True for ModelOpt's list, which has wildcards.
    excludes: Callable[[str, str, bool], bool]
    max_rank: int | None = None  # largest rank without an option of the server
    tower_adapters: str | None = None  # option of the server without which adapters of the vision tower are ignored

    def quantizes(self, module: str, excluded: Iterable[str], *, wildcards: bool) -> bool:
        """Return True if the engine expects the weight of a module to be quantized.

        Args:
            module: name of the module that has the weight. Packed experts have no module of their own. Their module
                name is the name of their tensor.
            excluded: modules that are not quantized, as listed in `modules_to_not_convert` (FP8) or by ModelOpt.
            wildcards: whether the entries of `excluded` may be patterns, as in ModelOpt's list.
        """
        if re.fullmatch(self.unquantized, module):
            return False
        layer, experts, _ = module.partition(".mlp.experts")
        for entry in excluded:
            if experts and f"{layer}{experts}" in entry:
                return False
            if self.excludes(entry, module, wildcards):
                return False
        return True


def _equals(entry: str, module: str, wildcards: bool) -> bool:
    """Return True if vLLM does not quantize a module because `entry` is in the list of excluded modules.

    The entry must be the name of the module. With `wildcards`, it may also be a substring of the name or a pattern.
    """
    return (entry in module or fnmatchcase(module, entry)) if wildcards else entry == module


def _contains_path(entry: str, module: str, wildcards: bool) -> bool:
    """Return True if SGLang does not quantize a module because `entry` is in the list of excluded modules.

    Names have parts, separated by dots. The entry must be one part of the module's name, or several in a row. With
    `wildcards`, it may also be a pattern for one part or for the full name.
    """
    if f".{entry.removeprefix('model.')}." in f".{module}.":
        return True
    return wildcards and any(fnmatchcase(name, entry) for name in (module, *module.split(".")))


# Source: vllm/model_executor/models/{qwen3_vl,qwen3_vl_moe,qwen3_5,qwen3_5_mtp,qwen3_next,utils}.py,
# layers/fused_moe/routed_experts.py, layers/quantization/{fp8,modelopt}.py, lora/{lora_model,worker_manager}.py.
_VLLM = Engine(
    title="vLLM",
    version="0.33.0",
    read_on="2026-11-30",
    layouts={
        "qwen3_vl": (),
        "qwen3_vl_moe": (ExpertLayout.INPUT_MAJOR, ExpertLayout.PER_EXPERT),
        "qwen3_5": (),
        "qwen3_5_moe": _RELEASED_3_5,
    },
    fields={"qwen3_vl_moe": ("norm_topk_prob",)},
    unquantized=_NEVER_QUANTIZED,
    adapted={
        "qwen3_vl": rf"{_ATTENTION}|{_MLP})|{_TOWER}",
        # Of layers without experts, gate_proj and up_proj are not known as parts of gate_up_proj.
        "qwen3_vl_moe": rf"{_ATTENTION}|model\.language_model\.layers\.\d+\.mlp\.(down_proj|gate|experts)|{_TOWER}",
        "qwen3_5": rf"{_ATTENTION}|{_LINEAR_ATTENTION}(in_proj_(qkv|z|b|a)|out_proj)|{_MLP})|{_TOWER}",
        "qwen3_5_moe": rf"{_ATTENTION}|{_LINEAR_ATTENTION}(in_proj_(qkv|z|b|a)|out_proj)|{_MLP}|gate"
        rf"|shared_expert_gate|experts)|{_TOWER}",
    },
    rank_per_layer=True,
    excludes=_equals,
    max_rank=16,
    tower_adapters="--enable-tower-connector-lora",
)
# Source: sglang/srt/models/{qwen3_vl,qwen3_vl_moe,qwen3_5,qwen3_5_mtp}.py, layers/quantization/{fp8,utils,
# modelopt_quant}.py, lora/{lora,lora_config,lora_manager,mem_pool,utils}.py.
_SGLANG = Engine(
    title="SGLang",
    version="0.5.23",
    read_on="2026-11-30",
    layouts=_VLLM.layouts,
    fields={},
    unquantized=rf"{_NEVER_QUANTIZED}|model\.visual\..*",
    adapted={
        "qwen3_vl": rf"{_ATTENTION}|{_MLP})",
        "qwen3_vl_moe": rf"{_ATTENTION}|model\.language_model\.layers\.\d+\.mlp\.{_EXPERT}",
        "qwen3_5": rf"{_ATTENTION}|{_LINEAR_ATTENTION}out_proj|{_MLP})",
        "qwen3_5_moe": rf"{_ATTENTION}|{_LINEAR_ATTENTION}out_proj|{_MLP}|{_EXPERT})",
    },
    rank_per_layer=False,
    excludes=_contains_path,
)
ENGINES: Mapping[str, Engine] = {"vllm": _VLLM, "sglang": _SGLANG}
