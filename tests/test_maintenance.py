"""What maintainers rely on: CI, pre-commit and a person run the same; containers are made from files that are there.

And the promises of pyproject.toml and requirements/ that nothing else would notice being broken.
"""

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from qwen3vl_bridge.core.files import read_yaml

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    assert paths
    return [path for path in paths if path.is_file()]


def requirements(*extras: str) -> dict[str, Requirement]:
    listed = list(PROJECT["dependencies"])
    for extra in extras:
        listed += PROJECT["optional-dependencies"][extra]
    return {canonicalize_name(found.name): found for found in map(Requirement, listed)}


def pins() -> dict[str, str]:
    lines = (ROOT / "requirements/cpu.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.lstrip().startswith("#"))


def imported_packages() -> set[tuple[str, Path]]:
    found = set()
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            else:
                continue
            found |= {(module.split(".")[0], path) for module in modules}
    return found


def test_tracked_files_have_no_registry_address_or_lock_file():
    # Put together here, so that this file doesn't find itself.
    addresses = re.compile(
        "|".join(["--(extra-)?index" + "-url", "pypi" + r"\.org", "python" + "hosted", "npm" + "js"])
    )
    locks = re.compile(r"(uv|poetry|pdm|Pipfile)\.lock|pylock.*\.toml|package-lock\.json")
    for path in tracked_files():
        assert not locks.fullmatch(path.name), path
        found = addresses.search(path.read_text(errors="ignore"))
        assert not found, f"{path}: {found}"


def test_pinned_requirements_satisfy_ranges_of_pyproject():
    pinned = pins()
    wanted = requirements("video", "demo", "muon")
    wanted |= {canonicalize_name(one.name): one for one in map(Requirement, PYPROJECT["dependency-groups"]["dev"])}
    wanted |= {one.name: one for one in map(Requirement, PYPROJECT["build-system"]["requires"])}
    for name, requirement in wanted.items():
        assert name in pinned, f"{name} is declared in pyproject.toml, but requirements/cpu.txt has no pin"
        assert requirement.specifier.contains(pinned[name]), f"{requirement} declared, {name}=={pinned[name]} pinned"


def test_imports_are_declared_dependencies():
    declared = requirements("te", "video").keys()
    of_digits = requirements("demo").keys()
    providers = packages_distributions()
    for package, path in imported_packages():
        if package in sys.stdlib_module_names or package == "qwen3vl_bridge":
            continue
        # What isn't installed here, like Transformer Engine, goes by its own name.
        names = {canonicalize_name(name) for name in providers.get(package, [package])}
        listed = of_digits if path == ROOT / "src/qwen3vl_bridge/testing/digits.py" else declared
        assert names & listed, f"{path} imports {package} of {names}, which pyproject.toml doesn't declare"


def test_tracked_files_have_no_utils_module():
    assert not [path for path in tracked_files() if path.name == "utils.py"]


WORKFLOW = read_yaml(ROOT / ".github/workflows/ci.yml")
SCRIPTS = ("scripts/setup_env.sh", "scripts/find_python.sh")


def make_would_run(target: str) -> list[str]:
    listed = subprocess.run(["make", "--no-print-directory", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    return listed.stdout.splitlines()


def test_pre_commit_and_ci_run_same_lint():
    """Both run `make lint`, CI by `make test`, which runs it before the tests."""
    ((repository,),) = [read_yaml(ROOT / ".pre-commit-config.yaml")["repos"]]
    (hook,) = repository["hooks"]
    assert hook["entry"] == "make lint" and hook["always_run"] and not hook["pass_filenames"]
    lint, test = make_would_run("lint"), make_would_run("test")
    assert len(lint) > 3 and test[: len(lint)] == lint and "-m pytest" in test[-1]
    assert re.search(r"\bmake test$", (ROOT / ".ci/run").read_text().strip())
    assert [step["run"] for step in WORKFLOW["jobs"]["test"]["steps"] if "run" in step] == [".ci/run"]


def test_commands_of_ci_workflow_exist():
    commands = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    for command in commands:
        program, *words = shlex.split(command)
        if program == "make":
            assert make_would_run(words[0])
        else:
            (file,) = [word for word in (program, *words) if word.endswith((".py", "run"))]
            assert (ROOT / file).is_file()
    assert WORKFLOW["jobs"]["compatibility"]["strategy"]["matrix"]["versions"] == [
        *("oldest", "newest", "transformers", "torch"),
    ]


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile and what follows them, each on one line."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.nemo"])
def test_dockerfile_sources_and_targets_exist(name):
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
            assert copied >= {"Makefile", "pyproject.toml", "requirements", *SCRIPTS}
    assert "." in copied


def test_dockerignore_has_the_patterns_of_gitignore():
    """Their spellings differ: docker's begin at the root."""
    patterns = (ROOT / ".gitignore").read_text().splitlines()
    lines = [line.rstrip("/") for line in patterns if line and not line.startswith("#")]
    docker = (ROOT / ".dockerignore").read_text().splitlines()
    for line in lines:
        assert (line[1:] if line.startswith("/") else f"**/{line}") in docker


def test_requirements_cuda_txt_adds_packages_that_match_requirements_cpu_txt():
    lines = (ROOT / "requirements/cuda.txt").read_text().splitlines()
    cuda = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert not cuda.keys() & pins().keys()
    listed = (ROOT / "requirements/cuda.in").read_text().splitlines()
    (wanted,) = [Requirement(line) for line in listed if not line.startswith("#")]
    (declared,) = map(Requirement, PYPROJECT["project"]["optional-dependencies"]["te"])
    version = cuda["transformer-engine"]
    assert wanted.specifier.contains(version) and declared.specifier.contains(version)
    assert wanted.name == declared.name and wanted.extras == declared.extras
    # Its three parts are one release, built for the CUDA of torch's pins.
    major = pins()["nvidia-cuda-runtime"].split(".")[0]
    assert cuda["transformer-engine-torch"] == version == cuda[f"transformer-engine-cu{major}"]
