"""What autograd keeps of a forward pass, against the formulas; and how they grow."""

import itertools
from dataclasses import replace
from functools import partial

from qwen3vl_bridge.batch import SequenceLayout
from qwen3vl_bridge.models.qwen3_5 import presets as qwen3_5_presets
from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.models.rope import InterleavedMRoPE, vision_rotary
from qwen3vl_bridge.planning.activations import RankWidths, attention, chunk_activations, embedding, patch_inputs
from qwen3vl_bridge.planning.estimate import estimate
from qwen3vl_bridge.planning.split import ModelSplit
from qwen3vl_bridge.planning.training_settings import BF16, FP32, FULL, Recompute, TrainingSettings
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.rows import Part

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.bridge import AutoBridge

from tests.parity.batches import make_batch, make_samples
from tests.parity.conftest import build as build_model

from .test_memory_on_ranks import saved_bytes, work_of

# Measured at most 2e-4, and 5e-4 with linear attention in torch: scalars of the balancing loss and of recomputation,
# padding of the convolution, which do not grow with the rows.
NEAR = 1e-3
# In a batch of several rows torch also copies what it works on of each chunk. Measured 9.7e-3.
NEAR_ROWS = 1.5e-2

SELECTIVE = {name: Recompute("selective", frozenset({name})) for name in ("core_attn", "mlp", "moe")}
# Modules of `recompute_modules` that some models have nothing of.
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


def widened(config, text: dict, vision: dict, **rope):
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


def wide(moe: bool):
    text = dict(intermediate_size=544) | (EXPERTS if moe else {})
    return widened(presets.hf_config("30B-A3B" if moe else "2B"), text, dict(deepstack_visual_indexes=[0, 2]))


def wide_qwen3_5(moe: bool):
    text = (
        dict(layer_types=["linear_attention", "full_attention", "linear_attention"], mtp_num_hidden_layers=1)
        | dict(linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=24, linear_value_head_dim=28)
        | (EXPERTS | dict(shared_expert_intermediate_size=136) if moe else dict(intermediate_size=544))
    )
    return widened(qwen3_5_presets.hf_config("35B-A3B" if moe else "2B"), text, {}, partial_rotary_factor=1.0)


FAMILIES = {
    "dense": partial(wide, moe=False), "MoE": partial(wide, moe=True), "Qwen3.5": partial(wide_qwen3_5, moe=False),
    "Qwen3.5 MoE": partial(wide_qwen3_5, moe=True),
}  # fmt: skip


def build(config, training: TrainingSettings):
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
    return build_model(provider).train()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_what_autograd_keeps(case, family):
    precision, recompute, vision = CASES[case]
    if family in WITHOUT.get(case, ()):
        pytest.skip("this model has no such module")
    config, mtp = FAMILIES[family](), case.startswith("MTP")
    if mtp and not family.startswith("Qwen3.5"):
        pytest.skip("this model has no multi-token prediction")
    dims, split = dimensions_of(config.to_dict()), ModelSplit(1)
    ((chunk,),) = split.chunks(len(dims.indices["text_layers"]))
    training = TrainingSettings(
        transformer_engine=False, precision=precision, recompute=recompute, vision_recompute=vision,
        fused_activation=case == "fused activation", loss_chunk_tokens=50 if "loss in chunks" in case else 0,
        trains_mtp=mtp,
    )  # fmt: skip
    model = build(config, training)
    for content, packed in itertools.product(("many images", "video", "text only"), (True, False)):
        samples = make_samples(content, config, seed=3)
        lengths = [len(sample.ids) for sample in samples]
        # With padding, so that segments fill more chunks of linear attention than one: only then is all kept of each.
        layout = SequenceLayout.packed_row(lengths, multiple=196) if packed else SequenceLayout.rows(lengths, 330)
        batch = make_batch(samples, config, layout=layout)
        one = replace(training, packed=packed)
        counted = chunk_activations(dims, split, one, chunk, work_of(batch)).total
        error = counted / saved_bytes(model, batch, predicts=mtp) - 1
        linear = "linear_layers" in dims.indices
        print(f"{family}, {case}, {content}, {'packed' if packed else 'rows'}: {error:+.1e}")
        assert abs(error) <= (NEAR_ROWS if linear and not packed else NEAR), (content, packed)


