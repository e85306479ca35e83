"""The folder of a Hugging Face model: finding it, and its files other than weights."""

from __future__ import annotations

import os
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

from qwen3vl_bridge.io.errors import CheckpointError
from qwen3vl_bridge.io.json_files import read_object
from qwen3vl_bridge.io.paths import expanded

# Name of the Hugging Face format in manifests and reports.
HUGGINGFACE = "huggingface"

# Files that from_pretrained of a model, a tokenizer or a processor may look for, except weights.
_SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
# Code of a model; its JSON files then have an `auto_map`, which names it.
_CODE = "*.py"
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def find_model(hf_model: str | Path, *, weights: bool = True, trust_remote_code: bool = False) -> Path:
    """The local folder of a model, downloaded from the hub if it is not a folder.

    Args:
        hf_model: a folder, or a hub id such as `Qwen/Qwen3-VL-2B-Instruct`.
        weights: whether the weights are needed too.
        trust_remote_code: whether the model may contain code. It is copied then, never run here.

    Raises:
        CheckpointError: it is neither, or contains code that is not trusted.
    """
    path = expanded(hf_model)
    if path.is_dir():
        folder = path
    else:
        folder = _downloaded(hf_model, [*_SIDE_FILES, _CODE, *(_WEIGHT_FILES if weights else ())])
    if (name := _calls_for_code(folder)) and not trust_remote_code:
        raise CheckpointError(
            f"{folder / name} refers to code in the model's folder (auto_map); --trust-remote-code copies it"
        )
    return folder


def _calls_for_code(folder: Path) -> str | None:
    """The file that refers to the model's own code, None if none does."""
    for path in sorted(folder.glob("*config.json")):
        if path.is_file() and "auto_map" in read_object(path):
            return path.name
    return None


def _downloaded(hf_model: str | Path, patterns: list[str]) -> Path:
    path = expanded(hf_model)
    if path.exists():
        raise CheckpointError(f"{hf_model} is a file, expected a folder with config.json and *.safetensors")
    if isinstance(hf_model, Path) or not _HUB_ID.fullmatch(hf_model):
        raise CheckpointError(f"{hf_model} does not exist, expected a folder with config.json and *.safetensors")
    import httpx

    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ValueError as error:  # it parses its endpoint URL when it is imported
        raise _no_address(hf_model, os.environ.get("HF_ENDPOINT"), error) from error
    try:
        return Path(snapshot_download(hf_model, allow_patterns=patterns))
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise _no_address(hf_model, constants.ENDPOINT, error) from error
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{hf_model} is neither a folder nor a model available from the hub: {reason}") from error


def _no_address(hf_model: str, found: str | None, error: Exception) -> CheckpointError:
    expected = "expected the URL of a hub"
    return CheckpointError(f"{hf_model} is not a folder, and HF_ENDPOINT is {found!r}, {expected}: {error}")


def side_files(folder: Path) -> list[Path]:
    """The files of a model's folder that are not weights and belong to it, as paths relative to `folder`, sorted."""
    found = (path.relative_to(folder) for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_file())
    patterns = (*_SIDE_FILES, _CODE) if _calls_for_code(folder) else _SIDE_FILES
    return sorted(path for path in found if any(fnmatch(path.as_posix(), pattern) for pattern in patterns))


def copy_side_files(source: Path, destination: Path) -> list[Path]:
    """Copy configuration, tokenizer and processor files from one folder to another; never weights.

    Args:
        source: folder of a Hugging Face model.
        destination: folder, created if it does not exist.

    Returns:
        The copied files, relative to the folder.
    """
    files = side_files(source)
    for relative in files:
        target = destination / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / relative, target)
    return files
