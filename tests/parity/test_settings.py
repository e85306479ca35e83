"""Settings that differ from the released models match transformers."""

import json
import shutil
import types

from qwen3vl_bridge.models.common import moe
from qwen3vl_bridge.testing.tiny_checkpoint import make_model

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from transformers import AutoConfig

from tests.helpers.batches import make_batch, make_samples, per_sample
from tests.helpers.noise import relative
from tests.models.qwen3_5 import tiny
from tests.parity.conftest import make_pair
from tests.parity.test_parity import check_parity


def changed(folder, target, part="text_config", **settings):
    """Copy a checkpoint with other settings, by default of the text model."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    config[part].update(settings)
    (target / "config.json").write_text(json.dumps(config))
    return target


def assert_parity(pair) -> tuple[list[torch.Tensor], float]:
    """Check one batch; return its logits, and the limit of their error."""
    samples = make_samples("mixed", pair.config, seed=8)
    found, limits = check_parity(pair, samples, make_batch(samples, pair.config, packed=True))
    return found.logits, limits["logits"]


def assert_parity_of_change(usual, pair) -> None:
    """Check parity, and that logits differ from those of another model."""
    batch = make_batch(make_samples("mixed", usual.config, seed=8), usual.config, packed=True)
    with torch.no_grad():
        plain = per_sample(usual.megatron(inputs=batch.local().without_labels()), batch.layout)
    logits, limit = assert_parity(pair)
    assert max((a - b).abs().max() for a, b in zip(logits, plain, strict=True)) > 10 * limit


SCALED = {
    "yarn": dict(factor=4.0, original_max_position_embeddings=64), "linear": dict(factor=2.0),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
}  # fmt: skip


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("kind", SCALED)
def test_scaled_rope_matches_transformers(kind, untied_folder, tmp_path):
    rope = dict(rope_theta=5e6, mrope_section=[6, 5, 5], mrope_interleaved=True)
    folder = changed(untied_folder, tmp_path / kind, rope_parameters=dict(rope_type=kind, **rope, **SCALED[kind]))
    assert_parity_of_change(make_pair(untied_folder), make_pair(folder))


def test_rope_settings_in_old_config_format_match_transformers(untied_folder, tmp_path):
    old = dict(rope_parameters=None, rope_theta=5e6, rope_scaling=dict(rope_type="default", mrope_section=[6, 5, 5]))
    assert_parity(make_pair(changed(untied_folder, tmp_path / "old", **old)))


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("kind", ["untied", pytest.param("moe", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("part", "activation"),
    [("vision_config", "silu"), ("vision_config", "quick_gelu"), ("text_config", "gelu"), ("text_config", "relu")],
)
def test_configured_activation_function_matches_transformers(kind, part, activation, request, tmp_path):
    """Megatron-Bridge's functional tests have toy models with `vision_config.hidden_act` silu."""
    folder = request.getfixturevalue(f"{kind}_folder")
    fields = dict(moe_aux_loss_coeff=0.0) if kind == "moe" else {}
    other = changed(folder, tmp_path / "changed", part, hidden_act=activation)
    assert_parity_of_change(make_pair(folder, **fields), make_pair(other, **fields))


@pytest.mark.parametrize("kind", ["untied", "moe"])
def test_fused_activation_saves_fewer_activations_and_keeps_gradients(kind, request):
    """Megatron-Bridge's provider has `bias_activation_fusion`, a fused formula of SwiGLU."""
    fields = dict(moe_aux_loss_coeff=0.0) if kind == "moe" else {}
    kept, gradients = [], []
    for fused in (True, False):
        pair = make_pair(request.getfixturevalue(f"{kind}_folder"), bias_activation_fusion=fused, **fields)
        inputs = make_batch(make_samples("mixed", pair.config, seed=8), pair.config, packed=True).local()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept[-1].append(x.numel()) or x, lambda x: x):
            kept.append([])
            loss = (pair.megatron(inputs=inputs) * inputs.loss_mask).sum()
        loss.backward()
        gradients.append(pair.megatron_gradients())
    fused, unfused = gradients
    worst = max(relative(fused, unfused).values())
    print(f"{kind}: {worst:.1e}, kept {sum(kept[0]) / sum(kept[1]):.3f}")
    assert sum(kept[0]) < sum(kept[1])
    assert worst <= 1e-5  # measured 9e-7


