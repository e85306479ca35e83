"""Resume runs with one parallel layout after the other, by their checkpoints, in Megatron-Bridge's loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qwen3vl_bridge.training import run_lock

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from tests.helpers.forked import results_of_ranks
from tests.helpers.noise import SEEDS, allowed, rounded_folder
from tests.helpers.ranks import of_all_ranks
from tests.parity.topologies import MODULES, TOPOLOGIES, split_by
from tests.training.running import configured, optimizer_states, train

SPLITS = {name: topology.fields for name, topology in (TOPOLOGIES | MODULES).items()}
SPLITS["TP2+SP, padded vocabulary"] = SPLITS["TP2+SP"] | dict(should_pad_vocab=True, make_vocab_size_divisible_by=300)
MOMENTS = ("exp_avg", "exp_avg_sq")
LOGGED = ("step", "loss", "grad_norm")
# The same rows with every layout; four microbatches, for data-parallel ranks and interleaved stages.
COMMON = dict(
    dataset__pad_to_multiple_of=8, train__global_batch_size=4, validation__eval_iters=0, optimizer__lr=1e-3,
    scheduler__lr_warmup_iters=2,
)  # fmt: skip


@dataclass
class Journey:
    hf: str
    data: str
    save: str
    split: str | None = None
    fsdp: bool = False
    bf16: bool = False
    distributed: bool = False
    pretrained: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        cfg = configured(
            *(self.hf, self.data, self.pretrained or self.hf, self.save, COMMON | self.settings),
            fsdp=self.fsdp, bf16=self.fsdp or self.bf16, distributed=self.distributed,
        )  # fmt: skip
        split_by(cfg, SPLITS[self.split] if self.split else {})
        return cfg


def go_on(journey: Journey, count: int, *callbacks: Callback) -> list[list[float]]:
    log = train(journey.config(), stop_after=count, callbacks=callbacks)
    return [[entry[name] for name in LOGGED] for entry in log]


class Weights(Callback):
    def __init__(self, hf: str) -> None:
        self._bridge = AutoBridge.from_hf_pretrained(hf)
        self.found: dict[str, torch.Tensor] = {}

    def on_train_end(self, context: CallbackContext) -> None:
        exported = self._bridge.export_hf_weights(context.model, cpu=True, show_progress=False)
        self.found = {name: tensor.clone() for name, tensor in exported}


def export(journey: Journey, count: int) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    weights, whole = Weights(journey.hf), dict(train__train_iters=count, scheduler__lr_warmup_iters=0)
    log = train(replace(journey, settings=journey.settings | whole).config(), callbacks=[weights])
    return [[entry[name] for name in LOGGED] for entry in log], weights.found


class RunState(Callback):
    """Record random numbers after each step, and weights and moments at each save."""

    def __init__(self) -> None:
        self.draws: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Draw from both generators; the second one differs between tensor-parallel ranks."""
        with get_cuda_rng_tracker().fork():
            tracked = torch.rand(3)
        self.draws += [torch.rand(3), tracked]

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        found = [p for chunk in context.model for p in chunk.parameters()]
        found += [state[moment] for state in optimizer_states(context.optimizer) for moment in MOMENTS]
        self.tensors = [tensor.detach().clone() for tensor in found]


def interrupt(halves: Journey, count: int) -> bool:
    expected, first, second = RunState(), RunState(), RunState()
    whole = go_on(replace(halves, save=f"{halves.save}_whole"), 2 * count, expected)
    log = go_on(halves, count, first) + go_on(halves, count, second)
    assert [entry[0] for entry in log] == [*range(1, 2 * count + 1)] and expected.tensors
    pairs = [(expected.draws, first.draws + second.draws), (expected.tensors, second.tensors)]
    same = log == whole and all(
        torch.equal(one, other) for ours, theirs in pairs for one, other in zip(ours, theirs, strict=True)
    )
    return all(of_all_ranks(same))


Case = tuple[Callable, Journey, int]  # `go_on`, `export` or `interrupt`, with its arguments


