"""Runs the steps, each in a process of its own with a limit of its own; one that fails does not stop the others.

What lives here: the processes, and what they leave. Standard library only. What may not: a step's work.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from . import results
from .results import Finding, Outcome, Place
from .steps import STEPS, Part, Step

ROOT = Path(__file__).resolve().parents[2]
# Where packages and caches are that are not below HOME.
_OF_THE_USER = frozenset(
    (
        *("PYTHONUSERBASE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "CUDA_CACHE_PATH"),
        *("TRITON_HOME", "TRITON_CACHE_DIR", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR", "TORCH_HOME"),
        *("TORCH_EXTENSIONS_DIR", "HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE", "HF_DATASETS_CACHE", "HF_TOKEN_PATH"),
        *("TRANSFORMERS_CACHE", "HUGGINGFACE_HUB_CACHE", "FLASHINFER_WORKSPACE_BASE", "PYTHONPYCACHEPREFIX"),
    )
)
_TAIL = 6  # lines of a log that the table shows of a step that broke


def run_all(place: Place, site: Path | None, only: Sequence[str] = (), *, go_on: bool = False, slower: float = 1.0):
    """Run steps one after the other, and write results and the table after each.

    Args:
        place: where.
        site: folder with unpacked packages; None where all are installed.
        only: groups of steps; none for all.
        go_on: leave out steps that have passed.
        slower: how much longer than on an H100 a step may take.

    Returns:
        Whether all that ran, or passed before, passed.
    """
    place.out.mkdir(parents=True, exist_ok=True)
    place.work.mkdir(parents=True, exist_ok=True)
    chosen = [step for step in STEPS if not only or step.group in only]
    found = results.read(place.out)
    if not go_on:
        for step in chosen:
            found.pop(step.name, None)
        if not only:
            for name in (results.RESULTS, results.SUMMARY, results.LOGS):
                (place.out / name).unlink(missing_ok=True)
    for step in chosen:
        if go_on and step.name in found and found[step.name].status == "passed":
            continue
        print(f"== {step.name}", flush=True)
        found[step.name] = _run(step, place, site, slower)
        with (place.out / results.RESULTS).open("a") as file:
            file.write(found[step.name].line)
        results.write_summary(place.out, [found[one.name] for one in STEPS if one.name in found])
        print(f"   {found[step.name].status}, {found[step.name].seconds:.0f} s", flush=True)
    print((place.out / results.SUMMARY).read_text(), flush=True)
    return all(found[step.name].status == "passed" for step in chosen)


def _run(step: Step, place: Place, site: Path | None, slower: float) -> Outcome:
    begun, log = time.perf_counter(), place.work / f"{step.name.replace(' ', '_').replace(',', '')}.log"
    report = place.work / "report.json"
    report.unlink(missing_ok=True)
    words = [sys.executable, "-m", __package__ or "", "step", step.name, "--report", str(report)]
    words += ["--device", place.device, "--size", place.size, "--work", str(place.work), "--out", str(place.out)]
    limit = step.seconds * slower
    with log.open("w") as file:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment(place, site),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit)
        finally:
            _end(process)
    seconds, text = time.perf_counter() - begun, log.read_text(errors="replace")
    with (place.out / results.LOGS).open("a") as file:
        file.write(f"==== {step.name}, {seconds:.0f} s, status {process.returncode}\n{text}\n")
    found = json.loads(report.read_text()) if report.exists() else {"done": False, "findings": []}
    findings = tuple(Finding(**one) for one in found["findings"])
    if found["done"]:
        failed = any(one.passed is False for one in findings)
        return Outcome(step.name, "failed" if failed else "passed", seconds, findings)
    status = "timed out" if seconds >= limit else "failed"
    return Outcome(step.name, status, seconds, findings, error="\n".join(text.splitlines()[-_TAIL:]))


def _end(process: subprocess.Popen) -> None:
    """End a step's process with all that it has started, data-loading ones among them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment(place: Place, site: Path | None) -> dict[str, str]:
    """What a step's process is given: this one's variables, without those that bring packages or caches of the user's.

    Args:
        place: where; caches of kernels and models are made in its folder `work`.
        site: folder with unpacked packages; None where all are installed.
    """
    paths = [*([site] if site else []), ROOT / "src", ROOT / "recipes", ROOT]
    own = {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONNOUSERSITE": "1",  # another HOME does not do, where PYTHONUSERBASE is set
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # some images set it, and each process would compile what it imports
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HOME": str(place.work),
        "TORCHINDUCTOR_CACHE_DIR": str(place.work / "inductor"),  # else below /tmp, for all programs of a user
    }
    if place.device == "cpu":
        own["CUDA_VISIBLE_DEVICES"] = ""
    return {name: value for name, value in os.environ.items() if name not in _OF_THE_USER} | own


def run_step(name: str, place: Place, report: Path) -> None:
    """One step, in this process.

    Args:
        name: of the step.
        place: where.
        report: file for its findings, written anew after each part: what was found stays if a later one hangs.
    """
    (step,) = (one for one in STEPS if one.name == name)
    findings: list[Finding] = []
    for number, part in enumerate(step.parts, 1):
        findings += _findings(part, place)
        written = {"done": number == len(step.parts), "findings": [asdict(one) for one in findings]}
        report.with_suffix(".new").write_text(json.dumps(written))
        report.with_suffix(".new").replace(report)
    sys.stdout.flush()
    os._exit(0)  # threads of process groups may wait for ever


def _findings(part: Part, place: Place) -> list[Finding]:
    module, _, function = part.program.partition(":")
    try:
        program = getattr(importlib.import_module(f"{__package__}.{module}"), function)
        found = program(place, **part.settings)
    except Exception as error:
        traceback.print_exc()
        found = [Finding("error", f"{type(error).__name__}: {error}", "none", False)]
    return [replace(one, subject=f"{part.label}: {one.subject}") for one in found] if part.label else found
