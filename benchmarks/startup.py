"""Measure a rank's CPU time before its first step: imports by package, and the stages of a training start.

    OMP_NUM_THREADS=1 python -m benchmarks.startup
    OMP_NUM_THREADS=1 python -m benchmarks.startup --rounds 1 --csv /tmp/startup.csv

Measures user and system seconds of full processes in interleaved rounds. Prints and records median, minimum and
maximum, and the load of the machine. Then:

- packages: time of the modules of each package without their imports (`python -X importtime`, which is slower).
- stages: stages of a run of the recipe for scanned digits, from the start of the process to its second step.

"Collector not paused" imports as if `upstream/import_hook.py` did not pause Python's garbage collector. "compiled anew"
imports without compiled files on disk, as with PYTHONDONTWRITEBYTECODE.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import measurement

_TRAINING = "import qwen3vl_bridge; import megatron.bridge.training.finetune"
_UNPAUSED = (
    "import contextlib; from qwen3vl_bridge.upstream import import_hook; "
    "import_hook._collector_paused = contextlib.nullcontext; "
)
_ANEW = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/nonexistent"}
# Name of a command -> arguments of Python, environment variables.
COMMANDS: dict[str, tuple[list[str], dict[str, str]]] = {
    "Python": (["-c", ""], {}),
    "import qwen3vl_bridge": (["-c", "import qwen3vl_bridge"], {}),
    "qwen3vl train --help": (["-m", "qwen3vl_bridge", "train", "--help"], {}),
    "import torch": (["-c", "import torch"], {}),
    "import Megatron-Bridge's training": (["-c", _TRAINING], {}),
    "the same, collector not paused": (["-c", _UNPAUSED + _TRAINING], {}),
    "the same, compiled anew": (["-c", _TRAINING], _ANEW),
}
_PACKAGES = (
    "torch",
    "sympy",
    "transformers",
    "scipy",
    "pandas",
    "sklearn",
    "modelopt",
    "torchvision",
    "peft",
    "datasets",
)
_MEGATRON = ("megatron.core", "megatron.bridge", "megatron.energon", "megatron.training")


def cpu_seconds(arguments: list[str], environment: dict[str, str]) -> float:
    """Run a Python process, and return its user plus system seconds."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "", "CUDA_VISIBLE_DEVICES": ""} | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"python {' '.join(arguments)} ended with exit status {process.returncode}")
    return used.ru_utime + used.ru_stime


def packages() -> dict[str, float]:
    """Return the seconds that importing Megatron-Bridge's training spends in the modules of each package."""
    command = [sys.executable, "-X", "importtime", "-c", _TRAINING]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    found: Counter[str] = Counter()
    for line in lines:
        own, _, rest = line.removeprefix("import time:").partition("|")
        if line.startswith("import time:") and own.strip().isdigit():
            name = rest.rpartition("|")[2].strip()
            known = ".".join(name.split(".")[:2]) if name.startswith("megatron.") else name.split(".")[0]
            listed = known in (*_PACKAGES, *_MEGATRON, "qwen3vl_bridge")
            found[known if listed else "all others"] += int(own) / 1e6
    return dict(found.most_common())


def first_steps(folder: Path) -> dict[str, float]:
    """Run two steps of the digits recipe in this process, and return the CPU seconds of each stage; see `stages`."""
    marks = {"imports of the command": time.process_time()}

    import qwen3vl_bridge
    from qwen3vl_bridge.training.callbacks import training_callbacks

    from megatron.bridge.training import setup
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.finetune import finetune
    from qwen3vl_recipes.digits import qwen3_vl_digits_sft_config
    from qwen3vl_recipes.paths import set_paths

    marks["import of Megatron-Bridge's training"] = time.process_time()

    class Marks(Callback):
        def on_train_start(self, _: Any) -> None:
            marks["data and the rest of set-up"] = time.process_time()

        def on_train_step_end(self, _: Any) -> None:
            name = "second step" if "first step" in marks else "first step"
            marks[name] = time.process_time()

    def marked(function: Any, before: str | None, after: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                marks[before] = time.process_time()
            found = function(*args, **kwargs)
            marks[after] = time.process_time()
            return found

        return call

    setup._build_distributed_model = marked(
        setup._build_distributed_model, "configuration, process groups, tokenizer", "model and its weights"
    )
    setup.setup_optimizer = marked(setup.setup_optimizer, None, "optimizer")
    cfg = set_paths(
        qwen3_vl_digits_sft_config(),
        hf_path=folder / "hf",
        data_path=folder / "data",
        pretrained_checkpoint=folder / "hf",
        save=folder / "run",
    )
    cfg.train.train_iters, cfg.checkpoint.save_interval, cfg.validation.eval_iters = 2, 1000, 0
    cfg.scheduler.lr_warmup_iters = 0
    finetune(cfg, qwen3vl_bridge.forward_step, callbacks=[*training_callbacks(cfg), Marks()])
    ends = list(marks.values())
    return {name: end - before for (name, end), before in zip(marks.items(), [0.0, *ends], strict=False)}


def stages() -> dict[str, float]:
    """Return the CPU seconds of each stage of a tiny run, from the process start to the end of its second step."""
    from qwen3vl_bridge.testing.digits import make_dataset
    from qwen3vl_bridge.testing.tiny_checkpoint import make_checkpoint

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_checkpoint(folder / "hf")
        make_dataset(folder / "data")
        command = [sys.executable, "-m", "benchmarks.startup", "--stages-of", name]
        done = subprocess.run(command, capture_output=True, text=True)
    lines = [line.split("\t") for line in done.stdout.splitlines() if line.startswith("stage\t")]
    if not lines:
        raise SystemExit(done.stderr[-2000:])
    return {stage: float(seconds) for _, stage, seconds in lines}


def main() -> None:
    """Measure all imports and stages, print the results and append them to the CSV file."""
    parser = measurement.parser(__doc__, "startup.csv", rounds=5)
    parser.add_argument("--stages-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stages_of is not None:
        for stage, seconds in first_steps(options.stages_of).items():
            print("stage", stage, f"{seconds:.3f}", sep="\t", flush=True)
        return
    found = [("stage", name, [seconds]) for name, seconds in stages().items()]
    found += [("package", name, [seconds]) for name, seconds in packages().items()]
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(options.rounds + 1):  # the first round compiles modules that have no compiled file on disk
        for name, (arguments, environment) in COMMANDS.items():
            if number or not environment:
                taken[name].append(cpu_seconds(arguments, environment))
    found += [("command", name, times[-options.rounds :]) for name, times in taken.items()]
    lines = []
    for kind, name, times in found:
        middle, least, most = statistics.median(times), min(times), max(times)
        print(f"{kind:8} {name:40} {middle:6.2f} s ({least:.2f} to {most:.2f})", flush=True)
        line = {"kind": kind, "what": name, "rounds": len(times), "CPU seconds": f"{middle:.3f}"}
        line |= {"least": f"{least:.3f}", "most": f"{most:.3f}", "load": measurement.load()}
        lines.append(line)
    measurement.append(options.csv, lines)


if __name__ == "__main__":
    main()
