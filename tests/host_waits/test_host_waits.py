"""Nothing of ours makes the host wait for the GPU in a training step; what is counted, and its limits: `counter.py`.

Figures that a run takes every `logger.log_interval` steps are read there, and only there.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import qwen3vl_bridge
from qwen3vl_bridge.batch.device_transfer import on_host
from qwen3vl_bridge.training.step import to_device
from qwen3vl_bridge.weights.expert_layout import ExpertLayout

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from transformers import AutoConfig

from tests.forked import run_ranks
from tests.frameworks.megatron_bridge.upstream_steps_on_ranks import join
from tests.model.inputs.support import gaps, make_rows, offsets, packed_params
from tests.parity.batches import make_batch, make_samples
from tests.parity.conftest import make_pair
from tests.parity.one_process.test_recompute import FULL, of_vision
from tests.parity.one_process.test_settings import SCALED, changed
from tests.parity.references import write_settings
from tests.parity.topologies import Topology
from tests.qwen3_5.tiny import make_checkpoint

from .counter import HostWaits
from .on_ranks import count_step
from .places import UPSTREAM, Seen
from .upstream import count_upstream

# Where figures are read, each log_interval.
FIGURES = {
    "parallel/collectives.py:sum_amounts",
    "parallel/collectives.py:max_of_each",
    "training/metrics.py:counts",
    "training/metrics.py:take",
}

CHUNKS = dict(loss_chunk_tokens=17)  # of rows that have more


@pytest.fixture(scope="module")
def folders(untied_folder, moe_folder, tmp_path_factory):
    qwen3_5 = make_checkpoint(tmp_path_factory.mktemp("qwen3_5"))
    return {"dense": untied_folder, "MoE": moe_folder, "Qwen3.5": qwen3_5}


def forward_and_backward(folder, content, *, packed, **settings) -> Seen:
    pair = make_pair(folder, **settings)
    model, samples = pair.megatron, make_samples(content, pair.config, seed=5)
    batch = make_batch(samples, pair.config, packed=packed)
    with HostWaits(model) as waits:
        inputs = to_device(batch.local(**pair.provider.sequence_ranks(model.pg_collection)), model)
        (model(inputs=inputs) * inputs.loss_mask).sum().backward()
    return waits.seen()


@pytest.mark.parametrize("settings", [{}, FULL | of_vision(FULL), CHUNKS], ids=["plain", "recompute", "chunks"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("content", ["mixed", "video", "text only"])
@pytest.mark.parametrize("family", ["dense", "MoE", "Qwen3.5"])
def test_a_pass_waits_for_nothing(folders, family, content, packed, settings):
    seen = forward_and_backward(folders[family], content, packed=packed, **settings)
    assert not seen.of_us() and not seen.mixed


@pytest.mark.parametrize("kind", SCALED)
def test_a_scaled_rotary_embedding_waits_for_nothing(folders, tmp_path, kind):
    """Its frequencies are transformers', which copies them from memory that is not pinned: on the host, and once."""
    rope = dict(rope_theta=5e6, mrope_section=[6, 5, 5], mrope_interleaved=True, rope_type=kind, **SCALED[kind])
    folder = changed(folders["dense"], tmp_path / kind, rope_parameters=rope)
    seen = forward_and_backward(folder, "mixed", packed=True)
    assert not seen.of_us() and not seen.mixed


