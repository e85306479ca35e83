"""A loaded model has the names and values that Megatron-Bridge's own bridge of the family gives, tensor by tensor.

Its own model loads what we convert, strictly, and what it saves is loaded and exported by us.
"""

from __future__ import annotations

from pathlib import Path

from qwen3vl_bridge.checkpoint import export_checkpoint, import_checkpoint, verify_checkpoint
from qwen3vl_bridge.checkpoint.stored_models.hf_config import ModelConfig
from qwen3vl_bridge.training.checkpointing.model_loading import load_model
from qwen3vl_bridge.weights.names import local_name
from qwen3vl_bridge.weights.rows import expand

import pytest
import torch
from megatron.bridge.training.model_load_save import save_megatron_model
from megatron.core import dist_checkpointing
from safetensors.torch import load_file
from torch import nn

from .stock import build_stock, stock_values
from .test_conversion import check_same, weights

KINDS = ("dense", "moe", "3.6")


def names_of(folder: Path) -> list[str]:
    """Megatron's names of a folder's model, in Transformer Engine's spelling."""
    config = ModelConfig(folder)
    shapes = {name: tuple(one.shape) for name, one in load_file(folder / "model.safetensors").items()}
    return [row.megatron for row in expand(config.rows(config.expert_layout(shapes)), config.dimensions)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_megatron_bridges(qwen3_5_folders, kind):
    folder = qwen3_5_folders[kind]
    (model,) = load_model(folder)
    values, parameters = stock_values(folder, model, names_of(folder)), dict(model.named_parameters())
    assert values.keys() == parameters.keys()
    for name, value in values.items():
        assert torch.equal(value, parameters[name]), name


@pytest.fixture(scope="module", params=KINDS)
def stock(request, qwen3_5_folders) -> tuple[Path, nn.Module, dict[str, torch.Tensor]]:
    """A folder, Megatron-Bridge's own model of it, and the values that its mappings give."""
    folder = qwen3_5_folders[request.param]
    model = build_stock(folder)
    values = stock_values(folder, model, names_of(folder))
    assert values.keys() == dict(model.named_parameters()).keys()
    return folder, model, values


def test_it_loads_what_we_import(stock, tmp_path):
    """By megatron-core's loader, which takes no tensor more or less."""
    folder, model, values = stock
    import_checkpoint(folder, tmp_path / "megatron", ckpt_format="torch_dist")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    state = model.sharded_state_dict()
    loaded = dist_checkpointing.load(state, str(tmp_path / "megatron" / "iter_0000000"), strict="raise_unexpected")
    model.load_state_dict({name: loaded[name] for name in state})
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values[name]), name


def test_what_it_saves_is_ours(stock, tmp_path):
    """By its own saver: our loader fills our model with it, and our converter brings the folder's bytes back."""
    folder, model, values = stock
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    save_megatron_model([model], tmp_path / "saved")
    assert verify_checkpoint(folder, tmp_path / "saved").same
    export_checkpoint(tmp_path / "saved", tmp_path / "hf", hf_model=folder)
    check_same(weights(tmp_path / "hf"), weights(folder))
    (ours,) = load_model(folder, tmp_path / "saved")
    assert {local_name(name) for name in names_of(folder)} == dict(ours.named_parameters()).keys()
    assert all(torch.equal(parameter, values[name]) for name, parameter in ours.named_parameters())
