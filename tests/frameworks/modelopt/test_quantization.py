"""Quantization by ModelOpt: the calls of Megatron-Bridge's `quantize_vlm.py`, `ptq_generate_vlm.py` and `export.py`.

Eight-bit integers have one scale for each output of a layer, so transformers' layers have the same scales as Megatron's
fused ones. What is exported is in 8-bit floating point, with one scale for each layer: ModelOpt's exporter has no rule
for integers' scales of a fused layer.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import modelopt.torch.export as mtex
import modelopt.torch.quantization as mtq
import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.gpt_provider import modelopt_transformer_layer_spec
from megatron.core.post_training.modelopt.gpt.model_specs import get_gpt_modelopt_spec
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from tests.frameworks.modelopt.quantized import (
    known_samples,
    logits_of,
    quantise,
    quantised_pair,
    scales_of,
    settings,
    tensors_in,
    worst,
)
from tests.helpers.batches import Sample, make_samples, run_reference
from tests.helpers.forked import results_of_ranks
from tests.models.qwen3_5.tiny import make_checkpoint as make_qwen3_5
from tests.parity.conftest import Pair, build, make_pair


@pytest.fixture(scope="module")
def models(untied_folder, moe_folder, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("quantisation")
    return {
        "dense": untied_folder, "MoE": moe_folder,
        "Qwen3.5": make_qwen3_5(root / "qwen3_5"), "Qwen3.5 MoE": make_qwen3_5(root / "qwen3_5_moe", moe=True),
    }  # fmt: skip


def quantise_reference(pair: Pair, of: dict = mtq.INT8_DEFAULT_CFG) -> None:
    with torch.no_grad():
        mtq.quantize(pair.reference, settings(of), lambda m: run_reference(m, known_samples(pair.config)))


@dataclass
class Quantised:
    pair: Pair
    folder: Path  # of the Hugging Face model
    before: list[Tensor]
    samples: list[Sample]

    def logits(self, model: nn.Module | None = None) -> list[Tensor]:
        return logits_of(model or self.pair.megatron, self.samples, self.pair.config)


@pytest.fixture(scope="module", params=["dense", "MoE", "Qwen3.5", "Qwen3.5 MoE"])
def quantised(request, models) -> Quantised:
    """In eight-bit integers, both models."""
    folder = models[request.param]
    pair = make_pair(folder)
    pair.megatron.eval(), pair.reference.eval()
    samples = make_samples("mixed", pair.config, seed=2)
    before = logits_of(pair.megatron, samples, pair.config)
    quantise(pair.megatron, pair.config)
    quantise_reference(pair)
    return Quantised(pair, folder, before, samples)


# Megatron's layer, and transformers' whose outputs it has, in some order.
LAYERS = {
    "self_attention.linear_qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attention.linear_proj": ["self_attn.o_proj"], "self_attention.out_proj": ["linear_attn.out_proj"],
    "self_attention.in_proj": ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z"],
    "mlp.linear_fc1": ["mlp.gate_proj", "mlp.up_proj"], "mlp.linear_fc2": ["mlp.down_proj"],
    "mlp.shared_experts.linear_fc1": ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"],
    "mlp.shared_experts.linear_fc2": ["mlp.shared_expert.down_proj"],
}  # fmt: skip


def scales(model: nn.Module, name: str) -> Tensor:
    return model.get_submodule(name).amax.flatten()


@pytest.mark.one_case_in(4)
def test_quantization_scales_match_scales_of_quantized_transformers_model(quantised):
    ours, theirs, seen = quantised.pair.megatron, quantised.pair.reference, set()
    modules = dict(ours.named_modules())
    for number in range(len(ours.decoder.layers)):
        for layer, names in LAYERS.items():
            here = f"language_model.decoder.layers.{number}.{layer}"
            if here not in modules:
                continue
            there = [f"model.language_model.layers.{number}.{name}" for name in names]
            of_weights = torch.cat([scales(theirs, f"{name}.weight_quantizer") for name in there])
            found = scales(ours, f"{here}.weight_quantizer")
            # Gates of linear attention come last, and transformers' have eight bits nowhere.
            assert len(found) == len(of_weights) or layer.endswith("in_proj")
            assert torch.equal(found[: len(of_weights)].sort()[0], of_weights.sort()[0]), here
            of_inputs = scales(theirs, f"{there[0]}.input_quantizer")
            torch.testing.assert_close(scales(ours, f"{here}.input_quantizer"), of_inputs, rtol=0.01, atol=0)
            seen.add(layer)
    own = tensors_in(quantised.folder)
    for name in [name for name in modules if name.endswith("linear_fc1") and ".local_experts." in name]:
        layer, expert = re.findall(r"\.(\d+)\.", name)
        expected = own[f"model.language_model.layers.{layer}.mlp.experts.gate_up_proj"][int(expert)].abs().amax(1)
        assert torch.equal(scales(ours, f"{name}.weight_quantizer"), expected)
        seen.add("experts")
    assert len(seen) >= 3


# Megatron multiplies what experts compute with a token's weight before their second layer, transformers after it.
@pytest.mark.parametrize("quantised", ["dense", "Qwen3.5"], indirect=True)
def test_quantized_logits_are_closer_to_quantized_transformers_model(quantised):
    with torch.no_grad():
        expected, _ = run_reference(quantised.pair.reference, quantised.samples)
    found = quantised.logits()
    assert worst(found, expected) < worst(found, quantised.before)


def test_quantization_skips_vision_tower(quantised):
    enabled = [
        name for name, module in quantised.pair.megatron.named_modules()
        if isinstance(module, mtq.nn.TensorQuantizer) and module.is_enabled
    ]  # fmt: skip
    assert enabled and all(name.startswith("language_model.decoder.layers.") for name in enabled)


@pytest.mark.one_case_in(4)
def test_quantized_checkpoint_reloads_with_equal_logits(quantised, tmp_path):
    quantised.pair.bridge.save_megatron_model([quantised.pair.megatron], str(tmp_path))
    (loaded,) = quantised.pair.bridge.load_megatron_model(str(tmp_path), wrap_with_ddp=False)
    loaded = unwrap_model(loaded).eval()
    assert {"QuantRowParallelLinear", "QuantColumnParallelLinear"} <= {type(m).__name__ for m in loaded.modules()}
    assert worst(quantised.logits(loaded), quantised.logits()) == 0


def test_save_hf_pretrained_of_quantized_model_keeps_weights_and_adds_scales(quantised, tmp_path, monkeypatch):
    """Weights as they are; beside them scales, with Megatron-Bridge's switch, which knows none of packed experts."""
    own = tensors_in(quantised.folder)
    for switch in "01":
        monkeypatch.setenv("ENABLE_BRIDGE_QUANT_MAPPING", switch)
        quantised.pair.bridge.save_hf_pretrained([quantised.pair.megatron], str(tmp_path / switch))
        found = tensors_in(tmp_path / switch)
        assert found.keys() == own.keys() and all(torch.equal(found[name], own[name]) for name in own)
    written = torch.load(tmp_path / "1" / "modelopt_weights.pt")
    layers = len(quantised.pair.megatron.decoder.layers)
    assert len([name for name in written if name.endswith(".weight_quantizer._amax")]) >= 2 * layers


