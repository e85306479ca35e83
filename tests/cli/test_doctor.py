"""`qwen3vl doctor`: what is found is what is there, and what is missing is said with what follows."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import replace
from pathlib import Path

from qwen3vl_bridge.cli import doctor
from qwen3vl_bridge.cli.main import main

import pytest
from packaging.requirements import Requirement

GIB = 2**30
HERE = doctor.Machine(
    python="3.12.1", glibc="2.39",
    packages={"torch": "2.13.0+cpu", "av": None, "matplotlib": None, **dict.fromkeys(doctor._OPTIONAL, "9.9")},
    cuda=None, nccl=None, driver=False, gpus=(), cores=2, memory=16 * GIB, memory_free=8 * GIB, shared_memory=8 * GIB,
    disk_free=100 * GIB, open_files=(65536, 65536),
)  # fmt: skip
WANTED = [Requirement(text) for text in ("torch>=2.6", "av>=12; extra == 'video'", "matplotlib>=3; extra == 'demo'")]


def missing(found: doctor.Machine) -> list[doctor.Missing]:
    return doctor._missing(doctor.packages(WANTED, found), found, "==3.12.*")


def test_packages_are_those_that_are_declared_and_those_of_use():
    found = {one.name: one for one in doctor.packages(WANTED, replace(HERE, packages=HERE.packages | {"av": "11.0"}))}
    assert found.keys() == {"torch", *doctor._OPTIONAL}
    assert found["torch"].needed and found["torch"].fits and found["torch"].expected == ">=2.6"
    assert not found["av"].needed and not found["av"].fits and found["av"].get == "pip install 'av>=12'"
    assert found["flash-attn"].fits and not found["flash-attn"].expected


def test_nothing_is_missing_where_all_fits():
    assert missing(replace(HERE, packages=HERE.packages | {"av": "12.1"})) == []


@pytest.mark.parametrize(
    ("changed", "message", "fatal"),
    [
        (dict(python="3.11.9"), "Python is 3.11.9, expected ==3.12.*", True),
        (dict(packages={"torch": "2.5.1"}), "torch is 2.5.1, expected >=2.6", True),
        (dict(packages={"torch": None}), "torch is not installed, expected >=2.6", True),
        (dict(packages={"av": "11.0"}), "av is 11.0, expected >=12 (for decoding video files)", False),
        (dict(packages={"megatron-energon": None}), "megatron-energon is not installed, expected any version", False),
        (dict(driver=True), "torch is built without CUDA", False),
        (dict(shared_memory=64 << 20), "/dev/shm has 0.06 GiB free", False),
        (dict(open_files=(1024, 65536)), "1024 open files are allowed", False),
    ],
)
def test_what_does_not_fit_is_said(changed, message, fatal):
    packages = HERE.packages | {"av": "12.1"} | changed.get("packages", {})
    (one,) = missing(replace(HERE, **changed | {"packages": packages}))
    assert message in one.what and one.fatal == fatal and one.get


def test_kernels_for_gpus_are_not_missed_where_there_is_none():
    packages = HERE.packages | {"av": "12.1", "transformer-engine": None, "flash-attn": None}
    assert missing(replace(HERE, packages=packages)) == []


@pytest.mark.parametrize(
    ("glibc", "get"), [("2.36", "here is 2.36"), ("2.40", "pip install"), ("", "another C library")]
)
def test_a_package_that_would_break_others_is_not_advised(glibc, get):
    packages = HERE.packages | {"av": "12.1", "nvidia-resiliency-ext": None}
    (one,) = missing(replace(HERE, glibc=glibc, packages=packages))
    assert get in one.get and not one.fatal and ("pip" in one.get) == (glibc == "2.40")


def test_this_machine(capsys, tmp_path):
    from qwen3vl_bridge.models.settings import default_transformer_impl

    import torch

    assert main(["doctor", "--json", "--path", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["works"] == {"conversion": True, "training": True}
    assert found["used"]["layer spec"].startswith(default_transformer_impl())
    assert found["used"]["collectives"].startswith("NCCL" if torch.cuda.is_available() else "gloo")
    assert len(found["machine"]["gpus"]) == torch.cuda.device_count()
    versions = {one["name"]: one["found"] for one in found["machine"]["packages"]}
    assert versions["megatron-core"] == importlib.metadata.version("megatron-core")
    assert 0 < found["machine"]["memory_free"] <= found["machine"]["memory"]
    assert main(["doctor", "--path", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_what_cannot_be_imported_is_status_1(capsys, monkeypatch):
    original = doctor.why_not
    broken = "megatron.core: ImportError: undefined symbol"
    monkeypatch.setattr(doctor, "why_not", lambda *names: broken if len(names) > 1 else original(*names))
    assert doctor.main(["--path", str(Path.cwd())]) == 1
    said = capsys.readouterr().out
    assert f"training cannot be imported: {broken}" in " ".join(said.split())
    assert "conversion cannot work; training cannot work" in said and "layer spec" not in said


def test_a_broken_package_is_told_from_a_whole_one(tmp_path, monkeypatch):
    (tmp_path / "built_for_another.py").write_text("raise OSError('libcudart.so.99: cannot open\\nlong story')")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.why_not("json") is None
    assert doctor.why_not("json", "built_for_another") == "built_for_another: OSError: libcudart.so.99: cannot open"


def test_a_package_that_is_only_on_the_path_is_status_2(capsys, monkeypatch):
    """What it needs is in the metadata of its installation."""
    monkeypatch.setattr(doctor, "_PACKAGE", "no-such-package")
    assert doctor.main([]) == 2
    assert "error: No package metadata was found for no-such-package" in capsys.readouterr().err
