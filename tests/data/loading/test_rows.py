"""Rows: samples measured and encoded, and what happens to those that are too long."""

from qwen3vl_bridge.data import DataError, JsonLines, Size, one_pass

import pytest


def first(rows, number: int = 20) -> list:
    """The batches of the first rows."""
    return [rows.collate_fn([rows[row]]) for row in range(number)]


def test_the_longest_sample_may_fill_a_row(make_rows, encoder, train_file):
    file = JsonLines(train_file)
    longest = max(encoder.size(file[index]).tokens for index in range(40))
    first(make_rows(seq_length=longest)())
    with pytest.raises(DataError, match=f"found a sample of {longest} tokens, expected at most {longest - 1}"):
        first(make_rows(seq_length=longest - 1)())


def test_rows_leave_room_for_what_samples_are_padded_by(make_rows):
    for batch in first(make_rows(multiple=32)()):
        assert all(length % 32 == 0 for length in batch.layout.padded_lengths) and batch.layout.total == 256


def test_a_long_sample_is_refused_or_dropped_and_counted(make_rows, caplog):
    rows = make_rows(seq_length=64, seed=None)
    with pytest.raises(DataError, match=r"train.jsonl:\d+: found a sample of \d+ tokens, expected at most 64 \(the"):
        first(rows())
    kept = make_rows(seq_length=64, seed=None, on_long="drop")()
    seen = {sample_id for batch in one_pass(kept) for sample_id in batch.sample_ids}
    dropped = kept.samples.sample_filter.num_dropped
    named = [number for number in range(1, dropped + 1) if number <= 4 or number.bit_count() == 1]
    assert 8 < dropped == 40 - len(seen) and len(named) == len(caplog.messages)
    for number, message in zip(named, caplog.messages, strict=True):
        assert f"expected at most 64: dropped, {number} so far" in message
    with pytest.raises(ValueError, match="epoch 0: none of its samples is in a row"):
        make_rows(seq_length=8, on_long="drop")()[0]
    with pytest.raises(ValueError, match="on_long is 'cut', expected 'error' or 'drop' or 'truncate'"):
        make_rows(on_long="cut")()


@pytest.mark.parametrize("on_bad", ["error", "drop"])
def test_a_sample_that_changes_after_it_was_measured_is_refused(make_rows, on_bad):
    """Also where bad samples are dropped: what is planned of the others is as wrong."""
    rows = make_rows(on_bad=on_bad)()
    rows.plan.row(0)
    for sample in range(40):
        rows.samples._sizes.keep(sample, Size(7, 0, 0))
    with pytest.raises(DataError, match=r"train.jsonl:\d+: found \d+ tokens and .*its row was planned for 7 and 0"):
        rows[0]


def test_several_packed_rows_in_a_microbatch_are_refused(make_rows):
    rows = make_rows()()
    with pytest.raises(ValueError, match="found a microbatch of 2 packed rows, expected 1"):
        rows.collate_fn([rows[0], rows[1]])


def test_rows_have_no_more_patches_than_they_may(make_rows):
    def patches(batch) -> int:
        return 0 if batch.vision is None else len(batch.vision.pixel_values)

    free = list(one_pass(make_rows(seed=None)()))
    assert max(map(patches, free)) > 100
    bounded = list(one_pass(make_rows(seed=None, most_patches=100, on_long="drop")()))
    assert 50 < max(map(patches, bounded)) <= 100 and len(bounded) > len(free)
    with pytest.raises(DataError, match=r"train.jsonl:\d+: found images of \d+ patches, expected at most 10 \(the"):
        list(one_pass(make_rows(seed=None, most_patches=10)()))
