"""Training of quantised models in Megatron-Bridge's loop, which begins with a checkpoint that is quantised."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint import export_checkpoint
from qwen3vl_bridge.io.files import CheckpointError

import modelopt.torch.export as mtex
import modelopt.torch.quantization as mtq
import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.core.utils import unwrap_model
from modelopt.torch.quantization.config import find_quant_cfg_entry_by_path

from tests.forked import results_of_ranks
from tests.noise import check
from tests.parity.batches import run_reference
from tests.parity.on_ranks import Split, compare
from tests.parity.references import errors, take_two_steps
from tests.parity.topologies import TOPOLOGIES, Topology
from tests.ranks import largest
from tests.training.conftest import Inputs, inputs, losses  # noqa: F401  a fixture
from tests.training.running import replicated, stored, train

from .quantized import known_samples, quantised_checkpoint, scales_of, settings, tensors_in
from .support import load_reference, make_larger
from .test_distillation_runs import distilling

CONTENT = "mixed"
WEIGHTS = copy.deepcopy(mtq.INT8_DEFAULT_CFG)
find_quant_cfg_entry_by_path(WEIGHTS["quant_cfg"], "*weight_quantizer")["cfg"]["num_bits"] = 4
WEIGHTS["quant_cfg"].append({"quantizer_name": "*input_quantizer", "enable": False})
# Which part errors may be of what quantisation changes. Noise decides to which of two steps an input between them is
# rounded, and so do the few weights that a step takes there.
KINDS = {
    "four-bit weights": (WEIGHTS, dict(loss=1 / 300, grad_norm=1 / 300, gradient=1 / 3000, weight=1 / 300)),
    "eight-bit weights and inputs": (mtq.INT8_DEFAULT_CFG, dict(gradient=1 / 4)),
}


def train_by_hand(folder: Path, config: dict[str, Any] | None) -> dict[str, Any]:
    """Two steps of torch's AdamW on transformers' model."""
    model = load_reference(folder)
    if config is not None:
        with torch.no_grad():
            mtq.quantize(model, settings(config), lambda m: run_reference(m, known_samples(m.config)))
    return take_two_steps(model, CONTENT, 0.0)


@pytest.fixture(autouse=True)
def _exports_scales(monkeypatch):
    """Megatron-Bridge's switch, without which it exports no quantised model."""
    monkeypatch.setenv("ENABLE_BRIDGE_QUANT_MAPPING", "1")


@dataclass(frozen=True)
class Case:
    start: Path  # a quantised checkpoint
    expected: dict[str, Any]  # what training by hand finds
    limits: dict[str, float]  # how far from it others may be


@pytest.fixture(scope="module", params=KINDS)
def case(request, untied_folder, tmp_path_factory) -> Case:
    config, parts = KINDS[request.param]
    expected = train_by_hand(untied_folder, config)
    changes = errors(train_by_hand(untied_folder, None), expected)
    limits = {name: part * changes[name] for name, part in parts.items()}
    return Case(quantised_checkpoint(untied_folder, tmp_path_factory.mktemp("start"), config), expected, limits)


class Quantised(Split):
    def exported(self) -> dict[str, torch.Tensor]:
        return {name: x for name, x in super().exported().items() if "_quantizer." not in name}

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: x for name, x in super().gradients().items() if "_quantizer." not in name}


def two_steps(topology: Topology, folder: Path, start: Path, rows: str, expected: dict[str, Any]) -> dict[str, float]:
    """Errors of a run; scales are those it began with."""
    split = Quantised(
        folder, topology, checkpoint__pretrained_checkpoint=str(start), model__restore_modelopt_state=True
    )
    (model,) = unwrap_model(split.run.model)
    before = scales_of(model)
    found = compare(split, topology, folder, CONTENT, rows, expected)
    after = scales_of(model)
    assert before and all(torch.equal(before[name], after[name]) for name in before)
    return largest(found)


