"""Adapters as RL frameworks and Megatron-Bridge's scripts insert and export them, with Megatron-Bridge's own classes.

Sources: verl/workers/config/megatron_peft.py, verl/utils/{megatron_utils,checkpoint/megatron_checkpoint_manager}.py,
verl/workers/engine/megatron/transformer_impl.py (get_per_tensor_param); nemo_rl/models/megatron/setup.py, examples/
converters/convert_lora_to_hf.py; miles/backends/megatron_utils/lora_utils.py; Megatron-Bridge's recipes/utils/
dataset_utils.py, training/checkpointing.py, examples/conversion/adapter/stream_adapter_weights.py. ms-swift has
adapters of its own (mcore-bridge), and asks none of this. Refusals:
`tests/peft/test_insertion.py`.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.utils import create_peft, create_peft_hook
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from tests.helpers.batches import make_batch, make_samples, per_sample
from tests.parity.conftest import build
from tests.peft.test_export import check_logits, reference_logits, worst_difference

ALL = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
SPLIT = ["linear_q", "linear_k", "linear_v", "linear_proj", "linear_fc1_up", "linear_fc1_gate", "linear_fc2"]


class Model:
    """A model with adapters put in by a hook before it is wrapped, and what it says."""

    def __init__(self, folder: Path, hook: Callable) -> None:
        torch.manual_seed(0)
        self.folder, self.bridge = folder, AutoBridge.from_hf_pretrained(str(folder))
        provider = self.bridge.to_megatron_provider(load_weights=True)
        provider.register_pre_wrap_hook(hook)
        self.chunks = [build(provider)]
        with torch.no_grad():  # as if trained
            for name, p in self.chunks[0].named_parameters():
                if ".adapter." in name:
                    p.normal_(std=0.05) if p.ndim > 1 else p.mul_(1.1)
        self.config = self.bridge.hf_pretrained.config
        self.samples = make_samples("mixed", self.config, seed=9)

    def logits(self) -> list[torch.Tensor]:
        """[tokens, vocabulary] for each sample."""
        batch = make_batch(self.samples, self.config, packed=True)
        with torch.no_grad():
            return per_sample(self.chunks[0].eval()(inputs=batch.local().without_labels()), batch.layout)

    def check(self, model: torch.nn.Module) -> None:
        check_logits(self.logits(), model, self.samples)

    def base(self) -> torch.nn.Module:
        model = AutoModelForImageTextToText.from_pretrained(self.folder)
        assert worst_difference(self.logits(), reference_logits(model, self.samples)) > 0.5
        return model

    def check_folder(self, folder: Path) -> None:
        base = self.base()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
            adapted = PeftModel.from_pretrained(base, folder)
        self.check(adapted)


@pytest.fixture(params=["untied", "moe"])
def folder(request) -> Path:
    return request.getfixturevalue(f"{request.param}_folder")


class TestVerl:
    """`actor_rollout_ref.model.lora` with Megatron: made by `create_peft`, its dtype the model's."""

    @pytest.fixture(params=["lora", "vlm_lora", "canonical_lora", "dora"])
    def model(self, request, folder, moe_folder) -> tuple[Model, object]:
        kind, on_experts = request.param, request.param == "dora" and folder == moe_folder
        targets = SPLIT if kind == "canonical_lora" else ["linear_qkv", "linear_proj"] if on_experts else ALL
        config = dict(
            type=kind, merge=True, rank=4, alpha=8, dropout=0.0, target_modules=targets, exclude_modules=[],
            dropout_position="pre", lora_A_init_method="xavier", lora_B_init_method="zero", a2a_experimental=False,
            dtype=None, adapter_path=None, freeze_vision_model=True, freeze_vision_projection=True,
            freeze_language_model=True,
        )  # fmt: skip
        peft = create_peft(config, dtype=torch.float32)
        return Model(folder, create_peft_hook(peft, training=True)), peft

    @pytest.mark.one_case_in(6)
    def test_transformers_logits_with_verl_merged_adapter_weights_match_model(self, model):
        """get_per_tensor_param with `merge`: by tasks that are made once."""
        model, _ = model
        tasks = model.bridge.get_conversion_tasks(model.chunks)
        weights = dict(model.bridge.export_hf_weights(model.chunks, conversion_tasks=tasks))
        reference = model.base()
        reference.load_state_dict(weights)
        model.check(reference)

    @pytest.mark.one_case_in(3)
    def test_verl_unmerged_export_returns_base_weights_and_adapters_separately(self, model):
        """And without: the base once, under names of layers that have adapters; these alone from then on."""
        model, peft = model
        tasks = model.bridge.get_conversion_tasks(model.chunks)
        weights = model.bridge.export_hf_weights(model.chunks, conversion_tasks=tasks, merge_adapter_weights=False)
        weights = {name.replace(".base_layer", ""): weight for name, weight in weights}
        expected = AutoModelForImageTextToText.from_pretrained(model.folder).state_dict()
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
        if isinstance(peft, DoRA):
            with pytest.raises(ValueError, match=r"DoRA adapters, .*merge_adapter_weights=True"):
                model.bridge.export_adapter_weights(model.chunks)
            return
        adapters = {name for name, _ in model.bridge.export_adapter_weights(model.chunks)}
        assert adapters and all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in adapters)
        # vLLM's modules, with `base_layer` for gate and up: it takes an adapter's parts of experts together.
        experts = {name.partition(".mlp.")[2] for name in adapters if ".experts." in name}
        both = {f"experts.{module}lora_{kind}.weight" for module in ("base_layer.", "") for kind in "AB"}
        assert experts == (both if any("experts" in name for name in expected) else set())

    @pytest.mark.one_case_in(6)
    def test_peft_logits_with_adapter_saved_by_verl_match_model(self, model, tmp_path):
        model, peft = model
        model.bridge.save_hf_adapter(model.chunks, str(tmp_path / "adapter"), peft)
        model.check_folder(tmp_path / "adapter")


