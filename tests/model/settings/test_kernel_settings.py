"""Which kernels compute a model, what only a trained one may not have, and settings that would be ignored."""

import contextlib
import copy
import logging
import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import qwen3vl_bridge
from qwen3vl_bridge import registry
from qwen3vl_bridge.models import refusals, settings
from qwen3vl_bridge.models.provider import ExpertsMixin
from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider
from qwen3vl_bridge.models.refusals import (
    AFTER_FINALIZE,
    BEFORE_FINALIZE,
    DEPENDENTS,
    ON_FORWARD,
    ON_TRAIN,
    check_microbatches,
)
from qwen3vl_bridge.models.rules import DEFAULT, IGNORED, Allowed, Range, When, check
from qwen3vl_bridge.models.settings import (
    can_fuse_weight_gradients,
    complete_before_finalize,
    complete_on_finalize,
    has_transformer_engine,
)
from qwen3vl_bridge.models.vision_tower import vision_transformer_config
from qwen3vl_bridge.training import run_refusals
from qwen3vl_bridge.training.process_groups import initialize, shutdown

import megatron.bridge
import pytest
import torch
import torch.nn.functional as F
from megatron.bridge import AutoBridge
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config import InProcessRestartConfig, StragglerDetectionConfig
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.enums import AttnBackend
from packaging.version import Version
from qwen3vl_recipes import qwen3_vl_2b_sft_config
from qwen3vl_recipes.dry_run import finalised

from .test_parallel_settings import CP2, DENSE, EXPERTS, OVERLAP, PP2, SP2, VPP2, finalized, provider_of

TE = "transformer_engine"


def with_transformer_engine(size, fields):
    provider = finalized(size, {})
    for name, value in {"transformer_impl": TE, **fields}.items():
        setattr(provider, name, value)
    return provider


@pytest.fixture
def installed(monkeypatch):
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
    assert finalized(DENSE, dict(gradient_accumulation_fusion=True)).gradient_accumulation_fusion is False
    assert "gradient_accumulation_fusion is set to False" in caplog.text


