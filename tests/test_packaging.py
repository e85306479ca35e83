"""The promises of pyproject.toml and requirements/ that nothing else would notice being broken."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions, version
from pathlib import Path

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


def imported_packages() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            else:
                continue
            found |= {module.split(".")[0]: path for module in modules}
    return found


def test_no_registry_address_and_no_lock_file_is_tracked():
    # Put together here, so that this file doesn't find itself.
    addresses = re.compile(
        "|".join(["--(extra-)?index" + "-url", "pypi" + r"\.org", "python" + "hosted", "npm" + "js"])
    )
    locks = re.compile(r"(uv|poetry|pdm|Pipfile)\.lock|pylock.*\.toml|package-lock\.json")
    for path in tracked_files():
        assert not locks.fullmatch(path.name), path
        found = addresses.search(path.read_text(errors="ignore"))
        assert not found, f"{path}: {found}"


def test_pins_are_plain_and_satisfy_the_declared_ranges():
    pinned = pins()
    wanted = requirements("video", "demo", "muon")
    wanted |= {canonicalize_name(one.name): one for one in map(Requirement, PYPROJECT["dependency-groups"]["dev"])}
    wanted |= {one.name: one for one in map(Requirement, PYPROJECT["build-system"]["requires"])}
    for name, requirement in wanted.items():
        assert name in pinned, f"{name} is declared in pyproject.toml, but requirements/cpu.txt has no pin"
        assert requirement.specifier.contains(pinned[name]), f"{requirement} declared, {name}=={pinned[name]} pinned"


def test_what_overrides_leave_out_is_not_pinned():
    lines = (ROOT / "requirements/overrides.txt").read_text().splitlines()
    left_out = {line.split(";")[0] for line in lines if "never" in line and not line.startswith("#")}
    assert len(left_out) > 5
    assert not left_out & pins().keys()


def test_every_import_of_the_package_is_declared():
    declared = requirements("te", "video").keys()
    providers = packages_distributions()
    for package, path in imported_packages().items():
        if package in sys.stdlib_module_names or package == "qwen3vl_bridge":
            continue
        # What isn't installed here, like Transformer Engine, goes by its own name.
        names = {canonicalize_name(name) for name in providers.get(package, [package])}
        assert names & declared, f"{path} imports {package} of {names}, which pyproject.toml doesn't declare"


def test_installed_version_is_the_declared_one():
    assert version(PROJECT["name"]) == PROJECT["version"]


def test_wheel_holds_the_package_its_type_marker_and_the_recipes_alone(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "qwen3vl_bridge/py.typed" in names
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    recipes = {str(path.relative_to(ROOT / "recipes")) for path in (ROOT / "recipes/qwen3vl_recipes").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules | recipes


def test_no_file_is_called_utils():
    assert not [path for path in tracked_files() if path.name == "utils.py"]
