"""The provider in Megatron-Bridge's own data loading, and in ours."""

from itertools import pairwise
from types import SimpleNamespace

from qwen3vl_bridge.data import DataError
from qwen3vl_bridge.data.encoding import VisionLimits

import pytest
import torch
from megatron.bridge.data.samplers import build_pretraining_data_loader
from megatron.bridge.data.utils import get_dataset_provider
from qwen3vl_recipes.paths import check_data

from .conftest import built, ids, take


@pytest.fixture
def make(train_file, make_provider):
    settings = {"train_path": train_file, "valid_path": train_file, "window_size": 8}
    return lambda **changes: make_provider(**settings | changes)


def loader(provider, rows, consumed=0, rank=0, size=1, micro_batch_size=1):
    """As `megatron.bridge.data.loaders` builds one."""
    return build_pretraining_data_loader(
        rows, consumed, provider.dataloader_type, micro_batch_size, provider.num_workers, provider.data_sharding,
        collate_fn=rows.collate_fn, pin_memory=provider.pin_memory, persistent_workers=provider.persistent_workers,
        data_parallel_rank=rank, data_parallel_size=size, drop_last=provider.drop_last,
    )  # fmt: skip


def test_both_loops_see_the_same_rows(make):
    provider = make()
    train, valid, test = get_dataset_provider(provider)((30, 4, 4), provider)
    assert (len(train), len(valid), test) == (30, 4, None)
    expected = ids(take(provider.stream("train"), 30))
    assert ids(loader(provider, train)) == expected
    assert ids(loader(provider, train, consumed=10)) == expected[10:]
    for rank in range(2):
        assert ids(loader(provider, train, rank=rank, size=2)) == expected[rank::2]
        assert ids(take(provider.stream("train", dp_rank=rank, dp_size=2), 15)) == expected[rank::2]


def run_of(dataset) -> SimpleNamespace:
    return SimpleNamespace(model=SimpleNamespace(context_parallel_size=1), dataset=dataset)


def test_data_of_which_all_would_be_dropped_are_refused_before_a_model_is_built(make, tmp_path, train_file):
    """By what recipes ask before they begin; one good sample is enough, and the others are not measured."""
    lines = train_file.read_text().splitlines()
    bad = ['{"messages": []}', '{"messages": [{"role": "user", "content": "<image>"}]}'] * 10
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(bad))

    def check(**changes):
        check_data(run_of(make(**{"train_path": str(path), "on_bad": "drop", **changes})))

    with pytest.raises(DataError, match=r"found 8 samples, all of which would be dropped .*The first"):
        check()
    with pytest.raises(DataError, match="found 20 samples, all of which"):
        check(window_size=512)
    with pytest.raises(DataError, match="found 20 samples, all of which"):
        check(train_path=None, mixture=[{"path": str(path)}], window_size=512)
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"all of which would be dropped .*expected at most 4"):
        check(on_long="drop", seq_length=4, media_root=str(train_file.parent))
    for changes in ({}, {"on_long": "truncate"}):
        path.write_text("\n".join([*bad, *lines[:1]]))
        check(window_size=512, media_root=str(train_file.parent), **changes)


def test_a_folder_that_is_no_data_set_is_refused_before_a_model_is_built(make, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "llava.json").write_text("[]")
    for changes in ({"train_path": str(tmp_path)}, {"train_path": None, "mixture": [{"path": str(tmp_path)}]}):
        with pytest.raises(DataError, match=r"found llava.json, images in the folder.*give its own path"):
            check_data(run_of(make(**changes)))


def test_padded_rows_come_in_microbatches(make):
    provider = make(pack=False)
    train, _, _ = built(provider, 12)
    (first, *_) = loader(provider, train, micro_batch_size=3)
    assert first.input_ids.shape == (3, 256) and len(first.sample_ids) == 3
    assert first.sample_ids == next(provider.stream("train", micro_batch_size=3)).sample_ids


