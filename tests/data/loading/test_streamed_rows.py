"""Rows of streams: packed, shared out and gone on from like those of other data."""

import qwen3vl_bridge
from qwen3vl_bridge.data import Admission, BatchStream, JsonLines, RowDataset, RowSettings, Samples, one_pass
from qwen3vl_bridge.data.errors import Unreachable
from qwen3vl_bridge.data.offline_packing import pack
from qwen3vl_bridge.data.sources import hub
from qwen3vl_bridge.data.sources.hub_streaming import StreamedDataset

import datasets
import pytest


@pytest.fixture
def make(stream, even_file, encoder, collator):
    """Makes functions that make rows of a stream, as `BatchStream` takes them."""

    def make(seed=0, on_bad="error", source=None):
        def rows(begin=None) -> RowDataset:
            file = source or StreamedDataset(stream, "train", even_file.parent, seed=seed, buffer_size=16, keep=32)
            samples = Samples(file, Admission(encoder, limit=256, on_bad=on_bad))
            return RowDataset(samples, RowSettings(collator, seed=seed, window_size=8), begin=begin)

        return rows

    return make


def places(batch) -> list[int]:
    return [int(name.partition("[")[2].partition("]")[0].split()[0]) for name in batch.sample_ids]


def take(stream: BatchStream, count: int) -> list:
    return [next(stream) for _ in range(count)]


def test_rows_in_order_are_those_of_the_file(make, make_rows, even_file):
    streamed, numbered = list(one_pass(make(seed=None)())), list(one_pass(make_rows(seed=None, path=even_file)()))
    assert [places(batch) for batch in streamed] == [
        [int(name.partition(":")[2]) - 1 for name in batch.sample_ids] for batch in numbered
    ]
    for one, other in zip(streamed, numbered, strict=True):
        assert one.input_ids.equal(other.input_ids) and one.loss_mask.equal(other.loss_mask)
        assert (one.vision is None) == (other.vision is None)
        assert one.vision is None or one.vision.pixel_values.equal(other.vision.pixel_values)


def test_every_sample_is_in_one_row_of_every_epoch(make):
    rows = make()()
    first = rows.plan.end_of_epoch()
    epochs = [[sample for number in numbers for sample in rows.plan.row(number)] for numbers in (range(first),)]
    second = [number for number in range(first, first + 40) if rows.plan.window(number).epoch == 1]
    epochs.append([sample for number in second for sample in rows.plan.row(number)])
    assert [sorted(sample % 2**40 for sample in epoch) for epoch in epochs] == [list(range(40))] * 2
    assert [sample % 2**40 for sample in epochs[0]] != [sample % 2**40 for sample in epochs[1]]


@pytest.mark.parametrize("done", [1, 9, pytest.param(30, marks=pytest.mark.slow)])
def test_a_position_goes_on_at_any_number_of_workers_and_ranks(make, done):
    whole = BatchStream(make()())
    expected = take(whole, done + 8)
    before = BatchStream(make()(), num_workers=2)
    assert [batch.sample_ids for batch in take(before, done)] == [batch.sample_ids for batch in expected[:done]]
    shares = [BatchStream(make()(), dp_rank=rank, dp_size=2, num_workers=rank) for rank in range(2)]
    for share in shares:
        share.load_state_dict(before.state_dict())
    found = [batch for pair in zip(*(take(share, 4) for share in shares), strict=True) for batch in pair]
    assert [batch.sample_ids for batch in found] == [batch.sample_ids for batch in expected[done:]]


class _Breaks:
    """A source whose third conversation cannot be had."""

    def __init__(self, source) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index, /):
        if index == 2:
            raise Unreachable(self.sample_id(index), "found no answer")
        return self._source[index]

    def sample_id(self, index, /) -> str:
        return self._source.sample_id(index)

    def fingerprint(self):
        return self._source.fingerprint()


@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_had_now_is_not_left_out(make, train_file, workers):
    """The next sample would fail as well, and thousands would be left out for a network that was down."""
    stream = BatchStream(make(seed=None, on_bad="drop", source=_Breaks(JsonLines(train_file)))(), num_workers=workers)
    with pytest.raises(Unreachable, match=r"^train.jsonl:3: found no answer$"):
        take(stream, 8)


def test_a_stream_is_not_packed_before(make, tmp_path):
    with pytest.raises(ValueError, match="found a stream, expected samples by number"):
        pack(make()(), tmp_path / "rows")


@pytest.mark.slow
def test_the_provider_streams_what_is_on_the_hub(checkpoint, train_file, stream, monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: ["train"])
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **how: asked.append((name, how)) or stream)
    assert hub.HUB == "hf://"

    def provider(**changes):
        settings = {
            "train_path": "hf://me/digits",
            "valid_path": "hf://me/digits#train",
            "media_root": str(train_file.parent),
            "hf_processor_path": str(checkpoint),
            "seq_length": 256,
            "window_size": 8,
            "streaming": True,
            "num_workers": 0,
            **changes,
        }
        provider = qwen3vl_bridge.Qwen3VLConversationProvider(**settings)
        provider.finalize()
        return provider

    seen = sorted(place for batch in provider().evaluation("valid") for place in places(batch))
    assert seen == list(range(40))
    first, again = (take(provider().stream("train"), 5) for _ in range(2))
    assert [batch.sample_ids for batch in first] == [batch.sample_ids for batch in again]
    assert all("of epoch 0]" in name for batch in first for name in batch.sample_ids)
    assert {name for name, _ in asked} == {"me/digits"} and all(how["streaming"] for _, how in asked)
    for changes, message in (
        ({"balance_over": 4}, "balance_over is 4, but streaming is on; it needs samples by number"),
        ({"train_packing": "rows"}, "train_packing is 'rows', but streaming is on"),
        ({"train_path": "train.jsonl"}, "streaming is on, but train.jsonl is not on the hub, expected hf://owner/name"),
        ({"allowed_urls": ("http://a",)}, r"allowed_urls is .*expected \(\): .* qwen3vl data download --data PATH"),
    ):
        with pytest.raises(ValueError, match=message):
            provider(**changes)
