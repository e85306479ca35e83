"""What frameworks set on a provider, and what they read from it, as their sources do it."""

import logging

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.models.qwen3_vl.model import Qwen3VLGPTModel
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.training.process_groups import initialize

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend

from tests.frameworks.support import MILES, NEMO_RL, VERL
from tests.models.settings.test_parallel_settings import DENSE, EXPERTS, provider_of

# With `sequence_parallel` off, and experts over the tensor-parallel ranks.
_TP2 = dict(tensor_model_parallel_size=2, expert_tensor_parallel_size=None)
_MILES_SPLIT = dict(_TP2, sequence_parallel=True, context_parallel_size=2, cpu_offloading=False)
# Megatron-Bridge, recipes/qwen_vl/h100/qwen3_vl.py; but for what is Transformer Engine's.
RECIPE = dict(
    seq_length=4096, pipeline_dtype=None, moe_flex_dispatcher_backend=None, moe_hybridep_num_sms=16,
    cuda_graph_impl="none", cuda_graph_scope="full", cuda_graph_warmup_steps=3, attention_backend="auto",
    cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native", moe_router_fusion=False,
    recompute_granularity=None, recompute_modules=None, fine_grained_activation_offloading=False,
    offload_modules=None, moe_a2a_overlap=False, moe_shared_expert_overlap=False,
    moe_router_force_load_balancing=False, moe_router_padding_for_fp8=False, bf16=True, params_dtype=torch.bfloat16,
)  # fmt: skip
# Of examples/models/qwen/qwen_vl/conf/qwen3_vl_pretrain_override_example.yaml, what is about the model.
OVERRIDES = dict(
    use_hf_vision_model=False, cp_comm_type="p2p", cross_entropy_loss_fusion=False, recompute_granularity="full",
    recompute_method="uniform", recompute_num_layers=1, calculate_per_token_loss=True,
)  # fmt: skip


def set_on(provider, settings):
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
    return provider


@pytest.mark.parametrize("size", [DENSE, EXPERTS])
def test_provider_accepts_nemo_rl_settings(size, caplog):
    caplog.set_level(logging.INFO)
    provider = set_on(provider_of(size, {}), NEMO_RL)
    assert len([record for record in caplog.records if "apply_rope_fusion" in record.message]) == 1
    assert (provider.apply_rope_fusion, provider.mtp_num_layers) == (False, None)
    assert provider.bias_activation_fusion and provider.cross_entropy_loss_fusion


@pytest.mark.parametrize("size", [DENSE, EXPERTS])
def test_provider_accepts_verl_overrides(size, caplog):
    caplog.set_level(logging.INFO)
    provider = provider_of(size, {}).apply_overrides_and_finalize(dtype=torch.bfloat16, overrides=VERL | _TP2)
    assert provider.sequence_parallel is (size == EXPERTS)
    assert ("sequence_parallel is set to True" in caplog.text) is (size == EXPERTS)
    assert (
        "with transformer_impl 'local', where torch chooses" in caplog.text
    )  # among kernels, and not attention_backend


@pytest.mark.parametrize("size", [DENSE, EXPERTS])
def test_provider_accepts_miles_arguments(size, caplog):
    provider = set_on(provider_of(size, {}), MILES | _MILES_SPLIT)
    assert provider.calculate_per_token_loss is False
    assert "calculate_per_token_loss is False on 2 context-parallel ranks" in caplog.text


@pytest.mark.parametrize(("size", "more"), [
    (DENSE, dict(tensor_model_parallel_size=2, moe_token_dispatcher_type=None)),
    (EXPERTS, dict(expert_model_parallel_size=8, moe_token_dispatcher_type="alltoall")),
])  # fmt: skip
def test_provider_accepts_settings_of_megatron_bridge_recipe(size, more):
    provider = set_on(provider_of(size, {}), RECIPE | more)
    assert provider.cross_entropy_loss_fusion and provider.attention_backend is AttnBackend.auto


@pytest.mark.parametrize("per_token", [True, False])
def test_average_in_collective_is_turned_off_with_per_token_loss(per_token, untied_folder, caplog):
    """Where gradients are added up, megatron-core's wrapper would not be built."""
    caplog.set_level(logging.INFO)
    provider = AutoBridge.from_hf_pretrained(str(untied_folder)).to_megatron_provider(load_weights=False)
    provider.calculate_per_token_loss = per_token
    provider.finalize()
    initialize(provider, seed=0)
    ddp = DistributedDataParallelConfig(average_in_collective=True)
    (model,) = provider.provide_distributed_model(ddp_config=ddp, mixed_precision_wrapper=None)
    assert model.ddp_config.average_in_collective is not per_token
    assert ("average_in_collective is set to False" in caplog.text) is per_token


