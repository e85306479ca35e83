"""Whatever bytes the readers are given, nothing but CheckpointError escapes them."""

from __future__ import annotations

import contextlib
import json

from qwen3vl_bridge.checkpoint import CheckpointError
from qwen3vl_bridge.checkpoint.formats.huggingface import INDEX, SINGLE, HFWeights

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ..support import read_everything

FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@FUZZ
@given(content=st.binary(max_size=200))
def test_any_file(content, tmp_path):
    (tmp_path / SINGLE).write_bytes(content)
    with contextlib.suppress(CheckpointError):
        HFWeights(tmp_path)


@FUZZ
@given(index=st.dictionaries(st.sampled_from(["weight_map", "metadata"]), JSON))
def test_any_index(index, tmp_path):
    (tmp_path / INDEX).write_text(json.dumps(index))
    with contextlib.suppress(CheckpointError):
        HFWeights(tmp_path)


def damaged(data: bytes, where: list[tuple[float, int]], keep: float) -> bytes:
    changed = bytearray(data[: max(1, round(len(data) * keep))])
    for place, value in where:
        changed[min(int(place * len(changed)), len(changed) - 1)] = value
    return bytes(changed)


DAMAGE = {
    "where": st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=6),
    "keep": st.just(1.0) | st.floats(0, 1),
}


@FUZZ
@given(**DAMAGE)
def test_any_damage_to_the_metadata(where, keep, folder, saved):
    (folder / ".metadata").write_bytes(damaged((saved / ".metadata").read_bytes(), where, keep))
    with contextlib.suppress(CheckpointError):
        read_everything(folder)


@FUZZ
@given(**DAMAGE)
def test_any_damage_to_the_data(where, keep, folder, saved):
    (folder / "__0_0.distcp").write_bytes(damaged((saved / "__0_0.distcp").read_bytes(), where, keep))
    with contextlib.suppress(CheckpointError):
        read_everything(folder)


@FUZZ
@given(data=st.binary(max_size=60))
def test_any_metadata(data, folder):
    (folder / ".metadata").write_bytes(b"\x80\x04" + data)
    with contextlib.suppress(CheckpointError):
        read_everything(folder)
