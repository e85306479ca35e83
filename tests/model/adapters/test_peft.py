"""LoRA and DoRA on the model: what is trained, what is refused, and recomputation."""

from __future__ import annotations

import itertools

from qwen3vl_bridge.peft.lora import Qwen3VLDoRA, Qwen3VLLoRA, Qwen3VLParts
from qwen3vl_bridge.training.process_groups import initialize

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from megatron.core.distributed import DistributedDataParallelConfig

from .peft_models import ALL_PARTS, adapt, model_of

TOWERS = ("language_model", "vision_model")
PARTS = ("language_model", "vision_model", "vision_projection")
EIGHT = list(itertools.product((False, True), repeat=3))
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
FULL_VISION = {f"vision_{name}": value for name, value in FULL.items()}


def part_of(name: str) -> str:
    if name.startswith("language_model."):
        return "language_model"
    return "vision_projection" if "merger" in name else "vision_model"


def chosen(prefix: str, flags: tuple[bool, ...]) -> dict[str, bool]:
    return {f"{prefix}_{part}": flag for part, flag in zip(PARTS, flags, strict=True)}


class TestWhatIsTrained:
    """Every combination of the provider's flags with PEFT's, adapters on all parts or on one."""

    @pytest.mark.parametrize("rests", EIGHT)
    @pytest.mark.parametrize("provider_rests", EIGHT)
    def test_flags(self, untied_folder, provider_rests, rests):
        # Each part meets adapters and none over the eight cases.
        adapts = (rests[1], rests[2], rests[0]) if any(rests) else (True, True, True)
        peft = Qwen3VLLoRA(dim=2, **chosen("freeze", rests), **chosen("adapt", adapts))
        adapted = adapt(untied_folder, peft, content="one image", **chosen("freeze", provider_rests))
        adapted.backward()
        for name, p in adapted.model.named_parameters():
            part = PARTS.index(part_of(name))
            is_adapter = ".adapter." in name
            expected = is_adapter or not (provider_rests[part] or rests[part])
            assert (p.grad is not None) == p.requires_grad == expected, name
            assert not is_adapter or adapts[part], name
        found = {part_of(name) for name, _ in adapted.model.named_parameters() if ".adapter." in name}
        assert found == {part for part, adapt_it in zip(PARTS, adapts, strict=True) if adapt_it}

    @pytest.mark.parametrize("method", [Qwen3VLLoRA, Qwen3VLDoRA])
    def test_every_adapter_gets_a_gradient(self, untied_folder, method):
        adapted = adapt(untied_folder, method(dim=2, **ALL_PARTS))
        adapted.train(steps=1)  # before, B is zero, and so is the gradient of A
        adapted.model.zero_grad()
        adapted.backward()
        assert [name for name, p in adapted.trainable().items() if not p.grad.any()] == []

    def test_for_inference_nothing_is_trained(self, untied_folder):
        model = model_of(untied_folder)
        Qwen3VLLoRA(dim=2, freeze_vision_model=False)(model, training=False)
        assert not any(p.requires_grad for p in model.parameters()) and not model.training

    def test_target_modules_choose_within_the_parts(self, untied_folder):
        targets = ["linear_qkv", "*.layers.1.*.linear_fc2"]
        model = Qwen3VLLoRA(dim=2, adapt_vision_model=True, target_modules=targets)(model_of(untied_folder))
        adapted = {name for name, p in model.named_parameters() if p.requires_grad and "linear_in" in name}
        attention = [f"{tower}.decoder.layers.{i}.self_attention.linear_qkv" for tower in TOWERS for i in range(4)]
        mlp = [f"{tower}.decoder.layers.1.mlp.linear_fc2" for tower in TOWERS]
        assert adapted == {f"{layer}.adapter.linear_in.weight" for layer in attention + mlp}

    def test_exclude_modules(self, untied_folder):
        peft = Qwen3VLLoRA(dim=2, target_modules=[], exclude_modules=["linear_qkv", "linear_proj"])
        model = peft(model_of(untied_folder))
        adapted = {name for name, p in model.named_parameters() if p.requires_grad and "linear_in" in name}
        layers = [f"language_model.decoder.layers.{i}.mlp.linear_fc{n}" for i in range(4) for n in (1, 2)]
        assert adapted == {f"{layer}.adapter.linear_in.weight" for layer in layers}

    def test_checkpoints_keep_trained_weights_under_adapters(self, untied_folder):
        """A layer's own weight has another name in a state dictionary than as a parameter once it has an adapter."""
        peft = Qwen3VLLoRA(dim=2, freeze_language_model=False)
        adapted = adapt(untied_folder, peft)
        kept = {name for name in adapted.model.state_dict() if peft.adapter_key_filter(name)}
        kept = {name for name in kept if not name.endswith("_extra_state")}  # as Megatron-Bridge drops them
        assert kept == {name.replace(".to_wrap.", ".") for name in adapted.trainable()}


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (dict(target_modules=["linear_qkv", "linear_q"]), r"\['linear_q'\] match no linear layer"),
            (dict(target_modules=["*vision_model*.linear_qkv"]), "match no linear layer of the adapted parts"),
            (dict(target_modules=["linear_qkv"], adapt_vision_projection=True), "adapt_vision_projection is True"),
            (dict(target_modules=["output_layer"]), "match no linear layer"),
            (dict(adapt_language_model=False), "nothing would be adapted"),
            (dict(adapt_language_model=False, target_modules=[]), "nothing would be adapted"),
            (dict(canonical_mapping={"linear_qkv": {"linear_q"}}), "canonical_mapping"),
            (dict(lora_dtype=torch.float32), "lora_dtype"),
            (dict(normalize_moe_lora=True), "normalize_moe_lora is True, expected False"),
        ],
    )
    def test_what_would_be_ignored(self, untied_folder, fields, message):
        model = model_of(untied_folder)
        with pytest.raises(ValueError, match=message):
            Qwen3VLLoRA(**fields)(model)
        assert all(p.requires_grad for p in model.parameters())

    @pytest.mark.parametrize("fields", [dict(dropout=0.1), dict(target_modules=["linear_q"])])
    def test_of_dora(self, untied_folder, fields):
        with pytest.raises(ValueError, match=next(iter(fields))):
            Qwen3VLDoRA(**fields)(model_of(untied_folder))

    @pytest.mark.parametrize("name", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
    def test_dora_across_ranks(self, untied_folder, name):
        model = model_of(untied_folder)
        setattr(model.config, name, 2)
        with pytest.raises(ValueError, match=f"{name} is 2, expected 1"):
            Qwen3VLDoRA()(model)

    def test_adapters_twice(self, untied_folder):
        model = Qwen3VLLoRA(dim=2)(model_of(untied_folder))
        with pytest.raises(ValueError, match="already has 16 adapters"):
            Qwen3VLLoRA(dim=2)(model)

    def test_another_model(self):
        with pytest.raises(TypeError, match="found a Linear, expected a Qwen3VLModel"):
            Qwen3VLLoRA()([torch.nn.Linear(2, 2)])

    def test_experts(self, moe_folder):
        model = model_of(moe_folder)
        Qwen3VLLoRA(dim=2)(model)  # nobody asked for theirs
        adapted = [name for name, p in model.named_parameters() if p.requires_grad]
        assert any(".layers.1.mlp.linear_fc1.adapter." in name for name in adapted)  # the dense layer
        assert not any(".experts." in name for name in adapted)

    def test_both_kinds_of_choice(self, untied_folder):
        with pytest.raises(ValueError, match=r"set target_modules to \[\]"):
            Qwen3VLLoRA(dim=2, exclude_modules=["*.layers.0.*"])(model_of(untied_folder))
        model = model_of(untied_folder)
        Qwen3VLLoRA(dim=2, target_modules=[], exclude_modules=["*.layers.0.*"])(model)
        adapted = [name for name, p in model.named_parameters() if p.requires_grad]
        assert adapted and not any(".layers.0." in name for name in adapted)

    def test_a_pipeline_stage_may_lack_a_part(self, untied_folder):
        model = model_of(untied_folder)
        model.pre_process = False
        del model.vision_model
        Qwen3VLLoRA(dim=2, **ALL_PARTS)(model)


# Relative to the largest entry of each gradient; measured 5.2e-7.
RECOMPUTE_TOLERANCE = 5e-6


class TestRecompute:
    """Adapters get the same gradients from recomputed layers, whatever else is trained."""

    @pytest.mark.parametrize(
        ("peft_fields", "recompute"),
        [
            (dict(), FULL),
            (ALL_PARTS, FULL | FULL_VISION),
            (dict(adapt_vision_model=True), FULL_VISION),
            (dict(adapt_language_model=False, adapt_vision_model=True), FULL_VISION),
            # The mergers are trained: Megatron-Bridge then leaves recomputing blocks as they are.
            (dict(adapt_vision_model=True, freeze_vision_projection=False), FULL | FULL_VISION),
            (dict(target_modules=["linear_fc1"]), dict(recompute_granularity="selective", recompute_modules=["mlp"])),
        ],
    )
    @pytest.mark.parametrize("method", [Qwen3VLLoRA, Qwen3VLDoRA])
    def test_gradients_are_equal(self, untied_folder, method, peft_fields, recompute):
        # B starts at zero no longer, else A would have no gradient.
        fields = dict(dim=2, alpha=1, lora_B_init_method="normal") | peft_fields
        plain = self.gradients(untied_folder, method(**fields))
        recomputed = self.gradients(untied_folder, method(**fields), **recompute)
        assert plain.keys() == recomputed.keys()
        errors = {n: ((g - recomputed[n]).abs().max() / g.abs().max()).item() for n, g in plain.items()}
        assert max(errors.values()) <= RECOMPUTE_TOLERANCE, errors

    def gradients(self, folder, peft: Qwen3VLParts, **provider_fields) -> dict[str, torch.Tensor]:
        adapted = adapt(folder, peft, **provider_fields)
        adapted.backward()
        gradients = {name: p.grad for name, p in adapted.trainable().items()}
        assert all(gradient is not None and gradient.any() for gradient in gradients.values())
        return gradients

    def test_a_tower_without_trained_weights_is_not_differentiated(self, untied_folder):
        adapted = adapt(untied_folder, Qwen3VLLoRA(dim=2), **FULL, **FULL_VISION)
        tower = []
        adapted.model.vision_model.register_forward_hook(lambda module, inputs, output: tower.append(output))
        adapted.backward()
        assert not any(tensor.requires_grad for tensor in tower[0])


def test_as_megatron_bridge_applies_it(untied_folder):
    """Before wrapping, by a hook of the provider, on a list; here under DistributedDataParallel."""
    peft = Qwen3VLLoRA(dim=2, **ALL_PARTS)
    assert isinstance(peft, LoRA)  # Megatron-Bridge counts operations by it
    provider = AutoBridge.from_hf_pretrained(str(untied_folder)).to_megatron_provider(load_weights=True)
    provider.register_pre_wrap_hook(lambda chunks: peft(chunks, training=True))
    provider.finalize()
    groups = initialize(provider, seed=0)
    (wrapped,) = provider.provide_distributed_model(
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=False, grad_reduce_in_fp32=True),
        use_cpu_initialization=True,
        mixed_precision_wrapper=None,
        pg_collection=groups,
    )
    reduced = {name for name, p in wrapped.named_parameters() if hasattr(p, "main_grad")}
    assert reduced == {name for name, _ in wrapped.named_parameters() if ".adapter." in name}
    with pytest.raises(ValueError, match="already has 40 adapters"):  # they are found through the wrapper
        peft([wrapped])
