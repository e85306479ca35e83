"""Commands and code of the README and the pages run as printed, on a tiny checkpoint."""

import json
import logging
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from qwen3vl_bridge.cli import data as data_command
from qwen3vl_bridge.cli import main as program
from qwen3vl_bridge.cli.plan import main as plan_command
from qwen3vl_bridge.data import DataError, open_source
from qwen3vl_bridge.data.conversations import Columns, parse_conversation
from qwen3vl_bridge.data.mixture import read_mixture
from qwen3vl_bridge.data.objectives import columns_for
from qwen3vl_bridge.data.pairs import PairColumns
from qwen3vl_bridge.models.common import provider
from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.upstream import library_logs

import pytest
import torch
from PIL import Image
from qwen3vl_recipes import paths, qwen3_vl_8b_sft_config
from qwen3vl_recipes.cli import _parse, _parser
from qwen3vl_recipes.overrides import apply
from qwen3vl_recipes.registry import find, recipes
from transformers import AutoProcessor

from tests.data.conftest import checkpoint, picture, processor, write  # noqa: F401  fixtures
from tests.data.test_videos import clip
from tests.docs.pages import PAGES, ROOT, blocks, commands, read, section
from tests.frameworks.modelopt.quantized import tensors_in
from tests.frameworks.modelopt.support import make_larger
from tests.helpers.batches import make_samples
from tests.helpers.receipts import receipts
from tests.models import test_toy_family
from tests.parity.conftest import make_pair
from tests.training.running import Inputs, replicated, train

README, QUICKSTART, TRAIN, CONVERT, RECIPES, SCALING, DATA, CALLERS, EVALUATION, OBJECTIVES = (
    PAGES[page]
    for page in (
        *("README.md", "docs/quickstart.md", "docs/train.md", "docs/convert.md", "docs/recipes.md", "docs/scaling.md"),
        *("docs/data.md", "docs/callers.md", "docs/evaluation.md", "docs/objectives.md"),
    )
)


