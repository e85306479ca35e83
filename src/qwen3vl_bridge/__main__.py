r"""Run a script with the plugin imported: `python -m qwen3vl_bridge SCRIPT [ARGUMENT ...]`.

    torchrun --nproc_per_node 2 -m qwen3vl_bridge Megatron-Bridge/examples/conversion/hf_to_megatron_generate_vlm.py \
        --hf_model_path MODEL --prompt "Describe this image." --image_path IMAGE --pp 2

What lives here: the one thing that scripts of Megatron-Bridge's, which know no plugins, need. What may not: commands of
our own.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import qwen3vl_bridge  # noqa: F401  what this is for


def main() -> None:
    """Run the script as Python would: its arguments, its folder first among those that modules are found in."""
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        found = f"found {sys.argv[1]!r}" if len(sys.argv) > 1 else "found nothing"
        sys.exit(f"usage: python -m qwen3vl_bridge SCRIPT [ARGUMENT ...]: {found}, expected a Python file")
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
