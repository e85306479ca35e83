"""Counts and states in one process: released sizes, real optimizers, adapters."""

from dataclasses import replace
from functools import partial

from qwen3vl_bridge import Qwen3VLDoRA, Qwen3VLLoRA
from qwen3vl_bridge.compat import optimizers
from qwen3vl_bridge.io.files import read_object
from qwen3vl_bridge.models.qwen3_5 import presets as qwen3_5
from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.planning.estimate import FIXED_RESERVE, estimate
from qwen3vl_bridge.planning.model_states import ModelStates, chunk_count, stage_states
from qwen3vl_bridge.planning.split import ModelSplit
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
from qwen3vl_bridge.weights.rows import Part, is_of_mtp

import pytest
import torch
from transformers import AutoConfig

from tests.parity.batches import make_batch, make_samples
from tests.parity.conftest import make_pair
from tests.parity.on_ranks import configuration
from tests.parity.topologies import Topology
from tests.qwen3_5.test_table import MTP_PARAMETERS, PARAMETERS
from tests.steps import set_up, train_step

from .test_memory_on_ranks import allocated, gradient_bytes, optimizer_bytes

SIZES = {size: (presets.config_dict(size), presets.parameter_count(size), 0) for size in presets.PRESETS}
SIZES |= {
    f"Qwen3.5 {size}": (qwen3_5.config_dict(size), PARAMETERS[size] + MTP_PARAMETERS[size], MTP_PARAMETERS[size])
    for size in qwen3_5.PRESETS
}
STAGES = {
    "2B": ModelSplit(7, pp=7), "4B": ModelSplit(6, pp=6, vpp=2),
    "8B": ModelSplit(4, pp=4, first_layers=6, last_layers=10), "32B": ModelSplit(8, pp=8, vpp=2),
    "30B-A3B": ModelSplit(2, pp=2, layout=((20,), (28,))),
    "235B-A22B": ModelSplit(8, pp=8, vpp=4, embedding_as_layer=True, loss_as_layer=True),
    "Qwen3.5 9B": ModelSplit(4, pp=4), "Qwen3.5 35B-A3B": ModelSplit(4, pp=4),
    "Qwen3.5 27B": ModelSplit(8, pp=8, vpp=2), "Qwen3.5 4B": ModelSplit(3, pp=3, layout=((9,), (11,), (12,))),
}  # fmt: skip
ONE = ModelSplit(1)
SPLITS = [*((size, ONE) for size in SIZES), *STAGES.items()]


@pytest.mark.parametrize(("size", "split"), SPLITS)
def test_stages_have_everything_once(size, split):
    """And the embedding twice where the last stage needs it too; the last has multi-token prediction."""
    config, parameters, mtp = SIZES[size]
    dims = dimensions_of(config)
    chunks = [chunk for stage in split.chunks(len(dims.indices["text_layers"])) for chunk in stage]
    again = 0 if dims["untied"] or split.pp == 1 else dims["vocab"] * dims["hidden"]
    assert sum(chunk_count(dims, split, chunk).total() for chunk in chunks) == parameters + again
    assert [chunk_count(dims, split, chunk, is_of_mtp).total() for chunk in chunks] == [0] * (len(chunks) - 1) + [mtp]


def states_of(config: dict, training: TrainingSettings, split: ModelSplit = ONE) -> ModelStates:
    dims = dimensions_of(config)
    (chunks,) = split.chunks(len(dims.indices["text_layers"]))
    return stage_states(dims, split, chunks, training)


def run_of(folder, change=lambda cfg: None):
    """A run on one rank of batches of its own."""
    cfg, hf = configuration(str(folder), Topology(1)), AutoConfig.from_pretrained(folder)
    change(cfg)
    run = set_up(cfg, data=False)
    run.stream = iter([make_batch(make_samples("mixed", hf, seed=seed), hf, packed=True) for seed in range(4)])
    return run


ALONE = TrainingSettings(precision=FP32, sharding=Sharding.NONE, transformer_engine=False)