def run(command: str, **variables: str) -> str:
    """Run a command from the root of the repository and return its last line on standard error."""
    words = shlex.split(command.replace("\\\n", " "))
    starts = {"python": [], "torchrun": ["-m", "torch.distributed.run"], "qwen3vl": ["-m", "qwen3vl_bridge"]}
    done = subprocess.run(
        [sys.executable, *starts[words[0]], *words[1:]], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return (done.stderr.splitlines() or [""])[-1]


def only(page: str, language: str, beginning: str = "") -> str:
    """Return the block of a language that begins so."""
    (found,) = [block for block in blocks(page, language) if block.startswith(beginning)]
    return found


@pytest.fixture(scope="module")
def places(tmp_path_factory, untied_folder) -> dict[str, str]:
    from qwen3vl_bridge.testing.digits import make_dataset

    folder = tmp_path_factory.mktemp("pages")
    make_dataset(folder / "data", objectives=True)
    names = {"HF_FOLDER": untied_folder, "DATA": folder / "data"}
    names |= {
        name: folder / name.lower()
        for name in ("MEGATRON", "EXPORTED", "TORCH_DIST", "RUN", "REPORT", "ROWS", "SCORES")
    }
    names["PAIRS"] = folder / "data" / "pairs"
    names["IMAGE"] = next((folder / "data" / "images").iterdir())
    return {name: str(path) for name, path in names.items()}


def fill(text: str, places: dict[str, Any]) -> str:
    return re.sub(r"\b(" + "|".join(places) + r")\b", lambda found: str(places[found[0]]), text)


# README.md, docs/quickstart.md, docs/tutorial.md


@pytest.mark.slow
def test_readme_commands_run(places):
    places = places | {name: f"{places[name]}_of_the_readme" for name in ("MEGATRON", "EXPORTED", "REPORT", "RUN")}
    demo, inspect, on_a_cpu, *trainings, convert = blocks(README, "console")
    assert on_a_cpu in blocks(QUICKSTART, "bash")  # which test_quickstart_page_training_on_a_cpu_runs runs
    assert demo.startswith(".venv/bin/python examples/digits/demo.py --hf-model ")  # tests/examples/test_demo.py
    (image,) = blocks(read("requirements/README.md"), "console")
    run(fill(image, places).split("qwen3vl-bridge-nemo", 1)[1].strip(" \\\n") + " --dry-run --gpus 1")
    for command in fill(convert, places).strip().splitlines():
        run(command)
    assert (Path(places["EXPORTED"]) / "config.json").exists()
    run(fill(inspect, places))
    assert "<html" in Path(f"{places['REPORT']}.html").read_text()
    for command, gpus in zip(trainings, (1, 8, 64), strict=True):
        words = fill(command, places).replace("\\\n", " ")
        words = re.sub(r"^torchrun .*?-m qwen3vl_bridge", "qwen3vl", words)
        run(f"{words.strip()} --dry-run --gpus {gpus}")


def test_readme_plan_commands_run(capsys):
    lines = blocks(section(README, "Plan"), "bash")[0].strip().splitlines()
    for line in [*lines, *blocks(section(SCALING, "Choose a layout"), "bash")[0].strip().splitlines()]:
        assert line.startswith("qwen3vl plan ")
        assert plan_command(shlex.split(line)[2:]) == 0
    assert "GiB" in capsys.readouterr().out


def test_readme_venv_activation_puts_qwen3vl_and_torchrun_on_path():
    command = next(line for line in blocks(README, "bash")[0].splitlines() if line.startswith("source "))
    if not (ROOT / command.split()[1]).is_file():
        pytest.skip("there is no .venv: this is another environment")
    done = subprocess.run(
        ["bash", "-c", f"{command}\ntype -p qwen3vl torchrun"], cwd=ROOT, capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stdout.split() == [str(ROOT / ".venv/bin" / name) for name in ("qwen3vl", "torchrun")]


@pytest.mark.slow
def test_quickstart_page_training_on_a_cpu_runs(places, tmp_path):
    command = only(QUICKSTART, "bash", "qwen3vl train")
    instead = {"out/digits/hf": "HF_FOLDER", "FILE.jsonl": "DATA/train.jsonl", " RUN ": f" {tmp_path / 'run'} "}
    for text, other in instead.items():
        command = command.replace(text, other)
    last = run(fill(command, places))
    assert (tmp_path / "run" / "iter_0000020").is_dir()
    assert last == f"to export: qwen3vl convert export --megatron-path {tmp_path / 'run'} --hf-path EXPORTED"
    run(last.removeprefix("to export: ").replace("EXPORTED", str(tmp_path / "exported")))
    assert (tmp_path / "exported" / "config.json").is_file()


def test_quickstart_page_commands_occur_on_pages_with_tested_commands():
    tested = {line for page in (README, CONVERT, TRAIN) for line in commands(page)}
    for command in commands(QUICKSTART):
        assert command in tested or command.startswith(("qwen3vl train ", "make ")), command


@pytest.mark.slow
def test_tutorial_page_commands_run(places, tmp_path):
    """All but the first block, which is `make demo`; the run is shortened to two steps."""
    instead = {"out/digits/hf": places["HF_FOLDER"], "out/digits/data": places["DATA"]}
    instead |= {name: str(tmp_path / name) for name in ("out/digits/megatron", "RUN", "EXPORTED", "REPORT")}
    for command in "".join(blocks(PAGES["docs/tutorial.md"], "console")).replace("\\\n", " ").splitlines():
        for text, other in instead.items():
            command = re.sub(rf"\b{text}\b", other, command)
        run(f"{command} train.train_iters=2 scheduler.lr_warmup_iters=1" if " train " in command else command)
    assert (tmp_path / "EXPORTED" / "config.json").is_file()


# docs/convert.md, docs/train.md


@pytest.mark.slow
def test_convert_and_train_page_commands_run(places):
    conversions, _ = blocks(CONVERT, "bash")
    for command in fill(conversions, places).strip().splitlines():
        run(command)
    assert (Path(places["EXPORTED"]) / "config.json").exists()
    command = fill(only(TRAIN, "bash"), places)
    pack = f"qwen3vl data pack --data {places['DATA']}/train.jsonl --hf-model {places['HF_FOLDER']} --seq-length 512"
    run(f"{pack} --output {places['ROWS']}")
    packed = f"train.train_iters=2 scheduler.lr_warmup_iters=1 dataset.train_packing={places['ROWS']}"
    assert "train.train_iters=400" in command
    run(command.replace("train.train_iters=400", f"{packed} dataset.balance_over=2"))
    assert (Path(places["RUN"]) / "iter_0000002").is_dir()


@pytest.mark.slow
def test_convert_page_command_for_several_processes_runs(moe_folder, tmp_path):
    _, command = blocks(CONVERT, "bash")
    instead = {"--nproc_per_node 8": "--nproc_per_node 2", "--ep 8": "--ep 2", " MEGATRON": f" {tmp_path / 'megatron'}"}
    for text, other in {"Qwen/Qwen3-VL-30B-A3B-Instruct": str(moe_folder), **instead}.items():
        assert text in command
        command = command.replace(text, other)
    run(command)
    assert (tmp_path / "megatron" / "iter_0000000" / "run_config.yaml").exists()


@pytest.mark.slow
def test_train_page_commands_for_gpus_pass_dry_run(places):
    full, lora, _ = blocks(TRAIN, "console")
    run(
        fill(full, places).replace("torchrun --nproc_per_node 8 --shutdown-timeout 600", "python")
        + " --dry-run --gpus 8"
    )
    run(fill(re.sub(r"^torchrun .*?-m qwen3vl_bridge", "qwen3vl", lora.strip()), places) + " --dry-run --gpus 8")


@pytest.mark.slow
def test_train_page_adapter_commands_export_and_merge_adapters_of_run(places, untied_folder, tmp_path):
    _, _, adapters = blocks(TRAIN, "console")
    last = run(
        f"python recipes/finetune.py --recipe qwen3_vl_8b_peft_config --hf-model {untied_folder} "
        f"--data-path {places['DATA']} --save {tmp_path / 'run'} train.train_iters=1 scheduler.lr_warmup_iters=0 "
        "train.global_batch_size=2 model.seq_length=128 dataset.seq_length=128 dataset.num_workers=0 "
        "validation.eval_iters=0 peft.dim=4"
    )
    assert last == f"to export: qwen3vl adapters export --megatron-path {tmp_path / 'run'} --hf-path ADAPTER"
    here = {"RUN": tmp_path / "run", "ADAPTER": tmp_path / "adapter", "MERGED": tmp_path / "merged"}
    for command in fill(adapters, here).strip().splitlines():
        run(command)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert list((tmp_path / "merged").glob("model*.safetensors"))


def test_train_page_muon_settings_are_accepted():
    settings = " ".join(text for text in blocks(TRAIN, "text") if text.startswith("optimizer.optimizer=muon")).split()
    cfg = apply(qwen3_vl_8b_sft_config(), settings)
    assert cfg.optimizer.optimizer == "muon" and not cfg.optimizer.use_distributed_optimizer


SCRIPT, *PYTHON = blocks(TRAIN, "python")


@pytest.fixture
def run_script(places, monkeypatch):
    """Run the script of docs/train.md under a name; Megatron-Bridge's loop, which would need CUDA, is recorded."""
    calls = []

    def finetune(cfg, forward_step, callbacks):
        calls.append((cfg, forward_step, callbacks))

    monkeypatch.setitem(sys.modules, "megatron.bridge.training.finetune", SimpleNamespace(finetune=finetune))

    def run_as(name: str) -> list:
        exec(fill(SCRIPT, places), {"__name__": name})
        return calls

    return run_as


def test_train_page_script_builds_valid_run_config(run_script):
    import qwen3vl_bridge
    from qwen3vl_bridge.training.process_groups import shutdown

    from qwen3vl_recipes.dry_run import finalize_copy

    shutdown()  # groups of other tests
    ((cfg, forward_step, callbacks),) = run_script("__main__")
    assert finalize_copy(cfg, 8).data_parallel_size == 4
    assert forward_step is qwen3vl_bridge.forward_step and len(callbacks) == 5


def test_train_page_script_starts_no_run_if_imported_by_spawned_process(run_script):
    assert run_script("__mp_main__") == []


@pytest.mark.slow
def test_train_page_script_runs_offline_on_two_processes(places, tmp_path):
    (tmp_path / "script.py").write_text(fill(SCRIPT, places | {"RUN": str(tmp_path / "run")}))
    run(f"torchrun --nproc_per_node 2 {tmp_path / 'script.py'}", HF_HUB_OFFLINE="1")
    (iteration,) = (tmp_path / "run").glob("iter_*")
    config = json.loads((iteration / "run_data.json").read_text())
    assert config["data"]["seq_length"] == 2048 and (iteration / "hf" / "tokenizer.json").is_file()


def test_evaluation_page_commands_run_on_example_record_of_page(untied_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("test.jsonl").write_text(only(EVALUATION, "json"))
    Image.new("RGB", (64, 64), "gray").save("IMAGE.png")
    generate, evaluate = blocks(EVALUATION, "console")
    first, sampled, _ = generate.replace("\\\n", " ").splitlines()
    for line in (first, sampled.replace("--megatron-path MEGATRON", ""), *evaluate.splitlines()):
        words = shlex.split(line.replace("HF_FOLDER", str(untied_folder)).replace("IMAGE", "IMAGE.png"))
        at = words.index("--max-new-tokens") if "--max-new-tokens" in words else len(words)
        assert program.main([*words[1:at], *words[at + 2 :], "--max-new-tokens", "2"]) == 0
    assert json.loads(Path("answers.jsonl").read_text())["references"] == ["7", "seven"]


def test_train_page_and_evaluation_page_python_blocks_run(untied_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hf_processor = AutoProcessor.from_pretrained(untied_folder)
    content = [{"type": "image", "image": Image.new("RGB", (64, 64), "gray")}, {"type": "text", "text": "Which digit?"}]
    messages = [{"role": "user", "content": content}]
    batch = hf_processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    names = {
        "processor": hf_processor, "messages": messages, "loss_mask": torch.ones_like(batch["input_ids"]),
        **{name: batch[name] for name in ("input_ids", "pixel_values", "image_grid_thw")},
    }  # fmt: skip
    for code in (*PYTHON, only(EVALUATION, "python")):
        exec(code.replace("Qwen/Qwen3-VL-8B-Instruct", str(untied_folder)), names)
    assert names["losses"].shape == names["input_ids"].shape and names["loss"].isfinite()
    assert 0 < names["answer"].shape[1] - names["inputs"]["input_ids"].shape[1] <= 64
    assert (tmp_path / "exported" / "config.json").exists() and (tmp_path / "merged" / "config.json").exists()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert all(callable(getattr(library_logs, name)) for name in ("quiet", "quiet_libraries", "without_prints"))
    count = re.search(r"parameter_count\(\"235B-A22B\"\)  # (\d+)", TRAIN)[1]
    assert presets.parameter_count("235B-A22B") == int(count)


# docs/recipes.md, docs/scaling.md, docs/add_a_family.md


def test_recipes_page_example_recipe_is_found_and_built(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_recipes.py").write_text(only(RECIPES, "python"))
    found = find(re.search(r"--recipe (my_recipes.py:\w+)", RECIPES)[1])
    assert (found.gpus, found.gpu) == (16, "H200")
    assert found.summary == "Full fine-tuning of the 8B on rows of 4K tokens."
    cfg = found()
    assert cfg.model.seq_length == cfg.dataset.seq_length == 4096 and cfg.train.global_batch_size == 64


SLURM = only(RECIPES, "bash")
# Starts a command on each node, as srun does with one task per node.
SRUN = """#!/bin/bash
for node in $(seq "$SLURM_NNODES"); do "$@" & tasks="$tasks $!"; done
for task in $tasks; do wait "$task" || exit 1; done
"""


@pytest.mark.slow
def test_recipes_page_slurm_script_starts_one_run_on_two_nodes(tmp_path, untied_folder, digits):
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\necho 127.0.0.1\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    short = (
        "train.train_iters=2 scheduler.lr_warmup_iters=0 train.global_batch_size=2 validation.eval_iters=0 "
        "model.seq_length=128 dataset.seq_length=128 dataset.num_workers=0"
    )
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    script = SLURM
    for text, other in {
        "--nproc_per_node 8": "--nproc_per_node 1",
        ":29500": f":{port}",
        "qwen3_vl_8b_pretrain_config": f"qwen3_vl_digits_sft_config --hf-model {untied_folder} {short}",
        "--data-path DATA": f"--data-path {digits}",
        "--save RUN": f"--save {tmp_path / 'run'}",
    }.items():
        assert text in script
        script = script.replace(text, other)
    (tmp_path / "job").write_text(script)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm = dict(SLURM_JOB_NODELIST="node[1-2]", SLURM_NNODES="2", SLURM_JOB_ID="77", OMP_NUM_THREADS="1", PATH=path)
    done = subprocess.run(
        ["bash", tmp_path / "job"], cwd=ROOT, env=os.environ | slurm, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    ranks = {path.name.split("_")[2] for path in (tmp_path / "run" / "iter_0000002").glob("*.distcp")}
    assert ranks == {"0", "1"}


def test_recipes_page_slurm_script_resources_match_torchrun_and_recipe():
    from torch.distributed.run import get_args_parser

    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", SLURM, re.MULTILINE))
    (line,) = (line for line in SLURM.replace("\\\n", " ").splitlines() if line.startswith("srun torchrun "))
    options = get_args_parser().parse_args(shlex.split(line.replace("$SLURM_NNODES", directives["nodes"]))[2:])
    signal_name, _, seconds = directives.pop("signal").partition("@")
    # A requeued job has the same number and file: it must not overwrite the log.
    assert directives.pop("output") == "%x-%j.out" and directives.pop("open-mode") == "append"
    assert "\n#SBATCH --requeue\n" in SLURM
    assert directives == {"nodes": options.nnodes, "ntasks-per-node": "1", "gpus-per-node": options.nproc_per_node}
    assert options.training_script == "recipes/pretrain.py" and (ROOT / options.training_script).is_file()
    ours = _parse(_parser(""), options.training_script_args)
    assert ours.data_path and ours.save and not ours.settings
    recipe = recipes()[ours.recipe]
    assert int(options.nnodes) * int(options.nproc_per_node) == recipe.gpus
    # The run gets the signal on which it saves, no later than torchrun needs to wait for it.
    settings = recipe().train
    assert settings.exit_signal_handler and settings.exit_signal == getattr(signal, f"SIG{signal_name}")
    assert int(seconds) >= options.shutdown_timeout > 30


def test_scaling_page_flops_example_prints_stated_number(capsys):
    code = next(block for block in blocks(SCALING, "python") if "tower_costs" in block)
    exec(code)
    assert capsys.readouterr().out.strip() == code.rsplit("# ", 1)[1].strip()


def test_add_a_family_page_code_equals_tested_toy_family():
    page = PAGES["docs/add_a_family.md"]
    assert only(page, "python") == test_toy_family.REGISTER
    assert shlex.split(only(page, "bash")) == test_toy_family.CONVERT


# docs/objectives.md


def test_objectives_page_records_are_pairs_with_same_answers():
    pairs, labeled, retrieval = (
        [json.loads(line) for line in block.splitlines()] for block in blocks(OBJECTIVES, "json")
    )
    for kind, records in (("kto", labeled), ("embedding", retrieval), ("reranker", retrieval)):
        for record in records:
            own = columns_for(kind, Columns()).convert_record(record, "page")
            assert own["messages"] and (own.is_desirable is not None) == (kind == "kto")
    records, columns = pairs, PairColumns()
    pairs = [parse_conversation(columns.convert_record(record, "page"), "page", Path()) for record in records]
    said = {tuple(one.messages[-1]["content"] for one in pair.documents) for pair in pairs}
    assert len(pairs) == 5 and said == {("Seven.", "One.")}


@pytest.mark.slow
def test_objectives_page_commands_run(places, tmp_path):
    places = places | {"RUN": f"{places['RUN']}_on_pairs"}
    (first,), (inspect, score, digits, rerank) = blocks(OBJECTIVES, "console"), blocks(OBJECTIVES, "bash")
    run(f"{fill(first, places).strip()} --dry-run --gpus 1 dataset.media_root={places['DATA']}")
    run(fill(inspect, places))
    for command in fill(score, places).replace("\\\n", " ").strip().splitlines():
        run(command)
    log = [json.loads(line) for line in Path(places["RUN"], "metrics.jsonl").read_text().splitlines()]
    assert log[0]["trained_pairs"] > 0 and "rewards/margins" in log[0]

    def commands(block: str) -> list[str]:
        for path, name in (("hf_finetuned", "HF_FOLDER"), ("data", "DATA")):
            block = block.replace(f"out/digits/{path}", places[name])
        return block.replace("out/digits", str(tmp_path)).replace("\\\n", " ").strip().splitlines()

    for block, last in ((digits, "--samples 2 --max-new-tokens 2"), (rerank, "--records 4")):
        train_command, export, evaluate = commands(block)
        run(f"{train_command} train.train_iters=2 scheduler.lr_warmup_iters=1 validation.eval_iters=0")
        run(export)
        run(f"{evaluate} {last}")


# docs/data.md

BLOCKS = re.findall(r"```(json|bash|console)\n(.*?)```", DATA, re.DOTALL)
# Each record, with the command that follows it, if there is one.
EXAMPLES = [
    (json.loads(text), following[1] if following[0] == "bash" else None)
    for (kind, text), following in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True)
    if kind == "json"
]
THINKING = ROOT / "tests/data/thinking_template.jinja"
_MATHS = {
    "problem": "Half of 8?", "generated_solution": "Halve 8: $\\boxed{4}$", "expected_answer": "4",
    "problem_source": "augmented_math",
}  # fmt: skip
# A record of each named format.
NAMED: dict[str, dict[str, Any]] = {
    "cord_v2": {
        "image": "images/1.png",
        "ground_truth": json.dumps({
            "gt_parse": {"menu": [{"nm": "Tea", "price": "3"}], "total": {"total_price": "3"}},
        }),
    },
    "rdr": {"image": "images/1.png", "text": "A bolt, M8."},
    "medpix": {"image_id": "images/1.png", "question": "Which organ?", "answer": "A lung."},
    "raven": {
        "images": ["images/1.png", "images/1.png"],
        "texts": [{"user": "Which figure comes next?", "assistant": "B.", "source": "RAVEN"}],
    },
    "llava_video_178k": {
        "id": "1", "data_source": "0_30_s_nextqa", "video": "videos/1.mkv",
        "conversations": [{"from": "human", "value": "<image>\nWhat is shown?"}, {"from": "gpt", "value": "A dog."}],
    },
    "squad": {
        "id": "1", "title": "Tea", "context": "Tea is hot.", "question": "What is hot?",
        "answers": {"text": ["Tea"], "answer_start": [0]},
    },
    "gsm8k": {"question": "One and two?", "answer": "They are three.\n#### 3"},
    "openmathinstruct2": _MATHS, "openmathinstruct2_thinking": _MATHS,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    picture(tmp_path / "images" / "1.png", 32, 32)
    (tmp_path / "videos").mkdir()
    clip(tmp_path / "videos" / "1.mkv", 4)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def inspected(command: str, hf: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """Run a `qwen3vl data inspect` command and return the number of samples."""
    words = shlex.split(command.replace("\\\n", " ").replace("HF_FOLDER", str(hf)))
    assert words[:3] == ["qwen3vl", "data", "inspect"]
    assert data_command.main([*words[2:], "--json", "--no-progress"]) == 0
    return json.loads(capsys.readouterr().out)["num_samples"]


@pytest.mark.parametrize(("record", "command"), EXAMPLES, ids=[str(number) for number in range(len(EXAMPLES))])
def test_data_page_example_record_is_read_by_command_next_to_it(folder, checkpoint, capsys, record, command):  # noqa: F811
    path = write(folder / "train.jsonl", [record])
    if command is None:
        assert len(open_source(path)[0].images) == json.dumps(record).count("images/1.png")
        return
    assert inspected(command, checkpoint, capsys) == 1
    with pytest.raises(DataError):  # without the command's options
        open_source(path)[0]


@pytest.mark.parametrize("name", NAMED)
def test_data_page_record_of_each_schema_adapter_is_read(folder, checkpoint, capsys, name):  # noqa: F811
    path = write(folder / "train.jsonl", [NAMED[name]])
    if name.endswith("_thinking"):  # needs a template that renders reasoning
        checkpoint = shutil.copytree(checkpoint, folder / "hf")
        shutil.copyfile(THINKING, checkpoint / "chat_template.jinja")
    (command,) = [text for kind, text in BLOCKS if kind == "bash" and "--schema-adapter" in text]
    assert inspected(command.replace("cord_v2", name), checkpoint, capsys) == 1
    if name not in ("gsm8k", "raven"):  # whose records can also be read without a name
        with pytest.raises(DataError):
            open_source(path)[0]


def test_data_page_lists_every_tested_schema_adapter():
    assert re.findall(r"^\| `(\w+)` \| .* \| .* \| .* \|$", DATA, re.MULTILINE) == list(NAMED)


def test_data_page_training_commands_have_valid_dataset_settings():
    lines = "".join(text for kind, text in BLOCKS if kind == "console").replace("\\\n", " ").splitlines()
    settings = [[word for word in shlex.split(line) if word.startswith("dataset.")] for line in lines]
    for words in settings:
        apply(qwen3_vl_8b_sft_config(), words)
    cfg = apply(qwen3_vl_8b_sft_config(), settings[0])
    assert (cfg.dataset.columns.question, cfg.dataset.columns.answer) == (r"{query}\nAnswer briefly.", "{label[0]}")


def test_data_page_mixture_yaml_examples_are_read(tmp_path):
    found = []
    for text in blocks(DATA, "yaml"):
        (tmp_path / "mixture.yaml").write_text(text)
        found.append(read_mixture(str(tmp_path / "mixture.yaml")))
    shares, (first, second) = found
    assert first.schema_adapter == "cord_v2" and second.columns.answer == "{label[0]}"
    assert [(one.name, one.weight) for one in shares] == [("llava", 3), ("docs", 1), ("receipts", 0.5)]


def walk(beginning: str, hf: Path) -> list[list[str]]:
    """Return the commands of an example, without the download."""
    text = next(text for kind, text in BLOCKS if kind == "console" and text.startswith(f"hf download {beginning}"))
    lines = [shlex.split(line.replace("HF_FOLDER", str(hf))) for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line[0] in ("qwen3vl", "torchrun")]


def training_data(words: list[str], hf: Path) -> Any:
    """Return the data of a training command's run."""
    options = dict(pairwise(words))
    assert (options["--recipe"], options["--hf-model"]) == ("qwen3_vl_8b_sft_config", str(hf))
    cfg = qwen3_vl_8b_sft_config()
    cfg.dataset.hf_processor_path = options["--hf-model"]
    apply(cfg, [word for word in words if word.startswith("dataset.")])
    paths.check_data(cfg)
    cfg.dataset.finalize()
    return cfg.dataset.for_context_parallel(cfg.model.context_parallel_size)


def test_data_page_llava_example_runs(tmp_path, checkpoint, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    records = []
    for number, words in enumerate(("Seven.", "seven " * 9000, "Six.", "Five.")):
        name = f"{number:012}.jpg"
        if number < 3:
            picture(tmp_path / "LLAVA/train2017" / name, 64, 64)
        turns = [{"from": "human", "value": "<image>\nWhich digit?"}, {"from": "gpt", "value": words}]
        records.append({"id": name[:-4], "image": name, "conversations": turns})
    (tmp_path / "LLAVA/llava_instruct_150k.json").write_text(json.dumps(records))

    inspect, pack, training = walk("liuhaotian/LLaVA", checkpoint)
    assert data_command.main([*inspect[2:], "--no-progress"]) == 1  # one record has no image
    assert data_command.main([*pack[2:], "--workers", "0", "--no-progress"]) == 0
    assert "4, of them 2 dropped and 0 cut" in capsys.readouterr().out
    row = training_data(training, checkpoint).rows("train")[0]
    assert sorted(sample.sample_id for sample in row.samples) == [f"llava_instruct_150k.json[{n}]" for n in (0, 2)]


def test_data_page_cord_v2_example_runs(tmp_path, checkpoint, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    (tmp_path / "CORD/data").mkdir(parents=True)
    for split, shards in (("train", 4), ("validation", 1)):
        for shard in range(shards):
            receipts(2).to_parquet(tmp_path / f"CORD/data/{split}-{shard:05}-of-{shards:05}-b4aaeceff1d90ecb.parquet")
    inspect, training = walk("naver-clova-ix/cord-v2", checkpoint)
    assert data_command.main([*inspect[2:], "--no-progress"]) == 0
    data = training_data(training, checkpoint)
    for split, count in (("train", 8), ("valid", 2)):
        rows = data.rows(split)
        assert rows.samples.total == count and rows[0].samples[0].loss_mask.sum() > 0


# docs/callers.md


@pytest.mark.slow
@pytest.mark.parametrize("ours", [False, True], ids=["an import added", "our container, step and callbacks"])
def test_callers_page_script_trains_and_saves(ours, untied_folder, tmp_path):
    script, ending = blocks(CALLERS, "python")
    if ours:
        begin, _ = script.split('if __name__ == "__main__":')
        assert "return ConfigContainer(" in begin
        script = begin.replace("return ConfigContainer(", "return qwen3vl_bridge.Qwen3VLConfigContainer(") + ending
    for name, place in {"HF_FOLDER": untied_folder, "RUN": tmp_path / "run"}.items():
        assert f'"{name}"' in script
        script = script.replace(f'"{name}"', repr(str(place)))
    (tmp_path / "mine.py").write_text(script)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert (tmp_path / "run" / "metrics.jsonl").exists() == ours
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]
    # Random weights predict one of 512 tokens, and learn next to nothing in four steps.
    assert len(losses) == 4 and all(abs(loss - math.log(512)) < 0.3 for loss in losses), losses


def test_callers_page_pth_file_imports_plugin_in_every_process(tmp_path):
    command = re.fullmatch(r"python -c \"(import site.*)\"\n", only(CALLERS, "bash"))[1]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", tmp_path], check=True)
    python = tmp_path / "bin" / "python"
    subprocess.run([python, "-c", command], check=True)
    (line,) = tmp_path.glob("lib/python*/site-packages/qwen3vl_import.pth")
    assert line.read_text() == "import qwen3vl_bridge"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([python, "-c", "import sys; print(*sys.modules)"], capture_output=True, text=True, env=env)
    loaded = done.stdout.split()
    assert "qwen3vl_bridge.upstream.import_hook" in loaded, done.stderr
    assert not {"torch", "megatron"} & set(loaded)


def test_callers_page_quotes_the_log_line_that_names_the_model_class(untied_folder, caplog):
    provider._log_model_class.cache_clear()
    with caplog.at_level(logging.INFO, provider.__name__):
        make_pair(untied_folder)
    (line,) = [text for record in caplog.records if " of qwen3vl_bridge, not " in (text := record.getMessage())]
    with_steps = [part.partition("\n")[0] for part in CALLERS.split("\n## ") if "\nHow to use " in part]
    saying = [part.partition("\n")[0] for part in CALLERS.split("\n## ") if line in part]
    assert saying == ["Where the import goes", *with_steps]


# docs/modelopt.md


@pytest.mark.slow
def test_modelopt_page_python_examples_run(inputs: Inputs, tmp_path):
    from megatron.bridge import AutoBridge

    distill, quantize, restore, export = blocks(PAGES["docs/modelopt.md"], "python")
    config = AutoBridge.from_hf_pretrained(str(inputs.hf)).hf_pretrained.config
    samples = [dict(input_ids=one.ids[None], **one.pixels) for one in make_samples("mixed", config, seed=1)]
    torch.save(samples, tmp_path / "samples.pt")
    save = tmp_path / "run"
    cfg = replicated(inputs, save, train__train_iters=2, checkpoint__save_interval=2)
    here = {
        "TEACHER": make_larger(tmp_path / "teacher"), "HF_FOLDER": inputs.hf, "QUANTIZED": tmp_path / "quantized",
        "RUN": save, "EXPORTED": tmp_path / "exported", "SAMPLES": tmp_path / "samples.pt",
    }  # fmt: skip

    def filled(python: str) -> str:
        return re.sub('"([A-Z_]{3,})"', lambda found: repr(str(here[found[1]])), python)

    def run_script(python: str) -> None:
        (tmp_path / "script.py").write_text(filled(python))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1", tmp_path / "script.py"]
        done = subprocess.run(torchrun, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]

    run_script(quantize)
    for python in (restore, distill):
        exec(filled(python), dict(cfg=cfg))
    assert len(train(cfg)) > 0
    run_script(export)
    exported, own = tensors_in(here["EXPORTED"]), tensors_in(inputs.hf)
    assert own.keys() <= exported.keys()
    assert exported["model.language_model.layers.0.mlp.down_proj.weight"].itemsize == 1
    before = {name: tensor.bfloat16() for name, tensor in own.items() if name.startswith("model.visual.")}
    assert any(not torch.equal(exported[name], tensor) for name, tensor in before.items())  # it was trained


# docs/upstream

PATCHES = sorted(path for path in (ROOT / "docs" / "upstream").glob("*.md") if path.name != "index.md")


@pytest.mark.slow
@pytest.mark.parametrize("page", PATCHES, ids=lambda page: page.stem)
def test_upstream_patch_example_prints_output_shown_on_page(page, untied_folder, tmp_path):
    (code,), (expected,) = (blocks(page.read_text(), language) for language in ("python", "text"))
    (tmp_path / "shown.py").write_text(code.replace("HF_FOLDER", str(untied_folder)))
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "shown.py"], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-expected.count("\n") :] == expected.splitlines(), done.stdout
