r"""Run a command of `qwen3vl`, or a script with the plugin imported: `python -m qwen3vl_bridge COMMAND|SCRIPT ...`.

torchrun --nproc_per_node 8 -m qwen3vl_bridge convert import --hf-model HF_FOLDER --megatron-path MEGATRON --ep 8
torchrun --nproc_per_node 2 -m qwen3vl_bridge Megatron-Bridge/examples/conversion/hf_to_megatron_generate_vlm.py \
        --hf_model_path MODEL --prompt "Describe this image." --image_path IMAGE --pp 2
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import qwen3vl_bridge  # noqa: F401  registers the plugin
from qwen3vl_bridge.cli import main as program


def main() -> None:
    """Run a command of `qwen3vl`, or run a script as Python would: with its arguments, and its folder in `sys.path`."""
    if sys.argv[1:] and (sys.argv[1] in program.COMMANDS or sys.argv[1].startswith("-")):
        sys.exit(program.main())
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        found = f"found {sys.argv[1]!r}" if len(sys.argv) > 1 else "found nothing"
        sys.exit(
            f"usage: python -m qwen3vl_bridge COMMAND|SCRIPT [ARGUMENT ...]: {found}, expected a Python file or one of "
            f"{', '.join(program.COMMANDS)}"
        )
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
