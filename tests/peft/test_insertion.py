"""Insertion of adapters by our classes and Megatron-Bridge's: trained parameters, errors, recomputation."""

import itertools
import re

from qwen3vl_bridge.peft.insertion import MagnitudeLinear
from qwen3vl_bridge.peft.lora import Qwen3VLDoRA, Qwen3VLLoRA
from qwen3vl_bridge.training.metrics import ExpertLoad
from qwen3vl_bridge.training.process_groups import initialize

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA, VLMLoRA
from megatron.core.distributed import DistributedDataParallelConfig

from tests.peft.test_export import ALL_PARTS, adapt, model_of

PARTS = ("language_model", "vision_model", "vision_projection")
EIGHT = list(itertools.product((False, True), repeat=3))
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
FULL_VISION = {f"vision_{name}": value for name, value in FULL.items()}
NO_BALANCING = dict(moe_aux_loss_coeff=0.0)
TEXT = "*language_model*."


def component_of(name: str) -> str:
    if name.startswith("language_model."):
        return "language_model"
    return "vision_projection" if "merger" in name else "vision_model"


def chosen(prefix: str, flags: tuple[bool, ...]) -> dict[str, bool]:
    return {f"{prefix}_{part}": flag for part, flag in zip(PARTS, flags, strict=True)}


