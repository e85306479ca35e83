"""`qwen3vl`: every command answers at once, in the same words, and under torchrun; what `doctor` finds."""

import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from qwen3vl_bridge.checkpoint.formats.huggingface import SINGLE
from qwen3vl_bridge.cli import doctor
from qwen3vl_bridge.cli import main as program
from qwen3vl_bridge.cli.main import main
from qwen3vl_bridge.registry import preset, titles

import huggingface_hub
import pytest
import torch
from packaging.requirements import Requirement
from safetensors.torch import load_file, save_file

COMMANDS = [
    [], *([name] for name in program.COMMANDS),
    *(["convert", verb] for verb in ("import", "export", "reformat", "verify", "inspect", "check")),
    *(["adapters", verb] for verb in ("export", "merge")), *(["data", verb] for verb in ("inspect", "pack")),
]  # fmt: skip
HEAVY = ("torch", "megatron", "transformers", "numpy", "datasets", "rich", "packaging")


def test_help_of_every_command_imports_no_heavy_module():
    """Each in a process of its own would start Python 17 times. Alone each takes 0.04 to 0.12 s of one core."""
    code = (
        "import sys; from qwen3vl_bridge.cli.main import main\n"
        f"for words in {COMMANDS}:\n"
        "    try: main([*words, '--help'])\n"
        "    except SystemExit as end: assert not end.code, words\n"
        f"print(sorted(set({HEAVY}) & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for words in COMMANDS:
        assert f"usage: {' '.join(['qwen3vl', *words])} [-h]" in done.stdout
    for words in ([], ["convert"], ["train"]):
        text = done.stdout.split(f"usage: {' '.join(['qwen3vl', *words])} [-h]")[1].split("usage: ")[0]
        assert all(title in " ".join(text.split()) for title in titles().values()), words
    assert done.stdout.splitlines()[-1] == "[]"


RUN = "--hf-model HF --data-path . --save run"
# What is wrong in the words of `train`, and what they would better be.
MISTYPED = [
    ("--recipe qwen3_vl_9b_sft_config", "there is no recipe 'qwen3_vl_9b_sft_config'; did you mean qwen35_vl_9b_sft_"),
    (f"{RUN} --lr=1e-4", "there is no option --lr=1e-4; settings are given as NAME=VALUE: optimizer.lr=1e-4"),
    (f"{RUN} --learning-rate 1e-4", "settings are given as NAME=VALUE: optimizer.lr=1e-4\n"),
    (f"{RUN} --learning-rate", "settings are given as NAME=VALUE: optimizer.lr=...\n"),
    (f"{RUN} --lora_rank 8 optimizer.lr=1e-4 --verbose", "settings are given as NAME=VALUE: peft.dim=8\n"),
    (f"{RUN} --max_length=512", "are given as NAME=VALUE: model.seq_length=512 dataset.seq_length=512"),
    (f"{RUN} --warmup_ratio=0.05", "NAME=VALUE: scheduler.lr_warmup_iters=0 scheduler.lr_warmup_fraction=0.05"),
    (f"{RUN} --per_device_train_batch_size=2",
     "NAME=VALUE: train.global_batch_size=..., which is per device x accumulation x GPUs"),
    (f"{RUN} --gradient-accumulation-steps 4", "train.global_batch_size=..., which is per device x accumulation x "),
    (f"{RUN} max_length=512", "no setting max_length; did you mean model.seq_length and dataset.seq_length?"),
    (f"{RUN} --tensor_model_parallel_size 2", "given as NAME=VALUE: model.tensor_model_parallel_size=2"),
    (f"{RUN} --tuner_type lora", "option --tuner_type; did you mean --recipe with a name of sft or peft (--list)?"),
    (f"{RUN} --val_dataset valid.jsonl", "NAME=VALUE: dataset.valid_path=valid.jsonl\n"),
    (f"{RUN} --val_dataset a.jsonl b.jsonl", "NAME=VALUE: dataset.valid_path=...\n"),
    (f"{RUN} --packing true", "NAME=VALUE: dataset.pack=true\n"),
    (f"{RUN} packing=true", "there is no setting packing; did you mean dataset.pack?"),
    (f"{RUN} --vit_lr 1e-6", "NAME=VALUE: optimizer_config_override_provider.vision_model_lr=1e-6\n"),
    (f"{RUN} --aligner_lr=1e-6", "NAME=VALUE: optimizer_config_override_provider.vision_projection_lr=1e-6\n"),
    (f"{RUN} --truncation_strategy delete", "dataset.on_long=drop (delete) or dataset.on_long=truncate (right)"),
    (f"{RUN} --loss_scale last_round", "dataset.answers=last (last_round) or dataset.answers=all (default); fp16's is"),
    (f"{RUN} --load_from_cache_file true", "there is no option --load_from_cache_file: samples are encoded during"),
    (f"{RUN} load_from_cache_file=true", "there is no setting load_from_cache_file: samples are encoded during"),
    (f"{RUN} --mcore_model M", "did you mean --pretrained-checkpoint, or --save, whose run is continued?"),
    (f"{RUN} --finetune true", "did you mean --pretrained-checkpoint for a new run, or --save, whose run is continued"),
    (f"{RUN} --target_modules all-linear", "NAME=VALUE: peft.target_modules=[]\n"),
    (f"{RUN} --target_modules=linear_qkv", "NAME=VALUE: peft.target_modules=[linear_qkv]\n"),
    (f"{RUN} --lr_warmup_fraction 0.1", "NAME=VALUE: scheduler.lr_warmup_iters=0 scheduler.lr_warmup_fraction=0.1\n"),
    (f"{RUN} --gradient-checkpointing true", "NAME=VALUE: model.recompute_granularity=full model.recompute_method=un"),
    (f"{RUN} --model HF", "there is no option --model; did you mean --hf-model?"),
    (f"{RUN} --data_path .", "there is no option --data_path; did you mean --data-path?"),
    (f"{RUN} --output_dir run", "there is no option --output_dir; did you mean --save?"),
    (f"{RUN} --deepspeed x", "there is no option --deepspeed; --help shows all"),
    (f"{RUN} lr=1e-4", "there is no setting lr; did you mean optimizer.lr?"),
    (f"{RUN} optimizer.learning_rate=1e-4", "there is no setting optimizer.learning_rate; did you mean optimizer.lr?"),
    (f"{RUN} train.global_batchsize=3", "no setting train.global_batchsize; did you mean train.global_batch_size, "),
    (f"{RUN} tp=2", "there is no setting tp; did you mean model.tensor_model_parallel_size?"),
    (f"{RUN} zq=2", "there is no setting zq"),
    (f"{RUN} --config misspelt.yaml", "there is no setting optimizer.rate; did you mean optimizer."),
    (f"{RUN} --config none.yaml", "--config is none.yaml, expected a YAML file that exists"),
    ("--hf-model HF --data-path none --save run", "dataset.path (--data-path) is none: there is no such file or"),
    ("--hf-model HF --save run dataset.train_path=x.jsonl", "dataset.train_path is x.jsonl: there is no such file"),
    ("--hf-model HF --data-path folder --save run", "folder: found swift.jsonl, a.png, b.png, c.png, d.png in the "
     "folder, expected train.jsonl, Parquet files or a data set written by save_to_disk; to use folder/swift.jsonl, "
     "give its own path"),
    ("--hf-model HF --save run", "dataset.path is None: give --data-path"),
    ("--hf-model HF --data-path .", "checkpoint.save is None, expected a folder used only by this run: give --save"),
    (f"{RUN} --pretrained-checkpoint none", "--pretrained-checkpoint is none, expected a folder that exists"),
    (f"{RUN} --pretrained-checkpoint .", ". is not a Megatron checkpoint: it has neither"),
    (f"{RUN} --recipe qwen35_vl_2b_sft_32k_config", "qwen35_vl_2b_sft_32k_config is a recipe for a Qwen3.5-VL without "
     "experts, and HF is a Qwen3-VL without experts: use qwen3_vl_2b_sft_32k_config or qwen3_vl_4b_sft_32k_config"),
    (f"{RUN} --recipe qwen3_vl_30b_a3b_peft_config", "is a recipe for a Qwen3-VL with experts, and HF is a Qwen3-VL "
     "without experts: use qwen3_vl_2b_peft_config or qwen3_vl_4b_peft_config"),
    ("--hf-model short --data-path . --save run", "short does not have the tensors that its config.json requires: 11 "
     "unexpected\n  unexpected: model.language_model.layers.3.input_layernorm.weight: found [80] float32, expected no"),
    (f"{RUN} --pretrained-checkpoint cut", "cut/model.safetensors of 1000 bytes: "),
    ("--hf-model lacking --data-path . --save run", "lacking/model-2.safetensors: found nothing, expected a file"),
    (f"{RUN} --save other", "--save is other, which contains the run of another model than HF: hidden is 80, "
     "expected 96. Use another folder, or the model of other"),
    (f"{RUN} --save of_3.5", "--save is of_3.5, which contains the run of another model than HF: the family "
     "is qwen3_vl, expected qwen3_5. Use another folder, or the model of of_3.5/iter_0000007"),
]  # fmt: skip


def test_train_exits_with_code_2_before_importing_torch_if_options_are_invalid(untied_folder, tmp_path):
    """Each in a process of its own would start Python 20 times."""
    (tmp_path / "HF").symlink_to(untied_folder)
    other = json.loads((untied_folder / "config.json").read_text())
    other["text_config"]["hidden_size"] = other["vision_config"]["out_hidden_size"] = 96
    for name, config in (("other", other), ("of_3.5", preset("0.8B"))):
        iteration = tmp_path / name / "iter_0000007"
        (iteration / "hf").mkdir(parents=True)
        (iteration / "hf" / "config.json").write_text(json.dumps(config))
        (iteration / ".metadata").touch()
        (tmp_path / name / "latest_checkpointed_iteration.txt").write_text("7")
    short, weights = json.loads((untied_folder / "config.json").read_text()), untied_folder / "model.safetensors"
    short["text_config"]["num_hidden_layers"] -= 1
    for name, config, file in (
        ("short", short, weights.read_bytes()), ("cut", None, weights.read_bytes()[:1000]), ("lacking", None, None)
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps(config) if config else (untied_folder / "config.json").read_text()
        )
        if file is not None:
            (tmp_path / name / weights.name).write_bytes(file)
    (tmp_path / "lacking" / f"{weights.name}.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "folder").mkdir()
    for name in ("a.png", "b.png", "c.png", "d.png", "e.png", "swift.jsonl"):
        (tmp_path / "folder" / name).touch()
    (tmp_path / "misspelt.yaml").write_text("optimizer:\n  lr: 1.0e-4\n  rate: 3\n")
    code = (
        "import contextlib, io, json, sys; from qwen3vl_bridge.cli.main import main\n"
        "for words, expected in json.loads(sys.argv[1]):\n"
        "    said, words = io.StringIO(), words.split()\n"
        "    if '--recipe' not in words: words += ['--recipe', 'qwen3_vl_digits_sft_config']\n"
        "    with contextlib.redirect_stderr(said):\n"
        "        try: status = main(['train', *words])\n"
        "        except SystemExit as end: status = end.code\n"
        "    assert status == 2 and expected in said.getvalue(), (words, said.getvalue())\n"
        f"print(sorted(set({(*HEAVY[:3], 'omegaconf')}) & sys.modules.keys()))"
    )
    words = [sys.executable, "-c", code, json.dumps(MISTYPED)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n" and not (tmp_path / "run").exists()


VIDEO = "dataset.vision.video_max_pixels=..."
# Variables that ms-swift reads, words of a command, and what a warning says.
UNREAD = [
    (dict(MAX_PIXELS="1003520", FPS="2"), "train", "environment variables without effect: MAX_PIXELS, FPS. Set "
     "dataset.vision.image_max_pixels=1003520 dataset.vision.video_fps=2 instead\n"),
    (dict(IMAGE_MAX_TOKEN_NUM="16"), "train", "Set dataset.vision.image_max_pixels=16384 instead\n"),
    (dict(VIDEO_MAX_PIXELS="50176"), "train", f"Set {VIDEO} instead (pixels of all frames together)\n"),
    (dict(VIDEO_TOTAL_PIXELS="9", ROOT_IMAGE_DIR="x"), "train", "video_max_pixels=9 dataset.media_root=x instead\n"),
    (dict(FPS_MAX_FRAMES="8"), "train dataset.vision.video_max_frames=8", None),
    (dict(MAX_PIXELS="4096"), "data inspect", "without effect: MAX_PIXELS. Set --image-max-pixels 4096 instead"),
    (dict(MAX_PIXELS="4096"), "data inspect --image-max-pixels 4096", None), ({}, "train", None),
]  # fmt: skip


@pytest.mark.parametrize(("variables", "words", "message"), UNREAD)
def test_program_warns_about_ms_swift_environment_variables_without_effect(
    variables, words, message, tmp_path, monkeypatch, capsys
):
    """Both commands end at what is missing here: the warning comes first."""
    for name in {"RANK", "FAKE_GPU_LOG", *(name for one, _, _ in UNREAD for name in one)}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.jsonl").write_text('{"messages": []}\n')
    where = f"--recipe qwen3_vl_digits_sft_config --data-path {tmp_path}"  # without --save
    if words.startswith("data"):
        where = f"--data {tmp_path} --hf-model {tmp_path}"
    with contextlib.suppress(SystemExit):
        main([*words.split(), *where.split()])
    said = capsys.readouterr().err
    assert "error: " in said and said.count("warning: ") == bool(message) and (message or "") in said


@pytest.mark.parametrize(("words", "message"), [
    ([], "COMMAND is missing"), (["transmute"], "invalid choice: 'transmute'"), (["convert"], "VERB"),
    (["train"], "--recipe is missing"),
    (["train", "--recipe", "x", "--from-scratch", "--pretrained-checkpoint", "y"], "exclude each other"),
    (["train", "--recipe", "x", "--json"], "--json works only with --list, --dry-run and --simulate-gpu"),
    (["generate", "?", "--hf-model", "x", "--image", "/no/such.png"], "/no/such.png, expected a file that exists"),
    (["plan", "--model", "8B", "--gpus", "0"], "0, expected 1 or more"),
])  # fmt: skip
def test_program_exits_with_code_2_if_usage_is_wrong(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    said = capsys.readouterr()
    assert message in said.err and not said.out
    assert said.err.startswith("error: ") and said.err.count("\n") == 1


# By the files of a folder, what a message says that it holds.
MISTAKEN = {
    "adapters": (["adapter_config.json", "adapter_model.safetensors"], "adapters in the format of peft"),
    "processor": (["tokenizer.json", "preprocessor_config.json"], "a tokenizer or processor without a model"),
    "pickled": (["pytorch_model-00001-of-00002.bin"], "weights pickled by torch"),
    "gguf": (["model-Q4_K_M.gguf"], "weights for llama.cpp"),
    "shards": (["__0_0.distcp"], "files of a Megatron checkpoint without .metadata"),
    "other": (["notes.txt"], "it holds notes.txt"), "empty": ([], "it is empty"),
}  # fmt: skip
MEGATRON = (["latest_checkpointed_iteration.txt"], "a Megatron checkpoint; `qwen3vl convert export`")
WANT_MODEL = (
    "generate ? --hf-model",
    "train --recipe qwen3_vl_digits_sft_config --data-path x --save y --simulate-gpu --hf-model",
    "convert import --megatron-path y --hf-model", "convert inspect --hf-model", "plan --gpus 1 --model",
)  # fmt: skip
HUGGING_FACE = (["config.json", "model.safetensors"], "a Hugging Face model; `qwen3vl convert import`")
WANT_MEGATRON = (
    "generate ? --hf-model x --megatron-path", "convert export --hf-path y --megatron-path",
    "convert reformat --new-path y --ckpt-format torch_dist --megatron-path", "convert verify --megatron-path",
    "adapters export --hf-path y --megatron-path", "adapters merge --hf-path y --megatron-path",
)  # fmt: skip


@pytest.mark.parametrize(("words", "files", "holds"), [
    *((WANT_MODEL[0], *kind) for kind in MISTAKEN.values()), *((WANT_MEGATRON[0], *kind) for kind in MISTAKEN.values()),
    *((words, *kind) for words in WANT_MODEL for kind in (MISTAKEN["adapters"], MEGATRON)),
    *((words, *kind) for words in WANT_MEGATRON for kind in (MISTAKEN["adapters"], HUGGING_FACE)),
    ("convert inspect --megatron-path", *MISTAKEN["adapters"]),  # which reads a Hugging Face model, too
])  # fmt: skip
def test_program_error_names_contents_of_folder_without_model_or_checkpoint(
    words, files, holds, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)  # a folder is never a hub's name
    for name in files:
        (tmp_path / name).write_text("{}")
    try:
        status = main([*words.split(), str(tmp_path)])
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr().err
    assert status == 2 and f"{tmp_path}" in said and holds in said and "network" not in said, said


@pytest.mark.parametrize("words", ["generate ? --hf-model", "convert import --megatron-path y --hf-model"])
def test_program_exits_with_code_2_if_model_has_no_weights(words, untied_folder, tmp_path, capsys):
    shutil.copy(untied_folder / "config.json", tmp_path)
    assert main([*words.split(), str(tmp_path)]) == 2
    assert "model.safetensors.index.json; it holds a configuration without weights" in capsys.readouterr().err


def test_data_inspect_exits_with_code_2_if_folder_has_no_processor(tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text('{"messages": []}')
    words = ["data", "inspect", "--data", str(tmp_path / "data.jsonl"), "--hf-model", str(tmp_path)]
    assert main(words) == 2
    assert "found no processor; it holds adapters in the format of peft" in capsys.readouterr().err


def test_main_returns_exit_code_of_command(capsys, tmp_path):
    assert main(["plan", "--model", "235B-A22B", "--gpus", "1", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == []
    assert main(["convert", "inspect", "--megatron-path", str(tmp_path / "none")]) == 2
    assert "expected the folder of a Megatron checkpoint" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.count(".") == 2


@pytest.mark.parametrize("words", [
    ["generate", "?"], ["data", "inspect", "--data", "DATA"], ["data", "pack", "--data", "DATA", "--output", "rows"],
    ["train", "--recipe", "qwen3_vl_2b_sft_config", "--data-path", "DATA", "--save", "run"],
    ["train", "--recipe", "qwen3_vl_2b_sft_config", "--dry-run"],
])  # fmt: skip
def test_program_requests_missing_hub_model_once(words, tmp_path, capsys, monkeypatch):
    """The library would ask for each file, several times; without a network that took minutes."""
    asked = []

    def refuse(name, **_):
        asked.append(name)
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "?"}]}))
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(SystemExit):  # of status 2, by `train`
        status = main([*(word.replace("DATA", "data.jsonl") for word in words), "--hf-model", "Qwen/No-Such"])
        assert status == (1 if "--dry-run" in words else 2)
    assert asked == ["Qwen/No-Such"]
    assert "Qwen/No-Such is neither a folder nor a model available from the hub: no conn" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl"]


def test_train_exits_with_code_2_if_recipes_package_is_missing(monkeypatch, capsys):
    assert program.COMMANDS["train"][0] == "qwen3vl_recipes.cli:train"
    monkeypatch.setitem(program.COMMANDS, "train", ("no_such_recipes.cli:train", ""))
    assert main(["train", "--list"]) == 2
    assert "train needs the package no_such_recipes, which is not installed" in capsys.readouterr().err


def test_program_exits_with_code_2_and_names_missing_package(monkeypatch, tmp_path, capsys):
    (tmp_path / "needing.py").write_text("def main(*_, **__):\n    import no_such_package.inner\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(program.COMMANDS, "plan", ("needing:main", ""))
    assert main(["plan"]) == 2
    assert "plan needs the package no_such_package, which is not installed; requ" in capsys.readouterr().err


def test_program_raises_if_module_of_this_package_is_missing(monkeypatch):
    monkeypatch.setitem(program.COMMANDS, "plan", ("qwen3vl_bridge.cli.no_such:main", ""))
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        main(["plan"])


def test_train_list_json_gives_gpus_and_summary_of_each_recipe(capsys):
    assert main(["train", "--list", "--json"]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert [name for name, one in found.items() if not one["gpus"]] == list(found)[:5]  # on a CPU
    assert found["qwen3_vl_8b_sft_config"]["gpus"] == 8 and "8K tokens" in found["qwen3_vl_8b_sft_config"]["summary"]


@pytest.mark.slow
def test_convert_verify_accepts_import_that_ran_under_torchrun(untied_folder, tmp_path, capsys):
    """Compare the written checkpoint by `convert verify --json`: equal, then different in one element."""
    target = tmp_path / "megatron"
    words = ["convert", "import", "--hf-model", str(untied_folder), "--megatron-path", str(target), "--json"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "qwen3vl_bridge", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # of the first process alone
    assert report["processes"] == 2 and not report["dry_run"]
    verify = ["convert", "verify", "--megatron-path", str(target), "--json", "--no-progress", "--hf-model"]
    assert main([*verify, str(untied_folder)]) == 0
    same = json.loads(capsys.readouterr().out)
    weights = load_file(untied_folder / SINGLE)
    assert same == {"same": True, "tensors": len(weights), "nbytes": report["nbytes"], "differences": [], "notes": []}
    other = tmp_path / "other"
    other.mkdir()
    for path in untied_folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors":  # other tests keep folders of references there
            (other / path.name).write_bytes(path.read_bytes())
    name = "model.language_model.norm.weight"
    weights[name] = weights[name] + torch.eye(1, len(weights[name]))[0]
    save_file(weights, other / SINGLE, metadata={"format": "pt"})
    assert main([*verify, str(other)]) == 1
    differs = json.loads(capsys.readouterr().out)
    assert not differs["same"] and [(one["name"], one["elements"]) for one in differs["differences"]] == [(name, 1)]


def test_torchrun_prints_error_message_of_program_as_root_cause():
    words = ["train", "--recipe", "qwen3_vl_digits_sft_config", "lr=1e-4"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1", "-m", "qwen3vl_bridge", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    said, message = done.stderr, "there is no setting lr; did you mean optimizer.lr?"
    assert done.returncode == 1 and f"error: {message}" in said
    assert message in said.partition("Root Cause (first observed failure):")[2]


@pytest.mark.slow
def test_terminal_escape_sequences_in_input_are_printed_escaped(untied_folder, tmp_path, capfd):
    """An escape sequence could move the cursor, and write over what was said of the file."""
    escape, shown = "\x1b]0;title\x07\x9b2J\u202e", r"\x1b]0;title\x07\x9b2J\u202e"
    model = shutil.copytree(untied_folder, tmp_path / "model")
    save_file(load_file(model / SINGLE) | {f"x{escape}": torch.zeros(2)}, model / SINGLE, metadata={"format": "pt"})
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({f"keys{escape}": 1}) + "\n")
    checkpoint = ["--megatron-path", str(tmp_path / "megatron")]
    for words in (
        ["convert", "import", "--hf-model", str(model), *checkpoint],
        ["data", "pack", "--data", str(data), "--hf-model", str(model), "--output", str(tmp_path / "rows")],
        ["plan", "--model", f"8B{escape}", "--gpus", "8"],
    ):
        with contextlib.suppress(SystemExit):
            main(words)
        said = "".join(capfd.readouterr())
        assert shown in said and not set(escape) & set("\x1b\x07\x9b\u202e") & set(said), words


@pytest.mark.parametrize(("begin", "status"), [("", 120), ("terminal.escape_unprintable(); ", 0)])
def test_escape_unprintable_lets_process_exit_with_0_if_stderr_is_closed(begin, status):
    """Python's own is 120, if a library has written a part of a line that is still in the buffer."""
    reader, writer = os.pipe()
    os.close(reader)
    code = f"import sys; from qwen3vl_bridge import terminal; {begin}sys.stderr.write('a part')"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", code], stderr=writer, env=buffered)
    os.close(writer)
    assert done.returncode == status


GIB = 2**30
HERE = dict(
    python="3.12.1", glibc="2.39", cuda=None, nccl=None, driver=False, gpus=[], cores=2, memory=16 * GIB,
    memory_free=8 * GIB, shared_memory=8 * GIB, disk_free=100 * GIB, open_files=[65536, 65536],
)  # fmt: skip
VERSIONS = dict.fromkeys(doctor._OPTIONAL, "9.9") | {"torch": "2.13.0+cpu", "av": "12.1", "matplotlib": None}
WANTED = [Requirement(text) for text in ("torch>=2.6", "av>=12; extra == 'video'", "matplotlib>=3; extra == 'demo'")]


def missing(versions: dict | None = None, **changed) -> list[dict]:
    machine = HERE | changed
    machine["packages"] = doctor.packages(WANTED, machine["glibc"], (VERSIONS | (versions or {})).get)
    return doctor.list_missing(machine, "==3.12.*")


def test_doctor_packages_marks_required_packages_and_wrong_versions():
    found = {one["name"]: one for one in doctor.packages(WANTED, "2.39", (VERSIONS | {"av": "11.0"}).get)}
    assert found.keys() == {"torch", *doctor._OPTIONAL}
    assert found["torch"]["needed"] and found["torch"]["fits"] and found["torch"]["expected"] == ">=2.6"
    av = found["av"]
    assert (av["needed"], av["fits"], av["get"]) == (False, False, "pip install 'av>=12'")
    assert found["flash-attn"]["fits"] and not found["flash-attn"]["expected"]


@pytest.mark.parametrize(("changed", "message", "fatal"), [
    (dict(python="3.11.9"), "Python is 3.11.9, expected ==3.12.*", True),
    (dict(versions={"torch": "2.5.1"}), "torch is 2.5.1, expected >=2.6", True),
    (dict(versions={"torch": None}), "torch is not installed, expected >=2.6", True),
    (dict(versions={"av": "11.0"}), "av is 11.0, expected >=12 (for decoding video files)", False),
    (dict(versions={"megatron-energon": None}), "megatron-energon is not installed, expected any version", False),
    (dict(driver=True), "torch is built without CUDA", False),
    (dict(shared_memory=64 << 20), "/dev/shm has 0.06 GiB free", False),
    (dict(open_files=[1024, 65536]), "1024 open files are allowed", False),
])  # fmt: skip
def test_doctor_list_missing_reports_each_problem_as_fatal_or_not(changed, message, fatal):
    (one,) = missing(**changed)
    assert message in one["what"] and one["fatal"] == fatal and one["get"]


def test_doctor_list_missing_is_empty_if_there_is_no_problem():
    assert missing() == missing({"transformer-engine": None, "flash-attn": None}) == []


@pytest.mark.parametrize(
    ("glibc", "get"),
    [
        ("2.36", "needs glibc 2.39, this system has 2.36"),
        ("2.40", "pip install"),
        ("", "this system has another C library"),
    ],
)
def test_doctor_advice_on_nvidia_resiliency_ext_depends_on_glibc(glibc, get):
    (one,) = missing({"nvidia-resiliency-ext": None}, glibc=glibc)
    assert get in one["get"] and not one["fatal"] and ("pip" in one["get"]) == (glibc == "2.40")


def test_doctor_json_describes_this_machine(capsys, tmp_path):
    from qwen3vl_bridge.config.fields import default_transformer_impl

    import torch

    assert main(["doctor", "--json", "--path", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["works"] == {"conversion": True, "training": True}
    assert found["used"]["layer spec"].startswith(default_transformer_impl())
    assert found["used"]["collectives"].startswith("NCCL" if torch.cuda.is_available() else "gloo")
    assert len(found["machine"]["gpus"]) == torch.cuda.device_count()
    assert found["replaced"] == doctor._replaced()
    assert {"name": "megatron.core.optimizer._get_megatron_emerging_optimizer", "when": "always"} in found["replaced"]
    versions = {one["name"]: one["found"] for one in found["machine"]["packages"]}
    assert versions["megatron-core"] == importlib.metadata.version("megatron-core")
    assert 0 < found["machine"]["memory_free"] <= found["machine"]["memory"]
    assert main(["doctor", "--path", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_doctor_groups_replaced_functions_by_condition():
    names = ["megatron.core.a.torch", "megatron.core.b.torch", "torch.Tensor.cuda"]
    replaced = [{"name": name, "when": "without CUDA"} for name in names] + [{"name": "a.b", "when": "always"}]
    assert doctor._describe_replaced(replaced).splitlines() == [
        "", "without CUDA:", "  torch in every module of Megatron", "  torch.Tensor.cuda", "always:", "  a.b",
    ]  # fmt: skip


def test_doctor_shows_hardware_before_slow_imports(monkeypatch):
    told, seen = [], {}
    monkeypatch.setattr(doctor, "import_error", lambda *names: seen.update({names: len(told)}))
    doctor.examine(Path.cwd(), told.append)
    assert seen["torch",] == 1 and seen[doctor._MODULES["training"]] == len(told) == 2
    assert "megatron-core " in told[0] and "open files" in told[1]


def test_doctor_exits_with_code_1_if_training_cannot_be_imported(capsys, monkeypatch):
    original = doctor.import_error
    broken = "megatron.core: ImportError: undefined symbol"
    monkeypatch.setattr(doctor, "import_error", lambda *names: broken if len(names) > 1 else original(*names))
    assert doctor.main(["--path", str(Path.cwd())]) == 1
    said = capsys.readouterr().out
    assert f"training cannot be imported: {broken}" in " ".join(said.split())
    assert "conversion cannot work; training cannot work" in said and "layer spec" not in said


def test_doctor_import_error_returns_module_and_message(tmp_path, monkeypatch):
    (tmp_path / "built_for_another.py").write_text("raise OSError('libcudart.so.99: cannot open\\nlong story')")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.import_error("json") is None
    assert (
        doctor.import_error("json", "built_for_another") == "built_for_another: OSError: libcudart.so.99: cannot open"
    )


def test_doctor_exits_with_code_2_if_package_is_not_installed(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_PACKAGE", "no-such-package")
    assert doctor.main([]) == 2
    assert "error: No package metadata was found for no-such-package" in capsys.readouterr().err
