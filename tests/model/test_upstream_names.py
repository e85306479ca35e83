"""What callers of Megatron-Bridge's own model read of it by name and place; and a step touches the device alone."""

import inspect
from types import SimpleNamespace

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.batch import ModelInputs
from qwen3vl_bridge.dist_train.modules import Qwen3VLVisionModule

import pytest
import torch
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_attr_wrapped_model, unwrap_model
from torch import nn

from tests.parity.batches import make_batch, make_samples
from tests.parity.conftest import make_pair
from tests.qwen3_5.tiny import make_checkpoint

from .inputs.support import no_grad

PARTS = ["freeze_language_model", "freeze_vision_model", "freeze_vision_projection"]


def test_names_that_are_read(pair):
    """Tokens are read by miles, `decoder` by verl and Megatron-Bridge's hooks, groups by megatron-core's inference."""
    model, groups = pair.megatron, pair.provider._pg_collection
    assert model.image_token_id == pair.config.image_token_id
    assert model.video_token_id == pair.config.video_token_id
    assert model.vision_start_token_id == pair.config.vision_start_token_id
    wrapped = SimpleNamespace(module=model)
    assert model.decoder is model.language_model.decoder is get_attr_wrapped_model(wrapped, "decoder")
    assert (model.cp_group, model.pp_group, model.tp_group) == (groups.cp, groups.pp, groups.tp)
    assert model.encoder_hidden_state is None
    model.set_input_tensor([None])  # as schedules do on the first stage
    assert model.encoder_hidden_state is None


def test_they_add_no_module_and_no_weight(pair):
    names = {name for name, _ in pair.megatron.named_children()}
    assert names == {"vision_model", "language_model"}
    assert all(name.split(".")[0] in names for name in pair.megatron.state_dict())


def test_it_packs_by_itself(pair):
    """NeMo-RL's question to any model but Megatron-Bridge's own, which it knows by its class."""
    chunks = unwrap_model([pair.megatron])
    assert any(bool(getattr(chunk, "model_owns_packing", False)) for chunk in chunks)
    others = ("model_slices_context_parallel_inputs", "model_owns_mtp_loss_mask_packing")
    assert not any(hasattr(pair.megatron, name) for name in others)
    assert "media_token_validity_mask" not in inspect.signature(pair.megatron.forward).parameters


@pytest.mark.parametrize("part", range(3))
def test_parts_are_frozen_by_place(untied_folder, part):
    by_place, by_name = (make_pair(untied_folder).megatron for _ in range(2))
    by_place.freeze(*[place == part for place in range(3)])
    by_name.freeze(**{PARTS[part]: True})
    frozen = [[p.requires_grad for p in model.parameters()] for model in (by_place, by_name)]
    assert frozen[0] == frozen[1] and len(set(frozen[0])) == 2
    assert list(inspect.signature(Qwen3VLVisionModule.freeze).parameters)[1:] == PARTS


def test_the_first_arguments_by_place(pair):
    """As Megatron-Bridge's model has them, whose forward takes a loss mask fifth."""
    parameters = list(inspect.signature(pair.megatron.forward).parameters)
    assert parameters[:5] == ["input_ids", "position_ids", "attention_mask", "labels", "loss_mask"]
    wrapped = inspect.signature(Float16Module.forward).parameters
    assert "fp32_output" in wrapped  # which NeMo-RL gives, and never reaches this model


@pytest.mark.parametrize("folder", ["untied_folder", "tied_folder"])
def test_a_value_models_head(folder, request):
    """The hook that verl has from Megatron-Bridge sets it on the outermost model, and the text model uses it."""
    from megatron.bridge.training.utils.train_utils import make_value_model

    pair = make_pair(request.getfixturevalue(folder))
    hidden = {}
    pair.megatron.decoder.register_forward_hook(lambda _, given, found: hidden.update(last=found))
    (model,) = make_value_model(pair.provider.hidden_size, sequence_parallel=False)([pair.megatron])
    ids = torch.arange(1, 13).view(2, 6)
    values = no_grad(model, ids)
    head = model.language_model.output_layer
    assert values.shape == (2, 6, 1) and head.out_features == 1
    assert torch.equal(values, head(hidden["last"])[0].transpose(0, 1))
    assert "language_model.output_layer.weight" in dict(model.named_parameters())
    assert {name for name, _ in model.named_children()} == {"vision_model", "language_model"}


def on_meta(model: nn.Module) -> nn.Module:
    """The model without its numbers; parameters keep what Megatron notes on them, and tied ones stay one."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in moved:
                moved[id(parameter)] = new = nn.Parameter(parameter.detach().to("meta"))
                vars(new).update(vars(parameter))
            if parameter is not None:
                module._parameters[name] = moved[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to("meta")
    return model


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5"])
def meta_pair(request, untied_folder, tmp_path_factory):
    is_old = request.param == "qwen3_vl"
    pair = make_pair(untied_folder if is_old else make_checkpoint(tmp_path_factory.mktemp("qwen3_5")))
    on_meta(pair.megatron)
    return pair


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("content", ["mixed", "image and video", "text only"])
def test_nothing_is_made_elsewhere_and_nothing_is_asked(meta_pair, content, packed, monkeypatch):
    equal = torch.equal  # megatron-core compares offsets, ours are one tensor: CUDA answers that without looking
    monkeypatch.setattr(torch, "equal", lambda a, b: a is b or equal(a, b))
    batch = make_batch(make_samples(content, meta_pair.config, seed=3), meta_pair.config, packed=packed)
    inputs: ModelInputs = batch.local().to("meta")
    meta_pair.megatron.zero_grad(set_to_none=True)
    losses = meta_pair.megatron(inputs=inputs)
    (losses * inputs.loss_mask).sum().backward()
    assert losses.device.type == "meta" and losses.shape == inputs.labels.shape
    assert {p.grad.device.type for p in meta_pair.megatron.parameters() if p.grad is not None} == {"meta"}