class TestNemoRL:
    """`policy.megatron_cfg.peft`, whose example has no target modules: all linear layers, the output layer's too."""

    FIELDS: ClassVar = dict(
        target_modules=[], exclude_modules=[], dim=4, alpha=8, dropout=0.0, dropout_position="post",
        lora_A_init_method="xavier", lora_B_init_method="zero", a2a_experimental=False, lora_dtype=None,
    )  # fmt: skip

    @pytest.mark.one_case_in(2)
    def test_logits_with_nemo_rl_merged_or_saved_adapter_match_model(self, folder, tmp_path):
        """Merged weights for generation; convert_lora_to_hf.py, both of its ways."""
        peft = LoRA(**self.FIELDS)
        model = Model(folder, lambda chunks: peft(chunks, training=True))
        names = {name for name, p in model.chunks[0].named_parameters() if p.requires_grad}
        assert any("output_layer.adapter" in name for name in names)
        model.bridge.save_hf_pretrained(
            model.chunks, tmp_path / "merged", strict=False, merge_adapter_weights=True, show_progress=False
        )
        model.check(AutoModelForImageTextToText.from_pretrained(tmp_path / "merged"))
        model.bridge.save_hf_adapter(
            model.chunks, tmp_path / "adapter", peft_config=peft, base_model_name_or_path=str(folder)
        )
        model.check_folder(tmp_path / "adapter")

    def test_nemo_rl_reference_model_with_adapters_has_no_trainable_parameter(self, folder):
        """Inserted with `training=False`."""
        peft = LoRA(**self.FIELDS | dict(lora_A_init_method="zero"))
        model = Model(folder, lambda chunks: peft(chunks, training=False))
        assert not any(p.requires_grad for p in model.chunks[0].parameters())


class TestMiles:
    """`--lora-rank` with `--target-modules all-linear`, for both of its `--lora-type`s."""

    @pytest.mark.one_case_in(3)
    @pytest.mark.parametrize(("lora", "targets"), [(LoRA, ALL), (CanonicalLoRA, SPLIT)], ids=["lora", "canonical_lora"])
    def test_peft_logits_with_adapter_saved_by_miles_match_model(self, folder, lora, targets, tmp_path):
        """Tensors for SGLang, and a folder with them; each rank's own shards by their names."""
        peft = lora(
            target_modules=targets, exclude_modules=[], dim=4, alpha=8, dropout=0.0,
            lora_A_init_method="xavier", lora_B_init_method="zero",
        )  # fmt: skip

        def hook(chunks):
            transformed = peft(chunks, training=True)
            peft.set_params_to_save(transformed)
            return transformed

        model = Model(folder, hook)
        own = {name for name, _ in model.chunks[0].named_parameters() if ".adapter." in name}
        assert own == {name for name, p in model.chunks[0].named_parameters() if p.requires_grad}
        adapters = dict(model.bridge.export_adapter_weights(model.chunks, cpu=True, show_progress=False))
        model.bridge.save_hf_adapter(model.chunks, tmp_path, peft)
        model.check_folder(tmp_path)
        saved = load_file(tmp_path / "adapter_model.safetensors")
        assert saved.keys() == {f"base_model.model.{name}" for name in adapters}
        assert all(torch.equal(saved[f"base_model.model.{name}"], weight) for name, weight in adapters.items())
