"""Test the dataset provider in Megatron-Bridge's loop and in custom loops."""

import contextlib
import json
from itertools import pairwise
from types import SimpleNamespace

from qwen3vl_bridge.data import DataError, JsonLines
from qwen3vl_bridge.data import dataset_provider as module
from qwen3vl_bridge.data.encoding import VisionLimits

import pytest
import torch
from megatron.bridge.data.samplers import build_pretraining_data_loader
from megatron.bridge.data.utils import get_dataset_provider
from qwen3vl_recipes.paths import check_data

from tests.data.conftest import built, ids, take


@pytest.fixture
def make(train_file, make_provider):
    settings = {"train_path": train_file, "valid_path": train_file, "window_size": 8}
    return lambda **changes: make_provider(**settings | changes)


def loader(provider, rows, consumed=0, rank=0, size=1, micro_batch_size=1):
    """Build a loader like `megatron.bridge.data.loaders`."""
    return build_pretraining_data_loader(
        rows, consumed, provider.dataloader_type, micro_batch_size, provider.num_workers, provider.data_sharding,
        collate_fn=rows.collate_fn, pin_memory=provider.pin_memory, persistent_workers=provider.persistent_workers,
        data_parallel_rank=rank, data_parallel_size=size, drop_last=provider.drop_last,
    )  # fmt: skip


def test_provider_stream_yields_same_batches_as_build_datasets(make):
    provider = make()
    train, valid, test = get_dataset_provider(provider)((30, 4, 4), provider)
    assert (len(train), len(valid), test) == (30, 4, None)
    expected = ids(take(provider.stream("train"), 30))
    assert ids(loader(provider, train)) == expected
    assert ids(loader(provider, train, consumed=10)) == expected[10:]
    for rank in range(2):
        assert ids(loader(provider, train, rank=rank, size=2)) == expected[rank::2]
        assert ids(take(provider.stream("train", dp_rank=rank, dp_size=2), 15)) == expected[rank::2]


def run_of(dataset, eval_interval: int | None = 10, eval_iters: int = 10) -> SimpleNamespace:
    checks = {"eval_interval": eval_interval, "eval_iters": eval_iters, "eval_global_batch_size": None}
    sections = {"model": {"context_parallel_size": 1}, "validation": checks, "train": {"global_batch_size": 4}}
    return SimpleNamespace(dataset=dataset, **{name: SimpleNamespace(**one) for name, one in sections.items()})


def test_check_samples_raises_if_all_samples_would_be_dropped(make, tmp_path, train_file):
    lines = train_file.read_text().splitlines()
    bad = ['{"messages": []}', '{"messages": [{"role": "user", "content": "<image>"}]}'] * 10
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(bad))

    def check(**changes):
        check_data(run_of(make(**{"train_path": str(path), "on_bad": "drop", **changes})))

    with pytest.raises(DataError, match=r"all of the first 8 samples would be dropped .*The first errors"):
        check()
    with pytest.raises(DataError, match="all of the first 20 samples"):
        check(window_size=512)
    with pytest.raises(DataError, match="all of the first 20 samples"):
        check(train_path=None, mixture=[{"path": str(path)}], window_size=512)
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"samples would be dropped .*expected at most 4"):
        check(on_long="drop", seq_length=4, media_root=str(train_file.parent))
    for changes in ({}, {"on_long": "truncate"}):
        path.write_text("\n".join([*bad, *lines[:1]]))
        check(window_size=512, media_root=str(train_file.parent), **changes)


def test_check_samples_error_lists_all_bad_records_of_train_or_valid_split(make, tmp_path, train_file, caplog):
    lines, images = train_file.read_text().splitlines(), str(train_file.parent)
    question = {"role": "user", "content": [{"type": "image", "image": "broken.png"}]}
    for number in (3, 17, 31):
        lines[number] = '{"messages": []}'
    lines[20] = json.dumps({"messages": [question, {"role": "assistant", "content": "no"}]})
    (tmp_path / "broken.png").write_bytes(b"no image")
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    paths = {"train_path": str(tmp_path / "train.jsonl"), "media_root": [images, str(tmp_path)]}
    with pytest.raises(DataError) as caught:
        check_data(run_of(make(**paths)))
    first, *others = str(caught.value).splitlines()
    assert first.startswith("train data: 4 of 40 records cannot be used (dataset.on_bad=drop drops such records")
    assert "`qwen3vl data inspect` lists all of them" in first
    assert others[0].startswith("  train.jsonl:4: found [] under 'messages'")
    assert others[1] == "  the same in 2 more: train.jsonl:18, train.jsonl:32"
    assert others[2].startswith("  train.jsonl:21: ") and "does not decode as an image" in others[2]
    check_data(run_of(make(**paths, on_bad="drop")))
    (warning,) = [one for one in caplog.messages if "cannot be used" in one]
    assert warning.startswith("train data: 4 of 40 records cannot be used and are left out (dataset.on_bad is 'drop'):")
    with pytest.raises(DataError, match=r"valid data: 4 of 40 records cannot be used .*\n  valid.jsonl:4: "):
        check_data(run_of(make(valid_path=str(tmp_path / "valid.jsonl"), media_root=paths["media_root"])))


