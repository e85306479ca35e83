"""A run's configuration is read as it stands; what is not counted or cannot be split is refused."""

import dataclasses
import json
from collections.abc import Callable

from qwen3vl_bridge import Qwen3VLDoRA, Qwen3VLLoRA
from qwen3vl_bridge.models.divisibility import row_multiple
from qwen3vl_bridge.models.qwen3_5 import presets as qwen3_5
from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.planning.estimate import estimate
from qwen3vl_bridge.planning.from_config import plan_of, proposals_for_run
from qwen3vl_bridge.planning.hardware import GPUS
from qwen3vl_bridge.planning.proposals import propose
from qwen3vl_bridge.planning.split import ModelSplit
from qwen3vl_bridge.planning.training_settings import (
    BF16,
    FP32,
    LINEAR_LAYERS,
    LoraSettings,
    Precision,
    Recompute,
    Sharding,
    TrainingSettings,
)
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.rows import Part

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.qwen_vl.qwen3_vl_provider import DistTrainConfig
from megatron.bridge.training.mixed_precision import bf16_mixed
from qwen3vl_recipes.digits import qwen3_vl_digits_sft_config
from qwen3vl_recipes.paths import set_paths

# Megatron-FSDP's gradients follow the parameters where nobody says otherwise.
BRIDGES = dataclasses.replace(BF16, fsdp_gradient=None)
RUN = TrainingSettings(
    seq_length=512, global_batch_size=2, precision=FP32, sharding=Sharding.ALL, transformer_engine=False,
    balancing_loss=False,
)  # fmt: skip


@pytest.fixture
def cfg(untied_folder):
    cfg = set_paths(qwen3_vl_digits_sft_config(), hf_path=untied_folder, data_path="x", save="x")
    cfg.mixed_precision = None
    cfg.ddp.megatron_fsdp_main_grads_dtype = None  # the parameters', until a test says otherwise
    return cfg


def change(cfg, **settings):
    for name, value in settings.items():
        section, _, field = name.partition("__")
        target = getattr(cfg, section) if field else cfg
        assert hasattr(target, field or section), name
        setattr(target, field or section, value)
    return cfg


def as_of(folder, split: ModelSplit, training: TrainingSettings):
    return estimate(json.loads((folder / "config.json").read_text()), split, training)


def test_the_recipe_as_it_stands(cfg, untied_folder):
    assert plan_of(cfg, 2) == as_of(untied_folder, ModelSplit(2), RUN)


def replaced(**fields) -> TrainingSettings:
    return TrainingSettings(**{name: getattr(RUN, name) for name in RUN.__dataclass_fields__} | fields)