def test_provider_accepts_overrides_of_megatron_bridge_pretrain_example():
    """Its YAML file can only name fields."""
    provider = provider_of(DENSE, {})
    assert OVERRIDES.keys() <= provider.__dataclass_fields__.keys()
    set_on(provider, OVERRIDES)


def test_provider_accepts_setting_named_vision_dp_when_cp():
    """The setting has no effect: our model always divides images over context-parallel ranks."""
    for shared in (True, False):
        set_on(provider_of(DENSE, {}), dict(context_parallel_size=2, vision_dp_when_cp=shared))


@pytest.mark.parametrize(("size", "settings", "message"), [
    (EXPERTS, dict(cuda_graph_impl="transformer_engine"), "cuda_graph_impl is .*, expected 'none': rows, images"),
    (DENSE, dict(cuda_graph_modules=["attn"]), r"cuda_graph_modules is \['attn'\], expected \[\]: rows, images"),
    (DENSE, dict(cuda_graph_scope="attn"), r"cuda_graph_scope is 'attn', expected \[\]: rows, images"),
    (DENSE, dict(freeze_vison_model=True), "freeze_vison_model is set, .*: use freeze_vision_model"),
    (DENSE, dict(freeze_vit=True), "freeze_vit is set, .*: use freeze_vision_model$"),
    (EXPERTS, dict(freeze_all=1), "use freeze_language_model or freeze_vision_model or freeze_vision_projection$"),
    (DENSE, dict(tp=2), "tp is set, .*: use tensor_model_parallel_size$"),
    (DENSE, dict(seq_len=128), "seq_len is set, .*: use seq_length$"),
    (DENSE, dict(gradient_checkpointing=True), "use recompute_granularity$"),
    (EXPERTS, dict(enable_routing_replay=True), "use moe_enable_routing_replay"),
    (DENSE, dict(attention_backend="fast"), "attention_backend is 'fast', expected one of flash, fused"),
])  # fmt: skip
def test_provider_raises_if_setting_is_unsupported_or_misspelled(size, settings, message):
    with pytest.raises(ValueError, match=message):
        set_on(provider_of(size, {}), settings)


def test_qwen3_5_provider_raises_if_setting_is_unknown():
    provider = AutoBridge.from_hf_config(family("qwen3_5").presets.hf_config("0.8B")).to_megatron_provider(False)
    with pytest.raises(ValueError, match="freeze_vision_tower is set, but Qwen35VLModelProvider has no such setting"):
        set_on(provider, dict(freeze_vision_tower=True))


def test_provider_warns_that_unknown_setting_of_recipe_has_no_effect(caplog):
    """Megatron-Bridge's recipes set a name that none of its classes has; ms-swift keeps a note."""
    set_on(provider_of(EXPERTS, {}), dict(moe_a2a_overlap=True, swiglu=True))
    assert [r.message for r in caplog.records if "no such setting" in r.message] == [
        "moe_a2a_overlap is set, but Qwen3VLMoEModelProvider has no such setting: it has no effect"
    ]


@pytest.mark.parametrize("size", [DENSE, EXPERTS])
def test_provider_vision_attributes_equal_vision_config(size):
    provider = provider_of(size, {})
    for name in ("patch_size", "spatial_merge_size", "deepstack_visual_indexes"):
        assert getattr(provider, name) == getattr(provider.vision_config, name), name
    assert provider.language_max_sequence_length == provider.seq_length


@pytest.mark.parametrize("kind", ["untied", "moe"])
def test_provider_hf_text_config_matches_text_config_of_checkpoint(kind, request):
    bridge = AutoBridge.from_hf_pretrained(str(request.getfixturevalue(f"{kind}_folder")))
    provider = bridge.to_megatron_provider(load_weights=False)
    theirs, ours = bridge.hf_pretrained.config.text_config.to_dict(), provider.hf_text_config.to_dict()
    differing = {name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)}
    assert differing <= {"dtype", "router_aux_loss_coef", "tie_word_embeddings", "pad_token_id", "_name_or_path"}
    assert type(provider.hf_text_config) is type(bridge.hf_pretrained.config.text_config)


def test_provide_language_model_has_same_parameter_names_as_in_full_model(untied_folder):
    """`provide_language_model` of Megatron-Bridge's providers, on the meta device."""
    provider = AutoBridge.from_hf_pretrained(str(untied_folder)).to_megatron_provider(load_weights=False)
    provider.init_model_with_meta_device = True
    provider.finalize()
    initialize(provider, seed=0)
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    whole, text = provider.provide(), provider.provide_language_model()
    assert type(text) is Qwen3VLGPTModel
    assert dict(text.named_parameters()).keys() == dict(whole.language_model.named_parameters()).keys()
