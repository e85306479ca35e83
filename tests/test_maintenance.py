"""What maintainers rely on: CI, pre-commit and a person run the same; containers are made from files that are there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from qwen3vl_bridge.io.parsing import read_yaml

import pytest
from packaging.requirements import Requirement

from scripts import compatibility
from tests.test_packaging import PYPROJECT, pins, tracked_files

ROOT = Path(__file__).parents[1]
WORKFLOW = read_yaml(ROOT / ".github/workflows/ci.yml")
PAGES = (
    *("CONTRIBUTING.md", "README.md", "SECURITY.md", "requirements/README.md"),
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
)
OURS = (r"\.ci", r"\.github", "benchmarks", "examples", "recipes", "requirements", "scripts", "src", "docs", "tests")
# Other repositories' folders are called so too; of these pages' names the last two are ours.
OF_OTHERS_TOO = ("docs/callers.md", "docs/memory.md", "docs/recipes.md")


def make_would_run(target: str) -> list[str]:
    listed = subprocess.run(["make", "--no-print-directory", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    return listed.stdout.splitlines()


def test_pre_commit_equals_ci():
    """Both run `make lint`, CI by `make test`, which runs it before the tests."""
    ((repository,),) = [read_yaml(ROOT / ".pre-commit-config.yaml")["repos"]]
    (hook,) = repository["hooks"]
    assert hook["entry"] == "make lint" and hook["always_run"] and not hook["pass_filenames"]
    lint, test = make_would_run("lint"), make_would_run("test")
    assert len(lint) > 3 and test[: len(lint)] == lint and "-m pytest" in test[-1]
    assert re.search(r"\bmake test$", (ROOT / ".ci/run").read_text().strip())
    assert [step["run"] for step in WORKFLOW["jobs"]["test"]["steps"] if "run" in step] == [".ci/run"]


def test_what_a_workflow_runs_is_there():
    commands = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    for command in commands:
        program, *words = shlex.split(command)
        if program == "make":
            assert make_would_run(words[0])
        else:
            (file,) = [word for word in (program, *words) if word.endswith((".py", "run"))]
            assert (ROOT / file).is_file()
    assert WORKFLOW["jobs"]["compatibility"]["strategy"]["matrix"]["versions"] == ["oldest", "newest"]


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile and what follows them, each on one line."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.nemo"])
def test_what_a_container_is_made_from_is_there(name):
    copied, known = set(), {"ARG", "CMD", "COPY", "FROM", "RUN", "WORKDIR"}
    for word, rest in instructions(name):
        assert word in known, word
        if word == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
            copied.update(sources)
        for target in re.findall(r"\bmake (\w+)", rest) if word == "RUN" else ():
            assert make_would_run(target)
            # What `make env` needs has been copied before.
            assert {
                "Makefile",
                "pyproject.toml",
                "requirements",
                "scripts/setup_env.sh",
                "scripts/find_python.sh",
            } <= copied
    assert "." in copied


def test_the_container_for_cpus_is_what_setting_up_asks_for():
    by_word = dict(reversed(instructions("Dockerfile")))
    assert by_word["FROM"].startswith(f"python:{(ROOT / '.python-version').read_text().strip()}-")
    assert by_word["CMD"] == '["make", "demo"]'


def test_docker_ignores_what_git_ignores():
    """Their spellings differ: docker's begin at the root."""
    patterns = (ROOT / ".gitignore").read_text().splitlines()
    lines = [line.rstrip("/") for line in patterns if line and not line.startswith("#")]
    docker = (ROOT / ".dockerignore").read_text().splitlines()
    for line in lines:
        assert (line[1:] if line.startswith("/") else f"**/{line}") in docker


