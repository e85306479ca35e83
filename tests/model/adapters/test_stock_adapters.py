"""Megatron-Bridge's own adapter classes on our model: right, put right, or refused before training.

Its recipes, verl, NeMo-RL and miles make these classes themselves: `tests/frameworks/test_adapters.py` has their calls.
"""

from __future__ import annotations

import json
import types
import warnings

from qwen3vl_bridge.peft.insertion import MagnitudeLinear
from qwen3vl_bridge.training.metrics import ExpertLoad
from qwen3vl_bridge.weights.bridge_mappings import InputMajorExpertMapping
from qwen3vl_bridge.weights.expert_layout import ExpertLayout
from qwen3vl_bridge.weights.names import IN, OUT

import pytest
import torch
from megatron.bridge.models.conversion.model_bridge import MegatronWeightTuple
from megatron.bridge.models.conversion.peft_bridge import AdapterWeight
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA, VLMLoRA
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from .peft_models import adapt, check_logits, model_of, reference_logits, worst_difference

SIZE = dict(dim=4, alpha=8)
TEXT = "*language_model*."
ALL_LINEAR = dict(target_modules=[], exclude_modules=[])
FULL_VISION = dict(
    vision_recompute_granularity="full", vision_recompute_method="uniform", vision_recompute_num_layers=1
)

CASES = {
    "LoRA": lambda: LoRA(**SIZE),
    "LoRA on all linear layers": lambda: LoRA(**SIZE, **ALL_LINEAR),
    "LoRA on some": lambda: LoRA(**SIZE, target_modules=["linear_qkv", "*.layers.2.mlp.*linear_fc1"]),
    "LoRA on routers": lambda: LoRA(**SIZE, target_modules=["linear_proj", "router"]),
    "LoRA, smaller on experts": lambda: LoRA(**SIZE, normalize_moe_lora=True),
    "VLMLoRA": lambda: VLMLoRA(**SIZE),
    "VLMLoRA beside a trained tower": lambda: VLMLoRA(
        **SIZE, target_modules=[f"{TEXT}linear_qkv"], freeze_vision_model=False, freeze_vision_projection=False
    ),
    "DoRA": lambda: DoRA(**SIZE),
    "DoRA on attention": lambda: DoRA(**SIZE, target_modules=["linear_qkv", "linear_proj"]),
    "CanonicalLoRA": lambda: CanonicalLoRA(**SIZE),
    "CanonicalLoRA on MLPs": lambda: CanonicalLoRA(
        **SIZE, target_modules=["linear_fc1_up", "linear_fc1_gate", "linear_proj"]
    ),
}
NOT_DENSE = {"LoRA on routers", "LoRA, smaller on experts"}
NOT_EXPERTS = {"DoRA"}  # refused there
OWN_WEIGHTS = {"VLMLoRA beside a trained tower"}  # which a folder of adapters has no place for


def folder_of(request, family: str):
    return request.getfixturevalue(f"{family}_folder")


@pytest.fixture(
    scope="module",
    params=[(family, case) for case in CASES for family in ("untied", "moe")
            if case not in (NOT_DENSE if family == "untied" else NOT_EXPERTS)],
    ids=lambda param: f"{param[1]}, {param[0]}",
)  # fmt: skip
def trained(request):
    """Trained adapters, the logits they make, the folder of their model, and their kind."""
    family, case = request.param
    folder = folder_of(request, family)
    adapted = adapt(folder, CASES[case](), **(dict(moe_aux_loss_coeff=0.0) if family == "moe" else {}))
    base = reference_logits(adapted.pair.reference, adapted.samples)
    losses = adapted.train()
    assert losses == sorted(losses, reverse=True)
    logits = adapted.logits()
    assert worst_difference(logits, base) > 0.5
    if case not in OWN_WEIGHTS:
        with adapted.peft.disable_adapter([adapted.model]):
            check_logits(adapted.logits(), adapted.pair.reference, adapted.samples)
    return adapted, logits, folder, case


