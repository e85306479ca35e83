"""Which kernels compute a model: defaults by what is installed, and what would be ignored or wrong."""

import logging

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.models import settings
from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider
from qwen3vl_bridge.models.refusals import AFTER_FINALIZE, BEFORE_FINALIZE, ON_FORWARD, ON_TRAIN
from qwen3vl_bridge.models.rules import check
from qwen3vl_bridge.models.settings import (
    can_fuse_weight_gradients,
    complete_before_finalize,
    complete_on_finalize,
    has_transformer_engine,
)
from qwen3vl_bridge.models.vision_tower import vision_transformer_config

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.enums import AttnBackend
from packaging.version import Version

from .split_providers import CP2, DENSE, EXPERTS, finalized, provider_of

TE = "transformer_engine"


def with_transformer_engine(size, fields):
    """A finalised provider that names it, as it is not needed for looking at settings."""
    provider = finalized(size, {})
    for name, value in {"transformer_impl": TE, **fields}.items():
        setattr(provider, name, value)
    return provider


@pytest.fixture
def installed(monkeypatch):
    """Says which release of Transformer Engine is there."""

    def install(release):
        monkeypatch.setattr("megatron.core.utils._te_version", Version(release))

    return install


@pytest.mark.parametrize("apex", [True, False])
@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("transformer_engine", [True, False])
def test_weight_gradients_are_fused_where_megatrons_output_layer_can(monkeypatch, apex, cuda, transformer_engine):
    """Megatron-Bridge's default is True with Transformer Engine alone, and building any model fails."""
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", apex)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr("megatron.bridge.utils.fusions.can_enable_gradient_accumulation_fusion", lambda: True)
    assert can_fuse_weight_gradients() is (apex and cuda)
    assert Qwen3VLModelProvider().gradient_accumulation_fusion is (apex and cuda)


