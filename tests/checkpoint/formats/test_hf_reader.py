"""Headers that lie are found out, and nothing but CheckpointError ever escapes the reader."""

from __future__ import annotations

import json
import math
import struct

from qwen3vl_bridge.checkpoint import CheckpointError
from qwen3vl_bridge.checkpoint.conversion_plan import Task
from qwen3vl_bridge.checkpoint.formats.huggingface import INDEX, SINGLE, HFWeights, shard_files, write_index
from qwen3vl_bridge.checkpoint.formats.tensors import Segments, TensorSpec, Zeros

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ..support import entry, file_of


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
    tasks = [Task(spec, Segments([Zeros(spec.numel)])) for spec in specs]
    files = shard_files(tasks, max_shard_bytes=22)
    for file in files:
        data = b"".join(content if isinstance(content, bytes) else bytes(len(content)) for content in file.contents)
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


# What safetensors takes and this reader does not: which of two entries is meant, and dtypes that no weight has here.
_ONLY_THEIRS = ("occurs twice", "expected one of F64", "expected dtype, shape and data_offsets")
WHOLE = json.dumps({"a": entry()})[1:-1]


def both_take(content: bytes, folder) -> tuple[bool, str | None]:
    """Whether safetensors takes a file, and why this reader does not."""
    (folder / SINGLE).write_bytes(content)
    try:
        safetensors.deserialize(content)
        theirs = True
    except safetensors.SafetensorError:
        theirs = False
    try:
        HFWeights(folder)
    except CheckpointError as error:
        return theirs, str(error)
    return theirs, None


@pytest.mark.parametrize(
    ("header", "taken"),
    [
        (f"{{{WHOLE}}}".encode("utf-16-le"), False),
        (f"{{{WHOLE}}}".encode("utf-16"), False),
        (f"{{{WHOLE}}}".encode("utf-32"), False),
        (f"\ufeff{{{WHOLE}}}", False),
        (f'{{"__metadata__": [], {WHOLE}}}', False),
        (f'{{"__metadata__": [["a", "b"]], {WHOLE}}}', False),
        (f'{{"__metadata__": "x", {WHOLE}}}', False),
        (f'{{"__metadata__": {{"a": 1}}, {WHOLE}}}', False),
        (f'{{"__metadata__": {{"a": null}}, {WHOLE}}}', False),
        (f'{{"__metadata__": {{"a": "b"}}, {WHOLE}}}', True),
        (f'{{"__metadata__": null, {WHOLE}}}', True),
        (f'{{"__metadata__": {{"a": "\\udc00"}}, {WHOLE}}}', False),
        (WHOLE.join("{}").replace('"a"', '"\\ud800"'), False),
        (WHOLE.join("{}").replace('"a"', '"\\ud83d\\ude00"'), True),
        (WHOLE.join("{}").replace("[0, 24]", "[-0, 24]"), False),
        (WHOLE.join("{}").replace("[0, 24]", "[0, 24.0]"), False),
        (WHOLE.join("{}").replace("[0, 24]", '[0, 24], "x": ' + "9" * 300), True),
        (WHOLE.join("{}").replace("[0, 24]", '[0, 24], "x": ' + "9" * 400), False),
        (WHOLE.join("{}").replace("[0, 24]", '[0, 24], "x": 1e999'), False),
        (WHOLE.join("{}").replace("[0, 24]", '[0, 24], "x": NaN'), False),
        (WHOLE.join("{}").replace("[0, 24]", '[0, 24], "x": ' + "[" * 125 + "]" * 125), True),
        (WHOLE.join("{}").replace("[0, 24]", '[0, 24], "x": ' + "[" * 126 + "]" * 126), False),
        (json.dumps({"a": entry(shape=[1] * 70 + [6])}), True),
        (json.dumps({"a": entry(), "b": entry(shape=[2**40, 2**40, 0], offsets=(24, 24))}), False),
        (json.dumps({"a": entry(), "b": entry(shape=[0, 2**40, 2**40], offsets=(24, 24))}), True),
        (json.dumps({"a": entry(), "b": entry(shape=[0, 2**64 - 1], offsets=(24, 24))}), True),
        (json.dumps({"a": entry(), "b": entry(shape=[0, 2**64], offsets=(24, 24))}), False),
    ],
)
def test_a_header_is_taken_where_safetensors_takes_it(header, taken, tmp_path):
    theirs, refused = both_take(file_of(header), tmp_path)
    assert (theirs, refused is None) == (taken, taken), refused


PLAIN = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3)
VALUES = st.recursive(PLAIN, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=3))


@st.composite
def headers(draw) -> tuple[str, int]:
    """The text of a header that is right, or nearly, and the bytes behind it."""
    header, position = {}, 0
    for name in draw(st.lists(st.text(max_size=3), max_size=4, unique=True)):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        dtype, size = draw(st.sampled_from([("F32", 4), ("BF16", 2), ("U8", 1), ("F4", 1)]))
        end = position + math.prod(shape) * size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2) | VALUES)
    if header and draw(st.booleans()):
        changed = header[draw(st.sampled_from(sorted(header)))]
        if isinstance(changed, dict):
            changed[draw(st.sampled_from(["dtype", "shape", "data_offsets", "x"]))] = draw(VALUES)
    text = json.dumps(header, ensure_ascii=draw(st.booleans()))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        inserted = draw(st.sampled_from([*'{}[]",:0-1.e \n\t\x00\x01\ufeff\\', "\\u0000", "\\ud800", "null", "NaN"]))
        text = text[:at] + inserted + text[at + draw(st.integers(0, 1)) :]
    return text, position + draw(st.sampled_from([0] * 9 + [1]))


@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(headers())
def test_any_header_is_taken_where_safetensors_takes_it(tmp_path, made):
    text, payload = made
    data = text.encode("utf-8", "surrogatepass")
    theirs, refused = both_take(file_of(data, payload), tmp_path)
    assert theirs or refused is not None
    assert not theirs or refused is None or any(reason in refused for reason in _ONLY_THEIRS), refused
