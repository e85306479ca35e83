"""What a step has, costs and which experts its tokens chose: counted here otherwise, and however a model is split.

Run on ranks: -m tests.training.metrics.test_meter OUTPUT HF_FOLDER [DEPTHS], a JSON list of [folder, fields] of models
that are measured one after the other in two stages.
"""

import dataclasses
import json
import re
import sys
from dataclasses import replace

from qwen3vl_bridge.parallel.collectives import sum_amounts
from qwen3vl_bridge.training.callbacks import training_callbacks
from qwen3vl_bridge.training.metrics import Amounts, ExpertLoad, meter_of
from qwen3vl_bridge.training.run_log import ENTRY
from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest
import torch

from tests.forked import run_ranks
from tests.parity.on_ranks import Split
from tests.parity.references import MICROBATCHES, step_samples
from tests.parity.topologies import TOPOLOGIES, Topology
from tests.qwen3_5.tiny import make_checkpoint
from tests.ranks import begin, forget_models, leave
from tests.steps import followed, forward_backward, train_step

NAMES = ("DP2", "CP2", "TP2+SP+EP2", "PP2", "PP2+VPP2", "EP2")
BALANCE = 0.01


def measure(folder: str, topology: Topology, rows: str, **fields) -> dict:
    """Of a step's forward and backward pass: amounts, and how often each expert was chosen; figures of the next step.

    Args:
        folder: of a model with experts.
        topology: how it is split.
        rows: "padded" or "packed".
        fields: of the provider, beside those of the topology.
    """
    split = Split(folder, Topology(topology.ranks, topology.fields | fields), BALANCE)
    run = split.run
    run.cfg.logger.log_interval = 1
    split.begin(split.batches("mixed", rows), rows)
    load = ExpertLoad(run.model)
    forward_backward(run, run.stream, MICROBATCHES // run.groups.dp.size())
    counts = load.counts(run.cfg.model)
    amounts = sum_amounts(meter_of(run.state).take().values(), run.groups)
    with followed(run, training_callbacks(run.cfg)) as shared:
        train_step(run)
    return dict(amounts=Amounts(*amounts), counts=counts, figures=shared[ENTRY])


def main(output: str, folder: str, depths: str = "") -> None:
    if depths:
        found = [measure(one, TOPOLOGIES["PP2"], "packed", **fields)["figures"] for one, fields in json.loads(depths)]
    else:
        found = {name: measure(folder, TOPOLOGIES[name], "packed") for name in NAMES}
    # The last rank: it has neither the first stage nor the first tokens.
    leave(found, output, writer=torch.distributed.get_world_size() - 1)


ALONE = Topology(1)
TRAINED = dict(mtp_loss_scaling_factor=0.1)
RECOMPUTED = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.fixture(scope="module")
def alone(moe_folder):
    return {
        "packed": measure(moe_folder, ALONE, "packed"),
        "padded": measure(moe_folder, ALONE, "padded"),
        "recomputed": measure(moe_folder, ALONE, "packed", **RECOMPUTED),
    }


@pytest.fixture(scope="module")
def samples(moe_folder):
    from transformers import AutoConfig

    return [s for batch in step_samples("mixed", AutoConfig.from_pretrained(moe_folder), 0) for s in batch]


def test_amounts_are_those_of_the_samples(alone, samples):
    images = [grid for s in samples for grid in s.pixels.get("image_grid_thw", torch.empty(0, 3)).long().tolist()]
    videos = [grid for s in samples for grid in s.pixels.get("video_grid_thw", torch.empty(0, 3)).long().tolist()]
    frames = [h * w for t, h, w in images + videos for _ in range(t)]
    lengths = [len(s.ids) for s in samples]
    expected = dict(
        tokens=sum(lengths), trained_tokens=int(sum(s.loss_mask.sum() for s in samples)),
        token_pairs=sum(n**2 for n in lengths), patches=sum(frames), patch_pairs=sum(n**2 for n in frames),
        images=len(images), video_frames=sum(t for t, _, _ in videos),
    )  # fmt: skip
    assert expected["images"] and expected["video_frames"]
    for rows, found in alone.items():
        amounts = dataclasses.asdict(found["amounts"])
        slots, count = amounts.pop("slots"), amounts.pop("rows")
        assert amounts == expected, rows
        assert slots > expected["tokens"]
        assert count == (len(samples) if rows == "padded" else MICROBATCHES)


def test_experts_are_chosen_as_transformers_chooses_them(alone, samples, moe_folder):
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(moe_folder, attn_implementation="eager")
    config, text = model.config, model.config.text_config
    expected = 0
    for sample in samples:
        ids = sample.ids[None]
        kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        with torch.no_grad():
            logits = model(
                input_ids=ids, mm_token_type_ids=kinds, **sample.pixels, output_router_logits=True
            ).router_logits
        chosen = torch.stack([layer.topk(text.num_experts_per_tok).indices for layer in logits])  # [layers, tokens, k]
        expected = expected + torch.nn.functional.one_hot(chosen, text.num_experts).sum((1, 2))
    for rows, found in alone.items():
        assert torch.equal(found["counts"], expected), rows


def test_however_it_is_split(alone, moe_folder, tmp_path):
    """Ranks that see the same tokens count them once, those that see others add up."""
    run_ranks("tests.training.metrics.test_meter", 2, tmp_path / "found", moe_folder)
    split, expected = torch.load(tmp_path / "found", weights_only=False), alone["packed"]
    assert split.keys() == set(NAMES)
    for name, found in split.items():
        # Segments are padded to what the split needs.
        assert dataclasses.replace(found["amounts"], slots=0) == dataclasses.replace(expected["amounts"], slots=0), name
        assert torch.equal(found["counts"], expected["counts"]), name
        ours, theirs = found["figures"], expected["figures"]
        assert ours.keys() == theirs.keys()
        for figure in ("tokens", "images", "video_frames", "trained_tokens", "expert_load_max", "expert_load_mean"):
            assert ours[figure] == theirs[figure], (name, figure)
        assert ours["load_balancing_loss"] == pytest.approx(theirs["load_balancing_loss"], rel=1e-5), name


def test_loads_and_losses_are_what_they_say(alone):
    counts, figures = alone["packed"]["counts"].double(), alone["packed"]["figures"]
    loads = counts.amax(1) / counts.mean(1)
    assert 1 < loads.mean() < loads.max()
    assert figures["expert_load_max"] == pytest.approx(loads.max().item(), rel=0.5)  # of another step
    # 1 where experts are chosen evenly, and 1.09 here; a sum that is not divided by layers or ranks is twice that.
    assert figures["load_balancing_loss"] == pytest.approx(1, rel=0.3)
    assert alone["recomputed"]["figures"]["load_balancing_loss"] == pytest.approx(figures["load_balancing_loss"])


@pytest.fixture(scope="module")
def depths(tmp_path_factory):
    """Models with experts that follow each other: after a shallower, a deeper, and one with a layer of MTP more."""
    shallow, deep = (
        str(make_checkpoint(tmp_path_factory.mktemp("depth"), moe=True, mtp=ExpertLayout.OUTPUT_MAJOR, **changes))
        for changes in ({}, dict(num_hidden_layers=8))
    )
    without = dict(mtp_num_layers=None)
    return [(shallow, {}), (deep, {}), (shallow, TRAINED), (shallow, without), (deep, TRAINED), (shallow, {})]


@pytest.fixture(scope="module")
def figures(depths):
    found = []
    for folder, fields in depths:
        forget_models()
        found.append(measure(folder, ALONE, "packed", **fields)["figures"])
        assert found[-1]["load_balancing_loss"] == pytest.approx(1, rel=0.3)  # where experts are chosen evenly
    return found


def balance(figures):
    return {name: figures[name] for name in ("load_balancing_loss", "expert_load_max", "expert_load_mean")}


def test_a_model_of_another_depth_is_measured_as_the_first_of_a_process(depths, figures):
    for (folder, fields), expected in zip(depths, figures, strict=True):
        assert balance(measure(folder, ALONE, "packed", **fields)["figures"]) == balance(expected), (folder, fields)


def test_stages_of_models_of_other_depths(depths, figures, moe_folder, tmp_path):
    run_ranks("tests.training.metrics.test_meter", 2, tmp_path / "found", moe_folder, json.dumps(depths))
    found = torch.load(tmp_path / "found", weights_only=False)
    for case, ours, alone in zip(depths, found, figures, strict=True):
        assert balance(ours) == pytest.approx(balance(alone), rel=1e-5), case


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA B200", 2250e12), ("NVIDIA GB200", 2500e12),
        ("NVIDIA H100 PCIe", None), ("NVIDIA H100 NVL", None), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H800", None), ("NVIDIA GH200 480GB", None), ("NVIDIA GeForce RTX 4090", None),
    ],
)  # fmt: skip
def test_peaks_by_the_drivers_names(device, peak):
    from qwen3vl_bridge.training.metrics import peak_operations

    assert peak_operations(device) == peak


