"""The commands of the README and of the pages it leads to run as they stand, on a tiny checkpoint."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from qwen3vl_bridge.models.qwen3_vl import presets

import pytest
from PIL import Image
from transformers import AutoProcessor

ROOT = Path(__file__).resolve().parents[1]
README, CONVERT, TRAIN, PYTHON, INSTALLING, ON_A_CPU = (
    (ROOT / page).read_text()
    for page in ("README.md", "docs/convert.md", "docs/train.md", "docs/python.md", "requirements/README.md",
                 "docs/quickstart_cpu.md")
)  # fmt: skip


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a language on a page."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def block(page: str, language: str) -> str:
    """The only one."""
    (only,) = blocks(page, language)
    return only


def run(command: str, **variables: str) -> str:
    """Run one command from the root, and return its last line on standard error."""
    words = shlex.split(command.replace("\\\n", " "))
    starts = {"python": [], "torchrun": ["-m", "torch.distributed.run"], "qwen3vl": ["-m", "qwen3vl_bridge"]}
    start = starts[words[0]]
    done = subprocess.run(
        [sys.executable, *start, *words[1:]], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return (done.stderr.splitlines() or [""])[-1]


@pytest.fixture(scope="module")
def places(tmp_path_factory, untied_folder) -> dict[str, str]:
    from examples.digits.dataset import make_dataset

    folder = tmp_path_factory.mktemp("readme")
    make_dataset(folder / "data")
    names = {"HF_FOLDER": untied_folder, "DATA": folder / "data"}
    names |= {name: folder / name.lower() for name in ("MEGATRON", "EXPORTED", "TORCH_DIST", "RUN", "REPORT", "ROWS")}
    names["IMAGE"] = next((folder / "data" / "images").iterdir())
    return {name: str(path) for name, path in names.items()}


def fill(text: str, places: dict[str, str]) -> str:
    return re.sub(r"\b(" + "|".join(places) + r")\b", lambda found: places[found[0]], text)


@pytest.mark.slow
def test_convert_then_fine_tune(places):
    commands, _ = blocks(CONVERT, "bash")
    for command in fill(commands, places).strip().splitlines():
        run(command)
    assert (Path(places["EXPORTED"]) / "config.json").exists()
    command, see, pack = (fill(text, places) for text in blocks(TRAIN, "bash"))
    run(see)
    assert "<html" in Path(f"{places['REPORT']}.html").read_text()
    run(pack)
    assert "train.train_iters=400" in command and "`dataset.train_packing=ROWS`" in TRAIN
    packed = f"train.train_iters=2 scheduler.lr_warmup_iters=1 dataset.train_packing={places['ROWS']}"
    run(command.replace("train.train_iters=400", f"{packed} dataset.balance_over=2"))
    assert (Path(places["RUN"]) / "iter_0000002").is_dir()


@pytest.mark.slow
def test_the_readmes_commands(places):
    """Its console blocks; those that need GPUs as a dry run."""
    places = places | {name: f"{places[name]}_of_the_readme" for name in ("MEGATRON", "EXPORTED", "REPORT", "RUN")}
    demo, inspect, on_a_cpu, *trainings, convert = blocks(README, "console")
    assert on_a_cpu in blocks(ON_A_CPU, "bash")  # the next test
    assert demo.startswith(".venv/bin/python examples/digits/demo.py --hf-model ")  # tests/examples/test_demo.py
    # The container itself was not built.
    image = fill(block(INSTALLING, "console"), places)
    run(image.split("qwen3vl-bridge-nemo", 1)[1].strip(" \\\n") + " --dry-run --gpus 1")
    for command in fill(convert, places).strip().splitlines():
        run(command)
    assert (Path(places["EXPORTED"]) / "config.json").exists()
    run(fill(inspect, places))
    assert "<html" in Path(f"{places['REPORT']}.html").read_text()
    assert len(trainings) == 3
    for command, gpus in zip(trainings, (1, 8, 64), strict=True):
        words = fill(command, places).replace("\\\n", " ")
        words = re.sub(r"^torchrun .*?-m qwen3vl_bridge", "qwen3vl", words)
        run(f"{words.strip()} --dry-run --gpus {gpus}")


@pytest.mark.slow
def test_own_records_on_a_cpu(places, tmp_path):
    command = next(text for text in blocks(ON_A_CPU, "bash") if text.startswith("qwen3vl train"))
    here = {"out/digits/hf": "HF_FOLDER", "FILE.jsonl": "DATA/train.jsonl", " RUN ": f" {tmp_path / 'run'} "}
    for text, other in here.items():
        command = command.replace(text, other)
    said = run(fill(command, places))
    assert (tmp_path / "run" / "iter_0000020").is_dir()
    assert said == f"to export: qwen3vl convert export --megatron-path {tmp_path / 'run'} --hf-path EXPORTED"
    run(said.removeprefix("to export: ").replace("EXPORTED", str(tmp_path / "exported")))
    assert (tmp_path / "exported" / "config.json").is_file()


@pytest.mark.slow
def test_one_node_of_gpus(places):
    """As far as a machine without any can see: the settings and the plan."""
    command, _ = blocks(TRAIN, "console")
    command = fill(command, places).replace("torchrun --nproc_per_node 8 --shutdown-timeout 600", "python")
    run(f"{command.strip()} --dry-run --gpus 8")


@pytest.mark.slow
def test_adapters_of_a_run(places, untied_folder, tmp_path):
    _, commands = blocks(TRAIN, "console")
    said = run(
        f"python recipes/finetune.py --recipe qwen3_vl_8b_peft_config --hf-model {untied_folder} "
        f"--data-path {places['DATA']} --save {tmp_path / 'run'} train.train_iters=1 scheduler.lr_warmup_iters=0 "
        "train.global_batch_size=2 model.seq_length=128 dataset.seq_length=128 dataset.num_workers=0 "
        "validation.eval_iters=0 peft.dim=4"
    )
    assert said == f"to export: qwen3vl adapters export --megatron-path {tmp_path / 'run'} --hf-path ADAPTER"
    here = {"RUN": str(tmp_path / "run"), "ADAPTER": str(tmp_path / "adapter"), "MERGED": str(tmp_path / "merged")}
    for command in fill(commands, here).strip().splitlines():
        run(command)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert (tmp_path / "merged" / "model.safetensors.index.json").exists() or (
        tmp_path / "merged" / "model.safetensors"
    ).exists()


@pytest.fixture
def own_script(places, monkeypatch):
    """Runs the README's script under a name; what it gave to Megatron-Bridge's loop, which would need CUDA."""
    calls = []

    def finetune(cfg, forward_step, callbacks):
        calls.append((cfg, forward_step, callbacks))

    monkeypatch.setitem(sys.modules, "megatron.bridge.training.finetune", SimpleNamespace(finetune=finetune))

    def run_as(name: str) -> list:
        exec(fill(block(TRAIN, "python"), places), {"__name__": name})
        return calls

    return run_as


def test_a_script_of_ones_own(own_script):
    import qwen3vl_bridge
    from qwen3vl_bridge.training.process_groups import shutdown

    from qwen3vl_recipes.dry_run import finalised

    shutdown()  # groups of other tests
    ((cfg, forward_step, callbacks),) = own_script("__main__")
    assert finalised(cfg, 8).data_parallel_size == 4
    assert forward_step is qwen3vl_bridge.forward_step and len(callbacks) == 5


def test_a_script_of_ones_own_does_nothing_in_the_process_that_saving_starts(own_script):
    """Which imports it under this name."""
    assert own_script("__mp_main__") == []


@pytest.mark.slow
def test_a_script_of_ones_own_runs_as_printed(places, tmp_path):
    """Offline, on two processes."""
    (tmp_path / "script.py").write_text(fill(block(TRAIN, "python"), places | {"RUN": str(tmp_path / "run")}))
    run(f"torchrun --nproc_per_node 2 {tmp_path / 'script.py'}", HF_HUB_OFFLINE="1")
    (checkpoint,) = (tmp_path / "run").glob("iter_*")
    config = json.loads((checkpoint / "run_data.json").read_text())
    assert config["data"]["seq_length"] == 2048 and (checkpoint / "hf" / "tokenizer.json").is_file()


@pytest.mark.slow
def test_convert_by_several_processes(places, moe_folder, tmp_path):
    _, command = blocks(CONVERT, "bash")
    instead = {"--nproc_per_node 8": "--nproc_per_node 2", "--ep 8": "--ep 2", " MEGATRON": f" {tmp_path / 'megatron'}"}
    for text, other in {"Qwen/Qwen3-VL-30B-A3B-Instruct": str(moe_folder), **instead}.items():
        assert text in command
        command = command.replace(text, other)
    run(command)
    assert (tmp_path / "megatron" / "iter_0000000" / "run_config.yaml").exists()


def test_the_data_line_is_a_conversation_our_data_path_reads(places):
    from qwen3vl_bridge.data import open_source

    file = Path(places["DATA"]) / "readme.jsonl"
    picture = next((Path(places["DATA"]) / "images").iterdir()).name
    file.write_text(block(TRAIN, "json").replace("0001.png", picture))
    assert open_source(file)[0].images


def test_python(untied_folder, tmp_path, monkeypatch):
    """The blocks one after the other, as a reader would run them."""
    import torch

    monkeypatch.chdir(tmp_path)
    processor = AutoProcessor.from_pretrained(untied_folder)
    picture = Image.new("RGB", (64, 64), "gray")
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "Which digit is this?"}]
    messages = [{"role": "user", "content": content}]
    inputs = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    names = {
        "processor": processor, "messages": messages, "loss_mask": torch.ones_like(inputs["input_ids"]),
        **{name: inputs[name] for name in ("input_ids", "pixel_values", "image_grid_thw")},
    }  # fmt: skip
    for code in blocks(PYTHON, "python"):
        exec(code.replace("Qwen/Qwen3-VL-8B-Instruct", str(untied_folder)), names)
    assert names["losses"].shape == names["input_ids"].shape and names["loss"].isfinite()
    assert 0 < names["answer"].shape[1] - names["inputs"]["input_ids"].shape[1] <= 64
    assert (tmp_path / "exported" / "config.json").exists() and (tmp_path / "merged" / "config.json").exists()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    count = re.search(r"parameter_count\(\"235B-A22B\"\)  # (\d+)", PYTHON)[1]
    assert presets.parameter_count("235B-A22B") == int(count)
