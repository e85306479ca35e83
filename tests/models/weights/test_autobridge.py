"""AutoBridge with our classes: loading and export in every parallel layout, and names of the weight table."""

import importlib.util
import json
import shutil
from pathlib import Path

from qwen3vl_bridge.models.qwen3_vl import table as mappings
from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLMoEModelProvider
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.weights.rows import Dimensions, ExpertLayout, WeightRow, detect_expert_layout, expand, local_name

import pytest
import torch
from megatron.bridge import AutoBridge
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen3VLForConditionalGeneration

from tests.helpers.expert_layouts import LAYOUTS, relayout
from tests.helpers.forked import results_of_ranks
from tests.models.qwen3_5.tiny import weights
from tests.parity.conftest import build as build_model


def build(provider) -> list[torch.nn.Module]:
    return [build_model(provider)]


def test_autobridge_load_export_and_save_keep_every_tensor(tied_folder, tmp_path):
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
    bridge.save_hf_weights(model, tmp_path / "weights", show_progress=False)
    assert not (tmp_path / "weights" / "config.json").exists()
    saved = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(saved[name], source[name]) for name in source)


def test_load_hf_weights_raises_if_files_have_more_layers_than_config(untied_folder, tmp_path):
    """A model may have fewer layers than its checkpoint, but config.json must count all layers of the files."""
    bridge = AutoBridge.from_hf_pretrained(str(untied_folder))
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.num_layers -= 1
    bridge.load_hf_weights(build(provider))
    short = tmp_path / "short"
    shutil.copytree(untied_folder, short)
    config = json.loads((short / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] -= 1
    (short / "config.json").write_text(json.dumps(config))
    bridge = AutoBridge.from_hf_pretrained(str(short))
    with pytest.raises(ValueError, match=r"has 11 tensors of layers .*config.json does not count: .*layers\.3\.input"):
        bridge.load_hf_weights(build(bridge.to_megatron_provider(load_weights=False)))


@pytest.mark.parametrize("kind", ["untied", "moe"])
def test_freeze_vision_model_freezes_neither_mergers_nor_language_model(kind, request, caplog):
    folder = request.getfixturevalue(f"{kind}_folder")
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    provider.freeze_vision_model = True
    with caplog.at_level("INFO", logger="qwen3vl_bridge"):
        (model,) = build(provider)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    (message,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("parameters trained")]
    assert f"parameters trained on this rank: {count:,} of " in message and "vision_model 0 of " in message
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert "vision_model.merger.linear_fc1.weight" in trained
    assert "vision_model.decoder.deepstack_merger_list.2.patch_norm.weight" in trained
    assert "language_model.output_layer.weight" in trained
    assert all(name.startswith("vision_model.") and "merger" not in name for name in frozen) and frozen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_keeps_expert_layout_of_loaded_checkpoint(layout, moe_folders, tmp_path):
    bridge = AutoBridge.from_hf_pretrained(str(moe_folders[layout]))
    model = build(bridge.to_megatron_provider(load_weights=True))
    source = weights(moe_folders[layout])
    exported = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[name], source[name]) for name in source)
    bridge.save_hf_pretrained(model, tmp_path, show_progress=False)
    saved = weights(tmp_path)
    assert saved.keys() == source.keys()
    assert all(torch.equal(saved[name], source[name]) for name in source)


def test_export_without_checkpoint_uses_expert_layout_of_released_models(moe_folder):
    bridge = AutoBridge.from_hf_config(AutoConfig.from_pretrained(moe_folder))
    provider = bridge.to_megatron_provider(load_weights=False)
    assert type(provider) is Qwen3VLMoEModelProvider
    exported = dict(bridge.export_hf_weights(build(provider), cpu=True, show_progress=False))
    expected = relayout(weights(moe_folder), ExpertLayout.INPUT_MAJOR)
    assert {name: t.shape for name, t in exported.items()} == {name: t.shape for name, t in expected.items()}


