"""Conversion to both formats and back, in both precisions: the same bytes, but for the one norm that is shifted."""

from __future__ import annotations

from pathlib import Path

from qwen3vl_bridge.checkpoint import (
    Topology,
    export_checkpoint,
    import_checkpoint,
    reformat_checkpoint,
    verify_checkpoint,
)
from qwen3vl_bridge.checkpoint.formats.dcp.metadata import read_metadata
from qwen3vl_bridge.cli.convert import main

import pytest
import torch
from safetensors.torch import load_file, save_file

from .conftest import RELEASED
from .tiny import make_checkpoint

FORMATS = ("fsdp_dtensor", "torch_dist")
SHIFTED = ".linear_attn.norm.weight"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def check_same(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if name.endswith(SHIFTED) and tensor.dtype is torch.float32:
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=6e-8)  # measured: at most one rounding
            continue
        assert found[name].dtype is tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("ckpt_format", FORMATS)
@pytest.mark.parametrize("kind", ["dense", "tied", "moe", "per expert", "3.6"])
def test_there_and_back(qwen3_5_folders, kind, ckpt_format, tmp_path):
    folder = qwen3_5_folders[kind]
    import_checkpoint(folder, tmp_path / "megatron", ckpt_format=ckpt_format, verify=True)
    assert verify_checkpoint(folder, tmp_path / "megatron").same
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf", verify=True)
    check_same(weights(tmp_path / "hf"), weights(folder))


@pytest.mark.parametrize(("kind", "ep"), [("dense", 1), ("moe", 2), ("3.6", 3)])
def test_for_ranks_and_from_format_to_format(qwen3_5_folders, kind, ep, tmp_path):
    """Cut where ranks are; unequal sections of a projection too."""
    topology = Topology(tp=2, ep=ep, etp=1, chunk_bytes=2_000)
    import_checkpoint(qwen3_5_folders[kind], tmp_path / "fsdp", topology=topology, verify=True)
    reformat_checkpoint(tmp_path / "fsdp", tmp_path / "dist", ckpt_format="torch_dist", topology=topology, verify=True)
    assert verify_checkpoint(qwen3_5_folders[kind], tmp_path / "dist").same
    export_checkpoint(tmp_path / "dist", tmp_path / "hf")
    check_same(weights(tmp_path / "hf"), weights(qwen3_5_folders[kind]))


@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_for_eight_ranks_of_experts(ckpt_format, tmp_path, capsys):
    """By the command line: what is written for them is verified, and comes back from one rank."""
    folder, written = make_checkpoint(tmp_path / "in", moe=True, mtp=RELEASED, num_experts=8), tmp_path / "megatron"
    asked = ["--hf-model", str(folder), "--megatron-path", str(written), "--ckpt-format", ckpt_format, "--ep", "8"]
    assert main(["import", *asked, "--verify", "--no-progress"]) == 0
    assert main(["verify", *asked[:4], "--no-progress"]) == 0
    export_checkpoint(written, tmp_path / "hf", verify=True)
    check_same(weights(tmp_path / "hf"), weights(folder))
    assert main(["import", *asked[:-1], "3", "--overwrite", "--no-progress"]) == 2
    assert "--ep is 3, expected a divisor of the 8 experts" in capsys.readouterr().err


def rewritten(folder: Path, tensors: dict[str, torch.Tensor], target: Path) -> Path:
    """The same folder with other weights."""
    target.mkdir()
    for file in folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors":  # references of other tests are folders
            (target / file.name).write_bytes(file.read_bytes())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_mixed_precision_as_released(qwen3_5_folders, ckpt_format, tmp_path):
    """float32 beside bfloat16 stays so."""
    folder, keep = qwen3_5_folders["dense"], ("A_log", SHIFTED)
    tensors = {name: one if name.endswith(keep) else one.bfloat16() for name, one in weights(folder).items()}
    mixed = rewritten(folder, tensors, tmp_path / "mixed")
    import_checkpoint(mixed, tmp_path / "megatron", ckpt_format=ckpt_format, verify=True)
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf")
    check_same(weights(tmp_path / "hf"), tensors)


@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_half_precision(qwen3_5_folders, ckpt_format, tmp_path):
    """Every byte comes back but of shifted weights below one half."""
    folder = qwen3_5_folders["dense"]
    half = {name: one.bfloat16() for name, one in weights(folder).items()}
    norms = [name for name in half if name.endswith(SHIFTED)]
    half[norms[0]][:3] = torch.tensor([0.4, 0.013, -0.2])
    rewritten(folder, half, tmp_path / "half")
    import_checkpoint(tmp_path / "half", tmp_path / "megatron", ckpt_format=ckpt_format)
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf")
    back = weights(tmp_path / "hf")
    for name in norms:
        small = half[name] < 0.5
        torch.testing.assert_close(back[name][small], half[name][small], rtol=0, atol=2**-8)  # of numbers up to 2
        back[name] = torch.where(small, half[name], back[name])
    check_same(back, half)


@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_sections_of_a_projection(qwen3_5_folders, ckpt_format, tmp_path):
    """A checkpoint keeps them apart, as megatron-core does."""
    import_checkpoint(qwen3_5_folders["dense"], tmp_path / "megatron", ckpt_format=ckpt_format)
    names = read_metadata(tmp_path / "megatron" / "iter_0000000").tensors
    found = {name.rpartition(".")[2] for name in names if ".in_proj.weight." in name}
    assert found == {"query", "key", "value", "z", "beta", "alpha"}
    assert {name.rpartition(".")[2] for name in names if ".conv1d.weight." in name} == {"query", "key", "value"}
    assert not any(name.endswith((".in_proj.weight", ".conv1d.weight")) for name in names)
