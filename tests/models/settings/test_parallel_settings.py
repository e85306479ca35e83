"""Parallel layouts and other settings that cannot train raise an error in `finalize()`; all others are accepted."""

import copy
import itertools
import logging

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.config.divisibility import Replicas
from qwen3vl_bridge.config.fields import vision_tp_size
from qwen3vl_bridge.config.model_validation import check_world
from qwen3vl_bridge.models.common.vision_tower import vision_transformer_config
from qwen3vl_bridge.models.qwen3_vl import presets

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.bridge import AutoBridge
from megatron.bridge.models.qwen_vl.qwen3_vl_provider import DistTrainConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from transformers import Qwen3VLVisionConfig

PROVIDERS = {
    size: AutoBridge.from_hf_config(presets.hf_config(size)).to_megatron_provider(load_weights=False)
    for size in presets.PRESETS
}
DENSE, EXPERTS = "8B", "30B-A3B"
SP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
PP2, CP2 = dict(pipeline_model_parallel_size=2), dict(context_parallel_size=2)
VPP2 = dict(PP2, virtual_pipeline_model_parallel_size=2)
OVERLAP = dict(overlap_p2p_comm=True, batch_p2p_comm=False)


def provider_of(size, fields):
    provider = copy.copy(PROVIDERS[size])
    for name, value in fields.items():
        assert hasattr(provider, name), name
        setattr(provider, name, value)
    return provider


def finalized(size, fields):
    provider = provider_of(size, fields)
    provider.finalize()
    return provider


def separate(vision=2, language=2, *, usual=True, model=None, **parallel):
    """Return fields for separate vision and language ranks."""
    sizes = dict(vision_world_size=vision, language_world_size=language)
    more = dict(variable_seq_lengths=True) if usual else {}
    return more | (model or {}) | dict(dist_train=DistTrainConfig(use_dist_train=True, **sizes, **parallel))


def tower(activation):
    return Qwen3VLVisionConfig(out_hidden_size=4096, hidden_act=activation)


def recompute(granularity, tower="", **more):
    return {f"{tower}recompute_{name}": value for name, value in dict(more, granularity=granularity).items()}


