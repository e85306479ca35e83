"""`.metadata` and `.distcp` files that are damaged or hostile: CheckpointError, no code run, nothing else."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import zipfile

from qwen3vl_bridge.checkpoint import CheckpointError
from qwen3vl_bridge.checkpoint.formats.dcp_metadata import read_metadata
from qwen3vl_bridge.checkpoint.formats.dcp_reader import NotPlain, Tiling, find_payload, load_item
from qwen3vl_bridge.checkpoint.formats.tensors import Extent

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from ..support import TENSORS, read_everything


def test_everything_is_read(saved):
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
        Hostile(),
        {"x": Hostile()},
        print,
        os.system,
        eval,
        [1, {2: (3, 4)}],
        None,
        torch.nn.Linear(1, 1),
        ValueError("x"),
    ],
)
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
