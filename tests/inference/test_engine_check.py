"""Every kind of export that the pages describe passes the check for engines, and each planted fault is found.

vLLM 0.33.0's own loaders read the exports without a fault; see docs/convert.md for what they reported of the faults.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from qwen3vl_bridge.checkpoint import CheckpointError, export_checkpoint, import_checkpoint
from qwen3vl_bridge.cli.convert import main
from qwen3vl_bridge.inference.engine_check import check_for_engine
from qwen3vl_bridge.peft.adapter_rows import LINEAR_LAYERS, OF_LINEAR_ATTENTION
from qwen3vl_bridge.peft.lora import Qwen3VLDoRA, Qwen3VLLoRA
from qwen3vl_bridge.weights.rows import ExpertLayout

import modelopt.torch.export as mtex
import modelopt.torch.quantization as mtq
import pytest
import torch
from megatron.bridge.peft.lora import LoRA
from safetensors.torch import load_file, save_file

from tests.frameworks.modelopt.quantized import quantised_pair
from tests.helpers import fp8
from tests.helpers.expert_layouts import rewrite
from tests.models.qwen3_5.tiny import make_checkpoint as make_qwen3_5
from tests.peft.test_export import ALL_PARTS, adapt

TABLES, ALL = ("vllm", "sglang"), ("vllm", "sglang", "transformers")
RELEASED = ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT
WIDE = dict(moe=True, moe_intermediate_size=32, shared_expert_intermediate_size=48)  # of which blocks of 16 are full


def with_field(folder: Path, name: str, value: Any) -> Path:
    """Set a field of text_config, as released files have it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"][name] = value
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def models(untied_folder, tied_folder, moe_folder, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    moe = with_field(rewrite(moe_folder, root / "moe", ExpertLayout.INPUT_MAJOR), "norm_topk_prob", True)
    packed = make_qwen3_5(root / "packed", seed=5, mtp=ExpertLayout.OUTPUT_MAJOR, **WIDE)
    return {
        "dense": untied_folder, "tied": tied_folder, "moe": moe,
        "3.5": make_qwen3_5(root / "3.5", seed=1, mtp=RELEASED),
        "3.5 tied": make_qwen3_5(root / "3.5 tied", seed=2, tied=True),
        "3.5 moe": make_qwen3_5(root / "3.5 moe", seed=3, moe=True, mtp=RELEASED),
        "3.6 moe": packed,
        "dense fp8": fp8.in_fp8(untied_folder, root / "dense fp8"), "moe fp8": fp8.in_fp8(moe, root / "moe fp8"),
        "3.5 fp8": fp8.in_fp8(make_qwen3_5(root / "base", seed=4, mtp=RELEASED), root / "3.5 fp8"),
        "3.6 fp8": fp8.in_fp8(rewrite(packed, root / "apart", ExpertLayout.PER_EXPERT), root / "3.6 fp8"),
    }  # fmt: skip


# Name -> (model, expert layout, quantization, engines that read the export).
EXPORTS = {
    "dense": ("dense", None, None, ALL), "tied": ("tied", None, None, ALL), "moe": ("moe", None, None, ALL),
    "moe apart": ("moe", "per_expert", None, TABLES), "moe saved": ("moe", "output_major", None, ("transformers",)),
    "3.5": ("3.5", None, None, ALL), "3.5 tied": ("3.5 tied", None, None, ALL), "3.5 moe": ("3.5 moe", None, None, ALL),
    "3.5 apart": ("3.5 moe", "per_expert", None, ALL), "3.6 moe": ("3.6 moe", None, None, ALL),
    "dense fp8": ("dense fp8", None, "fp8", ALL), "moe fp8": ("moe fp8", None, "fp8", TABLES),
    "3.5 fp8": ("3.5 fp8", None, "fp8", ALL), "3.6 fp8": ("3.6 fp8", None, "fp8", ALL),
}  # fmt: skip


@pytest.fixture(scope="module")
def exported(models, tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that exports a model by the name of its case, once."""
    root = tmp_path_factory.mktemp("exports")

    def export(name: str) -> Path:
        model, layout, quantize, _ = EXPORTS[name]
        if not (root / name).exists():
            if not (root / f"{model} megatron").exists():
                import_checkpoint(models[model], root / f"{model} megatron", progress=False)
            how = dict(expert_layout=layout, quantize=quantize, progress=False)
            export_checkpoint(root / f"{model} megatron", root / name, **how)
        return root / name

    return export


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.parametrize("engine", ALL)
def test_engine_check_accepts_export_only_for_supporting_engines(exported, name, engine):
    folder = exported(name)
    report = check_for_engine(folder, engine)
    assert (report.faults == ()) == (engine in EXPORTS[name][3]), report.faults
    assert report.tensors == len(load_file(folder / "model.safetensors"))


EXPERTS = ["linear_qkv", "*.experts.linear_fc1", "*.experts.linear_fc2"]
LINEAR = dict(target_modules=[*LINEAR_LAYERS, *OF_LINEAR_ATTENTION])
# Name -> (model, adapters, engines that read them).
ADAPTERS = {
    "attention": ("dense", Qwen3VLLoRA(dim=4, alpha=8), ALL),
    "tower": ("dense", Qwen3VLLoRA(dim=20, alpha=8, **ALL_PARTS), ("vllm", "transformers")),
    "DoRA": ("dense", Qwen3VLDoRA(dim=4, alpha=8), ("transformers",)),
    "gated attention": ("3.5", Qwen3VLLoRA(dim=4, alpha=8), ALL),
    "linear attention": ("3.5", Qwen3VLLoRA(dim=4, alpha=8, **LINEAR), ("vllm", "transformers")),
    "experts": (
        "moe", Qwen3VLLoRA(dim=4, alpha=8, adapt_experts=True, target_modules=EXPERTS), ("vllm", "transformers"),
    ),
    "dense layer beside experts": ("moe", Qwen3VLLoRA(dim=4, alpha=8), ("transformers",)),
    "all experts": (
        "3.5 moe", Qwen3VLLoRA(dim=4, alpha=8, adapt_experts=True, **LINEAR), ("vllm", "transformers"),
    ),
    "router": ("moe", LoRA(dim=4, alpha=8, target_modules=["linear_proj", "router"]), ("vllm", "transformers")),
    "smaller on experts": (
        "moe", LoRA(dim=4, alpha=8, normalize_moe_lora=True, target_modules=EXPERTS), ("vllm", "transformers"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def adapters(models, tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that exports the adapters of a case, once."""
    root = tmp_path_factory.mktemp("adapters")

    def export(name: str) -> Path:
        if not (root / name).exists():
            adapted = adapt(models[ADAPTERS[name][0]], ADAPTERS[name][1])
            adapted.pair.bridge.save_hf_adapter([adapted.model], root / name, adapted.peft, show_progress=False)
        return root / name

    return export


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("name", ADAPTERS)
def test_engine_check_finds_adapters_of_unsupported_layers(adapters, name):
    for engine in ALL:
        report = check_for_engine(adapters(name), engine)
        assert (report.faults == ()) == (engine in ADAPTERS[name][2]), (engine, report.faults)
        options = {"tower": ["--max-lora-rank 20"], "router": [], "smaller on experts": []}
        expected = [*options[name], "--enable-tower-connector-lora"] if engine == "vllm" and name in options else []
        assert all(option in note for option, note in zip(expected, report.notes, strict=True))


def test_engine_check_of_merged_adapters_finds_no_fault(models, tmp_path):
    for name in ("moe", "3.5"):
        adapted = adapt(models[name], Qwen3VLLoRA(dim=4, alpha=8))
        adapted.pair.bridge.save_hf_pretrained([adapted.model], tmp_path / name, show_progress=False)
        for engine in ALL:
            assert check_for_engine(tmp_path / name, engine).faults == (), engine


class Fault(NamedTuple):
    """What is changed in an export, and a part of each fault that an engine's check then reports."""

    export: str
    change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object]  # of tensors and config.json
    faults: dict[str, list[str]]


FIRST_LAYER, LAYER = (f"model.language_model.layers.{number}." for number in (0, 3))
O_PROJ, Q_NORM = f"{LAYER}self_attn.o_proj.weight", f"{LAYER}self_attn.q_norm.weight"


def both(*faults: str) -> dict[str, list[str]]:
    return {engine: list(faults) for engine in TABLES}


def not_quantized(config: dict[str, Any]) -> list[str]:
    return config["quantization_config"]["modules_to_not_convert"]


def keep(config: dict[str, Any], wanted: Callable[[str], bool]) -> None:
    not_quantized(config)[:] = filter(wanted, not_quantized(config))


FAULTS = {
    "wrong name": Fault(
        "dense", lambda t, c: t.update({f"{Q_NORM}s": t.pop(Q_NORM)}),
        both("1 tensors are missing", f"not read by {{}}; remove or rename them:\n    {Q_NORM}s")
        | {"transformers": ["missing keys", "unexpected keys"]},
    ),
    "wrong shape": Fault(
        "dense", lambda t, c: t.update({O_PROJ: t[O_PROJ][:-1].clone()}),
        both("another shape") | {"transformers": ["does not load: RuntimeError"]},
    ),
    "missing mtp": Fault(
        "3.5", lambda t, c: t.pop("mtp.fc.weight"), both("mtp_num_hidden_layers to 0 in config.json:\n    mtp.fc.wei")
    ),
    "all mtp missing": Fault(
        "3.5", lambda t, c: [t.pop(name) for name in list(t) if name.startswith("mtp.")], both("15 tensors are missing")
    ),
    "all mtp of experts missing": Fault(
        "3.5 apart", lambda t, c: [t.pop(name) for name in list(t) if name.startswith("mtp.")],
        both("tensors are missing; export a model with them, or set text_config.mtp_num_hidden_layers"),
    ),
    "one expert of the first layer missing": Fault(
        "3.5 apart", lambda t, c: t.pop(f"{FIRST_LAYER}mlp.experts.5.up_proj.weight"),
        both(f"export the model again:\n    {FIRST_LAYER}mlp.experts.5.up_proj.weight"),
    ),
    "mtp of a model without": Fault(
        "3.5", lambda t, c: c["text_config"].update(mtp_num_hidden_layers=0), both("15 tensors are not read by {}"),
    ),
    "one expert missing": Fault(
        "3.5 apart", lambda t, c: t.pop(f"{LAYER}mlp.experts.5.up_proj.weight"), both("1 tensors are missing")
    ),
    "narrow expert": Fault(
        "3.5 apart", lambda t, c: t.update({
            f"{LAYER}mlp.experts.5.up_proj.weight": t[f"{LAYER}mlp.experts.5.up_proj.weight"][:-8].clone()}),
        both("1 tensors are of another shape"),
    ),
    "experts transposed": Fault(
        "3.6 moe", lambda t, c: t.update({
            name: x.transpose(1, 2).contiguous() for name, x in t.items() if ".experts." in name}),
        both("{} reads packed [experts, out, in], one tensor per expert of multi-token prediction or pa"),
    ),
    "no norm_topk_prob": Fault(
        "moe", lambda t, c: c["text_config"].pop("norm_topk_prob"),
        {"vllm": ["text_config.norm_topk_prob is missing"], "sglang": []},
    ),
    "missing scale": Fault(
        "dense fp8", lambda t, c: t.pop(f"{O_PROJ}_scale_inv"), both(f"the file:\n    {O_PROJ}_scale_inv [5, 8]")
    ),
    "wrong scale": Fault(
        "dense fp8", lambda t, c: t.update({f"{O_PROJ}_scale_inv": t[f"{O_PROJ}_scale_inv"].t().contiguous()}),
        both("found [8, 5], expected [5, 8]"),
    ),
    "tower not in the list": Fault(
        "dense fp8", lambda t, c: keep(c, lambda name: ".visual." not in name),
        {"vllm": ["of another dtype", "tensors are missing"], "sglang": []},
    ),
    "FP8 in the list": Fault(
        "dense fp8", lambda t, c: not_quantized(c).append(O_PROJ.removesuffix(".weight")),
        both("1 tensors are of another dtype", "1 tensors are not read by {}; quantization_config and its list"),
    ),
    "one of three in the list": Fault(
        "dense fp8", lambda t, c: not_quantized(c).append(f"{LAYER}self_attn.q_proj"),
        both("are one layer for engines, and only", "another dtype", "not read"),
    ),
    "gate of linear attention not in the list": Fault(
        "3.5 fp8", lambda t, c: keep(c, lambda name: "in_proj_" not in name),
        both("block's 16 rows", "another dtype", "are missing")
    ),
    "blocks across layers": Fault(
        "dense fp8", lambda t, c: (c["quantization_config"].update(weight_block_size=[128, 16])),
        both("not multiples of the block's 128 rows", "another shape"),
    ),
    "blocks across gate and up of packed experts": Fault(
        "moe fp8", lambda t, c: (c["quantization_config"].update(weight_block_size=[32, 16])),
        both("experts.gate_up_proj: 48 rows", "another shape"),
    ),
    "one expert in the list": Fault(
        "3.6 fp8", lambda t, c: not_quantized(c).append(f"{LAYER}mlp.experts.5.up_proj"),
        both("another dtype", "not read"),
    ),
    "part of a name in the list": Fault(
        "dense fp8", lambda t, c: not_quantized(c).append("layers.3.self_attn.o_proj"),
        {"vllm": [], "sglang": ["1 tensors are of another dtype", "1 tensors are not read"]},
    ),
    "experts in the list": Fault(
        "3.6 fp8", lambda t, c: not_quantized(c).append(f"{LAYER}mlp.experts"), both("another dtype", "not read"),
    ),
}  # fmt: skip


def changed(folder: Path, to: Path, change: Callable) -> Path:
    shutil.copytree(folder, to)
    (weights,) = to.glob("*.safetensors")
    (path,) = (each for each in to.iterdir() if each.name in ("config.json", "adapter_config.json"))
    tensors, config = load_file(weights), json.loads(path.read_text())
    change(tensors, config)
    save_file(tensors, weights, metadata={"format": "pt"})
    path.write_text(json.dumps(config))
    return to


TITLES = {"vllm": "vLLM", "sglang": "SGLang", "transformers": "transformers"}


def check_faults(folder: Path, expected: dict[str, list[str]], **options: Any) -> None:
    for engine, parts in expected.items():
        report = check_for_engine(folder, engine, **options)
        assert len(report.faults) == len(parts), report.faults
        for part, fault in zip(parts, report.faults, strict=True):
            assert part.format(TITLES[engine]) in fault


@pytest.mark.parametrize("name", FAULTS)
def test_engine_check_finds_each_planted_fault_of_model(exported, name, tmp_path):
    fault = FAULTS[name]
    check_faults(changed(exported(fault.export), tmp_path / "changed", fault.change), fault.faults)


PREFIX = f"base_model.model.{LAYER}"
ADAPTER_FAULTS = {
    "DoRA": Fault("DoRA", lambda t, c: None, both("{} has no DoRA; merge the adapters")),
    "one matrix missing": Fault(
        "attention", lambda t, c: t.pop(f"{PREFIX}self_attn.o_proj.lora_B.weight"),
        both("1 tensors are missing") | {"transformers": ["missing keys"]},
    ),
    "a layer missing": Fault(
        "attention", lambda t, c: [t.pop(name) for name in list(t) if name.startswith(PREFIX)],
        both("tensors are missing; export the adapters again") | {"transformers": ["missing keys"]},
    ),
    "no tensors": Fault("attention", lambda t, c: t.clear(), both("the file has no tensors", "are missing")),
    "other scaling": Fault(
        "attention", lambda t, c: c.update(use_rslora=True), {"vllm": [], "sglang": ["use_rslora=True, which SGLang"]}
    ),
    "saved module": Fault(
        "attention", lambda t, c: c.update(modules_to_save=["lm_head"]),
        both("modules_to_save=['lm_head'], which {} does not"),
    ),
    "wrong name": Fault(
        "attention", lambda t, c: t.update({f"{PREFIX}x.lora_A.weight": t.pop(f"{PREFIX}mlp.up_proj.lora_A.weight")}),
        both("of no layer", "are missing") | {"transformers": ["missing keys", "unexpected keys"]},
    ),
    "wrong shape": Fault(
        "attention", lambda t, c: t.update({f"{PREFIX}mlp.up_proj.lora_A.weight": torch.ones(4, 79)}),
        both("another shape") | {"transformers": ["does not load: RuntimeError"]},
    ),
    "other rank": Fault("attention", lambda t, c: c.update(r=8), both("56 tensors are of another shape")),
    "rank of one layer": Fault(
        "attention", lambda t, c: c.update(rank_pattern={"o_proj": 4}),
        {"vllm": [], "sglang": ["SGLang reads neither rank_pattern nor alpha_pattern"]},
    ),
    "alpha of one layer": Fault(
        "attention", lambda t, c: c.update(alpha_pattern={"o_proj": 4}),
        {"vllm": [], "sglang": ["SGLang reads neither rank_pattern nor alpha_pattern"]},
    ),
    "experts of one tensor": Fault(
        "experts", lambda t, c: [t.pop(name) for name in list(t) if ".base_layer." in name],
        {"vllm": ["6 tensors are missing"]},
    ),
    "one by one": Fault(
        "experts", lambda t, c: [
            t.update({f"{PREFIX}mlp.experts.0.down_proj.lora_{side}.weight": torch.ones(shape)})
            for side, shape in (("A", (4, 48)), ("B", (80, 4)))
        ], {"vllm": ["2 tensors are of layers whose adapters vLLM does not read"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ADAPTER_FAULTS)
def test_engine_check_finds_each_planted_fault_of_adapters(adapters, name, tmp_path):
    fault = ADAPTER_FAULTS[name]
    check_faults(changed(adapters(fault.export), tmp_path / "changed", fault.change), fault.faults)


def test_sglang_check_of_per_expert_adapters_finds_no_fault(adapters, tmp_path):
    """SGLang reads experts one by one, and no adapters of the dense layer of such a model."""

    def split(tensors: dict[str, torch.Tensor], _: dict) -> None:
        for name in [name for name in tensors if ".mlp." in name]:
            del tensors[name]
        for layer in (0, 2, 3):
            for expert in range(6):
                for part, (out, width) in dict(gate=(48, 80), up=(48, 80), down=(80, 48)).items():
                    module = f"base_model.model.model.language_model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
                    tensors[f"{module}.lora_A.weight"] = torch.ones(4, width)
                    tensors[f"{module}.lora_B.weight"] = torch.ones(out, 4)

    folder = changed(adapters("experts"), tmp_path / "single", split)
    assert check_for_engine(folder, "sglang").faults == ()
    (fault,) = check_for_engine(folder, "vllm").faults
    assert fault.startswith("108 tensors are of layers whose adapters vLLM does not read; merge the adapters")


def test_engine_check_of_adapters_with_wrong_base_model_finds_faults(adapters, models):
    check_faults(
        adapters("attention"), both("29 tensors are of another shape", "of no layer"), base_model=models["3.5"]
    )
    assert check_for_engine(adapters("attention"), "vllm", base_model=models["dense"]).faults == ()


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("moe", [None, False, True])
def test_engine_check_finds_wrong_ignore_list_of_modelopt_export(untied_folder, tmp_path, moe):
    source = untied_folder if moe is None else make_qwen3_5(tmp_path / "source", moe=moe)
    pair = quantised_pair(source, mtq.FP8_DEFAULT_CFG)
    folder = tmp_path / "exported"
    mtex.export_mcore_gpt_to_hf(
        pair.megatron, str(source), dtype=torch.bfloat16, export_dir=str(folder), moe_router_dtype=None
    )
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if moe is not None:  # transformers' configuration has this field, and the model no such layer
        config["text_config"]["mtp_num_hidden_layers"] = 0
        path.write_text(json.dumps(config))
    check_faults(folder, both())
    config["quantization_config"]["ignore"].remove("model.visual*")
    path.write_text(json.dumps(config))
    check_faults(folder, {"vllm": ["another dtype", "are missing"], "sglang": []})
    config["quantization_config"]["ignore"].append("model.visual*")
    unquantized = ["1 tensors are of another dtype", "2 tensors are not read by {}"]
    for entry, engines in {"*.3.*.o_proj": TABLES, "3.self_attn.o_proj": TABLES, "3.self_attn.o_pro": ["vllm"]}.items():
        config["quantization_config"]["ignore"].append(entry)
        path.write_text(json.dumps(config))
        check_faults(folder, {engine: unquantized if engine in engines else [] for engine in TABLES})
        config["quantization_config"]["ignore"].remove(entry)
    config["quantization_config"]["quant_algo"] = "NVFP4"
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quant_algo is 'NVFP4', and only FP8 can be checked"):
        check_for_engine(folder, "vllm")


def test_convert_check_command_exits_with_code_1_if_faults_are_found(exported, adapters, tmp_path, capsys):
    folder = str(exported("dense"))
    assert main(["check", "--engine", "vllm", folder]) == 0
    line = f"vLLM 0.33.0 (described on 2026-11-30): 122 tensors of {folder} checked, no fault\n"
    assert capsys.readouterr().out == line
    bad = str(changed(exported("dense"), tmp_path / "bad", FAULTS["wrong name"].change))
    assert main(["check", "--engine", "sglang", bad]) == 1
    out, err = capsys.readouterr()
    assert out.endswith(f"122 tensors of {bad} checked, 2 faults\n") and f"\n    {Q_NORM} [32]\n" in err
    assert main(["check", "--engine", "vllm", "--json", bad]) == 1
    assert len(json.loads(capsys.readouterr().out)["faults"]) == 2
    assert main(["check", "--engine", "vllm", "--base-model", folder, folder]) == 2
    assert "is not a folder of adapters: omit the option" in capsys.readouterr().err
    for engine, word in dict(transformers="with another --expert-layout", sglang="no fault").items():
        assert main(["check", "--engine", engine, str(exported("moe apart"))]) == (engine == "transformers")
        out, err = capsys.readouterr()
        assert word in out + err
    rankless = changed(adapters("attention"), tmp_path / "rankless", lambda t, c: c.update(r="4"))
    assert main(["check", "--engine", "sglang", str(rankless)]) == 2
    assert "r is '4', expected a whole number" in capsys.readouterr().err
    nameless = changed(adapters("attention"), tmp_path / "nameless", lambda t, c: c.pop("base_model_name_or_path"))
    assert main(["check", "--engine", "vllm", str(nameless)]) == 2
    assert "names no base model; set --base-model" in capsys.readouterr().err


def test_engine_check_raises_if_model_type_is_unsupported(exported, tmp_path):
    folder = shutil.copytree(exported("3.5"), tmp_path / "copy")
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"qwen3_5"', '"qwen3_7"'))
    with pytest.raises(CheckpointError, match="qwen3_7"):
        check_for_engine(folder, "vllm")