def loaded(base_folder, adapter_folder) -> PeftModel:
    """Without a warning but one: `peft` 0.21 honours patterns of parameters, and says that it does not."""
    base = AutoModelForImageTextToText.from_pretrained(base_folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
        return PeftModel.from_pretrained(base, adapter_folder)


def test_merged(trained, tmp_path):
    adapted, logits, _, _ = trained
    adapted.pair.bridge.save_hf_pretrained([adapted.model], tmp_path, show_progress=False)
    check_logits(logits, AutoModelForImageTextToText.from_pretrained(tmp_path), adapted.samples)


def test_adapter(trained, tmp_path):
    """By AutoBridge's own method, which Megatron-Bridge's training, verl and NeMo-RL call."""
    adapted, logits, folder, case = trained
    if case in OWN_WEIGHTS:
        return
    adapted.pair.bridge.save_hf_adapter([adapted.model], tmp_path, peft_config=adapted.peft, show_progress=False)
    check_logits(logits, loaded(folder, tmp_path), adapted.samples)


def test_patterns_keep_the_scale_that_vllm_takes_for_all(trained, tmp_path):
    """Where ranks differ, so do alphas: alpha / rank is one number, which is all that vLLM looks at."""
    adapted, _, _, _ = trained
    adapted.pair.bridge.save_hf_adapter([adapted.model], tmp_path, adapted.peft)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    ranks, alphas = config["rank_pattern"], config["alpha_pattern"]
    assert ranks.keys() == alphas.keys() and config["r"] == 4
    assert {alphas[name] / rank for name, rank in ranks.items()} <= {config["lora_alpha"] / config["r"]}


def test_every_adapter_gets_a_gradient_when_the_tower_recomputes(untied_folder):
    """Megatron-Bridge looks at the text model's settings alone; adapters of the tower would not be trained."""
    for peft in (LoRA(**SIZE, lora_B_init_method="normal"), CanonicalLoRA(**SIZE, lora_B_init_method="normal")):
        adapted = adapt(untied_folder, peft, **FULL_VISION)
        adapted.backward()
        assert [name for name, p in adapted.trainable().items() if p.grad is None or not p.grad.any()] == []


def test_dora_is_ours(untied_folder):
    """Megatron-Bridge's own wants inputs of three dimensions, and scales the bias that a layer has added."""
    model = DoRA(**SIZE)(model_of(untied_folder))
    assert all(isinstance(m, MagnitudeLinear) for m in model.modules() if type(m).__name__.endswith("DoRALinear"))
    assert sum(isinstance(m, MagnitudeLinear) for m in model.modules()) == 40


def test_what_vlm_lora_freezes(untied_folder):
    """Parts as the provider's flags mean them: the mergers are the projection, though they hang under the tower."""
    fields = dict(target_modules=[f"{TEXT}linear_qkv"], freeze_vision_projection=False)
    (model,) = VLMLoRA(**SIZE, **fields)([model_of(untied_folder)])
    assert {name.partition(".adapter.")[1] or "merger" for name, p in model.named_parameters() if p.requires_grad} == {
        ".adapter.",
        "merger",
    }
    assert all(p.requires_grad for name, p in model.named_parameters() if "merger" in name)
    frozen = model_of(untied_folder)
    frozen.config.freeze_vision_projection = True  # the provider's word holds
    VLMLoRA(**SIZE, **fields)([frozen])
    assert not any(p.requires_grad for name, p in frozen.named_parameters() if "merger" in name)


def test_load_of_experts_is_counted_under_adapters_of_routers(moe_folder):
    adapted = adapt(moe_folder, LoRA(**SIZE, target_modules=["router"]))
    load = ExpertLoad([adapted.model])
    adapted.backward()
    tokens = sum(len(sample.ids) for sample in adapted.samples)
    counts = load.counts(adapted.pair.provider)
    assert counts.sum(1).tolist() == [tokens * adapted.pair.provider.moe_router_topk] * len(counts)


class TestRefusals:
    @pytest.mark.parametrize(
        ("peft", "message"),
        [
            (lambda: DoRA(dropout=0.1), "dropout is 0.1, expected 0: DoRA does not support dropout here"),
            (lambda: CanonicalLoRA(target_modules=["linear_q"]), "expected target_modules with linear_k, linear_v too"),
            (
                lambda: CanonicalLoRA(target_modules=[f"{TEXT}linear_fc1_up"]),
                r"a part of language_model.*linear_fc1, whose forward .* with linear_fc1_gate too",
            ),
            (lambda: VLMLoRA(freeze_vision_model=False), "freeze_vision_model is False, and vision_.*Qwen3VLLoRA"),
            (
                lambda: VLMLoRA(freeze_language_model=False),
                "freeze_language_model is False, and language_model.* not saved in Megatron-Bridge's checkpoints",
            ),
        ],
    )  # fmt: skip
    def test_what_would_go_wrong(self, untied_folder, peft, message):
        with pytest.raises(ValueError, match=message):
            peft()([model_of(untied_folder)])

    @pytest.mark.parametrize("name", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
    def test_dora_across_ranks(self, untied_folder, name):
        model = model_of(untied_folder)
        setattr(model.config, name, 2)
        with pytest.raises(ValueError, match=f"{name} is 2, expected 1 for DoRA"):
            DoRA()([model])

    def test_an_output_layer_that_is_the_embedding(self, tied_folder):
        """NeMo-RL's settings adapt it; merged weights, which its generation runs on, would lack that adapter."""
        with pytest.raises(
            ValueError, match=r"adapts language_model\.output_layer, whose weight is tied to the embedding"
        ):
            LoRA(**ALL_LINEAR)([model_of(tied_folder)])
        model = LoRA(target_modules=[], exclude_modules=["output_layer"])(model_of(tied_folder))
        assert not any("output_layer.adapter" in name for name, _ in model.named_parameters())

    @pytest.mark.parametrize(
        ("peft", "message"),
        [
            (
                DoRA,
                r"DoRA adapts .*experts.*, and .* peft does not support DoRA .* qwen3vl_bridge\.Qwen3VLDoRA",
            ),
            (lambda: LoRA(experts_shared_outer_loras=True), "experts_shared_outer_loras is True, .* expected False"),
        ],
    )
    def test_experts(self, moe_folder, peft, message):
        with pytest.raises(ValueError, match=message):
            peft()([model_of(moe_folder)])

    @pytest.mark.parametrize("peft", [LoRA, CanonicalLoRA])
    def test_experts_that_are_cut(self, moe_folder, peft):
        model = model_of(moe_folder)
        model.config.expert_tensor_parallel_size = 2
        with pytest.raises(ValueError, match="expert_tensor_parallel_size is 2, expected 1 where experts have"):
            peft()([model])

    def test_dora_for_callers_that_take_two_matrices(self, untied_folder):
        """They hand them to vLLM and SGLang as LoRA: verl and miles."""
        adapted = adapt(untied_folder, DoRA(**SIZE))
        with pytest.raises(ValueError, match=r"40 DoRA adapters, .* save_hf_adapter, or export"):
            adapted.pair.bridge.export_adapter_weights([adapted.model])


class TestGroupedExperts:
    """As Transformer Engine has them, one adapter for all or a stack of them: the tensors alone, without a GPU."""

    PREFIX = "language_model.decoder.layers.2.mlp.experts.linear_fc2"

    @pytest.fixture(scope="class")
    def pair(self, moe_folders):
        adapted = adapt(moe_folders[ExpertLayout.INPUT_MAJOR], LoRA(**SIZE, target_modules=["linear_proj"]))
        return adapted.pair

    @pytest.mark.parametrize("shapes", [((4, 48), (80, 4)), ((6, 4, 48), (6, 80, 4)), ((6, 4, 48), (80, 4))])
    def test_merged(self, pair, shapes):
        conversion = pair.bridge._model_bridge
        rows, columns = (torch.randn(shape) for shape in shapes)
        sides = [
            MegatronWeightTuple(f"{self.PREFIX}.adapter.{kind}", side, 0)
            for kind, side in zip((IN, OUT), (rows, columns), strict=True)
        ]
        adapter = AdapterWeight(self.PREFIX, None, 8, 4, *sides)
        weight = torch.randn(48, 80)
        for expert in range(6):
            task = types.SimpleNamespace(
                global_param_name=f"{self.PREFIX}.to_wrap.weight{expert}",
                mapping=InputMajorExpertMapping(f"{self.PREFIX}.weight{expert}", "experts.down_proj"),
            )
            merged = conversion._merge_grouped_export_adapter_weights(task, {"down": weight}, [adapter], 6)
            a, b = (side[expert] if side.ndim > 2 else side for side in (rows, columns))
            torch.testing.assert_close(merged["down"], weight + 8 / 4 * (b @ a).t())
