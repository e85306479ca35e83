"""A result is there wholly or not at all, whoever else is about and whenever the process ends."""

from __future__ import annotations

import fcntl

from qwen3vl_bridge.checkpoint import CheckpointError
from qwen3vl_bridge.checkpoint.formats import planned_files
from qwen3vl_bridge.io import atomic

import pytest


def quiet(_: str) -> None:
    pass


def test_the_target_appears_at_the_end_only(tmp_path):
    target = tmp_path / "a" / "b" / "target"
    with atomic.atomic_directory(target, quiet) as work:
        (work / "file").write_text("x")
        assert work.parent == target.parent and work.name.startswith(".target.partial-") and not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    assert (target / "file").read_text() == "x"


def test_an_empty_folder_is_a_fine_target(tmp_path):
    (tmp_path / "target").mkdir()
    with atomic.atomic_directory(tmp_path / "target", quiet) as work:
        (work / "file").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "file"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, CheckpointError, OSError])
def test_a_failure_leaves_nothing_not_even_parents(error, tmp_path):
    with (
        pytest.raises(CheckpointError if error is OSError else error),
        atomic.atomic_directory(tmp_path / "a" / "b" / "target", quiet) as work,
    ):
        (work / "file").write_text("x")
        raise error
    assert not list(tmp_path.iterdir())


def test_what_a_dead_process_left_is_removed_and_reported(tmp_path):
    stale = tmp_path / ".target.partial-0123456789ab"
    (stale / "iter_0000000").mkdir(parents=True)
    said: list[str] = []
    with atomic.atomic_directory(tmp_path / "target", said.append):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert len(said) == 1 and str(stale) in said[0]


@pytest.mark.parametrize("name", [".target.partial-backup", ".target.replaced-yesterday"])
def test_folders_of_somebodys_own_stay(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "precious").touch()
    with atomic.atomic_directory(tmp_path / "target", quiet):
        pass
    assert (tmp_path / name / "precious").exists()


def test_a_second_process_is_refused_while_the_first_works(tmp_path):
    with atomic.atomic_directory(tmp_path / "target", quiet) as work:
        refused = pytest.raises(CheckpointError, match="is being written by another process")
        with refused, atomic.atomic_directory(tmp_path / "target", quiet):
            pass
        assert work.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("keep", [False, True])
def test_a_second_process_is_refused_up_to_the_very_end(tmp_path, monkeypatch, keep):
    """The journal, which has no place in the result, is gone when the result is moved."""
    target, original, refused = tmp_path / "target", atomic._move_into_place, []

    def meet(*arguments, **named):
        for moment in (lambda: None, lambda: original(*arguments, **named)):
            moment()
            with pytest.raises(CheckpointError, match="is being written by another process") as found:
                atomic.atomic_directory(target, quiet).__enter__()
            refused.append(found)

    monkeypatch.setattr(atomic, "_move_into_place", meet)
    with atomic.atomic_directory(target, quiet, keep=keep) as work:
        (work / planned_files.PRIVATE).mkdir()
    assert len(refused) == 2 and [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("earlier", [False, True])
def test_a_signal_after_the_move_takes_nothing(tmp_path, monkeypatch, keep, earlier):
    target, original = tmp_path / "target", atomic._move_into_place
    if earlier:
        target.mkdir()
        (target / "old").touch()

    def interrupted(*arguments, **named):
        original(*arguments, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "_move_into_place", interrupted)
    with atomic.atomic_directory(target, quiet, keep=keep, replace=lambda _: None) as work:
        (work / planned_files.PRIVATE).mkdir()
        (work / planned_files.PRIVATE / "plan").touch()
        (work / "new").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", "target"]


def test_a_lock_that_was_let_go_meanwhile_is_none(tmp_path, monkeypatch):
    """A process opens the file, another that held it ends and removes it, a third makes a new one."""
    path, flock, once = tmp_path / ".target.partial-lock", fcntl.flock, []

    def late(*arguments):
        if not once:
            once.append(path.unlink())
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    with atomic.atomic_directory(tmp_path / "target", quiet):
        assert path.exists()
        with pytest.raises(CheckpointError, match="another process"):
            atomic.atomic_directory(tmp_path / "target", quiet).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_target_that_came_into_being_meanwhile_is_kept(tmp_path):
    target = tmp_path / "target"
    with pytest.raises(CheckpointError, match="not empty"), atomic.atomic_directory(target, quiet):
        target.mkdir()
        (target / "other").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "other"]


@pytest.mark.parametrize("swap", [True, False])
def test_an_earlier_result_is_replaced(tmp_path, monkeypatch, swap):
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").write_text("x")
    if not swap:  # as on a file system that has no such operation
        monkeypatch.setattr(atomic, "_RENAME_EXCHANGE", 1 << 20)
    with atomic.atomic_directory(target, quiet, replace=lambda _: True) as work:
        (work / "new").write_text("x")
        assert (target / "old").exists()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", "target"]