FINE, FLEX = dict(fine_grained_activation_offloading=True), dict(moe_token_dispatcher_type="flex")
COMBINED = dict(overlap_moe_expert_parallel_comm=True, expert_model_parallel_size=2, bf16=True)
DELAYED = COMBINED | dict(delay_wgrad_compute=True, transformer_impl="transformer_engine")
UNEVEN_CHUNKS = dict(PP2, pipeline_model_parallel_layout="E|t*24|t*23|tL")
OFFLOADING = ("cpu_offloading", "fine_grained_activation_offloading", "moe_paged_stash")
FUSED_MOE = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")
INVALID = [
    (DENSE, dict(expert_tensor_parallel_size=2), "expert_tensor_parallel_size is 2, expected None: .* no experts"),
    (EXPERTS, dict(expert_tensor_parallel_size=5), "moe_ffn_hidden_size is 768, expected a multiple of .*size, 5"),
    (DENSE, dict(tensor_model_parallel_size=32), "vision_config.num_heads is 16, expected a multiple of .*, 32"),
    (DENSE, dict(ffn_hidden_size=12289, tensor_model_parallel_size=2), "ffn_hidden_size is 12289, expected a multiple"),
    (DENSE, dict(vocab_size=151937, tensor_model_parallel_size=2), "padded_vocab_size is 151937, expected a multiple"),
    (EXPERTS, dict(SP2, ffn_hidden_size=1, moe_layer_freq=[0] + [1] * 47), "ffn_hidden_size is 1, expected"),
    (DENSE, dict(tensor_model_parallel_size=0), "tensor_model_parallel_size is 0, expected 1 or more"),
    (DENSE, dict(context_parallel_size=0), "context_parallel_size is 0, expected 1 or more"),
    (EXPERTS, dict(expert_tensor_parallel_size=0), "expert_tensor_parallel_size is 0, expected 1 or more"),
    (DENSE, dict(pipeline_model_parallel_size=5), "num_layers is 36, expected a multiple of .*size, 5: or set uneven"),
    (DENSE, dict(VPP2, virtual_pipeline_model_parallel_size=5), r"parallel_size \* virtual_pipeline.*_size, 10: or"),
    (DENSE, dict(virtual_pipeline_model_parallel_size=2), "with pipeline_model_parallel_size 1, expected None"),
    (DENSE, dict(pipeline_model_parallel_layout="Et*18|t*18L"), "virtual_pipeline_model_parallel_size is 2 with pipe"),
    (DENSE, dict(CP2, seq_length=1022), "seq_length is 1022, expected a multiple of 4: rows are divided over 2"),
    (DENSE, dict(SP2, seq_length=1023), "seq_length is 1023, expected a multiple of 2: .* 2 sequence-parallel"),
    (DENSE, dict(CP2, cp_comm_type="p2p"), "cp_comm_type is 'p2p' with .* transformer_impl 'local', expected None or"),
    (DENSE, dict(CP2, cp_comm_type=["all_gather"] * 35 + ["a2a"]), "cp_comm_type is .*, 'a2a'. with .*, expected None"),
    (EXPERTS, dict(expert_model_parallel_size=3), "num_moe_experts is 128, expected a multiple of .*, 3"),
    (EXPERTS, dict(moe_router_force_load_balancing=True), "To measure speed, set allow_random_routing too"),
    # of the tower, rotary embeddings and recomputation
    (DENSE, dict(hidden_size=1000), "out_hidden_size is .*, expected 1000"),
    (DENSE, dict(mrope_section=[2, 1, 2]), "with the sum 5, expected half of the 128 dimensions"),
    (DENSE, dict(num_layers=2), "deepstack_visual_indexes has 3 layers, but there are only 2 text layers"),
    (DENSE, recompute("full", "vision_", method="uniform", num_layers=2), r"layers \[8, 16, 24\] are not the last of"),
    (DENSE, recompute("selective", "vision_", modules=["layernorm"]), "'layernorm' needs Transformer Engine"),
    (DENSE, recompute("selective", "vision_", modules=["mlp"]), "vision_recompute_modules"),
    (DENSE, recompute("all", "vision_"), "vision_recompute_granularity is 'all', expected None, 'full'"),
    (DENSE, recompute(None, "vision_", modules=["core_attn"], num_layers=2), "vision_recompute_num_layers is"),
    (DENSE, recompute("full"), "recompute_method is None with recompute_granularity 'full', expected '"),
    (DENSE, recompute(None, modules=["mlp"]), r"recompute_modules is \['mlp'\] with recompute_granularity None, exp"),
    (DENSE, recompute("selective", modules=["mlp", "moe"]), r"recompute_modules has \['moe'\], which this model does"),
    (EXPERTS, recompute("selective", modules=["mlp", "shared_experts"]), r"has \['mlp', 'shared_experts'\], which"),
    (DENSE, dict(vision_config=tower("softmin")), "hidden_act is 'softmin', expected one of gelu, "),
    (DENSE, dict(vision_config=tower("prelu")), "vision_config.hidden_act is 'prelu', which has parameter"),
    (DENSE, dict(qk_clip=True), "qk_clip is True, expected False: queries and keys are normalized"),
    (DENSE, dict(activation_func=F.softplus), "activation_func is .*softplus.*, expected the function for one of silu"),
    (DENSE, dict(activation_func="softplus"), "text model's activation is 'softplus', expected one of silu"),
    (DENSE, dict(loss_chunk_tokens=-1), "loss_chunk_tokens is -1, expected 0 or more"),
    # of experts
    (EXPERTS, dict(moe_layer_freq=[1, 0]), "moe_layer_freq has 2 entries, expected 48"),
    (EXPERTS, dict(moe_layer_freq="[1,0,1,1]"), "is the text"),
    (EXPERTS, dict(moe_router_load_balancing_type="sinkhorn"), "'sinkhorn', expected 'aux_loss', 'global_aux_loss' or"),
    (EXPERTS, dict(moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"]), "padding or packing would change"),
    (
        EXPERTS,
        dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="ncclep"),
        "'ncclep' with moe_token_di",
    ),
    # of activations on the host
    (DENSE, dict(FINE, offload_modules=["moe_act"]), r"offload_modules has \['moe_act'\], for which this model has no"),
    (
        EXPERTS,
        dict(FINE, offload_modules=["attn_norm"]),
        r"offload_modules has \['attn_norm'\], for which .*: use only .*mlp_norm",
    ),
    *((EXPERTS, {name: True}, f"{name} is True with .* 'local', expected False: it needs Tr") for name in FUSED_MOE),
    # of overlapping the expert all-to-all with compute
    *(
        (EXPERTS, COMBINED | {name: True}, f"{name} is True with .*, expected False: it starts in")
        for name in OFFLOADING
    ),
    (
        EXPERTS,
        COMBINED | dict(mlp_chunks_for_training=2),
        "mlp_chunks_for_training is 2 with .*, expected 1: the",
    ),
    (EXPERTS, COMBINED | dict(moe_token_dispatcher_type="flex"), "'flex' with .*, expected 'alltoall': no other"),
    (EXPERTS, COMBINED | dict(fp8="hybrid"), "fp8 is 'hybrid' with .*, expected None: the inputs of experts"),
    (EXPERTS, COMBINED | dict(delay_wgrad_compute=True), "transformer_impl is 'local' with delay_.*: local layers"),
    (
        EXPERTS,
        DELAYED | dict(freeze_language_model=True),
        "freeze_language_model is True with .*, expected False: frozen",
    ),
    (
        EXPERTS,
        COMBINED | UNEVEN_CHUNKS | OVERLAP,
        r"pipeline chunks have \[0, 23, 24, 1\] layers, expected at least one",
    ),
    (
        EXPERTS,
        separate(model=COMBINED),
        "overlap_moe_expert_parallel_comm is True with dist_train.*, expected False",
    ),
    (EXPERTS, dict(high_priority_a2a_comm_stream=True), "with overlap_moe_expert.* False, expected False: it would be"),
    # of separate vision ranks
    (DENSE, separate(None), "dist_train.vision_world_size is None with .*, expected 1 or more"),
    (DENSE, separate(2, 0), "dist_train.language_world_size is 0 with .*, expected 1 or more"),
    (DENSE, separate(vision_tensor_model_parallel_size=0), "vision_tensor_model_parallel_size is 0 with"),
    (
        DENSE,
        separate(3, vision_tensor_model_parallel_size=2),
        "vision_world_size is 3 with .*, expected a multiple",
    ),
    (
        DENSE,
        separate(3, vision_tensor_model_parallel_size=3),
        "num_heads is 16 with .*, expected a multiple of",
    ),
    (
        DENSE,
        separate(vision_pipeline_model_parallel_size=2),
        "vision_pipeline_.* is 2 with .*, expected 1: the",
    ),
    (DENSE, separate(vision_context_parallel_size=2), "vision_context_.* is 2 with .*, expected 1: the"),
    (
        DENSE,
        separate(vision_expert_model_parallel_size=2),
        "vision_expert_model_.* is 2 with .*, expected 1: the",
    ),
    (
        DENSE,
        separate(2, 3, model=SP2),
        "language_world_size is 3 with .*, expected a multiple of tensor_model_",
    ),
    (DENSE, separate(2, 3, model=PP2), "language_world_size is 3 with .*, expected a multiple of .*, 2"),
    (
        EXPERTS,
        separate(2, 6, model=dict(expert_model_parallel_size=4)),
        "language_world_size is 6, expected a",
    ),
    (
        DENSE,
        separate(2, 3),
        "tower has 2 data-parallel replicas and the language model 3, expected one number to be",
    ),
    (
        DENSE,
        separate(4, 2, vision_to_llm_dp_ratio=3),
        "vision_to_llm_dp_ratio is 3, expected None or 2: there are 4",
    ),
    (
        DENSE,
        separate(2, 4, vision_to_llm_dp_ratio=1),
        "vision_to_llm_dp_ratio is 1, expected None: there are 2",
    ),
    (
        DENSE,
        separate(model=CP2),
        "context_parallel_size is 2 with dist_train.use_dist_train, expected 1: megatron",
    ),
    (DENSE, separate(usual=False), "variable_seq_lengths is False with .*, expected True: the size of the"),
    (
        DENSE,
        separate(model=dict(PP2, virtual_pipeline_model_parallel_size=2)),
        "virtual_pipeline_.* is 2 with",
    ),
    (
        DENSE,
        separate(model=dict(fp16=True, bf16=False)),
        "fp16 is True with dist_train.use_dist_train, expected Fal",
    ),
    (
        DENSE,
        separate(model=dict(calculate_per_token_loss=False)),
        "calculate_per_token_loss is False with .* True",
    ),
    (
        DENSE,
        separate(model=OVERLAP),
        "overlap_p2p_comm is True with dist_train.use_dist_train, expected False",
    ),
    (
        DENSE,
        separate(model=dict(pipeline_dtype=torch.float16)),
        "pipeline_dtype is torch.float16 .*, expected params",
    ),
    (DENSE, dict(dist_train=DistTrainConfig(vision_world_size=2)), "vision_world_size is 2 with dist_train.use_"),
    (DENSE, dict(add_encoder=False), "add_encoder is False with dist_train.use_dist_train False, expected True"),
]


@pytest.mark.parametrize(("size", "fields", "message"), INVALID)
def test_finalize_raises_if_parallel_settings_are_invalid(size, fields, message):
    with pytest.raises(ValueError, match=message):
        finalized(size, fields)


@pytest.mark.parametrize(("size", "fields"), [
    (DENSE, dict(SP2, tensor_model_parallel_size=16)),  # more ranks than query groups
    (EXPERTS, SP2 | dict(expert_tensor_parallel_size=4, expert_model_parallel_size=2)),
    (DENSE, dict(CP2, cp_comm_type="all_gather")),
    (DENSE, dict(cp_comm_type="p2p")),  # of no consequence without context parallelism, and recipes have it
    (DENSE, VPP2 | OVERLAP), (DENSE, dict(VPP2, pipeline_model_parallel_size=3)),
    (DENSE, dict(PP2, virtual_pipeline_model_parallel_size=1)), (DENSE, dict(PP2, variable_seq_lengths=True)),
    (DENSE, dict(PP2, num_layers_in_first_pipeline_stage=11)),
    (DENSE, dict(PP2, pipeline_model_parallel_layout="Et*3|t*33|L|", **OVERLAP)),
    (DENSE, dict(vocab_size=151937, should_pad_vocab=True, tensor_model_parallel_size=2)),
    (EXPERTS, dict(moe_router_force_load_balancing=True, allow_random_routing=True)),
    (EXPERTS, dict(ffn_hidden_size=1, **SP2)),  # no layer uses it
    (EXPERTS, COMBINED | VPP2 | OVERLAP | dict(high_priority_a2a_comm_stream=True)),
])  # fmt: skip
def test_finalize_accepts_valid_parallel_settings(size, fields):
    provider = finalized(size, fields)
    provider.finalize()  # Megatron-Bridge does it again


powers = st.integers(0, 4).map(lambda exponent: 2**exponent)
sizes = st.one_of(powers, st.integers(1, 12))
ways = st.fixed_dictionaries(
    dict(
        tensor_model_parallel_size=sizes, sequence_parallel=st.booleans(), context_parallel_size=sizes,
        pipeline_model_parallel_size=sizes, virtual_pipeline_model_parallel_size=st.none() | st.integers(1, 6),
        seq_length=st.sampled_from([1000, 4096, 5040, 720720]), account_for_embedding_in_pipeline_split=st.booleans(),
        account_for_loss_in_pipeline_split=st.booleans(), overlap_p2p_comm=st.just(True), batch_p2p_comm=st.just(False),
    )
)  # fmt: skip


@given(size=st.sampled_from(list(PROVIDERS)), fields=ways, experts=sizes, of_experts=st.none() | sizes)
@settings(max_examples=300)
def test_finalize_accepts_parallel_sizes_only_if_they_divide_model_sizes(size, fields, experts, of_experts):
    """An accepted layout divides every size that megatron-core divides when it builds and trains the model."""
    preset, has_experts = presets.PRESETS[size], presets.PRESETS[size].experts is not None
    if has_experts:
        fields |= dict(expert_model_parallel_size=experts, expert_tensor_parallel_size=of_experts)
    tensor, stages = fields["tensor_model_parallel_size"], fields["pipeline_model_parallel_size"]
    chunks, context = fields["virtual_pipeline_model_parallel_size"], fields["context_parallel_size"]
    if stages == 1 or chunks is None:
        fields |= dict(overlap_p2p_comm=False, batch_p2p_comm=True)
    sequence = tensor if fields["sequence_parallel"] or has_experts else 1
    extra = fields["account_for_embedding_in_pipeline_split"] + fields["account_for_loss_in_pipeline_split"]
    sound = (
        preset.heads % tensor == 0
        and (preset.kv_heads % tensor == 0 or tensor % preset.kv_heads == 0)
        and all(width % tensor == 0 for width in (16, preset.vision.ffn, 4 * preset.vision.hidden, 151936))
        and (has_experts or preset.ffn % tensor == 0)
        and (preset.layers + extra) % (stages * (chunks or 1)) == 0
        and (stages > 1 or (chunks or 1) == 1)
        and fields["seq_length"] % (context * sequence) == 0
        and (context == 1 or fields["seq_length"] % (2 * context) == 0)
    )
    if has_experts:
        shared = of_experts or (1 if experts > 1 else tensor)
        sound = sound and preset.experts.number % experts == 0 and preset.experts.ffn % shared == 0
    provider = provider_of(size, fields)
    if not sound:
        with pytest.raises(ValueError, match=r"expected|must be"):
            provider.finalize()
        return
    provider.finalize()
    chunks = provider.virtual_pipeline_model_parallel_size
    places = itertools.product(range(provider.pipeline_model_parallel_size), range(chunks) if chunks else [None])
    assert sum(get_num_layers_to_build(provider, vp_stage, rank) for rank, vp_stage in places) == preset.layers
    assert vision_transformer_config(provider).num_attention_heads % tensor == 0


@pytest.mark.parametrize(("size", "tensor", "turned_on"), [(EXPERTS, 2, True), (EXPERTS, 1, False), (DENSE, 2, False)])
def test_finalize_turns_on_sequence_parallel_for_moe_with_tensor_parallelism(size, tensor, turned_on, caplog):
    """Megatron-Bridge's recipe for 235B, its converter of FSDP checkpoints and verl do not set it."""
    caplog.set_level(logging.INFO)
    provider = finalized(size, dict(tensor_model_parallel_size=tensor, sequence_parallel=False))
    assert provider.sequence_parallel is turned_on
    assert ("sequence_parallel is set to True" in caplog.text) is turned_on


def test_check_world_raises_if_parallel_sizes_do_not_divide_world_size():
    provider = provider_of(DENSE, SP2 | PP2)
    check_world(provider, 8)
    for world, words in ((1, "1 process,"), (6, "6 processes,")):
        with pytest.raises(ValueError, match=rf"^the run has {words} expected a multiple of 4, .*--nproc_per_node 4,"):
            check_world(provider, world)
    provider.tensor_model_parallel_size = 0
    with pytest.raises(ValueError, match="tensor_model_parallel_size is 0, expected 1 or more"):
        check_world(provider, 8)


def test_check_world_raises_if_vision_and_language_ranks_do_not_add_up():
    provider = finalized(DENSE, separate(2, 4))
    check_world(provider, 6)
    for world in (5, 7):
        with pytest.raises(
            ValueError, match=f"language_world_size 4 add up to 6, expected {world}, the number of processes"
        ):
            check_world(provider, world)


def test_finalize_with_separate_vision_ranks_sets_pipeline_dtype():
    assert finalized(DENSE, separate()).pipeline_dtype == torch.bfloat16
    assert finalized(DENSE, {}).pipeline_dtype is None


def test_vision_tp_size_equals_language_tp_size_without_separate_vision_ranks():
    provider = finalized(DENSE, separate(2, 8, vision_tensor_model_parallel_size=2, model=dict(SP2)))
    assert vision_tp_size(provider) == 2
    assert vision_tp_size(finalized(DENSE, separate(2, 8, model=dict(tensor_model_parallel_size=8)))) == 1
    assert vision_tp_size(finalized(DENSE, SP2)) == 2


@given(few=st.integers(1, 8), times=st.integers(1, 8), more_vision=st.booleans())
def test_each_language_replica_share_is_encoded_by_one_vision_replica(few, times, more_vision):
    """Neighboring replicas are paired in their order, as in megatron-core."""
    vision, language = (few * times, few) if more_vision else (few, few * times)
    replicas = Replicas(vision, language)
    seen = [
        (served, replicas.share_of(rank)) for rank in range(vision) for served in replicas.language_replicas_of(rank)
    ]
    assert sorted(seen) == [(one, share) for one in range(language) for share in range(replicas.vision_per_language)]
    assert seen == sorted(seen)
