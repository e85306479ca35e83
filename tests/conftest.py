"""Shared by all tests: which of them run, tiny checkpoints, and quiet logs."""

import gc
import importlib.util
import logging
import os
import socket
import sys
import weakref
from collections import defaultdict
from pathlib import Path

import qwen3vl_bridge  # noqa: F401  before any of Megatron, whose import it prepares on this machine

import pytest

# Neither torch nor Megatron above: xdist's own process reads this file before it starts its workers, and tests of what
# needs neither are run alone at once.

# A busy machine is no reason to fail; and CI looks at the same examples each time, people at new ones.
# A machine with a GPU may have torch, transformers, Megatron and pytest alone.
if importlib.util.find_spec("hypothesis"):
    import hypothesis

    hypothesis.settings.register_profile("project", deadline=None, derandomize="CI" in os.environ)
    hypothesis.settings.load_profile("project")


def pytest_addoption(parser):
    parser.addoption("--slow", metavar="WHICH", help='tests marked "slow": "all", or a part of their files such as 2/5')


# Folders and files by how long their modules take: the last that xdist gives out are short, its workers end together.
_LONGEST = (
    *("recipes/test_twins", "training", "parity", "distributed", "models/qwen3_5", "simulation", "checkpoint", "peft"),
    *("frameworks", "docs", "test_install", "models", "data"),
)


def _place(item) -> int:
    return next((n for n, name in enumerate(_LONGEST) if item.nodeid.startswith(f"tests/{name}")), len(_LONGEST))


def _mark_other_cases_slow(items) -> None:
    """Add the marker "slow" to the cases that `one_case_in(n)` leaves out by default."""
    cases = defaultdict(list)
    for item in items:
        if marker := item.get_closest_marker("one_case_in"):
            cases[item.nodeid.partition("[")[0], marker.args[0]].append(item)
    for (_, n), of_test in cases.items():
        for number, item in enumerate(of_test):
            if number % n:
                item.add_marker("slow")


def pytest_collection_modifyitems(config, items):
    """Sort long tests first, and deselect slow ones unless --slow, or a file or test, asks for them."""
    items.sort(key=_place)
    all_collected = [Path(one).resolve() for one in config.args] == [Path(__file__).parent]
    _mark_other_cases_slow(items)
    which = config.getoption("--slow")
    if which == "all" or (which is None and not all_collected):
        return
    number, parts = (int(n) for n in (which or "0/0").split("/"))

    slow = {item.path for item in items if item.get_closest_marker("slow")}
    chosen = set(sorted(slow)[number % parts :: parts]) if parts else set()

    def runs(item) -> bool:
        return item.get_closest_marker("slow") is None or item.path in chosen

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = [item for item in items if runs(item)]


def pytest_runtest_setup(item):
    """Skip tests marked "gpu" without a GPU."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


def pytest_collection():
    """Switch off garbage collection during collection: nearly nothing of what is imported is garbage."""
    gc.disable()


def pytest_collection_finish():
    """Freeze the imported objects, so that a garbage collection does not walk through a million of them."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _two_cores():
    from tests.helpers.ranks import set_threads

    set_threads()


@pytest.fixture(scope="module", autouse=True)
def _groups_of_one_module():
    """Destroy a module's process groups at its end: their idle gloo threads take CPU time."""
    gc.collect()  # a model of the last module, in a circle of references, would hold its groups
    gc.freeze()  # what is left stays: walking through it again took two seconds a module
    yield
    _leave_groups()


def _leave_groups() -> None:
    if "megatron.core.parallel_state" in sys.modules:
        from qwen3vl_bridge.training.process_groups import shutdown

        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        shutdown()
        _clear_sharding_prop_cache()  # or it would give results of later, equal meshes the mesh of these groups
    elif "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
        sys.modules["torch"].distributed.destroy_process_group()


_RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="session", autouse=True)
def _port_of_this_worker():
    """Give each pytest worker its own port: Megatron-Bridge uses one port per machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])


@pytest.fixture(autouse=True)
def _rendezvous_of_one_test():
    """Restore the rendezvous variables that Megatron-Bridge writes into the environment."""
    before = {name: os.environ.get(name) for name in _RENDEZVOUS}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


_LOGGER = logging.getLogger("qwen3vl_bridge")
_LOG_LEVEL = _LOGGER.level


@pytest.fixture(autouse=True)
def _log_level_of_one_test():
    """Restore the level of our messages, which commands without training raise, also in fixtures of a module."""
    _LOGGER.setLevel(_LOG_LEVEL)
    yield
    _LOGGER.setLevel(_LOG_LEVEL)


@pytest.fixture
def no_groups(monkeypatch):
    """Remove process groups and rendezvous variables, as in a fresh process."""
    _leave_groups()
    for name in _RENDEZVOUS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def loaders():
    """Return all of torch's loaders with worker processes."""
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as Loader

    made, original = weakref.WeakSet(), Loader.__init__

    def noted(loader, settings):
        made.add(loader)
        original(loader, settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "__init__", noted)
        yield made


@pytest.fixture(autouse=True)
def _loading_processes_of_one_test(loaders):
    """Shut down the loaders of a test.

    The garbage collector would destroy the queue by which torch ends a worker, and then wait five seconds for it.
    """
    yield
    for loader in list(loaders):
        loader._shutdown_workers()


@pytest.fixture(autouse=True)
def _models_of_one_test():
    """Reset what megatron-core keeps of a model."""
    yield
    if "megatron.core" in sys.modules:
        from tests.helpers.ranks import forget_models

        forget_models()


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """Return the folder of the digits conversations. Do not write to it."""
    from qwen3vl_bridge.testing.digits import make_dataset

    make_dataset(folder := tmp_path_factory.mktemp("digits"))
    return folder


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory):
    from qwen3vl_bridge.testing.tiny_checkpoint import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("untied"), seed=1)


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory):
    from qwen3vl_bridge.testing.tiny_checkpoint import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("tied"), seed=2, tied=True)


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory):
    """Return a MoE checkpoint with packed, output-major experts, as transformers 5 saves it."""
    from qwen3vl_bridge.testing.tiny_checkpoint import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("moe"), seed=3, moe=True)


@pytest.fixture(scope="session")
def moe_folders(moe_folder, tmp_path_factory):
    """Return the same model in each layout of experts."""
    from tests.helpers.expert_layouts import LAYOUTS, rewrite

    return {layout: rewrite(moe_folder, tmp_path_factory.mktemp(layout.name), layout) for layout in LAYOUTS}


@pytest.fixture(scope="session")
def inputs(tmp_path_factory, untied_folder):
    """Return the inputs of a small run: conversations about digits, and a tiny checkpoint in both formats."""
    from qwen3vl_bridge.checkpoint import import_checkpoint
    from qwen3vl_bridge.testing.digits import make_dataset

    from tests.training.running import Inputs

    folder = tmp_path_factory.mktemp("run")
    data = folder / "data"
    make_dataset(data)
    for split, keep in (("train", 40), ("test", 8)):
        path = data / f"{split}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:keep]))
    import_checkpoint(untied_folder, folder / "megatron", progress=False)
    return Inputs(untied_folder, data, folder / "megatron")
