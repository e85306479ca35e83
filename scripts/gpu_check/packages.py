"""Installed packages as archives: what a machine that has torch lacks, taken from this environment file by file.

What lives here: which packages travel, packing them, unpacking them again. Standard library only, for the other
machine has nothing more at that time. What may not: steps (`steps.py`).

Files come from the environment that `requirements/` pins, by the list (RECORD) that its installer left of each package,
and are held against the digests of that list: nothing is downloaded, and what travels is what the tests run with.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import math
import platform
import re
import shutil
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
LIMIT = 50_000_000  # bytes of all archives

# The machine's own, with all that they ask for. The latter three are needed by Megatron-Bridge's imports and together
# larger than the limit; a Python for scientific work has them.
GIVEN = ("torch", "torchvision")
EXPECTED = ("pandas", "pyarrow", "scipy")

# What is packed, with all that it asks for.
WANTED = (
    *("megatron-bridge", "megatron-core", "transformers", "accelerate", "omegaconf", "xxhash", "httpx", "rich"),
    # Megatron-Bridge's training imports them, and asks for them nowhere.
    *("megatron-energon", "nvidia-modelopt", "requests"),
    # The references are those of the tests.
    "pytest",
)
# Asked for by packages above, and imported by nothing that is run here.
LEFT_OUT = (
    *("aiobotocore", "aiohttp", "av", "botocore", "grpcio", "hf-xet", "hydra-core", "markdown", "ninja"),
    *("nvidia-ml-py", "qwen-vl-utils", "s3fs", "scikit-learn", "tensorboard-data-server", "timm", "werkzeug"),
)
# Files in the same way: solvers for other machines, web pages, other people's tests.
_UNUSED = re.compile(
    r"^(pulp/solverdir|tensorboard/webfiles\.zip|multistorageclient/explorer|peft/tests)|\.pyc$|^\.\./"
)


class PackageError(Exception):
    """A package that is missing, damaged, or made for another machine; the message says which, and what to do."""


def pack(folder: Path, carry: Iterable[str] = ()) -> dict[str, Any]:
    """Write an archive of each package, and a manifest; what was in the folder is deleted.

    Args:
        folder: where to.
        carry: which of the expected packages travel too.

    Returns:
        The manifest: Python's version and the processor, the packages with versions and digests, those expected there.

    Raises:
        PackageError: a package is not installed, or a file is not as it was installed; or all are above the limit.
    """
    carried = {_normal(name) for name in carry}
    if wrong := carried - set(EXPECTED):
        raise PackageError(f"--carry {', '.join(sorted(wrong))}, expected some of {', '.join(EXPECTED)}")
    without = frozenset((set(EXPECTED) - carried) | set(LEFT_OUT)) | required(GIVEN)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    packages = [_archive(folder, name) for name in sorted(required((*WANTED, *carried), without))]
    size = sum(one["bytes"] for one in packages)
    if size > LIMIT and not carried:
        raise PackageError(f"the archives have {size / 1e6:.1f} MB, expected at most {LIMIT / 1e6:.0f}")
    manifest = {
        "python": platform.python_version(),
        "processor": platform.machine(),
        "bytes": size,
        "expected": {name: _installed(name).version for name in (*GIVEN, *sorted(set(EXPECTED) - carried))},
        "packages": packages,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def unpack(folder: Path, target: Path, seconds: float = math.inf) -> list[str]:
    """Put the packages of a folder where Python can import them; done once.

    Args:
        folder: as `pack` left it.
        target: for the path of Python's modules; made anew unless it is complete.
        seconds: that it may take.

    Returns:
        What was unpacked, "name version" each.

    Raises:
        PackageError: there is nothing packed, it is damaged, or made for another Python or processor; or it takes
            longer.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        raise PackageError(
            f"{folder} has no {MANIFEST}; run 'scripts/gpu_check.sh pack' on the machine that has the environment"
        ) from None
    made, here = (manifest["python"], manifest["processor"]), (platform.python_version(), platform.machine())
    if (_minor(made[0]), made[1]) != (_minor(here[0]), here[1]):
        raise PackageError(
            f"packed for Python {made[0]} on {made[1]}, this is {here[0]} on {here[1]}: pack it for these"
        )
    names, done = [f"{one['name']} {one['version']}" for one in manifest["packages"]], target / MANIFEST
    if done.exists() and json.loads(done.read_text()) == manifest:
        return names
    end = time.monotonic() + seconds
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for number, one in enumerate(manifest["packages"]):
        if time.monotonic() > end:
            raise PackageError(
                f"{number} of {len(names)} packages were unpacked to {target} in {seconds:.0f} s, expected all; "
                "give --work on a faster disk, or --slower 2"
            )
        archive = folder / one["archive"]
        if not archive.is_file() or _digest(archive.read_bytes()) != one["sha256"]:
            raise PackageError(f"{archive} is missing or damaged; run 'scripts/gpu_check.sh pack' again")
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(target)
    shutil.copy(folder / MANIFEST, done)
    return names


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _installed(name: str) -> metadata.Distribution:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise PackageError(f"{name} is not installed in {sys.prefix}; 'make env' makes the environment") from None


def required(names: Iterable[str], without: frozenset[str] = frozenset()) -> frozenset[str]:
    """Packages, what these ask for, and so on; those that `requirements/overrides.txt` leaves out are not installed."""
    from packaging.requirements import Requirement

    for name in names:
        _installed(name)
    found, left = set(), [(_normal(name), "") for name in names]
    seen: set[tuple[str, str]] = set()
    while left:
        name, extra = left.pop()
        if name in without or (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for line in package.requires or ():
            asked = Requirement(line)
            if asked.marker is None or asked.marker.evaluate({"extra": extra}):
                left += [(_normal(asked.name), one) for one in ("", *asked.extras)]
    return frozenset(found)


def _archive(folder: Path, name: str) -> dict[str, Any]:
    package = _installed(name)
    path = folder / f"{name}-{package.version}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for inside, content in _files(package):
            archive.writestr(zipfile.ZipInfo(inside), content, zipfile.ZIP_DEFLATED, 9)
    content = path.read_bytes()
    return {
        "name": name,
        "version": package.version,
        "archive": path.name,
        "bytes": len(content),
        "sha256": _digest(content),
    }


def _files(package: metadata.Distribution) -> Iterator[tuple[str, bytes]]:
    """Path and content of each file that a package is imported from."""
    record = package.read_text("RECORD")
    if record is None:
        raise PackageError(f"{package.metadata['Name']} has no RECORD: its installer wrote no list of files")
    for inside, digest, _ in csv.reader(record.splitlines()):
        if _UNUSED.search(inside):
            continue
        content = Path(str(package.locate_file(inside))).read_bytes()
        if digest:
            kind, _, expected = digest.partition("=")
            found = base64.urlsafe_b64encode(hashlib.new(kind, content).digest()).rstrip(b"=").decode()
            if found != expected:
                raise PackageError(f"{inside} was changed after it was installed; recreate the environment")
        yield inside, content
