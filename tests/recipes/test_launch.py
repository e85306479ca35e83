"""The script for Slurm of docs/recipes.md starts a run, and recipes set torch's allocator."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from qwen3vl_recipes.cli import _parse, _parser
from qwen3vl_recipes.dry_run import finalised
from qwen3vl_recipes.registry import recipes

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "recipes.md").read_text()
# Starts what it is given on each node, as srun does with one task a node.
SRUN = """#!/bin/bash
for node in $(seq "$SLURM_NNODES"); do "$@" & tasks="$tasks $!"; done
for task in $tasks; do wait "$task" || exit 1; done
"""
SHORT = (
    "train.train_iters=2 scheduler.lr_warmup_iters=0 train.global_batch_size=2 validation.eval_iters=0 "
    "model.seq_length=128 dataset.seq_length=128 dataset.num_workers=0"
)


def block(language: str) -> str:
    section = DOCS.split("\n## On several nodes\n", 1)[1].split("\n## ", 1)[0]
    (only,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return only


@pytest.mark.slow
def test_two_nodes_are_one_run(tmp_path, untied_folder, digits):
    """The script for Slurm with its commands' namesakes: two agents of torchrun that meet, and a run of two ranks."""
    commands = {"srun": SRUN, "scontrol": "#!/bin/bash\necho 127.0.0.1\n"}
    for name, text in commands.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    settings = f"--hf-model {untied_folder} {SHORT}"
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    script = block("bash")
    for text, other in {
        "--nproc_per_node 8": "--nproc_per_node 1",
        ":29500": f":{port}",
        "qwen3_vl_8b_pretrain_config": f"qwen3_vl_digits_sft_config {settings}",
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


def test_the_script_for_slurm_asks_for_what_its_command_starts():
    """Its directives, the options as torchrun and our command line read them, and the recipe agree."""
    from torch.distributed.run import get_args_parser

    script = block("bash")
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, re.MULTILINE))
    (line,) = (line for line in script.replace("\\\n", " ").splitlines() if line.startswith("srun torchrun "))
    line = line.replace("$SLURM_NNODES", directives["nodes"])
    options = get_args_parser().parse_args(shlex.split(line)[2:])
    signal_name, _, seconds = directives.pop("signal").partition("@")
    assert directives == {"nodes": options.nnodes, "ntasks-per-node": "1", "gpus-per-node": options.nproc_per_node}
    assert options.training_script == "recipes/pretrain.py" and (ROOT / options.training_script).is_file()
    ours = _parse(_parser(""), options.training_script_args)
    assert ours.data_path and ours.save and not ours.settings
    recipe = recipes()[ours.recipe]
    assert int(options.nnodes) * int(options.nproc_per_node) == recipe.gpus
    # The run gets the signal that it saves on, no later than torchrun needs to wait for it.
    train = recipe().train
    assert train.exit_signal_handler and train.exit_signal == getattr(signal, f"SIG{signal_name}")
    assert int(seconds) >= options.shutdown_timeout > 30


@pytest.mark.usefixtures("no_groups")
@mock.patch.dict(os.environ)
def test_recipes_let_the_allocator_grow_its_segments():
    """As Megatron-Bridge's do, whose set-up puts it where it is not said otherwise; a dry run leaves nothing behind."""
    from megatron.bridge.training.config import apply_environment_variables

    old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    for name in (old, new):
        os.environ.pop(name, None)
    cfg = recipes()["qwen3_vl_2b_sft_fsdp_config"]()
    finalised(cfg, 8)
    assert old not in os.environ
    apply_environment_variables(cfg)
    assert os.environ[old] == "expandable_segments:True"
    os.environ[old] = "max_split_size_mb:64"
    apply_environment_variables(cfg)
    assert os.environ[old] == "max_split_size_mb:64"
    os.environ[new] = "max_split_size_mb:64"  # which the older name would put out of force
    assert old not in recipes()["qwen3_vl_2b_sft_config"]().env_vars


@pytest.mark.parametrize(
    ("name", "experts"), [("qwen3_vl_30b_a3b_sft_config", True), ("qwen3_vl_8b_sft_config", False)]
)
def test_recipes_of_experts_ask_for_transformer_engines_grouped_product(name, experts):
    assert recipes()[name]().env_vars.get("NVTE_USE_CUTLASS_GROUPED_GEMM") == ("1" if experts else None)
