"""Compare estimated activations with what autograd saves, and check how estimates scale."""

import itertools
from dataclasses import replace
from functools import partial

from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.models.common.rope import InterleavedMRoPE, vision_rotary
from qwen3vl_bridge.models.qwen3_5 import presets as qwen3_5_presets
from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.peft.lora import Qwen3VLLoRA
from qwen3vl_bridge.planning.activations import (
    LocalSizes,
    chunk_activations,
    saved_by_attention,
    saved_by_embedding,
    saved_by_patch_embedding,
)
from qwen3vl_bridge.planning.estimate import estimate
from qwen3vl_bridge.planning.parallel_layout import ParallelLayout
from qwen3vl_bridge.planning.training_settings import (
    BF16,
    FP32,
    FULL,
    LoraSettings,
    Recompute,
    TrainingSettings,
)
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.rows import Component

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.bridge import AutoBridge

from tests.helpers.batches import make_batch, make_samples
from tests.parity.conftest import build as build_model
from tests.planning.test_memory_on_ranks import saved_bytes, work_of

# Measured at most 2e-4, and 5e-4 with linear attention in torch: scalars of the balancing loss and of recomputation,
# and padding of the convolution, are not counted.
TOLERANCE = 1e-3
# In padded rows torch's delta rule also copies chunks. Measured 9.7e-3; 1.3e-2 with frozen weights.
TOLERANCE_ROWS = 1.5e-2

SELECTIVE = {name: Recompute("selective", frozenset({name})) for name in ("core_attn", "mlp", "moe")}
# Values of `recompute_modules` that some models have no modules for.
WITHOUT = {"moe": ("dense", "Qwen3.5"), "mlp": ("MoE", "Qwen3.5 MoE")}
CASES = {
    "float32": (FP32, Recompute(), Recompute()), "bfloat16": (BF16, Recompute(), Recompute()),
    "core_attn": (FP32, SELECTIVE["core_attn"], SELECTIVE["core_attn"]), "mlp": (FP32, SELECTIVE["mlp"], Recompute()),
    "moe": (FP32, SELECTIVE["moe"], Recompute()), "full, two layers": (FP32, replace(FULL, num_layers=2), FULL),
    "fused activation": (FP32, Recompute(), Recompute()), "loss in chunks": (BF16, Recompute(), Recompute()),
    "full, block": (BF16, Recompute("full", method="block", num_layers=2), Recompute()),
    "MTP": (FP32, Recompute(), Recompute()), "MTP in bfloat16": (BF16, Recompute(), Recompute()),
    "MTP, core_attn": (FP32, SELECTIVE["core_attn"], Recompute()), "MTP, full": (FP32, FULL, FULL),
    "MTP, loss in chunks": (BF16, FULL, Recompute()),
}  # fmt: skip


EXPERTS = dict(num_experts=10, num_experts_per_tok=3, moe_intermediate_size=112)


def with_tiny_sizes(config, text: dict, vision: dict, **rope):
    config.text_config.update(
        dict(hidden_size=192, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3, head_dim=40)
        | dict(vocab_size=1536)
        | dict(rope_parameters={**config.text_config.rope_parameters, "mrope_section": [8, 6, 6], **rope})
        | text
    )
    config.vision_config.update(
        dict(hidden_size=160, intermediate_size=368, depth=3, num_heads=5, out_hidden_size=192)
        | dict(num_position_embeddings=64)
        | vision
    )
    config.image_token_id, config.video_token_id = 1500, 1501
    config.vision_start_token_id, config.vision_end_token_id = 1502, 1503
    return config


def tiny_qwen3_vl(moe: bool):
    text = dict(intermediate_size=544) | (EXPERTS if moe else {})
    return with_tiny_sizes(presets.hf_config("30B-A3B" if moe else "2B"), text, dict(deepstack_visual_indexes=[0, 2]))


def tiny_qwen3_5(moe: bool):
    text = (
        dict(layer_types=["linear_attention", "full_attention", "linear_attention"], mtp_num_hidden_layers=1)
        | dict(partial_rotary_factor=1.0)
        | dict(linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=24, linear_value_head_dim=28)
        | (EXPERTS | dict(shared_expert_intermediate_size=136) if moe else dict(intermediate_size=544))
    )
    return with_tiny_sizes(qwen3_5_presets.hf_config("35B-A3B" if moe else "2B"), text, {}, partial_rotary_factor=1.0)


FAMILIES = {
    "dense": partial(tiny_qwen3_vl, moe=False), "MoE": partial(tiny_qwen3_vl, moe=True),
    "Qwen3.5": partial(tiny_qwen3_5, moe=False), "Qwen3.5 MoE": partial(tiny_qwen3_5, moe=True),
}  # fmt: skip