def test_what_cannot_be_fused_is_turned_off_and_said(caplog):
    """A run's settings may come from a machine that has more."""
    assert finalized(DENSE, dict(gradient_accumulation_fusion=True)).gradient_accumulation_fusion is False
    assert "gradient_accumulation_fusion is True and is set to False" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "implementation", "fused"),
    [
        (torch.bfloat16, "native", True),
        (torch.float16, "native", False),
        (torch.float32, "native", False),
        (torch.float32, "te", True),
    ],
)
def test_the_fused_loss_is_for_logits_that_it_does_not_round(dtype, implementation, fused, caplog):
    caplog.set_level(logging.INFO)
    kinds = dict(bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    provider = finalized(DENSE, dict(params_dtype=dtype, cross_entropy_fusion_impl=implementation, **kinds))
    assert provider.cross_entropy_loss_fusion is fused
    assert ("rounds the gradient" in caplog.text) is not fused


@pytest.mark.parametrize(("activation", "fused"), [(F.silu, True), ("silu", True), ("gelu", False), (F.relu, False)])
def test_only_silu_is_fused(activation, fused):
    """megatron-core's fused GELU is the tanh approximation, whichever was meant."""
    assert finalized(DENSE, dict(activation_func=activation)).bias_activation_fusion is fused


def test_activations_that_no_configuration_can_name():
    with pytest.raises(ValueError, match=r"activation_func is .*softplus.*, expected that of one of silu"):
        finalized(DENSE, dict(activation_func=F.softplus))
    with pytest.raises(ValueError, match="text model's activation is 'softplus', expected one of silu"):
        finalized(DENSE, dict(activation_func="softplus"))


@pytest.mark.parametrize(
    ("size", "fields", "message"),
    [
        (DENSE, dict(cpu_offloading=True, cpu_offloading_num_layers=1), "cpu_offloading is True with .* 'local', exp"),
        (
            DENSE,
            dict(fp32_residual_connection=True, params_dtype=torch.bfloat16),
            "fp32_residual_connection is True with transformer_impl 'local' and params_dtype torch.bfloat16, exp",
        ),
        (DENSE, dict(apply_query_key_layer_scaling=True), "scaling is True with .* 'local', expected False: only Tr"),
        (DENSE, dict(log_max_attention_logit=True), "attention_logit is True with .* 'local', expected False: only"),
        (DENSE, dict(batch_invariant_mode=True), "batch_invariant_mode is True with .* 'local', expected False: only"),
        (DENSE, dict(distribute_saved_activations=True), "saved_activations is True with recompute_granularity None"),
        (
            EXPERTS,
            dict(recompute_granularity="selective", recompute_modules=["core_attn", "mlp", "shared_experts"]),
            r"recompute_modules has \['mlp', 'shared_experts'\], which this model does not have",
        ),
        (
            DENSE,
            dict(recompute_granularity="selective", recompute_modules=["mlp", "moe"]),
            r"recompute_modules has \['moe'\], which this model does not have",
        ),
    ],
)
def test_what_the_layers_would_ignore_or_fail_at(size, fields, message):
    with pytest.raises(ValueError, match=message):
        finalized(size, fields)


def test_the_other_fused_loss_is_transformer_engines():
    """It may be loaded with it, but not trained."""
    provider = finalized(DENSE, dict(cross_entropy_fusion_impl="te"))
    with pytest.raises(ValueError, match=r"cross_entropy_fusion_impl is 'te' with .* 'local', expected 'nativ"):
        check(ON_TRAIN, provider)
    provider.cross_entropy_loss_fusion = False
    check(ON_TRAIN, provider)


@pytest.mark.parametrize("precision", [dict(fp8="e4m3"), dict(fp4="e2m1")])
def test_eight_and_four_bits_are_transformer_engines(precision, caplog):
    caplog.set_level(logging.INFO)
    (name,) = precision
    with pytest.raises(ValueError, match=f"{name} is .* with transformer_impl 'local', .*: it would be ignored"):
        finalized(DENSE, precision)
    provider = with_transformer_engine(DENSE, precision)
    caplog.clear()  # of what was said of the one it is made from
    check(BEFORE_FINALIZE, provider)
    complete_on_finalize(provider)
    assert f"{name} applies to the text model's layers" in caplog.text


def test_local_attention_in_transformer_engines_layers():
    with pytest.raises(ValueError, match="attention_backend is local with transformer_impl 'transformer_engine'"):
        check(BEFORE_FINALIZE, with_transformer_engine(DENSE, dict(attention_backend=AttnBackend.local)))
    finalized(DENSE, dict(attention_backend=AttnBackend.local))


@pytest.mark.parametrize(
    ("release", "fields", "refused"),
    [
        ("2.10", {}, True),
        ("2.11", {}, False),
        ("2.18", CP2, True),
        ("2.10", dict(params_dtype=torch.bfloat16), False),
        ("2.10", dict(transformer_impl="local"), False),
    ],
)
def test_float32_in_transformer_engine(release, fields, refused, installed):
    """Of its attention the part without a kernel is left, which takes packed rows from 2.11 on."""
    installed(release)
    provider = with_transformer_engine(DENSE, dict(params_dtype=torch.float32) | fields)
    if refused:
        with pytest.raises(ValueError, match=f"expected transformer_impl='local' or 16 bits: .* {release} has no"):
            check(ON_FORWARD, provider)
    else:
        check(ON_FORWARD, provider)


@pytest.mark.parametrize(
    ("kind", "release", "refused"),
    [("a2a", "2.9", True), ("a2a", "2.10", False), ("all_gather", "2.17", True), ("all_gather", "2.18", False)],
)
def test_context_parallelism_by_release(kind, release, refused, installed):
    """pyproject.toml takes 2.8 and later; `p2p` is in all of them."""
    installed(release)
    provider = with_transformer_engine(DENSE, dict(CP2, cp_comm_type=[kind] + ["p2p"] * 35))
    if refused:
        with pytest.raises(ValueError, match=f"{kind}' supports packed rows from .* on, and {release} is installed"):
            check(AFTER_FINALIZE, provider)
    else:
        check(AFTER_FINALIZE, provider)


def test_a_loss_in_chunks():
    assert finalized(DENSE, {}).loss_chunk_tokens == 8192
    with pytest.raises(ValueError, match="loss_chunk_tokens is -1, expected 0 or more"):
        finalized(DENSE, dict(loss_chunk_tokens=-1))
    deferred = with_transformer_engine(DENSE, dict(defer_embedding_wgrad_compute=True))
    with pytest.raises(ValueError, match="defer_embedding_wgrad_compute is True with loss_chunk_tokens 8192, expected"):
        check(BEFORE_FINALIZE, deferred)
    deferred.loss_chunk_tokens = 0
    check(BEFORE_FINALIZE, deferred)


def test_fused_permutation():
    """As NeMo-RL's base configuration and Megatron-Bridge's recipes ask for it."""
    with pytest.raises(
        ValueError, match=r"moe_permute_fusion is True with .* 'local', expected False: Transformer Engine provides it"
    ):
        finalized(EXPERTS, dict(moe_permute_fusion=True))


def test_the_fused_router(installed):
    """It is Transformer Engine's, in 32 bits."""
    with pytest.raises(
        ValueError, match=r"moe_router_fusion is True with .* 'local', expected False: Transformer Engine provides it"
    ):
        finalized(EXPERTS, dict(moe_router_fusion=True))
    provider = provider_of(EXPERTS, dict(moe_router_fusion=True, moe_router_dtype="fp64", transformer_impl=TE))
    with pytest.raises(ValueError, match=r"moe_router_fusion is True with moe_router_dtype 'fp64', .* in 'fp32'"):
        provider.finalize()


@pytest.mark.parametrize(
    ("installed", "implementation", "fused"), [(True, TE, True), (True, "local", False), (False, TE, False)]
)
def test_rotation_is_fused_by_transformer_engines_kernel(monkeypatch, caplog, installed, implementation, fused):
    """In both towers; megatron-core refuses the setting where the kernel is missing."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(settings, "has_transformer_engine", lambda: installed)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", print if installed else None)
    provider = Qwen3VLModelProvider()
    assert provider.__dataclass_fields__["apply_rope_fusion"].default_factory is has_transformer_engine
    provider.apply_rope_fusion, provider.transformer_impl = True, implementation
    complete_before_finalize(provider)
    assert provider.apply_rope_fusion is fused
    assert ("apply_rope_fusion is set to False: the kernel is Transformer Engine's" in caplog.text) is not fused
    tower = finalized(DENSE, {})
    tower.apply_rope_fusion = provider.apply_rope_fusion
    assert vision_transformer_config(tower).apply_rope_fusion is fused


def test_the_tower_is_made_where_the_text_model_is():
    """On the meta device Transformer Engine's modules ask their configuration."""
    provider = finalized(DENSE, dict(init_model_with_meta_device=True))
    assert vision_transformer_config(provider).init_model_with_meta_device
