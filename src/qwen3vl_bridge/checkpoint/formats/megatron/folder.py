"""The folder of a Megatron checkpoint: the files around the tensors."""

from __future__ import annotations

from pathlib import Path

from qwen3vl_bridge.checkpoint.formats.dcp.metadata import FILE as METADATA
from qwen3vl_bridge.checkpoint.formats.dcp.metadata import DcpMetadata
from qwen3vl_bridge.checkpoint.formats.folder_contents import contents_of
from qwen3vl_bridge.io.errors import CheckpointError
from qwen3vl_bridge.io.json_files import read_object

TRACKER = "latest_checkpointed_iteration.txt"
TRAIN_STATE = "train_state.pt"
LATEST_TRAIN_STATE = f"latest_{TRAIN_STATE}"
RUN_CONFIG = "run_config.yaml"
HF_FILES = "hf"

# megatron-core's names of the two formats.
FSDP_DTENSOR, TORCH_DIST = "fsdp_dtensor", "torch_dist"
FORMATS = (FSDP_DTENSOR, TORCH_DIST)
# Contains the format's name; missing in an fsdp_dtensor folder.
FORMAT_FILE = "metadata.json"

# Prefix of megatron-core's state dict of a model wrapped in MegatronFSDP; its own format has parameters' plain names.
_SECTION, _WRAPPER = "model", "module."
_PREFIX = {FSDP_DTENSOR: f"{_SECTION}.{_WRAPPER}", TORCH_DIST: ""}
# Prefixes of parameter names. torch_dist has optimizer state and the like in addition.
_PARTS = ("language_model.", "vision_model.")


def key_of(parameter: str, ckpt_format: str = FSDP_DTENSOR) -> str:
    """Key of a parameter in a checkpoint."""
    return _PREFIX[ckpt_format] + parameter


def path_of(parameter: str, ckpt_format: str = FSDP_DTENSOR) -> tuple[str, ...]:
    """Position of a parameter in the nested state dict."""
    return (_SECTION, _WRAPPER + parameter) if ckpt_format == FSDP_DTENSOR else (parameter,)


def model_keys(metadata: DcpMetadata, ckpt_format: str = FSDP_DTENSOR) -> dict[str, str]:
    """The model's parameters in a checkpoint: name -> key. Optimizer state and the like are ignored.

    Raises:
        CheckpointError: there are none.
    """
    prefix = _PREFIX[ckpt_format]
    names = {key.removeprefix(prefix): key for key in metadata.tensors if key.startswith(prefix)}
    if ckpt_format == TORCH_DIST:
        names = {name: key for name, key in names.items() if name.startswith(_PARTS)}
    names = {name: key for name, key in names.items() if "_extra_state" not in name}
    if not names:
        found = ", ".join(sorted(metadata.tensors)[:3]) or "no tensors"
        expected = prefix or " or ".join(_PARTS)
        raise CheckpointError(f"{metadata.folder} holds no model: found {found}, expected keys like {expected}...")
    return names


def format_of(folder: Path) -> str:
    """The format of an iteration's folder.

    Raises:
        CheckpointError: it is neither of the two.
    """
    if not (folder / FORMAT_FILE).is_file():
        return FSDP_DTENSOR
    found = read_object(folder / FORMAT_FILE).get("sharded_backend")
    if found != TORCH_DIST:
        raise CheckpointError(f"{folder / FORMAT_FILE}: sharded_backend is {found!r}, expected {TORCH_DIST!r}")
    return TORCH_DIST


def iteration_folder(root: Path, iteration: int) -> Path:
    """Folder of an iteration's files."""
    return root / f"iter_{iteration:07d}"


def find_iteration(path: Path, iteration: int | None = None) -> Path:
    """The iteration's folder to read.

    Args:
        path: a checkpoint's root folder, or an iteration's folder itself.
        iteration: the iteration; None for the latest.

    Raises:
        CheckpointError: it does not exist.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: {contents_of(path)}, expected the folder of a Megatron checkpoint")
    if (path / METADATA).is_file():
        if iteration is not None and path.name != iteration_folder(path, iteration).name:
            raise CheckpointError(f"{path} is the folder of a single iteration, not of --iteration {iteration}")
        return path
    folder = _latest(path) if iteration is None else iteration_folder(path, iteration)
    if not (folder / METADATA).is_file():
        others = ", ".join(sorted(entry.name for entry in path.glob("iter_*"))) or "none"
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {METADATA}; iterations found: {others}")
    return folder


def _latest(path: Path) -> Path:
    tracker = path / TRACKER
    try:
        text = tracker.read_text(errors="replace").strip()
    except FileNotFoundError:
        missing = f"it has neither {TRACKER} nor {METADATA}"
        raise CheckpointError(f"{path} is not a Megatron checkpoint: {missing}; {contents_of(path)}") from None
    except OSError as error:
        raise CheckpointError(f"{tracker}: {error.strerror or error}") from error
    if text == "release":
        return path / "release"
    if not (text.isascii() and text.isdigit() and len(text) < 13):
        raise CheckpointError(f"{tracker} holds {text[:40]!r}, expected an iteration number")
    return iteration_folder(path, int(text))


def is_megatron_checkpoint(path: Path) -> bool:
    """Whether a folder looks like a checkpoint's root, or like one iteration of it."""
    return any((path / name).is_file() for name in (METADATA, TRACKER, LATEST_TRAIN_STATE))
