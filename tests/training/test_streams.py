"""Megatron-Bridge's data sets in our loop: its own order of samples, left and taken up without a difference."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from qwen3vl_bridge.training.small_loop.data_streams import BridgeData, open_data

import pytest
import torch

from .conftest import losses
from .foreign import SEQ_LENGTH, direct, energon, mock, write_conversations, write_webdataset
from .test_resume import stored

KINDS = ("single", "cyclic", "batch")
SHORT = dict(
    model__seq_length=SEQ_LENGTH,
    train__train_iters=3,
    train__micro_batch_size=2,
    train__global_batch_size=4,
    validation__eval_interval=2,
    validation__eval_iters=1,
    checkpoint__save_interval=1,
)


@pytest.fixture(scope="session")
def conversations(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("foreign"))


@pytest.fixture
def config(inputs):
    """A short run on a data set of theirs."""

    def make(save, dataset, **settings):
        cfg = inputs.config(save, **SHORT | settings)
        cfg.dataset = dataset
        return cfg

    return make


@dataclass
class Numbers(torch.utils.data.Dataset):
    """Samples that are their own numbers, as one of Megatron-Bridge's data sets."""

    length: int

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        return number

    collate_fn = staticmethod(list)


def numbered(kind="cyclic", *, length=24, valid=8, workers=0, sharding=True, **fields):
    """Data of a run of `length` samples, 4 in each step; and the run's configuration."""
    from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider

    @dataclass(kw_only=True)
    class Provider(DatasetProvider):
        hf_processor_path: str = "unused"
        flavor: int = 0

        def build_datasets(self, context: DatasetBuildContext) -> Any:
            sets = Numbers(length), Numbers(valid) if valid else None, None
            return (iter(sets[0]), iter(sets[1]), None) if kind == "external" else sets

    dataset = Provider(dataloader_type=kind, num_workers=workers, data_sharding=sharding, **fields)
    return BridgeData(
        SimpleNamespace(
            dataset=dataset,
            train=SimpleNamespace(
                global_batch_size=4,
                train_iters=length // 4,
                train_samples=None,
                exit_signal_handler_for_dataloader=False,
            ),
            validation=SimpleNamespace(eval_interval=2, eval_iters=2, eval_global_batch_size=4),
            checkpoint=SimpleNamespace(save=None, load=None),
            rng=SimpleNamespace(seed=5),
        ),
        groups=None,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_two_halves_is_the_whole(config, inputs, conversations, tmp_path, kind):
    from qwen3vl_bridge.training.small_loop.loop import train

    def run(save, **more):
        return train(config(tmp_path / save, direct(inputs.hf, conversations, dataloader_type=kind)), **more)

    whole = run("whole")
    halves = [*run("halves", stop_after=1), *run("halves")]
    steps = [entry for entry in whole if "loss" in entry]
    assert losses([entry for entry in halves if "loss" in entry]) == losses(steps)
    assert len(steps) == 3 and steps[0]["trained_tokens"] > 20
    assert losses(halves)[-1] == losses(whole)[-1] and "valid_loss" in whole[-1]
    ours, expected = stored(tmp_path / "halves"), stored(tmp_path / "whole")
    assert ours.keys() == expected.keys() and all(torch.equal(ours[key], expected[key]) for key in expected)


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_batches_are_those_of_megatron_bridges_loop(config, inputs, conversations, kind):
    from qwen3vl_bridge.training.small_loop.loop import set_up
    from qwen3vl_bridge.training.step import forward_step

    from megatron.bridge.data.loaders import setup_data_iterators
    from megatron.bridge.data.utils import get_dataset_provider

    cfg = config(None, direct(inputs.hf, conversations, dataloader_type=kind))
    cfg.guard = None  # no callbacks here
    run = set_up(cfg)
    build = get_dataset_provider(run.cfg.dataset)
    theirs, _, _ = setup_data_iterators(run.cfg, run.progress, 1, build, run.groups.dp)
    for _ in range(5):
        expected, found = next(theirs), next(run.stream)
        assert all(torch.equal(found[name], expected[name]) for name in ("input_ids", "labels", "attention_mask"))
    losses, count = forward_step(run.state, theirs, run.model[0])
    total, tokens, _ = count(losses)
    assert 4 < total / tokens < 8


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_made_up_conversations_are_trained_on(config, inputs, packed):
    from qwen3vl_bridge.training.small_loop.loop import train

    # Made-up answers are longer where they are packed, and would not fit beside a picture.
    dataset = mock(inputs.hf, num_images=0 if packed else 1, enable_in_batch_packing=packed)
    dataset.seq_length = 1024
    log = train(config(None, dataset, model__seq_length=1024, train__train_iters=2, validation__eval_iters=0))
    assert len(log) == 2 and all(4 < entry["loss"] < 8 and entry["grad_norm"] > 0 for entry in log)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_energons_own_configuration_is_trained_on(config, inputs, tmp_path, packed):
    from qwen3vl_bridge.training.small_loop.loop import train

    path = write_webdataset(tmp_path)
    logs = []
    for _ in range(2):
        dataset = energon(inputs.hf, path, enable_in_batch_packing=packed)
        logs.append(train(config(None, dataset, train__train_iters=2, validation__eval_interval=1)))
    assert losses(logs[0]) == losses(logs[1])
    assert [list(entry)[1] for entry in logs[0]] == ["loss", "valid_loss"] * 2
    assert all(4 < entry["loss"] < 8 and entry["trained_tokens"] > 10 for entry in logs[0] if "loss" in entry)


def test_packing_in_the_batch_changes_no_loss(config, inputs, conversations):
    from qwen3vl_bridge.training.small_loop.loop import train

    logs = []
    for packing in (None, False, True):
        packed = dict(enable_in_batch_packing=packing is not None, defer_in_batch_packing_to_step=bool(packing))
        dataset = direct(inputs.hf, conversations, **packed)
        logs.append(train(config(None, dataset, train__train_iters=2, validation__eval_iters=0)))
    for log in logs[1:]:
        for found, expected in zip(log, logs[0], strict=True):
            assert found["trained_tokens"] == expected["trained_tokens"]
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)  # measured MEASURED


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_takes_its_share_once_an_epoch(kind):
    taken = Counter()
    for rank in range(2):
        stream = numbered(kind).stream("train", dp_rank=rank, dp_size=2, micro_batch_size=2)
        for _ in range(24 // 4):
            batch = next(stream)
            assert len(batch) == 2
            taken.update(batch)
    assert taken == Counter(range(24))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_goes_on_where_another_stood(kind, workers):
    """Beyond an epoch too, and whatever workers have read ahead."""
    steps = 6 if kind == "single" else 15
    stream = numbered(kind, workers=workers).stream("train", micro_batch_size=2)
    expected, states = [], []
    for _ in range(steps):
        states.append(stream.state_dict())
        expected.append(next(stream))
    for begin in (0, 2, 5, steps - 1):
        if kind == "batch" and begin % 2:
            continue  # a step is two microbatches
        again = numbered(kind, workers=workers).stream("train", micro_batch_size=2)
        again.load_state_dict(states[begin])
        assert [next(again) for _ in range(steps - begin)] == expected[begin:]
    assert kind == "single" or expected[:12] != sorted(expected[:12])


def test_a_position_in_a_global_batch_is_refused():
    stream = numbered("batch").stream("train", micro_batch_size=2)
    next(stream)
    with pytest.raises(ValueError, match="after 2 samples, expected a multiple of 4"):
        numbered("batch").stream("train", micro_batch_size=2).load_state_dict(stream.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_does_not_depend_on_the_global_random_state(kind):
    orders = []
    for seed in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            stream = numbered(kind).stream("train")
            orders.append([next(stream) for _ in range(12)])
    assert orders[0] == orders[1]


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    for kind in KINDS:
        next(numbered(kind).stream("train"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (dict(), dict(flavor=1), "found flavor 1, expected 0"),
        (dict(), dict(length=28), "found samples 28, expected 24"),
        (dict(), dict(kind="batch"), "found dataloader_type 'batch', expected 'cyclic'"),
    ],
)
def test_a_position_of_other_data_is_refused(then, now, message):
    state = numbered(**then).stream("train").state_dict()
    with pytest.raises(ValueError, match=message):
        numbered(**now).stream("train").load_state_dict(state)


def test_a_run_in_order_may_be_made_longer():
    stream = numbered("single", length=24).stream("train")
    next(stream)
    longer = numbered("single", length=28, workers=1).stream("train")
    longer.load_state_dict(stream.state_dict())
    assert next(longer) == [1]


def test_data_that_ends_says_so():
    stream = numbered("single", length=4).stream("train", micro_batch_size=4)
    next(stream)
    with pytest.raises(ValueError, match="the data ends after 4 samples"):
        next(stream)


def test_evaluation_is_in_order_and_the_same_each_time():
    data = numbered(valid=9)
    for _ in range(2):
        seen = [list(data.evaluation("valid", dp_rank=rank, dp_size=2, micro_batch_size=2)) for rank in range(2)]
        assert seen == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_external_data_is_read_but_not_resumed():
    data = numbered("external")
    stream = data.stream("train")
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    evaluation = [next(data.evaluation("valid")) for _ in range(2)]
    assert evaluation == [0, 0]
    data.cfg.checkpoint.save = "somewhere"
    with pytest.raises(ValueError, match="its position is not in the checkpoints of this loop"):
        BridgeData(data.cfg, None)


def test_samples_by_number_are_not_external(config, inputs, conversations):
    from qwen3vl_bridge.training.small_loop.loop import set_up

    with pytest.raises(ValueError, match="the data a DirectSFTDataset, expected an iterator of batches"):
        set_up(config(None, direct(inputs.hf, conversations, dataloader_type="external")))


def test_incomplete_steps_are_refused():
    with pytest.raises(ValueError, match="drop_last is False with 25 samples, expected True, or a multiple of"):
        numbered(length=25, drop_last=False)
    numbered(length=24, drop_last=False)


def test_evaluation_without_data_is_refused(config, inputs, conversations):
    from qwen3vl_bridge.training.small_loop.loop import set_up

    with pytest.raises(ValueError, match=r"no validation data \(do_validation is False\) for validation.eval_iters 1"):
        set_up(config(None, direct(inputs.hf, conversations, do_validation=False)))


def test_a_provider_with_a_stream_is_its_own_data():
    dataset = SimpleNamespace(stream=None)
    assert open_data(SimpleNamespace(dataset=dataset), None) is dataset
    with pytest.raises(ValueError, match="dataset is dict, expected one with a stream, or of DirectHFSFTDatasetConfig"):
        open_data(SimpleNamespace(dataset={}), None)