def test_check_samples_reads_only_records_that_evaluation_will_read(make, tmp_path, train_file):
    url = {"type": "image", "image": "http://images.example/1.png"}
    record = {"messages": [{"role": "user", "content": [url]}, {"role": "assistant", "content": "no"}]}
    lines = train_file.read_text().splitlines()
    path = tmp_path / "test.jsonl"
    path.write_text("\n".join([*lines[:8], json.dumps(record), *lines[8:]]))
    data = {"test_path": str(path), "media_root": str(train_file.parent), "url_cache": str(tmp_path), "on_bad": "drop"}
    mixed = {"train_path": None, "valid_path": None, "test_path": None, "window_size": 5}
    sets = [{"path": str(folder)} for folder in (tmp_path / "a", tmp_path / "b")]
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        (folder / "train.jsonl").write_text(train_file.read_text())
        (folder / "test.jsonl").write_text("\n".join([*lines[:8], json.dumps(record)]))
    for changes, interval, iters, is_read in (
        ({}, 10, 0, False), ({}, 10, 2, False), ({}, 10, 3, True), ({"window_size": 9}, 10, 1, True),
        ({"pack": False, "window_size": 512}, 10, 2, False), ({"valid_path": str(path)}, None, 2, False),
        ({**mixed, "mixture": sets}, None, 4, False), ({**mixed, "mixture": sets}, None, 5, True),
    ):  # fmt: skip
        run = run_of(make(**data | changes), eval_interval=interval, eval_iters=iters)
        with pytest.raises(DataError, match="no download of it") if is_read else contextlib.nullcontext():
            check_data(run)


def test_check_samples_reads_blocks_of_large_file_on_rank_0_only(make, tmp_path, monkeypatch):
    question, answer = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "no"}
    good, bad = (json.dumps({"messages": messages}) for messages in ([question, answer], []))
    lines = [good] * 10_000
    lines[249] = lines[250] = lines[8750] = lines[9999] = bad  # the first and third are in a block of 250
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    provider, read = make(train_path=str(tmp_path / "train.jsonl"), valid_path=None), []
    one = JsonLines.__getitem__
    monkeypatch.setattr(JsonLines, "__getitem__", lambda self, number: (read.append(number), one(self, number))[1])
    monkeypatch.setattr(module, "_CHECK_SECONDS", 600.0)
    with pytest.raises(DataError, match=r"data: 2 of 2,000 records, of 10,000 in all, (.*\n)+.*: train.jsonl:8751$"):
        provider.check_samples()
    assert read == [number for start in range(0, 10_000, 1250) for number in range(start, start + 250)]
    read.clear()
    monkeypatch.setenv("RANK", "1")
    provider.check_samples()
    assert not read


def test_stream_error_for_bad_record_suggests_on_bad_drop_setting(make, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"messages": []}')
    for workers in (0, 1):
        stream = make(train_path=str(tmp_path / "train.jsonl"), num_workers=workers).stream("train")
        with pytest.raises(DataError, match=r"train.jsonl:1: .* \(dataset.on_bad=drop drops .*`qwen3vl data inspect`"):
            next(stream)


def test_check_data_raises_if_folder_has_no_train_file(make, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "llava.json").write_text("[]")
    for changes in ({"train_path": str(tmp_path)}, {"train_path": None, "mixture": [{"path": str(tmp_path)}]}):
        with pytest.raises(DataError, match=r"found llava.json, images in the folder.*give its own path"):
            check_data(run_of(make(**changes)))


def test_provider_without_packing_yields_microbatches_of_padded_rows(make):
    provider = make(pack=False)
    train, _, _ = built(provider, 12)
    (first, *_) = loader(provider, train, micro_batch_size=3)
    assert first.input_ids.shape == (3, 256) and len(first.sample_ids) == 3
    assert first.sample_ids == next(provider.stream("train", micro_batch_size=3)).sample_ids


