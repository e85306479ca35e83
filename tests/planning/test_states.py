"""Model states in one process: parameters of released sizes, real optimizers, adapters."""

from dataclasses import replace
from functools import partial

from qwen3vl_bridge import Qwen3VLDoRA, Qwen3VLLoRA
from qwen3vl_bridge.core.files import read_object
from qwen3vl_bridge.models.qwen3_5 import presets as qwen3_5
from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.planning.estimate import FIXED_RESERVE, estimate
from qwen3vl_bridge.planning.model_states import ModelStates, count_parameters, estimate_states
from qwen3vl_bridge.planning.parallel_layout import ParallelLayout
from qwen3vl_bridge.planning.training_settings import (
    BF16,
    FP32,
    FULL,
    LoraSettings,
    Precision,
    Sharding,
    TrainingSettings,
)
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.training.guard import optimizers_of
from qwen3vl_bridge.upstream import adam
from qwen3vl_bridge.weights.rows import Component, is_mtp

import pytest
import torch
from transformers import AutoConfig

from tests.helpers.batches import make_batch, make_samples
from tests.helpers.steps import set_up, train_step
from tests.models.qwen3_5.test_table import MTP_PARAMETERS, PARAMETERS
from tests.parity.conftest import make_pair
from tests.parity.on_ranks import configuration
from tests.parity.topologies import Topology
from tests.planning.test_memory_on_ranks import allocated, gradient_bytes, optimizer_bytes

SIZES = {size: (presets.config_dict(size), presets.parameter_count(size), 0) for size in presets.PRESETS}
SIZES |= {
    f"Qwen3.5 {size}": (qwen3_5.config_dict(size), PARAMETERS[size] + MTP_PARAMETERS[size], MTP_PARAMETERS[size])
    for size in qwen3_5.PRESETS
}
STAGES = {
    "2B": ParallelLayout(7, pp=7), "4B": ParallelLayout(6, pp=6, vpp=2),
    "8B": ParallelLayout(4, pp=4, first_layers=6, last_layers=10), "32B": ParallelLayout(8, pp=8, vpp=2),
    "30B-A3B": ParallelLayout(2, pp=2, pipeline_layout=((20,), (28,))),
    "235B-A22B": ParallelLayout(8, pp=8, vpp=4, embedding_as_layer=True, loss_as_layer=True),
    "Qwen3.5 9B": ParallelLayout(4, pp=4), "Qwen3.5 35B-A3B": ParallelLayout(4, pp=4),
    "Qwen3.5 27B": ParallelLayout(8, pp=8, vpp=2),
    "Qwen3.5 4B": ParallelLayout(3, pp=3, pipeline_layout=((9,), (11,), (12,))),
}  # fmt: skip
ONE = ParallelLayout(1)
LAYOUTS = [*((size, ONE) for size in SIZES), *STAGES.items()]


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_parameter_counts_of_pipeline_stages_add_up_to_model(size, layout):
    """The embedding counts twice if the last stage needs it too; the last stage has multi-token prediction."""
    config, parameters, mtp = SIZES[size]
    dims = dimensions_of(config)
    chunks = [chunk for stage in layout.chunks(len(dims.indices["text_layers"])) for chunk in stage]
    again = 0 if dims["untied"] or layout.pp == 1 else dims["vocab"] * dims["hidden"]
    assert sum(count_parameters(dims, layout, chunk).total() for chunk in chunks) == parameters + again
    assert [count_parameters(dims, layout, chunk, is_mtp).total() for chunk in chunks] == [0] * (len(chunks) - 1) + [
        mtp
    ]


def model_states(config: dict, training: TrainingSettings, layout: ParallelLayout = ONE) -> ModelStates:
    dims = dimensions_of(config)
    (chunks,) = layout.chunks(len(dims.indices["text_layers"]))
    return estimate_states(dims, layout, chunks, training)


def set_up_run(folder, change=lambda cfg: None):
    """Set up a run on one rank."""
    cfg, hf = configuration(str(folder), Topology(1)), AutoConfig.from_pretrained(folder)
    change(cfg)
    run = set_up(cfg, data=False)
    run.stream = iter([make_batch(make_samples("mixed", hf, seed=seed), hf, packed=True) for seed in range(4)])
    return run