def do_all(cases: list[Case]) -> list[Any]:
    torch.distributed.init_process_group("gloo")  # otherwise Megatron-Bridge's loop does it, and destroys it at its end
    return [what(journey, count) for what, journey, count in cases]


# Layouts by number of ranks, one step with each. Megatron-FSDP resumes with other numbers of data-parallel ranks.
STOPS = {
    "dense": {
        2: ("TP2+SP, padded vocabulary", "PP2", "DP2", "1 + 1", "CP2"), 3: ("1 + PP2",), 4: ("PP2+TP2+SP", "DP2+CP2"),
    },
    "MoE": {2: ("TP2+SP+EP2", "EP2", "TP2+SP+ETP2", "CP2+EP2", "PP2+VPP2"), 3: ("TP2 + 1",), 4: ("PP2+DP2+EP2",)},
    "sharded": {2: ("DP2",)},
}  # fmt: skip


@dataclass
class Chain:
    family: str
    hf: Path
    data: Path
    save: Path
    distributed: bool = False

    @property
    def last_step(self) -> int:
        return 2 + sum(map(len, STOPS[self.family].values()))

    def limits(self, expected: list[list[float]], scratch: Path) -> dict[str, float]:
        dtype = torch.bfloat16 if self.family == "sharded" else torch.float32
        noises = []
        for seed in SEEDS[:2]:
            name = f"{self.save.name}_neighbours_{seed}"
            near = replace(self, hf=rounded_folder(self.hf, scratch / f"{name}_hf", seed, dtype))
            noises.append(errors(go_on(near.journey(None, str(scratch / name)), self.last_step), expected))
        return allowed(noises, dtype)

    def journey(self, split: str | None, save: str | None = None) -> Journey:
        place = dict(hf=str(self.hf), data=str(self.data), save=save or str(self.save))
        kind = dict(fsdp=self.family == "sharded", distributed=self.distributed)
        return Journey(**place, split=split, **kind, settings=dict(train__train_iters=self.last_step))

    def cases(self, ranks: int) -> list[Case]:
        return [(go_on, self.journey(split), 1) for split in STOPS[self.family].get(ranks, ())]


def on_ranks(ranks: int, cases: list[Case]) -> list[Any]:
    # The ranks resume runs of this process, where pytest keeps a stopped run's exception, and so its locked folder.
    for lock in list(run_lock._locks.values()):
        lock.release()
    return results_of_ranks(do_all, ranks, cases, timeout=1800)


def errors(found: list[list[float]], expected: list[list[float]]) -> dict[str, float]:
    assert [entry[0] for entry in found] == [entry[0] for entry in expected]
    return {
        name: max(abs(one[i] / other[i] - 1) for one, other in zip(found, expected, strict=True))
        for i, name in ((1, "loss"), (2, "grad_norm"))
    }


def travel(
    chains: list[Chain], scratch: Path, more: Sequence[Case] = ()
) -> tuple[list[list[list[float]]], list[tuple[dict[str, float], dict[str, float]]], list[Any]]:
    expected, found, answers = [], [], []
    for chain in chains:
        expected.append(go_on(chain.journey(None, f"{chain.save}_whole"), chain.last_step))
        found.append(go_on(chain.journey(None), 1))
    for ranks in (2, 3, 4):
        cases = [(n, case) for n, chain in enumerate(chains) for case in chain.cases(ranks)]
        others = list(more) if ranks == 2 else []
        if not cases and not others:
            continue
        logs = on_ranks(ranks, [case for _, case in cases] + others)
        for (n, _), log in zip(cases, logs, strict=False):
            found[n] += log
        answers += logs[len(cases) :]
    for chain, log in zip(chains, found, strict=True):
        log += go_on(chain.journey(None), 1)
    worst = [
        (errors(one, other), chain.limits(other, scratch))
        for chain, one, other in zip(chains, found, expected, strict=True)
    ]
    return found, worst, answers
