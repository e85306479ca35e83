"""Readers of damaged, malicious or random files raise only CheckpointError, and run no code."""

import contextlib
import io
import itertools
import json
import os
import pickle
import struct
import zipfile

from qwen3vl_bridge.checkpoint import CheckpointError
from qwen3vl_bridge.checkpoint.conversion_plan import Task
from qwen3vl_bridge.checkpoint.formats.dcp import ChunkIndex, find_payload, read_metadata
from qwen3vl_bridge.checkpoint.formats.huggingface import (
    INDEX,
    SINGLE,
    HFWeights,
    plan_file,
    split_into_shards,
    write_index,
)
from qwen3vl_bridge.checkpoint.formats.tensors import ByteRange, SliceList, TensorSpec, ZeroSlice

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from tests.checkpoint.support import TENSORS, entry, file_of, read_everything


@pytest.mark.parametrize("content", [
    b"", b"\xff" * 8, struct.pack("<Q", 100) + b"{}", file_of("{"), file_of("[" * 100_000), file_of([]),
    file_of({"a": 1}), file_of({"a": entry(dtype="F3")}), file_of({"a": entry(dtype="F4", shape=(48,))}),
    file_of({"a": entry(shape=(2, -3))}), file_of({"a": entry(shape=(2, True))}),
    file_of({"a": entry(offsets=(0, 24, 25))}), file_of({"a": entry(offsets=(0, 20))}),
    file_of({"a": entry(offsets=(8, 32))}, 32), file_of({"a": entry(), "b": entry(offsets=(12, 36))}, 36),
    file_of({"a": entry()}, 23), file_of({"a": entry()}, 25), file_of('{"__metadata__": [], "a": 1}'),
    file_of(f'{{"a": {json.dumps(entry())}, "a": {json.dumps(entry())}}}'),
    file_of(json.dumps({"a": entry()}).encode("utf-16")), file_of(json.dumps({"\ud800": entry()})),
])  # fmt: skip
def test_hf_weights_raises_if_safetensors_header_is_invalid(content, tmp_path):
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{tmp_path / SINGLE}.*expected"):
        HFWeights(tmp_path)


@pytest.mark.parametrize(("index", "message"), [
    ("{", "cannot be read as JSON"), ({}, "has no weight_map"),
    ({"weight_map": {"a": "../a.safetensors"}}, "tensor a names the file '../a.safetensors', which is outside"),
    ({"weight_map": {"a": "/etc/passwd"}}, "which is outside"),
    ({"weight_map": {"a": "x/../../a"}}, "which is outside"),
    ({"weight_map": {"a": 3}}, "names the file 3, expected a path inside"),
    ({"weight_map": {"a": "a\0b"}}, "expected a path inside"),
    ({"weight_map": {"a": "missing.safetensors"}}, "missing.safetensors: found nothing, expected a file"),
    ({"weight_map": {"a": "folder"}}, "folder: found something that is not a file"),
    ({"weight_map": {"a": "s", "b": "s"}}, "s lacks 1 tensors that model.safetensors.index.json lists for it: b"),
    ({"weight_map": {"b": "s"}}, "s lacks 1 tensors"),
    ('{"weight_map": {"a": "s", "a": "t"}}', "'a' occurs twice"),
    ({"weight_map": {"a": "s", "c": "t"}}, "t holds 1 tensors that model.safetensors.index.json does not list for"),
])  # fmt: skip
def test_hf_weights_raises_if_safetensors_index_is_invalid(index, message, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "s").write_bytes(file_of({"a": entry()}))
    (tmp_path / "t").write_bytes(file_of({"a": entry(), "c": entry(offsets=(24, 48))}, 48))
    (tmp_path / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    with pytest.raises(CheckpointError) as error:
        HFWeights(tmp_path)
    assert message in str(error.value)


def test_planned_safetensors_files_load_with_safetensors_library(tmp_path):
    specs = [TensorSpec("b", "bfloat16", (3,)), TensorSpec("f", "float32", (2, 2)), TensorSpec("h", "float16", (5,))]
    tasks = [Task(spec, SliceList([ZeroSlice(spec.numel)])) for spec in specs]
    files = [plan_file(name, part) for name, part in split_into_shards(tasks, max_shard_bytes=22).items()]
    for file in files:
        data = b"".join(content if isinstance(content, bytes) else bytes(len(content)) for content in file.contents)
        assert len(data) == file.nbytes
        (tmp_path / file.name).write_bytes(data)
    write_index(tmp_path, split_into_shards(tasks, max_shard_bytes=22))
    found = [list(load_file(tmp_path / file.name)) for file in files]
    assert [sorted(names) for names in found] == [["b", "f"], ["h"]]
    read = {name: tensor for file in files for name, tensor in load_file(tmp_path / file.name).items()}
    assert {name: (str(t.dtype), tuple(t.shape)) for name, t in read.items()} == {
        spec.name: (f"torch.{spec.dtype}", spec.shape) for spec in specs
    }
    assert all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in read.values())
    assert dict(HFWeights(tmp_path).specs) == {spec.name: spec for spec in specs}


