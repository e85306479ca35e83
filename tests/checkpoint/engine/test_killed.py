"""Kill some or all processes of a conversion at any time: the target is complete or absent, and --resume continues."""

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

from qwen3vl_bridge.checkpoint import Ranks, export_checkpoint, import_checkpoint, inspect_checkpoint, verify_checkpoint
from qwen3vl_bridge.checkpoint.conversion_plan import tensors_of
from qwen3vl_bridge.checkpoint.formats import output_files
from qwen3vl_bridge.checkpoint.formats.huggingface import copy_side_files
from qwen3vl_bridge.checkpoint.formats.layouts import HuggingFace
from qwen3vl_bridge.core.files import CheckpointError, read_object, write_object
from qwen3vl_bridge.registry import dimensions_of, family
from qwen3vl_bridge.weights.rows import expand

import numpy as np
import pytest
import torch.distributed as dist
from safetensors.numpy import save_file

from tests.checkpoint.support import broken_disk, contents
from tests.models.qwen4_exp.tiny import make_checkpoint as make_qwen4_exp

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded", "ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.usefixtures("no_groups"),
]
MOMENTS, INTERRUPTED, GRACE = 50, 15, 1
DENSE, MOE, QWEN3_5, QWEN4_EXP = FOLDERS = "untied_folder", "moe_folder", "qwen3_5_folder", "qwen4_exp_folder"


@pytest.fixture(scope="module")
def qwen4_exp_folder(tmp_path_factory):
    """Return a model with an n-gram table of 25 MB, in parts with rows of two hash heads."""
    return make_qwen4_exp(tmp_path_factory.mktemp("qwen4_exp"), ngram_vocab_size_base=100_003, split_ngram_parts=8)


