"""Overlapping the expert all-to-all with compute on an H100: schedule nodes, streams and events.

A node may only wait for events of its own microbatch; otherwise nothing overlaps.
"""

from collections import Counter
from dataclasses import dataclass, field
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.slow  # `test_schedule_plan.py` compares values on a CPU by default

# One rank of a recipe with real sizes and few layers. Marks in the log show megatron-core's schedule nodes.
PROGRAM = """
import contextlib, os
from pathlib import Path
import qwen3vl_bridge
from qwen3vl_bridge.upstream.library_logs import without_prints
from qwen3vl_bridge.simulation.one_rank import simulate_rank
from qwen3vl_bridge.training import guard
from qwen3vl_bridge.training.guard import Microbatch
from megatron.core.pipeline_parallel.utils import ScheduleNode
from megatron.core.tensor_parallel import mappings
from qwen3vl_recipes import qwen3_vl_30b_a3b_peft_config

acquire, exchange = ScheduleNode.stream_acquire_context, mappings.torch.distributed.all_to_all_single

@contextlib.contextmanager
def marked(node, name=None):
    stream = node.stream.cuda_stream
    mark(f"begin {name} {node.event.cuda_event} {stream}")
    with acquire(node, name):
        yield
    mark(f"end {name}")

def exchanged(*arguments, **sizes):
    mark(f"exchange {torch.cuda.current_stream().cuda_stream}")
    return exchange(*arguments, **sizes)

ScheduleNode.stream_acquire_context = marked
mappings.torch.distributed.all_to_all_single = exchanged
cfg = qwen3_vl_30b_a3b_peft_config()
cfg.model.num_layers = 4
microbatches = []  # of the guard
guard.Microbatch = lambda *values: microbatches.append(Microbatch(*values)) or microbatches[-1]
with without_prints():
    seen = simulate_rank(cfg, rank=0, world=8, log=Path(os.environ["FAKE_GPU_LOG"]))
result = dict(error=seen.error, losses=[one.losses.untyped_storage().nbytes() for one in microbatches])
result["allocated"] = {phase.name: phase.allocated for phase in seen.phases}
"""


@dataclass
class Node:
    name: str
    microbatch: int  # the handle of its event
    stream: int
    exchanges: list[int] = field(default_factory=list)  # streams of its all-to-all
    waited: list[int] = field(default_factory=list)  # events that its stream waits for
    computed: set[int] = field(default_factory=set)  # streams of matrix products


@pytest.fixture(scope="module")
def run(on_fake_gpu):
    done = on_fake_gpu(PROGRAM)
    assert done.result["error"] is None
    return done


@pytest.fixture(scope="module")
def nodes(run) -> list[Node]:
    """Return the schedule nodes of the last step, in launch order; its two microbatches overlap."""
    found: list[Node] = []
    inside = None
    for event in run.between("step 2", "end"):
        kind, *words = event.name.split() if event.kind == "mark" else (event.kind, event.name)
        if kind == "begin":
            *name, microbatch, stream = words
            inside = Node(" ".join(name), int(microbatch), int(stream))
            found.append(inside)
        elif kind == "end":
            inside = None
        elif inside is not None:
            if kind == "exchange":
                inside.exchanges.append(int(words[0]))
            elif kind == "wait_event" and event.stream == inside.stream:
                inside.waited.append(event.amount)
            elif kind == "gemm":
                inside.computed.add(event.stream)
    return found


def test_expert_all_to_all_runs_on_different_stream_than_gemms(nodes):
    computing = {stream for node in nodes for stream in node.computed}
    sending = {stream for node in nodes for stream in node.exchanges}
    assert len(computing) == len(sending) == 1 and computing != sending
    for node in nodes:
        assert node.stream in (sending if node.name.split()[0] in ("moe_dispatch", "moe_combine") else computing)
        assert bool(node.exchanges) == (node.name.split()[0] in ("moe_dispatch", "moe_combine"))


def test_schedule_node_waits_only_for_events_of_its_microbatch(nodes):
    assert all(node.waited[0] == node.microbatch for node in nodes)
    others = {node.microbatch for node in nodes}
    assert not [node for node in nodes if set(node.waited) & (others - {node.microbatch})]


