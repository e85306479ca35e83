"""The splits of a data folder: which of its files is for training, validation and test.

What lives here: the names of files. What may not: reading them (`opening.py`).
"""

from __future__ import annotations

from pathlib import Path

from qwen3vl_bridge.data.sources.hub import HUB

_NAMES = {"train": ("train",), "valid": ("valid", "validation", "val", "test"), "test": ("test",)}
_KINDS = ("jsonl", "json", "parquet")


def splits_in(path: str) -> dict[str, str]:
    """The path of each split that a path means, by the split's name.

    A folder with `train.jsonl` (or `.json`, `.parquet`) has its other splits beside it; one with `test.jsonl` alone is
    validated on that. Anything else is training data by itself: a file, a saved data set, one of the hub.

    Args:
        path: as `dataset.path` has it.
    """
    folder = Path(path)
    if path.startswith(HUB) or not folder.is_dir():
        return {"train": path}
    found = {split: _first(folder, names) for split, names in _NAMES.items()}
    if found["train"] is None:
        return {"train": path}
    return {split: str(file) for split, file in found.items() if file is not None}


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    files = (folder / f"{name}.{kind}" for name in names for kind in _KINDS)
    return next((file for file in files if file.is_file()), None)
