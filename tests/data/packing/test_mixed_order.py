"""Orders that mix sets: each sample as often as it is said, shares that hold everywhere, any place found at once."""

from collections import Counter
from fractions import Fraction
from math import floor

from qwen3vl_bridge.data.packing.row_plan import MixedOrder, RowPlan
from qwen3vl_bridge.data.packing.sample_sizes import Size

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ALL = 1 << 40


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[int], list[Fraction], int | None]:
    """Lengths of sets, how many samples an epoch takes of each, and a seed."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    often = st.fractions(Fraction(1, 20), 4, max_denominator=20)
    taken = [length * draw(often) for length in lengths]
    return (
        lengths,
        taken if sum(map(floor, taken)) else [Fraction(n) for n in lengths],
        draw(st.none() | st.integers(0, 9)),
    )


@given(mixtures())
@settings(deadline=None)
def test_after_any_number_of_epochs_each_sample_was_seen_as_often_as_said(case):
    lengths, taken, _ = case
    order, seen = MixedOrder(*case), Counter[int]()
    for epoch in range(5):
        found = order.numbers(epoch, 0, ALL)
        seen.update(found)
        first = 0
        for length, number in zip(lengths, taken, strict=True):
            expected = (epoch + 1) * number / length  # times that each sample was seen
            times = [seen[sample] for sample in range(first, first + length)]
            assert sum(times) == floor((epoch + 1) * number)
            assert all(floor(expected) <= one <= -(-expected.numerator // expected.denominator) for one in times)
            if (number / length).denominator == 1:
                assert all(Counter(found)[first + place] == number / length for place in range(length))
            first += length


@given(mixtures(), st.integers(0, 3), st.integers(0, 60), st.integers(1, 30))
@settings(deadline=None)
def test_any_place_is_found_without_those_before_it(case, epoch, start, count):
    whole = MixedOrder(*case).numbers(epoch, 0, ALL)
    assert MixedOrder(*case).numbers(epoch, start, count) == whole[start : start + count]


@given(mixtures(), st.integers(0, 3))
@settings(deadline=None)
def test_shares_hold_in_every_stretch_of_an_epoch(case, epoch):
    lengths, _, _ = case
    found = MixedOrder(*case).numbers(epoch, 0, ALL)
    sets = [number for number, length in enumerate(lengths) for _ in range(length)]
    whole, so_far = Counter(sets[sample] for sample in found), Counter[int]()
    for place, sample in enumerate(found, start=1):
        so_far[sets[sample]] += 1
        for number in range(len(lengths)):
            assert abs(so_far[number] - place * whole[number] / len(found)) <= len(lengths) + 1


def test_orders_are_by_the_seed_and_differ_by_epoch_and_set():
    order = MixedOrder([20, 20], [Fraction(20), Fraction(20)], seed=3)
    first, second = order.numbers(0, 0, ALL), order.numbers(1, 0, ALL)
    assert sorted(first) == sorted(second) == list(range(40)) and first != second
    of_sets = [[sample for sample in first if sample < 20], [sample - 20 for sample in first if sample >= 20]]
    assert of_sets[0] != of_sets[1] and of_sets[0] != sorted(of_sets[0])
    assert first == MixedOrder([20, 20], [Fraction(20), Fraction(20)], seed=3).numbers(0, 0, ALL)
    assert first != MixedOrder([20, 20], [Fraction(20), Fraction(20)], seed=4).numbers(0, 0, ALL)
    alternating = MixedOrder([2, 4], [Fraction(2), Fraction(4)]).numbers(0, 0, ALL)
    assert alternating == [2, 0, 3, 4, 1, 5]


@pytest.mark.parametrize("taken", [[Fraction(0), Fraction(2)], [Fraction(-1), Fraction(2)], [Fraction(1, 2)] * 2])
def test_what_cannot_be_mixed_is_refused(taken):
    with pytest.raises(ValueError, match="expected more than 0 of each and 1 of one at least"):
        MixedOrder([4, 4], taken)


@given(mixtures(), st.booleans(), st.integers(1, 20), st.lists(st.integers(0, 32), min_size=48, max_size=48))
@settings(deadline=None)
def test_rows_of_an_epoch_have_each_sample_as_often_as_its_order(case, pack, window_size, lengths):
    """Also where a window has a sample several times; those of length 0 are in no row."""
    order = MixedOrder(*case)
    plan_of = lambda begin=None: RowPlan(  # noqa: E731
        lambda sample: Size(lengths[sample], 0, 0), order, capacity=32, pack=pack, window_size=window_size, begin=begin
    )
    kept = [Counter(sample for sample in order.numbers(epoch, 0, ALL) if lengths[sample]) for epoch in range(3)]
    if not all(kept):
        return
    plan, first = plan_of(), 0
    for epoch in range(3):
        end = plan_of(plan.window(first)).end_of_epoch()
        rows = [plan.row(number) for number in range(first, end)]
        assert Counter(sample for row in rows for sample in row) == kept[epoch]
        assert all(sum(lengths[sample] for sample in row) <= 32 for row in rows)
        resumed = plan_of(plan.window(end - 1))
        assert resumed.row(end - 1) == rows[-1]
        first = end