@pytest.mark.parametrize("settings", [{}, CHUNKS], ids=["plain", "chunks"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_multi_token_prediction_waits_for_nothing(tmp_path, monkeypatch, packed, settings):
    # As it is before a schedule sets it: an earlier test has set one on the host.
    monkeypatch.setattr(MTPLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0))
    folder = make_checkpoint(tmp_path, mtp=ExpertLayout.OUTPUT_MAJOR)
    seen = forward_and_backward(folder, "mixed", packed=packed, mtp_loss_scaling_factor=0.1, **settings)
    assert not seen.of_us() and not seen.mixed


@pytest.mark.parametrize("family", ["dense", "MoE", "Qwen3.5"])
def test_a_step_with_guard_and_meters_waits_for_nothing(folders, family):
    found = count_step(str(folders[family]), Topology(1), "packed")
    check(found)
    row = f"| {family} | {numbers(found['step'])} | {numbers(found['figures'])} |"
    assert row in Path("docs/speed.md").read_text()


LORA = dict(dim=4, alpha=4)
RUNS = {
    "LoRA": dict(peft=LORA),
    "bf16": dict(mixed_precision="bf16_mixed"),
    "distributed optimizer": dict(distributed_optimizer=True),
    "Megatron-FSDP": dict(
        mixed_precision="bf16_mixed",
        distributed_optimizer=True,
        checkpoint__ckpt_format="fsdp_dtensor",
        ddp__use_megatron_fsdp=True,
        ddp__data_parallel_sharding_strategy="optim_grads_params",
    ),
}


@pytest.mark.parametrize(("family", "kind"), list(zip(itertools.cycle(["dense", "MoE"]), RUNS)))
def test_a_step_of_other_runs_waits_for_nothing(folders, family, kind):
    settings = dict(RUNS[kind])
    topology = Topology(1, distributed_optimizer=settings.pop("distributed_optimizer", False))
    if "peft" in settings:
        settings["peft"] = qwen3vl_bridge.Qwen3VLLoRA(**settings["peft"])
        settings["checkpoint__pretrained_checkpoint"] = str(folders[family])
    found = count_step(str(folders[family]), topology, "packed", **settings)
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
JOINT_NORM = frozenset({"dist_train/joint_step.py:_joint_norm"})
# With multi-token prediction, which reads tokens of other ranks and stages.
WITH_MTP = {"Qwen3.5 with MTP": {}, "Qwen3.5 MoE with MTP": dict(moe=True)}
CASES = [
    ["dense", "CP2", "packed"],
    ["dense", "CP2", "padded"],
    ["dense", "PP2", "packed"],
    ["dense", "TP2+SP", "packed"],
    ["dense", "1 + 1", "packed"],
    ["MoE", "EP2", "packed"],
    ["Qwen3.5 with MTP", "CP2", "packed"],
    ["Qwen3.5 with MTP", "CP2", "padded"],
    ["Qwen3.5 with MTP", "PP2", "packed"],
    ["Qwen3.5 with MTP", "TP2+SP", "packed"],
    ["Qwen3.5 MoE with MTP", "EP2", "packed"],
]
SHARE = ["dense", "CP2", "presharded"]


@pytest.fixture(scope="module")
def on_ranks(folders, tmp_path_factory):
    output = tmp_path_factory.mktemp("waits") / "found.pt"
    named = {name: str(shutil.copytree(folder, output.parent / name)) for name, folder in folders.items()}
    for name, options in WITH_MTP.items():
        folder = make_checkpoint(output.parent / name, mtp=ExpertLayout.OUTPUT_MAJOR, **options)
        write_settings(folder, dict(mtp_loss_scaling_factor=0.1))
        named[name] = str(folder)
    run_ranks("tests.host_waits.on_ranks", 2, output, json.dumps([*CASES, SHARE]), json.dumps(named), timeout=500)
    return torch.load(output, weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_step_of_a_split_model_waits_for_nothing(on_ranks, case):
    for found in on_ranks[tuple(case)]:
        check(found, JOINT_NORM if case[1] == "1 + 1" else frozenset())


@pytest.mark.slow
def test_a_share_of_a_row_is_waited_for_three_times(on_ranks):
    """To read the arguments, to compare them over ranks, and to read the whole row."""
    for found in on_ranks[tuple(SHARE)]:
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
        input_ids=rows.input_ids,
        attention_mask=mask,
        labels=rows.labels.masked_fill(rows.loss_mask == 0, -100),
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
    )


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
def test_tensors_on_the_device_are_waited_for_once(folders, tmp_path, monkeypatch, family, kind):
    monkeypatch.setattr(MTPLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0))  # see above
    predicts = dict(mtp_loss_scaling_factor=0.1) if "MTP" in family else {}
    folder = make_checkpoint(tmp_path, mtp=ExpertLayout.OUTPUT_MAJOR) if predicts else folders[family]
    seen = called_with_tensors(folder, kind, **predicts)
    assert sum(seen.of_us().values()) == 1 and not seen.mixed, seen.of_us()


def numbers(seen: Seen) -> str:
    """Of the tables: ours, with what our lines cause in other packages, and upstream's."""
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
    """Each thing that makes a host wait is found, with its line, and what does not is not."""
    values, host = torch.arange(6.0), torch.arange(3)
    waits = HostWaits(values)
    kinds = {
        "a value": lambda: bool(values[0] > 1),
        "tolist": lambda: values.tolist(),
        "nonzero": lambda: (values > 1).nonzero(),
        "booleans as an index": lambda: values[values > 1],
        "masked_select": lambda: values.masked_select(values > 1),
        "_unique2": lambda: values.unique(),
        "equal": lambda: torch.equal(values, values + 1),
        "cpu: a copy to the host": lambda: values.cpu(),
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
        "new_tensor: a copy to the host": lambda: host.new_tensor(values),
        "an index on the host": lambda: values[host],
        "repeat_interleave without output_size": lambda: values.repeat_interleave(values.long()),
        "copy_ between host and GPU": lambda: values[:3].copy_(host),
        "a stream or an event": lambda: on_host({"values": values, "others": values + 1})["others"].tolist(),
        "a copy that has not arrived": lambda: values.to("cpu", non_blocking=True).tolist(),
    }
    free = [
        lambda: values.cumsum(0) * 2 + torch.zeros(6, device=values.device),
        lambda: values.masked_fill(values > 1, 0),
        lambda: torch.equal(values, values),
        lambda: host.pin_memory().to(values.device, non_blocking=True),
        lambda: values.to("cpu", non_blocking=True),
        lambda: host.tolist() and bool(host[0] == 0) and host[host > 1],
        lambda: values.repeat_interleave(values.long(), output_size=15),
        lambda: torch.as_tensor(values) + torch.asarray(values, device=values.device) + values.new_tensor(values),
        lambda: torch.tensor([host[0], 1.0]) + torch.as_tensor([2.0, 3.0]) + host.new_tensor([4, 5]),
    ]
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
