"""Hooks that frameworks run on a model before it is wrapped, made for text models: they find the text model in ours.

Megatron-Bridge has `freeze_moe_router` and `create_value_head_hook`, which verl registers for its options of these
names; NeMo-RL has a `freeze_moe_router` of its own.
"""

from types import SimpleNamespace

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.training.process_groups import initialize

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.utils.train_utils import create_value_head_hook, freeze_moe_router
from megatron.core.process_groups_config import ProcessGroupCollection

from tests.helpers.batches import make_batch, make_samples
from tests.parity.conftest import build

OVERLAP = dict(overlap_p2p_comm=True, batch_p2p_comm=False, variable_seq_lengths=True)
SPLITS = {
    "one stage": ({}, [(0, None)]),
    "two stages": (dict(pipeline_model_parallel_size=2, variable_seq_lengths=True), [(0, None), (1, None)]),
    "two stages of two chunks": (
        dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, **OVERLAP),
        [(0, 0), (0, 1), (1, 0), (1, 1)],
    ),
}


def nemo_rls_freeze_moe_router(model):
    """As NeMo-RL's, which knows wrappers of text models by the name of what they wrap."""
    for chunk in model if isinstance(model, list) else [model]:
        text = chunk.language_model if hasattr(chunk, "language_model") else chunk
        for layer in text.decoder.layers:
            if hasattr(layer, "mlp") and hasattr(layer.mlp, "router"):
                layer.mlp.router.weight.requires_grad = False


def stages(folder, fields, parts):
    """The parts of a model that is split over stages, without memory."""
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    provider.init_model_with_meta_device = True
    initialize(provider, seed=0)
    for name, value in fields.items():
        setattr(provider, name, value)
    provider.finalize()
    provider._pg_collection, count = ProcessGroupCollection.use_mpu_process_groups(), len({rank for rank, _ in parts})
    for rank, chunk in parts:
        provider._pg_collection.pp = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: count)
        ends = dict(pre_process=(rank, chunk or 0) == (0, 0), post_process=(rank, chunk) == parts[-1])
        yield provider.provide(vp_stage=chunk, **ends)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("hook", [freeze_moe_router, nemo_rls_freeze_moe_router])
def test_freeze_moe_router_freezes_only_routers(hook, split, moe_folder):
    frozen = 0
    for model in stages(moe_folder, *SPLITS[split]):
        hook([model])
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad is not name.endswith("mlp.router.weight"), name
            frozen += not parameter.requires_grad
    assert frozen == 3  # of four layers, the first of which is dense


def test_model_decoder_alias_adds_no_parameters_or_state_dict_keys(moe_folder):
    (model,) = stages(moe_folder, *SPLITS["one stage"])
    assert model.decoder is model.language_model.decoder
    assert not any(name.startswith("decoder.") for name in [*dict(model.named_parameters()), *model.state_dict()])


def test_value_head_of_language_model_gets_gradient(untied_folder):
    provider = AutoBridge.from_hf_pretrained(str(untied_folder)).to_megatron_provider(load_weights=False)
    provider.register_pre_wrap_hook(create_value_head_hook(provider.hidden_size, provider.sequence_parallel))
    model = build(provider)
    batch = make_batch(make_samples("mixed", provider, seed=1), provider)
    values = model(inputs=batch.local().without_labels())
    assert values.shape == (*batch.input_ids.shape, 1) and values.dtype == torch.float32
    values.sum().backward()
    assert model.language_model.output_layer.weight.grad.abs().max() > 0
    assert "output_layer.weight" not in dict(model.named_parameters())