@pytest.mark.parametrize("in_float32", [True, False])
def test_apply_rotary_pos_emb_in_fp32_sets_dtype_of_rotary_angles(in_float32, untied_folder):
    """A field of Megatron-Bridge's provider, `apply_rotary_pos_emb_in_fp32`."""
    bf16 = dict(params_dtype=torch.bfloat16, bf16=True)
    pair = make_pair(untied_folder, apply_rotary_pos_emb_in_fp32=in_float32, **bf16)
    angles = pair.megatron.language_model.rotary_pos_emb(torch.zeros(3, 1, 4, dtype=torch.long))
    assert angles.dtype == (torch.float32 if in_float32 else torch.bfloat16)
    inputs = make_batch(make_samples("mixed", pair.config, seed=8), pair.config, packed=True).local()
    (pair.megatron(inputs=inputs) * inputs.loss_mask).sum().backward()


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_padded_vocabulary_matches_transformers_and_is_exported_unpadded(kind, request):
    pair = make_pair(request.getfixturevalue(f"{kind}_folder"), should_pad_vocab=True, make_vocab_size_divisible_by=100)
    assert pair.megatron.language_model.embedding.word_embeddings.weight.shape[0] == 600
    exported = dict(pair.bridge.export_hf_weights([pair.megatron], cpu=True, show_progress=False))
    for name, weight in pair.reference.named_parameters():  # an export leaves the padding out
        assert torch.equal(exported[name], weight), name
    assert_parity(pair)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("settings", [dict(decoder_sparse_step=2, mlp_only_layers=[]), dict(mlp_only_layers=[0, 3])])
def test_model_with_dense_and_moe_layers_matches_transformers(settings, moe_folder, tmp_path):
    config = AutoConfig.from_pretrained(changed(moe_folder, tmp_path / "config", **settings))
    make_model(config, seed=5).save_pretrained(tmp_path / "made")
    pair = make_pair(tmp_path / "made", moe_aux_loss_coeff=0.0)
    assert 0 < len(pair.provider.moe_layers) < 3
    assert_parity(pair)


def test_vision_tower_without_deepstack_matches_transformers(untied_folder, tmp_path):
    config = AutoConfig.from_pretrained(untied_folder)
    config.vision_config.deepstack_visual_indexes = []
    make_model(config, seed=6).save_pretrained(tmp_path)
    assert_parity(make_pair(tmp_path))


def test_loss_raises_if_parallel_output_is_false_with_tensor_parallelism(untied_folder, monkeypatch):
    """Under tensor parallelism megatron-core would compute wrong gradients."""
    text = make_pair(untied_folder).megatron.language_model
    monkeypatch.setattr(text, "parallel_output", False)
    monkeypatch.setattr(text.pg_collection, "tp", types.SimpleNamespace(size=lambda: 2, rank=lambda: 1))
    with pytest.raises(ValueError, match="parallel_output is False, expected True"):
        text.compute_language_model_loss(torch.zeros(1, 1), torch.zeros(1, 1, 512))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_recomputed_moe_layer_keeps_no_autograd_graph(family, moe_folder, tmp_path, monkeypatch):
    """megatron-core's own layer keeps the graph of its last forward pass. Its gradients are equal to the last bit."""
    if family == "qwen3_5":
        moe_folder = tiny.make_checkpoint(tmp_path / "qwen3_5", moe=True)
    recompute = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)

    def gradients(kept: bool) -> list[torch.Tensor]:
        pair = make_pair(moe_folder, **recompute)
        batch = make_batch(make_samples("mixed", pair.config, seed=8), pair.config, packed=True)
        pair.megatron(inputs=batch.local()).sum().backward()
        layers = [module for module in pair.megatron.modules() if isinstance(module, MoELayer)]
        held = [value for layer in layers for value in vars(layer.token_dispatcher).values() if torch.is_tensor(value)]
        assert layers and any(value.grad_fn is not None for value in held) == kept
        # As wide as the experts twice, in Transformer Engine's permutation.
        maps = [layer.token_dispatcher.reversed_local_input_permutation_mapping for layer in layers]
        assert all((found is not None) == kept for found in maps)
        return [parameter.grad for parameter in pair.megatron.parameters() if parameter.grad is not None]

    found = gradients(kept=False)
    monkeypatch.setattr(moe.MemoryEfficientMoELayer, "postprocess", MoELayer.postprocess)
    expected = gradients(kept=True)
    assert len(found) == len(expected) > 10 and all(map(torch.equal, found, expected))