def save_on_ranks(folder: Path, to: Path) -> None:
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.tensor_model_parallel_size, provider.sequence_parallel = 2, True
    model = build(provider).eval()
    quantise(model, bridge.hf_pretrained.config)
    bridge.save_megatron_model([model], str(to))


def prefill(model: nn.Module, sample: Sample) -> None:
    """The call of a model in ModelOpt's `megatron_generate`, which goes on with the GPU."""
    places = torch.arange(len(sample.ids))[None]
    seen = torch.ones_like(places, dtype=torch.bool)
    model(
        input_ids=sample.ids[None],
        position_ids=places,
        attention_mask=seen,
        runtime_gather_output=True,
        **sample.pixels,
    )


def test_quantization_with_quantize_vlm_calls_gives_equal_scales(untied_folder):
    one, other = (make_pair(untied_folder) for _ in range(2))
    samples = make_samples("many images", one.config, seed=1)
    with torch.no_grad():
        mtq.quantize(one.megatron, settings(), lambda m: [prefill(m, sample) for sample in samples])
    mtq.quantize(other.megatron, settings(), lambda m: [logits_of(m, [sample], one.config) for sample in samples])
    found, expected = scales_of(one.megatron), scales_of(other.megatron)
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "Qwen3.5"])
def test_quantization_scales_saved_with_tensor_parallelism_match_one_rank(models, name, tmp_path):
    results_of_ranks(save_on_ranks, 2, models[name], tmp_path, timeout=300)
    pair = quantised_pair(models[name])
    (loaded,) = pair.bridge.load_megatron_model(str(tmp_path), wrap_with_ddp=False)
    expected, found = scales_of(pair.megatron), scales_of(unwrap_model(loaded))
    assert found.keys() == expected.keys()
    for scale, wanted in expected.items():
        if ".weight_quantizer." in scale:
            assert torch.equal(found[scale], wanted), scale
        else:
            torch.testing.assert_close(found[scale], wanted, rtol=1e-4, atol=0)


