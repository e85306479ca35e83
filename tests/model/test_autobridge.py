"""AutoBridge with our classes: every weight there and back, through Megatron-Bridge's own machinery."""

from qwen3vl_bridge.provider import Qwen3VLModelProvider
from qwen3vl_bridge.training.process_group import initialize

import torch
from megatron.bridge import AutoBridge
from safetensors.torch import load_file
from transformers import AutoConfig, Qwen3VLForConditionalGeneration


def build(provider) -> list[torch.nn.Module]:
    provider.finalize()
    initialize(provider, seed=0)
    return provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)


def test_load_export_and_save_give_every_tensor_back(tied_folder, tmp_path):
    bridge = AutoBridge.from_hf_pretrained(str(tied_folder))
    model = build(bridge.to_megatron_provider(load_weights=False))
    source = load_file(tied_folder / "model.safetensors")
    vision_proj = "model.visual.blocks.0.attn.proj.weight"
    parameters = dict(model[0].named_parameters())
    ours = parameters["vision_model.decoder.layers.0.self_attention.linear_proj.weight"]
    assert not torch.equal(ours, source[vision_proj])
    bridge.load_hf_weights(model)
    assert torch.equal(ours, source[vision_proj])

    exported = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    assert exported.keys() - {"lm_head.weight"} == source.keys()
    assert all(torch.equal(exported[name], source[name]) for name in source)

    bridge.save_hf_pretrained(model, tmp_path / "saved", show_progress=False)
    _, report = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not (report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"])
    saved = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(saved[name], source[name]) for name in source)


def test_a_configuration_is_enough_for_a_provider(untied_folder):
    provider = AutoBridge.from_hf_config(AutoConfig.from_pretrained(untied_folder)).to_megatron_provider(
        load_weights=False
    )
    assert type(provider) is Qwen3VLModelProvider
    assert provider.vision_config.deepstack_visual_indexes == [0, 1, 2]
    assert not provider.share_embeddings_and_output_weights


def test_freezing_stops_exactly_the_named_parts(untied_folder):
    provider = AutoBridge.from_hf_pretrained(str(untied_folder)).to_megatron_provider(load_weights=False)
    provider.freeze_vision_model = True
    (model,) = build(provider)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert "vision_model.merger.linear_fc1.weight" in trained
    assert "vision_model.decoder.deepstack_merger_list.2.patch_norm.weight" in trained
    assert "language_model.output_layer.weight" in trained
    assert all(name.startswith("vision_model.") and "merger" not in name for name in frozen) and frozen