@pytest.fixture(scope="module", params=FOLDERS)
def larger(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("larger") / "hf"
    copy_side_files(request.getfixturevalue(request.param), folder)
    config = read_object(folder / "config.json")
    config["text_config"] |= {"hidden_size": 256, "intermediate_size": 640, "vocab_size": 7168}
    config["vision_config"]["out_hidden_size"] = 256
    write_object(folder / "config.json", config)
    dimensions, generator = dimensions_of(config), np.random.default_rng(0)
    shapes = tensors_of(expand(family(dimensions.family).rows(), dimensions), HuggingFace(dimensions))
    tensors = {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    tensors |= {name: np.array(values) for name, values in family(dimensions.family).constants(config).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert sum(tensor.nbytes for tensor in tensors.values()) > 20 << 20
    tables = sum(tensor.nbytes for name, tensor in tensors.items() if ".ngram_embedding." in name)
    assert (tables > 20 << 20) == (request.param == QWEN4_EXP)
    return folder


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(output_files, "RANGE_BYTES", 1 << 20)


def run(work: Callable[[Ranks], object], processes: int, kill: Callable[[list[int]], None] | None = None) -> list[int]:
    # They find each other by a file: a port that is free now may be taken by the time they want it.
    file = os.path.join(tempfile.mkdtemp(), "store")
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo's complaints about those that were killed
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a training run may have left its handler
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
                os.environ["WORLD_SIZE"] = str(processes)
                dist.init_process_group("gloo", store=dist.FileStore(file, processes), rank=rank, world_size=processes)
                with Ranks.from_torchrun() as ranks:
                    work(ranks)
                dist.destroy_process_group()
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    if kill is not None:
        kill(children)
    begun = time.monotonic()
    statuses: dict[int, int] = {}
    while len(statuses) < processes:
        for child in set(children) - statuses.keys():
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                statuses[child] = status
        # Those that wait for one that never came up: torchrun ends them so, only sooner.
        if any(statuses.values()) and time.monotonic() - begun > GRACE:
            for child in set(children) - statuses.keys():
                os.kill(child, signal.SIGTERM)
        assert time.monotonic() - begun < 300, "processes hang"
        time.sleep(0.002)
    shutil.rmtree(os.path.dirname(file))
    return list(statuses.values())


def is_alive(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


KILLED = list(product(FOLDERS, ("import", "torch_dist", "export"), (1, 2)))
ALWAYS = [(DENSE, "import", 1)]  # the other cases are slow


@pytest.mark.parametrize(("larger", "direction", "processes"), [
    case if case in ALWAYS else pytest.param(*case, marks=pytest.mark.slow) for case in KILLED
], indirect=["larger"])  # fmt: skip
def test_conversion_killed_at_random_times_resumes_to_identical_files(direction, processes, larger, tmp_path):
    source, target = tmp_path / "source", tmp_path / "out" / "target"
    target.parent.mkdir()
    if direction == "export":
        import_checkpoint(larger, source, ckpt_format="torch_dist")
    resume = False

    def work(ranks: Ranks) -> None:
        how = {"overwrite": True, "resume": resume, "ranks": ranks}
        if direction == "export":
            export_checkpoint(source, target, **how)
        else:
            ckpt_format = "torch_dist" if direction == "torch_dist" else "fsdp_dtensor"
            import_checkpoint(larger, target, ckpt_format=ckpt_format, **how)

    def journaled() -> Iterator[Path]:
        return target.parent.glob(".target.partial-*.scratch/rank-*")

    def whole() -> bool:
        return verify_checkpoint(*((target, source) if direction == "export" else (larger, target))).same

    begun = time.monotonic()
    assert not any(run(work, processes))
    duration, expected = time.monotonic() - begun, contents(target)
    assert whole()
    generator, interrupted, left_something, moment = random.Random(0), 0, 0, 0
    while moment < MOMENTS or interrupted < INTERRUPTED:
        moment += 1
        assert moment < 10 * MOMENTS, "nothing is ever interrupted"
        resume = generator.random() < 0.5
        if generator.random() < 0.5:  # half the time there is nothing to be replaced
            shutil.rmtree(target, ignore_errors=True)
        before = target.exists()

        def kill(children: list[int]) -> None:
            if generator.random() < 0.5:  # at any moment, also before the work and at its end
                time.sleep(generator.uniform(0, 1.1) * duration)
            else:  # while it writes, however long its start took
                while not any(journaled()) and is_alive(children[0]):
                    time.sleep(0.001)
                time.sleep(generator.uniform(0, 0.1) * duration)
            for child in generator.sample(children, generator.randint(1, len(children))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)

        interrupted += any(run(work, processes, kill))
        left_something += any(journaled())
        if target.exists():
            assert contents(target) == expected
        else:
            assert not before
            with pytest.raises(CheckpointError):
                inspect_checkpoint(target)
    assert left_something
    resume = True
    assert not any(run(work, 3 - processes))  # by another number of processes
    assert contents(target) == expected and whole()
    assert [path.name for path in target.parent.iterdir()] == ["target"]


@pytest.mark.one_case_in(3)
def test_resume_writes_only_missing_byte_ranges(larger, tmp_path):
    whole, full = import_checkpoint(larger, tmp_path / "whole"), "No space left on device"
    with broken_disk(5, why=(28, full)), pytest.raises(CheckpointError, match=f"{full}; the partial result stays in"):
        import_checkpoint(larger, tmp_path / "target", resume=True)
    report = import_checkpoint(larger, tmp_path / "target", resume=True, verify=True)
    # Which five units were written first is the threads' affair; the two largest are two thirds of all bytes.
    assert 0 < report.resumed < report.nbytes
    assert report.written == whole.written - report.resumed
    assert contents(tmp_path / "target") == contents(tmp_path / "whole")


def test_import_failing_on_one_rank_fails_on_all_ranks(larger, tmp_path):
    def work(ranks: Ranks) -> None:
        if ranks.rank == 1:
            output_files.TensorData.__len__ = lambda _: 1 / 0  # whatever goes wrong in one alone
        import_checkpoint(larger, tmp_path / "target", ranks=ranks)

    assert all(run(work, 2))
    assert not (tmp_path / "target").exists() and not list(tmp_path.glob(".target*"))


def test_import_raises_if_ranks_have_different_sources(larger, tmp_path):
    shutil.copytree(larger, tmp_path / "other")

    def work(ranks: Ranks) -> None:
        with pytest.raises(CheckpointError, match="differs between the 2 processes"):
            import_checkpoint([larger, tmp_path / "other"][ranks.rank], tmp_path / "target", ranks=ranks)

    assert run(work, 2) == [0, 0]
    assert not (tmp_path / "target").exists()