@pytest.mark.parametrize(("dtype", "implementation", "fused"), [
    (torch.bfloat16, "native", True), (torch.float16, "native", True), (torch.float32, "native", False),
    (torch.float32, "te", True),
])  # fmt: skip
def test_the_native_fused_loss_is_for_logits_in_16_bits(dtype, implementation, fused, caplog):
    caplog.set_level(logging.INFO)
    kinds = dict(bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    provider = finalized(DENSE, dict(params_dtype=dtype, cross_entropy_fusion_impl=implementation, **kinds))
    assert provider.cross_entropy_loss_fusion is fused
    assert ("of float32 logits" in caplog.text) is not fused


@pytest.mark.parametrize(("activation", "fused"), [(F.silu, True), ("silu", True), ("gelu", False), (F.relu, False)])
def test_only_silu_is_fused(activation, fused):
    """megatron-core's fused GELU is the tanh approximation, whichever was meant."""
    assert finalized(DENSE, dict(activation_func=activation)).bias_activation_fusion is fused


def test_the_other_fused_loss_is_transformer_engines():
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


@pytest.mark.parametrize(("release", "fields", "refused"), [
    ("2.10", {}, True), ("2.11", {}, False), ("2.18", CP2, True), ("2.10", dict(params_dtype=torch.bfloat16), False),
    ("2.10", dict(transformer_impl="local"), False),
])  # fmt: skip
def test_float32_in_transformer_engine(release, fields, refused, installed):
    """Of its attention the part without a kernel is left, which takes packed rows from 2.11 on."""
    installed(release)
    provider = with_transformer_engine(DENSE, dict(params_dtype=torch.float32) | fields)
    if refused:
        with pytest.raises(ValueError, match=f"expected transformer_impl='local' or 16 bits: .* {release} has no"):
            check(ON_FORWARD, provider)
    else:
        check(ON_FORWARD, provider)


@pytest.mark.parametrize(("kinds", "fields", "release", "message"), [
    ("a2a+p2p", {}, "2.18", r"is 'a2a\+p2p' with .*, expected None, 'p2p', 'all_gather' or 'a2a': packed"),
    ("a2a", dict(context_parallel_size=16), "2.18", "expected a divisor of 8, the query groups of each"),
    ("a2a", dict(SP2, context_parallel_size=8), "2.18", "expected a divisor of 4, the query groups of each"),
    (["a2a", "p2p"] * 18, {}, "2.9", "'a2a' supports packed rows from .* on, and 2.9 is installed"),
    (["a2a", "p2p"] * 18, {}, "2.10", None),
    (["p2p", "all_gather"] * 18, {}, "2.17", "'all_gather' supports packed rows from .* on, and 2.17 is"),
    (["p2p", "all_gather"] * 18, {}, "2.18", None),
])  # fmt: skip
def test_context_parallelism_of_transformer_engine(kinds, fields, release, message, installed):
    """pyproject.toml takes 2.8 and later; `p2p` is in all of them."""
    installed(release)
    provider = with_transformer_engine(DENSE, {**CP2, "cp_comm_type": kinds, **fields})
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check(AFTER_FINALIZE, provider)


def test_a_loss_in_chunks():
    assert finalized(DENSE, {}).loss_chunk_tokens == 2048
    deferred = with_transformer_engine(DENSE, dict(defer_embedding_wgrad_compute=True))
    with pytest.raises(ValueError, match="defer_embedding_wgrad_compute is True with loss_chunk_tokens 2048, expected"):
        check(BEFORE_FINALIZE, deferred)
    deferred.loss_chunk_tokens = 0
    check(BEFORE_FINALIZE, deferred)


def test_a_fused_router_has_no_float64():
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


def test_the_tower_is_made_where_the_text_model_is_and_in_its_precision():
    """On the meta device Transformer Engine's modules ask their configuration."""
    tower = vision_transformer_config(finalized(DENSE, dict(init_model_with_meta_device=True)))
    assert tower.init_model_with_meta_device and tower.params_dtype is torch.bfloat16


@pytest.fixture
def build(monkeypatch):
    mixin = "megatron.bridge.models.gpt_provider.GPTModelProvider.provide_distributed_model"

    def provide_distributed_model(self, ddp_config=None, wrap_with_ddp=True, use_megatron_fsdp=False):
        return ["model"]

    monkeypatch.setattr(mixin, provide_distributed_model)
    monkeypatch.setattr("qwen3vl_bridge.models.provider.log_trained_parameters", lambda model: None)

    def build(size, fields, **how):
        return finalized(size, fields).provide_distributed_model(**how) == ["model"]

    return build


@pytest.mark.parametrize(("size", "fields", "message"), [
    (DENSE, dict(pipeline_model_parallel_size=18), r"first pipeline stage has 2 layers, expected True, or at leas"),
    (DENSE, dict(PP2, **OVERLAP, virtual_pipeline_model_parallel_size=9), "first pipeline stage has 2 layers"),
    (DENSE, dict(PP2, num_layers_in_first_pipeline_stage=1), "first pipeline stage has 1 layers"),
    (DENSE, dict(PP2, pipeline_model_parallel_layout="E|t*36L"), "first pipeline stage has 0 layers"),
    (DENSE, VPP2, "overlap_p2p_comm is False with .* expected True: two interleaved stages would confuse"),
    (DENSE, dict(PP2, pipeline_model_parallel_layout="Et*9|t*9|t*9|t*9L"), "overlap_p2p_comm is False with"),
    (DENSE, dict(VPP2, overlap_p2p_comm=True), "batch_p2p_comm is True with overlap_p2p_comm and .*, expected"),
    (DENSE, dict(PP2, **OVERLAP), "overlap_p2p_comm is True with .* virtual_pipeline_model_parallel_size None"),
    (DENSE, dict(VPP2, **OVERLAP, microbatch_group_size_per_vp_stage=1), "stage is 1 .*, expected .*, 2, or more"),
    (DENSE, dict(PP2, pipeline_model_parallel_layout="Ett|t*10|t*14|t*10L", **OVERLAP), "stage has 2 layers"),
    (DENSE, dict(SP2, parallel_output=False), "parallel_output is False with .* 2, expected True: a loss on"),
    (DENSE, dict(VPP2, batch_p2p_comm=False), "overlap_p2p_comm is False with .* expected True: two interleaved"),
    (DENSE, dict(PP2, pipeline_dtype=torch.float16), "pipeline_dtype is torch.float16, expected torch.bfloat16"),
])  # fmt: skip
def test_what_could_not_be_trained_can_be_built_for_other_uses(build, size, fields, message):
    with pytest.raises(ValueError, match=message):
        build(size, fields, ddp_config=SimpleNamespace(average_in_collective=False))
    assert build(size, fields, wrap_with_ddp=False)


@pytest.mark.parametrize(("size", "fields"), [
    (EXPERTS, SP2), (DENSE, dict(SP2, sequence_parallel=False)),
    (DENSE, dict(PP2, num_layers_in_first_pipeline_stage=3)),
    (DENSE, dict(PP2, num_layers_in_first_pipeline_stage=1, variable_seq_lengths=True)),
    (DENSE, dict(PP2, pipeline_model_parallel_layout="Ettt|t*33L")),
])  # fmt: skip
def test_what_can_be_trained_is_built(build, size, fields):
    assert build(size, fields, ddp_config=SimpleNamespace(average_in_collective=False))


@pytest.mark.parametrize(("size", "fields", "why"), [
    (DENSE, dict(loss_chunk_tokens=8192), "with loss_chunk_tokens the"),
    (DENSE, dict(loss_chunk_tokens=0, share_embeddings_and_output_weights=True), "with share_embeddings_and_"),
    (DENSE, dict(loss_chunk_tokens=0), None),
])  # fmt: skip
def test_shards_have_no_fused_gradients_of_weights_with_several_uses(build, size, fields, why, caplog):
    ddp = SimpleNamespace(average_in_collective=False)
    for sharded in (True, False):
        provider = finalized(size, fields)
        provider.gradient_accumulation_fusion = True  # as `finalize` leaves it with APEX and a GPU
        with caplog.at_level("WARNING"):
            provider.provide_distributed_model(ddp, use_megatron_fsdp=sharded)
        assert provider.gradient_accumulation_fusion is (not sharded or why is None)
        assert (f"set to False: {why}" in caplog.text) is (sharded and why is not None)
        caplog.clear()


def test_ddp_may_be_turned_off_by_position(build):
    provider = finalized(DENSE, VPP2)
    assert provider.provide_distributed_model(None, False) == ["model"]
    with pytest.raises(ValueError, match="stages would confuse"):
        provider.provide_distributed_model(None, True)


@pytest.mark.parametrize(("group", "taken"), [(None, {2, 4, 6, 8}), (3, {3, 5, 6, 8}), (4, {4, 6, 7, 8})])
def test_interleaved_stages_take_microbatches_in_groups(group, taken):
    provider = finalized(DENSE, dict(VPP2, **OVERLAP, microbatch_group_size_per_vp_stage=group))
    for microbatches in range(1, 9):
        if microbatches in taken:
            check_microbatches(provider, microbatches, "a step")
        else:
            with pytest.raises(ValueError, match=f"a step has {microbatches} microbatches .* expected a multiple"):
                check_microbatches(provider, microbatches, "a step")
    check_microbatches(finalized(DENSE, PP2), 1, "a step")


def test_user_buffers_of_tensor_parallelism_are_refused_in_training():
    provider = finalized(DENSE, dict(SP2, tp_comm_overlap=True))
    with pytest.raises(ValueError, match="tp_comm_overlap is True, expected False: its buffers are memory that GPUs"):
        check(ON_TRAIN, provider)


def test_overlap_settings_of_megatron_bridge_are_in_place_before_the_check():
    """In its loop they are applied first, and the whole configuration is validated after."""
    provider = provider_of(DENSE, VPP2)
    overlap = CommOverlapConfig(tp_comm_overlap=False)
    overlap.data_parallel_size = 1
    overlap.finalize()
    overlap.setup(provider, OptimizerConfig(), None)
    provider.finalize()
    check(ON_TRAIN, provider)
    assert (provider.overlap_p2p_comm, provider.batch_p2p_comm) == (True, False)


@pytest.fixture
def first_of_two(untied_folder):
    """The first chunk of two on the first stage of two, built as miles and NeMo-RL build theirs: by `provide`."""
    provider = AutoBridge.from_hf_pretrained(str(untied_folder)).to_megatron_provider(load_weights=False)
    initialize(provider, seed=0)
    fields = dict(VPP2, pipeline_dtype=provider.params_dtype, variable_seq_lengths=True)
    for name, value in fields.items():
        setattr(provider, name, value)
    provider.finalize()
    return provider.provide(pre_process=True, post_process=False, vp_stage=0)


def test_a_model_that_provide_has_built_meets_them_in_its_first_step(first_of_two):
    """With megatron-core's defaults two stages mix up what they send each other: and only gradients are wrong."""
    ids = torch.arange(8)[None]
    with pytest.raises(ValueError, match=r"overlap_p2p_comm is False .* expected True: two interleaved stages would"):
        first_of_two(ids)
    with torch.no_grad():
        assert first_of_two(ids).isfinite().all()
    assert first_of_two.eval()(ids).isfinite().all()
    for name, value in OVERLAP.items():
        setattr(first_of_two.config, name, value)
    assert first_of_two.train()(ids).requires_grad


def test_transformer_engine_in_float32_is_refused_in_the_first_forward(pair, monkeypatch):
    """Whoever built it: of log probabilities too, as no release before 2.11 has an attention for its rows."""
    monkeypatch.setattr("megatron.core.utils._te_version", Version("2.10"))
    monkeypatch.setattr(pair.megatron.config, "transformer_impl", "transformer_engine")
    message = "params_dtype is torch.float32 with transformer_impl 'transformer_engine', expected transformer_impl="
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        pair.megatron(torch.arange(8)[None])


MODELS = [("qwen3_vl", "8B"), ("qwen3_vl", "30B-A3B"), ("qwen3_5", "9B"), ("qwen3_5", "35B-A3B")]
# Other models' recipes and layers, and code of Megatron-LM's loop.
OTHERS = re.compile(r"(recipes|perf_recipes|diffusion|models/(?!conversion)[^/]+|training/mlm_compat)/")


def changed(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return {str: "other", list: ["other"]}.get(type(value), 1)


def at_default(rules):
    return [rule for rule in rules if isinstance(rule, Allowed) and rule.expected is DEFAULT]


def assert_kept(row, rows, settings):
    """Another value of the row's setting is refused by the first row that it breaks, which is this one."""
    section, _, name = row.name.rpartition(".")
    owner = attrgetter(section)(settings) if section else settings
    before = getattr(owner, name)
    setattr(owner, name, changed(before))
    try:
        if row.when is None or row.when(settings):
            with pytest.raises(ValueError, match=rf"^{row.name} is .*, expected .*: {re.escape(row.why)}"):
                check(rows, settings)
        for value in row.also:
            setattr(owner, name, value)
            check([row], settings)
    finally:
        setattr(owner, name, before)


def assert_named(rules, settings):
    """Every row names settings that there are: one that is misspelt would say so only under its own circumstances."""
    for row in rules:
        if isinstance(row, Allowed):
            for name in row.name.split(" * "):
                attrgetter(name)(settings)
            if isinstance(row.when, When):
                row.when.describe(settings)
            if isinstance(row.expected, Range):
                row.expected.describe(settings)


@pytest.mark.parametrize(("family", "size"), MODELS)
def test_what_a_model_must_keep_at_its_default(family, size):
    config = registry.family(family).presets.hf_config(size)
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    of_kind = refusals.EXPERTS if isinstance(provider, ExpertsMixin) else refusals.DENSE
    assert_named((*of_kind, *provider.rules, *BEFORE_FINALIZE, *AFTER_FINALIZE, *ON_TRAIN), provider)
    rows = at_default((*of_kind, *provider.rules, *BEFORE_FINALIZE))
    assert len(rows) > 150
    for row in rows:
        assert_kept(row, rows, provider)
    for row in DEPENDENTS:
        on = copy.deepcopy(provider)
        switch = row.when.names
        setattr(attrgetter(switch.rpartition(".")[0])(on) if "." in switch else on, switch.rpartition(".")[2], "on")
        assert not row.when(on), row
    provider.finalize()
    provider.finalize()  # as completed by the first


@pytest.fixture(scope="module")
def run():
    shutdown()
    cfg = qwen3_vl_2b_sft_config()
    cfg.straggler, cfg.inprocess_restart = StragglerDetectionConfig(), InProcessRestartConfig()
    return finalised(cfg, 8)


def test_what_a_run_must_keep_at_its_default(run):
    rules = (*run_refusals.BEFORE_VALIDATE, *run_refusals.AFTER_VALIDATE)
    assert_named(rules, run)
    rows = at_default(rules)
    assert len(rows) > 100
    for row in rows:
        if row.name != "accuracy.path":  # on which other rows depend
            assert_kept(row, rows, run)
    for row in rows:
        if row.why == IGNORED and row.when.names in run_refusals.DEPENDENTS_BY_SWITCH:
            section, switch = row.when.names.split(".")
            other = copy.copy(run)
            setattr(other, section, replace(getattr(run, section), **{switch: True}))
            assert not row.when(other), row
    check(run_refusals.AFTER_VALIDATE, run)


def test_the_training_loop_does_not_read_them():
    """In the installed releases: a field that a newer one reads is to be taken off the table."""
    names = "|".join(name for names in run_refusals.UNREAD_BY_SECTION.values() for name in names.split())
    read = re.compile(rf"(?<!optim_config)(?<!self)(?<!model)\.({names})\b")  # other sections have some of them too
    found = {}
    for package in (megatron.bridge.__path__[0], Path(qwen3vl_bridge.__file__).parent):
        for file in Path(package).rglob("*.py"):
            place = file.relative_to(package).as_posix()
            code = re.sub(r"#.*", "", file.read_text())
            if not OTHERS.match(place) and (fields := set(read.findall(code))):
                found[place] = fields
    assert found == {}
