"""Kernels of a model, checks that only training needs, and settings that would be ignored."""

import copy
import logging
import re
import sys
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import qwen3vl_bridge
from qwen3vl_bridge import registry
from qwen3vl_bridge.config import fields as provider_fields
from qwen3vl_bridge.config import model_validation
from qwen3vl_bridge.config.checks import DEFAULT, IGNORED, Condition, Requires, Values, not_installed, run_checks
from qwen3vl_bridge.config.fields import (
    can_fuse_weight_gradients,
    complete_after_finalize,
    complete_before_finalize,
    has_transformer_engine,
)
from qwen3vl_bridge.config.model_validation import (
    AFTER_FINALIZE,
    BEFORE_FINALIZE,
    DEPENDENTS,
    MODEL_CAN_TRAIN,
    ON_FORWARD,
)
from qwen3vl_bridge.models.common.provider import ExpertsMixin
from qwen3vl_bridge.models.common.vision_tower import vision_transformer_config
from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider
from qwen3vl_bridge.training import run_validation
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
from qwen3vl_recipes.dry_run import finalize_copy

from tests.models.settings.test_parallel_settings import (
    CP2,
    DENSE,
    EXPERTS,
    OVERLAP,
    PP2,
    SP2,
    VPP2,
    finalized,
    provider_of,
)

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
def test_gradient_accumulation_fusion_default_requires_apex_and_cuda(monkeypatch, apex, cuda, transformer_engine):
    """With Megatron-Bridge's default, True with Transformer Engine alone, no model could be built."""
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", apex)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr("megatron.bridge.utils.fusions.can_enable_gradient_accumulation_fusion", lambda: True)
    assert can_fuse_weight_gradients() is (apex and cuda)
    assert Qwen3VLModelProvider().gradient_accumulation_fusion is (apex and cuda)


def test_finalize_turns_off_gradient_accumulation_fusion_if_unavailable(caplog):
    assert finalized(DENSE, dict(gradient_accumulation_fusion=True)).gradient_accumulation_fusion is False
    assert "gradient_accumulation_fusion is set to False" in caplog.text


