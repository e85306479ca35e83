"""Files that are damaged, hostile or random bytes: readers raise CheckpointError, run no code, and do nothing else."""

import contextlib
import io
import itertools
import json
import math
import os
import pickle
import struct
import zipfile

from qwen3vl_bridge.checkpoint import CheckpointError
from qwen3vl_bridge.checkpoint.conversion_plan import Task
from qwen3vl_bridge.checkpoint.formats.dcp_metadata import read_metadata
from qwen3vl_bridge.checkpoint.formats.dcp_reader import NotPlain, Tiling, find_payload, load_item
from qwen3vl_bridge.checkpoint.formats.huggingface import INDEX, SINGLE, HFWeights, shard_files, write_index
from qwen3vl_bridge.checkpoint.formats.tensors import Extent, Segments, TensorSpec, Zeros

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from ..support import TENSORS, entry, file_of, read_everything


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header of 0 bytes in a file of 0"), (b"\xff" * 8, "expected a whole safetensors file"),
        (struct.pack("<Q", 100) + b"{}", "header of 100 bytes in a file of 10"),
        (file_of("{"), "cannot be read as JSON"), (file_of("[" * 100_000), "cannot be read as JSON"),
        (file_of([]), "is a JSON list, expected an object"), (file_of('{"a":1,"a":2}'), "'a' occurs twice"),
        (file_of({"a": 1}), "tensor a: header entry 1"),
        (file_of({"a": entry(dtype="F3")}), "tensor a: dtype F3, expected one of"),
        (file_of({"a": entry(shape=(2, -3))}), "tensor a: shape [2, -3]"),
        (file_of({"a": entry(shape=(2, True))}), "expected numbers"),
        (file_of({"a": entry(offsets=(0, 24, 25))}), "3 offsets"),
        (file_of({"a": entry(offsets=(0, 20))}), "hold 20 bytes, expected 24 for F32 [2, 3]"),
        (file_of({"a": entry(offsets=(8, 32))}, 32), "tensor a: starts at byte"),
        (file_of({"a": entry(), "b": entry(offsets=(12, 36))}, 36), "tensor b: starts at byte"),
        (file_of({"a": entry()}, 23), "expected"), (file_of({"a": entry()}, 25), "expected"),
    ],
)  # fmt: skip
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
        (f"{{{WHOLE}}}".encode("utf-16-le"), False), (f"{{{WHOLE}}}".encode("utf-16"), False),
        (f"{{{WHOLE}}}".encode("utf-32"), False), (f"\ufeff{{{WHOLE}}}", False),
        (f'{{"__metadata__": [], {WHOLE}}}', False), (f'{{"__metadata__": [["a", "b"]], {WHOLE}}}', False),
        (f'{{"__metadata__": "x", {WHOLE}}}', False), (f'{{"__metadata__": {{"a": 1}}, {WHOLE}}}', False),
        (f'{{"__metadata__": {{"a": null}}, {WHOLE}}}', False), (f'{{"__metadata__": {{"a": "b"}}, {WHOLE}}}', True),
        (f'{{"__metadata__": null, {WHOLE}}}', True), (f'{{"__metadata__": {{"a": "\\udc00"}}, {WHOLE}}}', False),
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
)  # fmt: skip
def test_a_header_is_taken_where_safetensors_takes_it(header, taken, tmp_path):
    theirs, refused = both_take(file_of(header), tmp_path)
    assert (theirs, refused is None) == (taken, taken), refused


PLAIN = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3)
VALUES = st.recursive(PLAIN, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=3))


@st.composite
def headers(draw) -> tuple[str, int]:
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


def test_all_that_torch_writes_is_read(saved):
    found = read_everything(saved)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert set(read_metadata(saved).byte_items) == {"x", "n"}


def test_bytes_are_found_without_loading_unless_transposed(saved):
    tensors = read_metadata(saved).tensors
    for name in TENSORS:
        spec, (chunk,) = tensors[name]
        if name == "t":
            with pytest.raises(NotPlain):
                find_payload(chunk.item, spec.dtype, spec.shape, name)
        else:
            assert find_payload(chunk.item, spec.dtype, spec.shape, name).length == spec.nbytes


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize(
    "value",
    [
        Hostile(), {"x": Hostile()}, print, os.system, eval, [1, {2: (3, 4)}], None, torch.nn.Linear(1, 1),
        ValueError("x"),
    ],
)  # fmt: skip
def test_other_pickles_are_refused_without_running_anything(value, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises(CheckpointError):
        read_metadata(folder)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "is empty"),
        (b"\x80\x04]", "is truncated"),
        (b"\x80\x04r\xff\xff\xff\x7f.", ""),  # a memo index that asks for 16 GB of C memory
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fx.", ""),  # a string longer than memory
        (b"ctorch\nSize\n}X\x01\x00\x00\x00aK\x01sb.", ""),  # sets an attribute of one of our functions
        (b"cposix\nsystem\n(S'true'\ntR.", ""),
        (b"(S'true'\niposix\nsystem\n.", ""),
        (b"\x82\x01.", ""),
        (b"P0\n.", ""),
    ],
)
def test_hostile_instructions_are_refused(data, part, folder):
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match=part):
        read_metadata(folder)


def test_a_small_item_does_not_unpack_to_a_large_one(tmp_path):
    """The whole of a part is unpacked by torch before its length is looked at: 18 MB took 4.5 GiB."""
    plain, packed = io.BytesIO(), tmp_path / "__0_0.distcp"
    torch.save(torch.zeros(4, 4).T, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, bytes(1 << 24) if name.endswith("/data/0") else source.read(name))
    item = Extent(packed, 0, packed.stat().st_size)
    assert item.length < 1 << 16
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp, x: the item at byte 0 cannot be read: it is compressed"):
        load_item(item, "float32", (4, 4), "x")
    packed.write_bytes(plain.getvalue())
    assert len(load_item(Extent(packed, 0, len(plain.getvalue())), "float32", (4, 4), "x")) == 64