# Layers of transformers that Megatron's have fused: these have one scale, the largest. So have inputs of experts.
FUSED = re.compile(
    r"(?<=[._])(q|k|v|gate|up)(?=_proj\.)|(?<=in_proj_)(qkv|z)(?=\.)|(?<=experts\.)\d+(?=\..*input_scale)"
)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("name", ["dense", "Qwen3.5", "Qwen3.5 MoE"])
def test_modelopt_export_equals_modelopt_export_of_transformers_model(models, name, tmp_path):
    folder, of = models[name], mtq.FP8_DEFAULT_CFG
    pair = quantised_pair(folder, of)
    quantise_reference(pair, of)
    mtex.export_mcore_gpt_to_hf(
        pair.megatron, str(folder), dtype=torch.float32, export_dir=str(tmp_path / "ours"), moe_router_dtype=None
    )
    mtex.export_hf_checkpoint(pair.reference, dtype=torch.float32, export_dir=str(tmp_path / "theirs"))
    assert "model.visual*" in excluded_in(tmp_path / "ours") & excluded_in(tmp_path / "theirs")
    ours, theirs, own = (tensors_in(path) for path in (tmp_path / "ours", tmp_path / "theirs", folder))
    assert ours.keys() == theirs.keys()
    largest: dict[str, Tensor] = {}
    for key, scale in theirs.items():
        if key.endswith("_scale"):
            group = FUSED.sub("*", key)
            largest[group] = torch.maximum(scale, largest.get(group, scale))
            if key.endswith("in_proj_qkv.weight_scale"):  # fused with gates, which are exported as they are
                gates = [own[key.replace("qkv.weight_scale", f"{gate}.weight")] for gate in "ab"]
                largest[group] = torch.maximum(largest[group], max(x.abs().max() for x in gates) / 448)
    for key, wanted in theirs.items():
        found, scale = ours[key], ours.get(f"{key}_scale")
        if re.search(r"experts\..*down_proj\.input_scale", key):  # of products with tokens' weights
            assert found < largest[FUSED.sub("*", key)]
        elif key.endswith("input_scale"):
            torch.testing.assert_close(found.view(()), largest[FUSED.sub("*", key)], rtol=1e-4, atol=0)
        elif key.endswith("weight_scale"):
            assert found == largest[FUSED.sub("*", key)], key
        elif scale is None or scale == theirs[f"{key}_scale"]:
            assert found.dtype == wanted.dtype and torch.equal(found.float(), wanted.float()), key
        else:  # three bits after the point
            torch.testing.assert_close(found.float() * scale, own[key], rtol=2**-4, atol=scale.item() * 2**-9)


