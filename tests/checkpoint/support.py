"""What several test files use: ways to look at checkpoints, and to expect errors. No fixtures, no tests."""

import contextlib
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from qwen3vl_bridge.checkpoint.formats import output_files
from qwen3vl_bridge.checkpoint.formats.dcp import DcpTensors, read_metadata
from qwen3vl_bridge.checkpoint.formats.tensors import SliceReader, TensorSlice
from qwen3vl_bridge.cli.convert import main
from qwen3vl_bridge.core.files import read_object, write_object

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

EMBEDDING = "model.language_model.embed_tokens.weight"
NORM = "model.language_model.norm.weight"
Q_PROJ = "model.language_model.layers.1.self_attn.q_proj.weight"

TENSORS = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.arange(6).bfloat16(), "s": torch.tensor(3.0)}


def hf_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def stock_load(folder) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, by torch's own loader."""
    state = _load_state_dict_from_keys(None, checkpoint_id=folder)
    model = {f"model.{name}": value for name, value in state.pop("model", {}).items()}
    return {name: value for name, value in (model | state).items() if isinstance(value, torch.Tensor)}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def read_everything(folder) -> dict[str, torch.Tensor]:
    metadata = read_metadata(folder)
    source = DcpTensors(metadata, {key: key for key in metadata.tensors})
    found = {}
    with SliceReader(source, block_bytes=8) as reader:
        for name, spec in source.specs.items():
            data = b"".join(
                bytes(block) for block in reader.read_blocks([TensorSlice(name, 0, spec.numel)], spec.dtype)
            )
            found[name] = torch.frombuffer(bytearray(data), dtype=getattr(torch, spec.dtype)).reshape(spec.shape)
    return found


def entry(dtype="F32", shape=(2, 3), offsets=(0, 24)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def file_of(header: dict | list | str | bytes, payload: int = 24) -> bytes:
    text = header if isinstance(header, str | bytes) else json.dumps(header)
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data + bytes(payload)


def model_with(folder: Path, source: Path, change) -> Path:
    """A copy of a model with its tensors changed by `change(tensors)`."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = hf_tensors(source)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def model_with_config(folder: Path, source: Path, change: dict) -> Path:
    shutil.copytree(source, folder)
    config = read_object(folder / "config.json")
    for name, value in change.items():
        section = isinstance(value, dict) and value and isinstance(config.get(name), dict)
        config[name] = config[name] | value if section else value
    write_object(folder / "config.json", config)
    return folder


@contextlib.contextmanager
def before_each_unit(do: Callable[..., object], unit_bytes: int | None = None) -> Iterator[None]:
    original = output_files.Journal.record

    def note(*arguments):
        do(*arguments)
        original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_files.Journal, "record", note)
        if unit_bytes is not None:
            patch.setattr(output_files, "RANGE_BYTES", unit_bytes)
        yield


@contextlib.contextmanager
def broken_disk(count: int, unit_bytes: int | None = None, why: tuple = (5, "Input/output error")) -> Iterator[None]:
    done = []

    def fail_later(*_):
        done.append(1)
        if len(done) > count:
            raise OSError(*why)

    with before_each_unit(fail_later, unit_bytes):
        yield


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# What may be wrong with the tensors of a model.
CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "missing": lambda tensors: tensors.pop(NORM),
    "extra": lambda tensors: tensors.update({"model.language_model.layers.9.x": torch.zeros(3)}),
    "misshapen": lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ][:5].clone()}),
    "all": lambda tensors: [CHANGES[name](tensors) for name in ("missing", "extra", "misshapen")],
}


def expect_error(capsys, arguments: list[str], *parts: str, options: tuple[str, ...] | list[str] = ()) -> str:
    """Run the command line; it must fail with one error that has these parts, and change nothing on disk."""
    around = Path(arguments[-1]).parents[1]
    before = sorted(path.as_posix() for path in around.rglob("*"))
    capsys.readouterr()
    assert main([*arguments[:1], "--no-progress", *options, *arguments[1:]]) == 2
    out, error = capsys.readouterr()
    assert not out
    assert error.startswith("error: ") and error.count("error: ") == 1 and "Traceback" not in error
    for part in parts:
        assert part in error
    assert sorted(path.as_posix() for path in around.rglob("*")) == before
    return error


def importing(source, tmp_path) -> list[str]:
    return ["import", "--hf-model", str(source), "--megatron-path", str(tmp_path / "new" / "megatron")]


def exporting(source, tmp_path) -> list[str]:
    return ["export", "--megatron-path", str(source), "--hf-path", str(tmp_path / "new" / "hf")]
