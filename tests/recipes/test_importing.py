"""Side effects of importing the package (docs/train.md)."""

import json
import os
import subprocess
import sys

import pytest

# What a process has before and after the imports. torch is imported before: only its changes count.
IMPORTING = """
import json, logging, os, sys, warnings
import torch, torch.distributed

def level_of(logger):
    return [logger.level, logger.disabled, len(logger.filters), len(logger.handlers)]

def state():
    loggers = {name: one for name, one in logging.root.manager.loggerDict.items() if isinstance(one, logging.Logger)}
    owners = torch, torch.cuda, torch.distributed, torch.Tensor, torch.nn.Module
    return {
        "environment": dict(os.environ),
        "loggers": {name: level_of(one) for name, one in {"": logging.root, **loggers}.items()},
        "warnings": [str(one) for one in warnings.filters],
        "torch": {str(owner): {name: id(value) for name, value in vars(owner).items()} for owner in owners},
    }

before, modules = state(), set(sys.modules)
import qwen3vl_bridge, qwen3vl_recipes
from qwen3vl_recipes import qwen3_vl_8b_sft_config
after = state()
new = {name.partition(".")[0] for name in set(sys.modules) - modules}
ours = {name for name in after["loggers"].keys() - before["loggers"].keys()}
after["loggers"] = {name: one for name, one in after["loggers"].items() if name in before["loggers"]}
print(json.dumps([[name for name in before if before[name] != after[name]], sorted(new), sorted(ours)]))
"""


def test_import_of_plugin_and_recipes_has_no_side_effects():
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_ALLOC_CONF")}
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and not done.stderr, done.stderr
    changed, modules, loggers = json.loads(done.stdout)
    assert changed == []
    assert not {"megatron", "modelopt", "transformers", "transformer_engine"} & set(modules)
    assert all(name.startswith("qwen3vl_") for name in loggers)


QUIET = """
from qwen3vl_bridge.upstream.library_logs import quiet
quiet()
from qwen3vl_recipes import qwen3_vl_2b_sft_config
import megatron.bridge.training.finetune
"""


@pytest.mark.slow
def test_quiet_hides_log_messages_of_imports():
    """Without `quiet`, importing Megatron-Bridge logs 40 lines and a traceback."""
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout
    assert not [line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line]


def test_quiet_libraries_keeps_logging_and_warnings_of_user_script(tmp_path):
    code = (
        "import logging, warnings; from qwen3vl_bridge.upstream import library_logs; library_logs.quiet_libraries(); "
        "logging.basicConfig(level=logging.INFO, filename='run.log'); logging.info('mine'); warnings.warn('my warning')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert "mine" in (tmp_path / "run.log").read_text() and "my warning" in done.stderr