def test_pins_for_cuda_go_on_top_of_those_for_cpus():
    lines = (ROOT / "requirements/cuda.txt").read_text().splitlines()
    cuda = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert not cuda.keys() & pins().keys()
    (wanted,) = [
        Requirement(line)
        for line in (ROOT / "requirements/cuda.in").read_text().splitlines()
        if not line.startswith("#")
    ]
    (declared,) = map(Requirement, PYPROJECT["project"]["optional-dependencies"]["te"])
    version = cuda["transformer-engine"]
    assert wanted.specifier.contains(version) and declared.specifier.contains(version)
    assert wanted.name == declared.name and wanted.extras == declared.extras
    # Its three parts are one release, built for the CUDA of torch's pins.
    major = pins()["nvidia-cuda-runtime"].split(".")[0]
    assert cuda["transformer-engine-torch"] == version == cuda[f"transformer-engine-cu{major}"]


def test_pins_for_cuda_can_be_resolved_with_those_for_cpus(tmp_path):
    """As `make lock` does: from what the registry says the packages require. Nothing is installed or built."""
    requirements, made = ROOT / "requirements", tmp_path / "cuda.txt"
    pinned = [line for line in (requirements / "cuda.txt").read_text().splitlines() if not line.startswith("#")]
    made.write_text("\n".join([*pinned, *(f"{name}=={version}" for name, version in pins().items())]) + "\n")
    command = [sys.executable, "-m", "uv", "pip", "compile", "cuda.in", "--constraint", "cpu.txt"]
    command += [
        "--output-file",
        made,
        "--python",
        sys.executable,
        "--system-certs",
        "--quiet",
        "--no-header",
        "--no-annotate",
    ]
    command += ["--no-emit-index-url", "--no-emit-find-links"]
    done = subprocess.run(command, cwd=requirements, capture_output=True, text=True)
    if re.search(r"(?i)error sending request|failed to fetch|network|dns|connect|not found in the cache", done.stderr):
        pytest.skip("needs a package registry")
    assert done.returncode == 0, done.stderr
    resolved = dict(line.split("==") for line in made.read_text().splitlines())
    assert [f"{name}=={version}" for name, version in resolved.items() if pins().get(name) != version] == pinned
    assert {name: version for name, version in resolved.items() if name in pins()}.items() <= pins().items()


@pytest.mark.parametrize("file", sorted((ROOT / "requirements").glob("*.*t*")), ids=lambda path: path.name)
def test_requirement_files_parse(file):
    lines = [line.split(" #")[0].strip() for line in file.read_text().splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert found and len({one.name for one in found}) == len(found)
    assert not any(one.url for one in found)


def test_versions_that_are_tried_are_allowed_ones():
    assert list(compatibility.allowed()) == list(compatibility.PACKAGES)
    for selected in compatibility.SELECTION:
        assert (ROOT / selected).exists(), selected
    for bad in ("transformers==5.7.0", "torch==2.13.0", "latest"):
        with pytest.raises(SystemExit, match=r"expected oldest|allows"):
            compatibility.chosen_versions([bad])
    rows = [line.split("|")[1:-1] for line in compatibility.TABLE.read_text().splitlines() if re.match(r"\| \d", line)]
    assert len(rows) >= 2
    for row in rows:
        for (name, allowed), number in zip(compatibility.allowed().items(), row, strict=False):
            assert allowed.specifier.contains(number.strip(), prereleases=True), f"{name} {number}"
        assert re.search(r"\d+ passed", row[4]) and not re.search("failed|error", row[4])


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_files_targets_and_tests_that_are_there(page):
    text, tracked = (ROOT / page).read_text(), {str(path.relative_to(ROOT)) for path in tracked_files()}
    folders = {str(parent) for path in tracked for parent in Path(path).parents}
    ours = OURS[-2:] if page in OF_OTHERS_TOO else OURS
    named = re.findall(rf"`((?:{'|'.join(ours)})/[^`\s]*)`", text)
    for name in named:
        file, _, test = name.partition("::")
        assert file in tracked or file.rstrip("/") in folders, f"{page} names {name}"
        assert not test or f"def {test}(" in (ROOT / file).read_text(), f"{page} names {name}"
    for target in set(re.findall(r"`make ([a-z-]+)", text)):
        assert make_would_run(target)
