"""Nothing of ours makes the host wait for the GPU in a training step; what is counted, and its limits: `counter.py`.

Figures that a run takes every `logger.log_interval` steps are read there, and only there.
"""

import itertools
from pathlib import Path
from typing import Any

import qwen3vl_bridge
from qwen3vl_bridge.batch.device_transfer import on_host
from qwen3vl_bridge.training.callbacks import callbacks_of
from qwen3vl_bridge.training.config import GuardConfig
from qwen3vl_bridge.training.guard import optimizers_of
from qwen3vl_bridge.training.step import to_device
from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from transformers import AutoConfig

from tests.forked import results_of_ranks
from tests.frameworks.megatron_bridge.test_upstream_steps import join
from tests.model.inputs.support import gaps, make_rows, offsets, packed_params
from tests.parity.batches import make_batch, make_samples
from tests.parity.conftest import make_pair
from tests.parity.on_ranks import Split
from tests.parity.one_process.test_recompute import FULL, of_vision
from tests.parity.one_process.test_settings import SCALED, changed
from tests.parity.references import MICROBATCHES, write_settings
from tests.parity.topologies import MODULES, TOPOLOGIES, Topology
from tests.qwen3_5.tiny import make_checkpoint
from tests.ranks import of_all_ranks
from tests.steps import followed, step_with_callbacks

from .counter import UPSTREAM, HostWaits, Seen
from .upstream import count_upstream

STEPS, INTERVAL = 3, 3
CONTENT, MTP = "mixed", dict(mtp_loss_scaling_factor=0.1)


def count_step(folder: Path, topology: Topology, rows: str, **settings: Any) -> dict[str, Seen]:
    """Train three steps; returns what was counted in the second, "step", and in the last, which has "figures"."""
    settings = dict(train__train_iters=STEPS, logger__log_interval=INTERVAL) | settings
    split = Split(folder, topology, **settings)
    run = split.run
    read: list[None] = []
    run.stream = (read.append(None) or batch for batch in split.batches(CONTENT, rows, steps=STEPS))
    run.cfg.guard = GuardConfig(on_nan="skip")
    vars(run.optimizer).pop("get_grad_norm", None)  # joined by `set_up` already, and by the callbacks again
    found = {}
    # Each optimizer has lists and dicts of tensors, and single ones.
    waits = HostWaits(*run.model, [list(vars(one).values()) for one in optimizers_of(run.optimizer)])
    with waits, followed(run, callbacks_of(run.cfg)):
        for step in range(1, STEPS + 1):
            waits.begin()
            step_with_callbacks(run)
            # Copies run ahead of the GPU, reading does not: a resumed run would skip what was read and not saved.
            assert topology.ranks > 1 or len(read) == step * MICROBATCHES
            found["figures" if step % INTERVAL == 0 else "step"] = waits.seen()
    return found


def count_call(folder: Path, topology: Topology) -> dict[str, Seen]:
    """Forward and backward of a rank's share of a packed row, as RL frameworks give it."""
    split = Split(folder, topology)
    model, groups = split.run.model[0], split.run.groups
    arguments = next(split.batches(CONTENT, "presharded", steps=1)).arguments(groups.cp.size(), groups.cp.rank())
    with HostWaits(model, arguments, vars(arguments["packed_seq_params"])) as waits:
        model(**arguments).sum().backward()
    return {"call": waits.seen()}


def counts_of_cases(cases: list[tuple[str, ...]], folders: dict[str, Path]) -> dict[tuple[str, ...], list[dict]]:
    found = {}
    for family, name, rows in cases:
        topology = (TOPOLOGIES | MODULES)[name]
        call = rows == "presharded"
        counted = count_call(folders[family], topology) if call else count_step(folders[family], topology, rows)
        found[family, name, rows] = of_all_ranks(counted)
    return found


# Where figures are read, each log_interval.
FIGURES = {
    "parallel/collectives.py:sum_amounts", "parallel/collectives.py:max_of_each", "training/metrics.py:counts",
    "training/metrics.py:take",
}  # fmt: skip

