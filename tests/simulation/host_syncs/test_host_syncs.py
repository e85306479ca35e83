"""Our code causes no host-device synchronization in a training step (counted by `tests/helpers/sync_counter.py`).

Metrics are read every `logger.log_interval` steps only.
"""

import itertools
from pathlib import Path
from typing import Any

import qwen3vl_bridge
from qwen3vl_bridge.core.device_transfer import to_host
from qwen3vl_bridge.training.callbacks import build_callbacks
from qwen3vl_bridge.training.config import GuardConfig
from qwen3vl_bridge.training.guard import optimizers_of
from qwen3vl_bridge.training.step import to_device
from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from transformers import AutoConfig

from tests.frameworks.megatron_bridge.test_upstream_steps import join
from tests.helpers.batches import make_batch, make_samples
from tests.helpers.forked import results_of_ranks
from tests.helpers.ranks import of_all_ranks
from tests.helpers.steps import followed, step_with_callbacks
from tests.helpers.stock_steps import count_upstream
from tests.helpers.sync_counter import UPSTREAM, HostSyncCounter, Seen
from tests.models.inputs.support import gaps, make_rows, offsets, packed_params
from tests.models.qwen3_5.tiny import make_checkpoint
from tests.parity.conftest import make_pair
from tests.parity.on_ranks import Split
from tests.parity.references import MICROBATCHES, write_settings
from tests.parity.test_recompute import FULL, of_vision
from tests.parity.test_settings import SCALED, changed
from tests.parity.topologies import MODULES, TOPOLOGIES, Topology

STEPS, INTERVAL = 3, 3
CONTENT, MTP = "mixed", dict(mtp_loss_scaling_factor=0.1)


def count_step(folder: Path, topology: Topology, rows: str, **settings: Any) -> dict[str, Seen]:
    """Train three steps and return the counts of the second ("step") and of the last, which logs ("metrics")."""
    settings = dict(train__train_iters=STEPS, logger__log_interval=INTERVAL) | settings
    split = Split(folder, topology, **settings)
    run = split.run
    read: list[None] = []
    run.stream = (read.append(None) or batch for batch in split.batches(CONTENT, rows, steps=STEPS))
    run.cfg.guard = GuardConfig(on_nan="skip")
    vars(run.optimizer).pop("get_grad_norm", None)  # joined by `set_up` already, and by the callbacks again
    found = {}
    counter = HostSyncCounter(*run.model, [list(vars(one).values()) for one in optimizers_of(run.optimizer)])
    with counter, followed(run, build_callbacks(run.cfg)):
        for step in range(1, STEPS + 1):
            counter.begin()
            step_with_callbacks(run)
            # Copies run ahead of the GPU. Reading must not: a resumed run would skip rows that were read and not saved.
            assert topology.ranks > 1 or len(read) == step * MICROBATCHES
            found["metrics" if step % INTERVAL == 0 else "step"] = counter.seen()
    return found


def count_call(folder: Path, topology: Topology) -> dict[str, Seen]:
    """Count forward and backward pass of a rank's shard of a packed row, as passed by RL frameworks."""
    split = Split(folder, topology)
    model, groups = split.run.model[0], split.run.groups
    arguments = next(split.batches(CONTENT, "presharded", steps=1)).arguments(groups.cp.size(), groups.cp.rank())
    with HostSyncCounter(model, arguments, vars(arguments["packed_seq_params"])) as counter:
        model(**arguments).sum().backward()
    return {"call": counter.seen()}


def counts_of_cases(cases: list[tuple[str, ...]], folders: dict[str, Path]) -> dict[tuple[str, ...], list[dict]]:
    found = {}
    for family, name, rows in cases:
        topology = (TOPOLOGIES | MODULES)[name]
        call = rows == "presharded"
        counted = count_call(folders[family], topology) if call else count_step(folders[family], topology, rows)
        found[family, name, rows] = of_all_ranks(counted)
    return found


RESULTS = Path("benchmarks/results/README.md")
# Functions that read metrics, each log_interval.
METRICS = {
    "core/collectives.py:sum_over_data_parallel", "core/collectives.py:max_over_ranks", "training/metrics.py:counts",
    "training/metrics.py:take",
}  # fmt: skip

