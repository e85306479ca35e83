"""`python -m qwen3vl_bridge SCRIPT`: scripts of Megatron-Bridge's, which know no plugins, run with ours imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, multiprocessing, sys
import beside_it
if __name__ == "__main__":
    plugin = "qwen3vl_bridge" in sys.modules
    print(json.dumps([sys.argv[1:], sys.path[0], plugin, beside_it.NAME]))
"""


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "ignore", "-m", "qwen3vl_bridge", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_main_runs_script_with_plugin_imported(tmp_path):
    """Megatron-Bridge's `hf_to_megatron_generate_vlm.py` imports a file beside it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside_it.py").write_text("NAME = 'beside'")
    found = run(tmp_path / "script.py", "--pp", 2, "--prompt", "which digit")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == [["--pp", "2", "--prompt", "which digit"], str(tmp_path), True, "beside"]


@pytest.mark.parametrize(("arguments", "said"), [((), "found nothing"), (("no/script.py",), "found 'no/script.py'")])
def test_main_exits_with_error_if_script_is_missing(arguments, said):
    found = run(*arguments)
    assert found.returncode != 0 and f"SCRIPT [ARGUMENT ...]: {said}, expected a Python file" in found.stderr


def test_main_shows_message_of_script_that_calls_sys_exit(tmp_path):
    (tmp_path / "script.py").write_text("raise SystemExit('as the script says')")
    assert "as the script says" in run(Path(tmp_path) / "script.py").stderr
