"""Adapters in a run's checkpoint, exported to other libraries, give the logits of the Megatron model."""

import dataclasses
import json
import re
import shutil
import warnings
from pathlib import Path

from qwen3vl_bridge.checkpoint import CheckpointError, import_checkpoint
from qwen3vl_bridge.checkpoint.formats.megatron import find_iteration
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig
from qwen3vl_bridge.cli import convert
from qwen3vl_bridge.peft.adapter_rows import adaptable_rows, layer_name
from qwen3vl_bridge.peft.checkpoint_export import export_adapters, merge_adapters
from qwen3vl_bridge.peft.lora import Qwen3VLDoRA

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from megatron.bridge import AutoBridge
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.utils import load_peft_adapter_checkpoint
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from tests.checkpoint.support import assert_same, stock_load
from tests.helpers import fp8
from tests.helpers.expert_layouts import LAYOUTS, relayout
from tests.peft.test_export import Adapted, adapt, check_logits, reference_logits, worst_difference
from tests.training.adapters.test_peft_run import CASES, DIST, FORMATS, FSDP, Trained, inputs_of, peft_config
from tests.training.running import Inputs, stored, train

WEIGHT = 1e-6  # of weights up to about 0.3, whose products are summed up in another order; measured 0


def trained_and_saved(inputs: Inputs, case: str, save: Path, ckpt_format: str, steps: int = 3) -> Adapted:
    """Train some steps and save; return the trained model in float32."""
    trained = Trained()
    settings = dict(train__train_iters=steps, checkpoint__save_interval=steps)
    train(peft_config(inputs, save, CASES[case](), ckpt_format, **settings), callbacks=[trained])
    made = adapt(inputs.hf, CASES[case]())
    parameters = made.trainable()
    assert parameters.keys() == trained.weights.keys()
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(trained.weights[name].view_as(p))
    made.model.eval()
    return made