SETTINGS = {"plain": {}, "recompute": FULL | of_vision(FULL), "chunks": dict(loss_chunk_tokens=17)}
# Multi-token prediction uses tokens of other ranks and stages.
WITH_MTP = {"Qwen3.5 with MTP": {}, "Qwen3.5 MoE with MTP": dict(moe=True)}
PASSES = [
    *itertools.product(["dense", "MoE", "Qwen3.5"], ["mixed", "video", "text only"], ["packed", "padded"], SETTINGS),
    *itertools.product(["Qwen3.5 with MTP"], ["mixed"], ["packed", "padded"], ["plain", "chunks"]),
    # transformers copies these frequencies from memory that is not pinned: it must happen on the host, and once.
    *((kind, "mixed", "packed", "plain") for kind in SCALED),
]


@pytest.fixture(scope="module")
def folders(untied_folder, moe_folder, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("folders")
    found = {"dense": untied_folder, "MoE": moe_folder, "Qwen3.5": make_checkpoint(scratch / "qwen3_5")}
    for name, options in WITH_MTP.items():
        found[name] = make_checkpoint(scratch / name, mtp=ExpertLayout.OUTPUT_MAJOR, **options)
        write_settings(found[name], MTP)
    for kind, scaled in SCALED.items():
        rope = dict(rope_theta=5e6, mrope_section=[6, 5, 5], mrope_interleaved=True, rope_type=kind, **scaled)
        found[kind] = changed(untied_folder, scratch / kind, rope_parameters=rope)
    return found


@pytest.fixture(autouse=True)
def _scale_before_a_schedule_sets_it(monkeypatch):
    """Reset the scale, which an earlier test has set on the host."""
    monkeypatch.setattr(MTPLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0))


def forward_and_backward(folder, content, *, packed, **settings) -> Seen:
    pair = make_pair(folder, **settings)
    model, samples = pair.megatron, make_samples(content, pair.config, seed=5)
    batch = make_batch(samples, pair.config, packed=packed)
    with HostSyncCounter(model) as counter:
        inputs = to_device(batch.local(**pair.provider.local_arguments(model.pg_collection)), model)
        (model(inputs=inputs) * inputs.loss_mask).sum().backward()
    return counter.seen()


@pytest.mark.one_case_in(35)
@pytest.mark.parametrize(("family", "content", "rows", "settings"), PASSES)
def test_forward_and_backward_have_no_host_syncs_in_our_code(folders, family, content, rows, settings):
    settings = SETTINGS[settings] | (MTP if family in WITH_MTP else {})
    seen = forward_and_backward(folders[family], content, packed=rows == "packed", **settings)
    assert not seen.own_syncs() and not seen.mixed


@pytest.mark.parametrize(
    "family", ["dense", pytest.param("MoE", marks=pytest.mark.slow), pytest.param("Qwen3.5", marks=pytest.mark.slow)]
)
def test_our_code_in_step_with_guard_syncs_only_to_read_metrics(folders, family):
    found = count_step(folders[family], Topology(1), "packed")
    check(found)
    row = f"| {family} | {numbers(found['step'])} | {numbers(found['metrics'])} |"
    assert row in RESULTS.read_text()


RUNS = {
    "LoRA": dict(peft=dict(dim=4, alpha=4)), "bf16": dict(mixed_precision="bf16_mixed"),
    "distributed optimizer": dict(distributed_optimizer=True),
    "Megatron-FSDP": dict(
        mixed_precision="bf16_mixed", distributed_optimizer=True, checkpoint__ckpt_format="fsdp_dtensor",
        ddp__use_megatron_fsdp=True, ddp__data_parallel_sharding_strategy="optim_grads_params",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), list(zip(itertools.cycle(["dense", "MoE"]), RUNS)))
def test_our_code_in_lora_bf16_and_fsdp_steps_syncs_only_to_read_metrics(folders, family, kind):
    settings = dict(RUNS[kind])
    topology = Topology(1, distributed_optimizer=settings.pop("distributed_optimizer", False))
    if "peft" in settings:
        settings["peft"] = qwen3vl_bridge.Qwen3VLLoRA(**settings["peft"])
        settings["checkpoint__pretrained_checkpoint"] = str(folders[family])
    found = count_step(folders[family], topology, "packed", **settings)
    check(found, mixed=OWN_BUFFERS if kind == "Megatron-FSDP" else frozenset())


# Megatron-FSDP adds gradients to its own buffers, which the counter does not know.
OWN_BUFFERS = frozenset({"pipeline_parallel/schedules.py:custom_backward"})


