"""The weight table against transformers, the parameters of released sizes, and unsupported configurations."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from qwen3vl_bridge.checkpoint import CheckpointError, Topology, import_checkpoint
from qwen3vl_bridge.checkpoint.conversion_plan import make_plan, tensors_of
from qwen3vl_bridge.checkpoint.formats.layouts import FsdpDtensor, HuggingFace, TorchDist
from qwen3vl_bridge.checkpoint.formats.tensors import TensorSpec
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig
from qwen3vl_bridge.models.qwen3_5.presets import PRESETS, config_dict, hf_config
from qwen3vl_bridge.models.qwen3_5.table import table
from qwen3vl_bridge.registry import dimensions_of, family_of, preset, preset_sizes
from qwen3vl_bridge.weights.rows import expand, parameter_count

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from transformers import PretrainedConfig, Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration

from tests.checkpoint.support import entry, file_of

# Of released files' multi-token prediction, which transformers' models lack, and of these models on the meta device.
MTP_PARAMETERS = {
    "0.8B": 20_452_864, "2B": 60_828_160, "4B": 120_599_552, "9B": 243_290_624, "27B": 424_699_392,
    "35B-A3B": 844_640_768, "122B-A10B": 2_523_679_232, "397B-A17B": 6_595_568_128,
}  # fmt: skip
PARAMETERS = {
    "0.8B": 852_985_920, "2B": 2_213_241_664, "4B": 4_539_265_536, "9B": 9_409_813_744, "27B": 27_356_728_560,
    "35B-A3B": 35_107_181_936, "122B-A10B": 122_562_817_776, "397B-A17B": 396_802_360_816,
}  # fmt: skip


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("size", PRESETS)
def test_weight_table_matches_transformers_state_dict_for_every_size(size):
    config = hf_config(size)
    is_moe = PRESETS[size].experts is not None
    with torch.device("meta"):
        model = (Qwen3_5MoeForConditionalGeneration if is_moe else Qwen3_5ForConditionalGeneration)(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if PRESETS[size].tied:
        del expected["lm_head.weight"]
    dimensions = dimensions_of(config_dict(size))
    found = tensors_of(expand(table(), dimensions), HuggingFace(dimensions))
    mtp = {name: found.pop(name) for name in list(found) if name.startswith("mtp.")}
    assert found == expected
    assert sum(map(math.prod, expected.values())) == PARAMETERS[size]
    assert sum(map(math.prod, mtp.values())) == MTP_PARAMETERS[size]
    assert parameter_count(table(), dimensions) == PARAMETERS[size] + MTP_PARAMETERS[size]


@pytest.mark.parametrize("kind", ["dense", "moe", "3.6"])
def test_weight_table_mtp_tensors_match_released_format(qwen3_5_folders, kind):
    """Compare with modules of transformers, in the formats of released files."""
    folder = qwen3_5_folders[kind]
    model = ModelConfig(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    experts = model.expert_layout(shapes)
    assert tensors_of(model.rows(experts), HuggingFace(model.dimensions)) == shapes
    assert any(name.startswith("mtp.") for name in shapes)


def test_dimensions_use_full_attention_interval_if_config_has_no_layer_types():
    """Transformers drops the interval when it saves; older files have only the interval."""
    config = config_dict("2B")
    listed = dimensions_of(config)
    del config["text_config"]["layer_types"]
    assert dimensions_of(config) == listed
    config["text_config"]["full_attention_interval"] = 3
    assert dimensions_of(config).indices["full_layers"] == tuple(range(2, 24, 3))


SIZE = "397B-A17B"
FILES = 94  # as many as the released model has


@pytest.fixture(scope="module")
def model():
    dimensions = dimensions_of(config_dict(SIZE))
    rows = list(expand(table(), dimensions))
    return rows, {
        "hf": HuggingFace(dimensions),
        "fsdp": FsdpDtensor(dimensions),
        "dist": TorchDist.for_model(dimensions),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param("hf", "fsdp", marks=pytest.mark.slow),
        pytest.param("hf", "dist", marks=pytest.mark.slow),
        ("fsdp", "hf"),
        pytest.param("dist", "hf", marks=pytest.mark.slow),
    ],
)
def test_conversion_plan_of_397b_model_covers_every_parameter(model, source, target):
    """The files have only names and shapes. Measured 1.3 to 2.2 s."""
    rows, layouts = model
    there = {name: TensorSpec(name, "bfloat16", shape) for name, shape in tensors_of(rows, layouts[source]).items()}
    plan = make_plan(rows, layouts[source], layouts[target], there, where="here")
    assert plan.numel == PARAMETERS[SIZE] + MTP_PARAMETERS[SIZE]
    assert {name: spec.shape for name, spec in plan.specs.items()} == tensors_of(rows, layouts[target])
    assert not plan.transposed and not plan.cast
    pieces = sum(len(task.slices) for task in plan.tasks)
    print(f"{len(there)} tensors to {len(plan.tasks)} by {pieces} pieces")
    assert pieces <= 2 * (len(there) + len(plan.tasks))


def write_holes(folder: Path, config: dict, shapes: dict[str, tuple[int, ...]], files: int) -> Path:
    """Write the configuration, the index and the headers of a released model, with sparse files instead of numbers."""
    weight_map = {}
    for number, names in enumerate(itertools.batched(shapes, -(-len(shapes) // files)), 1):
        header, end = {}, 0
        for name in names:
            header[name] = entry("BF16", shapes[name], (end, end := end + 2 * math.prod(shapes[name])))
        file = folder / f"model-{number:05}-of-{files:05}.safetensors"
        file.write_bytes(start := file_of(header, 0))
        os.truncate(file, len(start) + end)
        weight_map |= dict.fromkeys(names, file.name)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def released(model, tmp_path_factory) -> Path:
    rows, layouts = model
    shapes = tensors_of(rows, layouts["hf"])
    return write_holes(tmp_path_factory.mktemp("released"), config_dict(SIZE), shapes, FILES)


@pytest.mark.slow
@pytest.mark.parametrize("ckpt_format", ["fsdp_dtensor", "torch_dist"])
def test_import_dry_run_of_397b_model_counts_all_parameters(released, ckpt_format, tmp_path):
    """Headers are read and the plan is checked: every byte of the result has a source, for eight expert ranks."""
    options = dict(ckpt_format=ckpt_format, topology=Topology(ep=8), dry_run=True)
    report = import_checkpoint(released, tmp_path / "megatron", **options)
    assert report.parameters == PARAMETERS[SIZE] + MTP_PARAMETERS[SIZE]
    assert not list(tmp_path.iterdir())


PLAN = """
import re, sys
from pathlib import Path
from qwen3vl_bridge.checkpoint import Topology, import_checkpoint
hf, target = sys.argv[1:]
report = import_checkpoint(hf, target, ckpt_format="torch_dist", topology=Topology(ep=32), dry_run=True)
peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
print(report.parameters, peak)
"""


@pytest.mark.slow
def test_import_dry_run_of_2_4t_parameter_model_needs_less_than_2_gb(tmp_path):
    """The released model has no vision tower and is not supported; here it has one. Measured 10.3 s and 1.5 GiB."""
    config = config_dict(SIZE)
    text = config["text_config"]
    text |= dict(
        hidden_size=8192, num_attention_heads=64, num_key_value_heads=4, moe_intermediate_size=2048,
        shared_expert_intermediate_size=2048, linear_num_value_heads=128, num_hidden_layers=92,
        layer_types=text["layer_types"][:4] * 23,
    )  # fmt: skip
    config["vision_config"]["out_hidden_size"] = 8192
    dimensions = dimensions_of(config)
    shapes = tensors_of(list(expand(table(), dimensions)), HuggingFace(dimensions))
    (tmp_path / "hf").mkdir()
    folder = write_holes(tmp_path / "hf", config, shapes, files=213)
    words = [sys.executable, "-c", PLAN, str(folder), str(tmp_path / "megatron")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    parameters, kib = map(float, done.stdout.split()[-2:])
    tower = sum(math.prod(shape) for name, shape in shapes.items() if ".visual." in name)
    assert round((parameters - tower) * 2, -10) == 4.89e12  # bytes of the released model's files
    assert kib < 2e9 / 1024
    with pytest.raises(ValueError, match="a text model is converted only as part of its complete model"):
        dimensions_of({**text, "architectures": ["Qwen3_5MoeForCausalLM"]})


def test_preset_returns_qwen3_vl_if_several_families_have_the_size():
    assert {"8B", "9B"} <= set(preset_sizes())
    found = {name: preset(name)["model_type"] for name in ("4B", "Qwen/Qwen3.5-4B", "9B", "397B-A17B")}
    assert found == {"4B": "qwen3_vl", "Qwen/Qwen3.5-4B": "qwen3_5", "9B": "qwen3_5", "397B-A17B": "qwen3_5_moe"}


@pytest.mark.parametrize("mode", [None, "headwise", "chunkwise"])
def test_qwen3_5_provider_with_context_parallelism_recomputes_norm_of_linear_attention(mode):
    from qwen3vl_bridge.models.qwen3_5.bridge import provider_from_hf_config

    provider = provider_from_hf_config(config_dict("2B"))
    provider.context_parallel_size, provider.linear_cp_mode = 2, mode
    provider.transformer_impl, provider.recompute_granularity = "transformer_engine", "selective"
    provider.recompute_modules = ["gdn_norm_out"]
    provider.finalize()
    assert (provider.linear_num_key_heads, provider.linear_num_value_heads) == (16, 16)


@pytest.mark.parametrize(("settings", "message"), [
    ({"deterministic_mode": True}, "deterministic_mode is True, expected False"),
    ({"tensor_model_parallel_size": 2}, "sequence_parallel is False with .*_size 2, expected True"),
    ({"tensor_model_parallel_size": 0}, "tensor_model_parallel_size is 0, expected 1 or more"),
    ({"context_parallel_size": 32, "linear_cp_mode": "headwise"},
     "linear_num_key_heads is 16, expected a multiple of tensor_.*, 32; or set linear_cp_mode='chunkwise'"),
    ({"linear_cp_mode": "ring"}, "linear_cp_mode is 'ring', expected None, 'headwise' or 'chunkwise'"),
    ({"mtp_num_layers": 2}, "mtp_num_layers is 2, expected None or 1: "),
    ({"mtp_loss_scaling_factor": 0.1, "pipeline_model_parallel_size": 2}, "variable_seq_lengths is False"),
    ({"mtp_loss_scaling_factor": 0.1, "recompute_granularity": "full", "recompute_method": "block"},
     "recompute_method is 'block'"),
    ({"mtp_loss_scaling_factor": 0.1, "delay_wgrad_compute": True, "transformer_impl": "transformer_engine"},
     "trains_mtp is True with delay_wgrad_compute, expected False: the layer for multi-token"),
    ({"recompute_granularity": "selective", "recompute_modules": ["gdn_norm_out"], "transformer_impl": "local"},
     r"recompute_modules is \['gdn_norm_out'\] with .* 'local', expected .*: recomputing 'gdn_norm_out' or"),
    ({"rotary_percent": 0.5}, r"mrope_section is \[11, 11, 10\] with the sum 32, expected half of the 128"),
])  # fmt: skip
def test_qwen3_5_provider_raises_if_setting_is_unsupported(settings, message):
    from qwen3vl_bridge.models.qwen3_5.bridge import provider_from_hf_config

    provider = provider_from_hf_config(config_dict("2B"))
    for name, value in settings.items():
        setattr(provider, name, value)
    with pytest.raises((ValueError, AssertionError), match=message):
        provider.finalize()


def test_check_gates_raises_if_tensor_parallel_size_exceeds_query_groups():
    from qwen3vl_bridge.models.common.hybrid_model import check_gates
    from qwen3vl_bridge.models.qwen3_5.bridge import provider_from_hf_config

    provider = provider_from_hf_config(config_dict("2B"))
    two, four = (SimpleNamespace(tp=SimpleNamespace(size=lambda size=size: size)) for size in (2, 4))
    check_gates(provider, two)
    with pytest.raises(ValueError, match="tensor_model_parallel_size is 4 with 2 query groups, and the model has"):
        check_gates(provider, four)


@pytest.mark.parametrize(("section", "field", "value", "message"), [
    ("text_config", "attn_output_gate", False, "attn_output_gate is False, expected True"),
    ("text_config", "mtp_use_dedicated_embeddings", True, "mtp_use_dedicated_embeddings is True, expected False"),
    ("text_config", "mtp_num_hidden_layers", 2, "mtp_num_hidden_layers is 2, expected 0 or 1"),
    ("text_config", "mlp_only_layers", [1], r"mlp_only_layers is \[1\], expected \[\]"),
    ("text_config", "layer_types", [["full_attention"]], "expected a list of names"),
    ("text_config", "layer_types", ["full_attention"], "expected 24 entries of 'linear_attention' or 'full_attention'"),
    ("text_config", "linear_num_value_heads", 17, "expected a multiple of linear_num_key_heads"),
    ("text_config", "attention_bias", True, "attention_bias is True, expected False"),
    ("vision_config", "deepstack_visual_indexes", [3], r"deepstack_visual_indexes is \[3\], expected \[\]"),
    ("vision_config", "out_hidden_size", 1024, "out_hidden_size is 1024, expected 2048"),
])  # fmt: skip
def test_qwen3_5_config_with_unsupported_value_raises(section, field, value, message):
    config = config_dict("2B")
    config[section][field] = value
    with pytest.raises(ValueError, match=message):
        family_of(config).check(config)


@pytest.mark.parametrize(("size", "kind"), [("2B", "qwen3_5"), ("35B-A3B", "qwen3_5_moe")])
def test_import_raises_if_qwen3_5_model_is_text_only(size, kind, tmp_path):
    name = "Qwen3_5ForCausalLM" if kind == "qwen3_5" else "Qwen3_5MoeForCausalLM"
    config = config_dict(size)["text_config"] | {"architectures": [name]}
    assert config["model_type"] == f"{kind}_text"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=rf"{name}.*\(model_type {kind}_text\), expected .*complete model \(model_type {kind}\)"
    ):
        import_checkpoint(tmp_path, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()


# What released files of Qwen3.5 and Qwen3.6 have beside what transformers writes, and spell in another way.
RELEASED_FIELDS = {
    "attn_output_gate": True, "full_attention_interval": 4, "mamba_ssm_dtype": "float32", "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("size", ["27B", "35B-A3B"])
def test_config_fields_of_released_qwen3_5_and_3_6_files_are_accepted(size):
    """Qwen3.6 files name the same classes, and may list no DeepStack layers."""
    from megatron.bridge import AutoBridge
    from transformers import AutoConfig

    expected, config = hf_config(size), config_dict(size)
    config["text_config"] = {k: v for k, v in config["text_config"].items() if k != "layer_types"} | RELEASED_FIELDS
    config["vision_config"] |= {"deepstack_visual_indexes": []}
    family_of(config).check(config)
    providers = [
        AutoBridge.from_hf_config(one).to_megatron_provider(load_weights=False)
        for one in (expected, AutoConfig.for_model(**config))
    ]
    first, second = (provider.dimensions() for provider in providers)
    assert first == second and first["mtp"] == 1 and len(first.indices["full_layers"]) * 4 == providers[0].num_layers


# What no weight and no step depends on: names, caches, outputs that forward has not; and what another field decides:
# the whole model's `tie_word_embeddings`, `rope_parameters`.
INERT = {"model_type", "use_cache", "output_router_logits", "tie_word_embeddings", "partial_rotary_factor"}


def others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [2 * value + 2]
    if isinstance(value, list):
        return [value[::-1]]
    return ["relu"] if isinstance(value, str) else []


@pytest.mark.parametrize("size", ["2B", "35B-A3B"])
def test_every_text_config_field_changes_provider_or_is_rejected(size):
    """Change each field of transformers' class: the provider changes, or the configuration is rejected."""
    whole = hf_config(size).to_dict()
    own, text = family_of(whole), whole["text_config"]

    def provider_of(**changes: Any) -> dict[str, Any]:
        provider = own.build_provider(whole | {"text_config": text | changes})
        return {name: value for name, value in vars(provider).items() if name != "vision_config"}

    as_it_is, ignored = provider_of(), set()
    names = text.keys() - (PretrainedConfig().to_dict().keys() - {"model_type"})
    assert {"rms_norm_eps", "attention_dropout", "linear_conv_kernel_dim", "layer_types", "hidden_act"} <= names
    for name, value in [(one, other) for one in names for other in others(text[one])]:
        try:
            if provider_of(**{name: value}) == as_it_is:
                ignored.add(name)
        except (ValueError, StrictDataclassError):
            continue
    assert ignored <= INERT


def test_rope_theta_is_default_if_rope_fields_of_config_are_null():
    config = config_dict("2B")
    config["text_config"] |= {"rope_parameters": None, "rope_theta": None, "partial_rotary_factor": None}
    assert family_of(config).fields(config)["text_config.rope_parameters.rope_theta"] == 10_000
