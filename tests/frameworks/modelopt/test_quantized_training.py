"""Training of quantized models in Megatron-Bridge's loop, which begins with a quantized checkpoint."""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint import export_checkpoint
from qwen3vl_bridge.config.checks import run_checks
from qwen3vl_bridge.core.files import CheckpointError
from qwen3vl_bridge.peft.lora import Qwen3VLLoRA
from qwen3vl_bridge.training import run_validation

import modelopt.torch.export as mtex
import modelopt.torch.quantization as mtq
import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.post_training.checkpointing import has_modelopt_state
from megatron.core.utils import unwrap_model
from modelopt.torch.quantization.config import find_quant_cfg_entry_by_path

from tests.frameworks.modelopt.quantized import known_samples, quantised_checkpoint, scales_of, settings, tensors_in
from tests.frameworks.modelopt.support import load_reference, make_larger
from tests.frameworks.modelopt.test_distillation_runs import distilling
from tests.helpers.batches import run_reference
from tests.helpers.forked import results_of_ranks
from tests.helpers.noise import check
from tests.helpers.ranks import largest
from tests.models.qwen3_5.tiny import make_checkpoint as make_qwen3_5
from tests.parity.on_ranks import Split, compare
from tests.parity.references import errors, take_two_steps
from tests.parity.topologies import TOPOLOGIES, Topology
from tests.training.running import Inputs, losses, replicated, sharded, stored, train

CONTENT = "mixed"
WEIGHTS = copy.deepcopy(mtq.INT8_DEFAULT_CFG)
find_quant_cfg_entry_by_path(WEIGHTS["quant_cfg"], "*weight_quantizer")["cfg"]["num_bits"] = 4
WEIGHTS["quant_cfg"].append({"quantizer_name": "*input_quantizer", "enable": False})
# Megatron has gates of linear attention in a larger layer, and ModelOpt leaves transformers' as they are.
WEIGHTS["quant_cfg"].append({"quantizer_name": "*in_proj_[ab].weight_quantizer", "cfg": {"num_bits": 4, "axis": 0}})
# Which part errors may be of what quantisation changes. Noise decides to which of two steps an input between them is
# rounded, and so do the few weights that a step takes there.
OF_WEIGHTS = dict(loss=1 / 300, grad_norm=1 / 300, gradient=1 / 3000, weight=1 / 300)
KINDS = {
    "dense, four-bit weights": ("dense", WEIGHTS, OF_WEIGHTS),
    "dense, eight-bit weights and inputs": ("dense", mtq.INT8_DEFAULT_CFG, dict(gradient=1 / 4)),
    "MoE, four-bit weights": ("MoE", WEIGHTS, OF_WEIGHTS),
    "Qwen3.5, four-bit weights": ("Qwen3.5", WEIGHTS, OF_WEIGHTS),
}


def train_by_hand(folder: Path, config: dict[str, Any] | None) -> dict[str, Any]:
    """Two steps of torch's AdamW on transformers' model."""
    model = load_reference(folder)
    if config is not None:
        with torch.no_grad():
            mtq.quantize(model, settings(config), lambda m: run_reference(m, known_samples(m.config)))
    return take_two_steps(model, CONTENT, 0.0)


@dataclass(frozen=True)
class Case:
    folder: Path  # of the Hugging Face model
    start: Path  # a quantised checkpoint
    expected: dict[str, Any]  # what training by hand finds
    limits: dict[str, float]  # how far from it others may be


@pytest.fixture(scope="module")
def cases(untied_folder, moe_folder, tmp_path_factory) -> Callable[[str], Case]:
    root = tmp_path_factory.mktemp("quantised")
    folders = {"dense": untied_folder, "MoE": moe_folder, "Qwen3.5": make_qwen3_5(root / "qwen3_5")}

    @functools.cache
    def case(kind: str) -> Case:
        name, config, parts = KINDS[kind]
        folder, start = folders[name], root / kind
        expected = train_by_hand(folder, config)
        changes = errors(train_by_hand(folder, None), expected)
        limits = {name: part * changes[name] for name, part in parts.items()}
        return Case(folder, quantised_checkpoint(folder, start, config), expected, limits)

    return case


def two_steps(topology: Topology, case: Case, rows: str) -> dict[str, float]:
    """Errors of a run; scales are those it began with."""
    split = Split(
        case.folder, topology, checkpoint__pretrained_checkpoint=str(case.start), model__restore_modelopt_state=True
    )
    (model,) = unwrap_model(split.run.model)
    before = scales_of(model)
    found = largest(compare(split, topology, case.folder, CONTENT, rows, case.expected))
    after = scales_of(model)
    assert before and all(torch.equal(before[name], after[name]) for name in before)
    return {name: found[name] for name in case.limits}


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_training_matches_transformers(cases, kind):
    case = cases(kind)
    for rows in ("padded", "packed"):
        check(two_steps(Topology(1), case, rows), case.limits)


