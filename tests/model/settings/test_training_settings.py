"""What only a model that is to be trained may not have is refused when it is built for that, and for nothing else."""

from types import SimpleNamespace

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.models.refusals import ON_TRAIN, check_microbatches
from qwen3vl_bridge.models.rules import check
from qwen3vl_bridge.training.process_groups import initialize

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.core.optimizer import OptimizerConfig
from packaging.version import Version

from .split_providers import DENSE, EXPERTS, OVERLAP, PP2, SP2, VPP2, finalized, provider_of


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


@pytest.mark.parametrize(
    ("size", "fields", "message"),
    [
        (DENSE, dict(pipeline_model_parallel_size=18), r"first pipeline stage has 2 layers, expected True, or at leas"),
        (DENSE, dict(PP2, **OVERLAP, virtual_pipeline_model_parallel_size=9), "first pipeline stage has 2 layers"),
        (DENSE, dict(PP2, num_layers_in_first_pipeline_stage=1), "first pipeline stage has 1 layers"),
        (DENSE, dict(PP2, pipeline_model_parallel_layout="E|t*36L"), "first pipeline stage has 0 layers"),
        (DENSE, VPP2, "overlap_p2p_comm is False with .* expected True: two interleaved stages would confuse"),
        (DENSE, dict(PP2, pipeline_model_parallel_layout="Et*9|t*9|t*9|t*9L"), "overlap_p2p_comm is False with"),
        (DENSE, dict(VPP2, overlap_p2p_comm=True), "batch_p2p_comm is True with overlap_p2p_comm and .*, expected"),
        (DENSE, dict(PP2, **OVERLAP), "overlap_p2p_comm is True with .* virtual_pipeline_model_parallel_size None"),
        (DENSE, dict(VPP2, **OVERLAP, microbatch_group_size_per_vp_stage=1), "stage is 1, expected at least .*, 2"),
        (DENSE, dict(PP2, pipeline_model_parallel_layout="Ett|t*10|t*14|t*10L", **OVERLAP), "stage has 2 layers"),
        (DENSE, dict(SP2, parallel_output=False), "parallel_output is False with .* 2, expected True: a loss on"),
        (DENSE, dict(VPP2, batch_p2p_comm=False), "overlap_p2p_comm is False with .* expected True: two interleaved"),
        (DENSE, dict(PP2, pipeline_dtype=torch.float16), "pipeline_dtype is torch.float16, expected torch.bfloat16"),
    ],
)
def test_what_could_not_be_trained_can_be_built_for_other_uses(build, size, fields, message):
    with pytest.raises(ValueError, match=message):
        build(size, fields, ddp_config=SimpleNamespace(average_in_collective=False))
    assert build(size, fields, wrap_with_ddp=False)


@pytest.mark.parametrize(
    ("size", "fields"),
    [
        (EXPERTS, SP2),
        (DENSE, dict(SP2, sequence_parallel=False)),
        (DENSE, dict(PP2, num_layers_in_first_pipeline_stage=3)),
        (DENSE, dict(PP2, num_layers_in_first_pipeline_stage=1, variable_seq_lengths=True)),
        (DENSE, dict(PP2, pipeline_model_parallel_layout="Ettt|t*33L")),
    ],
)
def test_what_can_be_trained_is_built(build, size, fields):
    assert build(size, fields, ddp_config=SimpleNamespace(average_in_collective=False))


@pytest.mark.parametrize(
    ("size", "fields", "why"),
    [
        (DENSE, dict(loss_chunk_tokens=8192), "with loss_chunk_tokens the"),
        (DENSE, dict(loss_chunk_tokens=0, share_embeddings_and_output_weights=True), "with share_embeddings_and_"),
        (DENSE, dict(loss_chunk_tokens=0), None),
    ],
)
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
