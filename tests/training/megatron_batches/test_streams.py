"""Megatron-Bridge's own data sets in its loop: trained on, left and taken up without a difference."""

import pytest
import torch

from ..conftest import losses
from ..running import replicated, stored, train
from .test_megatron_batches import SEQ_LENGTH, direct, energon, mock, write_conversations, write_webdataset

PACKED = dict(enable_in_batch_packing=True)
# How samples are ordered, and what else is set of the data.
ORDERS = {
    "single": {},
    "cyclic": dict(num_workers=1, **PACKED),
    "batch": dict(defer_in_batch_packing_to_step=True, **PACKED),
}
SHORT = dict(
    model__seq_length=SEQ_LENGTH, train__train_iters=3, train__micro_batch_size=2, train__global_batch_size=4,
    validation__eval_interval=2, validation__eval_iters=1, checkpoint__save_interval=3,
)  # fmt: skip


@pytest.fixture(scope="session")
def conversations(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("foreign"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("texts"), pictures=(0,))


@pytest.fixture
def config(inputs):
    def make(save, dataset, **settings):
        cfg = replicated(inputs, save, **SHORT | settings)
        cfg.dataset = dataset
        return cfg

    return make


def steps(log: list[dict]) -> list[dict]:
    return [entry for entry in log if "loss" in entry]


@pytest.mark.parametrize("order", ORDERS)
def test_a_run_in_two_halves_is_the_whole(config, inputs, conversations, texts, tmp_path, order):
    def make(save, order=order, **settings):
        path = texts if order == "batch" else conversations  # or each microbatch would get the pictures of all
        dataset = direct(inputs.hf, path, dataloader_type=order, **ORDERS[order])
        return config(tmp_path / save, dataset, **settings)

    whole = train(make("whole"))
    halves = [*train(make("halves"), stop_after=1), *train(make("halves"))]
    assert losses(steps(halves)) == losses(steps(whole))
    assert len(steps(whole)) == 3 and whole[0]["trained_tokens"] > 20 and all(4 < e["loss"] < 8 for e in steps(whole))
    assert [entry["step"] for entry in whole if "valid_loss" in entry] == [2, 3]
    ours, expected = stored(tmp_path / "halves"), stored(tmp_path / "whole")
    assert ours.keys() == expected.keys() and all(torch.equal(ours[key], expected[key]) for key in expected)
    longer = dict(train__train_iters=4, scheduler__override_opt_param_scheduler=True)
    another = "batch" if order == "cyclic" else "cyclic"
    with pytest.raises(ValueError, match=f"to other data: .*found .*'{another}', expected '{order}'"):
        train(make("halves", another, **longer))
    if order == "single":  # in order, so a run may be made longer
        assert [entry["step"] for entry in steps(train(make("halves", **longer)))] == [4]


def test_pictures_in_the_order_of_global_batches_are_refused(config, inputs, conversations):
    with pytest.raises(ValueError, match="Expected 'single' or 'cyclic' for data with images"):
        train(config(None, direct(inputs.hf, conversations, dataloader_type="batch")))


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_made_up_conversations_are_trained_on(config, inputs, packed):
    # Made-up answers are longer where they are packed, and would not fit beside a picture.
    dataset = mock(inputs.hf, num_images=0 if packed else 1, enable_in_batch_packing=packed)
    dataset.seq_length = 1024
    log = train(config(None, dataset, model__seq_length=1024, train__train_iters=2, validation__eval_iters=0))
    assert len(log) == 2 and all(4 < entry["loss"] < 8 and entry["grad_norm"] > 0 for entry in log)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_energons_own_configuration_is_trained_on(config, inputs, tmp_path, packed):
    path = write_webdataset(tmp_path)

    def run():
        dataset = energon(inputs.hf, path, enable_in_batch_packing=packed)
        return train(config(None, dataset, train__train_iters=2, validation__eval_interval=1))

    log, again = run(), run()
    assert losses(log) == losses(again)
    assert len(steps(log)) == 2 and [entry["step"] for entry in log if "valid_loss" in entry] == [1, 2]
    assert all(4 < entry["loss"] < 8 and entry["trained_tokens"] > 10 for entry in steps(log))


def test_a_run_on_energons_own_configuration_does_not_begin_its_data_anew_unsaid(config, inputs, tmp_path):
    path = write_webdataset(tmp_path)

    def run(**settings):
        dataset = energon(inputs.hf, path)
        return train(
            config(tmp_path / "run", dataset, train__train_iters=2, validation__eval_iters=0, **settings), stop_after=1
        )

    assert len(run()) == 1
    with pytest.raises(ValueError, match=r"no state of its loader for iter_0000001.*Qwen3VLEnergonProvider; or"):
        run()
    assert [entry["step"] for entry in run(checkpoint__finetune=True)] == [1]