def test_forward_and_backward_nodes_of_two_microbatches_alternate(nodes):
    """Forward (f) and backward (b) nodes of two microbatches alternate in megatron-core's order."""
    order = [
        "b moe_combine", "f pre_dispatch_computation", "b mlp", "f moe_dispatch", "b moe_dispatch", "f mlp",
        "f moe_combine", "b pre_dispatch_computation",
    ]  # fmt: skip
    names = [f"{node.name.split()[1][0]} {node.name.split()[0]}" for node in nodes]
    layers = [name for name in names if name[2:] in {one[2:] for one in order}]
    forward, backward = layers.index("b moe_combine"), len(layers) - 4 * 4
    assert layers[:forward] == 4 * [one for one in order if one[0] == "f"]
    assert layers[forward:backward] == 4 * order
    assert layers[backward:] == 4 * [one for one in order if one[0] == "b"]
    assert names.count("f layer_output") == names.count("b layer_output") == 2 * 4  # DeepStack's three, and the last


def test_step_with_expert_overlap_frees_hidden_states_after_step(run):
    """The guard keeps a copy of the losses, which megatron-core frees; no layer keeps hidden states after the step."""
    assert run.result["losses"] == 3 * 2 * [8192 * 4]
    allocated = run.result["allocated"]
    # Moments of adapters, workspaces and indices are smaller than the hidden states of four layers.
    assert allocated["step 2, optimizer"] - allocated["optimizer"] < 4 * 8192 * 2048 * 2


# One rank of a recipe with Transformer Engine, with delayed weight gradients (delay_wgrad_compute) or without.
WEIGHTS = """
import os
from pathlib import Path
import qwen3vl_bridge
from qwen3vl_bridge.upstream.library_logs import without_prints
from qwen3vl_bridge.simulation.one_rank import simulate_rank
from megatron.core.models.common.utils import TransformerLayerNode
from megatron.core.tensor_parallel import mappings
from qwen3vl_recipes.registry import recipes

compute, exchange = TransformerLayerNode.backward_dw, mappings.torch.distributed.all_to_all_single

def marked(node):
    mark(f"begin {node.name}")
    compute(node)
    mark("end weights")

def exchanged(*arguments, **sizes):
    mark("exchange")
    return exchange(*arguments, **sizes)

TransformerLayerNode.backward_dw = marked
mappings.torch.distributed.all_to_all_single = exchanged
name, world, delayed = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "delayed"
cfg = recipes()[name]()
model = cfg.model
model.num_layers, model.overlap_moe_expert_parallel_comm = 4, True
model.recompute_granularity = model.recompute_method = model.recompute_num_layers = None
if isinstance(getattr(model, "linear_attention_freq", None), list):
    model.linear_attention_freq = model.linear_attention_freq[:4]
model.transformer_impl, model.moe_grouped_gemm = "transformer_engine", True
model.delay_wgrad_compute = cfg.ddp.delay_wgrad_compute = delayed
with without_prints():
    seen = simulate_rank(cfg, rank=0, world=world, log=Path(os.environ["FAKE_GPU_LOG"]))
result = dict(error=seen.error)
"""


@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
@pytest.mark.parametrize(("name", "world", "shared"), [
    ("qwen3_vl_30b_a3b_sft_config", 8, 0), ("qwen35_vl_35b_a3b_pretrain_config", 32, 2),
])  # fmt: skip
def test_delayed_weight_gradients_overlap_all_to_all(on_fake_gpu, name, world, shared):
    """Delayed weight gradients overlap the all-to-all, and every GEMM runs once, as without delay."""
    products, delayed = {}, []
    for when in ("delayed", "at once"):
        run = on_fake_gpu(WEIGHTS, name, str(world), when)
        assert run.result["error"] is None
        events = [one for one in run.between("step 2", "end") if one.kind in ("gemm", "mark")]
        products[when] = Counter(one.amount for one in events if one.kind == "gemm")
        node, latest = "", ""
        for one in events:
            if one.name.startswith("begin "):
                node = one.name.removeprefix("begin ")
                delayed += [(when, node, latest, [])]
            elif one.name == "end weights":
                node = ""
            elif one.kind == "gemm" and node:
                delayed[-1][-1].append(one.amount)
            else:
                latest = one.kind
    assert products["delayed"] == products["at once"]
    assert not any(amounts for when, *_, amounts in delayed if when == "at once")
    experts, others = (
        [(latest, len(amounts)) for when, node, latest, amounts in delayed if when == "delayed" and node == kind]
        for kind in ("mlp", "pre_dispatch_computation")
    )
    # Two GEMMs for each of the rank's 16 experts, for attention or linear attention, and for the shared expert. Tokens
    # of the next microbatch's forward pass are sent during the backward pass.
    assert experts == 4 * [("mark", 2 * 16)] + 4 * [("gemm", 2 * 16)]
    assert [number for _, number in others] == 2 * 4 * [2 + shared]