def test_dcp_tensors_reads_checkpoint_of_torch_distributed(saved):
    found = read_everything(saved)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert set(read_metadata(saved).byte_items) == {"x", "n"}


def test_dcp_tensors_raises_if_stored_tensor_is_not_contiguous(tmp_path):
    dcp.save({"t": torch.arange(6.0).reshape(2, 3).T}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp, t: .*found strides \(1, 3\), expected a contiguous"):
        read_everything(tmp_path)


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize("value", [
    Hostile(), {"x": Hostile()}, print, os.system, eval, [1, {2: (3, 4)}], None, torch.nn.Linear(1, 1), ValueError("x"),
])  # fmt: skip
def test_read_metadata_raises_without_running_code_of_unexpected_pickle(value, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises(CheckpointError):
        read_metadata(folder)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(("data", "part"), [
    (b"", "is empty"),
    (b"\x80\x04]", "is truncated"),
    (b"\x80\x04r\xff\xff\xff\x7f.", ""),  # a memo index that asks for 16 GB of C memory
    (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fx.", ""),  # a string longer than memory
    (b"ctorch\nSize\n}X\x01\x00\x00\x00aK\x01sb.", ""),  # sets an attribute of one of our functions
    (b"cposix\nsystem\n(S'true'\ntR.", ""),
    (b"(S'true'\niposix\nsystem\n.", ""),
    (b"\x82\x01.", ""),
    (b"P0\n.", ""),
])  # fmt: skip
def test_read_metadata_raises_if_pickle_opcodes_are_malicious(data, part, folder):
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match=part):
        read_metadata(folder)


def test_find_payload_raises_if_tensor_in_distcp_file_is_compressed(tmp_path):
    """18 MB may unpack to 4.5 GiB."""
    plain, packed = io.BytesIO(), tmp_path / "__0_0.distcp"
    torch.save(torch.zeros(4, 4), plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp, x: the item at byte 0 cannot be read: it is compressed"):
        find_payload(ByteRange(packed, 0, packed.stat().st_size), "float32", (4, 4), "x")
    packed.write_bytes(plain.getvalue())
    assert find_payload(ByteRange(packed, 0, len(plain.getvalue())), "float32", (4, 4), "x").length == 64


@pytest.mark.parametrize("value", [Hostile(), 3])
def test_find_payload_raises_without_running_code_of_non_tensor_pickle(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(value, tmp_path / "item")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/item, a: the item at byte 0 cannot be read: "):
        find_payload(ByteRange(tmp_path / "item", 0, (tmp_path / "item").stat().st_size), "float32", (3,), "a")
    assert not (tmp_path / "pwned").exists()


def changed(folder, change) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _info(metadata, key="a"):
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


def _second_chunk(metadata):
    metadata.state_dict_metadata["a"].chunks.append(ChunkStorageMetadata(torch.Size([1, 0]), torch.Size([1, 4])))
    metadata.storage_data[MetadataIndex("a", torch.Size([1, 0]))] = _info(metadata, "x")


def _fewer_rows(metadata):
    metadata.state_dict_metadata["a"].chunks[0].sizes = torch.Size([2, 4])


def _other_dtype(metadata):
    metadata.state_dict_metadata["a"].properties.dtype = torch.int32


def _no_place(metadata):
    metadata.storage_data = {i: info for i, info in metadata.storage_data.items() if i.fqn != "a"}


@pytest.mark.parametrize(("change", "message"), [
    (lambda m: setattr(_info(m), "relative_path", "../x.distcp"), "outside"),
    (lambda m: setattr(_info(m), "relative_path", "/etc/passwd"), "outside"),
    (lambda m: setattr(_info(m), "relative_path", "y.distcp"), "found nothing, expected a file"),
    (lambda m: setattr(_info(m), "relative_path", 7), "found int, expected str"),
    (lambda m: setattr(_info(m), "length", 10**9), "bytes, expected"),
    (lambda m: setattr(_info(m), "length", 20), "expected enough bytes for float32"),
    (lambda m: setattr(_info(m), "offset", -1), "whole numbers"),
    (lambda m: setattr(_info(m), "offset", _info(m).offset + 1), "a"),
    (lambda m: setattr(_info(m), "transform_descriptors", ["zstd"]), "an item with transforms"),
    (lambda m: setattr(m, "storage_data", None), "found NoneType, expected dict"),
    (lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size([4, 4])), "element 12 is in no chunk"),
    (lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size([12])), "expected a chunk inside"),
    (lambda m: setattr(m.state_dict_metadata["a"], "chunks", []), "element 0 is in no chunk"),
    (_second_chunk, "element 4 is in two chunks"), (_fewer_rows, "expected [2, 4] float32 as in the metadata"),
    (_other_dtype, "expected [3, 4] int32 as in the metadata"), (_no_place, "expected _StorageInfo"),
    (lambda m: m.storage_data.update({MetadataIndex("zz"): 3}), ""),
])  # fmt: skip
def test_dcp_tensors_raises_if_metadata_contradicts_files(change, message, folder):
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
def test_chunk_index_find_yields_each_element_of_range_once(cuts, span):
    shape = (5, 4, 3)
    tensor = torch.arange(60).reshape(shape)
    edges = [[0, *sorted({c for c in cut if c < n}), n] for cut, n in zip(cuts, shape, strict=True)]
    grid = [[(a, b - a) for a, b in itertools.pairwise(e) if b > a] for e in edges]
    boxes = [tuple(zip(x, y, z, strict=True)) for x in grid[0] for y in grid[1] for z in grid[2]]
    tiling = ChunkIndex(shape, boxes)
    low, high = sorted(span)
    found = []
    for block in tiling.find(low, high - low):
        offsets, sizes = boxes[block.chunk]
        box = tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].flatten()
        assert block.start == low + len(found)
        found += box[block.first : block.first + block.length].tolist()
    assert found == list(range(low, high))
    whole = sum(block.length for block in tiling.find(0, 60))
    assert whole == 60
    for broken in (boxes[1:], [*boxes, boxes[0]]):
        blocks = ChunkIndex(shape, broken).find(0, 60)
        assert [i for block in blocks for i in range(block.start, block.start + block.length)] != list(range(60))


FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@FUZZ
@given(content=st.binary(max_size=200))
def test_hf_weights_raises_only_checkpoint_error_for_random_file(content, tmp_path):
    (tmp_path / SINGLE).write_bytes(content)
    with contextlib.suppress(CheckpointError):
        HFWeights(tmp_path)


@pytest.mark.slow
@FUZZ
@given(index=st.dictionaries(st.sampled_from(["weight_map", "metadata"]), JSON))
def test_hf_weights_raises_only_checkpoint_error_for_random_index(index, tmp_path):
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
def test_read_metadata_raises_only_checkpoint_error_for_damaged_file(where, keep, folder, saved):
    (folder / ".metadata").write_bytes(damaged((saved / ".metadata").read_bytes(), where, keep))
    with contextlib.suppress(CheckpointError):
        read_everything(folder)


@FUZZ
@given(**DAMAGE)
def test_dcp_tensors_raises_only_checkpoint_error_for_damaged_file(where, keep, folder, saved):
    (folder / "__0_0.distcp").write_bytes(damaged((saved / "__0_0.distcp").read_bytes(), where, keep))
    with contextlib.suppress(CheckpointError):
        read_everything(folder)


@FUZZ
@given(data=st.binary(max_size=60))
def test_read_metadata_raises_only_checkpoint_error_for_random_pickle(data, folder):
    (folder / ".metadata").write_bytes(b"\x80\x04" + data)
    with contextlib.suppress(CheckpointError):
        read_everything(folder)
