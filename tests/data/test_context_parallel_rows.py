"""Test the padding of rows that context-parallel ranks share."""

from itertools import islice

from qwen3vl_bridge.cli.data import main
from qwen3vl_bridge.core.layout import token_index

import datasets
import pytest

from tests.data.conftest import built, picture
from tests.data.energon.conftest import provider_of, write_folder
from tests.data.test_videos import ask

KINDS = ("rows", "packed before", "streamed", "energon")


@pytest.fixture
def pack(checkpoint, train_file, tmp_path):
    def pack(multiple: int) -> str:
        folder = tmp_path / f"packed {multiple}"
        command = f"pack --seq-length 256 --workers 0 --seed 0 --no-progress --pad-to-multiple-of {multiple}".split()
        paths = ["--data", str(train_file), "--hf-model", str(checkpoint), "--output", str(folder)]
        assert folder.exists() or main([*command, *paths]) == 0
        return str(folder)

    return pack


@pytest.fixture
def make(make_provider, checkpoint, train_file, stream, tmp_path, monkeypatch, pack):
    def make(kind: str, multiple: int = 1, **changes):
        if kind == "energon":
            return provider_of(checkpoint, _webdataset(tmp_path), **changes)
        settings = {"train_path": train_file, **changes}
        if kind == "packed before":
            settings["train_packing"] = pack(multiple)
        elif kind == "streamed":
            monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: ["train"])
            monkeypatch.setattr(datasets, "load_dataset", lambda name, **how: stream)
            settings |= {"streaming": True, "media_root": train_file.parent, "train_path": "hf://me/digits"}
        return make_provider(**settings)

    return make


def _webdataset(folder):
    content = picture(folder / "7.png", 32, 64, seed=7).read_bytes()
    texts = [{"type": "text", "text": "seven " * (1 + number)} for number in range(12)]
    samples = [
        (f"t{number}", {"json": {"messages": ask({"type": "image", "image": "png"}, text)}, "png": content})
        for number, text in enumerate(texts)
    ]
    return folder / "wds" if (folder / "wds").exists() else write_folder(folder / "wds", train=[samples])


def as_a_stream(provider, cp: int):
    return provider.for_context_parallel(cp).stream("train")


def in_megatron_bridges(provider, cp: int):
    train, _, _ = built(provider, 40, cp=cp)
    if hasattr(train, "collate_fn"):
        return (train.collate_fn([train[number]]) for number in range(40))
    return iter(train)


LOOPS = (as_a_stream, in_megatron_bridges)


def check(batch, multiple: int, cp: int) -> None:
    """Assert that each token is on one rank, also under sequence parallelism over 2 and 4 ranks."""
    layout = batch.layout
    assert all(length % multiple == 0 for length in layout.padded_lengths) and layout.total == 256
    for sp in (1, 2, 4):
        shares = [token_index(layout, cp, rank, sp, part) for rank in range(cp) for part in range(sp)]
        assert sorted(token for share in shares for token in share.flatten().tolist()) == list(range(256))


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("cp", "multiple"), [(1, 1), (2, 4), (4, 8)])
def test_cp_rows_pad_each_sample_to_smallest_multiple_that_cp_needs(make, kind, cp, multiple):
    provider = make(kind, multiple)
    rows = [list(islice(loop(provider, cp), 4)) for loop in LOOPS]
    assert [batch.sample_ids for batch in rows[0]] == [batch.sample_ids for batch in rows[1]]
    assert any(len(batch.sample_ids) > 1 for batch in rows[0])
    for batch in rows[0] + rows[1]:
        check(batch, multiple, cp)
    padded = {length for batch in rows[0] for length in batch.layout.padded_lengths}
    assert any(length % (2 * multiple) for length in padded)  # and no more than it needs
    assert provider.pad_to_multiple_of is None


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loop", LOOPS)
def test_cp_rows_use_larger_pad_to_multiple_of_from_settings(make, kind, loop):
    provider = make(kind, 16, pad_to_multiple_of=16)
    for batch in islice(loop(provider, 4), 3):
        check(batch, 16, 4)
    with pytest.raises(ValueError, match=r"pad_to_multiple_of is 16, expected a multiple of 12 under .* 6, or None"):
        loop(make(kind, 16, pad_to_multiple_of=16, seq_length=768), 6)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("kind", ["rows", "streamed", "energon"])
@pytest.mark.parametrize("loop", LOOPS)
def test_cp_rows_raise_if_padding_or_seq_length_does_not_fit_cp_size(make, kind, loop):
    for settings, message in (
        ({"pad_to_multiple_of": 1}, "pad_to_multiple_of is 1, expected a multiple of 4 under context_parallel_size 2"),
        ({"pad_to_multiple_of": 2}, "pad_to_multiple_of is 2, expected a multiple of 4 under context_parallel_size 2"),
        ({"seq_length": 250}, "seq_length is 250, expected a multiple of 4 under context_parallel_size 2"),
    ):
        with pytest.raises(ValueError, match=f"dataset.{message}"):
            loop(make(kind, **settings), 2)
    if kind != "streamed":
        with pytest.raises(ValueError, match=r"dataset.seq_length is 250, expected a multiple of 4"):
            loop(make(kind, seq_length=250, pack=False), 2)


@pytest.mark.parametrize("loop", LOOPS)
def test_cp_rows_without_packing_keep_seq_length_as_padded_length(make, loop):
    (batch,) = islice(loop(make("rows", pack=False), 4), 1)
    check(batch, 256, 4)


@pytest.mark.parametrize("loop", LOOPS)
def test_cp_rows_raise_if_packed_offline_with_wrong_padding_multiple(make, loop):
    for found, changes, message in (
        (1, {}, r"a multiple of 4 \(packed with 1\)\. Pack again with --pad-to-multiple-of 4$"),
        (8, {}, r"a multiple of 4 \(packed with 8\)\. Pack .* 4, or set dataset.pad_to_multiple_of=8$"),
        (4, {"pad_to_multiple_of": 8}, r"a multiple of 8 \(packed with 4\)\. Pack again with --pad-to-multiple-of 8$"),
    ):
        with pytest.raises(ValueError, match=message):
            loop(make("packed before", found, **changes), 2)


def test_cp_stream_load_state_dict_raises_if_cp_size_differs(make):
    stream = as_a_stream(make("rows"), 1)
    next(stream)
    with pytest.raises(ValueError, match="position belongs to other data: found multiple 4, expected 1"):
        as_a_stream(make("rows"), 2).load_state_dict(stream.state_dict())
