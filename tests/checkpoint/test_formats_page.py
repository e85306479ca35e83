"""docs/checkpoint_formats.md says what is in a folder: files, names, shapes and manifest of converted tiny models."""

import json
import re
from pathlib import Path

from qwen3vl_bridge.checkpoint import export_checkpoint, import_checkpoint
from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest
from torch.distributed.checkpoint import FileSystemReader

from examples.digits.checkpoint import make_checkpoint

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoint_formats.md").read_text("utf-8")
MODELS = {"dense": {}, "moe": {"moe": True}, "qwen3_5": {"family": "qwen3_5"}}
FORMATS = ("fsdp_dtensor", "torch_dist")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("formats")
    for name, kind in MODELS.items():
        make_checkpoint(root / name, **kind)
        for ckpt_format in FORMATS:
            import_checkpoint(root / name, root / f"{name}.{ckpt_format}", ckpt_format=ckpt_format, progress=False)
    export_checkpoint(root / "dense.torch_dist", root / "dense.huggingface", progress=False)
    return root


def entries(folder: Path) -> dict:
    return FileSystemReader(folder / "iter_0000000").read_metadata().state_dict_metadata


def after(mark: str) -> str:
    return PAGE.split(f"<!-- {mark} -->\n")[1].split("\n\n")[0]


@pytest.mark.parametrize("ckpt_format", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_tensors(folders, model, ckpt_format):
    found = entries(folders / f"{model}.{ckpt_format}")
    if (mark := f"tensors: {model}, {ckpt_format}") in PAGE:
        rows = re.findall(r"^\| `([^`]+)` \| (\[[^]]*\]) \|$", after(mark), re.MULTILINE)
        assert len(rows) >= 3
        assert {name: str(list(found[name].size)) for name, _ in rows} == dict(rows)
    others = {name for name, entry in found.items() if not hasattr(entry, "size")}
    if ckpt_format == "fsdp_dtensor":
        assert others == {"checkpoint_version", "iteration", "args"}
        assert all(name.startswith("model.module.") for name in found.keys() - others)
    else:
        assert {name for name in others if "_extra_state" not in name} == {"common_state/shard_0_1"}
        assert model != "dense" or "language_model.decoder.layers.mlp.linear_fc1._extra_state/shard_0_4" in others


def test_every_table_of_tensors_is_compared():
    named = set(re.findall(r"<!-- tensors: (\w+), (\w+) -->", PAGE))
    assert len(named) == 5 and named <= {(model, ckpt_format) for model in MODELS for ckpt_format in FORMATS}


@pytest.mark.parametrize("ckpt_format", [*FORMATS, "huggingface"])
def test_files(folders, ckpt_format):
    root = folders / f"dense.{ckpt_format}"
    text = re.sub(r"or model-0.*|a copy of .*|\{.*", "", after(f"files: {ckpt_format}"))
    named = {word for line in text.splitlines() for word in line.split() if re.search(r"\.\w+$|/hf$", word)}
    inner = root / "iter_0000000" if ckpt_format in FORMATS else root
    there = {path.relative_to(root).as_posix() for folder in {root, inner} for path in folder.iterdir()}
    assert named == there - {"iter_0000000"}


def test_manifest(folders):
    fields = {
        name
        for cell in re.findall(r"^\| (`[^|]*) \|", after("manifest"), re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell)
    }
    found = set()
    for ckpt_format, inner in (("torch_dist", "iter_0000000"), ("huggingface", ".")):
        found |= json.loads((folders / f"dense.{ckpt_format}" / inner / "qwen3vl_bridge.json").read_text()).keys()
    assert fields - {"sha256"} == found


def test_layouts_of_experts():
    assert re.findall(r"^\| `([A-Z_]+)` \|", PAGE, re.MULTILINE) == [layout.name for layout in ExpertLayout]
