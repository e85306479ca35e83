"""Test streams over WebDatasets: each sample once, exact resume, and Megatron-Bridge's loop."""

import io
import logging
from functools import partial
from itertools import chain

from qwen3vl_bridge.core.collectives import sum_over_data_parallel
from qwen3vl_bridge.data import DataError
from qwen3vl_bridge.data import samples as samples_module
from qwen3vl_bridge.data.encoding import VisionLimits
from qwen3vl_bridge.training.metrics import BatchCounts, ExcludedSamples, Meter
from qwen3vl_bridge.training.process_groups import shutdown

import pytest
import torch
import torch.distributed as dist
from megatron.bridge.data.loaders import RerunDataIterator
from megatron.bridge.data.utils import get_dataset_provider
from megatron.bridge.utils.safe_pickle import energon_torch_load

from tests.data.conftest import built, groups, picture, same, take
from tests.data.energon.conftest import ASKED, keys, provider_of, write_folder
from tests.data.test_shared_sizes import run
from tests.data.test_videos import ask
from tests.training.running import replicate, train

NUMBER = 22


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write 22 samples in three tars, every third with an image; seven for validation, one for testing."""
    folder = tmp_path_factory.mktemp("streams")
    contents = [picture(folder / f"{n}.png", 32, 32 * (n + 1), seed=n).read_bytes() for n in range(3)]

    def sample(number: int, words: str):
        question = {"type": "text", "text": f"{words} " * (1 + number % 5)}
        if number % 3:
            return f"{words}{number}", {"json": {"messages": [{"role": "user", "content": [question]}, ASKED[1]]}}
        parts = ask({"type": "image", "image": "png"}, question)
        return f"{words}{number}", {"json": {"messages": parts}, "png": contents[number % 9 // 3]}

    train = [sample(number, "t") for number in range(NUMBER)]
    valid = [[sample(number, "v") for number in range(7)]]
    return write_folder(folder / "wds", train=[train[:9], train[9:12], train[12:]], val=valid, test=[[sample(0, "x")]])


def sample_keys(*letters_and_numbers) -> list[str]:
    return sorted(f"{letter}{number}" for letter, count in letters_and_numbers for number in range(count))


TRAIN = sample_keys(("t", NUMBER))


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 0)])
def test_energon_stream_reads_each_sample_once_per_epoch(make, folder, ranks, workers):
    provider = make(folder, pack=False, num_workers=workers)
    share = NUMBER // ranks
    streams = [provider.stream("train", dp_rank=rank, dp_size=ranks) for rank in range(ranks)]
    epochs = [[keys(take(stream, share)) for stream in streams] for _ in range(2)]
    assert [sorted(chain.from_iterable(epoch)) for epoch in epochs] == [TRAIN, TRAIN]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_energon_packed_rows_contain_each_sample_once(make, folder, ranks):
    provider = make(folder, packing_buffer_size=NUMBER // ranks)
    streams = [provider.stream("train", dp_rank=rank, dp_size=ranks) for rank in range(ranks)]
    found, rows, most = [], 0, 0
    for stream in streams:
        seen: list[str] = []
        while len(seen) < NUMBER // ranks:
            batch = next(stream)
            seen, rows, most = seen + keys([batch]), rows + 1, max(most, len(batch.sample_ids))
        found += seen
    assert sorted(found) == TRAIN
    assert rows < NUMBER / 3 and most > 3


SETTINGS = [
    {"packing_buffer_size": 5, "shuffle_buffer_size": 4, "seq_length": 128},
    {"packing_buffer_size": 5, "shuffle_buffer_size": 4, "seq_length": 128, "num_workers": 1},
    {"pack": False, "micro_batch_size": 2, "shuffle_buffer_size": 4},
]


@pytest.mark.slow
@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("settings", SETTINGS)
def test_energon_stream_restored_yields_batches_of_uninterrupted_stream(make, folder, settings):
    whole = take(make(folder, **settings).stream("train"), 11)
    assert len({batch.sample_ids for batch in whole}) > 8
    for stop in (7,) if "num_workers" in settings else (0, 7):
        stream = make(folder, **settings).stream("train")
        assert all(map(same, take(stream, stop), whole))
        theirs = io.BytesIO()
        torch.save(stream.save_state(), theirs)
        for given in (0, 2):  # before it is restored
            theirs.seek(0)
            restored = make(folder, **settings).stream("train")
            take(restored, given)
            restored.restore_state(energon_torch_load(theirs))
            assert all(map(same, take(restored, 4), whole[stop : stop + 4]))


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("settings", [{}, {"packing_buffer_size": 4}])
def test_energon_stream_restored_on_each_dp_rank_continues_its_batches(make, folder, settings):
    provider = make(folder, **settings)
    for rank in range(2):
        stream, resumed = (provider.stream("train", dp_rank=rank, dp_size=2) for _ in range(2))
        take(stream, 3)
        resumed.restore_state(stream.save_state())
        assert all(map(same, take(resumed, 5), take(stream, 5)))


@pytest.mark.parametrize(("changes", "found"), [
    ({"seed": 1}, "seed 1, expected 0"), ({"vision": VisionLimits(image_max_pixels=2048)}, "encoding"),
    ({"packing_buffer_size": 6}, "data"), ({"num_workers": 2}, "workers 2, expected 0"),
    ({"on_bad": "drop"}, "on_bad drop, expected error"),
])  # fmt: skip
def test_energon_raises_if_position_was_saved_with_different_settings(make, folder, changes, found):
    before, now = make(folder, packing_buffer_size=5), make(folder, **{"packing_buffer_size": 5, **changes})
    built(before, 4)
    now.expect_position(before.position, 0)
    with pytest.raises(ValueError, match=f"position belongs to other data: found {found}"):
        built(now, 4)


def test_energon_restore_state_raises_if_num_workers_differs(make, folder):
    stream = make(folder, pack=False).stream("train")
    take(stream, 1)
    with pytest.raises(ValueError, match="energon rejects the position"):
        make(folder, pack=False, num_workers=2).stream("train").restore_state(stream.save_state())


def test_energon_stream_order_depends_on_seed(make, folder):
    first, again, other = (keys(take(make(folder, pack=False, seed=s).stream("train"), NUMBER)) for s in (1, 1, 2))
    assert first == again != other


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(("ranks", "settings"), [
    (1, {}), (3, {}), (2, {"pack": False}), (2, {"pack": False, "micro_batch_size": 2}), (1, {"num_workers": 2}),
])  # fmt: skip
def test_energon_evaluation_over_all_ranks_reads_each_sample_once(make, folder, ranks, settings):
    provider = make(folder, seq_length=128, packing_buffer_size=None if "pack" in settings else 4, **settings)
    passes = [list(provider.evaluation("valid", dp_rank=rank, dp_size=ranks)) for rank in range(ranks)]
    assert len({len(batches) for batches in passes}) == 1
    assert sorted(keys(batch for batches in passes for batch in batches)) == sample_keys(("v", 7))
    rows = settings.get("micro_batch_size", 1)
    assert all(batch.input_ids.shape == (rows, 128) for batches in passes for batch in batches)


def test_energon_evaluation_reads_requested_split(make, folder):
    provider = make(folder)
    assert sorted(keys(provider.evaluation("train"))) == TRAIN
    assert keys(provider.evaluation("test")) == ["x0"]
    with pytest.raises(ValueError, match="found the split 'val', expected 'train' or 'valid' or 'test'"):
        provider.evaluation("val")


def test_energon_evaluation_with_on_bad_drop_skips_loss_of_bad_sample(make, tmp_path):
    whole = picture(tmp_path / "a.jpg", 96, 96).read_bytes()
    bad = {"json": {"messages": ask({"type": "image", "image": "jpg"})}, "jpg": whole[: len(whole) // 2]}
    good = {"json": {"messages": ASKED}}
    folder = write_folder(tmp_path / "wds", train=[[("a", good)]], val=[[("good", good), ("bad", bad)]])
    batches = list(make(folder, pack=False, on_bad="drop").evaluation("valid"))
    assert len(batches) == 2 and keys(batches) == ["good"]
    with pytest.raises(DataError, match=r"^val-0.tar:bad: "):
        list(make(folder, pack=False).evaluation("valid"))


@pytest.mark.slow
def test_energon_stream_restored_counts_drops_of_uninterrupted_stream(make, tmp_path):
    bad, good = {"json": {"messages": []}}, {"json": {"messages": ASKED}}
    folder = write_folder(tmp_path / "wds", train=[[(f"{n}", bad if n % 3 else good) for n in range(18)]])
    provider = make(folder, packing_buffer_size=2, on_bad="drop")
    whole = [batch.newly_dropped for batch in take(provider.stream("train"), 8)]
    assert sum(map(sum, whole)) > 12
    for ranks in (1, 2):
        stream, resumed = (provider.stream("train", dp_size=ranks) for _ in range(2))
        expected = [batch.newly_dropped for batch in take(stream, 6)]
        stream = provider.stream("train", dp_size=ranks)
        take(stream, 3)
        resumed.restore_state(stream.save_state())
        assert [batch.newly_dropped for batch in take(resumed, 3)] == expected[3:]


@pytest.mark.parametrize("workers", [0, 1])
def test_energon_sums_dropped_samples_over_ranks(make, tmp_path, workers):

    def of_rank(rank: int) -> tuple:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
        logging.getLogger("qwen3vl_bridge.data.samples").addHandler(logging.FileHandler(tmp_path / "said"))
        stream = make(folder, pack=False, num_workers=workers, on_bad="drop").stream("train", dp_rank=rank, dp_size=2)
        meter, batches = Meter(), take(stream, 6)
        for batch in batches:
            meter.add(BatchCounts(), batch)
        excluded = ExcludedSamples(None)
        total = excluded.to_metrics(sum_over_data_parallel(excluded.pad_counts(meter.newly_dropped), groups()), [0])
        dist.barrier()
        return total, sum(meter.newly_dropped), keys(batches)

    bad, good = {"json": {"messages": []}}, {"json": {"messages": ASKED}}
    tars = [[(f"{tar}{n}", good if n % 3 == 2 else bad) for n in range(18)] for tar in "ab"]
    folder = write_folder(tmp_path / "wds", train=tars)
    shutdown()  # groups of other tests, of which each rank would have a copy
    samples_module._job.cache_clear()
    (total, first, seen), (same_total, second, other) = run(*(partial(of_rank, rank) for rank in range(2)))
    # Each rank has a tar: its six good samples, and the twelve bad ones before them.
    assert len({*seen, *other}) == 12 and (first, second) == (12, 12)
    assert total == same_total == {"dropped": 24}
    numbers = sorted(int(text.split()[0]) for text in (tmp_path / "said").read_text().split("dropped, ")[1:])
    assert numbers in ([1, 2, 3, 4, 8, 16], [1, 2, 3, 4, 8, 16, 32])  # workers read ahead


def test_energon_build_datasets_yields_same_batches_as_stream(make, folder):
    provider = make(folder, packing_buffer_size=5)
    train, valid, test = get_dataset_provider(provider)((10, 2, 2), provider)
    assert test is None and next(valid).sample_ids[0].startswith("val-0.tar:v")
    iterator = RerunDataIterator(train)  # as `megatron.bridge.data.loaders` wraps external ones
    stream = provider.stream("train")
    assert all(same(next(iterator), next(stream)) for _ in range(5))
    assert iterator.iterable.save_state().worker_states
    assert built(make(folder, do_validation=False), 4, 4)[1:] == (None, None)


def test_energon_build_datasets_of_dp_rank_yields_batches_of_its_stream(make, folder):
    provider = make(folder, pack=False, seed=3)
    train, _, _ = built(provider, 4, dp=2, dp_rank=1)
    assert all(map(same, take(train, 11), provider.stream("train", dp_rank=1, dp_size=2)))


@pytest.mark.parametrize(("changes", "message"), [
    ({"dataloader_type": "single"}, "dataloader_type is 'single', expected 'external'"),
    ({"micro_batch_size": 2}, "micro_batch_size is 2, expected 1 with packing"),
    ({"pack": False, "packing_buffer_size": 4}, "packing_buffer_size is 4, but pack is off"),
    ({"shuffle_buffer_size": 0}, "shuffle_buffer_size is 0, expected at least 1"),
    ({"sample_fps": 0.0}, "sample_fps is 0.0, expected"),
    ({"pin_memory": False}, "pin_memory is False, expected True: .* ignores this setting"),
    ({"data_sharding": False}, "data_sharding is False"),
    ({"num_workers": 1, "persistent_workers": False}, "persistent_workers is False, expected True"),
    ({"dataset_kwargs": {"auto_decode": True, "batch_size": 2}}, "sets auto_decode, batch_size: remove these keys"),
])  # fmt: skip
def test_energon_raises_if_settings_are_invalid_or_ignored(make, folder, changes, message):
    with pytest.raises(ValueError, match=message):
        make(folder, **changes)


def test_energon_raises_if_dp_rank_or_split_is_invalid(make, folder):
    provider = make(folder)
    with pytest.raises(ValueError, match="found data-parallel rank 2 of 2"):
        provider.stream("train", dp_rank=2, dp_size=2)
    with pytest.raises(ValueError, match="found data-parallel rank -1 of 1"):
        next(provider.evaluation("valid", dp_rank=-1))
    with pytest.raises(ValueError, match="found the split 'test', expected 'train' or 'valid'"):
        provider.stream("test")
    provider.finalize()  # Megatron-Bridge does it again


def test_energon_dataset_kwargs_are_passed_to_energon(make, folder):
    (folder / ".nv-meta" / "small.yaml").write_text("split_parts:\n  train: [train-1.tar]\nexclude: []\n")
    provider = make(folder, pack=False, dataset_kwargs={"split_config": "small.yaml"})
    assert sorted(keys(take(provider.stream("train"), 3))) == ["t10", "t11", "t9"]


@pytest.mark.slow
def test_energon_resumed_run_has_losses_of_uninterrupted_run(untied_folder, folder, tmp_path):
    from qwen3vl_recipes.digits import qwen3_vl_digits_sft_config
    from qwen3vl_recipes.paths import set_paths

    def config(save: str):
        cfg = set_paths(qwen3_vl_digits_sft_config(), hf_path=untied_folder, save=tmp_path / save)
        replicate(cfg).mixed_precision = None
        cfg.dataset = provider_of(untied_folder, folder, seq_length=128, packing_buffer_size=6)
        cfg.checkpoint.pretrained_checkpoint, cfg.model.seq_length = None, 128
        cfg.train.train_iters, cfg.scheduler.lr_warmup_iters = 4, 1
        return cfg

    def losses(log) -> list:
        return [entry["loss"] for entry in log if "loss" in entry]

    whole = losses(train(config("whole")))
    first = losses(train(config("halves"), stop_after=2))
    halves = first + losses(train(config("halves")))
    assert len(whole) == 4 and halves == whole and whole[3] < whole[0]