@pytest.fixture(
    scope="module",
    params=[
        kind if kind in ("LoRA", "adapted experts") else pytest.param(kind, marks=pytest.mark.slow) for kind in CASES
    ],
)
def run(request, inputs, folders, tmp_path_factory):
    """A trained run of each kind: inputs, a model with samples, logits by format, and the folder of checkpoints."""
    folder, logits = tmp_path_factory.mktemp("peft"), {}
    inputs = inputs_of(request.param, inputs, folders)
    for ckpt_format in FORMATS:
        adapted = trained_and_saved(inputs, request.param, folder / ckpt_format, ckpt_format)
        logits[ckpt_format] = adapted.logits()
        assert worst_difference(logits[ckpt_format], reference_logits(adapted.pair.reference, adapted.samples)) > 0.1
    return inputs, adapted, logits, folder


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_exported_adapters_in_peft_give_logits_of_trained_model(run, ckpt_format, tmp_path):
    inputs, adapted, logits, folder = run
    if not adapted.peft.freeze_vision_projection:
        with pytest.raises(CheckpointError, match=r"also trained (12|24) base tensors"):
            export_adapters(folder / ckpt_format, tmp_path / "adapter")
        assert not any(tmp_path.iterdir())
        return
    export_adapters(folder / ckpt_format, tmp_path / "adapter", verify=True, checksums=True)
    base = AutoModelForImageTextToText.from_pretrained(inputs.hf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # `peft` warns of keys it misses or cannot place
        loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    check_logits(logits[ckpt_format], loaded, adapted.samples)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(inputs.hf)
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    # What vLLM reads: its modules' names by prefixes of Hugging Face's; of experts, two of each layer.
    assert all(name.startswith(("base_model.model.model.language_model.layers.", "base_model.model.model.visual."))
               for name in names)  # fmt: skip
    experts = {name.partition(".mlp.")[2] for name in names if ".experts." in name}
    both = {f"experts.{module}lora_{kind}.weight" for module in ("base_layer.", "") for kind in "AB"}
    assert experts == (both if adapted.peft.adapt_experts else set())


@pytest.mark.slow
@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_merged_model_in_transformers_gives_logits_of_trained_model(run, ckpt_format, tmp_path):
    inputs, adapted, logits, folder = run
    merge_adapters(folder / ckpt_format, tmp_path / "merged", verify=True, max_shard_bytes=300_000)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    check_logits(logits[ckpt_format], loaded, adapted.samples)
    before, after = load_file(inputs.hf / "model.safetensors"), {}
    for file in (tmp_path / "merged").glob("*.safetensors"):
        after |= load_file(file)
    same = {name for name in before if torch.equal(before[name], after[name])}
    layers = [
        row for row in adaptable_rows(ModelConfig(inputs.hf).rows()) if adapted.peft.settings.adapts(layer_name(row))
    ]
    changed = {name for row in layers for name in row.hf}
    if not adapted.peft.freeze_vision_projection:
        changed |= {name for name in before if "merger" in name}
    assert before.keys() == after.keys() and before.keys() - same == changed


def test_merge_adapters_raises_if_config_of_base_model_differs(run, tmp_path):
    inputs, _, _, folder = run
    model = shutil.copytree(inputs.hf, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["vision_config"]["num_heads"] //= 2  # the same shapes, interleaved in another way
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"vision_config\.num_heads is 2, expected 4"):
        merge_adapters(folder / DIST, tmp_path / "merged", base_model=model)


def test_merge_adapters_raises_if_vocab_padding_is_not_zero(run, tmp_path):
    inputs, _, _, folder = run
    import_checkpoint(inputs.hf, tmp_path / "m")
    iteration = tmp_path / "m" / "iter_0000000"
    stored = {name: value for name, value in stock_load(iteration).items() if isinstance(value, torch.Tensor)}
    for name in [name for name in stored if name.endswith(("word_embeddings.weight", "output_layer.weight"))]:
        stored[name] = torch.cat([stored[name], torch.ones(3, stored[name].shape[1])])
    dcp.save(stored, checkpoint_id=tmp_path / "base", no_dist=True)
    shutil.copytree(iteration / "hf", tmp_path / "base" / "hf")
    how = dict(base_model=tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"3 rows beyond the vocabulary of \d+, of which 3 are not zero"):
        merge_adapters(folder / DIST, tmp_path / "merged", **how)
    report = merge_adapters(folder / DIST, tmp_path / "merged", drop_vocab_padding=True, **how)
    assert any("3 of them not zero, dropped by --drop-vocab-padding" in note for note in report.notes)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_merge_adapters_into_every_expert_layout_gives_same_weights(run, moe_folder, moe_folders, layout, tmp_path):
    inputs, _, _, folder = run
    if inputs.hf != moe_folder:
        return
    merge_adapters(folder / DIST, tmp_path / "expected")
    merge_adapters(folder / DIST, tmp_path / "found", base_model=moe_folders[layout])
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("expected", "found"))
    expected = relayout(expected, layout)
    assert found.keys() == expected.keys()
    worst = max((found[name] - tensor).abs().max().item() for name, tensor in expected.items())
    print(f"weights: {worst:.1e}, tolerance {WEIGHT:.0e}")
    assert worst <= WEIGHT


@pytest.mark.one_case_in(2)
def test_merge_adapters_into_fp8_model_equals_merge_into_float32_values(run, tmp_path):
    """The result equals a merge into the float32 values, rounded once."""
    inputs, _, _, folder = run
    base = fp8.in_fp8(inputs.hf, tmp_path / "fp8")
    exact = shutil.copytree(inputs.hf, tmp_path / "exact")
    save_file({name: one.float() for name, one in fp8.read(base).items()}, exact / "model.safetensors")
    found = {}
    for name, model, dtype in (("a", exact, "float32"), ("b", base, "float32"), ("c", base, "bfloat16")):
        merge_adapters(folder / DIST, tmp_path / name, base_model=model, torch_dtype=dtype)
        found[name] = load_file(tmp_path / name / "model.safetensors")
    assert_same(found["b"], found["a"])
    assert_same(found["c"], {name: one.to(found["c"][name].dtype) for name, one in found["b"].items()})


