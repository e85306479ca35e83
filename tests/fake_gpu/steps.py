"""Training steps of tiny models on the fake GPU, in Megatron-Bridge's loop: `steps.py FOLDER CASE...`.

The third step of each case is marked in the log; the first two compile kernels and allocate.
"""

import gc
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge import Qwen3VLLoRA
from qwen3vl_bridge.batch.device_transfer import HostCopy
from qwen3vl_bridge.rehearsal import fake_gpu
from qwen3vl_bridge.rehearsal.one_rank import Rehearsal, _fake_ranks, _Recorder, balance_routing
from qwen3vl_bridge.training.callbacks import callbacks_of
from qwen3vl_bridge.training.process_groups import shutdown

import torch
from megatron.core.optimizer import optimizer
from torch._dynamo.utils import counters

from examples.digits.checkpoint import make_checkpoint
from tests.fake_gpu.conftest import leave
from tests.host_waits.counter import UPSTREAM, place_in_code
from tests.parity.on_ranks import Split
from tests.parity.topologies import TOPOLOGIES, Topology
from tests.ranks import forget_models
from tests.steps import Run, followed, save, step_with_callbacks
from tests.training.running import stored

OPTIONS = {"qwen3_5": {"family": "qwen3_5"}, "moe": {"moe": True}}
STEPS = 3
EMBEDDING = "language_model.embedding.word_embeddings.weight"


def last_step(case: str, folder: Path) -> dict[str, Any]:
    """Of the last step of a case, "kind rows": which functions wait, what is sent to a rank that does not exist; how
    many graphs are compiled after the first step; and of a save before the last, whether it is complete.
    """
    kind, rows = case.split()
    make_checkpoint(folder, **OPTIONS.get(kind, {}))
    settings: dict[str, Any] = dict(mixed_precision="bf16_mixed", train__train_iters=STEPS)
    topology, recorder = Topology(1, distributed_optimizer=True), _Recorder(Rehearsal(rank=0, world=2))
    if kind == "LoRA":
        settings |= dict(peft=Qwen3VLLoRA(dim=4, alpha=4), checkpoint__pretrained_checkpoint=str(folder))
    elif kind == "CP2":
        topology = replace(TOPOLOGIES["CP2"], distributed_optimizer=True)
        shutdown()
        _fake_ranks(recorder)  # nothing is put back: cases after this one would have them too
    split = Split(str(folder), topology, **settings)
    run = split.run
    # Losses that a kernel would compute are garbage, so nothing may judge them.
    run.cfg.guard, run.cfg.logger.log_interval = None, STEPS + 1
    vars(run.optimizer).pop("get_grad_norm", None)  # joined by `set_up` already, and by the callbacks again
    # Under CP 2 every microbatch has pictures for both ranks: torch's fake ranks answer an empty message with an error.
    run.stream = split.batches("video" if kind == "CP2" else "mixed", rows, steps=STEPS)
    waits: Counter[tuple[str, str, str]] = Counter()
    complete = None
    with followed(run, callbacks_of(run.cfg)):
        for number in range(STEPS):
            recorder.counting = number == STEPS - 1
            if recorder.counting and case == "dense packed":
                complete = saves(run, folder / "run")
            fake_gpu.mark(f"{case}: step {number}")
            waits.clear()
            if number == 1:
                graphs = counters["stats"]["unique_graphs"]
            with fake_gpu.on_wait(lambda _: waits.update([place_in_code()])):
                step_with_callbacks(run)
        fake_gpu.mark(f"{case}: end")
    forget_models()
    ours = {
        function: times
        for (package, _, function), times in waits.items()
        if package not in UPSTREAM and not function.startswith("rehearsal/")  # stand-ins
    }
    compiled = counters["stats"]["unique_graphs"] - graphs
    return dict(waits=ours, compiled=compiled, sent=recorder.report.collectives, complete=complete)


def saves(run: Run, folder: Path) -> bool:
    """Save as the loop does; whether a weight is stored as it is on the GPU."""
    run.cfg.checkpoint.save = str(folder)
    save(run)
    mine = run.model[0].state_dict()[EMBEDDING].cpu()
    return bool(mine.any()) and torch.equal(stored(folder)[EMBEDDING], mine)


if __name__ == "__main__":
    folder, *cases = sys.argv[1:]
    gc.collect()
    gc.freeze()  # collections of set-ups and compilations need not walk through what is imported
    balance_routing()
    # Roots are taken of sums that are not computed, which may be below zero.
    norm, tolist = optimizer.get_grad_norm_fp32, HostCopy.tolist
    optimizer.get_grad_norm_fp32 = lambda *args, **kwargs: abs(norm(*args, **kwargs))
    HostCopy.tolist = lambda copy: [abs(figure) for figure in tolist(copy)]
    found = {case: last_step(case, Path(folder) / case) for case in cases}
    leave(found)