def check(found: dict[str, Seen], allowed: frozenset[str] = frozenset(), mixed: frozenset[str] = frozenset()) -> None:
    """Check that our code synchronizes only to read metrics, and in allowed functions, and uses no host tensors."""
    ours = {which: {sync.function for sync in seen.own_syncs()} for which, seen in found.items()}
    assert not ours["step"] - allowed, found["step"].own_syncs()
    assert not ours["metrics"] - allowed - METRICS, found["metrics"].own_syncs()
    assert not {sync.function for seen in found.values() for sync in seen.mixed} - mixed
    assert ours["metrics"] - allowed  # the counter must see our code


# Without Transformer Engine megatron-core needs the joint gradient norm of both modules on the host.
JOINT_NORM = frozenset({"dist_train/joint_run.py:_joint_norm"})
CASES = [
    *(("dense", split, "packed") for split in ("CP2", "PP2", "TP2+SP", "1 + 1")), ("dense", "CP2", "padded"),
    ("MoE", "EP2", "packed"), *(("Qwen3.5 with MTP", split, "packed") for split in ("CP2", "PP2", "TP2+SP")),
    ("Qwen3.5 with MTP", "CP2", "padded"), ("Qwen3.5 MoE with MTP", "EP2", "packed"),
]  # fmt: skip
SHARE = ("dense", "CP2", "presharded")


@pytest.fixture(scope="module")
def on_ranks(folders):
    return results_of_ranks(counts_of_cases, 2, [*CASES, SHARE], folders, timeout=500)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_our_code_in_step_on_two_ranks_syncs_only_to_read_metrics(on_ranks, case):
    for found in on_ranks[case]:
        check(found, JOINT_NORM if case[1] == "1 + 1" else frozenset())


@pytest.mark.slow
def test_forward_with_context_parallel_shard_synchronizes_three_times(on_ranks):
    """Synchronizations: read the arguments, compare them over ranks, and read the full row."""
    for found in on_ranks[SHARE]:
        assert f"| a share of a packed row, CP 2 | {numbers(found['call'])} |" in RESULTS.read_text()
        assert sum(found["call"].own_syncs().values()) == 3, found["call"].own_syncs()


def packed_row(samples):
    """Return arguments as RL frameworks and Megatron-Bridge pass packed rows."""
    ends = offsets([len(sample.ids) for sample in samples])
    return from_bridge(samples, packed=True) | dict(packed_seq_params=packed_params(ends, ends))


def padded_rows(samples):
    """Return arguments as Megatron-Bridge passes padded rows."""
    mask = join(samples, 1, packed=False)["attention_mask"]
    return from_bridge(samples, packed=False) | dict(attention_mask=mask)


def from_bridge(samples, *, packed):
    given = join(samples, 1, packed=packed)
    arguments = {name: given[name] for name in ("input_ids", "labels", "loss_mask")}
    return arguments | given["visual_inputs"].normalized_for_model()


def rolled_rows(samples):
    """Return arguments as for transformers: padding on the left, labels with -100, positions of text."""
    rows = make_rows(samples, gaps(samples))
    mask = rows.attention_mask
    return rows.pixels | dict(
        input_ids=rows.input_ids, attention_mask=mask, labels=rows.labels.masked_fill(rows.loss_mask == 0, -100),
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
    )  # fmt: skip


def square_mask(samples):
    """Return arguments with a 4-D mask, as passed by ms-swift: True masks a token."""
    rows = rolled_rows(samples)
    real = rows["attention_mask"].bool()
    sees = torch.ones(2 * real.shape[-1:], dtype=torch.bool).tril() & real[:, None]
    return rows | dict(attention_mask=~sees[:, None])


CALLS = {"packed": packed_row, "padded": padded_rows, "padded on the left": rolled_rows, "square mask": square_mask}


def called_with_tensors(folder, kind: str, **settings) -> Seen:
    """Count a call with tensors on the device, as transformers' models are called."""
    pair = make_pair(folder, **settings)
    arguments = CALLS[kind](make_samples("image and video", pair.config, seed=5))
    packed = arguments.get("packed_seq_params")
    with HostSyncCounter(pair.megatron, arguments, packed and vars(packed)) as counter:
        pair.megatron(**arguments).sum().backward()
    return counter.seen()


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("family", ["dense", "Qwen3.5 with MTP"])
def test_forward_with_tensors_on_gpu_synchronizes_once(folders, family, kind):
    seen = called_with_tensors(folders[family], kind, **(MTP if family in WITH_MTP else {}))
    assert sum(seen.own_syncs().values()) == 1 and not seen.mixed, seen.own_syncs()


