"""However many files a checkpoint has, few of them are open at once."""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
import time
from collections.abc import Iterator

from qwen3vl_bridge.checkpoint import export_checkpoint, import_checkpoint, verify_checkpoint
from qwen3vl_bridge.checkpoint.formats import dcp_reader, planned_files
from qwen3vl_bridge.checkpoint.formats.dcp_reader import NotPlain

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ..support import read_everything


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
    """How many files of a folder this process has open."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}").startswith(str(folder))
    return found


@pytest.mark.parametrize("direction", ["import", "export"])
def test_a_slow_disk_does_not_collect_open_files(direction, moe_folder, tmp_path, monkeypatch):
    source, target, most = tmp_path / "source", tmp_path / "target", []
    if direction == "export":
        import_checkpoint(moe_folder, source)
    original = planned_files._commit

    def slow(*arguments):
        time.sleep(0.002)
        most.append(sum(open_below(path) for path in tmp_path.glob(".target.partial-*/[!.]*")))
        original(*arguments)

    monkeypatch.setattr(planned_files, "UNIT_BYTES", 1 << 12)
    monkeypatch.setattr(planned_files, "_commit", slow)
    with few_files():
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