def test_adapter_settings_select_layers_that_have_trained_adapters(run):
    inputs, adapted, _, _ = run
    names = {name.partition(".adapter.")[0] for name in adapted.trainable() if ".adapter." in name}
    rows = adaptable_rows(ModelConfig(inputs.hf).rows())
    assert names == {layer_name(row) for row in rows if adapted.peft.settings.adapts(layer_name(row))}


def test_merge_adapters_in_bfloat16_rounds_weights_once(run, tmp_path):
    _, _, _, folder = run
    for dtype in ("float32", "bfloat16"):
        merge_adapters(folder / DIST, tmp_path / dtype, torch_dtype=dtype)
    exact, rounded = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("float32", "bfloat16"))
    assert all(torch.equal(exact[name].to(rounded[name].dtype), rounded[name]) for name in exact)
    kept = {name for name, one in rounded.items() if one.dtype is not torch.bfloat16}
    assert all(name.endswith((".linear_attn.A_log", ".linear_attn.norm.weight")) for name in kept)


def test_adapters_merge_command_with_dry_run_writes_no_files(run, tmp_path, capsys):
    _, adapted, _, folder = run
    source = ["--megatron-path", str(folder / FSDP), "--no-progress"]
    assert convert.main(["adapters", "merge", *source, "--hf-path", str(tmp_path / "m"), "--dry-run"]) == 0
    assert "tensors" in capsys.readouterr().out and not any(tmp_path.iterdir())
    expected = 0 if adapted.peft.freeze_vision_projection else 2
    assert convert.main(["adapters", "export", *source, "--hf-path", str(tmp_path / "a")]) == expected
    whole = ["--megatron-path", str(tmp_path / "nowhere"), "--hf-path", str(tmp_path / "b")]
    assert convert.main(["adapters", "merge", *whole]) == 2
    assert "nowhere: there is no such folder" in capsys.readouterr().err


def save_beside(its: Path, tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    """Save a checkpoint of other tensors with the files of a run."""
    dcp.save(tensors, checkpoint_id=folder)
    shutil.copytree(its / "hf", folder / "hf")
    shutil.copyfile(its / "run_config.yaml", folder / "run_config.yaml")
    return folder


@pytest.mark.one_case_in(2)
def test_export_adapters_joins_separately_stored_gate_and_up(run, tmp_path):
    """Runs of earlier versions stored gate and up separately."""
    _, adapted, _, folder = run
    its = find_iteration(folder / FSDP)
    if not adapted.peft.freeze_vision_projection:
        return
    export_adapters(its, tmp_path / "expected")
    tensors = {key: t for key, t in stored(its).items() if key.startswith("model.")}
    whole = [key for key in tensors if "language_model" in key and "linear_fc1" in key and "linear_in" not in key]
    assert bool(whole) == any("linear_fc1" in name for name in adapted.trainable() if "language_model" in name)
    for key in whole:
        tensors[f"{key}_w"], tensors[f"{key}_v"] = (half.clone() for half in tensors.pop(key).chunk(2))
    export_adapters(save_beside(its, tensors, tmp_path / "apart"), tmp_path / "found")
    files = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("expected", "found")]
    assert files[0] == files[1]
    if whole:
        mixed = shutil.copytree(its, tmp_path / "split")
        text = (its / "run_config.yaml").read_text()
        two = text.replace("tensor_model_parallel_size: 1", "tensor_model_parallel_size: 2")
        (mixed / "run_config.yaml").write_text(two)
        with pytest.raises(CheckpointError, match="saved by 2 tensor-parallel ranks, and stores"):
            export_adapters(mixed, tmp_path / "mixed")
        # A configuration without the number is of one rank, megatron-core's default.
        (mixed / "run_config.yaml").write_text(re.sub(r"\n +tensor_model_parallel_size: 1(?=\n)", "", text))
        export_adapters(mixed, tmp_path / "one")
        assert (tmp_path / "one" / "adapter_model.safetensors").read_bytes() == files[0]


