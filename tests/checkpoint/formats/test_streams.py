"""Pieces of tensors as bytes: turned matrices against torch's own transpose, few open files."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import tempfile
import time
from collections.abc import Iterator

from qwen3vl_bridge.checkpoint import export_checkpoint, import_checkpoint, verify_checkpoint
from qwen3vl_bridge.checkpoint.formats import dcp_reader, tensors
from qwen3vl_bridge.checkpoint.formats.dcp_reader import NotPlain
from qwen3vl_bridge.checkpoint.formats.huggingface import SINGLE, HFWeights
from qwen3vl_bridge.checkpoint.formats.tensors import ITEMSIZE, Slice, TransposedSlice

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ..support import before_each_unit, read_everything

DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    generator = torch.Generator().manual_seed(0)
    values = {
        f"{part} {dtype}": torch.randn(3000, generator=generator).to(getattr(torch, dtype))
        for dtype in DTYPES
        for part in ("gate", "up")
    }
    save_file(values, folder / SINGLE)
    return folder, values


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 50),
    more_rows=st.integers(0, 10),
    columns=st.integers(1, 50),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 3),
    strip=st.sampled_from([1, 64, 1000, 1 << 18]),
    cuts=st.lists(st.integers(0, 3000), max_size=3),
)
def test_a_turned_matrix_is_the_transpose(stored, rows, more_rows, columns, dtypes, strip, cuts):
    """Of one run or of two, read strip by strip, asked for in parts, in the dtype that is stored or another."""
    folder, values = stored
    lengths, (first, second, target) = [rows * columns, more_rows * columns], dtypes
    names = [f"gate {first}", f"up {second}"]
    runs = tuple(Slice(name, 7, length) for name, length in zip(names, lengths, strict=True) if length)
    parts = [values[run.source][7 : 7 + run.length].to(getattr(torch, target)) for run in runs]
    expected = torch.cat(parts).view(-1, columns).t().contiguous().view(-1)
    places = sorted({0, len(expected), *(cut for cut in cuts if cut < len(expected))})
    matrix = TransposedSlice(runs, columns, 0, len(expected))
    with pytest.MonkeyPatch.context() as patch, tensors.SegmentReader(HFWeights(folder), block=64) as reader:
        patch.setattr(tensors, "_STRIP", strip)
        found = b"".join(
            bytes(block)
            for start, end in itertools.pairwise(places)
            for block in reader.blocks([matrix.part(start, end - start)], target)
        )
    assert len(found) == len(expected) * ITEMSIZE[target]
    assert torch.equal(torch.frombuffer(bytearray(found), dtype=expected.dtype), expected)


@contextlib.contextmanager
def few_files() -> Iterator[None]:
    """Room for 64 open files; for some 50 beside those of the tests, where these have many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(64, 50 + max(map(int, os.listdir("/proc/self/fd")))), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_below(folder) -> int:
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}").startswith(str(folder))
    return found


@pytest.mark.parametrize("direction", ["import", "export"])
def test_a_slow_disk_does_not_collect_open_files(direction, moe_folder, tmp_path):
    source, target, most = tmp_path / "source", tmp_path / "target", []
    if direction == "export":
        import_checkpoint(moe_folder, source)

    def slow(*_):
        time.sleep(0.002)
        most.append(sum(open_below(path) for path in tmp_path.glob(".target.partial-*/[!.]*")))

    with few_files(), before_each_unit(slow, 1 << 12):
        if direction == "import":
            import_checkpoint(moe_folder, target)
        else:
            export_checkpoint(source, target)
    assert len(most) > 100, "the model has too few units to show it"
    assert max(most) <= 2 + 1  # two are written, and one may be let go
    assert verify_checkpoint(*((moe_folder, target) if direction == "import" else (target, source))).same


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_more_old_archives_than_files_may_be_open(tmp_path):
    """Items that are not contiguous in their archives have to be loaded, and are kept for as long as they are read."""
    tensors = {f"t{number:03d}": torch.full((3, 2), float(number)).T + torch.arange(3) for number in range(200)}
    tensors = {name: tensor.T.contiguous().T for name, tensor in tensors.items()}
    dcp.save(tensors, checkpoint_id=tmp_path / "saved", no_dist=True)
    with few_files():
        found = read_everything(tmp_path / "saved")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_threads_that_unpack_at_once_get_each_its_own_bytes(moe_folder, tmp_path, monkeypatch):
    """Two units are written at a time, and both may come upon an item that cannot be read in place."""

    def not_plain(*_):
        raise NotPlain

    class Slow:
        """A file that leaves the other thread time between looking for its end and writing there."""

        def __init__(self, original=tempfile.TemporaryFile) -> None:
            self.file = original()

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def seek(self, *where: int) -> int:
            end = self.file.seek(*where)
            time.sleep(0.005)
            return end

    import_checkpoint(moe_folder, tmp_path / "source")
    with monkeypatch.context() as patch:
        patch.setattr(dcp_reader, "find_payload", not_plain)
        patch.setattr(dcp_reader.tempfile, "TemporaryFile", Slow)
        export_checkpoint(tmp_path / "source", tmp_path / "target", max_shard_bytes=200_000)
    assert verify_checkpoint(tmp_path / "target", tmp_path / "source").same
