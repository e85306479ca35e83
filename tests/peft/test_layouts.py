"""Adapters under every parallel layout: initial values, loss and all gradients are equal to those of one process."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from qwen3vl_bridge.peft.adapter_rows import LINEAR_LAYERS, OF_LINEAR_ATTENTION
from qwen3vl_bridge.peft.insertion import PartialSumLoRALinear
from qwen3vl_bridge.peft.lora import Qwen3VLDoRA, Qwen3VLLoRA
from qwen3vl_bridge.training.process_groups import initialize

import pytest
import torch
from megatron.bridge import AutoBridge
from torch import Tensor

from tests.helpers import noise
from tests.helpers.forked import results_of_ranks
from tests.helpers.ranks import leave_groups
from tests.helpers.steps import forward_backward, save
from tests.models.qwen3_5.tiny import make_checkpoint
from tests.parity.on_ranks import Split
from tests.parity.references import MICROBATCHES
from tests.parity.topologies import TOPOLOGIES, Topology

ONE = Topology(1)
ALL_PARTS = dict(adapt_vision_model=True, adapt_vision_projection=True)
LAYERS = {
    "qwen3_vl": dict(dim=4, alpha=8, **ALL_PARTS),
    "qwen3_5": dict(dim=4, alpha=8, **ALL_PARTS, target_modules=[*LINEAR_LAYERS, *OF_LINEAR_ATTENTION]),
}


@dataclass(frozen=True)
class Case:
    """A model with adapters. One process saves them, and every layout continues from there."""

    family: str
    kind: str
    method: str = "LoRA"
    experts: bool = False  # whether routed experts have adapters
    fields: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return f"{self.family} {self.kind} {self.method}{' experts' * self.experts}"

    def peft(self, **fields: Any) -> Qwen3VLLoRA | Qwen3VLDoRA:
        if self.method == "DoRA":
            return Qwen3VLDoRA(**LAYERS[self.family], **fields)
        return Qwen3VLLoRA(**LAYERS[self.family], adapt_experts=self.experts, **fields)

    def allows(self, topology: Topology) -> bool:
        fields = topology.fields
        if self.kind not in topology.families or topology.distributed_optimizer:  # which shards the gradients
            return False
        if self.method == "DoRA" and {"tensor_model_parallel_size", "pipeline_model_parallel_size"} & fields.keys():
            return False
        tensor = fields.get("tensor_model_parallel_size", 1)
        if self.experts and fields.get("expert_tensor_parallel_size", tensor) > 1:
            return False
        # Qwen3.5 requires sequence parallelism with tensor parallelism.
        without_sp = "tensor_model_parallel_size" in fields and "sequence_parallel" not in fields
        return not (self.family == "qwen3_5" and without_sp)


CASES = [
    Case(family, kind, method, experts)
    for family in LAYERS
    for kind, method, experts in (
        ("dense", "LoRA", False), ("MoE", "LoRA", True), ("MoE", "LoRA", False),
        ("dense", "DoRA", False), ("MoE", "DoRA", False),
    )
]  # fmt: skip


def overlap(case: Case, topology: Topology) -> dict[str, Any]:
    """Overlap shared experts with the dispatcher if there are both; one process does not overlap."""
    overlaps = case.family == "qwen3_5" and case.kind == "MoE" and topology is not ONE
    dispatches = topology.fields.get("moe_token_dispatcher_type", "alltoall") == "alltoall"
    return dict(model__moe_shared_expert_overlap=True) if overlaps and dispatches else {}


def split(case: Case, folder: Path, topology: Topology, **settings: Any) -> Split:
    peft = case.peft(lora_B_init_method="normal")
    settings |= overlap(case, topology) | dict(peft=peft, checkpoint__pretrained_checkpoint=str(folder))
    settings |= dict(checkpoint__load_optim=False, checkpoint__save_optim=False, checkpoint__load_rng=False)
    return Split(folder, topology, **settings)


def gradients(found: Split) -> dict[str, Tensor]:
    """Return the gradients of all adapters by the names of `peft`; the conversion is linear."""
    parameters = [p for p in found.parameters if p.requires_grad]
    weights = [p.data for p in parameters]
    for p in parameters:
        p.data = p.main_grad.detach().clone()
    exported = found.bridge._model_bridge.adapters(found.run.model)[0]
    result = {name: tensor.clone() for name, tensor in exported.items()}
    for p, weight in zip(parameters, weights, strict=True):
        p.data = weight
    return result


def step(found: Split) -> dict[str, Any]:
    run = found.run
    found.begin(found.batches("mixed", "packed", steps=1), "packed")
    total, tokens = forward_backward(run, run.stream, MICROBATCHES // run.cfg.data_parallel_size)
    return dict(loss=(total / tokens).item(), gradients=gradients(found))


def errors(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    assert found["gradients"].keys() == expected["gradients"].keys()
    worst = noise.relative(found["gradients"], expected["gradients"])
    return dict(loss=abs(found["loss"] / expected["loss"] - 1), gradients=max(worst.values()))


def begin(cases: list[Case], folders: dict[tuple[str, str], Path], start: Path) -> dict[str, tuple[dict, dict]]:
    """Save nonzero adapters in one process, and return the results of a step and the tolerances of each case."""
    found = {}
    for case in cases:
        of_case = split(case, folders[case.family, case.kind], ONE, checkpoint__save=str(start / case.name))
        of_case.run.progress.step = 1
        save(of_case.run)
        compute = partial(step, of_case)
        expected = compute()
        model = of_case.run.model[0]

        def moved(seed: int, of_case: Split = of_case, model: torch.nn.Module = model) -> dict[str, Any]:
            with noise.rounded(model, seed):
                of_case.start = [p.detach().clone() for p in of_case.parameters]
                return step(of_case)

        own = of_case.start  # noise.rounded moves the weights, and a step begins with these
        limits = noise.allowed([errors(moved(seed), expected) for seed in noise.SEEDS[:2]])
        of_case.start = own
        found[case.name] = expected, limits
    return found


def go_on(
    pairs: list[tuple[str, Case]], folders: dict[tuple[str, str], Path], start: Path, expected: dict[str, tuple]
) -> dict[tuple[str, str], dict[str, float]]:
    """Run a step on ranks from the adapters of one process, and return its errors."""
    found = {}
    for name, case in pairs:
        folder = folders[case.family, case.kind]
        of_case = split(case, folder, TOPOLOGIES[name], checkpoint__load=str(start / case.name))
        if "TP2" in name and overlap(case, TOPOLOGIES[name]):
            assert any(isinstance(m, PartialSumLoRALinear) for m in of_case.run.model[0].modules())
        found[name, case.name] = errors(step(of_case), expected[case.name][0])
        print(name, case.name, found[name, case.name], expected[case.name][1], flush=True)
    return found


def initial_values(pairs: list[tuple[Topology, Case]], folders: dict[tuple[str, str], Path]) -> list[dict[str, Tensor]]:
    """Return the initial values of adapters."""
    found = []
    for topology, case in pairs:
        bridge = AutoBridge.from_hf_pretrained(str(folders[case.family, case.kind]))
        provider = bridge.to_megatron_provider(load_weights=False)
        for name, value in topology.fields.items():
            setattr(provider, name, value)
        peft = case.peft()
        provider.register_pre_wrap_hook(lambda chunks, peft=peft: peft(chunks))
        provider.finalize()
        leave_groups()
        groups = initialize(provider, seed=7)
        model = provider.provide_distributed_model(
            wrap_with_ddp=False, mixed_precision_wrapper=None, pg_collection=groups
        )
        found.append(dict(bridge._model_bridge.adapters(model)[0]))
    return found


@pytest.fixture(scope="module")
def folders(untied_folder, moe_folder, tmp_path_factory) -> dict[tuple[str, str], Path]:
    found = {("qwen3_vl", "dense"): untied_folder, ("qwen3_vl", "MoE"): moe_folder}
    for kind in ("dense", "MoE"):
        found["qwen3_5", kind] = make_checkpoint(tmp_path_factory.mktemp(kind), moe=kind == "MoE")
    return found


def check_layouts(pairs: Sequence[tuple[str, Case]], folders: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    cases = list(dict.fromkeys(case for _, case in pairs))
    expected = results_of_ranks(begin, 1, cases, folders, tmp_path)
    for ranks in sorted({TOPOLOGIES[name].ranks for name, _ in pairs}):
        own = [pair for pair in pairs if TOPOLOGIES[pair[0]].ranks == ranks]
        found = results_of_ranks(go_on, ranks, own, folders, tmp_path, expected)
        for name, case in own:
            noise.check(found[name, case.name], expected[case.name][1])


@pytest.mark.slow
def test_adapter_step_with_overlapped_shared_experts_matches_one_process(folders, tmp_path):
    check_layouts([("TP2+SP+EP2", Case("qwen3_5", "MoE", experts=True))], folders, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_adapter_loss_and_gradients_in_every_layout_match_one_process(folders, tmp_path, case):
    check_layouts([(name, case) for name in TOPOLOGIES if case.allows(TOPOLOGIES[name])], folders, tmp_path)


@pytest.mark.slow
def test_adapter_initial_values_in_parallel_layouts_equal_one_process(folders):
    """The values are equal, not only their distribution; experts have different values."""
    experts = Case("qwen3_5", "MoE", experts=True)
    pairs = [
        ("TP2+SP", Case("qwen3_vl", "dense")), ("PP2, first stage of 1", Case("qwen3_vl", "dense")),
        ("TP2+SP", Case("qwen3_5", "MoE")), ("TP2+SP+EP2", experts),
    ]  # fmt: skip
    alone = results_of_ranks(initial_values, 1, [(ONE, case) for _, case in pairs], folders)
    split = results_of_ranks(initial_values, 2, [(TOPOLOGIES[name], case) for name, case in pairs], folders)
    for (name, case), expected, found in zip(pairs, alone, split, strict=True):
        assert found.keys() == expected.keys()
        assert [key for key, one in expected.items() if not torch.equal(found[key], one)] == [], (name, case)
        for key, one in expected.items():
            if key.endswith("lora_A.weight") and ".experts" not in key:
                # Xavier, and what the standard deviation of so few numbers may be off.
                std = (2 / sum(one.shape)) ** 0.5
                assert abs(one.std() / std - 1) < 5 / (2 * one.numel()) ** 0.5, key
    distinct = [one for key, one in alone[-1].items() if ".experts" in key and "lora_A" in key]
    assert distinct and all(len({tuple(row) for row in one.tolist()}) == len(one) for one in distinct)
