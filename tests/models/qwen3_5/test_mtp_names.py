"""Names of multi-token prediction in `fsdp_dtensor` checkpoints of different megatron-core releases."""

from qwen3vl_bridge.checkpoint import import_checkpoint
from qwen3vl_bridge.checkpoint.formats.dcp import DcpMetadata, read_metadata
from qwen3vl_bridge.checkpoint.formats.megatron import model_keys
from qwen3vl_bridge.training import weight_loading
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.weights.rows import with_former_mtp_name, without_former_mtp_name

import pytest
import torch
from megatron.bridge import AutoBridge

SECTION, WRAPPER = "model.", "module."


@pytest.fixture(scope="module")
def provider(qwen3_5_folders):
    provider = AutoBridge.from_hf_pretrained(str(qwen3_5_folders["moe"])).to_megatron_provider(load_weights=False)
    provider.finalize()
    initialize(provider, seed=0)
    return provider


def stored_names(provider) -> list[str]:
    rows = {row.megatron: row for row in weight_loading.rows_by_name(provider).values()}.values()
    return [WRAPPER + name for row in rows for name in row.stored_names]


@pytest.mark.parametrize("asked", ["former", "present"])
@pytest.mark.parametrize("stored", ["former", "present"])
def test_find_renamed_weights_matches_former_and_present_mtp_names(provider, asked, stored):
    spell = {"former": with_former_mtp_name, "present": str}
    names = stored_names(provider)
    weights = {spell[asked](name): torch.full((1,), float(number)) for number, name in enumerate(names)}
    found = {SECTION + spell[stored](name): None for name in names}
    renamed, problems = weight_loading.find_renamed_weights(weights, found, provider)
    of_mtp = [name for name in names if ".mtp_model_layer." in name]
    assert of_mtp and problems == []
    assert set(renamed) == (set() if asked == stored else {spell[stored](name) for name in of_mtp})
    assert all(renamed[spell[stored](name)] is weights[spell[asked](name)] for name in of_mtp if renamed)


def test_model_keys_translates_former_mtp_names_of_checkpoint(qwen3_5_folders, tmp_path):
    import_checkpoint(qwen3_5_folders["moe"], tmp_path / "megatron", progress=False)
    metadata = read_metadata(tmp_path / "megatron" / "iter_0000000")
    former = DcpMetadata(
        metadata.folder, {with_former_mtp_name(key): one for key, one in metadata.tensors.items()}, metadata.byte_items
    )
    assert model_keys(former).keys() == model_keys(metadata).keys()
    assert {without_former_mtp_name(key) for key in model_keys(former).values()} == set(model_keys(metadata).values())