class TestTrainedParameters:
    @pytest.mark.one_case_in(14)
    @pytest.mark.parametrize("rests", EIGHT)
    @pytest.mark.parametrize("provider_rests", EIGHT)
    def test_freeze_flags_of_provider_and_peft_settings_select_trained_parameters(
        self, untied_folder, provider_rests, rests
    ):
        # Each part meets adapters and none over the eight cases.
        adapts = (rests[1], rests[2], rests[0]) if any(rests) else (True, True, True)
        peft = Qwen3VLLoRA(dim=2, **chosen("freeze", rests), **chosen("adapt", adapts))
        adapted = adapt(untied_folder, peft, content="one image", **chosen("freeze", provider_rests))
        adapted.backward()
        for name, p in adapted.model.named_parameters():
            part = PARTS.index(component_of(name))
            is_adapter = ".adapter." in name
            expected = is_adapter or not (provider_rests[part] or rests[part])
            assert (p.grad is not None) == p.requires_grad == expected, name
            assert not is_adapter or adapts[part], name
        found = {component_of(name) for name, _ in adapted.model.named_parameters() if ".adapter." in name}
        assert found == {part for part, adapt_it in zip(PARTS, adapts, strict=True) if adapt_it}

    def test_lora_warns_about_frozen_components_if_provider_has_freeze_flag(self, untied_folder, caplog):
        for provider_flags, peft_flags, names in (
            (dict(freeze_language_model=True), {}, ("vision_model", "vision_projection")),
            (dict(freeze_language_model=True), dict(freeze_vision_model=False), ("vision_projection",)),
            (dict(freeze_language_model=True), dict(freeze_vision_model=False, freeze_vision_projection=False), ()),
            ({}, {}, ()),
        ):
            model, peft = model_of(untied_folder), Qwen3VLLoRA(dim=2, **peft_flags)
            vars(model.config).update(provider_flags)
            caplog.clear()
            peft(model)
            said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
            assert len(said) == bool(names), said
            if names:
                also = " and ".join(f"peft.freeze_{name}" for name in names)
                assert said[0].startswith("model.freeze_language_model is True") and f"by {also}. To" in said[0]

    @pytest.mark.parametrize("method", [Qwen3VLLoRA, Qwen3VLDoRA])
    def test_all_adapter_parameters_get_nonzero_gradients(self, untied_folder, method):
        adapted = adapt(untied_folder, method(dim=2, **ALL_PARTS))
        adapted.train(steps=1)  # before, B is zero, and so is the gradient of A
        adapted.model.zero_grad()
        adapted.backward()
        assert [name for name, p in adapted.trainable().items() if not p.grad.any()] == []

    def test_model_with_adapters_has_no_trainable_parameters_if_training_is_false(self, untied_folder):
        model = model_of(untied_folder)
        Qwen3VLLoRA(dim=2, freeze_vision_model=False)(model, training=False)
        assert not any(p.requires_grad for p in model.parameters()) and not model.training

    @pytest.mark.parametrize(("fields", "towers", "layers"), [
        (dict(target_modules=["linear_qkv", "*.layers.1.*.linear_fc2"], adapt_vision_model=True),
         "language|vision", r"\d\.self_attention\.linear_qkv|1\.mlp\.linear_fc2"),
        (dict(target_modules=["*.layers.1.*"]), "language", r"1\.(self_attention|mlp)\.linear_\w+"),
        (dict(target_modules=[], exclude_modules=["linear_qkv", "linear_proj"]), "language", r"\d\.mlp\.linear_.*"),
        (dict(target_modules=[], exclude_modules=["*.layers.0.*"]), "language", r"[1-9]\.\w+\.linear_\w+"),
    ])  # fmt: skip
    def test_target_and_exclude_modules_select_layers_of_adapted_components(
        self, untied_folder, fields, towers, layers
    ):
        plain, model = model_of(untied_folder), Qwen3VLLoRA(dim=2, **fields)(model_of(untied_folder))
        adapted = {name.partition(".adapter.")[0] for name, p in model.named_parameters() if p.requires_grad}
        wanted = re.compile(rf"({towers})_model\.decoder\.layers\.({layers})")
        assert adapted == {name for name, _ in plain.named_modules() if wanted.fullmatch(name)} and adapted

    def test_adapter_key_filter_keeps_adapters_and_trained_base_weights(self, untied_folder):
        """The base weight of an adapted layer has different names as a parameter and in a state dictionary."""
        peft = Qwen3VLLoRA(dim=2, freeze_language_model=False)
        adapted = adapt(untied_folder, peft)
        kept = {name for name in adapted.model.state_dict() if peft.adapter_key_filter(name)}
        kept = {name for name in kept if not name.endswith("_extra_state")}  # as Megatron-Bridge drops them
        assert kept == {name.replace(".to_wrap.", ".") for name in adapted.trainable()}

    def test_adapt_experts_gives_every_expert_a_different_adapter(self, moe_folder):
        model = Qwen3VLLoRA(dim=2, adapt_experts=True)(model_of(moe_folder))
        adapters = {name: p for name, p in model.named_parameters() if p.requires_grad and ".experts." in name}
        assert len(adapters) == 6 * len({re.sub(r"local_experts\.\d+", "", name) for name in adapters})
        inputs = [p for name, p in adapters.items() if "fc1.adapter.linear_in" in name]
        assert len({tuple(p.flatten().tolist()) for p in inputs}) == len(inputs)

    def test_default_target_modules_exclude_routed_experts_and_linear_attention(self, moe_folder, qwen3_5_folders):
        """The default excludes routed experts and linear attention, as Megatron-Bridge's does."""
        for folder, mlp in ((moe_folder, "mlp"), (qwen3_5_folders["moe"], "mlp.shared_experts")):
            model = Qwen3VLLoRA(dim=2)(model_of(folder))
            adapted = {name.partition(".adapter.")[0] for name, p in model.named_parameters() if p.requires_grad}
            attention = {f"self_attention.linear_{last}" for last in ("qkv", "proj")}
            layers = attention | {f"{mlp}.linear_{last}" for last in ("fc1", "fc2")}
            assert {re.sub(r".*layers\.\d+\.", "", name) for name in adapted} == layers

    def test_vlm_lora_trains_vision_projection_unless_provider_freezes_it(self, untied_folder):
        """Components as in the provider's flags: mergers are the projection, although they are modules of the tower."""
        fields = dict(dim=4, target_modules=[f"{TEXT}linear_qkv"], freeze_vision_projection=False)
        (model,) = VLMLoRA(**fields)([model_of(untied_folder)])
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        kinds = {"merger" if "merger" in name else name.partition(".adapter.")[1] for name in trained}
        assert kinds == {".adapter.", "merger"}
        assert all(p.requires_grad for name, p in model.named_parameters() if "merger" in name)
        frozen = model_of(untied_folder)
        frozen.config.freeze_vision_projection = True  # the provider's word holds
        VLMLoRA(**fields)([frozen])
        assert not any(p.requires_grad for name, p in frozen.named_parameters() if "merger" in name)

    def test_megatron_bridge_dora_inserts_our_magnitude_linear(self, untied_folder):
        """Megatron-Bridge's own layer requires three dimensions, and also scales the bias."""
        model = DoRA(dim=4)(model_of(untied_folder))
        assert all(isinstance(m, MagnitudeLinear) for m in model.modules() if type(m).__name__.endswith("DoRALinear"))
        assert sum(isinstance(m, MagnitudeLinear) for m in model.modules()) == 40

    def test_expert_load_counts_all_tokens_of_routers_with_adapters(self, moe_folder):
        adapted = adapt(moe_folder, LoRA(dim=4, target_modules=["router"]))
        load = ExpertLoad([adapted.model])
        adapted.backward()
        tokens = sum(len(sample.ids) for sample in adapted.samples)
        counts = load.count_tokens(adapted.pair.provider)
        assert counts.sum(1).tolist() == [tokens * adapted.pair.provider.moe_router_topk] * len(counts)


