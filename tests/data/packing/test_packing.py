"""Best-fit packing: nothing lost, nothing too full, and few rows."""

import itertools
import math

from qwen3vl_bridge.data import best_fit

import pytest
from hypothesis import given
from hypothesis import strategies as st

lengths_and_capacity = st.integers(1, 60).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=80), st.just(capacity))
)


@given(lengths_and_capacity)
def test_each_sample_is_in_one_row_and_no_row_is_too_full(case):
    lengths, capacity = case
    rows = best_fit(lengths, capacity)
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[sample] for sample in row) <= capacity for row in rows)
    assert rows == sorted(rows) and all(row == sorted(row) for row in rows)
    assert rows == best_fit(lengths, capacity)


@given(lengths_and_capacity)
def test_rows_are_few(case):
    """No two rows fit into one; and never fewer rows than there are tokens for."""
    lengths, capacity = case
    rows = best_fit(lengths, capacity)
    assert len(rows) >= math.ceil(sum(lengths) / capacity)
    loads = sorted(sum(lengths[sample] for sample in row) for row in rows)
    assert all(a + b > capacity for a, b in itertools.pairwise(loads))


@given(lengths_and_capacity, st.data())
def test_no_row_has_too_many_patches(case, data):
    """By tokens and by patches both; and where there are patches to spare, as if there were none."""
    lengths, capacity = case
    most = data.draw(st.integers(1, 60))
    patches = data.draw(st.lists(st.integers(0, most), min_size=len(lengths), max_size=len(lengths)))
    rows = best_fit(lengths, capacity, patches, most)
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    for values, bound in ((lengths, capacity), (patches, most)):
        assert all(sum(values[sample] for sample in row) <= bound for row in rows)
    for one, other in itertools.combinations(rows, 2):
        both = [*one, *other]
        assert sum(lengths[s] for s in both) > capacity or sum(patches[s] for s in both) > most
    if most >= sum(patches):
        small = [0] * len(lengths)
        assert best_fit(lengths, capacity, small, most) == best_fit(lengths, capacity)


def test_a_sample_of_too_many_patches_is_refused():
    with pytest.raises(ValueError, match="sample 1 has 11 patches, expected at most 10"):
        best_fit([1, 1], 10, [3, 11], 10)


def test_the_tightest_row_is_taken():
    assert best_fit([6, 5, 4, 3], 9) == [[0, 3], [1, 2]]
    assert best_fit([5, 5, 4, 6], 10) == [[0, 1], [2, 3]]
    assert best_fit([7, 5, 3], 10) == [[0, 2], [1]]
    assert best_fit([], 10) == []


@pytest.mark.parametrize("length", [0, 11])
def test_a_sample_that_no_row_holds_is_refused(length):
    with pytest.raises(ValueError, match=f"sample 1 has {length} tokens, expected 1 to 10"):
        best_fit([10, length], 10)


def test_many_samples_that_fill_a_tower_take_no_longer_each():
    """Rows without patches left are not looked through: each placement compares a few numbers, however many rows."""
    looks = 0

    class Counted(int):
        def __le__(self, other):  # what `left >= patches` asks
            nonlocal looks
            looks += 1
            return int(self) <= other

    seen = []
    for count in (500, 4000):
        looks = 0
        rows = best_fit([100] * count, 1000, [Counted(60)] * count, 100)
        assert len(rows) == count
        seen.append(looks / count)
    assert 0 < seen[0] < 100 > seen[1] > 0