def test_only_training_rows_are_shuffled(make):
    provider = make(pack=False)
    in_order = [(f"train.jsonl:{line}",) for line in range(1, 41)]
    assert ids(provider.evaluation("valid")) == ids(provider.evaluation("train")) == in_order
    assert ids(take(provider.stream("valid"), 40)) == in_order
    shuffled = ids(take(provider.stream("train"), 40))
    assert shuffled != in_order and sorted(shuffled) == sorted(in_order)
    assert next(make(pack=False, seed=5).stream("train")).sample_ids != shuffled[0]


def test_settings_reach_the_rows(make):
    batch = next(make(pad_to_multiple_of=16, pixel_dtype=torch.bfloat16).stream("train"))
    assert all(length % 16 == 0 for length in batch.layout.padded_lengths)
    assert batch.vision.pixel_values.dtype == torch.bfloat16 and batch.input_ids.shape == (1, 256)
    with pytest.raises(DataError, match="expected at most 32"):
        next(make(seq_length=32).stream("train"))
    assert next(make(seq_length=80, on_long="drop").stream("train")).input_ids.shape == (1, 80)
    for name, value in (("reasoning_effort", "low"), ("preserve_thinking", False)):
        with pytest.raises(ValueError, match=f"{name} is {value!r}, but the chat template does not read it"):
            make(**{name: value}).stream("train")


@pytest.mark.parametrize(("changes", "message"), [
    ({"pack": False, "pad_to_multiple_of": 8}, "pad_to_multiple_of is 8, but pack is off"),
    ({"media_root": [7]}, "media_root has 7, expected a folder, or a list of folders"),
    ({"drop_last": False}, "drop_last is False, expected True: this data set has no such setting"),
    ({"num_workers": -1}, "num_workers is -1, expected at least 0"), ({"max_patches": 0}, "max_patches is 0, expected"),
    ({"schema_adapter": "cord"}, "schema_adapter is 'cord', expected one of cord_v2, rdr, .*, or none"),
    ({"dataloader_type": "cyclic"}, "dataloader_type is 'cyclic', expected 'single'"),
    ({"on_long": "cut"}, "on_long is 'cut', expected 'error' or 'drop' or 'truncate'"),
    ({"seq_length": 250, "pad_to_multiple_of": 8}, "seq_length is 250, expected a multiple of pad_to_multiple_of, 8"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_missing_things_are_named(make, tmp_path):
    with pytest.raises(ValueError, match="the split 'test' has no test_path; splits are train, valid, test"):
        make().stream("test")
    with pytest.raises(DataError, match="nowhere: found no processor"):
        make(hf_processor_path=str(tmp_path / "nowhere")).stream("train")


def test_pictures_may_be_in_several_folders(make, train_file, tmp_path):
    (tmp_path / "elsewhere").symlink_to(train_file.parent / "images")
    (tmp_path / "train.jsonl").write_text(train_file.read_text().replace("images/", "elsewhere/"))
    path = str(tmp_path / "train.jsonl")
    with pytest.raises(
        DataError, match=rf"its folder too: dataset.media_root=\[{tmp_path},{train_file.parent}/images\]"
    ):
        take(make(train_path=path).stream("train"), 20)
    stream = make(train_path=path, media_root=[str(tmp_path), str(train_file.parent)]).stream("train")
    assert ids(take(stream, 10)) == ids(take(make().stream("train"), 10))
    other = make(train_path=path, media_root=[str(tmp_path), str(train_file.parent / "images")]).stream("train")
    other.load_state_dict(stream.state_dict())
    assert next(other).sample_ids == next(stream).sample_ids


@pytest.mark.parametrize(
    "changes", [{"vision": VisionLimits(image_max_pixels=2048)}, {"answers": "last"}, {"max_patches": 200}]
)
def test_a_position_is_refused_where_samples_are_others(make, changes):
    stream = make().stream("train")
    next(stream)
    with pytest.raises(ValueError, match="position belongs to other data"):
        make(**changes).stream("train").load_state_dict(stream.state_dict())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_megatron_bridges_ranks_share_each_global_batch_by_cost(make, ranks):
    """Its sampler assigns rows one by one; together ranks read the rows of the plan, the dearest first."""
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