# Tensor-parallel ranks have parts of the scales, pipeline stages and expert-parallel ranks those of some layers.
ON_RANKS = [
    ("TP2+SP", "dense, four-bit weights"), ("TP2+SP", "dense, eight-bit weights and inputs"),
    ("PP2", "dense, four-bit weights"), ("EP2", "MoE, four-bit weights"), ("TP2+SP", "Qwen3.5, four-bit weights"),
]  # fmt: skip


def each_on_ranks(given: list[tuple[str, Case]]) -> list[dict[str, float]]:
    return [two_steps(TOPOLOGIES[topology], case, "packed") for topology, case in given]


@pytest.fixture(scope="module")
def on_ranks(cases):
    given = [(topology, cases(kind)) for topology, kind in ON_RANKS]
    return results_of_ranks(each_on_ranks, 2, given, timeout=500)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ON_RANKS)), ids=[" ".join(case) for case in ON_RANKS])
def test_quantized_training_on_two_ranks_matches_transformers(cases, on_ranks, number):
    check(on_ranks[number], cases(ON_RANKS[number][1]).limits)


def training(inputs: Inputs, start: Path, save: Path | None, teacher: Path | None = None, **settings: Any) -> Any:
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "distils", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["alone", "from a teacher"]
)
def test_resumed_quantized_run_equals_uninterrupted_run(inputs, floats, larger, tmp_path, distils):
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


@pytest.mark.slow
def test_adapter_run_on_quantized_checkpoint_starts_at_quantized_loss(inputs, floats, tmp_path):
    """They begin with what it computes, and go on where they stopped."""
    often = dict(train__train_iters=2, logger__log_interval=1, checkpoint__save_interval=1, validation__eval_interval=0)

    def adapting(save: Path | None) -> Any:
        cfg = training(inputs, floats, save, **often)
        cfg.peft = Qwen3VLLoRA(dim=4, alpha=8)
        return cfg

    whole = train(adapting(tmp_path / "whole"))
    alone = train(training(inputs, floats, None, **often))
    plain = train(replicated(inputs, None, **often))
    assert whole[0]["loss"] == alone[0]["loss"] != plain[0]["loss"]
    first = train(adapting(tmp_path / "halves"), stop_after=1)
    assert losses(first + train(adapting(tmp_path / "halves"))) == losses(whole)
    assert not any("_quantizer." in key for key in stored(tmp_path / "whole"))


def test_quantized_training_raises_if_checkpoint_is_not_quantized(inputs):
    for folder in (inputs.megatron, inputs.hf):
        with pytest.raises(RuntimeError, match="No modelopt_state found"):
            train(training(inputs, folder, None))


def test_quantized_run_raises_if_checkpoint_has_more_layers_than_model(inputs, floats):
    """Megatron-Bridge would train without them."""
    cfg = training(inputs, floats, None)
    cfg.model.num_layers -= 1
    with pytest.raises(CheckpointError, match=r"does not fit the model: .* unexpected"):
        train(cfg)


def test_run_and_export_raise_if_quantization_scales_would_be_lost(inputs, floats, tmp_path):
    """A run that does not restore the scales, and our export, would lose them."""
    with pytest.raises(CheckpointError, match="ModelOpt quantized it"):
        train(training(inputs, floats, None, model__restore_modelopt_state=False))
    with pytest.raises(CheckpointError, match="ModelOpt quantized it"):
        export_checkpoint(floats, tmp_path / "hf", hf_model=inputs.hf, progress=False)


@contextmanager
def allowed_but_for(monkeypatch, cfg: Any, says: str) -> Iterator[None]:
    """A run's configuration is refused; in the body it is not."""
    with pytest.raises(ValueError, match=f"is True with model.restore_modelopt_state, expected False: {says}"):
        run_checks(run_validation.BEFORE_VALIDATE, cfg)
    with monkeypatch.context() as patch:
        others = [
            rule for rule in run_validation.BEFORE_VALIDATE if getattr(rule, "when", None) != run_validation.QUANTIZED
        ]
        patch.setattr(run_validation, "BEFORE_VALIDATE", tuple(others))
        yield


SHORT = dict(train__train_iters=2, checkpoint__save_interval=2)


@pytest.mark.slow
def test_checkpoint_of_quantized_fsdp_run_lacks_quantizer_state(inputs, floats, tmp_path, monkeypatch):
    start = dict(checkpoint__pretrained_checkpoint=str(floats), model__restore_modelopt_state=True)
    cfg = sharded(inputs, tmp_path, **start, **SHORT)
    with allowed_but_for(monkeypatch, cfg, "its checkpoints have no quantizers"):
        train(cfg)
    assert (tmp_path / "iter_0000002").is_dir() and not has_modelopt_state(str(tmp_path))


def test_quantized_run_raises_if_process_groups_are_decentralized(inputs, floats, tmp_path, monkeypatch):
    cfg = training(inputs, floats, tmp_path, **SHORT)
    cfg.dist.use_decentralized_pg, cfg.dist.use_gloo_process_groups = True, False
    with (
        allowed_but_for(monkeypatch, cfg, "ModelOpt needs megatron-core's global"),
        pytest.raises(AssertionError, match=r"group .* is not initialized"),
    ):
        train(cfg)