@pytest.mark.parametrize(("dtype", "implementation", "fused"), [
    (torch.bfloat16, "native", True), (torch.float16, "native", True), (torch.float32, "native", False),
    (torch.float32, "te", True),
])  # fmt: skip
def test_native_cross_entropy_fusion_is_turned_off_for_float32(dtype, implementation, fused, caplog):
    caplog.set_level(logging.INFO)
    kinds = dict(bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    provider = finalized(DENSE, dict(params_dtype=dtype, cross_entropy_fusion_impl=implementation, **kinds))
    assert provider.cross_entropy_loss_fusion is fused
    assert ("for float32 logits" in caplog.text) is not fused


@pytest.mark.parametrize(("activation", "fused"), [(F.silu, True), ("silu", True), ("gelu", False), (F.relu, False)])
def test_bias_activation_fusion_is_on_only_for_silu(activation, fused):
    """megatron-core's fused GELU always computes the tanh approximation."""
    assert finalized(DENSE, dict(activation_func=activation)).bias_activation_fusion is fused


def test_checks_raise_if_te_cross_entropy_is_used_with_local_layers():
    provider = finalized(DENSE, dict(cross_entropy_fusion_impl="te"))
    with pytest.raises(ValueError, match=r"cross_entropy_fusion_impl is 'te' with .* 'local', expected 'nativ"):
        run_checks(MODEL_CAN_TRAIN, provider)
    provider.cross_entropy_loss_fusion = False
    run_checks(MODEL_CAN_TRAIN, provider)


@pytest.mark.parametrize("precision", [dict(fp8="e4m3"), dict(fp4="e2m1")])
def test_checks_raise_if_fp8_or_fp4_is_used_with_local_layers(precision, caplog):
    caplog.set_level(logging.INFO)
    (name,) = precision
    with pytest.raises(ValueError, match=f"{name} is .* with transformer_impl 'local', .*: it would be ignored"):
        finalized(DENSE, precision)
    provider = with_transformer_engine(DENSE, precision)
    caplog.clear()  # messages about the provider it was made from
    run_checks(BEFORE_FINALIZE, provider)
    complete_after_finalize(provider)
    assert f"{name} applies to the text model's layers" in caplog.text


def test_checks_raise_if_attention_backend_is_local_with_te_layers():
    with pytest.raises(ValueError, match="attention_backend is local with transformer_impl 'transformer_engine'"):
        run_checks(BEFORE_FINALIZE, with_transformer_engine(DENSE, dict(attention_backend=AttnBackend.local)))
    finalized(DENSE, dict(attention_backend=AttnBackend.local))


@pytest.mark.parametrize(("release", "fields", "raises"), [
    ("2.10", {}, True), ("2.11", {}, False), ("2.18", CP2, True), ("2.10", dict(params_dtype=torch.bfloat16), False),
    ("2.10", dict(transformer_impl="local"), False),
])  # fmt: skip
def test_checks_raise_if_te_version_lacks_float32_attention(release, fields, raises, installed):
    """In float32 only the unfused attention is left, which supports packed rows from 2.11 on."""
    installed(release)
    provider = with_transformer_engine(DENSE, dict(params_dtype=torch.float32) | fields)
    if raises:
        with pytest.raises(ValueError, match=f"expected transformer_impl='local' or 16 bits: .* {release} has no"):
            run_checks(ON_FORWARD, provider)
    else:
        run_checks(ON_FORWARD, provider)


def test_checks_raise_if_loss_is_chunked_and_embedding_gradient_deferred():
    assert finalized(DENSE, {}).loss_chunk_tokens == 2048
    deferred = with_transformer_engine(DENSE, dict(defer_embedding_wgrad_compute=True))
    with pytest.raises(ValueError, match="defer_embedding_wgrad_compute is True with loss_chunk_tokens 2048, expected"):
        run_checks(BEFORE_FINALIZE, deferred)
    deferred.loss_chunk_tokens = 0
    run_checks(BEFORE_FINALIZE, deferred)


def test_fused_moe_router_with_fp64_raises():
    provider = provider_of(EXPERTS, dict(moe_router_fusion=True, moe_router_dtype="fp64", transformer_impl=TE))
    with pytest.raises(ValueError, match=r"moe_router_fusion is True with moe_router_dtype 'fp64', .* in 'fp32'"):
        provider.finalize()


@pytest.mark.parametrize(
    ("installed", "implementation", "fused"), [(True, TE, True), (True, "local", False), (False, TE, False)]
)
def test_rope_fusion_without_transformer_engine_is_turned_off(monkeypatch, caplog, installed, implementation, fused):
    """In the text model and the vision tower; megatron-core rejects the setting without the kernel."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(provider_fields, "has_transformer_engine", lambda: installed)
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


def test_vision_transformer_config_keeps_meta_device_and_dtype_of_provider():
    """Transformer Engine's modules read the meta device from their configuration."""
    tower = vision_transformer_config(finalized(DENSE, dict(init_model_with_meta_device=True)))
    assert tower.init_model_with_meta_device and tower.params_dtype is torch.bfloat16


@pytest.fixture
def build(monkeypatch):
    mixin = "megatron.bridge.models.gpt_provider.GPTModelProvider.provide_distributed_model"

    def provide_distributed_model(self, ddp_config=None, wrap_with_ddp=True, use_megatron_fsdp=False):
        return ["model"]

    monkeypatch.setattr(mixin, provide_distributed_model)
    monkeypatch.setattr("qwen3vl_bridge.models.common.provider.log_trained_parameters", lambda model: None)

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
    (DENSE, dict(PP2, **OVERLAP), "overlap_p2p_comm is True with .* virtual_pipeline_model_parallel_size None"),
    (DENSE, dict(PP2, pipeline_model_parallel_layout="Ett|t*10|t*14|t*10L", **OVERLAP), "stage has 2 layers"),
    (DENSE, dict(SP2, parallel_output=False), "parallel_output is False with .* 2, expected True: a loss on"),
    (DENSE, dict(VPP2, batch_p2p_comm=False), "overlap_p2p_comm is False with .* expected True: two interleaved"),
    (DENSE, dict(PP2, pipeline_dtype=torch.float16), "pipeline_dtype is torch.float16, expected torch.bfloat16"),
])  # fmt: skip
def test_provide_distributed_model_with_ddp_raises_if_setting_is_invalid(build, size, fields, message):
    with pytest.raises(ValueError, match=message):
        build(size, fields, ddp_config=SimpleNamespace(average_in_collective=False))
    assert build(size, fields, wrap_with_ddp=False)