SETTINGS = {"plain": {}, "recompute": FULL | of_vision(FULL), "chunks": dict(loss_chunk_tokens=17)}
# With multi-token prediction, which reads tokens of other ranks and stages.
WITH_MTP = {"Qwen3.5 with MTP": {}, "Qwen3.5 MoE with MTP": dict(moe=True)}
PASSES = [
    *itertools.product(["dense", "MoE", "Qwen3.5"], ["mixed", "video", "text only"], ["packed", "padded"], SETTINGS),
    *itertools.product(["Qwen3.5 with MTP"], ["mixed"], ["packed", "padded"], ["plain", "chunks"]),
    # Frequencies are transformers', which copies them from memory that is not pinned: on the host, and once.
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
    """An earlier test has set one on the host."""
    monkeypatch.setattr(MTPLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0))


def forward_and_backward(folder, content, *, packed, **settings) -> Seen:
    pair = make_pair(folder, **settings)
    model, samples = pair.megatron, make_samples(content, pair.config, seed=5)
    batch = make_batch(samples, pair.config, packed=packed)
    with HostWaits(model) as waits:
        inputs = to_device(batch.local(**pair.provider.local_arguments(model.pg_collection)), model)
        (model(inputs=inputs) * inputs.loss_mask).sum().backward()
    return waits.seen()


@pytest.mark.parametrize(("family", "content", "rows", "settings"), PASSES)
def test_a_pass_waits_for_nothing(folders, family, content, rows, settings):
    settings = SETTINGS[settings] | (MTP if family in WITH_MTP else {})
    seen = forward_and_backward(folders[family], content, packed=rows == "packed", **settings)
    assert not seen.of_us() and not seen.mixed


@pytest.mark.parametrize("family", ["dense", "MoE", "Qwen3.5"])
def test_a_step_with_guard_and_meters_waits_for_nothing(folders, family):
    found = count_step(folders[family], Topology(1), "packed")
    check(found)
    row = f"| {family} | {numbers(found['step'])} | {numbers(found['figures'])} |"
    assert row in Path("docs/speed.md").read_text()


