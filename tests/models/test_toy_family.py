"""A family that another package registers: conversion, a training step and export."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import qwen3vl_bridge
from qwen3vl_bridge import registry
from qwen3vl_bridge.checkpoint import CheckpointError, export_checkpoint, import_checkpoint, verify_checkpoint
from qwen3vl_bridge.weights.rows import expand

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.forked import ROOT
from tests.models import toy_family

CONFIG = {
    "model_type": "toy_vl", "architectures": ["ToyVLForConditionalGeneration"], "eos_token_id": 59,
    "image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63,
    "text_config": {
        "vocab_size": 64, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 10_000.0, "mrope_section": [2, 1, 1],
    },
    "vision_config": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "in_channels": 3, "patch_size": 16,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 16, "out_hidden_size": 40,
        "hidden_act": "gelu_pytorch_tanh", "initializer_range": 0.02,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    known = dict(registry.families())
    monkeypatch.setattr(registry, "families", lambda: known)
    toy_family.register()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made, numbers = tmp_path_factory.mktemp("toy"), torch.Generator().manual_seed(0)
    dimensions = toy_family.dimensions(CONFIG)
    tensors = {
        name: torch.randn(shape, generator=numbers) * 0.05 + (len(shape) == 1)
        for row in expand(toy_family.TABLE, dimensions)
        for name, shape in zip(row.hf, row.hf_shapes(dimensions), strict=True)
    }
    save_file(tensors, made / "model.safetensors")
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def same(one: Path, other: Path) -> bool:
    left, right = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("ckpt_format", ["fsdp_dtensor", "torch_dist"])
def test_toy_family_import_and_export_restore_every_weight(ckpt_format, folder, tmp_path):
    import_checkpoint(folder, tmp_path / "megatron", ckpt_format=ckpt_format)
    assert verify_checkpoint(folder, tmp_path / "megatron").same
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf")
    assert same(folder, tmp_path / "hf")


@pytest.mark.slow
def test_toy_family_export_after_training_keeps_trained_weights(folder, tmp_path):
    from qwen3vl_bridge.training.process_groups import initialize
    from qwen3vl_bridge.training.step import forward_step
    from qwen3vl_bridge.weights.bridge_mappings import param_mappings

    from megatron.bridge.training.model_load_save import load_megatron_model, save_megatron_model

    from tests.helpers.batches import make_batch, make_samples

    import_checkpoint(folder, tmp_path / "start", ckpt_format="torch_dist")
    provider = registry.family_of(CONFIG).build_provider(CONFIG)
    provider.finalize()
    initialize(provider, seed=0)
    (model,) = load_megatron_model(str(tmp_path / "start/iter_0000000"), use_cpu_init=True)
    assert type(model.config).__name__ == "ToyProvider"

    linear = model.language_model.decoder.layers[0].mlp.linear_fc2
    (row,) = (row for row in toy_family.TABLE if isinstance(row, toy_family.InputMajor))
    mapping = next(param_mappings((row,))).resolve(("0",))
    exported = load_file(folder / "model.safetensors")["toy.layers.0.down.weight"]
    assert torch.equal(mapping.hf_to_megatron(exported, linear), linear.weight)
    assert torch.equal(mapping.megatron_to_hf(linear.weight, linear)["toy.layers.0.down.weight"], exported)

    batch = make_batch(make_samples("mixed", model.config, seed=0), model.config)
    cfg = SimpleNamespace(
        model=model.config, dataset=None, train=SimpleNamespace(micro_batch_size=len(batch.input_ids)),
        rerun_state_machine=SimpleNamespace(check_for_nan_in_loss=True, check_for_spiky_loss=False),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def losses() -> torch.Tensor:
        values, count = forward_step(SimpleNamespace(cfg=cfg), iter([batch]), model)
        return count(values)[0]

    before = losses()
    before.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    assert losses() < before

    save_megatron_model([model], tmp_path / "trained")
    export_checkpoint(tmp_path / "trained", tmp_path / "hf", hf_model=folder)
    assert not same(folder, tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "again", ckpt_format="torch_dist")
    (again,) = load_megatron_model(str(tmp_path / "again/iter_0000000"), use_cpu_init=True)
    expected = dict(model.named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in again.named_parameters())


# The code and the command of docs/add_a_family.md; tests/docs/test_commands.py compares them.
REGISTER = """from qwen3vl_bridge import Family, register_family