@pytest.mark.parametrize("size", ["2B", "30B-A3B"])
def test_a_provider_has_its_configurations_numbers(size):
    from qwen3vl_bridge.models.flops import Trained, operations_of_a_step, provider_costs, tower_costs
    from qwen3vl_bridge.models.qwen3_vl import presets
    from qwen3vl_bridge.models.qwen3_vl.bridge import provider_from_hf_config
    from qwen3vl_bridge.registry import dimensions_of

    config = presets.hf_config(size).to_dict()
    provider = provider_from_hf_config(config)
    assert provider.dimensions().sizes == dimensions_of(config).sizes
    for trained in (None, Trained(), Trained(language_model=False)):
        assert provider_costs(provider, trained) == tower_costs(config, trained)
    # Before there are batches, Megatron-Bridge asks with rows alone.
    full = tower_costs(config, Trained()).of(tokens=provider.seq_length, patches=0, patch_pairs=0)
    assert operations_of_a_step(provider, batch_size=3) == pytest.approx(3 * full)


def test_adapters_are_counted_by_the_layers_that_they_are_on(inputs, moe_folder):
    from qwen3vl_bridge.models.flops import Trained, provider_costs
    from qwen3vl_bridge.peft.lora import Qwen3VLLoRA
    from qwen3vl_bridge.training.metrics import step_costs

    from megatron.bridge.peft.lora import LoRA

    cfg = inputs.config(None)
    cfg.peft = Qwen3VLLoRA(dim=4, target_modules=["*.layers.1.*.linear_proj"], adapt_vision_model=True)
    expected = Trained(
        language_model=False, vision_model=False, vision_projection=False,
        rank=lambda name: 4 if name.endswith("layers.1.self_attention.linear_proj") else 0,
    )  # fmt: skip
    assert step_costs(cfg) == provider_costs(cfg.model, expected)
    cfg.peft.freeze_vision_projection = False
    assert step_costs(cfg) == provider_costs(cfg.model, replace(expected, vision_projection=True))
    cfg.model.freeze_vision_projection = True
    assert step_costs(cfg) == provider_costs(cfg.model, expected)
    cfg.peft = Qwen3VLLoRA(dim=4, target_modules=[], exclude_modules=["linear_fc1"])
    ranks = replace(
        expected, rank=lambda name: 4 * (name.startswith("language_model") and not name.endswith("linear_fc1"))
    )
    assert step_costs(cfg) == provider_costs(cfg.model, ranks)
    cfg.peft = LoRA()
    assert step_costs(cfg) is None
    cfg = replace(inputs, hf=moe_folder, megatron=moe_folder).config(None)
    for experts in (False, True):
        cfg.peft = Qwen3VLLoRA(dim=4, adapt_experts=experts)
        chosen = re.compile(r"language_model\." if experts else r"language_model\.(?!.*experts)")
        ranks = replace(expected, rank=lambda name, chosen=chosen: 4 * bool(chosen.match(name)))
        assert step_costs(cfg) == provider_costs(cfg.model, ranks)


if __name__ == "__main__":
    begin()
    main(*sys.argv[1:])