@pytest.mark.parametrize("family", ["MoE", "Qwen3.5 MoE"])
@pytest.mark.parametrize("fused", [True, False])
def test_frozen_experts_keep_no_inputs(family, fused):
    config = FAMILIES[family]()
    dims, split = dimensions_of(config.to_dict()), ModelSplit(1)
    ((chunk,),) = split.chunks(len(dims.indices["text_layers"]))
    training = TrainingSettings(transformer_engine=False, precision=BF16, fused_activation=fused, loss_chunk_tokens=0)
    frozen = replace(training, frozen=frozenset({Part.LANGUAGE_MODEL}))
    model, batch = build(config, training), make_batch(make_samples("text only", config, seed=3), config, packed=True)
    counted = [chunk_activations(dims, split, one, chunk, work_of(batch)).total for one in (training, frozen)]
    kept = [saved_bytes(model, batch)]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    kept.append(saved_bytes(model, batch))
    assert kept[0] - kept[1] == counted[0] - counted[1] > 0


def total(size: str, split: ModelSplit, training: TrainingSettings) -> float:
    found = estimate(dimensions_of(presets.config_dict(size)), split, training)
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
def test_kept_bytes_are_linear_in_rows(size, training):
    once = total(size, ModelSplit(1), training)
    twice = total(size, ModelSplit(1), replace(training, micro_batch_size=2 * training.micro_batch_size))
    blank = 0.0 if training.max_patches != 0 else 0.02  # a row without pictures has a small blank one
    assert twice == pytest.approx(2 * once, rel=1e-9 + blank)


@given(SIZES, RUNS)
@settings(max_examples=40)
def test_kept_bytes_fall_with_every_split_and_with_recomputation(size, training):
    whole = total(size, ModelSplit(8, tp=1), training)
    assert total(size, ModelSplit(8, tp=2, etp=1 if "A" in size else None, sequence_parallel=True), training) < whole
    if training.transformer_engine:  # without it all keys and values are gathered
        assert total(size, ModelSplit(8, cp=2), training) < whole
    pipeline = ModelSplit(8, pp=2)
    assert total(size, pipeline, replace(training, global_batch_size=4 * training.micro_batch_size)) < whole
    module = "moe" if "A" in size else "mlp"
    selective = replace(training, recompute=Recompute("selective", frozenset({module})))
    full = replace(training, recompute=FULL, vision_recompute=FULL)
    assert total(size, ModelSplit(8), full) < total(size, ModelSplit(8), selective) < whole


def attention_bytes(split: ModelSplit, *, packed: bool) -> dict[str, float]:
    """Bytes per token that a layer of the dense model with three groups of heads keeps of its attention."""
    training = TrainingSettings(transformer_engine=False, precision=FP32, packed=packed)
    return attention(RankWidths(dimensions_of(wide(moe=False).to_dict()), split, training))


def test_ranks_that_share_a_group_keep_the_output_of_all_groups():
    """More ranks than groups gather queries, keys and values (measured on four ranks in test_on_ranks)."""
    whole, three, six = (attention_bytes(ModelSplit(tp, tp=tp), packed=True)["linear_qkv: output"] for tp in (1, 3, 6))
    assert three == whole / 3 and six == whole


@pytest.mark.parametrize("packed", [False, True])
def test_context_parallel_ranks_keep_keys_of_all_and_their_own_output(packed):
    """Padded rows too (measured on two ranks in test_on_ranks)."""
    one, two = (attention_bytes(ModelSplit(cp, cp=cp), packed=packed) for cp in (1, 2))
    assert ("attention: output" in one) == packed
    assert two["attention: output"] == two["queries"]
    assert two["keys and values of all context-parallel ranks"] == 4 * one["keys"] and "keys" not in two


@pytest.mark.parametrize("kernel", [True, False], ids=["Transformer Engine", "formula"])
@pytest.mark.parametrize("precision", [BF16, FP32], ids=["bfloat16", "float32"])
def test_rotary_angles_are_those_of_the_layers(precision, kernel):
    """Angles for the kernel, cosines and sines for the formula: of a token of the text model and of a patch."""
    config, tokens = wide(moe=False), 7
    dims = dimensions_of(config.to_dict())
    r = RankWidths(dims, ModelSplit(1), TrainingSettings(precision=precision, transformer_engine=kernel))
    head = dims["v_hidden"] // dims["v_heads"]
    of_tower = vision_rotary(torch.zeros(tokens, 2, dtype=torch.long), head, fused=kernel)
    dtype = torch.bfloat16 if precision == BF16 else torch.float32
    of_text = InterleavedMRoPE(dims["head_dim"], 5e6, [8, 6, 6], dtype, fused=kernel)(torch.arange(tokens)[None])
    assert of_tower.nbytes == patch_inputs(r)["rotary angles"] * tokens
    assert of_text.nbytes == embedding(r, pre_process=True)["rotary angles"] * tokens