@pytest.mark.parametrize("name", ["dense", "Qwen3.5"])
def test_modelopt_export_writes_trained_vision_tower_instead_of_original(models, name, tmp_path):
    """As `save_hf_pretrained` writes it, not as it is in the folder from which the model was loaded."""
    pair, own = quantised_pair(models[name], mtq.FP8_DEFAULT_CFG), tensors_in(models[name])
    trained = [x for part, x in pair.megatron.named_parameters() if part.startswith("vision_")]
    with torch.no_grad():
        for number, parameter in enumerate(trained):
            parameter.add_(0.25 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    mtex.export_mcore_gpt_to_hf(pair.megatron, str(models[name]), dtype=torch.float32, export_dir=str(tmp_path / "o"))
    pair.bridge.save_hf_pretrained([pair.megatron], str(tmp_path / "saved"))
    found, expected = tensors_in(tmp_path / "o"), tensors_in(tmp_path / "saved")
    visual = {tensor for tensor in expected if tensor.startswith("model.visual.")}
    assert visual == {tensor for tensor in found if tensor.startswith("model.visual.")}
    for tensor in visual:
        assert torch.equal(found[tensor], expected[tensor]) and not torch.equal(found[tensor], own[tensor]), tensor


def export_on_ranks(folder: Path, to: Path, sizes: dict[str, int]) -> None:
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = bridge.to_megatron_provider(load_weights=True)
    for name, size in sizes.items():
        setattr(provider, name, size)
    model = build(provider).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("vision_"):
                parameter.mul_(2)
    mtex.export_mcore_gpt_to_hf(model, str(folder), dtype=torch.float32, export_dir=str(to))


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_modelopt_export_on_two_ranks_writes_trained_vision_tower(models, split, tmp_path):
    sizes = {f"{split}_model_parallel_size": 2} | ({"pipeline_dtype": torch.float32} if split == "pipeline" else {})
    results_of_ranks(export_on_ranks, 2, models["dense"], tmp_path, sizes, timeout=300)
    found, own = tensors_in(tmp_path), tensors_in(models["dense"])
    visual = {name for name in own if name.startswith("model.visual.")}
    assert visual == {name for name in found if name.startswith("model.visual.")}
    assert all(torch.equal(found[name], 2 * own[name]) for name in visual)


def excluded_in(folder: Path) -> set[str]:
    return set(json.loads((folder / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"])


def test_modelopt_export_raises_if_model_is_qwen3_vl_moe(models, tmp_path):
    pair = quantised_pair(models["MoE"], mtq.FP8_DEFAULT_CFG)
    with pytest.raises(KeyError, match="Qwen3VLMoeForConditionalGeneration"):
        mtex.export_mcore_gpt_to_hf(pair.megatron, str(models["MoE"]), export_dir=str(tmp_path), moe_router_dtype=None)


FOUR_BITS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of NVFP4, without sign


@pytest.mark.parametrize("name", ["dense", "Qwen3.5"])
def test_autobridge_exports_nvfp4_weights_within_rounding_of_originals(models, name):
    """By `export_hf_weights_modelopt`: packed weights, a scale for each 16 of them and one for all."""
    pair = quantised_pair(models[name], mtq.NVFP4_DEFAULT_CFG)
    found = dict(pair.bridge.export_hf_weights_modelopt([pair.megatron], cpu=True, show_progress=False))
    own, packed = tensors_in(models[name]), 0
    for key, wanted in own.items():
        if found[key].dtype != torch.uint8:
            assert torch.equal(found[key], wanted), key
            continue
        packed += 1
        codes = torch.stack((found[key] & 15, found[key] >> 4), -1).flatten(-2).int()
        values = FOUR_BITS[codes & 7] * torch.where(codes > 7, -1, 1)
        steps = (found[f"{key}_scale"].float() * found[f"{key}_scale_2"]).repeat_interleave(16, -1)
        assert ((values * steps - wanted).abs() <= 1.05 * steps).all(), key  # of 4 and 6 the middle is 1 from both
    assert packed >= 4 * len(pair.megatron.decoder.layers)


def test_modelopt_layer_spec_has_same_linear_layer_classes_as_our_model(untied_folder):
    """So the model takes the spec of Megatron-Bridge for ModelOpt, as Megatron-Bridge's own does, and needs none."""
    provider = AutoBridge.from_hf_pretrained(str(untied_folder)).to_megatron_provider(load_weights=False)
    provider.transformer_layer_spec = modelopt_transformer_layer_spec
    (layer, *_) = build(provider).decoder.layers
    asked = get_gpt_modelopt_spec(provider, local_core_attention=True).layer_specs[0].submodules
    attention, mlp = asked.self_attention.submodules, asked.mlp.keywords["submodules"]
    assert type(layer.self_attention.linear_qkv) is attention.linear_qkv
    assert type(layer.self_attention.linear_proj) is attention.linear_proj
    assert type(layer.mlp.linear_fc1) is mlp.linear_fc1 and type(layer.mlp.linear_fc2) is mlp.linear_fc2
