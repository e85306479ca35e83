"""Run by itself: by how much a process's memory grows when it converts a large model after a small one.

python -m tests.checkpoint.engine.peak_memory SMALL LARGE FOLDER

Prints a JSON object of bytes: what it grew by until the end of each conversion of the large model. Modules are imported
and threads are started for the small one. Results are written to FOLDER and removed.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from qwen3vl_bridge.checkpoint import export_checkpoint, import_checkpoint, reformat_checkpoint


def peak() -> int:
    """Bytes of memory that this program has had at most; `getrusage` counts those of who started it, too."""
    (found,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found) * 1024


def conversions(source: Path, folder: Path) -> Iterator[str]:
    fsdp, dist, hf = (folder / name for name in ("fsdp", "dist", "hf"))
    import_checkpoint(source, fsdp, verify=True)
    yield "import to fsdp_dtensor"
    reformat_checkpoint(fsdp, dist, ckpt_format="torch_dist", verify=True)
    yield "reformat to torch_dist"
    shutil.rmtree(fsdp)
    export_checkpoint(dist, hf, verify=True)
    yield "export of torch_dist"
    shutil.rmtree(hf)
    import_checkpoint(source, fsdp, torch_dtype="bfloat16")
    yield "import in bfloat16"
    shutil.rmtree(folder)


def main(small: Path, large: Path, folder: Path) -> None:
    list(conversions(small, folder / "small"))
    before = peak()
    print(json.dumps({name: peak() - before for name in conversions(large, folder / "large")}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
