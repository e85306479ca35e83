"""Training steps of tiny models on the fake GPU, in Megatron-Bridge's loop: `steps.py FOLDER CASE...`.

The third step of each case is marked in the log; the first two compile kernels and allocate. With packed rows a run
has a guard, which lets every step pass; with padded rows it has none.
"""

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge import Qwen3VLLoRA
from qwen3vl_bridge.batch.device_transfer import HostCopy
from qwen3vl_bridge.rehearsal import fake_gpu
from qwen3vl_bridge.rehearsal.one_rank import Rehearsal, _fake_ranks, _Recorder, balance_routing
from qwen3vl_bridge.training.callbacks import callbacks_of
from qwen3vl_bridge.training.config import GuardConfig
from qwen3vl_bridge.training.process_groups import shutdown

import torch
from megatron.core.optimizer import optimizer
from torch._dynamo.utils import counters

from examples.digits.checkpoint import make_checkpoint
from tests.fake_gpu.conftest import leave
from tests.host_waits.counter import place_in_code
from tests.parity.on_ranks import Split
from tests.parity.topologies import TOPOLOGIES, Topology
from tests.ranks import forget_models
from tests.steps import Run, followed, save, step_with_callbacks
from tests.training.running import stored

OPTIONS = {"qwen3_5": {"family": "qwen3_5"}, "moe": {"moe": True}}
STEPS = 3
# Of cases that are saved, weights that are compared: as they are stored, and each of them in the model.
SAVED = {
    "dense packed": ("self_attention.linear_proj.weight", "{}.self_attention.linear_proj.weight"),
    "LoRA packed": ("mlp.linear_fc1.adapter.linear_in.weight", "{}.mlp.linear_fc1.adapter.linear_in.weight"),
    "moe packed": ("0.mlp.experts.experts.linear_fc2.weight", "0.mlp.experts.local_experts.{}.linear_fc2.weight"),
}
THE_OPTIMIZERS_STEP = ("", "the optimizer's step")  # among the waits of a step


def last_step(case: str, folder: Path) -> dict[str, Any]:
    """Of the last step of a case, "kind rows": where the host waits, as (package, function) in order, and among them
    when the optimizer steps; what is sent to a rank that does not exist; how many graphs are compiled after the first
    step; and of a save before the last, whether it is complete.
    """
    kind, rows = case.split()
    make_checkpoint(folder, **OPTIONS.get(kind, {}))
    settings: dict[str, Any] = dict(mixed_precision="bf16_mixed", train__train_iters=STEPS)
    # Also where Transformer Engine is installed.
    settings |= dict(model__transformer_impl="local", model__moe_grouped_gemm=False, model__moe_permute_fusion=False)
    topology, recorder = Topology(1, distributed_optimizer=True), _Recorder(Rehearsal(rank=0, world=2))
    if kind == "LoRA":
        settings |= dict(peft=Qwen3VLLoRA(dim=4, alpha=4), checkpoint__pretrained_checkpoint=str(folder))
    elif kind == "CP2":
        topology = replace(TOPOLOGIES["CP2"], distributed_optimizer=True)
        shutdown()
        _fake_ranks(recorder)  # nothing is put back: cases after this one would have them too
    split = Split(str(folder), topology, **settings)
    run = split.run
    run.cfg.guard, run.cfg.logger.log_interval = None if rows == "padded" else GuardConfig(), STEPS + 1
    vars(run.optimizer).pop("get_grad_norm", None)  # joined by `set_up` already, and by the callbacks again
    # Under CP 2 every microbatch has pictures for both ranks: torch's fake ranks answer an empty message with an error.
    run.stream = split.batches("video" if kind == "CP2" else "mixed", rows, steps=STEPS)
    waits: list[tuple[str, str]] = []
    complete = None
    step = run.optimizer.step_with_ready_grads

    def noted() -> bool:
        waits.append(THE_OPTIMIZERS_STEP)
        return step()

    run.optimizer.step_with_ready_grads = noted  # the guard's is around it
    with followed(run, callbacks_of(run.cfg)):
        for number in range(STEPS):
            recorder.counting = number == STEPS - 1
            if recorder.counting and case in SAVED:
                complete = saves(run, folder / "run", *SAVED[case])
            fake_gpu.mark(f"{case}: step {number}")
            waits.clear()
            if number == 1:
                graphs = counters["stats"]["unique_graphs"]
            with fake_gpu.on_wait(lambda _: waits.append(place_in_code()[::2])):
                step_with_callbacks(run)
        fake_gpu.mark(f"{case}: end")
    forget_models()
    waits = [(package, function) for package, function in waits if not function.startswith("rehearsal/")]  # stand-ins
    compiled = counters["stats"]["unique_graphs"] - graphs
    return dict(waits=waits, compiled=compiled, sent=recorder.report.collectives, complete=complete)


def saves(run: Run, folder: Path, name: str, part: str) -> bool:
    """Save as the loop does; whether weights are stored as they are on the GPU."""
    run.cfg.checkpoint.save = str(folder)
    save(run)
    layers, weights = "language_model.decoder.layers.", run.model[0].state_dict()
    found = stored(folder)[layers + name]
    mine = torch.stack([weights[layers + part.format(number)].cpu() for number in range(len(found))])
    return bool(mine.any()) and torch.equal(found.view(torch.uint8), mine.view(torch.uint8))


if __name__ == "__main__":
    folder, *cases = sys.argv[1:]
    gc.freeze()  # collections of set-ups and compilations need not walk through what is imported
    balance_routing()
    # What is read of sums is garbage, of which a root may be complex, and for which a guard may stop the run. The host
    # waits for them as it would, and takes other figures.
    norm, tolist = optimizer.get_grad_norm_fp32, HostCopy.tolist
    optimizer.get_grad_norm_fp32 = lambda *args, **kwargs: abs(norm(*args, **kwargs))
    HostCopy.tolist = lambda copy: [1.0 for _ in tolist(copy)]
    found = {case: last_step(case, Path(folder) / case) for case in cases}
    leave(found)
