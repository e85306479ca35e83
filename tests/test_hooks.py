"""Registration does not depend on the order of imports, and the import of the package is light."""

import subprocess
import sys

import pytest

CHECK = """
import megatron.bridge.models.conversion.model_bridge as m, transformers
found = type(m.get_model_bridge(transformers.Qwen3VLForConditionalGeneration))
assert found.__module__ == "qwen3vl_bridge.bridge", found
import qwen3vl_bridge.provider, qwen3vl_bridge.model.qwen3vl
assert qwen3vl_bridge.Qwen3VLModelProvider is qwen3vl_bridge.provider.Qwen3VLModelProvider
import sys
assert not any(name.split(".")[0] == "transformer_engine" for name in sys.modules), "the stand-in stayed"
"""


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(
    "first",
    [
        "import qwen3vl_bridge, megatron.bridge",
        "from qwen3vl_bridge.provider import Qwen3VLModelProvider",
        "import megatron.core.models.gpt; import qwen3vl_bridge, megatron.bridge",
    ],
)
def test_registers_whatever_is_imported_first(first):
    done = run(first + CHECK)
    assert done.returncode == 0, done.stderr[-3000:]


def test_importing_the_package_imports_neither_torch_nor_megatron():
    done = run(
        "import sys, qwen3vl_bridge\n"
        "heavy = {'torch', 'transformers', 'megatron.core', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    assert done.returncode == 0, done.stderr


def test_unknown_names_are_attribute_errors():
    import qwen3vl_bridge

    with pytest.raises(AttributeError, match="no attribute 'Qwen4VL'"):
        _ = qwen3vl_bridge.Qwen4VL
