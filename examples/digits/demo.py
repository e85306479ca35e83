"""Convert, fine-tune, export and evaluate a model, end to end.

    python examples/digits/demo.py [--family qwen3_5] [--hf-model FOLDER | --model-only] [--work-dir FOLDER]

The demo makes a tiny checkpoint of a family (or takes yours), converts it for Megatron, fine-tunes it on scanned
handwritten digits, exports it, and lets transformers read digits that it has not seen. With --model-only it only makes
the tiny checkpoint, for training on your own data.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # examples and recipes stand beside the package

GOAL = 0.95
RECIPES = {  # by family
    "qwen3_vl": "qwen3_vl_digits_sft_config",
    "qwen3_5": "qwen35_vl_digits_sft_config",
    "qwen4_exp": "qwen38_flash_next_digits_sft_config",  # needs transformers 5.16 or newer
}
_MADE_HERE = ".made_by_the_digits_demo"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=RECIPES, default="qwen3_vl", help="of the model (default: %(default)s)")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--hf-model", type=Path, help="a checkpoint of yours; default: a tiny random one")
    model.add_argument("--model-only", action="store_true", help="make the tiny checkpoint only")
    parser.add_argument("--work-dir", type=Path, default=Path("out/digits"), help="default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="SETTING=VALUE", help="settings that differ from the recipe")
    args = parser.parse_args(arguments)
    if args.hf_model is not None and not (args.hf_model / "config.json").is_file():
        parser.error(f"--hf-model is {args.hf_model}, expected a folder with a config.json")
    if args.work_dir.exists() and not args.work_dir.is_dir():
        parser.error(f"--work-dir is {args.work_dir}, a file; expected a folder, or a name for a new one")
    if args.work_dir.exists() and not (args.work_dir / _MADE_HERE).exists() and any(args.work_dir.iterdir()):
        parser.error(f"--work-dir {args.work_dir} holds other things; give a new folder")
    return args


class Report:
    """Table of the steps of the demo: what each made, and how long it took."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str]] = []
        self.started = time.perf_counter()

    @contextmanager
    def step(self, title: str, made: Path | str) -> Iterator[None]:
        """Print the title of a step, and time the `with` block."""
        print(f"\n=== {len(self.rows) + 1}. {title}", flush=True)
        started = time.perf_counter()
        yield
        self.rows.append((title, str(made), f"{time.perf_counter() - started:.0f} s"))

    def show(self, results: list[tuple[str, str]]) -> None:
        """Print the table of steps, and a table of results."""
        from rich.console import Console
        from rich.table import Table

        steps = Table("step", "made", "time", title="What was made where")
        for row in self.rows:
            steps.add_row(*row)
        steps.add_row("all", "", f"{time.perf_counter() - self.started:.0f} s")
        outcome = Table("result", "value", title="What came out")
        for row in results:
            outcome.add_row(*row)
        console = Console()
        console.print(steps)
        console.print(outcome)


def command(script: str, *arguments: str | Path) -> None:
    """Print and run a Python script of the project; exit if it fails."""
    words = [script, *map(str, arguments)]
    print("$ python " + " ".join(words), flush=True)
    done = subprocess.run([sys.executable, str(ROOT / script), *words[1:]])
    if done.returncode != 0:
        sys.exit(f"error: {script} ended with status {done.returncode}")


def expect_end(run: Path) -> None:
    """Exit if training was stopped early by a signal, after which it saves and returns exit status 0."""
    from qwen3vl_bridge.checkpoint.formats.megatron import find_iteration, read_run_config

    iteration = find_iteration(run)
    step, steps = int(iteration.name.removeprefix("iter_")), read_run_config(iteration)["train"]["train_iters"]
    if step < steps:
        sys.exit(f"the training was stopped after step {step} of {steps}: nothing is exported; the demo starts over")


def main(arguments: list[str] | None = None) -> None:
    """Run all steps; exit with status 1 if the accuracy is below `GOAL`."""
    args = parse(arguments)
    if args.hf_model is None:
        # The tiny model gains nothing from threads, which only get in the way of data workers on a small machine.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    from qwen3vl_bridge.upstream.library_logs import quiet

    quiet()
    from qwen3vl_bridge.testing.digits import make_dataset
    from qwen3vl_bridge.testing.tiny_checkpoint import make_checkpoint

    from examples.digits import report as digits_report

    work = args.work_dir
    if not args.model_only:  # which keeps the results of a demo
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    (work / _MADE_HERE).touch()
    source = args.hf_model or work / "hf"
    data, megatron, run, export = work / "data", work / "megatron", work / "run", work / "hf_finetuned"
    test, report = data / "test.jsonl", Report()

    if args.hf_model is None:
        with report.step(f"make a tiny model ({args.family}) and its processor", source):
            make_checkpoint(source, family=args.family)
    if args.model_only:
        return
    with report.step("make conversations about scanned digits", data):
        make_dataset(data, objectives=True)
    with report.step("answers before training", "-"):
        before = digits_report.answer(source, test)
    with report.step("convert to a Megatron-FSDP checkpoint", megatron):
        command("conversion/convert.py", "import", "--hf-model", source, "--megatron-path", megatron)
    with report.step("fine-tune", run):
        recipe = ("--recipe", RECIPES[args.family])
        paths = ("--hf-model", source, "--data-path", data, "--pretrained-checkpoint", megatron, "--save", run)
        command("recipes/finetune.py", *recipe, *paths, *args.overrides)
        expect_end(run)
    with report.step("convert to Hugging Face", export):
        command("conversion/convert.py", "export", "--megatron-path", run, "--hf-path", export)
    with report.step("answers after training", work / "answers.png"):
        after = digits_report.answer(export, test)
        digits_report.answer_sheet(after, work / "answers.png")
    with report.step("loss curve", work / "loss.png"):
        log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        digits_report.loss_curve(log, work / "loss.png")
    with report.step("compare Megatron and transformers", "-"):
        from examples.digits.compare import logits_difference

        difference, scale = logits_difference(run, export, test)

    accuracy = digits_report.accuracy(after)
    report.show(
        [
            ("held-out pictures", str(len(after))),
            ("accuracy before", f"{digits_report.accuracy(before):.1%}"),
            ("accuracy after (stock transformers on the export)", f"{accuracy:.1%}"),
            ("largest logits difference, Megatron and transformers", f"{difference:.1e} (largest logit {scale:.1f})"),
        ]
    )
    if accuracy < GOAL:
        sys.exit(f"the accuracy is {accuracy:.1%}, the goal {GOAL:.0%}")


if __name__ == "__main__":
    main()
