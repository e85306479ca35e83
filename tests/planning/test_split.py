"""What cannot be split is refused, and rows are cut as the model cuts them."""

from __future__ import annotations

from qwen3vl_bridge.models.divisibility import row_multiple
from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.planning.estimate import estimate
from qwen3vl_bridge.planning.split import ModelSplit
from qwen3vl_bridge.planning.training_settings import LoraSettings, Recompute, Sharding, TrainingSettings
from qwen3vl_bridge.registry import dimensions_of

import pytest

REFUSED = {
    "world": (dict(world=6, tp=4), "expected a multiple of tp \\* pp \\* cp, which is 4"),
    "experts' ranks": (dict(world=8, pp=2, ep=8), "a multiple of etp \\* ep \\* pp, which is 16"),
    "nothing to cut": (dict(world=2, sequence_parallel=True), "sequence_parallel is True with tp 1"),
    "no stages": (dict(world=2, vpp=2), "vpp is 2 with pp 1"),
    "below one": (dict(world=0), "world is 0, expected 1 or more"),
}
UNFIT = {
    "layers": ("2B", dict(world=8, pp=8), "28 layers for 8 pipeline stages"),
    "heads": ("2B", dict(world=32, tp=32), "num_attention_heads is 16"),
    "tower's heads": ("32B", dict(world=32, tp=32), "vision_config.num_heads is 16"),
    "chunks": ("2B", dict(world=2, pp=2, vpp=4), "pipeline stage 0 has 14 layers, expected a multiple of vpp"),
    "both ways": ("2B", dict(world=4, pp=4, first_layers=4, loss_as_layer=True), "expected only one of them"),
    "layout": ("2B", dict(world=2, pp=2, layout=((10,), (10,))), "20 text layers together, expected 28"),
    "no experts": ("8B", dict(world=2, ep=2), "this model has no experts"),
    "experts": ("30B-A3B", dict(world=3, ep=3), "num_moe_experts is 128"),
    "experts' width": ("30B-A3B", dict(world=7, etp=7), "moe_ffn_hidden_size is 768"),
    "experts without SP": ("30B-A3B", dict(world=2, tp=2), "sequence_parallel is False with experts"),
}
UNTRAINED = {
    "rows": (ModelSplit(3, cp=3), dict(seq_length=4096), "seq_length is 4096, expected a multiple of 6"),
    "batch": (ModelSplit(8), dict(global_batch_size=12), "global_batch_size is 12, expected a multiple of 8"),
    "stages of FSDP": (
        ModelSplit(4, pp=2),
        dict(sharding=Sharding.ALL),
        "Megatron-FSDP does not support pipeline stages",
    ),
    "moe": (ModelSplit(1), dict(recompute=Recompute("selective", frozenset({"moe"}))), "this model has no experts"),
}
CONTRADICTORY = {
    "granularity": (dict(recompute=Recompute("some")), "recompute_granularity is 'some'"),
    "idle modules": (dict(recompute=Recompute(None, frozenset({"mlp"}))), "expected modules with 'selective'"),
    "tower": (dict(vision_recompute=Recompute("selective", frozenset({"mlp"}))), "vision_recompute_modules has"),
    "full": (dict(recompute=Recompute("full")), "expected 'uniform' or 'block' and 1 or more"),
    "patches": (dict(max_patches=-1), "max_patches is -1"),
    "load": (dict(expert_load=0.5), "expert_load is 0.5"),
    "local": (
        dict(recompute=Recompute("selective", frozenset({"moe_act"})), transformer_engine=False),
        "need Transformer Engine",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_contradict_each_other(name):
    sizes, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        ModelSplit(**sizes)


@pytest.mark.parametrize("name", UNFIT)
def test_models_that_cannot_be_split_so(name):
    size, sizes, message = UNFIT[name]
    with pytest.raises(ValueError, match=message):
        ModelSplit(**sizes).check(dimensions_of(presets.config_dict(size)))


@pytest.mark.parametrize("name", UNTRAINED)
def test_runs_that_cannot_be(name):
    split, fields, message = UNTRAINED[name]
    with pytest.raises(ValueError, match=message):
        estimate(presets.config_dict("8B"), split, TrainingSettings(**fields))


@pytest.mark.parametrize("name", CONTRADICTORY)
def test_settings_that_contradict_each_other(name):
    fields, message = CONTRADICTORY[name]
    with pytest.raises(ValueError, match=message):
        TrainingSettings(**fields)


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
