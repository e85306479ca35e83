"""What cannot be split is refused, and rows are cut as the model cuts them."""

from __future__ import annotations

from collections.abc import Callable

from qwen3vl_bridge.models.divisibility import row_multiple
from qwen3vl_bridge.models.qwen3_5 import presets as qwen3_5
from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.planning.estimate import estimate
from qwen3vl_bridge.planning.split import ModelSplit
from qwen3vl_bridge.planning.training_settings import LoraSettings, Recompute, Sharding, TrainingSettings
from qwen3vl_bridge.registry import dimensions_of

import pytest


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
REFUSED = {
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


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_or_trained(name):
    call, message = REFUSED[name]
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
