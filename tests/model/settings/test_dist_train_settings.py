"""Vision and language on ranks of their own: sizes that don't add up are refused before a process group is made."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.models.divisibility import Replicas
from qwen3vl_bridge.models.refusals import check_world
from qwen3vl_bridge.models.settings import DistTrainConfig, vision_tensor_ranks

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.bridge.models.qwen_vl.qwen3_vl_provider import DistTrainConfig as Theirs

from .split_providers import CP2, DENSE, EXPERTS, OVERLAP, PP2, SP2, finalized, provider_of


def fields(vision=2, language=2, *, usual=True, model=None, **split):
    sizes = dict(vision_world_size=vision, language_world_size=language)
    more = dict(variable_seq_lengths=True) if usual else {}
    return more | (model or {}) | dict(dist_train=DistTrainConfig(use_dist_train=True, **sizes, **split))


def test_the_fields_are_megatron_bridges():
    assert set(vars(DistTrainConfig())) == set(vars(Theirs()))
    for name in ("dist_train", "add_encoder", "add_decoder"):
        assert hasattr(provider_of(DENSE, {}), name)


@pytest.mark.parametrize(
    ("size", "settings", "message"),
    [
        (DENSE, fields(None), "dist_train.vision_world_size is None with .*, expected 1 or more"),
        (DENSE, fields(2, 0), "dist_train.language_world_size is 0 with .*, expected 1 or more"),
        (DENSE, fields(vision_tensor_model_parallel_size=0), "vision_tensor_model_parallel_size is 0 with"),
        (DENSE, fields(3, vision_tensor_model_parallel_size=2), "vision_world_size is 3 with .*, expected a multiple"),
        (DENSE, fields(3, vision_tensor_model_parallel_size=3), "num_heads is 16 with .*, expected a multiple of"),
        (DENSE, fields(vision_pipeline_model_parallel_size=2), "vision_pipeline_.* is 2 with .*, expected 1: the"),
        (DENSE, fields(vision_context_parallel_size=2), "vision_context_.* is 2 with .*, expected 1: data-parallel"),
        (DENSE, fields(vision_expert_model_parallel_size=2), "vision_expert_model_.* is 2 with .*, expected 1: the"),
        (DENSE, fields(2, 3, model=SP2), "language_world_size is 3 with .*, expected a multiple of tensor_model_"),
        (DENSE, fields(2, 3, model=PP2), "language_world_size is 3 with .*, expected a multiple of .*, 2"),
        (EXPERTS, fields(2, 6, model=dict(expert_model_parallel_size=4)), "language_world_size is 6, expected a"),
        (DENSE, fields(2, 3), "tower has 2 data-parallel replicas and the language model 3, expected one number to be"),
        (DENSE, fields(4, 2, vision_to_llm_dp_ratio=3), "vision_to_llm_dp_ratio is 3, expected None or 2: there are 4"),
        (DENSE, fields(2, 4, vision_to_llm_dp_ratio=1), "vision_to_llm_dp_ratio is 1, expected None: there are 2"),
        (DENSE, fields(model=CP2), "context_parallel_size is 2 with dist_train.use_dist_train, expected 1: megatron"),
        (DENSE, fields(usual=False), "variable_seq_lengths is False with .*, expected True: the size of what"),
        (DENSE, fields(model=dict(PP2, virtual_pipeline_model_parallel_size=2)), "virtual_pipeline_.* is 2 with"),
        (DENSE, fields(model=dict(fp16=True, bf16=False)), "fp16 is True with dist_train.use_dist_train, expected Fal"),
        (DENSE, fields(model=dict(calculate_per_token_loss=False)), "calculate_per_token_loss is False with .* True"),
        (DENSE, fields(model=OVERLAP), "overlap_p2p_comm is True with dist_train.use_dist_train, expected False"),
        (DENSE, fields(model=dict(pipeline_dtype=torch.float16)), "pipeline_dtype is torch.float16, expected params"),
        (DENSE, dict(dist_train=DistTrainConfig(vision_world_size=2)), "vision_world_size is 2 with dist_train.use_"),
        (DENSE, dict(add_encoder=False), "add_encoder is False with dist_train.use_dist_train False, expected True"),
    ],
)
def test_what_does_not_fit_is_refused(size, settings, message):
    with pytest.raises(ValueError, match=message):
        finalized(size, settings)


def test_every_process_is_a_rank_of_one_module():
    provider = finalized(DENSE, fields(2, 4))
    check_world(provider, 6)
    for world in (5, 7):
        with pytest.raises(
            ValueError, match=f"language_world_size 4 add up to 6, expected {world}, the number of processes"
        ):
            check_world(provider, world)


def test_what_the_modules_send_has_a_type():
    assert finalized(DENSE, fields()).pipeline_dtype == torch.bfloat16
    assert finalized(DENSE, {}).pipeline_dtype is None


def test_the_towers_ranks_are_its_own():
    provider = finalized(DENSE, fields(2, 8, vision_tensor_model_parallel_size=2, model=dict(SP2)))
    assert vision_tensor_ranks(provider) == 2
    assert vision_tensor_ranks(finalized(DENSE, fields(2, 8, model=dict(tensor_model_parallel_size=8)))) == 1
    assert vision_tensor_ranks(finalized(DENSE, SP2)) == 2


@given(few=st.integers(1, 8), times=st.integers(1, 8), more_vision=st.booleans())
def test_every_picture_is_encoded_once_for_every_language_replica(few, times, more_vision):
    """As megatron-core's bridge pairs leaders: neighbours together, in their order."""
    vision, language = (few * times, few) if more_vision else (few, few * times)
    replicas = Replicas(vision, language)
    seen = [
        (served, replicas.share_of(rank)) for rank in range(vision) for served in replicas.language_replicas_of(rank)
    ]
    assert sorted(seen) == [(one, share) for one in range(language) for share in range(replicas.encoders)]
    assert seen == sorted(seen)