def build(config, training: TrainingSettings, **settings):
    """Build the model of a configuration with the settings of `training` and of its provider."""
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    if training.precision == BF16:
        provider.bf16, provider.params_dtype = True, torch.bfloat16
    else:
        provider.bf16, provider.params_dtype = False, torch.float32
    for prefix, recompute in (("", training.recompute), ("vision_", training.vision_recompute)):
        setattr(provider, f"{prefix}recompute_granularity", recompute.granularity)
        setattr(provider, f"{prefix}recompute_modules", sorted(recompute.modules) or None)
        setattr(provider, f"{prefix}recompute_method", recompute.method)
        setattr(provider, f"{prefix}recompute_num_layers", recompute.num_layers)
    provider.bias_activation_fusion = training.fused_activation
    provider.loss_chunk_tokens = training.loss_chunk_tokens
    provider.mtp_loss_scaling_factor = 0.1 * training.trains_mtp
    for name, value in settings.items():
        setattr(provider, name, value)
    return build_model(provider).train()


def compare(model, config, chunk, training: TrainingSettings, contents: tuple[str, ...]) -> None:
    """Compare estimates with what autograd saves, for packed and padded rows."""
    dims, predicts = dimensions_of(config.to_dict()), training.trains_mtp
    for content, packed in itertools.product(contents, (True, False)):
        samples = make_samples(content, config, seed=3)
        lengths = [len(sample.ids) for sample in samples]
        # With padding, so that segments fill several chunks of linear attention, each with all its tensors.
        layout = (
            SequenceLayout.packed_row(lengths, multiple=196) if packed else SequenceLayout.padded_rows(lengths, 330)
        )
        batch, one = make_batch(samples, config, layout=layout), replace(training, packed=packed)
        counted = chunk_activations(dims, ParallelLayout(1), one, chunk, work_of(batch)).total
        error = counted / saved_bytes(model, batch, with_next_tokens=predicts) - 1
        print(f"{content}, {'packed' if packed else 'rows'}: {error:+.1e}")
        assert abs(error) <= (TOLERANCE_ROWS if "linear_layers" in dims.indices and not packed else TOLERANCE), (
            content,
            packed,
        )


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_estimated_activations_match_bytes_saved_by_autograd(case, family):
    precision, recompute, vision = CASES[case]
    if family in WITHOUT.get(case, ()):
        pytest.skip("this model has no such module")
    config, mtp = FAMILIES[family](), case.startswith("MTP")
    if mtp and not family.startswith("Qwen3.5"):
        pytest.skip("this model has no multi-token prediction")
    dims, parallel = dimensions_of(config.to_dict()), ParallelLayout(1)
    ((chunk,),) = parallel.chunks(len(dims.indices["text_layers"]))
    training = TrainingSettings(
        transformer_engine=False, precision=precision, recompute=recompute, vision_recompute=vision,
        fused_activation=case == "fused activation", loss_chunk_tokens=50 if "loss in chunks" in case else 0,
        trains_mtp=mtp,
    )  # fmt: skip
    model = build(config, training)
    compare(model, config, chunk, training, ("many images", "video", "text only"))


# Layers with adapters: the default target modules, all of Qwen3.5's, and subsets.
DEFAULT = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
ALL = (*DEFAULT, "in_proj", "out_proj")
TARGETS = {
    "dense": (DEFAULT, ("linear_qkv", "linear_fc2"), ("linear_fc1",)), "MoE": (DEFAULT, ("linear_qkv",)),
    "Qwen3.5": (ALL, DEFAULT, ("in_proj", "linear_fc2")),
    "Qwen3.5 MoE": (ALL, ("in_proj", "linear_qkv", "linear_fc1"), ("in_proj", "linear_proj")),
}  # fmt: skip
FROZEN = [(family, targets) for family, cases in TARGETS.items() for targets in (*cases, None)]


