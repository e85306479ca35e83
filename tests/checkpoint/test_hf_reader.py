"""Headers that lie are found out, and nothing but CheckpointError ever escapes the reader."""

from __future__ import annotations

import json
import struct

from qwen3vl_bridge.checkpoint import CheckpointError
from qwen3vl_bridge.checkpoint.hf_reader import INDEX, SINGLE, HFWeights
from qwen3vl_bridge.checkpoint.hf_writer import layout, write_index
from qwen3vl_bridge.checkpoint.pieces import Pieces, Zeros
from qwen3vl_bridge.checkpoint.plan import Task
from qwen3vl_bridge.checkpoint.tensors import TensorSpec

import pytest
import torch
from safetensors.torch import load_file

from .support import entry, file_of


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header of 0 bytes in a file of 0"),
        (b"\xff" * 8, "expected a whole safetensors file"),
        (struct.pack("<Q", 100) + b"{}", "header of 100 bytes in a file of 10"),
        (file_of("{"), "cannot be read as JSON"),
        (file_of("[" * 100_000), "cannot be read as JSON"),
        (file_of([]), "is a JSON list, expected an object"),
        (file_of('{"a":1,"a":2}'), "'a' occurs twice"),
        (file_of({"a": 1}), "tensor a: header entry 1"),
        (file_of({"a": entry(dtype="F3")}), "tensor a: dtype F3, expected one of"),
        (file_of({"a": entry(shape=(2, -3))}), "tensor a: shape [2, -3]"),
        (file_of({"a": entry(shape=(2, True))}), "expected numbers"),
        (file_of({"a": entry(offsets=(0, 24, 25))}), "3 offsets"),
        (file_of({"a": entry(offsets=(0, 20))}), "hold 20 bytes, expected 24 for F32 [2, 3]"),
        (file_of({"a": entry(offsets=(8, 32))}, 32), "tensor a: starts at byte"),
        (file_of({"a": entry(), "b": entry(offsets=(12, 36))}, 36), "tensor b: starts at byte"),
        (file_of({"a": entry()}, 23), "expected"),
        (file_of({"a": entry()}, 25), "expected"),
    ],
)
def test_a_header_that_lies(content, message, tmp_path):
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        HFWeights(tmp_path)
    assert message in str(error.value) and str(tmp_path / SINGLE) in str(error.value)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot be read as JSON"),
        ({}, "has no weight_map"),
        ({"weight_map": {"a": "../a.safetensors"}}, "tensor a names the file '../a.safetensors', which is outside"),
        ({"weight_map": {"a": "/etc/passwd"}}, "which is outside"),
        ({"weight_map": {"a": "x/../../a"}}, "which is outside"),
        ({"weight_map": {"a": 3}}, "names the file 3, expected a path inside"),
        ({"weight_map": {"a": "a\0b"}}, "expected a path inside"),
        ({"weight_map": {"a": "missing.safetensors"}}, "missing.safetensors: found nothing, expected a file"),
        ({"weight_map": {"a": "folder"}}, "folder: found something that is not a file"),
        ({"weight_map": {"a": "s", "b": "s"}}, "s lacks 1 tensors against model.safetensors.index.json: b"),
        ({"weight_map": {"b": "s"}}, "s lacks 1 tensors"),
        ('{"weight_map": {"a": "s", "a": "t"}}', "'a' occurs twice"),
        ({"weight_map": {"a": "s", "c": "t"}}, "t also holds 1 tensors against model.safetensors.index.json: a"),
    ],
)
def test_an_index_that_lies(index, message, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "s").write_bytes(file_of({"a": entry()}))
    (tmp_path / "t").write_bytes(file_of({"a": entry(), "c": entry(offsets=(24, 48))}, 48))
    (tmp_path / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    with pytest.raises(CheckpointError) as error:
        HFWeights(tmp_path)
    assert message in str(error.value)


def test_what_the_writer_writes_safetensors_reads(tmp_path):
    specs = [TensorSpec("b", "bfloat16", (3,)), TensorSpec("f", "float32", (2, 2)), TensorSpec("h", "float16", (5,))]
    tasks = [Task(spec, Pieces([Zeros(spec.numel)])) for spec in specs]
    files = layout(tasks, max_shard_bytes=22)
    for file in files:
        data = b"".join(segment if isinstance(segment, bytes) else bytes(len(segment)) for segment in file.segments)
        assert len(data) == file.nbytes
        (tmp_path / file.name).write_bytes(data)
    write_index(tmp_path, tasks, max_shard_bytes=22)
    found = [list(load_file(tmp_path / file.name)) for file in files]
    assert [sorted(names) for names in found] == [["b", "f"], ["h"]]
    read = {name: tensor for file in files for name, tensor in load_file(tmp_path / file.name).items()}
    assert {name: (str(t.dtype), tuple(t.shape)) for name, t in read.items()} == {
        spec.name: (f"torch.{spec.dtype}", spec.shape) for spec in specs
    }
    assert all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in read.values())
    assert dict(HFWeights(tmp_path).specs) == {spec.name: spec for spec in specs}