register_family(
    Family(
        name="toy_vl",
        architectures={"toy_vl": "ToyVLForConditionalGeneration"},  # model_type: class in config.json
        table=table,
        dimensions=dimensions,
        check=check,
        fields=fields,
        fields_of_run=fields_of_run,
        bridge="toy_model",
    )
)
"""
CONVERT = [
    "python", "-c",
    "import sys, toy_family; from qwen3vl_bridge.cli.main import main; sys.exit(main())",
    "convert", "import", "--hf-model", "HF_FOLDER", "--megatron-path", "MEGATRON",
]  # fmt: skip


@pytest.fixture
def package(tmp_path) -> Path:
    """Write the family as a package of its own, as docs/add_a_family.md describes it."""
    for module in ("toy_family", "toy_model"):
        text = (ROOT / f"tests/models/{module}.py").read_text().replace("tests.models.", "")
        (tmp_path / f"{module}.py").write_text(text)
    with (tmp_path / "toy_family.py").open("a") as file:
        file.write(REGISTER)
    return tmp_path


def run_in(folder: Path, *words: str | Path) -> None:
    paths = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")])}
    subprocess.run([sys.executable, *words], check=True, cwd=folder, env=paths)


@pytest.mark.slow
def test_documented_command_converts_checkpoint_of_toy_family(package, folder):
    places = {"HF_FOLDER": folder, "MEGATRON": package / "megatron"}
    run_in(package, *(places.get(word, word) for word in CONVERT[1:]))
    assert verify_checkpoint(folder, package / "megatron").same


@pytest.mark.slow
def test_toy_family_package_builds_provider_without_test_modules(package, folder):
    code = (
        "import sys, json, toy_family; from qwen3vl_bridge.registry import family;"
        "provider = family('toy_vl').build_provider(json.load(open(sys.argv[1]))); provider.finalize();"
        "print(type(provider), sys.modules['toy_model'].ToyBridge)"
    )
    run_in(package, "-c", code, folder / "config.json")


def test_documented_code_registers_toy_family(package, monkeypatch):
    page = (package / "toy_family.py").read_text().rpartition("from qwen3vl_bridge import Family, register_family")
    said = []
    monkeypatch.setattr(qwen3vl_bridge, "register_family", said.append)
    exec("".join(page[1:]).replace('"toy_model', '"tests.models.toy_model'), dict(vars(toy_family)))
    assert said == [toy_family.FAMILY]


def test_planner_estimates_memory_of_toy_family():
    from qwen3vl_bridge.planning.estimate import estimate
    from qwen3vl_bridge.planning.parallel_layout import ParallelLayout
    from qwen3vl_bridge.planning.training_settings import TrainingSettings
    from qwen3vl_bridge.registry import dimensions_of

    training = TrainingSettings(seq_length=64, micro_batch_size=1, global_batch_size=1)
    found = estimate(dimensions_of(CONFIG), ParallelLayout(1), training)
    assert found.peak.total > 0


@pytest.mark.slow
def test_toy_family_conversion_does_not_import_megatron_or_transformers(folder, tmp_path):
    code = (
        "import sys; from tests.models import toy_family; toy_family.register(); "
        "from qwen3vl_bridge.checkpoint import import_checkpoint as convert; convert(*sys.argv[1:]); "
        "sys.exit(', '.join(name for name in sys.modules if name.startswith(('megatron', 'transformers'))) or 0)"
    )
    subprocess.run([sys.executable, "-c", code, folder, tmp_path / "megatron"], check=True)


def test_import_raises_and_lists_registered_families_if_model_type_is_unknown(folder, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "toy_3", "architectures": ["Toy3"]}))
    with pytest.raises(CheckpointError) as refused:
        import_checkpoint(tmp_path, tmp_path / "megatron")
    for part in ("['Toy3'] (model_type toy_3)", "(model_type qwen3_vl_moe)", "(model_type toy_vl)", "register_family"):
        assert part in str(refused.value)


def test_register_family_raises_if_model_type_is_taken():
    with pytest.raises(ValueError, match=r"'toy_vl' already uses \['toy_vl'\]"):
        registry.register_family(dataclasses.replace(toy_family.FAMILY, name="another", bridge="os"))