def changed(folder, change) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _info(metadata, key="a"):
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


def _second_chunk(metadata):
    metadata.state_dict_metadata["a"].chunks.append(ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([1, 4])))


def _fewer_rows(metadata):
    metadata.state_dict_metadata["a"].chunks[0].sizes = torch.Size([2, 4])


def _other_dtype(metadata):
    metadata.state_dict_metadata["a"].properties.dtype = torch.int32


def _no_place(metadata):
    metadata.storage_data = {i: info for i, info in metadata.storage_data.items() if i.fqn != "a"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(_info(m), "relative_path", "../x.distcp"), "outside"),
        (lambda m: setattr(_info(m), "relative_path", "/etc/passwd"), "outside"),
        (lambda m: setattr(_info(m), "relative_path", "y.distcp"), "found nothing, expected a file"),
        (lambda m: setattr(_info(m), "relative_path", 7), "found int, expected str"),
        (lambda m: setattr(_info(m), "length", 10**9), "bytes, expected"),
        (lambda m: setattr(_info(m), "length", 20), "expected room for float32"),
        (lambda m: setattr(_info(m), "offset", -1), "whole numbers"),
        (lambda m: setattr(_info(m), "offset", _info(m).offset + 1), "a"),
        (lambda m: setattr(_info(m), "transform_descriptors", ["zstd"]), "one that is transformed"),
        (lambda m: setattr(m, "storage_data", None), "found NoneType, expected dict"),
        (lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size([4, 4])), "12 elements in chunks, expected"),
        (lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size([12])), "expected one inside"),
        (lambda m: setattr(m.state_dict_metadata["a"], "chunks", []), "0 elements in chunks, expected 12"),
        (_second_chunk, "element 0 is in two chunks"),
        (_fewer_rows, "8 elements in chunks, expected 12"),
        (_other_dtype, "expected [3, 4] int32 by the metadata"),
        (_no_place, "expected _StorageInfo"),
        (lambda m: m.storage_data.update({MetadataIndex("zz"): 3}), ""),
    ],
)
def test_metadata_that_lies(change, message, folder):
    changed(folder, change)
    if not message:  # nobody needs the entry
        read_everything(folder)
        return
    with pytest.raises(CheckpointError) as error:
        read_everything(folder)
    assert message in str(error.value) and str(folder) in str(error.value)


@settings(deadline=None)
@given(
    cuts=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=3, max_size=3),
    span=st.tuples(st.integers(0, 60), st.integers(0, 60)),
)
def test_boxes_of_any_grid_are_every_element_once(cuts, span):
    shape = (5, 4, 3)
    tensor = torch.arange(60).reshape(shape)
    edges = [[0, *sorted({c for c in cut if c < n}), n] for cut, n in zip(cuts, shape, strict=True)]
    grid = [[(a, b - a) for a, b in itertools.pairwise(e) if b > a] for e in edges]
    boxes = [tuple(zip(x, y, z, strict=True)) for x in grid[0] for y in grid[1] for z in grid[2]]
    tiling = Tiling(shape, boxes)
    low, high = sorted(span)
    found = []
    for block in tiling.blocks(low, high - low):
        offsets, sizes = boxes[block.box]
        box = tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].flatten()
        assert block.start == low + len(found)
        found += box[block.first : block.first + block.length].tolist()
    assert found == list(range(low, high))
    whole = sum(block.length for block in tiling.blocks(0, 60))
    assert whole == 60
    for broken, message in ((boxes[1:], "elements in chunks"), ([*boxes, boxes[0]], "in two chunks")):
        with pytest.raises(ValueError, match=message):
            Tiling(shape, broken)


FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@FUZZ
@given(content=st.binary(max_size=200))
def test_any_file(content, tmp_path):
    (tmp_path / SINGLE).write_bytes(content)
    with contextlib.suppress(CheckpointError):
        HFWeights(tmp_path)


@FUZZ
@given(index=st.dictionaries(st.sampled_from(["weight_map", "metadata"]), JSON))
def test_any_index(index, tmp_path):
    (tmp_path / INDEX).write_text(json.dumps(index))
    with contextlib.suppress(CheckpointError):
        HFWeights(tmp_path)


def damaged(data: bytes, where: list[tuple[float, int]], keep: float) -> bytes:
    changed = bytearray(data[: max(1, round(len(data) * keep))])
    for place, value in where:
        changed[min(int(place * len(changed)), len(changed) - 1)] = value
    return bytes(changed)


DAMAGE = {
    "where": st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=6),
    "keep": st.just(1.0) | st.floats(0, 1),
}


@FUZZ
@given(**DAMAGE)
def test_any_damage_to_the_metadata(where, keep, folder, saved):
    (folder / ".metadata").write_bytes(damaged((saved / ".metadata").read_bytes(), where, keep))
    with contextlib.suppress(CheckpointError):
        read_everything(folder)


@FUZZ
@given(**DAMAGE)
def test_any_damage_to_the_data(where, keep, folder, saved):
    (folder / "__0_0.distcp").write_bytes(damaged((saved / "__0_0.distcp").read_bytes(), where, keep))
    with contextlib.suppress(CheckpointError):
        read_everything(folder)


@FUZZ
@given(data=st.binary(max_size=60))
def test_any_metadata(data, folder):
    (folder / ".metadata").write_bytes(b"\x80\x04" + data)
    with contextlib.suppress(CheckpointError):
        read_everything(folder)