RUNS = {
    "LoRA": dict(peft=dict(dim=4, alpha=4)), "bf16": dict(mixed_precision="bf16_mixed"),
    "distributed optimizer": dict(distributed_optimizer=True),
    "Megatron-FSDP": dict(
        mixed_precision="bf16_mixed", distributed_optimizer=True, checkpoint__ckpt_format="fsdp_dtensor",
        ddp__use_megatron_fsdp=True, ddp__data_parallel_sharding_strategy="optim_grads_params",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("family", "kind"), list(zip(itertools.cycle(["dense", "MoE"]), RUNS)))
def test_a_step_of_other_runs_waits_for_nothing(folders, family, kind):
    settings = dict(RUNS[kind])
    topology = Topology(1, distributed_optimizer=settings.pop("distributed_optimizer", False))
    if "peft" in settings:
        settings["peft"] = qwen3vl_bridge.Qwen3VLLoRA(**settings["peft"])
        settings["checkpoint__pretrained_checkpoint"] = str(folders[family])
    found = count_step(folders[family], topology, "packed", **settings)
    check(found, mixed=OWN_BUFFERS if kind == "Megatron-FSDP" else frozenset())


# Gradients are added to buffers that Megatron-FSDP makes by itself, of which the counter does not know.
OWN_BUFFERS = frozenset({"pipeline_parallel/schedules.py:custom_backward"})


def check(found: dict[str, Seen], allowed: frozenset[str] = frozenset(), mixed: frozenset[str] = frozenset()) -> None:
    """Ours are none but those that are allowed, and figures where they are taken; nothing is done with host tensors."""
    ours = {which: {wait.function for wait in seen.of_us()} for which, seen in found.items()}
    assert not ours["step"] - allowed, found["step"].of_us()
    assert not ours["figures"] - allowed - FIGURES, found["figures"].of_us()
    assert not {wait.function for seen in found.values() for wait in seen.mixed} - mixed
    assert ours["figures"] - allowed  # or nothing of ours is seen at all


# Without Transformer Engine megatron-core clips by a number, which both modules' norms make together.
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
def test_a_step_of_a_split_model_waits_for_nothing(on_ranks, case):
    for found in on_ranks[case]:
        check(found, JOINT_NORM if case[1] == "1 + 1" else frozenset())


@pytest.mark.slow
def test_a_share_of_a_row_is_waited_for_three_times(on_ranks):
    """To read the arguments, to compare them over ranks, and to read the whole row."""
    for found in on_ranks[SHARE]:
        assert f"| a share of a packed row, CP 2 | {numbers(found['call'])} |" in Path("docs/speed.md").read_text()
        assert sum(found["call"].of_us().values()) == 3, found["call"].of_us()


def packed_row(samples):
    """As RL frameworks and Megatron-Bridge give one."""
    ends = offsets([len(sample.ids) for sample in samples])
    return from_bridge(samples, packed=True) | dict(packed_seq_params=packed_params(ends, ends))


def padded_rows(samples):
    """As Megatron-Bridge gives them."""
    mask = join(samples, 1, packed=False)["attention_mask"]
    return from_bridge(samples, packed=False) | dict(attention_mask=mask)


def from_bridge(samples, *, packed):
    given = join(samples, 1, packed=packed)
    arguments = {name: given[name] for name in ("input_ids", "labels", "loss_mask")}
    return arguments | given["visual_inputs"].normalized_for_model()


def rolled_rows(samples):
    """As transformers takes them: padding on the left, labels that say what is trained on, positions of text."""
    rows = make_rows(samples, gaps(samples))
    mask = rows.attention_mask
    return rows.pixels | dict(
        input_ids=rows.input_ids, attention_mask=mask, labels=rows.labels.masked_fill(rows.loss_mask == 0, -100),
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
    )  # fmt: skip


def square_mask(samples):
    """As ms-swift gives one: True hides a token from another."""
    rows = rolled_rows(samples)
    real = rows["attention_mask"].bool()
    sees = torch.ones(2 * real.shape[-1:], dtype=torch.bool).tril() & real[:, None]
    return rows | dict(attention_mask=~sees[:, None])


CALLS = {"packed": packed_row, "padded": padded_rows, "padded on the left": rolled_rows, "square mask": square_mask}


def called_with_tensors(folder, kind: str, **settings) -> Seen:
    """The model called as transformers' is, with tensors on the device."""
    pair = make_pair(folder, **settings)
    arguments = CALLS[kind](make_samples("image and video", pair.config, seed=5))
    packed = arguments.get("packed_seq_params")
    with HostWaits(pair.megatron, arguments, packed and vars(packed)) as waits:
        pair.megatron(**arguments).sum().backward()
    return waits.seen()


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("family", ["dense", "Qwen3.5 with MTP"])
def test_tensors_on_the_device_are_waited_for_once(folders, family, kind):
    seen = called_with_tensors(folders[family], kind, **(MTP if family in WITH_MTP else {}))
    assert sum(seen.of_us().values()) == 1 and not seen.mixed, seen.of_us()


def numbers(seen: Seen) -> str:
    return " | ".join(map(str, (sum(seen.of_us().values()), *map(seen.total, UPSTREAM))))


def test_the_page_has_what_is_counted(folders):
    """The tables of docs/speed.md; what a whole step counts is compared with them above."""
    page, dense = Path("docs/speed.md").read_text(), folders["dense"]
    config = AutoConfig.from_pretrained(dense)
    for content, packed in itertools.product(("many images", "image and video"), (True, False)):
        name = f"{content}, {'packed' if packed else 'padded'}"
        ours = forward_and_backward(dense, content, packed=packed)
        theirs = count_upstream(dense, make_samples(content, config, seed=5), packed=packed)
        assert f"| {name} | {numbers(ours)} | {numbers(theirs)} |" in page
    for kind in CALLS:
        assert f"| arguments on the device, {kind} | {numbers(called_with_tensors(dense, kind))} |" in page


def test_the_counter_sees_what_waits():
    values, host = torch.arange(6.0), torch.arange(3)
    waits = HostWaits(values)
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
        "a stream or an event": lambda: on_host({"values": values, "others": values + 1})["others"].tolist(),
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
    with waits:
        assert values.device.type == "cuda" and host.device.type == "cpu"
        for what, act in kinds.items():
            waits.begin()
            act()
            assert {wait.what for wait in waits.seen().found} == {what}, what
        for number, act in enumerate(free):
            waits.begin()
            act()
            assert not waits.seen().found, number
        waits.begin()
        values + torch.zeros(6)
        assert waits.seen().mixed
        waits.begin()
        torch.tensor([values[0], values[1], 2.0])
        assert list(waits.seen().found.values()) == [2]  # each is read
    assert values.device.type == "cpu"