ALONE = TrainingSettings(precision=FP32, sharding=Sharding.NONE, transformer_engine=False)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("kind", ["untied", "moe"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16 gradients"])
def test_estimated_model_states_match_bytes_after_training_step(precision, kind, request):
    def change(cfg):
        if precision != "float32":
            cfg.model.bf16 = cfg.optimizer.bf16 = True
            cfg.model.params_dtype = cfg.optimizer.params_dtype = torch.bfloat16
        cfg.ddp.grad_reduce_in_fp32 = precision != "bfloat16 gradients"

    folder = request.getfixturevalue(f"{kind}_folder")
    expected = {"float32": FP32, "bfloat16": BF16, "bfloat16 gradients": Precision(2, 2, 4)}[precision]
    run = set_up_run(folder, change)
    train_step(run)
    states = model_states(read_object(folder / "config.json"), replace(ALONE, precision=expected))
    weights = [p for chunk in run.model for p in chunk.parameters()]
    assert states.parameters == sum(p.numel() * p.element_size() for p in weights)
    assert states.gradients == gradient_bytes(run.model)
    assert states.optimizer == optimizer_bytes(run.optimizer)


@pytest.mark.parametrize("kind", ["untied", "moe"])
def test_estimated_optimizer_temporary_memory_matches_torch_adam(kind, request, monkeypatch):
    """With foreach=True, which is torch's default on a GPU."""
    folder, peaks = request.getfixturevalue(f"{kind}_folder"), []
    run = set_up_run(folder)
    monkeypatch.setattr(adam, "adam", partial(adam.adam, foreach=True))
    for one in optimizers_of(run.optimizer):
        assert type(one.optimizer) is adam.Adam
        monkeypatch.setattr(one.optimizer, "step", recorded(one.optimizer.step, peaks))
    train_step(run)
    states = model_states(read_object(folder / "config.json"), ALONE)
    assert (
        0.97 * states.optimizer_temporary <= max(peaks) <= states.optimizer_temporary
    )  # norms and biases are another group
    assert len(peaks) == 1


def recorded(step, peaks: list[int]):
    def call(*args, **kwargs):
        step(*args, **kwargs)
        with allocated() as most:
            found = step(*args, **kwargs)
        peaks.append(max(most))
        return found

    return call


def test_optimizer_step_is_memory_peak_for_short_rows_only():
    """2B without Transformer Engine: 4 bytes per parameter are more than the activations of a short row."""
    dims = dimensions_of(presets.config_dict("2B"))
    short, long = (
        TrainingSettings(transformer_engine=transformer_engine, seq_length=tokens, sharding=Sharding.NONE)
        for transformer_engine, tokens in ((False, 128), (False, 8192))
    )
    (found,) = estimate(dims, ParallelLayout(1), short).stages
    assert found.states.optimizer_temporary == 4 * presets.parameter_count("2B")
    assert (
        found.total
        == found.optimizer_step
        == found.states.total + 1.1 * found.states.optimizer_temporary + FIXED_RESERVE
    )
    (other,) = estimate(dims, ParallelLayout(1), long).stages
    assert other.total > other.optimizer_step
    moe, layout = presets.config_dict("30B-A3B"), ParallelLayout(8, ep=8)
    count = count_parameters(dimensions_of(moe), layout, layout.chunks(48)[0][0])
    assert model_states(moe, short, layout).optimizer_temporary == 4 * max(
        count.total() - count["experts"], count["experts"]
    )
    for training in (replace(short, transformer_engine=True), replace(short, sharding=Sharding.ALL)):
        assert not estimate(dims, ParallelLayout(1), training).peak.states.optimizer_temporary
    divided = replace(short, sharding=Sharding.OPTIMIZER)
    assert estimate(dims, ParallelLayout(8), divided).peak.states.optimizer_temporary == round(
        presets.parameter_count("2B") / 2
    )


@pytest.mark.parametrize("kind", ["untied", "moe"])
def test_estimated_states_with_lora_or_dora_match_adapted_model(kind, request):
    check_adapters(request.getfixturevalue(f"{kind}_folder"))


def check_adapters(folder, **targets) -> None:
    """Check model states of LoRA and DoRA on all linear layers but experts."""
    for kind in (Qwen3VLLoRA, Qwen3VLDoRA):
        check_states(folder, kind(dim=8, **targets))


def check_states(folder, peft) -> None:
    pair = make_pair(folder)
    peft([pair.megatron])
    real = sum(p.numel() for p in pair.megatron.parameters() if p.requires_grad)
    states = model_states(
        read_object(folder / "config.json"), replace(ALONE, lora=LoraSettings(8, dora=peft.settings.dora))
    )
    assert states.gradients == 4 * real
    assert states.optimizer == 8 * real
    assert states.parameters == 4 * sum(p.numel() for p in pair.megatron.parameters())


def test_estimated_states_of_frozen_components_contain_only_weights():
    config, layout = presets.config_dict("30B-A3B"), ParallelLayout(8, ep=8)
    count = count_parameters(dimensions_of(config), layout, layout.chunks(48)[0][0])
    everything = model_states(config, TrainingSettings(), layout)
    for parts in ({Component.VISION_MODEL}, {Component.LANGUAGE_MODEL, Component.VISION_PROJECTION}, set(Component)):
        states = model_states(config, TrainingSettings(frozen=frozenset(parts)), layout)
        names = {part.value for part in parts} | ({"experts"} if Component.LANGUAGE_MODEL in parts else set())
        left, experts = count.total() - sum(count[name] for name in names), count["experts"] * ("experts" not in names)
        assert states.parameters == everything.parameters
        assert states.gradients == 4 * left
        assert states.optimizer == round(12 * ((left - experts) / 8 + experts))
    assert left == 0  # of all parts


def test_estimated_states_match_formula_of_each_zero_stage():
    def states(**settings):
        return model_states(presets.config_dict("8B"), TrainingSettings(**settings), ParallelLayout(8))

    found, number = {kind: states(sharding=kind) for kind in Sharding}, 8_767_123_696
    assert found[Sharding.NONE].total == 18 * number
    assert found[Sharding.OPTIMIZER].total == pytest.approx((6 + 12 / 8) * number)
    # Megatron-FSDP's gradients have the dtype of the parameters by default; our recipes set float32.
    assert found[Sharding.GRADIENTS].total == pytest.approx((2 + 16 / 8) * number)
    sharded = found[Sharding.ALL]
    assert sharded.total - sharded.gathered == pytest.approx(18 / 8 * number)
    unsharded = 2 * (number + 151_936 * 4096)  # the embedding twice
    assert {kind.name: states.before_sharding for kind, states in found.items()} == {
        "NONE": 0, "OPTIMIZER": 0, "GRADIENTS": unsharded, "ALL": unsharded,
    }  # fmt: skip
    assert states(sharding=Sharding.ALL, init_on_cpu=True).before_sharding == 0
    default = states(sharding=Sharding.ALL, precision=Precision(2, 2, 4))
    assert default.gradients == pytest.approx(2 / 8 * number)


@pytest.mark.parametrize(("rows", "logits"), [(1, False), (4, True)])
def test_zero_3_peak_has_logits_or_unsharded_gradients_but_not_both(rows, logits):
    """2B: logits of a row of 8K tokens take 2.3 GiB, unsharded gradients 3.8 GiB."""
    dims, layout = dimensions_of(presets.config_dict("2B")), ParallelLayout(8)
    training = TrainingSettings(
        sharding=Sharding.ALL, seq_length=8192, max_patches=4096, micro_batch_size=rows, loss_chunk_tokens=0,
        loss_fusion=None, recompute=FULL,
    )  # fmt: skip
    (found,) = estimate(dimensions_of(presets.config_dict("2B")), layout, training).stages
    states = model_states(presets.config_dict("2B"), training, layout)
    assert states.gathered > states.gathered_gradients > 0
    # Logits and gathered weights are not in memory at the same time either.
    weights, left = states.gathered - states.gathered_gradients, found.states.gathered_gradients
    assert found.states.gathered == weights + left - states.gathered_weights * logits
    # When gradients of layers wait to be reduced, activations of these layers are freed.
    assert left == 0 if logits else states.gathered_layer < left < states.gathered_gradients
    assert (found.temporary == 2 * dims["vocab"] * 8192 * rows) == logits
