"""Run training steps of tiny models on the fake GPU, in Megatron-Bridge's loop: `steps.py FOLDER CASE...`.

The first two steps compile kernels and allocate; the third is examined. Runs with packed rows have a guard, which
accepts every step; runs with padded rows have none.
"""

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge import Qwen3VLLoRA
from qwen3vl_bridge.core.device_transfer import HostCopy
from qwen3vl_bridge.simulation import fake_gpu
from qwen3vl_bridge.simulation.one_rank import Simulation, _Recorder
from qwen3vl_bridge.testing.tiny_checkpoint import make_checkpoint
from qwen3vl_bridge.training.callbacks import build_callbacks
from qwen3vl_bridge.training.config import GuardConfig
from qwen3vl_bridge.training.process_groups import shutdown
from qwen3vl_bridge.upstream.simulated_gpu import balance_routing, join_fake_ranks

import torch
from megatron.core.optimizer import optimizer
from torch._dynamo.utils import counters

from tests.helpers.ranks import forget_models
from tests.helpers.steps import Run, followed, save, step_with_callbacks
from tests.helpers.sync_counter import place_in_code
from tests.parity.on_ranks import Split
from tests.parity.topologies import TOPOLOGIES, Topology
from tests.simulation.fake_gpu.conftest import leave
from tests.training.running import stored

OPTIONS = {"qwen3_5": {"family": "qwen3_5"}, "moe": {"moe": True}}
STEPS = 3
# Cases that are saved, with the weight to compare: its name in the checkpoint, and the name of its parts in the model.
SAVED = {
    "dense packed": ("self_attention.linear_proj.weight", "{}.self_attention.linear_proj.weight"),
    "LoRA packed": ("mlp.linear_fc1.adapter.linear_in.weight", "{}.mlp.linear_fc1.adapter.linear_in.weight"),
    "moe packed": ("0.mlp.experts.experts.linear_fc2.weight", "0.mlp.experts.local_experts.{}.linear_fc2.weight"),
}
OPTIMIZER_STEP = ("", "optimizer step")  # among the synchronizations of a step


def last_step(case: str, folder: Path) -> dict[str, Any]:
    """Return what the last step of a case ("kind rows") does.

    Returns:
        syncs: (package, function) of host-device synchronizations in order, with the optimizer's step among them;
        compiled: number of graphs compiled after the first step; sent: collectives of a fake rank; complete: whether a
        save before the step is complete, or None.
    """
    kind, rows = case.split()
    make_checkpoint(folder, **OPTIONS.get(kind, {}))
    settings: dict[str, Any] = dict(mixed_precision="bf16_mixed", train__train_iters=STEPS)
    # Also where Transformer Engine is installed.
    settings |= dict(model__transformer_impl="local", model__moe_grouped_gemm=False, model__moe_permute_fusion=False)
    topology, recorder = Topology(1, distributed_optimizer=True), _Recorder(Simulation(rank=0, world=2))
    if kind == "LoRA":
        settings |= dict(peft=Qwen3VLLoRA(dim=4, alpha=4), checkpoint__pretrained_checkpoint=str(folder))
    elif kind == "CP2":
        topology = replace(TOPOLOGIES["CP2"], distributed_optimizer=True)
        shutdown()
        join_fake_ranks(0, 2, recorder.note_collective)  # permanent: must be the last case
    split = Split(str(folder), topology, **settings)
    run = split.run
    run.cfg.guard, run.cfg.logger.log_interval = None if rows == "padded" else GuardConfig(), STEPS + 1
    vars(run.optimizer).pop("get_grad_norm", None)  # joined by `set_up` already, and by the callbacks again
    # With CP 2 every microbatch has images for both ranks: torch's fake process group rejects empty messages.
    run.stream = split.batches("video" if kind == "CP2" else "mixed", rows, steps=STEPS)
    syncs: list[tuple[str, str]] = []
    complete = None
    step = run.optimizer.step_with_ready_grads

    def note_and_step() -> bool:
        syncs.append(OPTIMIZER_STEP)
        return step()

    run.optimizer.step_with_ready_grads = note_and_step  # the guard wraps it
    with followed(run, build_callbacks(run.cfg)):
        for number in range(STEPS):
            recorder.counting = number == STEPS - 1
            if recorder.counting and case in SAVED:
                complete = save_and_compare(run, folder / "run", *SAVED[case])
            fake_gpu.mark(f"{case}: step {number}")
            syncs.clear()
            if number == 1:
                graphs = counters["stats"]["unique_graphs"]
            with fake_gpu.on_sync(lambda _: syncs.append(place_in_code()[::2])):
                step_with_callbacks(run)
        fake_gpu.mark(f"{case}: end")
    forget_models()
    simulation = "simulation/", "upstream/simulated_gpu"
    syncs = [(package, function) for package, function in syncs if not function.startswith(simulation)]
    compiled = counters["stats"]["unique_graphs"] - graphs
    return dict(syncs=syncs, compiled=compiled, sent=recorder.report.collectives, complete=complete)


def save_and_compare(run: Run, folder: Path, name: str, part: str) -> bool:
    """Save like the loop, and return True if the stored weight equals the weight on the GPU."""
    run.cfg.checkpoint.save = str(folder)
    save(run)
    layers, weights = "language_model.decoder.layers.", run.model[0].state_dict()
    found = stored(folder)[layers + name]
    mine = torch.stack([weights[layers + part.format(number)].cpu() for number in range(len(found))])
    return bool(mine.any()) and torch.equal(found.view(torch.uint8), mine.view(torch.uint8))


if __name__ == "__main__":
    folder, *cases = sys.argv[1:]
    gc.freeze()  # garbage collections need not traverse imported modules
    balance_routing()
    # Sums are garbage: a root may be complex, and the guard may stop the run. They are read, and replaced.
    norm, tolist = optimizer.get_grad_norm_fp32, HostCopy.tolist
    optimizer.get_grad_norm_fp32 = lambda *args, **kwargs: abs(norm(*args, **kwargs))
    HostCopy.tolist = lambda copy: [1.0 for _ in tolist(copy)]
    found = {case: last_step(case, Path(folder) / case) for case in cases}
    leave(found)
