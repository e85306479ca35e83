"""A result is there wholly or not at all, whoever else is about and whenever the process ends."""

from __future__ import annotations

import os
import random
import signal
import time

from qwen3vl_bridge.checkpoint import (
    CheckpointError,
    export_checkpoint,
    import_checkpoint,
    inspect_checkpoint,
    staging,
    verify_checkpoint,
)
from qwen3vl_bridge.checkpoint.hf_files import copy_side_files
from qwen3vl_bridge.checkpoint.hf_reader import HFWeights
from qwen3vl_bridge.checkpoint.hf_writer import layout, write_index, write_shard
from qwen3vl_bridge.checkpoint.json_files import read_object, write_object
from qwen3vl_bridge.checkpoint.plan import make_table
from qwen3vl_bridge.checkpoint.tensors import TensorSpec
from qwen3vl_bridge.dimensions import dimensions_of
from qwen3vl_bridge.mappings import TABLE

import pytest


def quiet(_: str) -> None:
    pass


def test_the_target_appears_at_the_end_only(tmp_path):
    target = tmp_path / "a" / "b" / "target"
    with staging.staged(target, quiet) as work:
        (work / "file").write_text("x")
        assert work.parent == target.parent and work.name.startswith(".target.partial-") and not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    assert (target / "file").read_text() == "x"


def test_an_empty_folder_is_a_fine_target(tmp_path):
    (tmp_path / "target").mkdir()
    with staging.staged(tmp_path / "target", quiet) as work:
        (work / "file").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "file"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, CheckpointError, OSError])
def test_a_failure_leaves_nothing_not_even_parents(error, tmp_path):
    with (
        pytest.raises(CheckpointError if error is OSError else error),
        staging.staged(tmp_path / "a" / "b" / "target", quiet) as work,
    ):
        (work / "file").write_text("x")
        raise error
    assert not list(tmp_path.iterdir())


def test_what_a_dead_process_left_is_removed_and_reported(tmp_path):
    stale = tmp_path / ".target.partial-0"
    (stale / "iter_0000000").mkdir(parents=True)
    said: list[str] = []
    with staging.staged(tmp_path / "target", said.append):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert len(said) == 1 and str(stale) in said[0]


def test_a_second_process_is_refused_while_the_first_works(tmp_path):
    with staging.staged(tmp_path / "target", quiet) as work:
        refused = pytest.raises(CheckpointError, match="is being written by another process")
        with refused, staging.staged(tmp_path / "target", quiet):
            pass
        assert work.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_target_that_came_into_being_meanwhile_is_kept(tmp_path):
    target = tmp_path / "target"
    with pytest.raises(CheckpointError, match="not empty"), staging.staged(target, quiet):
        target.mkdir()
        (target / "other").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "other"]


@pytest.mark.parametrize("swap", [True, False])
def test_an_earlier_result_is_replaced(tmp_path, monkeypatch, swap):
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").write_text("x")
    if not swap:  # as on a file system that has no such operation
        monkeypatch.setattr(staging, "_RENAME_EXCHANGE", 1 << 20)
    with staging.staged(target, quiet, replace=True) as work:
        (work / "new").write_text("x")
        assert (target / "old").exists()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", "target"]


@pytest.fixture(scope="module")
def larger(untied_folder, tmp_path_factory):
    """A random model of 50 MB, and the time its import takes."""
    folder = tmp_path_factory.mktemp("larger") / "hf"
    copy_side_files(untied_folder, folder)
    config = read_object(folder / "config.json")
    config["text_config"] |= {"hidden_size": 256, "intermediate_size": 2048, "vocab_size": 9216}
    write_object(folder / "config.json", config)
    shapes = make_table(TABLE, dimensions_of(config)).hf
    shards = layout([TensorSpec(name, "float32", shape) for name, shape in shapes.items()], 20 << 20)
    generator = random.Random(0)
    for shard in shards:
        write_shard(folder, shard, ([memoryview(generator.randbytes(spec.nbytes))] for spec in shard.tensors))
    write_index(folder, shards)
    assert HFWeights(folder).nbytes > 45 << 20
    return folder


def in_a_child(work, kill_after: float | None) -> int:
    """Run something in a forked process, which is killed after a while; returns its exit status."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.parametrize("direction", ["import", "export"])
def test_killed_at_any_moment(direction, larger, tmp_path):
    source = tmp_path / "source"
    import_checkpoint(larger, source)
    target = tmp_path / "out" / "target"
    target.parent.mkdir()

    def work():
        if direction == "import":
            import_checkpoint(larger, target, overwrite=True)
        else:
            export_checkpoint(source, target, overwrite=True)

    def is_whole() -> bool:
        checkpoint, model = (target, larger) if direction == "import" else (source, target)
        return verify_checkpoint(model, checkpoint).same

    begun = time.monotonic()
    assert in_a_child(work, None) == 0
    duration = time.monotonic() - begun
    assert is_whole()
    generator, interrupted = random.Random(0), 0
    for moment in range(200):
        if moment >= 14 and interrupted >= 5:  # on a busy machine the first run may have taken longer than the rest
            break
        if moment % 2 == 0:  # half the time there is nothing to be replaced
            staging.shutil.rmtree(target, ignore_errors=True)
        before = target.exists()
        status = in_a_child(work, generator.uniform(0, 1.1) * duration)
        interrupted += status != 0
        if target.exists():
            assert is_whole()
        else:
            assert not before
            with pytest.raises(CheckpointError):
                inspect_checkpoint(target)
    assert interrupted >= 5
    work()
    assert is_whole()
    assert [path.name for path in target.parent.iterdir()] == ["target"]