def check_against(case: Case, found: dict[str, float]) -> None:
    check({name: found[name] for name in case.limits}, case.limits)


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_steps_are_those_of_transformers_quantised_model(untied_folder, case, rows):
    check_against(case, two_steps(Topology(1), untied_folder, case.start, rows, case.expected))


def test_steps_under_tensor_parallelism(untied_folder, case):
    given = (TOPOLOGIES["TP2+SP"], untied_folder, case.start, "packed", case.expected)
    check_against(case, results_of_ranks(two_steps, 2, *given, timeout=300))


def training(inputs: Inputs, start: Path, save: Path | None, teacher: Path | None = None, **settings: Any) -> Any:  # noqa: F811
    """A run that begins with a quantised checkpoint; of a student, if it has a teacher."""
    settings = dict(checkpoint__pretrained_checkpoint=str(start), model__restore_modelopt_state=True) | settings
    return (
        replicated(inputs, save, **settings)
        if teacher is None
        else distilling(replicated, inputs, teacher, save, **settings)
    )


@pytest.fixture(scope="module")
def floats(untied_folder, tmp_path_factory) -> Path:
    return quantised_checkpoint(untied_folder, tmp_path_factory.mktemp("floats"), mtq.FP8_DEFAULT_CFG)


@pytest.fixture(scope="module")
def larger(tmp_path_factory) -> Path:
    return make_larger(tmp_path_factory.mktemp("larger"))


@pytest.mark.parametrize("distils", [False, True], ids=["alone", "from a teacher"])
def test_a_run_resumes_and_is_exported(inputs, floats, larger, tmp_path, distils):  # noqa: F811
    teacher = larger if distils else None
    whole = train(training(inputs, floats, tmp_path / "whole", teacher))
    first = train(training(inputs, floats, tmp_path / "halves", teacher), stop_after=3)
    second = train(training(inputs, floats, tmp_path / "halves", teacher))
    assert losses(first + second) == losses(whole)
    halves, tensors, before = (stored(folder) for folder in (tmp_path / "halves", tmp_path / "whole", floats))
    assert all(torch.equal(halves[key], tensors[key]) for key in tensors | halves)
    scales = {key for key in before if key.endswith("_amax")}
    assert scales == {key for key in tensors if key.endswith("_amax")} and before.keys() <= tensors.keys()
    assert all(torch.equal(tensors[key], before[key]) == (key in scales) for key in before)

    bridge = AutoBridge.from_hf_pretrained(str(inputs.hf))
    (model,) = bridge.load_megatron_model(str(tmp_path / "whole"), wrap_with_ddp=False)
    mtex.export_mcore_gpt_to_hf(
        unwrap_model(model), str(inputs.hf), dtype=torch.float32, export_dir=str(tmp_path / "hf"), moe_router_dtype=None
    )
    exported, layer = tensors_in(tmp_path / "hf"), "model.language_model.layers.0.mlp.down_proj"
    weight, scale = exported[f"{layer}.weight"], exported[f"{layer}.weight_scale"]
    trained = tensors["language_model.decoder.layers.0.mlp.linear_fc2.weight"]
    torch.testing.assert_close(weight.float() * scale, trained, rtol=2**-4, atol=scale.item() * 2**-9)


def test_a_checkpoint_without_scales_is_refused(inputs):  # noqa: F811
    for folder in (inputs.megatron, inputs.hf):
        with pytest.raises(RuntimeError, match="No modelopt_state found"):
            train(training(inputs, folder, None))


def test_what_reads_no_scales_refuses_them(inputs, floats, tmp_path):  # noqa: F811
    """A run that does not restore them, and our export: both would lose what the weights were trained with."""
    with pytest.raises(CheckpointError, match="unexpected"):
        train(training(inputs, floats, None, model__restore_modelopt_state=False))
    with pytest.raises(CheckpointError):
        export_checkpoint(floats, tmp_path / "hf", progress=False)