@pytest.mark.parametrize("kind", ["untied", "moe"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16 gradients"])
def test_a_step_of_a_real_optimizer(precision, kind, request):
    def change(cfg):
        if precision != "float32":
            cfg.model.bf16 = cfg.optimizer.bf16 = True
            cfg.model.params_dtype = cfg.optimizer.params_dtype = torch.bfloat16
        cfg.ddp.grad_reduce_in_fp32 = precision != "bfloat16 gradients"

    folder = request.getfixturevalue(f"{kind}_folder")
    expected = {"float32": FP32, "bfloat16": BF16, "bfloat16 gradients": Precision(2, 2, 4)}[precision]
    run = run_of(folder, change)
    train_step(run)
    states = states_of(read_object(folder / "config.json"), replace(ALONE, precision=expected))
    weights = [p for chunk in run.model for p in chunk.parameters()]
    assert states.parameters == sum(p.numel() * p.element_size() for p in weights)
    assert states.gradients == gradient_bytes(run.model)
    assert states.optimizer == optimizer_bytes(run.optimizer)


@pytest.mark.parametrize("kind", ["untied", "moe"])
def test_torchs_adam_holds_roots_of_second_moments(kind, request, monkeypatch):
    """As on a GPU, where torch's function takes its way of whole lists by itself."""
    folder, peaks = request.getfixturevalue(f"{kind}_folder"), []
    run = run_of(folder)
    monkeypatch.setattr(optimizers, "adam", partial(optimizers.adam, foreach=True))
    for one in optimizers_of(run.optimizer):
        assert type(one.optimizer) is optimizers.Adam
        monkeypatch.setattr(one.optimizer, "step", recorded(one.optimizer.step, peaks))
    train_step(run)
    states = states_of(read_object(folder / "config.json"), ALONE)
    assert 0.97 * states.updating <= max(peaks) <= states.updating  # norms and biases are a group of their own
    assert len(peaks) == 1


def recorded(step, peaks: list[int]):
    def call(*args, **kwargs):
        step(*args, **kwargs)
        with allocated() as most:
            found = step(*args, **kwargs)
        peaks.append(max(most))
        return found

    return call


def test_the_optimizers_step_is_the_peak_of_short_rows():
    """2B without Transformer Engine, one GPU: 4 bytes of each parameter are more than a short row's activations."""
    dims = dimensions_of(presets.config_dict("2B"))
    short, long = (
        TrainingSettings(transformer_engine=transformer_engine, seq_length=tokens, sharding=Sharding.NONE)
        for transformer_engine, tokens in ((False, 128), (False, 8192))
    )
    (found,) = estimate(dims, ModelSplit(1), short).stages
    assert found.states.updating == 4 * presets.parameter_count("2B")
    assert found.total == found.updating == found.states.total + 1.1 * found.states.updating + FIXED_RESERVE
    (other,) = estimate(dims, ModelSplit(1), long).stages
    assert other.total > other.updating
    moe, split = presets.config_dict("30B-A3B"), ModelSplit(8, ep=8)
    count = chunk_count(dimensions_of(moe), split, split.chunks(48)[0][0])
    assert states_of(moe, short, split).updating == 4 * max(count.total() - count["experts"], count["experts"])
    for training in (replace(short, transformer_engine=True), replace(short, sharding=Sharding.ALL)):
        assert not estimate(dims, ModelSplit(1), training).peak.states.updating
    divided = replace(short, sharding=Sharding.OPTIMIZER)
    assert estimate(dims, ModelSplit(8), divided).peak.states.updating == round(presets.parameter_count("2B") / 2)


@pytest.mark.parametrize("kind", ["untied", "moe"])
def test_adapters(kind, request):
    check_adapters(request.getfixturevalue(f"{kind}_folder"))


def check_adapters(folder, **targets) -> None:
    """On all linear layers but experts': parameters that are trained, to the last one."""
    for kind in (Qwen3VLLoRA, Qwen3VLDoRA):
        check_states(folder, kind(dim=8, **targets))


def check_states(folder, peft) -> None:
    pair = make_pair(folder)
    peft([pair.megatron])
    real = sum(p.numel() for p in pair.megatron.parameters() if p.requires_grad)
    states = states_of(
        read_object(folder / "config.json"), replace(ALONE, lora=LoraSettings(8, dora=peft.settings.dora))
    )
    assert states.gradients == 4 * real
    assert states.optimizer == 8 * real
    assert states.parameters == 4 * sum(p.numel() for p in pair.megatron.parameters())


def test_frozen_parts_have_weights_alone():
    config, split = presets.config_dict("30B-A3B"), ModelSplit(8, ep=8)
    count = chunk_count(dimensions_of(config), split, split.chunks(48)[0][0])
    everything = states_of(config, TrainingSettings(), split)
    for parts in ({Part.VISION_MODEL}, {Part.LANGUAGE_MODEL, Part.VISION_PROJECTION}, set(Part)):
        states = states_of(config, TrainingSettings(frozen=frozenset(parts)), split)
        names = {part.value for part in parts} | ({"experts"} if Part.LANGUAGE_MODEL in parts else set())
        left, experts = count.total() - sum(count[name] for name in names), count["experts"] * ("experts" not in names)
        assert states.parameters == everything.parameters
        assert states.gradients == 4 * left
        assert states.optimizer == round(12 * ((left - experts) / 8 + experts))
    assert left == 0  # of all parts


def test_sharding_in_the_order_of_zero():
    def states(**settings):
        return states_of(presets.config_dict("8B"), TrainingSettings(**settings), ModelSplit(8))

    found, whole = {kind: states(sharding=kind) for kind in Sharding}, 8_767_123_696
    assert found[Sharding.NONE].total == 18 * whole
    assert found[Sharding.OPTIMIZER].total == pytest.approx((6 + 12 / 8) * whole)
    # Megatron-FSDP's gradients are of the parameters' precision, unless it is told another, as by our recipes.
    assert found[Sharding.GRADIENTS].total == pytest.approx((2 + 16 / 8) * whole)
    sharded = found[Sharding.ALL]
    assert sharded.total - sharded.gathered == pytest.approx(18 / 8 * whole)
    unsharded = 2 * (whole + 151_936 * 4096)  # the embedding twice
    assert {kind.name: states.unsharded for kind, states in found.items()} == {
        "NONE": 0, "OPTIMIZER": 0, "GRADIENTS": unsharded, "ALL": unsharded,
    }  # fmt: skip
    assert states(sharding=Sharding.ALL, made_on_host=True).unsharded == 0
    untold = states(sharding=Sharding.ALL, precision=Precision(2, 2, 4))
    assert untold.gradients == pytest.approx(2 / 8 * whole)


@pytest.mark.parametrize(("rows", "logits"), [(1, False), (4, True)])
def test_under_zero_3_logits_and_unsharded_gradients_do_not_coincide(rows, logits):
    """Of rows of 8K the 2B's logits take 2.3 GiB each; unsharded gradients 3.8 GiB."""
    dims, split = dimensions_of(presets.config_dict("2B")), ModelSplit(8)
    training = TrainingSettings(
        sharding=Sharding.ALL, seq_length=8192, max_patches=4096, micro_batch_size=rows, loss_chunk_tokens=0,
        loss_fusion=None, recompute=FULL,
    )  # fmt: skip
    (found,) = estimate(dimensions_of(presets.config_dict("2B")), split, training).stages
    states = states_of(presets.config_dict("2B"), training, split)
    assert states.gathered > states.gathered_gradients > 0
    # Nor do logits and layers' weights.
    weights, left = states.gathered - states.gathered_gradients, found.states.gathered_gradients
    assert found.states.gathered == weights + left - states.gathered_weights * logits
    # While those of some layers wait to be reduced, the layers' activations are freed.
    assert left == 0 if logits else states.gathered_layer < left < states.gathered_gradients
    assert (found.temporary == 2 * dims["vocab"] * 8192 * rows) == logits
