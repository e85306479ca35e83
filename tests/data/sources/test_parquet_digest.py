"""What tells whether Parquet files are as they were, and what it costs."""

from pathlib import Path

from qwen3vl_bridge import Qwen3VLConversationProvider
from qwen3vl_bridge.data import Columns, DataError, Parquet
from qwen3vl_bridge.data.sources import tables

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS = 60


def table(answer: str = "seven", changed: int = -1, picture: bytes = b"") -> pa.Table:
    """Rows with texts and bytes of pictures; one of them has another answer."""
    answers = [answer if row == changed else "seven" for row in range(ROWS)]
    turns = [
        [{"role": "user", "content": f"{row}?"}, {"role": "assistant", "content": answers[row]}] for row in range(ROWS)
    ]
    pictures = [bytes([row]) * 500 + picture * (row == changed) for row in range(ROWS)]
    return pa.table({"messages": turns, "image": pictures, "other": list(range(ROWS))})


def stored(path: Path, rows: pa.Table, **how) -> Path:
    """Without anything that tells of an edit but the texts themselves, unless told otherwise."""
    how = {"compression": "none", "use_dictionary": False, "write_statistics": False, "row_group_size": 7, **how}
    pq.write_table(rows, path, **how)
    return path


def fingerprint(path: Path) -> str:
    return Parquet(path).fingerprint()


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("row", [0, 31, ROWS - 1])
def test_one_cell_of_the_same_length_is_noticed(tmp_path, compression, row):
    before = stored(tmp_path / "a.parquet", table(), compression=compression)
    after = stored(tmp_path / "b.parquet", table("eight", row), compression=compression)
    same = stored(tmp_path / "c.parquet", table(), compression=compression)
    if compression == "none":  # nothing else than the cell tells
        assert before.stat().st_size == after.stat().st_size
        footers = [pq.read_metadata(path) for path in (before, after)]
        assert footers[0].equals(footers[1])
    assert fingerprint(before) == fingerprint(same) != fingerprint(after)


def test_one_byte_in_place_is_noticed_wherever_it_is(tmp_path):
    """Every byte of a column that is read, and of the footer."""
    path = stored(tmp_path / "a.parquet", table())
    data, before = path.read_bytes(), fingerprint(path)
    metadata = pq.read_metadata(path)
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    noticed = unnoticed = 0
    for group in groups:
        for column in range(group.num_columns):
            chunk = group.column(column)
            first, last = chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size - 1
            for place in (first, (first + last) // 2, last):
                path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
                if chunk.path_in_schema == "other":  # which nobody reads
                    assert fingerprint(path) == before
                    unnoticed += 1
                else:
                    assert fingerprint(path) != before
                    noticed += 1
    assert (noticed, unnoticed) == (9 * 3 * 3, 9 * 3)


def test_a_run_does_not_go_on_with_a_file_that_was_edited_in_place(tmp_path, checkpoint):
    """One letter of one answer, which no size and no statistic tells."""
    path = stored(tmp_path / "train.parquet", table())

    def stream():
        provider = Qwen3VLConversationProvider(
            train_path=str(path), hf_processor_path=str(checkpoint), seq_length=256, window_size=8, num_workers=0,
            columns=Columns(ignore=["image", "other"]),
        )  # fmt: skip
        provider.finalize()
        return provider.stream("train")

    first = stream()
    next(first)
    state = first.state_dict()
    stream().load_state_dict(state)
    data = path.read_bytes()
    path.write_bytes(data[: (at := data.index(b"seven"))] + b"eight" + data[at + 5 :])
    with pytest.raises(ValueError, match=r"^the checkpoint's position belongs to other data: found data \w"):
        stream().load_state_dict(state)


def test_names_and_times_are_no_part_of_it(tmp_path):
    path = stored(tmp_path / "a.parquet", table())
    before = fingerprint(path)
    assert fingerprint(path.rename(tmp_path / "b.parquet")) == before
    (tmp_path / "b.parquet").touch()
    assert fingerprint(tmp_path / "b.parquet") == before
    stored(tmp_path / "c.parquet", table("eight", 3))
    both = fingerprint(tmp_path)
    (tmp_path / "b.parquet").rename(tmp_path / "d.parquet")
    assert fingerprint(tmp_path) != both  # in another order


def test_large_files_are_read_in_part(tmp_path, monkeypatch):
    """Blocks are spread over all texts; what falls between them, and alters no size, goes unnoticed, as is said."""
    path = stored(tmp_path / "a.parquet", table())
    read = []
    blocks = tables._blocks
    monkeypatch.setattr(tables, "_BLOCK", 64)
    monkeypatch.setattr(tables, "_MOST_OF_TEXTS", 10)
    monkeypatch.setattr(tables, "_MOST_OF_BYTES", 5)

    def counted(*given):
        for block in blocks(*given):
            read.append(len(block))
            yield block

    monkeypatch.setattr(tables, "_blocks", counted)
    before = fingerprint(path)
    assert len(read) == 15 and max(read) <= 64
    found = [fingerprint(stored(tmp_path / "b.parquet", table("eight", row))) != before for row in range(ROWS)]
    assert 0 < sum(found) < ROWS / 2
    longer = [fingerprint(stored(tmp_path / "b.parquet", table("seventy", row))) != before for row in range(ROWS)]
    assert all(longer)  # a column of other size is in the footer
    assert fingerprint(stored(tmp_path / "b.parquet", table(changed=3, picture=b"1"))) != before


def test_a_file_that_is_gone_is_named(tmp_path, monkeypatch):
    path = stored(tmp_path / "a.parquet", table())

    def gone(*_):
        raise OSError("stale file handle")

    monkeypatch.setattr(tables, "_footer", gone)
    with pytest.raises(DataError, match=r"a.parquet: found a file unreadable \(stale file handle\)"):
        Parquet(path)
