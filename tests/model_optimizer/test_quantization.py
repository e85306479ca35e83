"""Quantisation by ModelOpt: the calls of Megatron-Bridge's `quantize_vlm.py`, `ptq_generate_vlm.py` and `export.py`.

Eight-bit integers with one scale for each output of a layer, simulated, because transformers' layers then have the same
scales as Megatron's fused ones.
"""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwen3vl_bridge.batch import SequenceLayout
from qwen3vl_bridge.models.rules import check
from qwen3vl_bridge.training import run_refusals

import modelopt.torch.export as mtex
import modelopt.torch.quantization as mtq
import pytest
import torch
from megatron.core.utils import unwrap_model
from qwen3vl_recipes.digits import qwen3_vl_digits_sft_config
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.parity.batches import Sample, make_batch, make_samples, per_sample, run_reference
from tests.parity.conftest import Pair, make_pair


def settings(of: dict[str, Any] = mtq.INT8_DEFAULT_CFG) -> dict[str, Any]:
    """As `quantize_vlm.py`: the tower stays as it is."""
    config = copy.deepcopy(of)
    config["quant_cfg"] += [{"quantizer_name": name, "enable": False} for name in ("*vision_model*", "*visual*")]
    return config


@torch.no_grad()
def logits_of(model: nn.Module, samples: list[Sample], config: Any) -> list[Tensor]:
    lengths = [len(sample.ids) for sample in samples]
    batch = make_batch(samples, config, layout=SequenceLayout.rows(lengths, max(lengths)))
    inputs = batch.local(**model.config.local_arguments(model.pg_collection), encodes=True)
    return per_sample(model(inputs=replace(inputs, labels=None)), batch.layout)


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(found, expected, strict=True))


@dataclass
class Quantised:
    pair: Pair
    folder: Path  # of the Hugging Face model
    before: list[Tensor]
    samples: list[Sample]

    def logits(self, model: nn.Module | None = None) -> list[Tensor]:
        return logits_of(model or self.pair.megatron, self.samples, self.pair.config)


def scales(model: nn.Module, name: str) -> Tensor:
    return model.get_submodule(name).amax.flatten()


@pytest.fixture(scope="module")
def quantised(untied_folder) -> Quantised:
    pair = make_pair(untied_folder)
    pair.megatron.eval(), pair.reference.eval()
    known, samples = (make_samples("mixed", pair.config, seed=seed) for seed in (1, 2))
    before = logits_of(pair.megatron, samples, pair.config)
    mtq.quantize(pair.megatron, settings(), lambda m: [logits_of(m, [one], pair.config) for one in known])
    with torch.no_grad():
        mtq.quantize(pair.reference, settings(), lambda m: run_reference(m, known))
    return Quantised(pair, untied_folder, before, samples)


# Megatron's layer, and transformers' whose outputs it has.
LAYERS = {
    "self_attention.linear_proj": ["self_attn.o_proj"], "mlp.linear_fc2": ["mlp.down_proj"],
    "mlp.linear_fc1": ["mlp.gate_proj", "mlp.up_proj"],
}  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS)
def test_its_scales_are_those_of_transformers_layers(quantised, layer):
    ours, theirs = quantised.pair.megatron, quantised.pair.reference
    for number in range(len(ours.decoder.layers)):
        here = f"language_model.decoder.layers.{number}.{layer}"
        there = [f"model.language_model.layers.{number}.{name}" for name in LAYERS[layer]]
        of_weights = torch.cat([scales(theirs, f"{name}.weight_quantizer") for name in there])
        assert torch.equal(scales(ours, f"{here}.weight_quantizer"), of_weights)
        # Where a number is near the middle of two steps, rounding decides; layers after it see it.
        of_inputs = scales(theirs, f"{there[0]}.input_quantizer")
        torch.testing.assert_close(scales(ours, f"{here}.input_quantizer"), of_inputs, rtol=0.01, atol=0)


def test_it_answers_as_transformers_quantised_model(quantised):
    with torch.no_grad():
        expected, _ = run_reference(quantised.pair.reference, quantised.samples)
    found = quantised.logits()
    assert worst(found, expected) < worst(found, quantised.before) / 2


def test_the_tower_is_not_quantised(quantised):
    enabled = [
        name for name, module in quantised.pair.megatron.named_modules()
        if isinstance(module, mtq.nn.TensorQuantizer) and module.is_enabled
    ]  # fmt: skip
    assert enabled and all(name.startswith("language_model.decoder.layers.") for name in enabled)


@pytest.fixture(scope="module")
def saved(quantised, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quantised")
    quantised.pair.bridge.save_megatron_model([quantised.pair.megatron], str(folder))
    return folder


def test_it_is_saved_and_loaded(quantised, saved):
    (loaded,) = quantised.pair.bridge.load_megatron_model(str(saved), wrap_with_ddp=False)
    loaded = unwrap_model(loaded).eval()
    assert {"QuantRowParallelLinear", "QuantColumnParallelLinear"} <= {type(m).__name__ for m in loaded.modules()}
    assert worst(quantised.logits(loaded), quantised.logits()) == 0


def test_modelopts_exporter_writes_it(untied_folder, tmp_path):
    """In 8-bit floating point: its exporter has no rule for integers' scales of each output of a fused layer."""
    pair = make_pair(untied_folder)
    known = make_samples("mixed", pair.config, seed=1)
    config = settings(mtq.FP8_DEFAULT_CFG)
    mtq.quantize(pair.megatron, config, lambda m: [logits_of(m, [one], pair.config) for one in known])
    mtex.export_mcore_gpt_to_hf(
        pair.megatron, str(untied_folder), dtype=torch.float32, export_dir=str(tmp_path), moe_router_dtype=None
    )
    tensors = {name: x for file in tmp_path.glob("*.safetensors") for name, x in load_file(file).items()}
    own = load_file(untied_folder / "model.safetensors")
    extra = tensors.keys() - own.keys()
    assert own.keys() <= tensors.keys() and all(name.endswith(("weight_scale", "input_scale")) for name in extra)
    for name, wanted in own.items():
        scale = tensors.get(f"{name}_scale")
        if scale is None:
            assert torch.equal(tensors[name], wanted), name
        else:  # three bits after the point
            torch.testing.assert_close(tensors[name].float() * scale, wanted, rtol=2**-4, atol=scale.item() * 2**-9)


def test_a_run_refuses_a_quantised_model():
    cfg = qwen3_vl_digits_sft_config()
    cfg.model.restore_modelopt_state = True
    with pytest.raises(ValueError, match="restore_modelopt_state is True, expected False: runs read no quantised"):
        check(run_refusals.BEFORE_VALIDATE, cfg)