@pytest.mark.parametrize(("size", "fields"), [
    (EXPERTS, SP2), (DENSE, dict(SP2, sequence_parallel=False)),
    (DENSE, dict(PP2, num_layers_in_first_pipeline_stage=3)),
    (DENSE, dict(PP2, num_layers_in_first_pipeline_stage=1, variable_seq_lengths=True)),
    (DENSE, dict(PP2, pipeline_model_parallel_layout="Ettt|t*33L")),
])  # fmt: skip
def test_provide_distributed_model_accepts_valid_training_settings(build, size, fields):
    assert build(size, fields, ddp_config=SimpleNamespace(average_in_collective=False))


@pytest.mark.parametrize(("size", "fields", "why"), [
    (DENSE, dict(loss_chunk_tokens=8192), "with loss_chunk_tokens the"),
    (DENSE, dict(loss_chunk_tokens=0, share_embeddings_and_output_weights=True), "with share_embeddings_and_"),
    (DENSE, dict(loss_chunk_tokens=0), None),
])  # fmt: skip
def test_fsdp_turns_off_gradient_accumulation_fusion_of_reused_weights(build, size, fields, why, caplog):
    ddp = SimpleNamespace(average_in_collective=False)
    for sharded in (True, False):
        provider = finalized(size, fields)
        provider.gradient_accumulation_fusion = True  # as `finalize` leaves it with APEX and a GPU
        with caplog.at_level("WARNING"):
            provider.provide_distributed_model(ddp, use_megatron_fsdp=sharded)
        assert provider.gradient_accumulation_fusion is (not sharded or why is None)
        assert (f"set to False: {why}" in caplog.text) is (sharded and why is not None)
        caplog.clear()


def test_provide_distributed_model_accepts_wrap_with_ddp_as_positional_argument(build):
    provider = finalized(DENSE, VPP2)
    assert provider.provide_distributed_model(None, False) == ["model"]
    with pytest.raises(ValueError, match="stages would confuse"):
        provider.provide_distributed_model(None, True)


def test_training_checks_raise_if_tp_comm_overlap_is_true():
    provider = finalized(DENSE, dict(SP2, tp_comm_overlap=True))
    with pytest.raises(ValueError, match="tp_comm_overlap is True, expected False: it has not been compared with"):
        run_checks(MODEL_CAN_TRAIN, provider)


def test_training_checks_accept_settings_of_megatron_bridge_comm_overlap():
    """Megatron-Bridge applies `comm_overlap` before it validates the configuration."""
    provider = provider_of(DENSE, VPP2)
    overlap = CommOverlapConfig(tp_comm_overlap=False)
    overlap.data_parallel_size = 1
    overlap.finalize()
    overlap.setup(provider, OptimizerConfig(), None)
    provider.finalize()
    run_checks(MODEL_CAN_TRAIN, provider)
    assert (provider.overlap_p2p_comm, provider.batch_p2p_comm) == (True, False)


