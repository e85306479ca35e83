"""Only megatron-core and Megatron-Bridge synchronize host and device in a training step.

`tests/simulation/host_syncs` counts on the CPU, where branches for CUDA and Transformer Engine's layers do not run.
"""

import contextlib
import warnings
from collections import Counter

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.testing.tiny_checkpoint import make_checkpoint
from qwen3vl_bridge.training.callbacks import build_callbacks
from qwen3vl_bridge.training.config import GuardConfig

import pytest

from tests.gpu.conftest import KINDS
from tests.helpers.steps import followed, step_with_callbacks
from tests.helpers.sync_counter import PACKAGES
from tests.helpers.sync_warnings import Syncs, count_syncs, own_syncs
from tests.parity.on_ranks import Split
from tests.parity.topologies import Topology

OPTIONS = dict(zip(KINDS, ({}, {"moe": True}, {"family": "qwen3_5"}), strict=True))
STEPS = 3  # the last is counted; the others compile kernels and allocate


@pytest.mark.parametrize("kind", KINDS)
def test_training_step_has_no_host_syncs_in_our_code(kind, device, tmp_path):
    """bfloat16 run with packed rows, guard and distributed optimizer."""
    folder = make_checkpoint(tmp_path / "model", **OPTIONS[kind])
    topology = Topology(1, distributed_optimizer=True)
    split = Split(str(folder), topology, mixed_precision="bf16_mixed", train__train_iters=STEPS)
    run = split.run
    run.cfg.guard, run.cfg.logger.log_interval = GuardConfig(on_nan="skip"), STEPS + 1
    vars(run.optimizer).pop("get_grad_norm", None)  # joined by `set_up` already, and by the callbacks again
    run.stream = split.batches("mixed", "packed", steps=STEPS)
    syncs: Syncs = Counter()
    with followed(run, build_callbacks(run.cfg)):
        for number in range(STEPS):
            with count_syncs(syncs) if number == STEPS - 1 else contextlib.nullcontext():
                step_with_callbacks(run)
    print(syncs)
    assert own_syncs(syncs) == Counter()


def test_count_syncs_attributes_syncs_to_code_lines():
    """Emit the warning that torch emits on a GPU."""
    warns = "import warnings\ndef synchronize():\n    warnings.warn('called a synchronizing CUDA operation')"
    namespaces = {}
    # The second is installed in a clone of this repository, with a folder named like our package.
    for name, folder in (("ours", ""), ("megatron-core", "/clones/qwen3vl_bridge/.venv"), ("transformers", "")):
        exec(compile(warns, f"{folder}{PACKAGES[name]}model.py", "exec"), namespaces.setdefault(name, {}))
    syncs: Syncs = Counter()
    with count_syncs(syncs):
        namespaces["ours"]["synchronize"]()
        namespaces["ours"]["synchronize"]()
        namespaces["megatron-core"]["synchronize"]()
        namespaces["transformers"]["synchronize"]()
        exec(compile(warns, "anywhere.py", "exec"), nowhere := {})
        nowhere["synchronize"]()
        warnings.warn("something else", stacklevel=1)
    counted = {("ours", "model.py:3"): 2, ("transformers", "model.py:3"): 1, ("others", "the caller"): 1}
    assert own_syncs(syncs) == counted
    assert syncs == counted | {("megatron-core", "model.py:3"): 1}