def test_export_adapters_raises_if_tensors_are_missing_or_unexpected(run, tmp_path):
    _, _, _, folder = run
    its = find_iteration(folder / FSDP)
    tensors = {key: t for key, t in stored(its).items() if ".adapter." in key and key.startswith("model.")}
    lost = next(key for key in tensors if "linear_in" in key and "language_model" in key)
    tensors[lost.replace("language_model", "language_model.other")] = tensors.pop(lost)
    damaged = save_beside(its, tensors, tmp_path / "damaged")
    with pytest.raises(CheckpointError, match=r"1 missing, 1 unexpected\n  missing: .*linear_in.*\n .*other"):
        export_adapters(damaged, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.one_case_in(2)
def test_adapter_checkpoint_loaded_by_megatron_bridge_gives_same_logits(run):
    """Megatron-Bridge's loader reads them into a model with new adapters."""
    inputs, adapted, logits, folder = run
    fresh = adapt(inputs.hf, adapted.peft)
    assert worst_difference(logits[DIST], fresh.logits()) > 0.1
    load_peft_adapter_checkpoint(
        [fresh.model], find_iteration(folder / DIST), adapted.peft,
        model_sd_kwargs=dict(metadata={"non_homogeneous_layers": adapted.peft.layers_differ}),
        fully_parallel_load=False,
    )  # fmt: skip
    check_logits(logits[DIST], fresh, fresh.samples)


def bridges_own(run) -> LoRA | DoRA | None:
    """Return Megatron-Bridge's configuration of the same adapters: all components and experts."""
    inputs, adapted, _, _ = run
    its, experts = adapted.peft, "moe" in json.loads((inputs.hf / "config.json").read_text())["model_type"]
    if its.layers_differ or not its.adapt_vision_projection or its.adapt_experts != experts:
        return None
    method = DoRA if isinstance(its, Qwen3VLDoRA) else LoRA
    return method(dim=its.dim, alpha=its.alpha, target_modules=its.target_modules)


@pytest.mark.one_case_in(2)
def test_adapter_checkpoint_loaded_as_in_verl_gives_same_logits(run):
    """`lora.adapter_path` uses Megatron-Bridge's loader with its own adapter class."""
    if (peft := bridges_own(run)) is None:
        return
    inputs, _, logits, folder = run
    fresh = adapt(inputs.hf, peft)
    load_peft_adapter_checkpoint([fresh.model], str(find_iteration(folder / DIST)), peft=peft, strict=False)
    check_logits(logits[DIST], fresh, fresh.samples)


@pytest.mark.one_case_in(2)
def test_export_adapter_ckpt_keeps_logits_of_lora_and_raises_for_dora(run, tmp_path):
    """`AutoBridge.export_adapter_ckpt` reads all adapters as LoRA."""
    if (peft := bridges_own(run)) is None:
        return
    inputs, adapted, logits, folder = run
    bridge = AutoBridge.from_hf_pretrained(str(inputs.hf))
    checkpoint, out = find_iteration(folder / DIST), tmp_path / "adapter"
    if isinstance(peft, DoRA):
        with pytest.raises(ValueError, match=r"magnitudes export_adapter_ckpt would drop; use .*qwen3vl adapters"):
            bridge.export_adapter_ckpt(checkpoint, out)
        return
    bridge.export_adapter_ckpt(checkpoint, out, show_progress=False)
    loaded = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(inputs.hf), out)
    check_logits(logits[DIST], loaded, adapted.samples)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_export_adapters_with_megatron_bridge_peft_class_gives_same_files(run, ckpt_format, tmp_path):
    """Checkpoints of Megatron-Bridge's LoRA and DoRA have the same tensors and a different class in run_config.yaml."""
    if (peft := bridges_own(run)) is None:
        return
    _, _, _, folder = run
    export_adapters(folder / ckpt_format, tmp_path / "expected")
    its = tmp_path / "run"
    shutil.copytree(find_iteration(folder / ckpt_format), its)
    config = yaml.safe_load((its / "run_config.yaml").read_text())
    fields = {field.name: getattr(peft, field.name) for field in dataclasses.fields(peft) if field.init}
    target = {"_target_": f"{type(peft).__module__}.{type(peft).__qualname__}", "canonical_mapping": {}}
    (its / "run_config.yaml").write_text(yaml.safe_dump(config | {"peft": fields | target}))
    export_adapters(its, tmp_path / "found")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "found" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
