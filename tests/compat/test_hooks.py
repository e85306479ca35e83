"""Registration does not depend on the order of imports, and the import of the package is light."""

import gc
import importlib
import importlib.util
import subprocess
import sys

import qwen3vl_bridge
from qwen3vl_bridge.compat import patches

import pytest

CHECK = """
import megatron.bridge.models.conversion.model_bridge as m, transformers
found = type(m.get_model_bridge(transformers.Qwen3VLForConditionalGeneration))
assert found.__module__ == "qwen3vl_bridge.models.qwen3_vl.bridge", found
import qwen3vl_bridge.models.qwen3_vl.provider, qwen3vl_bridge.models.qwen3_vl.model
assert qwen3vl_bridge.Qwen3VLModelProvider is qwen3vl_bridge.models.qwen3_vl.provider.Qwen3VLModelProvider
import sys
assert not any(name.split(".")[0] == "transformer_engine" for name in sys.modules), "the stand-in stayed"
"""


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(
    "first",
    [
        "import qwen3vl_bridge, megatron.bridge",
        pytest.param(
            "from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider", marks=pytest.mark.slow
        ),
        pytest.param("import megatron.core.models.gpt; import qwen3vl_bridge, megatron.bridge", marks=pytest.mark.slow),
    ],
)
def test_registers_whatever_is_imported_first(first):
    done = run(first + CHECK)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "code",
    ["import qwen3vl_bridge", "from qwen3vl_bridge.cli.main import main; main(['train', '--help'])"],
    ids=["import", "help"],
)
def test_half_a_second_is_enough(code):
    """Of a processor; each takes 0.05 to 0.1 s where modules are compiled already."""
    ended = f"import atexit, sys, time; atexit.register(lambda: print(time.process_time(), file=sys.stderr)); {code}"
    done = run(ended)
    assert done.returncode == 0, done.stderr
    assert float(done.stderr.splitlines()[-1]) < 0.5


def test_importing_the_package_imports_neither_torch_nor_megatron():
    done = run(
        "import sys, qwen3vl_bridge\n"
        "heavy = {'torch', 'transformers', 'megatron.core', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_pauses_while_modules_are_executed(enabled, tmp_path, monkeypatch):
    inner, outer, failing = (f"probe_{name}_{enabled}" for name in ("inner", "outer", "failing"))
    seen = "import gc\nseen = gc.isenabled()\n"
    (tmp_path / f"{inner}.py").write_text(seen)
    (tmp_path / f"{outer}.py").write_text(f"from qwen3vl_bridge import {inner}\n{seen}")
    (tmp_path / f"{failing}.py").write_text("raise ValueError('as it is executed')")
    monkeypatch.setattr(qwen3vl_bridge, "__path__", [*qwen3vl_bridge.__path__, str(tmp_path)])
    before = gc.isenabled()
    set_collector(enabled)
    try:
        module = importlib.import_module(f"qwen3vl_bridge.{outer}")
        after = gc.isenabled()
        with pytest.raises(ValueError, match="as it is executed"):
            importlib.import_module(f"qwen3vl_bridge.{failing}")
        after_an_error = gc.isenabled()
    finally:
        set_collector(before)
    assert not module.seen and not getattr(module, inner).seen
    assert after == after_an_error == enabled


def set_collector(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()


TRAINING = """
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training import checkpointing, initialize
import importlib.util, sys
if importlib.util.find_spec("nvidia_resiliency_ext") is None:
    assert not any(name.startswith("nvidia_resiliency_ext") for name in sys.modules), "the stand-in stayed"
    assert not checkpointing.HAVE_RESIL and not checkpointing.HAVE_NVRX, "taken for installed"
    try:
        import megatron.bridge.training.inprocess_restart
    except ModuleNotFoundError as error:
        assert error.name == "nvidia_resiliency_ext", error
    else:
        raise AssertionError("restarts without the package")
initialize.compile_helpers()
from megatron.core.datasets import helpers
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import qwen3vl_bridge", "import megatron.core.datasets.utils, qwen3vl_bridge"])
def test_megatron_bridges_loop_starts_without_the_package_for_restarts_or_a_makefile(first):
    """As a script for Megatron-Bridge's `finetune()` does, from what this project or a wheel installs."""
    done = run(f"{first}\n{TRAINING}")
    assert done.returncode == 0, done.stderr[-3000:]


def test_data_helpers_are_compiled_where_there_is_something_to_compile(tmp_path, monkeypatch):
    """From megatron-core's sources in place, as in NVIDIA's containers, a Makefile lies beside what it makes."""
    made, done = tmp_path / "helpers_cpp.so", []
    compile_helpers = patches._unless_compiled(lambda: done.append(made))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: importlib.util.spec_from_file_location(name, made))
    compile_helpers()
    assert not done
    (tmp_path / "Makefile").touch()
    compile_helpers()
    assert done


def test_unknown_names_are_attribute_errors():
    import qwen3vl_bridge

    with pytest.raises(AttributeError, match="no attribute 'Qwen4VL'"):
        _ = qwen3vl_bridge.Qwen4VL