@pytest.mark.one_case_in(9)
@pytest.mark.parametrize("precision", [BF16, FP32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("family", "targets"), FROZEN, ids=lambda one: one if isinstance(one, str) else str(one))
def test_estimated_activations_with_frozen_weights_match_bytes_saved(family, targets, precision):
    """Frozen language model: with adapters and a frozen tower, or without adapters and with a trained tower."""
    config = FAMILIES[family]()
    dims, parallel = dimensions_of(config.to_dict()), ParallelLayout(1)
    ((chunk,),) = parallel.chunks(len(dims.indices["text_layers"]))
    plain = TrainingSettings(
        transformer_engine=False, precision=precision, fused_activation=precision == BF16, loss_chunk_tokens=0
    )
    model = build(config, plain)
    if targets is None:
        training = replace(plain, frozen=frozenset({Component.LANGUAGE_MODEL}))
        model.freeze(freeze_language_model=True, freeze_vision_model=False, freeze_vision_projection=False)
    else:
        training = replace(plain, lora=LoraSettings(8, targets))
        model = Qwen3VLLoRA(dim=8, target_modules=list(targets))(model)
    compare(model, config, chunk, training, ("many images", "text only"))


def total(size: str, parallel: ParallelLayout, training: TrainingSettings) -> float:
    found = estimate(dimensions_of(presets.config_dict(size)), parallel, training)
    assert all(value >= 0 for stage in found.stages for value in stage.activations.values())
    return max(sum(stage.activations.values()) for stage in found.stages)


RUNS = st.builds(
    TrainingSettings, seq_length=st.sampled_from([4096, 8192, 32768]), micro_batch_size=st.sampled_from([1, 2]),
    max_patches=st.sampled_from([None, 0, 4096]), precision=st.sampled_from([BF16, FP32]),
    fused_activation=st.booleans(), loss_chunk_tokens=st.just(0), transformer_engine=st.booleans(),
)  # fmt: skip
SIZES = st.sampled_from(list(presets.PRESETS))


@given(SIZES, RUNS)
@settings(max_examples=40)
def test_estimated_activations_double_with_micro_batch_size(size, training):
    once = total(size, ParallelLayout(1), training)
    twice = total(size, ParallelLayout(1), replace(training, micro_batch_size=2 * training.micro_batch_size))
    blank = 0.0 if training.max_patches != 0 else 0.02  # a row without images has a small blank one
    assert twice == pytest.approx(2 * once, rel=1e-9 + blank)


@given(SIZES, RUNS)
@settings(max_examples=40)
def test_estimated_activations_fall_with_parallelism_and_recomputation(size, training):
    whole = total(size, ParallelLayout(8, tp=1), training)
    assert (
        total(size, ParallelLayout(8, tp=2, etp=1 if "A" in size else None, sequence_parallel=True), training) < whole
    )
    if training.transformer_engine:  # without it all keys and values are gathered
        assert total(size, ParallelLayout(8, cp=2), training) < whole
    pipeline = ParallelLayout(8, pp=2)
    assert total(size, pipeline, replace(training, global_batch_size=4 * training.micro_batch_size)) < whole
    module = "moe" if "A" in size else "mlp"
    selective = replace(training, recompute=Recompute("selective", frozenset({module})))
    full = replace(training, recompute=FULL, vision_recompute=FULL)
    assert total(size, ParallelLayout(8), full) < total(size, ParallelLayout(8), selective) < whole


def attention_bytes(parallel: ParallelLayout, *, packed: bool) -> dict[str, float]:
    """Return the table of attention of the dense model, which has three groups of heads."""
    training = TrainingSettings(transformer_engine=False, precision=FP32, packed=packed)
    return saved_by_attention(LocalSizes(dimensions_of(tiny_qwen3_vl(moe=False).to_dict()), parallel, training))


def test_attention_activations_are_not_divided_if_tp_exceeds_kv_heads():
    """More ranks than groups gather queries, keys and values (measured in test_memory_on_ranks)."""
    whole, three, six = (
        attention_bytes(ParallelLayout(tp, tp=tp), packed=True)["linear_qkv: output"] for tp in (1, 3, 6)
    )
    assert three == whole / 3 and six == whole


@pytest.mark.parametrize("packed", [False, True])
def test_attention_activations_with_context_parallelism_count_keys_of_all_ranks(packed):
    """Measured in test_memory_on_ranks."""
    one, two = (attention_bytes(ParallelLayout(cp, cp=cp), packed=packed) for cp in (1, 2))
    assert ("attention: output" in one) == packed
    assert two["attention: output"] == two["queries"]
    assert two["keys and values of all context-parallel ranks"] == 4 * one["keys"] and "keys" not in two


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("kernel", [True, False], ids=["Transformer Engine", "formula"])
@pytest.mark.parametrize("precision", [BF16, FP32], ids=["bfloat16", "float32"])
def test_estimated_rotary_angle_bytes_match_layer_outputs(precision, kernel):
    """Angles for the kernel, cosines and sines for the formula: of a token of the text model and of a patch."""
    config, tokens = tiny_qwen3_vl(moe=False), 7
    dims = dimensions_of(config.to_dict())
    local = LocalSizes(dims, ParallelLayout(1), TrainingSettings(precision=precision, transformer_engine=kernel))
    head = dims["v_hidden"] // dims["v_heads"]
    of_tower = vision_rotary(torch.zeros(tokens, 2, dtype=torch.long), head, fused=kernel)
    dtype = torch.bfloat16 if precision == BF16 else torch.float32
    of_text = InterleavedMRoPE(dims["head_dim"], 5e6, [8, 6, 6], dtype, fused=kernel)(torch.arange(tokens)[None])
    assert of_tower.nbytes == saved_by_patch_embedding(local)["rotary angles"] * tokens
    assert of_text.nbytes == saved_by_embedding(local, pre_process=True)["rotary angles"] * tokens
