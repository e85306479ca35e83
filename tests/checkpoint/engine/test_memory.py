"""A conversion's memory does not grow with the model: it stays below the size of the largest tensor.

Run by itself, it prints as JSON by how many bytes a process has grown at the end of each conversion of a large model
after a small one, for which modules are imported and threads are started:
-m tests.checkpoint.engine.test_memory SMALL LARGE FOLDER
"""

import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from qwen3vl_bridge.checkpoint import export_checkpoint, import_checkpoint, reformat_checkpoint
from qwen3vl_bridge.checkpoint.conversion_plan import tensors_of
from qwen3vl_bridge.checkpoint.formats.huggingface import HFWeights, copy_side_files
from qwen3vl_bridge.checkpoint.formats.layouts import HuggingFace
from qwen3vl_bridge.core.files import read_object, write_object
from qwen3vl_bridge.registry import dimensions_of, family
from qwen3vl_bridge.weights.rows import ExpertLayout, expand

import pytest

from tests.checkpoint.support import entry, file_of
from tests.helpers.forked import ROOT
from tests.helpers.fp8 import in_fp8

MB = 1 << 20
WIDER = dict(hidden_size=1024, vocab_size=12288, num_experts=8, moe_intermediate_size=512)
BOUND = 24 * MB  # measured 14 where experts are turned, 19 in FP8, else 3


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
    export_checkpoint(dist, hf, quantize="fp8", verify=True)
    yield "export in FP8"
    shutil.rmtree(hf)
    import_checkpoint(source, fsdp, torch_dtype="bfloat16")
    yield "import in bfloat16"
    shutil.rmtree(folder)


def write_large(folder: Path, source: Path) -> list[int]:
    """Write a model with weights of zero, in a sparse file; return the bytes of each tensor.

    Of a model in FP8, the same matrices are in FP8, with scales of one: zero would be rejected.
    """
    copy_side_files(source, folder)
    config = read_object(folder / "config.json")
    text = config["text_config"]
    text |= WIDER | dict.fromkeys(text.keys() & {"num_local_experts"}, WIDER["num_experts"])  # another name of it
    config["vision_config"]["out_hidden_size"] = WIDER["hidden_size"]
    write_object(folder / "config.json", config)
    dimensions = dimensions_of(config)
    shapes = tensors_of(expand(family(dimensions.family).rows(), dimensions), HuggingFace(dimensions))
    header, end, stored, scales_at = {}, 0, HFWeights(source).specs, list[tuple[int, int]]()
    for name, shape in shapes.items():
        if scales := stored[name].scales:
            of_blocks = (*shape[:-2], *(-(-size // of) for size, of in zip(shape[-2:], scales.block, strict=True)))
            header[name] = entry("F8_E4M3", shape, (end, end := end + math.prod(shape)))
            scales_at.append((end, math.prod(of_blocks)))
            header[f"{name}_scale_inv"] = entry("F32", of_blocks, (end, end := end + 4 * math.prod(of_blocks)))
            continue
        header[name] = entry("F32", shape, (end, end := end + 4 * math.prod(shape)))
    start = file_of(header, 0)
    (folder / "model.safetensors").write_bytes(start)
    os.truncate(folder / "model.safetensors", len(start) + end)
    with (folder / "model.safetensors").open("r+b") as file:
        for offset, count in scales_at:
            file.seek(len(start) + offset)
            file.write(struct.pack("<f", 1.0) * count)
    return [4 * math.prod(shape) for shape in shapes.values()]


@pytest.mark.slow
@pytest.mark.parametrize("which", [pytest.param("moe_folder", marks=pytest.mark.slow), "qwen3_5_folder", "in_fp8"])
def test_conversion_memory_growth_is_below_size_of_largest_tensor(which, request, moe_folders, tmp_path):
    """Import, reformat and export, each verified. Packed experts are transposed in the first model."""
    if which == "in_fp8":
        small = in_fp8(moe_folders[ExpertLayout.INPUT_MAJOR], tmp_path / "small")
    else:
        small = request.getfixturevalue(which)
    nbytes = write_large(tmp_path / "large", small)
    assert sum(nbytes) > 8 * BOUND and max(nbytes) >= 2 * BOUND
    command = [sys.executable, "-m", "tests.checkpoint.engine.test_memory", small, tmp_path / "large", tmp_path / "out"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr[-4000:]
    grown = json.loads(found.stdout)
    print(f"{sum(nbytes) / MB:.0f} MiB", {name: f"{amount / MB:.1f} MiB" for name, amount in grown.items()})
    assert max(grown.values()) <= BOUND


if __name__ == "__main__":
    small, large, folder = map(Path, sys.argv[1:])
    list(conversions(small, folder / "small"))
    before = peak()
    print(json.dumps({name: peak() - before for name in conversions(large, folder / "large")}))
