"""A family that is registered from outside the package converts, trains a step and exports, by our code alone."""

import dataclasses
import json
import os
import re
import shlex
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

from tests.forked import ROOT
from tests.model import toy_family

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
def test_it_converts_bit_for_bit(ckpt_format, folder, tmp_path):
    import_checkpoint(folder, tmp_path / "megatron", ckpt_format=ckpt_format)
    assert verify_checkpoint(folder, tmp_path / "megatron").same
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf")
    assert same(folder, tmp_path / "hf")


def test_it_trains_a_step_and_is_exported(folder, tmp_path):
    from qwen3vl_bridge.training.process_groups import initialize
    from qwen3vl_bridge.training.step import forward_step

    from megatron.bridge.training.model_load_save import load_megatron_model, save_megatron_model

    from tests.parity.batches import make_batch, make_samples

    import_checkpoint(folder, tmp_path / "start", ckpt_format="torch_dist")
    provider = registry.family_of(CONFIG).build_provider(CONFIG)
    provider.finalize()
    initialize(provider, seed=0)
    (model,) = load_megatron_model(str(tmp_path / "start/iter_0000000"), use_cpu_init=True)
    assert type(model.config).__name__ == "ToyProvider"

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


@pytest.fixture
def package(tmp_path) -> tuple[Path, list[str]]:
    """The family as a package of its own by docs/add_a_family.md: its folder, and the page's command."""
    page = (ROOT / "docs/add_a_family.md").read_text()
    (code,), (command,) = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "bash"))
    for module in ("toy_family", "toy_model"):
        text = (ROOT / f"tests/model/{module}.py").read_text().replace("tests.model.", "")
        (tmp_path / f"{module}.py").write_text(text)
    with (tmp_path / "toy_family.py").open("a") as file:
        file.write(code)
    return tmp_path, shlex.split(command)


def run_in(folder: Path, *words: str | Path) -> None:
    paths = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")])}
    subprocess.run([sys.executable, *words], check=True, cwd=folder, env=paths)


def test_the_pages_command_converts(package, folder):
    made, (python, *words) = package
    assert python == "python"
    places = {"HF_FOLDER": folder, "MEGATRON": made / "megatron"}
    run_in(made, *(places.get(word, word) for word in words))
    assert verify_checkpoint(folder, made / "megatron").same


@pytest.mark.slow
def test_its_provider_needs_no_module_of_the_tests(package, folder):
    code = (
        "import sys, json, toy_family; from qwen3vl_bridge.registry import family;"
        "provider = family('toy_vl').build_provider(json.load(open(sys.argv[1]))); provider.finalize();"
        "print(type(provider), sys.modules['toy_model'].ToyBridge)"
    )
    run_in(package[0], "-c", code, folder / "config.json")


def test_the_page_registers_this_family(package, monkeypatch):
    page = (package[0] / "toy_family.py").read_text().rpartition("from qwen3vl_bridge import Family, register_family")
    said = []
    monkeypatch.setattr(qwen3vl_bridge, "register_family", said.append)
    exec("".join(page[1:]).replace('"toy_model', '"tests.model.toy_model'), dict(vars(toy_family)))
    assert said == [toy_family.FAMILY]


def test_the_planner_counts_it():
    from qwen3vl_bridge.planning.estimate import estimate
    from qwen3vl_bridge.planning.split import ModelSplit
    from qwen3vl_bridge.planning.training_settings import TrainingSettings
    from qwen3vl_bridge.registry import dimensions_of

    training = TrainingSettings(seq_length=64, micro_batch_size=1, global_batch_size=1)
    found = estimate(dimensions_of(CONFIG), ModelSplit(1), training)
    assert found.peak.total > 0


def test_a_conversion_imports_nothing_of_megatron(folder, tmp_path):
    code = (
        "import sys; from tests.model import toy_family; toy_family.register(); "
        "from qwen3vl_bridge.checkpoint import import_checkpoint as convert; convert(*sys.argv[1:]); "
        "sys.exit(', '.join(name for name in sys.modules if name.startswith(('megatron', 'transformers'))) or 0)"
    )
    subprocess.run([sys.executable, "-c", code, folder, tmp_path / "megatron"], check=True)


def test_an_unknown_model_is_told_who_is_known_and_how_to_be(folder, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "toy_3", "architectures": ["Toy3"]}))
    with pytest.raises(CheckpointError) as refused:
        import_checkpoint(tmp_path, tmp_path / "megatron")
    for part in ("['Toy3'] (model_type toy_3)", "(model_type qwen3_vl_moe)", "(model_type toy_vl)", "register_family"):
        assert part in str(refused.value)


def test_a_name_is_one_familys():
    with pytest.raises(ValueError, match=r"'toy_vl' has \['toy_vl'\] already"):
        registry.register_family(dataclasses.replace(toy_family.FAMILY, name="another", bridge="os"))
