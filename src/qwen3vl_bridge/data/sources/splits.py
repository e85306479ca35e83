"""The splits of a data path: which of its files or folders are for training, validation and test."""

from __future__ import annotations

from pathlib import Path

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.sources.hub import HUB

_NAMES = {"train": ("train",), "valid": ("valid", "validation", "val", "test"), "test": ("test",)}
_KINDS = ("jsonl", "json", "parquet")


def splits_in(path: str) -> dict[str, str]:
    """The path of each split of a data path, by the split's name.

    If there is `train.jsonl` (or `.json`, `.parquet`), files such as `train-00000-of-00004.parquet`, or splits written
    by `save_to_disk` of Hugging Face's `datasets`, the other splits are in the same folder; if only `test.jsonl` is
    there, it is also the validation split. Anything else is only training data: a file, a folder of files not named by
    a split, a saved data set without splits, one of the hub.

    Args:
        path: as `dataset.path`.
    """
    folder = Path(path)
    if path.startswith(HUB) or not folder.is_dir():
        return {"train": path}
    found = {split: _first(folder, names) for split, names in _NAMES.items()}
    if found["train"] is None:
        return {"train": path}
    return {split: str(file) for split, file in found.items() if file is not None}


def split_of(path: str, split: str) -> str:
    """The path of one split.

    Args:
        path: as `dataset.path`.
        split: "train", "valid" or "test".

    Raises:
        DataError: it does not exist.
    """
    found = splits_in(path)
    if split not in found:
        raise DataError(path, f"found {', '.join(found)} and no {split} split, expected a folder that has one")
    return found[split]


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((found for name in names if (found := _of_split(folder, name)) is not None), None)


def _of_split(folder: Path, name: str) -> Path | None:
    for file in (folder / f"{name}.{kind}" for kind in _KINDS):
        if file.is_file():
            return file
    if any(folder.glob(f"{name}-*.parquet")):
        return folder / f"{name}-*.parquet"
    return folder / name if (folder / name / "state.json").is_file() else None
