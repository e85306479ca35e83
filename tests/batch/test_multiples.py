"""What rows and their segments have to be multiples of, and no more than that."""

from qwen3vl_bridge.batch import SequenceLayout, token_index
from qwen3vl_bridge.batch.token_layout import segment_multiple
from qwen3vl_bridge.models.divisibility import row_multiple

import pytest
from hypothesis import given
from hypothesis import strategies as st

ranks = st.integers(1, 6)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5), cp=ranks, sp=ranks, more=st.integers(0, 3))
def test_rows_of_such_multiples_can_be_shared(lengths, cp, sp, more):
    """However segments end, each token has one place on one rank."""
    segment, row = segment_multiple(cp), row_multiple(cp, sp)
    padded = sum(-(-length // segment) * segment for length in lengths)
    total = -(-(padded + 1) // row) * row + more * row
    layout = SequenceLayout.packed_row(lengths, multiple=segment, total=total)
    shares = [token_index(layout, cp, rank, sp, part) for rank in range(cp) for part in range(sp)]
    assert sorted(token for share in shares for token in share.flatten().tolist()) == list(range(total))


@given(length=st.integers(1, 200), cp=ranks, sp=ranks)
def test_rows_of_other_lengths_cannot(length, cp, sp):
    """The multiple is the least: a row is shared if and only if it is one."""
    layout = SequenceLayout.rows([length], length)
    if length % row_multiple(cp, sp) == 0:
        token_index(layout, cp, cp - 1, sp, sp - 1)
    else:
        with pytest.raises(ValueError, match=r"divide"):
            token_index(layout, cp, cp - 1, sp, sp - 1)