CHANGES = {
    "made on the host": (dict(model__init_model_with_meta_device=True), ModelSplit(4), dict(made_on_host=True)),
    "saved by index": (
        dict(checkpoint__dist_ckpt_optim_fully_reshardable=False), ModelSplit(4), dict(saved_by_parameters=False),
    ),
    "sizes": (
        dict(model__tensor_model_parallel_size=2, model__sequence_parallel=True, model__context_parallel_size=2),
        ModelSplit(4, tp=2, cp=2, sequence_parallel=True), {},
    ),
    "stages": (
        dict(model__pipeline_model_parallel_size=2, model__num_layers_in_first_pipeline_stage=1,
             ddp__use_megatron_fsdp=False),
        ModelSplit(4, pp=2, first_layers=1), dict(sharding=Sharding.OPTIMIZER),
    ),
    "no sharding": (
        dict(ddp__use_megatron_fsdp=False, ddp__use_distributed_optimizer=False,
             optimizer__use_distributed_optimizer=False),
        ModelSplit(4), dict(sharding=Sharding.NONE),
    ),
    "mixed precision by name": (dict(mixed_precision="bf16_mixed"), ModelSplit(4), dict(precision=BRIDGES)),
    "mixed precision": (dict(mixed_precision=bf16_mixed()), ModelSplit(4), dict(precision=BRIDGES)),
    "bfloat16": (
        dict(model__params_dtype=torch.bfloat16, ddp__grad_reduce_in_fp32=False),
        ModelSplit(4), dict(precision=Precision(2, 2, 4)),
    ),
    "gradients of FSDP": (
        dict(mixed_precision="bf16_mixed", ddp__megatron_fsdp_main_grads_dtype=torch.float32),
        ModelSplit(4), dict(precision=Precision(2, 4, 4, fsdp_gradient=4)),
    ),
    "FSDP that shards the optimizer alone": (
        dict(ddp__data_parallel_sharding_strategy="optim"),
        ModelSplit(4), dict(sharding=Sharding.OPTIMIZER, precision=Precision(4, 4, 4)),
    ),
    "small moments": (
        dict(mixed_precision="bf16_mixed", optimizer__use_precision_aware_optimizer=True,
             optimizer__exp_avg_dtype=torch.bfloat16, optimizer__exp_avg_sq_dtype=torch.bfloat16),
        ModelSplit(4), dict(precision=Precision(2, 4, 2, 4)),
    ),
    "recomputation": (
        dict(model__recompute_granularity="selective", model__recompute_modules=["mlp"],
             model__vision_recompute_granularity="full", model__vision_recompute_method="uniform",
             model__vision_recompute_num_layers=1),
        ModelSplit(4),
        dict(recompute=Recompute("selective", frozenset({"mlp"})),
             vision_recompute=Recompute("full", method="uniform", num_layers=1)),
    ),
    "frozen": (
        dict(model__freeze_vision_model=True), ModelSplit(4), dict(frozen=frozenset({Part.VISION_MODEL})),
    ),
    "adapters": (
        dict(peft=Qwen3VLLoRA(dim=4, target_modules=["linear_qkv"])), ModelSplit(4),
        dict(lora=LoraSettings(4, LINEAR_LAYERS[:1])),
    ),
    "loss of a whole row": (dict(model__loss_chunk_tokens=0), ModelSplit(4), dict(loss_chunk_tokens=0)),
    "rows": (
        dict(dataset__max_patches=64, train__micro_batch_size=2, train__global_batch_size=8, dataset__seq_length=256),
        ModelSplit(4), dict(max_patches=64, micro_batch_size=2, global_batch_size=8, seq_length=256),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_settings_that_are_counted(name, cfg, untied_folder):
    settings, split, fields = CHANGES[name]
    change(cfg, **{"train__global_batch_size": 4} | settings)
    assert plan_of(cfg, 4) == as_of(untied_folder, split, replaced(**{"global_batch_size": 4} | fields))


def test_a_finalised_pipeline_layout(cfg, untied_folder):
    change(cfg, model__pipeline_model_parallel_size=2, model__pipeline_model_parallel_layout="Ettt|tL",
           model__pipeline_dtype=torch.float32, ddp__use_megatron_fsdp=False)  # fmt: skip
    cfg.model.finalize()
    expected = as_of(untied_folder, ModelSplit(2, pp=2, layout=((3,), (1,))), replaced(sharding=Sharding.OPTIMIZER))
    assert plan_of(cfg, 2).stages == expected.stages


def test_a_model_with_experts(cfg):
    cfg.model = AutoBridge.from_hf_config(presets.hf_config("30B-A3B")).to_megatron_provider(load_weights=False)
    change(cfg, model__expert_model_parallel_size=8, model__expert_tensor_parallel_size=1,
           mixed_precision="bf16_mixed", train__global_batch_size=8)  # fmt: skip
    training = replaced(global_batch_size=8, precision=BRIDGES, balancing_loss=True)
    assert plan_of(cfg, 8) == estimate(presets.config_dict("30B-A3B"), ModelSplit(8, ep=8, etp=1), training)


def test_vision_on_ranks_of_its_own(cfg, untied_folder):
    cfg.model.dist_train = DistTrainConfig(use_dist_train=True, vision_world_size=4, language_world_size=4,
                                           vision_tensor_model_parallel_size=2)  # fmt: skip
    change(cfg, model__pipeline_model_parallel_size=2, ddp__use_megatron_fsdp=False)
    config, training = json.loads((untied_folder / "config.json").read_text()), replaced(sharding=Sharding.OPTIMIZER)
    plan = plan_of(cfg, 8)
    assert plan == estimate(config, ModelSplit(4, pp=2), training, vision_split=ModelSplit(4, tp=2))
    assert [stage.stage for stage in plan.stages] == [-1, 0, 1]
    proposals = proposals_for_run(cfg, plan, GPUS["H100"])
    assert proposals == propose(dimensions_of(config), 8, GPUS["H100"], training, vision_split=ModelSplit(4, tp=2))
    cfg.model.dist_train.vision_world_size = None
    with pytest.raises(ValueError, match="None vision and 4 language ranks, expected 8 together"):
        plan_of(cfg, 8)
    cfg.model.dist_train.vision_world_size = 4
    with pytest.raises(ValueError, match="4 vision and 4 language ranks, expected 16 together"):
        plan_of(cfg, 16)


_EIGHT_BITS = bf16_mixed()
REFUSED = {
    "model.fp8": dict(model__fp8="e4m3"), "model.cpu_offloading": dict(model__cpu_offloading=True),
    "model.fine_grained_activation_offloading": dict(model__fine_grained_activation_offloading=True),
    "model.cuda_graph_impl": dict(model__cuda_graph_impl="local"),
    "optimizer.optimizer_cpu_offload": dict(optimizer__optimizer_cpu_offload=True),
    "optimizer.optimizer is": dict(optimizer__optimizer="sgd"),
    "ddp.num_distributed_optimizer_instances": dict(ddp__num_distributed_optimizer_instances=2),
    "mixed_precision is": dict(mixed_precision="fp16_mixed"),
    "mixed_precision has": dict(mixed_precision=_EIGHT_BITS), "peft is a Qwen3VLDoRA": dict(peft=Qwen3VLDoRA()),
    "peft.adapt_vision_model": dict(peft=Qwen3VLLoRA(adapt_vision_model=True)),
    "peft.adapt_experts": dict(peft=Qwen3VLLoRA(adapt_experts=True)),
    "peft.freeze_vision_model": dict(peft=Qwen3VLLoRA(freeze_vision_model=False)),
    "peft.target_modules": dict(peft=Qwen3VLLoRA(target_modules=["*.layers.0.*"])),
    "pipeline_model_parallel_layout": dict(model__pipeline_model_parallel_layout="Et*2|t*2L"),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_are_not(message, cfg):
    change(cfg, **REFUSED[message])
    with pytest.raises(ValueError, match=message.replace(".", "\\.")):
        plan_of(cfg, 4)


def split(world: int, **sizes) -> Callable[[], object]:
    return lambda: ModelSplit(world, **sizes)


def fitted(size: str, world: int, **sizes) -> Callable[[], object]:
    return lambda: ModelSplit(world, **sizes).check(dimensions_of(presets.config_dict(size)))


def run(of: ModelSplit, **fields) -> Callable[[], object]:
    return lambda: estimate(presets.config_dict("8B"), of, TrainingSettings(**fields))


def run_qwen3_5(of: ModelSplit, **fields) -> Callable[[], object]:
    return lambda: estimate(qwen3_5.config_dict("9B"), of, TrainingSettings(**fields))


def trained(**fields) -> Callable[[], object]:
    return lambda: TrainingSettings(**fields)


MOE, MLP = (Recompute("selective", frozenset({name})) for name in ("moe", "mlp"))
REFUSED_SPLITS = {
    "world": (split(6, tp=4), "expected a multiple of tp \\* pp \\* cp, which is 4"),
    "experts' ranks": (split(8, pp=2, ep=8), "a multiple of etp \\* ep \\* pp, which is 16"),
    "nothing to cut": (split(2, sequence_parallel=True), "sequence_parallel is True with tp 1"),
    "no stages": (split(2, vpp=2), "vpp is 2 with pp 1"),
    "below one": (split(0), "world is 0, expected 1 or more"),
    "layers": (fitted("2B", 8, pp=8), "28 layers for 8 pipeline stages"),
    "heads": (fitted("2B", 32, tp=32), "num_attention_heads is 16"),
    "tower's heads": (fitted("32B", 32, tp=32), "vision_config.num_heads is 16"),
    "chunks": (fitted("2B", 2, pp=2, vpp=4), "pipeline stage 0 has 14 layers, expected a multiple of vpp"),
    "both ways": (fitted("2B", 4, pp=4, first_layers=4, loss_as_layer=True), "expected only one of them"),
    "layout": (fitted("2B", 2, pp=2, layout=((10,), (10,))), "20 text layers together, expected 28"),
    "no experts": (fitted("8B", 2, ep=2), "this model has no experts"),
    "experts": (fitted("30B-A3B", 3, ep=3), "num_moe_experts is 128"),
    "experts' width": (fitted("30B-A3B", 7, etp=7), "moe_ffn_hidden_size is 768"),
    "experts without SP": (fitted("30B-A3B", 2, tp=2), "sequence_parallel is False with experts"),
    "rows": (run(ModelSplit(3, cp=3), seq_length=4096), "seq_length is 4096, expected a multiple of 6"),
    "batch": (run(ModelSplit(8), global_batch_size=12), "global_batch_size is 12, expected a multiple of 8"),
    "stages of FSDP": (run(ModelSplit(4, pp=2), sharding=Sharding.ALL), "FSDP does not support pipeline stages"),
    "moe": (run(ModelSplit(1), recompute=MOE), "this model has no experts"),
    "no adapters": (
        run_qwen3_5(ModelSplit(8), lora=LoraSettings(8, ())),
        "none of which this model has .* in_proj, linear_fc1, linear_fc2",
    ),
    "linear attention without SP": (
        run_qwen3_5(ModelSplit(8, tp=2), seq_length=65536),
        "sequence_parallel is False with linear attention under tp 2, expected True",
    ),
    "key heads of linear attention": (
        run_qwen3_5(ModelSplit(32, cp=32), seq_length=65536),
        "linear_num_key_heads is 16, expected a multiple of tp . cp, 32",
    ),
    "granularity": (trained(recompute=Recompute("some")), "recompute_granularity is 'some'"),
    "idle modules": (trained(recompute=Recompute(None, MLP.modules)), "expected modules with 'selective'"),
    "tower": (trained(vision_recompute=MLP), "vision_recompute_modules has"),
    "full": (trained(recompute=Recompute("full")), "expected 'uniform' or 'block' and 1 or more"),
    "patches": (trained(max_patches=-1), "max_patches is -1"),
    "load": (trained(expert_load=0.5), "expert_load is 0.5"),
    "local": (
        trained(recompute=Recompute("selective", frozenset({"moe_act"})), transformer_engine=False),
        "need Transformer Engine",
    ),
}


@pytest.mark.parametrize("name", REFUSED_SPLITS)
def test_what_cannot_be_split_or_trained(name):
    call, message = REFUSED_SPLITS[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_adapters_that_there_are_none_for():
    training = TrainingSettings(lora=LoraSettings(8, ("linear_fc1",)))
    with pytest.raises(ValueError, match="none of which this model has outside its experts"):
        estimate(presets.config_dict("30B-A3B"), ModelSplit(1), training)


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_rows_are_cut_as_the_model_cuts_them(cp, tp):
    split, multiple = ModelSplit(tp * cp, tp=tp, cp=cp, sequence_parallel=tp > 1), row_multiple(cp, tp)
    split.check_rows(5 * multiple)
    if multiple > 1:
        with pytest.raises(ValueError, match=f"a multiple of {multiple}"):
            split.check_rows(5 * multiple - 1)
