"""Attributes and arguments of Megatron-Bridge's own model that callers use; a training step uses only its device."""

import copy
import inspect
import logging
from types import SimpleNamespace

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge import registry
from qwen3vl_bridge.core.batch import ModelInputs
from qwen3vl_bridge.dist_train.modules import Qwen3VLVisionModule
from qwen3vl_bridge.models.common import provider as provider_module
from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.core.distributed.finalize_model_grads import _get_shared_word_embedding_weight
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_attr_wrapped_model, unwrap_model
from torch import nn

from tests.helpers.batches import make_batch, make_samples
from tests.models.inputs.support import no_grad
from tests.models.qwen3_5.tiny import make_checkpoint
from tests.parity.conftest import make_pair

PARTS = ["freeze_language_model", "freeze_vision_model", "freeze_vision_projection"]


def test_model_has_attributes_that_frameworks_read(pair):
    """Callers: miles (token ids), verl and Megatron-Bridge's hooks (`decoder`), megatron-core's inference (groups)."""
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


def test_model_alias_attributes_register_no_further_submodule(pair):
    names = {name for name, _ in pair.megatron.named_children()}
    assert names == {"vision_model", "language_model"}
    assert all(name.split(".")[0] in names for name in pair.megatron.state_dict())


def test_model_and_provider_accept_attributes_that_frameworks_write(pair):
    """Megatron-Bridge's inference sets `decoder`; its recipes and examples set fields of the provider."""
    model, provider = pair.megatron, copy.deepcopy(pair.provider)
    names = dict(model.named_parameters(remove_duplicate=False)).keys()
    model.decoder = model.language_model.decoder
    assert dict(model.named_parameters(remove_duplicate=False)).keys() == names
    model.image_token_id = model.image_token_id
    provider.deepstack_visual_indexes, provider.language_max_sequence_length = [0], 99
    assert provider.deepstack_layers == (0,) and provider.vision_config.deepstack_visual_indexes == [0]
    assert pair.provider.deepstack_layers != (0,) and provider.seq_length == pair.provider.seq_length
    with pytest.raises(ValueError, match="hf_text_config is read-only"):
        provider.hf_text_config = provider.hf_text_config


def test_shared_embedding_weight_of_untied_model_is_weight_of_text_model(pair):
    model = pair.megatron
    weight = model.shared_embedding_or_output_weight()
    assert weight is model.language_model.shared_embedding_or_output_weight() is not None


def test_shared_embedding_weight_of_untied_model_with_mtp_is_none(tmp_path):
    """megatron-core adds up gradients of the returned weights over the first and last stage of a model with MTP."""
    model = make_pair(make_checkpoint(tmp_path, mtp=ExpertLayout.INPUT_MAJOR)).megatron
    assert model.config.mtp_num_layers and not model.share_embeddings_and_output_weights
    assert _get_shared_word_embedding_weight(model, model.config) is None


def test_forward_raises_if_fp32_output_is_set_for_unwrapped_bfloat16_model(pair):
    """NeMo-RL's `defer_fp32_logits` and AReaL pass it to float32 models, which have no Float16Module."""
    ids = torch.arange(1, 13).view(2, 6)
    expected = no_grad(pair.megatron, ids)
    for fp32_output in (False, True):
        assert torch.equal(no_grad(pair.megatron, ids, fp32_output=fp32_output), expected)
    pair.megatron.config.params_dtype = torch.bfloat16
    try:
        with pytest.raises(ValueError, match=r"fp32_output is True for a model in torch\.bfloat16"):
            pair.megatron(ids, fp32_output=True)
    finally:
        pair.megatron.config.params_dtype = torch.float32


def test_building_two_models_warns_once_about_our_model_class(untied_folder, caplog):
    provider_module._log_model_class.cache_clear()
    with caplog.at_level(logging.WARNING, "qwen3vl_bridge"):
        make_pair(untied_folder)
        make_pair(untied_folder)
    said = [record for record in caplog.records if "of qwen3vl_bridge, not Megatron-Bridge's" in record.message]
    assert [record.message.split()[3] for record in said] == ["Qwen3VLModel"]
    assert said[0].levelno == logging.WARNING  # which frameworks show without being asked


def test_model_has_attribute_model_owns_packing_for_nemo_rl(pair):
    """NeMo-RL reads the attribute of every model except Megatron-Bridge's own."""
    chunks = unwrap_model([pair.megatron])
    assert any(bool(getattr(chunk, "model_owns_packing", False)) for chunk in chunks)
    others = ("model_slices_context_parallel_inputs", "model_owns_mtp_loss_mask_packing")
    assert not any(hasattr(pair.megatron, name) for name in others)
    assert "media_token_validity_mask" not in inspect.signature(pair.megatron.forward).parameters


@pytest.mark.parametrize("part", range(3))
def test_freeze_accepts_positional_arguments(untied_folder, part):
    by_place, by_name = (make_pair(untied_folder).megatron for _ in range(2))
    by_place.freeze(*[place == part for place in range(3)])
    by_name.freeze(**{PARTS[part]: True})
    frozen = [[p.requires_grad for p in model.parameters()] for model in (by_place, by_name)]
    assert frozen[0] == frozen[1] and len(set(frozen[0])) == 2
    assert list(inspect.signature(Qwen3VLVisionModule.freeze).parameters)[1:] == PARTS


def test_forward_has_argument_order_of_megatron_bridge_model(pair):
    """The fifth argument of Megatron-Bridge's forward is the loss mask."""
    parameters = list(inspect.signature(pair.megatron.forward).parameters)
    assert parameters[:5] == ["input_ids", "position_ids", "attention_mask", "labels", "loss_mask"]
    assert "fp32_output" in inspect.signature(Float16Module.forward).parameters


@pytest.mark.parametrize("folder", ["untied_folder", "tied_folder"])
def test_make_value_model_hook_replaces_output_layer_of_text_model(folder, request):
    """Verl uses Megatron-Bridge's hook, which sets the head on the outermost model."""
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
    """Move a model to the meta device, with Megatron's attributes of parameters and with tied parameters."""
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


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("content", ["mixed", "image and video", "text only"])
def test_model_on_meta_device_uses_no_other_device(meta_pair, content, packed, monkeypatch):
    equal = torch.equal  # megatron-core compares offsets, ours are one tensor: CUDA answers that without looking
    monkeypatch.setattr(torch, "equal", lambda a, b: a is b or equal(a, b))
    batch = make_batch(make_samples(content, meta_pair.config, seed=3), meta_pair.config, packed=packed)
    inputs: ModelInputs = batch.local().to("meta")
    meta_pair.megatron.zero_grad(set_to_none=True)
    losses = meta_pair.megatron(inputs=inputs)
    (losses * inputs.loss_mask).sum().backward()
    assert losses.device.type == "meta" and losses.shape == inputs.labels.shape
    assert {p.grad.device.type for p in meta_pair.megatron.parameters() if p.grad is not None} == {"meta"}


@pytest.mark.parametrize("name", ["gated_delta_net", "gdn"])
def test_finalize_accepts_old_and_new_name_of_gated_delta_net(name):
    """megatron-core 0.20 renamed it. A saved run has the name of the release that wrote it."""
    config = registry.family("qwen3_5").presets.hf_config("0.8B")
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    provider.experimental_attention_variant = name
    provider.finalize()
    provider.finalize()  # as completed by the first
    assert provider.experimental_attention_variant == type(provider).experimental_attention_variant
    provider.experimental_attention_variant = "dsa"
    with pytest.raises(ValueError, match="experimental_attention_variant is 'dsa', expected"):
        provider.finalize()
