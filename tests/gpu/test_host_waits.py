"""A whole training step waits for the device in lines of megatron-core and Megatron-Bridge alone.

`tests/host_waits` counts on the CPU what branches for CUDA and Transformer Engine's layers do not take part in.
"""

import contextlib
import warnings
from collections import Counter

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.training.callbacks import callbacks_of
from qwen3vl_bridge.training.config import GuardConfig

import pytest

from examples.digits.checkpoint import make_checkpoint
from tests.host_waits.counter import PACKAGES
from tests.parity.on_ranks import Split
from tests.parity.topologies import Topology
from tests.steps import followed, step_with_callbacks

from .conftest import KINDS
from .sync_warnings import Waits, count_waits, of_us

OPTIONS = dict(zip(KINDS, ({}, {"moe": True}, {"family": "qwen3_5"}), strict=True))
STEPS = 3  # the last is counted; those before it compile kernels and allocate


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_in_no_line_of_ours(kind, device, tmp_path):
    """Packed rows, with the copy of the batch, the guard and the distributed optimizer, in bfloat16."""
    folder = make_checkpoint(tmp_path / "model", **OPTIONS[kind])
    topology = Topology(1, distributed_optimizer=True)
    split = Split(str(folder), topology, mixed_precision="bf16_mixed", train__train_iters=STEPS)
    run = split.run
    run.cfg.guard, run.cfg.logger.log_interval = GuardConfig(on_nan="skip"), STEPS + 1
    vars(run.optimizer).pop("get_grad_norm", None)  # joined by `set_up` already, and by the callbacks again
    run.stream = split.batches("mixed", "packed", steps=STEPS)
    waits: Waits = Counter()
    with followed(run, callbacks_of(run.cfg)):
        for number in range(STEPS):
            with count_waits(waits) if number == STEPS - 1 else contextlib.nullcontext():
                step_with_callbacks(run)
    print(waits)
    assert of_us(waits) == Counter()


def test_a_wait_is_attributed_to_the_line_that_waits():
    """As torch warns of it on a GPU."""
    warns = "import warnings\ndef wait():\n    warnings.warn('called a synchronizing CUDA operation')"
    namespaces = {}
    # The second as where it is installed in a clone, whose folder has this package's name.
    for name, folder in (("ours", ""), ("megatron-core", "/clones/qwen3vl_bridge/.venv"), ("transformers", "")):
        exec(compile(warns, f"{folder}{PACKAGES[name]}model.py", "exec"), namespaces.setdefault(name, {}))
    waits: Waits = Counter()
    with count_waits(waits):
        namespaces["ours"]["wait"]()
        namespaces["ours"]["wait"]()
        namespaces["megatron-core"]["wait"]()
        namespaces["transformers"]["wait"]()
        exec(compile(warns, "anywhere.py", "exec"), nowhere := {})
        nowhere["wait"]()
        warnings.warn("something else", stacklevel=1)
    counted = {("ours", "model.py:3"): 2, ("transformers", "model.py:3"): 1, ("others", "the caller"): 1}
    assert of_us(waits) == counted  # whatever is not upstream's
    assert waits == counted | {("megatron-core", "model.py:3"): 1}