def numbers(seen: Seen) -> str:
    return " | ".join(map(str, (sum(seen.own_syncs().values()), *map(seen.total, UPSTREAM))))


@pytest.mark.slow
def test_benchmark_results_page_lists_counted_host_syncs(folders):
    """Check the tables of benchmarks/results/README.md; counts of a full step are compared above."""
    page, dense = RESULTS.read_text(), folders["dense"]
    config = AutoConfig.from_pretrained(dense)
    for content, packed in itertools.product(("many images", "image and video"), (True, False)):
        name = f"{content}, {'packed' if packed else 'padded'}"
        ours = forward_and_backward(dense, content, packed=packed)
        theirs = count_upstream(dense, make_samples(content, config, seed=5), packed=packed)
        assert f"| {name} | {numbers(ours)} | {numbers(theirs)} |" in page
    for kind in CALLS:
        assert f"| arguments on the device, {kind} | {numbers(called_with_tensors(dense, kind))} |" in page


def test_host_sync_counter_counts_each_kind_of_sync_and_nothing_else():
    values, host = torch.arange(6.0), torch.arange(3)
    counter = HostSyncCounter(values)
    kinds = {
        "a value": lambda: bool(values[0] > 1), "tolist": lambda: values.tolist(),
        "nonzero": lambda: (values > 1).nonzero(), "booleans as an index": lambda: values[values > 1],
        "masked_select": lambda: values.masked_select(values > 1), "_unique2": lambda: values.unique(),
        "equal": lambda: torch.equal(values, values + 1), "cpu: a copy to the host": lambda: values.cpu(),
        "to: a copy to the GPU": lambda: host.to(values.device),
        "to: a copy of memory that is not pinned": lambda: host.to(values.device, non_blocking=True),
        "tensor of host values": lambda: torch.tensor([1.0], device=values.device),
        "as_tensor of host values": lambda: torch.as_tensor([1.0], device=values.device),
        "new_tensor of host values": lambda: values.new_tensor([1.0]),
        "tensor of values on the GPU": lambda: torch.tensor([values[0], values[1]]),
        "as_tensor of values on the GPU": lambda: torch.as_tensor([values[0]]),
        "new_tensor of values on the GPU": lambda: host.float().new_tensor([[values[0]], [values[1]]]),
        "tensor: a copy to the host": lambda: torch.tensor(values, device="cpu"),
        "as_tensor: a copy to the host": lambda: torch.as_tensor(values, device="cpu"),
        "new_tensor: a copy to the host": lambda: host.new_tensor(values), "an index on the host": lambda: values[host],
        "repeat_interleave without output_size": lambda: values.repeat_interleave(values.long()),
        "copy_ between host and GPU": lambda: values[:3].copy_(host),
        "a stream or an event": lambda: to_host({"values": values, "others": values + 1})["others"].tolist(),
        "a copy that has not arrived": lambda: values.to("cpu", non_blocking=True).tolist(),
    }  # fmt: skip
    free = [
        lambda: values.cumsum(0) * 2 + torch.zeros(6, device=values.device), lambda: values.masked_fill(values > 1, 0),
        lambda: torch.equal(values, values), lambda: host.pin_memory().to(values.device, non_blocking=True),
        lambda: values.to("cpu", non_blocking=True), lambda: host.tolist() and bool(host[0] == 0) and host[host > 1],
        lambda: values.repeat_interleave(values.long(), output_size=15),
        lambda: torch.as_tensor(values) + torch.asarray(values, device=values.device) + values.new_tensor(values),
        lambda: torch.tensor([host[0], 1.0]) + torch.as_tensor([2.0, 3.0]) + host.new_tensor([4, 5]),
    ]  # fmt: skip
    with counter:
        assert values.device.type == "cuda" and host.device.type == "cpu"
        for what, act in kinds.items():
            counter.begin()
            act()
            assert {sync.what for sync in counter.seen().syncs} == {what}, what
        for number, act in enumerate(free):
            counter.begin()
            act()
            assert not counter.seen().syncs, number
        counter.begin()
        values + torch.zeros(6)
        assert counter.seen().mixed
        counter.begin()
        torch.tensor([values[0], values[1], 2.0])
        assert list(counter.seen().syncs.values()) == [2]  # each is read
    assert values.device.type == "cpu"
