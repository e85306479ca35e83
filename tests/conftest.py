"""What all tests share: which of them run, the tiny checkpoints, and quiet logs."""

import gc
import importlib.util
import os
import re
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
    *("training", "parity", "qwen3_5", "fake_gpu", "host_waits", "checkpoint", "adapters", "frameworks"),
    *("test_reading_journeys", "test_install", "model", "data"),
)


def _place(item) -> int:
    return next((n for n, name in enumerate(_LONGEST) if item.nodeid.startswith(f"tests/{name}")), len(_LONGEST))


def _mark_slow_cases(items, *, whole: bool) -> None:
    """Those of `slow_cases.txt`; where all tests are collected, each of its lines has to be of some."""
    lines = Path(__file__).with_name("slow_cases.txt").read_text().splitlines()
    for line in (line for line in lines if not line.startswith("#")):
        name, _, every = line.partition(" EVERY ")
        beginning = re.compile(re.escape(name).replace(r"\*", ".*"))
        found = [item for item in items if beginning.match(item.nodeid)]
        if whole and not found:
            raise pytest.UsageError(f"tests/slow_cases.txt: {line!r} is the beginning of no test's name")
        for item in _but_every(int(every), found) if every else found:
            item.add_marker("slow")


def _but_every(nth: int, items) -> list:
    """The cases that are slow, if of each test with more than `nth` cases only every nth is not."""
    by_test = defaultdict(list)
    for item in items:
        by_test[item.nodeid.partition("[")[0]].append(item)
    return [item for cases in by_test.values() if len(cases) > nth for number, item in enumerate(cases) if number % nth]


def pytest_collection_modifyitems(config, items):
    """Long ones first; leave out slow tests, but those that are asked for: where files or tests are named, all."""
    items.sort(key=_place)
    all_collected = [Path(one).resolve() for one in config.args] == [Path(__file__).parent]
    _mark_slow_cases(items, whole=all_collected)
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
    """Tests marked "gpu" are skipped without one."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


def pytest_collection():
    """Until all tests are collected: nearly nothing of what is imported is garbage."""
    gc.disable()


def pytest_collection_finish():
    """What has been imported stays: a collection need not walk through its million objects.

    Of whole runs in this process collections took a third of the time.
    """
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _two_cores():
    from tests.ranks import set_threads

    set_threads()


@pytest.fixture(scope="module", autouse=True)
def _groups_of_one_module():
    """A module's groups are left with it: the threads of gloo's look for work, 600 of them take a tenth of a core."""
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
    """Megatron-Bridge, where nobody has made process groups, meets at one port for all runs of a machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])


@pytest.fixture(autouse=True)
def _rendezvous_of_one_test():
    """Megatron-Bridge writes where processes meet into the environment: it is nothing to the tests after it."""
    before = {name: os.environ.get(name) for name in _RENDEZVOUS}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def no_groups(monkeypatch):
    """As in a fresh process: no process groups of other tests, and nowhere to meet."""
    _leave_groups()
    for name in _RENDEZVOUS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def loaders():
    """All of torch's loaders with processes that exist."""
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
    """Loaders in reference cycles end with their test.

    The collector destroys the queue by which torch tells a process to end, and then waits five seconds for it.
    """
    yield
    for loader in list(loaders):
        loader._shutdown_workers()


@pytest.fixture(autouse=True)
def _models_of_one_test():
    """A test's models are nothing to the tests after it."""
    yield
    if "megatron.core" in sys.modules:
        from tests.ranks import forget_models

        forget_models()


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """The folder of the example's conversations, which nobody writes to."""
    from examples.digits.dataset import make_dataset

    make_dataset(folder := tmp_path_factory.mktemp("digits"))
    return folder


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory):
    from examples.digits.checkpoint import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("untied"), seed=1)


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory):
    from examples.digits.checkpoint import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("tied"), seed=2, tied=True)


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory):
    """With experts, packed and output-major as transformers 5 saves them."""
    from examples.digits.checkpoint import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("moe"), seed=3, moe=True)


@pytest.fixture(scope="session")
def moe_folders(moe_folder, tmp_path_factory):
    """The same model in each expert layout."""
    from tests.expert_layouts import LAYOUTS, rewrite

    return {layout: rewrite(moe_folder, tmp_path_factory.mktemp(layout.name), layout) for layout in LAYOUTS}