class TestInvalidSettings:
    @pytest.mark.parametrize(("fields", "message"), [
        (dict(target_modules=["linear_qkv", "linear_q"]), r"\['linear_q'\] match no linear layer"),
        (dict(target_modules=["*vision_model*.linear_qkv"]), "match no linear layer of the adapted components"),
        (dict(target_modules=["linear_qkv"], adapt_vision_projection=True), "adapt_vision_projection is True"),
        (dict(target_modules=["output_layer"]), "match no linear layer"),
        (dict(target_modules=["q_proj", "o_proj"]), r"match no linear .*; did you mean linear_qkv, linear_proj\?"),
        (dict(target_modules=["all-linear"]), r"match no linear layer .*; all layers are "
         r"\[linear_qkv,linear_proj,linear_fc1,linear_fc2\], and in_proj,out_proj of linear attention"),
        (dict(exclude_modules=["*.layers.0.*"]), r"set target_modules to \[\]"),
        (dict(adapt_language_model=False), "nothing would be adapted"),
        (dict(adapt_language_model=False, target_modules=[]), "nothing would be adapted"),
        (dict(canonical_mapping={"linear_qkv": {"linear_q"}}), "canonical_mapping"),
        (dict(lora_dtype=torch.float32), "lora_dtype"),
        (dict(normalize_moe_lora=True), "normalize_moe_lora is True, expected False"),
        (dict(adapt_experts=True), r"adapted layers belongs to experts: .* a model with experts"),
    ])  # fmt: skip
    def test_lora_raises_and_leaves_model_unchanged_if_settings_are_invalid(self, untied_folder, fields, message):
        model = model_of(untied_folder)
        with pytest.raises(ValueError, match=message):
            Qwen3VLLoRA(**fields)(model)
        assert all(p.requires_grad for p in model.parameters())

    @pytest.mark.parametrize(("fields", "message"), [
        (dict(target_modules=["linear_qkv"]), "adapted layers belongs to experts: .* adapt_language_model=True"),
        (dict(adapt_language_model=False, adapt_vision_model=True), "adapted layers belongs to experts: set"),
        (dict(target_modules=["*.layers.2.mlp.experts.linear_fc1"]), "fc1 would have adapters and .*fc2 none"),
        (dict(target_modules=["*.local_experts.3.*"]), "adapted layers belongs to experts"),
        (dict(normalize_moe_lora=True), "normalize_moe_lora is True, expected False"),
        (dict(experts_shared_outer_loras=True), "experts_shared_outer_loras is True, expected False"),
        (dict(adapt_experts=False, share_expert_adapters=False), "which requires adapt_experts=True"),
        (dict(adapt_experts=False, target_modules=["*.experts.*"]), r"layers of experts need adapt_experts=True"),
    ])  # fmt: skip
    def test_lora_raises_and_leaves_model_unchanged_if_expert_settings_are_invalid(self, moe_folder, fields, message):
        model = model_of(moe_folder)
        with pytest.raises(ValueError, match=message):
            Qwen3VLLoRA(**(dict(adapt_experts=True) | fields))(model)
        assert all(p.requires_grad for p in model.parameters())

    @pytest.mark.parametrize(("model", "peft", "message"), [
        ("untied", lambda: Qwen3VLDoRA(dropout=0.1), "dropout is 0.1, expected 0: DoRA does not support dropout"),
        ("untied", lambda: DoRA(dropout=0.1), "dropout is 0.1, expected 0: DoRA does not support dropout here"),
        ("untied", lambda: Qwen3VLDoRA(target_modules=["linear_q"]), "target_modules"),
        ("untied", lambda: CanonicalLoRA(target_modules=["linear_q"]), "on all parts: add linear_k"),
        ("untied", lambda: CanonicalLoRA(target_modules=[f"{TEXT}linear_fc1_up"]), r"a part of language_model"),
        ("untied", lambda: VLMLoRA(freeze_vision_model=False), "freeze_vision_model is False, and vision_"),
        ("untied", lambda: VLMLoRA(freeze_language_model=False), "freeze_language_model is False, and language_"),
        ("untied", lambda: LoRA(target_modules=["q_proj", "linear_fc1", "*.v_proj"]),
         r"LoRA has target_modules \['q_proj', '\*\.v_proj'\], which match no layer of .*; did you mean linear_qkv\?"),
        ("moe", lambda: CanonicalLoRA(target_modules=["linear_proj", "linear_qq"]), r"\['linear_qq'\], which match no"),
        # NeMo-RL's settings adapt it; merged weights, which its generation runs on, would lack that adapter.
        ("tied", lambda: LoRA(target_modules=[], exclude_modules=[]), r"adapts language_model\.output_layer"),
        ("moe", lambda: Qwen3VLDoRA(adapt_experts=True), "adapt_experts is True, expected False for DoRA"),
        ("moe", DoRA, r"DoRA adapts .*experts.*, and .* peft does not support DoRA .* qwen3vl_bridge\.Qwen3VLDoRA"),
        ("moe", lambda: LoRA(experts_shared_outer_loras=True), "experts_shared_outer_loras is True, .* expected"),
    ])  # fmt: skip
    def test_adapter_classes_raise_if_setting_is_unsupported(self, request, model, peft, message):
        with pytest.raises(ValueError, match=message):
            peft()([model_of(request.getfixturevalue(f"{model}_folder"))])

    def test_canonical_lora_raises_if_attention_is_gated(self, qwen3_5_folders):
        """CanonicalLoRA's adapter has one row per query; the projection also has the gates' rows."""
        with pytest.raises(ValueError, match=r"queries, keys and values of language_model.*layers\.3.* rows of gates"):
            CanonicalLoRA(dim=4)([model_of(qwen3_5_folders["dense"])])

    def test_lora_targets_all_layers_if_tied_output_layer_is_excluded(self, tied_folder):
        model = LoRA(target_modules=[], exclude_modules=["output_layer"])(model_of(tied_folder))
        assert not any("output_layer.adapter" in name for name, _ in model.named_parameters())

    @pytest.mark.parametrize("method", [Qwen3VLDoRA, DoRA])
    @pytest.mark.parametrize("name", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
    def test_dora_raises_if_tensor_or_pipeline_parallelism_is_used(self, untied_folder, method, name):
        model = model_of(untied_folder)
        setattr(model.config, name, 2)
        with pytest.raises(ValueError, match=f"{name} is 2, expected 1 for DoRA"):
            method()([model])

    def test_adapt_experts_raises_if_grouped_gemm_is_used(self, moe_folder):
        model = model_of(moe_folder)
        model.config.moe_grouped_gemm = True
        with pytest.raises(ValueError, match=r"moe_grouped_gemm is .*experts\.linear_fc1 holds all experts of a rank"):
            Qwen3VLLoRA(adapt_experts=True)(model)

    @pytest.mark.parametrize("peft", [lambda: Qwen3VLLoRA(adapt_experts=True), LoRA, CanonicalLoRA])
    def test_adapt_experts_raises_if_expert_tensor_parallelism_is_used(self, moe_folder, peft):
        model = model_of(moe_folder)
        model.config.expert_tensor_parallel_size = 2
        with pytest.raises(ValueError, match="expert_tensor_parallel_size is 2, expected 1 where experts have"):
            peft()([model])

    def test_applying_adapters_twice_raises(self, untied_folder):
        model = Qwen3VLLoRA(dim=2)(model_of(untied_folder))
        with pytest.raises(ValueError, match="already has 16 adapters"):
            Qwen3VLLoRA(dim=2)(model)

    def test_lora_raises_if_model_is_not_qwen3_vl(self):
        with pytest.raises(TypeError, match="found a Linear, expected a Qwen3VLModel"):
            Qwen3VLLoRA()([torch.nn.Linear(2, 2)])

    def test_adapters_on_pipeline_stage_without_vision_model_are_accepted(self, untied_folder):
        model = model_of(untied_folder)
        model.pre_process = False
        del model.vision_model
        Qwen3VLLoRA(dim=2, **ALL_PARTS)(model)

    def test_lora_skips_vision_targets_on_pipeline_stage_without_vision_model(self, untied_folder):
        model = model_of(untied_folder)
        model.pre_process = False
        del model.vision_model
        LoRA(dim=2, target_modules=["*vision_model*.linear_qkv", "*.layers.1.*.linear_fc1"])([model])
        assert sum(".adapter.linear_in" in name for name, _ in model.named_parameters()) == 1


# Relative to the largest entry of each gradient; measured 5.2e-7.
RECOMPUTE_TOLERANCE = 5e-6


def gradients(folder, peft: object, **provider_fields) -> dict[str, torch.Tensor]:
    adapted = adapt(folder, peft, **provider_fields)
    adapted.backward()
    found = {name: p.grad for name, p in adapted.trainable().items()}
    assert all(gradient is not None for gradient in found.values())
    return found


def recompute_errors(plain: dict[str, torch.Tensor], recomputed: dict[str, torch.Tensor]) -> dict[str, float]:
    assert plain.keys() == recomputed.keys()
    return {n: ((g - recomputed[n]).abs().max() / g.abs().max()).item() for n, g in plain.items() if g.any()}


class TestRecompute:
    @pytest.mark.one_case_in(6)
    @pytest.mark.parametrize(("peft_fields", "recompute"), [
        (dict(), FULL), (ALL_PARTS, FULL | FULL_VISION), (dict(adapt_vision_model=True), FULL_VISION),
        (dict(adapt_language_model=False, adapt_vision_model=True), FULL_VISION),
        # The mergers are trained: Megatron-Bridge then leaves recomputing blocks as they are.
        (dict(adapt_vision_model=True, freeze_vision_projection=False), FULL | FULL_VISION),
        (dict(target_modules=["linear_fc1"]), dict(recompute_granularity="selective", recompute_modules=["mlp"])),
    ])  # fmt: skip
    @pytest.mark.parametrize("method", [Qwen3VLLoRA, Qwen3VLDoRA])
    def test_recomputation_does_not_change_adapter_gradients(self, untied_folder, method, peft_fields, recompute):
        # B starts at zero no longer, else A would have no gradient.
        fields = dict(dim=2, alpha=1, lora_B_init_method="normal") | peft_fields
        plain, recomputed = (gradients(untied_folder, method(**fields), **more) for more in ({}, recompute))
        assert all(gradient.any() for gradient in plain.values())
        errors = recompute_errors(plain, recomputed)
        assert max(errors.values()) <= RECOMPUTE_TOLERANCE, errors

    @pytest.mark.parametrize("recompute", [FULL, dict(recompute_granularity="selective", recompute_modules=["moe"])])
    def test_recomputation_does_not_change_expert_adapter_gradients(self, moe_folder, recompute):
        fields = dict(dim=2, alpha=1, adapt_experts=True, lora_B_init_method="normal")
        plain, recomputed = (
            gradients(moe_folder, Qwen3VLLoRA(**fields), **NO_BALANCING, **more) for more in ({}, recompute)
        )
        errors = recompute_errors(plain, recomputed)
        assert any(".experts." in name for name in errors) and max(errors.values()) <= 2e-5  # measured 2.2e-6

    @pytest.mark.parametrize("method", [LoRA, CanonicalLoRA])
    def test_vision_adapters_with_vision_recomputation_get_gradients(self, untied_folder, method):
        """Megatron-Bridge checks only the text model's recomputation, so adapters of the tower would not be trained."""
        found = gradients(untied_folder, method(dim=4, lora_B_init_method="normal"), **FULL_VISION)
        assert [name for name, gradient in found.items() if not gradient.any()] == []

    def test_frozen_vision_model_with_recomputation_builds_no_autograd_graph(self, untied_folder):
        adapted = adapt(untied_folder, Qwen3VLLoRA(dim=2), **FULL, **FULL_VISION)
        tower = []
        adapted.model.vision_model.register_forward_hook(lambda module, inputs, output: tower.append(output))
        adapted.backward()
        assert not any(tensor.requires_grad for tensor in tower[0])


def test_ddp_reduces_only_adapters_that_pre_wrap_hook_inserted(untied_folder, caplog):
    """A hook of the provider inserts adapters before wrapping in DistributedDataParallel."""
    peft = Qwen3VLLoRA(dim=2, **ALL_PARTS)
    assert isinstance(peft, LoRA)  # Megatron-Bridge counts operations by it
    provider = AutoBridge.from_hf_pretrained(str(untied_folder)).to_megatron_provider(load_weights=True)
    provider.register_pre_wrap_hook(lambda chunks: peft(chunks, training=True))
    provider.finalize()
    groups = initialize(provider, seed=0)
    with caplog.at_level("INFO", logger="qwen3vl_bridge"):
        (wrapped,) = provider.provide_distributed_model(
            ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=False, grad_reduce_in_fp32=True),
            use_cpu_initialization=True, mixed_precision_wrapper=None, pg_collection=groups,
        )  # fmt: skip
    said = [record.getMessage() for record in caplog.records if record.name.startswith("qwen3vl_bridge")]
    assert said.count("adapters on 40 linear layers of this rank") == 1
    assert len([message for message in said if message.startswith("parameters trained")]) == 1
    reduced = {name for name, p in wrapped.named_parameters() if hasattr(p, "main_grad")}
    assert reduced == {name for name, _ in wrapped.named_parameters() if ".adapter." in name}
    with pytest.raises(ValueError, match="already has 40 adapters"):  # they are found through the wrapper
        peft([wrapped])