@pytest.fixture
def first_of_two(untied_folder):
    """Return the first of two chunks on the first of two stages, built by `provide` as miles and NeMo-RL do."""
    provider = AutoBridge.from_hf_pretrained(str(untied_folder)).to_megatron_provider(load_weights=False)
    initialize(provider, seed=0)
    fields = dict(VPP2, pipeline_dtype=provider.params_dtype, variable_seq_lengths=True)
    for name, value in fields.items():
        setattr(provider, name, value)
    provider.finalize()
    return provider.provide(pre_process=True, post_process=False, vp_stage=0)


def test_model_with_invalid_training_settings_raises_in_first_training_step(first_of_two):
    """With megatron-core's defaults two stages confuse the tensors they send, and only gradients are wrong."""
    ids = torch.arange(8)[None]
    with pytest.raises(ValueError, match=r"overlap_p2p_comm is False .* expected True: two interleaved stages would"):
        first_of_two(ids)
    with torch.no_grad():
        assert first_of_two(ids).isfinite().all()
    assert first_of_two.eval()(ids).isfinite().all()
    for name, value in OVERLAP.items():
        setattr(first_of_two.config, name, value)
    assert first_of_two.train()(ids).requires_grad


def test_forward_checks_settings_again_only_after_a_setting_changes(pair, monkeypatch):
    """Settings are not checked in every forward pass, but again after a change."""
    ids, checked = torch.arange(8)[None], []
    monkeypatch.setattr("qwen3vl_bridge.models.common.model.run_checks", lambda checks, _: checked.append(checks))
    monkeypatch.setattr(pair.megatron, "checked_settings", {})
    for _ in range(2):
        pair.megatron(ids)
        with torch.no_grad():
            pair.megatron(ids)
    assert checked == [MODEL_CAN_TRAIN, ON_FORWARD]
    monkeypatch.setattr(pair.megatron.config, "overlap_p2p_comm", pair.megatron.config.overlap_p2p_comm)
    pair.megatron(ids)
    assert checked == [MODEL_CAN_TRAIN, ON_FORWARD, MODEL_CAN_TRAIN]


def test_provider_changes_attribute_counts_assignments_of_settings():
    provider = Qwen3VLModelProvider()
    before = provider.changes
    provider._private, _ = 1, provider.hidden_size
    assert provider.changes == before
    provider.hidden_size = provider.hidden_size
    assert provider.changes == before + 1
    assert copy.deepcopy(provider).changes > 0 and "changes" not in vars(provider)


def test_first_forward_raises_if_te_version_lacks_float32_attention(pair, monkeypatch):
    """Also without gradients: no release before 2.11 has an attention for packed rows."""
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


def default_rows(checks):
    """Return the rows that require the default of a setting."""
    return [check for check in checks if isinstance(check, Requires) and check.expected is DEFAULT]


def assert_default_required(row, rows, settings):
    """Assert that this row is the first that rejects another value of its setting."""
    section, _, name = row.name.rpartition(".")
    owner = attrgetter(section)(settings) if section else settings
    before = getattr(owner, name)
    setattr(owner, name, changed(before))
    try:
        if row.when is None or row.when(settings):
            with pytest.raises(ValueError, match=rf"^{row.name} is .*, expected .*: {re.escape(row.why)}"):
                run_checks(rows, settings)
        for value in row.also:
            setattr(owner, name, value)
            run_checks([row], settings)
    finally:
        setattr(owner, name, before)


# Settings that only some releases have.
OF_SOME_RELEASES = {
    "checkpoint.stream_ckpt_dequant"  # megatron-core 0.19, but not its main branch of 2026-08-22
}


def of_this_release(checks, settings):
    """Return the checks without rows for settings that only other releases have."""

    def is_missing(name):
        section, _, field = name.rpartition(".")
        return name in OF_SOME_RELEASES and not hasattr(attrgetter(section)(settings), field)

    return [check for check in checks if not (isinstance(check, Requires) and is_missing(check.name))]


def assert_settings_exist(checks, settings):
    """Read the settings of every row: a misspelled one would fail only when its condition is met."""
    for row in checks:
        if isinstance(row, Requires):
            for name in row.name.split(" * "):
                attrgetter(name)(settings)
            if isinstance(row.when, Condition):
                row.when.describe(settings)
            if isinstance(row.expected, Values):
                row.expected.describe(settings)