def test_provider_shuffles_only_the_training_stream(make):
    provider = make(pack=False)
    in_order = [(f"train.jsonl:{line}",) for line in range(1, 41)]
    assert ids(provider.evaluation("valid")) == ids(provider.evaluation("train")) == in_order
    assert ids(take(provider.stream("valid"), 40)) == in_order
    shuffled = ids(take(provider.stream("train"), 40))
    assert shuffled != in_order and sorted(shuffled) == sorted(in_order)
    assert next(make(pack=False, seed=5).stream("train")).sample_ids != shuffled[0]


def test_provider_applies_padding_dtype_and_length_settings_to_batches(make):
    batch = next(make(pad_to_multiple_of=16, pixel_dtype=torch.bfloat16).stream("train"))
    assert all(length % 16 == 0 for length in batch.layout.padded_lengths)
    assert batch.vision.pixel_values.dtype == torch.bfloat16 and batch.input_ids.shape == (1, 256)
    with pytest.raises(DataError, match="expected at most 32"):
        next(make(seq_length=32).stream("train"))
    assert next(make(seq_length=80, on_long="drop").stream("train")).input_ids.shape == (1, 80)
    for name, value in (("reasoning_effort", "low"), ("preserve_thinking", False)):
        with pytest.raises(ValueError, match=f"{name} is {value!r}, but the chat template ignores it"):
            make(**{name: value}).stream("train")


@pytest.mark.parametrize(("changes", "message"), [
    ({"pack": False, "pad_to_multiple_of": 8}, "pad_to_multiple_of is 8, but pack is off"),
    ({"media_root": [7]}, "media_root has 7, expected a folder, or a list of folders"),
    ({"drop_last": False}, "drop_last is False, expected True: .* ignores this setting"),
    ({"num_workers": -1}, "num_workers is -1, expected at least 0"), ({"max_patches": 0}, "max_patches is 0, expected"),
    ({"schema_adapter": "cord"}, "schema_adapter is 'cord', expected one of cord_v2, rdr, .*, or none"),
    ({"dataloader_type": "cyclic"}, "dataloader_type is 'cyclic', expected 'single'"),
    ({"on_long": "cut"}, "on_long is 'cut', expected 'error' or 'drop' or 'truncate'"),
    ({"seq_length": 250, "pad_to_multiple_of": 8}, "seq_length is 250, expected a multiple of pad_to_multiple_of, 8"),
])  # fmt: skip
def test_provider_raises_if_settings_are_invalid(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_provider_raises_if_split_or_processor_is_missing(make, tmp_path):
    with pytest.raises(ValueError, match="the split 'test' has no data: set test_path; the splits are train, valid"):
        make().stream("test")
    with pytest.raises(DataError, match="nowhere: found no processor"):
        make(hf_processor_path=str(tmp_path / "nowhere")).stream("train")


def test_provider_reads_images_below_second_media_root(make, train_file, tmp_path):
    (tmp_path / "elsewhere").symlink_to(train_file.parent / "images")
    (tmp_path / "train.jsonl").write_text(train_file.read_text().replace("images/", "elsewhere/"))
    path = str(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match=rf"the roots: dataset.media_root=\[{tmp_path},{train_file.parent}/images\]"):
        take(make(train_path=path).stream("train"), 20)
    stream = make(train_path=path, media_root=[str(tmp_path), str(train_file.parent)]).stream("train")
    assert ids(take(stream, 10)) == ids(take(make().stream("train"), 10))
    other = make(train_path=path, media_root=[str(tmp_path), str(train_file.parent / "images")]).stream("train")
    other.load_state_dict(stream.state_dict())
    assert next(other).sample_ids == next(stream).sample_ids


@pytest.mark.parametrize(
    "changes", [{"vision": VisionLimits(image_max_pixels=2048)}, {"answers": "last"}, {"max_patches": 200}]
)
def test_provider_load_state_dict_raises_if_sample_settings_differ(make, changes):
    stream = make().stream("train")
    next(stream)
    with pytest.raises(ValueError, match="position belongs to other data"):
        make(**changes).stream("train").load_state_dict(stream.state_dict())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_provider_balance_over_reorders_rows_by_cost_within_global_batch(make, ranks):
    provider = make(balance_over=4)
    rows, _, _ = built(provider, 40, dp=ranks)
    plain = ids(take(make().stream("train"), 12))
    costs = {names: rows.cost(number) for number, names in enumerate(plain)}
    loaders = [iter(loader(provider, rows, rank=rank, size=ranks)) for rank in range(ranks)]
    for first in range(0, 12, 4):
        turns = [[next(one).sample_ids for one in loaders] for _ in range(4 // ranks)]
        assert sorted(names for turn in turns for names in turn) == sorted(plain[first : first + 4])
        if ranks > 1:
            dear = [[costs[names] for names in turn] for turn in turns]
            assert all(min(turn) >= max(later) for turn, later in pairwise(dear))
