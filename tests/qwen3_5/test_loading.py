"""A converted checkpoint loads into the model, every weight of it, in either format; by megatron-core too."""

from __future__ import annotations

from qwen3vl_bridge.checkpoint import import_checkpoint, verify_checkpoint
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.training.weight_loading import load_model, load_weights

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.model_load_save import load_megatron_model, save_megatron_model
from megatron.core import dist_checkpointing
from megatron.core.utils import unwrap_model


def weights(model: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model[0].named_parameters()}


@pytest.mark.parametrize("ckpt_format", ["fsdp_dtensor", "torch_dist"])
@pytest.mark.parametrize("kind", ["dense", "moe", "per expert"])
def test_every_weight_arrives(qwen3_5_folders, kind, ckpt_format, tmp_path):
    folder = qwen3_5_folders[kind]
    expected = weights(load_model(folder))
    assert any(".mtp." in name for name in expected) == (kind != "per expert")
    import_checkpoint(folder, tmp_path / "megatron", ckpt_format=ckpt_format)
    found = weights(load_model(folder, tmp_path / "megatron"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_megatron_core_loads_it_strictly(qwen3_5_folders, kind, tmp_path):
    model = load_model(qwen3_5_folders[kind])
    expected = weights(model)
    import_checkpoint(qwen3_5_folders[kind], tmp_path / "megatron", ckpt_format="torch_dist")
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.fill_(7)
    state = model[0].sharded_state_dict()
    loaded = dist_checkpointing.load(state, str(tmp_path / "megatron" / "iter_0000000"), strict="raise_unexpected")
    model[0].load_state_dict({name: loaded[name] for name in state})
    for name, tensor in weights(model).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_megatron_bridge_loads_it_and_what_it_saves_is_ours(qwen3_5_folders, kind, tmp_path):
    """With nothing but the checkpoint, by its `run_config.yaml`."""
    folder = qwen3_5_folders[kind]
    expected = weights(load_model(folder))
    import_checkpoint(folder, tmp_path / "megatron", ckpt_format="torch_dist")
    loaded = unwrap_model(load_megatron_model(str(tmp_path / "megatron" / "iter_0000000"), use_cpu_init=True))
    save_megatron_model(loaded, tmp_path / "saved")
    for found in (weights(loaded), weights(load_model(folder, tmp_path / "saved"))):
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert verify_checkpoint(folder, tmp_path / "saved").same


@pytest.mark.parametrize("ckpt_format", ["fsdp_dtensor", "torch_dist"])
def test_a_model_may_leave_multi_token_prediction_out(qwen3_5_folders, ckpt_format, tmp_path):
    folder = qwen3_5_folders["dense"]
    expected = weights(load_model(folder))
    import_checkpoint(folder, tmp_path / "megatron", ckpt_format=ckpt_format)
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    provider.mtp_num_layers = None
    provider.finalize()
    groups = initialize(provider, seed=0)
    model = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, pg_collection=groups, mixed_precision_wrapper=None
    )
    load_weights(tmp_path / "megatron", model, groups)
    found = weights(model)
    assert found.keys() == {name for name in expected if ".mtp." not in name}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