def test_square_expert_weights_are_transposed_as_expert_layout_requires(moe_folders, tmp_path):
    """Gate and up projections together are as wide as the model, so shapes do not show the layout."""
    folder = tmp_path / "square"
    config = AutoConfig.from_pretrained(moe_folders[ExpertLayout.INPUT_MAJOR])
    width = config.text_config.hidden_size
    config.text_config.moe_intermediate_size = width // 2
    config.save_pretrained(folder)
    source = weights(moe_folders[ExpertLayout.INPUT_MAJOR])
    for name in source:
        if name.endswith("experts.gate_up_proj"):
            source[name] = torch.randn(len(source[name]), width, width)
        if name.endswith("experts.down_proj"):
            source[name] = torch.randn(len(source[name]), width // 2, width)
    save_file(source, folder / "model.safetensors", metadata={"format": "pt"})
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    model = build(bridge.to_megatron_provider(load_weights=True))
    parameters = dict(model[0].named_parameters())
    for expert in range(2):
        ours = parameters[f"language_model.decoder.layers.0.mlp.experts.local_experts.{expert}.linear_fc1.weight"]
        assert torch.equal(ours, source["model.language_model.layers.0.mlp.experts.gate_up_proj"][expert].T)
    exported = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    assert all(torch.equal(exported[name], source[name]) for name in source)


@pytest.mark.parametrize("kind", ["untied", "moe"])
def test_to_megatron_model_loads_every_weight_of_checkpoint(kind, request):
    folder = request.getfixturevalue(f"{kind}_folder")
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    model = bridge.to_megatron_model(wrap_with_ddp=False, use_cpu_initialization=True)
    exported = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    source = weights(folder)
    assert all(torch.equal(exported[name], source[name]) for name in source)


@pytest.mark.parametrize("layout", [ExpertLayout.INPUT_MAJOR, ExpertLayout.PER_EXPERT])
def test_load_raises_if_checkpoint_lacks_tensor(layout, moe_folders, tmp_path):
    source = weights(moe_folders[layout])
    del source["model.language_model.layers.1.mlp.down_proj.weight"]
    save_file(source, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(moe_folders[layout] / "config.json", tmp_path)
    provider = AutoBridge.from_hf_pretrained(str(tmp_path)).to_megatron_provider(load_weights=True)
    with pytest.raises(ValueError, match=r"lacks 1 tensors: model\.language_model\.layers\.1\.mlp\.down_proj"):
        build(provider)


def test_load_raises_if_vocab_size_differs_from_checkpoint(untied_folder):
    provider = AutoBridge.from_hf_pretrained(str(untied_folder)).to_megatron_provider(load_weights=True)
    provider.vocab_size = 400
    with pytest.raises(ValueError, match=r"embed_tokens\.weight has 512 rows, expected vocab_size, 400"):
        build(provider)


HAS_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None


def build_names(folder, transformer_impl: str) -> dict[str, tuple[int, ...]]:
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    provider.transformer_impl, provider.use_cpu_initialization = transformer_impl, True
    provider.init_model_with_meta_device = True
    provider.finalize()
    initialize(provider, seed=0)
    return {name: tuple(p.shape) for name, p in provider.provide(True, True).named_parameters()}


def table(folder, layout=ExpertLayout.INPUT_MAJOR) -> tuple[list[WeightRow], Dimensions]:
    dimensions = dimensions_of(AutoConfig.from_pretrained(folder).to_dict())
    return list(expand(mappings.table(layout), dimensions)), dimensions


@pytest.mark.parametrize("kind", ["tied", "untied", "moe"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameter_names_of_local_layers_match_weight_table(kind, layout, request):
    folder = request.getfixturevalue(f"{kind}_folder")
    rows, dimensions = table(folder, layout)
    expected = {local_name(row.megatron): row.megatron_shape(dimensions) for row in rows}
    assert build_names(folder, "local") == expected


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_TRANSFORMER_ENGINE, reason="Transformer Engine is not installed")
@pytest.mark.parametrize("kind", ["untied", "moe"])
def test_parameter_names_of_transformer_engine_layers_match_weight_table(kind, request):
    folder = request.getfixturevalue(f"{kind}_folder")
    rows, dimensions = table(folder)
    expected = {row.megatron: row.megatron_shape(dimensions) for row in rows}
    assert build_names(folder, "transformer_engine") == expected


def test_provider_dimensions_match_hf_config(moe_folder):
    _, dimensions = table(moe_folder)
    provider = AutoBridge.from_hf_pretrained(str(moe_folder)).to_megatron_provider(load_weights=False)
    ours = provider.dimensions()
    assert {name: [*found] for name, found in ours.indices.items()} == {n: [*i] for n, i in dimensions.indices.items()}
    assert ours["untied"] == dimensions["untied"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("hidden", "moe_ffn"), [(64, 24), (64, 32), (64, 64)])
def test_detect_expert_layout_recognizes_layout_of_square_weights(layout, hidden, moe_ffn):
    sizes = dict(hidden=hidden, moe_ffn=moe_ffn, moe_gate_up=2 * moe_ffn, experts=4)
    dimensions = Dimensions(sizes, dict(moe_layers=(1, 2), experts=range(4)), "qwen3_vl")
    shapes = {
        name: shape
        for row in expand([row for row in mappings.table(layout) if "experts" in row.indices], dimensions)
        for name, shape in zip(row.hf, row.hf_shapes(dimensions), strict=True)
    }
    assert detect_expert_layout(mappings.table, shapes, dimensions) is layout
    name = next(iter(shapes))
    with pytest.raises(ValueError, match=r"experts of layer 1: found .*expected 4 experts of 64"):
        detect_expert_layout(mappings.table, shapes | {name: (4, 63, 1)}, dimensions)


@pytest.mark.slow
def test_autobridge_load_and_export_on_two_ranks_keep_every_tensor(untied_folder, tied_folder, moe_folders):
    tp, ep = dict(tensor_model_parallel_size=2, sequence_parallel=True), dict(expert_model_parallel_size=2)
    pp = dict(pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=3, pipeline_dtype=None)
    padded = dict(should_pad_vocab=True, make_vocab_size_divisible_by=100)
    cases = [(untied_folder, tp | padded), (tied_folder, tp | padded), (tied_folder, pp | padded)]
    cases += [(moe_folders[layout], ep) for layout in LAYOUTS]
    cases += [(moe_folders[layout], tp) for layout in LAYOUTS]
    cases += [(moe_folders[layout], tp | ep | dict(expert_tensor_parallel_size=1)) for layout in LAYOUTS]
    results_of_ranks(check, 2, cases)


def check(cases: list[tuple[Path, dict]]) -> None:
    for folder, settings in cases:
        bridge = AutoBridge.from_hf_pretrained(str(folder))
        provider = bridge.to_megatron_provider(load_weights=True)
        for name, value in settings.items():
            setattr(provider, name, value)
        exported = dict(bridge.export_hf_weights(build(provider), cpu=True, show_progress=False))
        source = weights(folder)
        wrong = [name for name in source if name not in exported or not torch.equal(exported[name], source[name])]
        if wrong or exported.keys() - source.keys() - {"lm_head.weight"}:
            raise AssertionError(f"{folder} {settings}: {wrong[:5]} {sorted(exported.keys() - source.keys())[:5]}")
