"""Check that tests in tests/upstream fail if a private name of another package that this project uses is renamed.

    .venv/bin/python scripts/rename_borrowed.py                      # ten names, chosen by seed 0
    .venv/bin/python scripts/rename_borrowed.py --seed 3 --count 20
    .venv/bin/python scripts/rename_borrowed.py _apply_aux_loss      # these names

A module of `qwen3vl_bridge/upstream` is called a mechanism. A borrowed name is a name of another package that a
mechanism replaces, or a private name that a mechanism uses. For each borrowed name, the package that defines it is
copied into a temporary folder as links, and every occurrence of the name is renamed there. Then
`tests/upstream/test_<mechanism>.py` must fail with a message that names the mechanism. The exit status is 1 if tests
do not notice a renamed name.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from private_names import ALLOWED, ROOT, check

# Names that break every module of a package if they are renamed, so that no test can tell which mechanism needs them.
EVERYWHERE = {"__init__", "torch", "dist"}
COMPILED = "not tried: no Python file defines it"
PACKAGES = ("megatron", "modelopt", "transformers", "safetensors", "torch", "transformer_engine", "fla")


def borrowed_names() -> list[tuple[str, str]]:
    """Return (mechanism, name) for each private name that a module of `upstream/` uses, and each name it replaces."""
    found = set()
    for path in sorted(ALLOWED.rglob("*.py")):
        found |= {(path.stem, one.name) for one in check(path, set())}
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="replace") | ast.Attribute(attr="replace"), args=[_, name, _, *_]):
                    if isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.isidentifier():
                        found.add((path.stem, name.value))
    return sorted(pair for pair in found if pair[1] not in EVERYWHERE)


def sites() -> list[Path]:
    """Return the folders of the installed packages among `PACKAGES`."""
    folders = []
    for package in PACKAGES:
        if (spec := find_spec(package)) is not None:
            folders += [Path(folder) for folder in spec.submodule_search_locations or ()]
    return folders


def files_with(name: str, folder: Path) -> list[Path]:
    """Return the Python files below a folder that contain a name as a word."""
    done = subprocess.run(
        ["grep", "-rlw", "--include=*.py", name, str(folder)], stdout=subprocess.PIPE, text=True, check=False
    )
    return [Path(line) for line in done.stdout.splitlines()]


def defines(name: str, path: Path) -> bool:
    """Return True if a file defines a name as a function, class, variable or attribute."""
    word = re.escape(name)
    pattern = rf"(def|class)\s+{word}\b|\b{word}\s*(:[^=\n]+)?=[^=]|\bas {word}\b"
    return re.search(pattern, path.read_text(errors="replace")) is not None


def lay_out(package: Path, target: Path, name: str, files: list[Path]) -> None:
    """Copy a package into the folder `target` as links, and rename every occurrence of a name in `files`."""
    subprocess.run(["cp", "-rs", str(package), str(target)], check=True)
    for path in files:
        copy = target / package.name / path.relative_to(package)
        copy.unlink()
        copy.write_text(re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", f"{name}_renamed", path.read_text()))
        shutil.rmtree(copy.parent / "__pycache__", ignore_errors=True)


def is_noticed(mechanism: str, name: str) -> str | None:
    """Rename a name and run tests/upstream. Return a problem as text, or None if the tests failed as expected."""
    tests = ROOT / f"tests/upstream/test_{mechanism}.py"
    if not tests.is_file():
        return f"there is no {tests.relative_to(ROOT)}"
    found = {package: files_with(name, package) for package in sites()}
    owners = {package: files for package, files in found.items() if any(defines(name, path) for path in files)}
    if not owners:
        return COMPILED
    with tempfile.TemporaryDirectory() as folder:
        for package, files in owners.items():
            lay_out(package, Path(folder), name, files)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "upstream", str(tests.parent)]
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        return "its contract test passed"
    if f"upstream/{mechanism}.py" not in done.stdout:
        return f"the failure does not name the mechanism:\n{done.stdout[-2000:]}"
    return None


def main() -> int:
    """Rename names and print whether tests noticed them; return 1 if a renamed name was not noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="names to rename, in place of random ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--list", action="store_true", help="print the borrowed names and stop")
    options = parser.parse_args()
    known = borrowed_names()
    if options.list:
        print("".join(f"{mechanism:30} {name}\n" for mechanism, name in known), end="")
        return 0
    chosen = [pair for pair in known if pair[1] in options.names]
    untried = 0
    if not options.names:
        chosen = random.Random(options.seed).sample(known, min(options.count, len(known)))
    wrong = 0
    for mechanism, name in chosen:
        start = time.monotonic()
        problem = is_noticed(mechanism, name)
        untried += problem == COMPILED
        wrong += problem not in (None, COMPILED)
        print(f"{mechanism}: {name}: {problem or 'noticed'} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{len(chosen) - wrong - untried} of {len(chosen) - untried} renamed names were noticed")
    return int(wrong > 0 or not chosen)


if __name__ == "__main__":
    raise SystemExit(main())
