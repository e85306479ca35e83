"""The record of an item's place, as torch pickles it."""

import dataclasses

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("dcp_storage")
FILES = "torch.distributed.checkpoint.filesystem"


def test_torch_checkpoint_storage_info_has_expected_fields():
    found = [field.name for field in dataclasses.fields(CONTRACT.find(FILES, "_StorageInfo", type))]
    expected = ["relative_path", "offset", "length", "transform_descriptors"]
    if found != expected:
        CONTRACT.fail(FILES, f"_StorageInfo has the fields {found}, expected {expected}")