@pytest.mark.parametrize(("family", "size"), MODELS)
def test_model_checks_require_default_value_of_unsupported_settings(family, size):
    config = registry.family(family).presets.hf_config(size)
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    of_kind = model_validation.MOE if isinstance(provider, ExpertsMixin) else model_validation.DENSE
    assert_settings_exist((*of_kind, *provider.checks, *BEFORE_FINALIZE, *AFTER_FINALIZE, *MODEL_CAN_TRAIN), provider)
    rows = default_rows((*of_kind, *provider.checks, *BEFORE_FINALIZE))
    assert len(rows) > 150
    for row in rows:
        assert_default_required(row, rows, provider)
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
    return finalize_copy(cfg, 8)


def test_run_checks_require_default_value_of_unsupported_settings(run):
    checks = of_this_release((*run_validation.BEFORE_VALIDATE, *run_validation.AFTER_VALIDATE), run)
    assert_settings_exist(checks, run)
    rows = default_rows(checks)
    assert len(rows) > 100
    for row in rows:
        if row.name != "accuracy.path":  # on which other rows depend
            assert_default_required(row, rows, run)
    for row in rows:
        if row.why == IGNORED and row.when.names in run_validation.DEPENDENTS_BY_SWITCH:
            section, switch = row.when.names.split(".")
            other = copy.copy(run)
            setattr(other, section, replace(getattr(run, section), **{switch: True}))
            assert not row.when(other), row
    run_checks(run_validation.AFTER_VALIDATE, run)


def test_no_code_reads_run_settings_listed_as_ignored():
    """A field that a newer release reads must be removed from the table."""
    names = "|".join(name for names in run_validation.IGNORED_BY_SECTION.values() for name in names.split())
    read = re.compile(rf"(?<!optim_config)(?<!self)(?<!model)\.({names})\b")  # other sections have some of them too
    found = {}
    for package in (megatron.bridge.__path__[0], Path(qwen3vl_bridge.__file__).parent):
        for file in Path(package).rglob("*.py"):
            place = file.relative_to(package).as_posix()
            code = re.sub(r"#.*", "", file.read_text())
            if not OTHERS.match(place) and (fields := set(read.findall(code))):
                found[place] = fields
    assert found == {}


@pytest.mark.parametrize("off", [None, False, 0, 0.0, "", []])
def test_finalize_accepts_falsy_values_of_ignored_settings(off):
    """ms-swift sets dsa_indexer_loss_coeff to 0.0 where megatron-core has None."""
    fields = Qwen3VLModelProvider.__dataclass_fields__
    names = [
        row.name
        for row in model_validation.IGNORED_SETTINGS
        if row.name in fields and fields[row.name].default in (None, False, 0)
    ]
    assert {"dsa_indexer_loss_coeff", "dsa_indexer_topk", "flash_decode", "mamba_num_heads"} <= set(names)
    finalized(DENSE, dict.fromkeys(names, off))


@pytest.mark.parametrize(("name", "value"), [
    ("dsa_indexer_loss_coeff", 0.1), ("dsa_indexer_topk", 2048), ("dsa_indexer_rotate_activation", False),
    ("mamba_state_dim", 0), ("softmax_scale", 0.0), ("seq_len_interpolation_factor", 0.0),
])  # fmt: skip
def test_finalize_raises_if_unsupported_setting_would_change_the_model(name, value):
    """Where a setting is read, 0.0 is a value and not "off"."""
    with pytest.raises(ValueError, match=f"{name} is {value}, expected "):
        finalized(DENSE, {name: value})


def test_has_transformer_engine_is_false_if_sys_modules_contains_stub(monkeypatch):
    """Frameworks put such a stub into `sys.modules`; `find_spec` raises ValueError for it."""
    monkeypatch.setitem(sys.modules, TE, ModuleType(TE))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not has_transformer_engine() and not_installed(TE)(None)
