"""Check that the paths in data settings exist, and find the splits (train, valid, test) of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qwen3vl_bridge.data.errors import DataError

HUB = "hf://"  # prefix of the names of data sets on the Hugging Face Hub
_SAVED = ("state.json", "dataset_dict.json")  # files that `save_to_disk` of Hugging Face's `datasets` writes
_SPLITS = {"train": ("train",), "valid": ("valid", "validation", "val", "test"), "test": ("test",)}


def check_data_paths(paths: Mapping[str, str], *, any_folder: bool = False) -> None:
    """Raise ValueError if a path does not exist, or is a folder without data. Skip hf:// names and glob patterns.

    Args:
        paths: path of each setting, by the setting's name.
        any_folder: accept every folder, as for WebDatasets.
    """
    local = {name: path for name, path in paths.items() if not path.startswith(HUB) and not set(path) & set("*?[")}
    if missing := [f"{name} is {path}" for name, path in local.items() if not Path(path).exists()]:
        raise ValueError(f"{', '.join(missing)}: there is no such file or folder")
    for path in () if any_folder else local.values():
        if Path(path).is_dir() and splits_in(path) == {"train": path}:
            check_folder(Path(path))


def check_folder(folder: Path) -> None:
    """Raise DataError if a folder has neither Parquet files nor a data set written by `save_to_disk`."""
    if is_saved_dataset(folder) or any(folder.glob("*.parquet")):
        return
    names = sorted((file.suffix not in (".json", ".jsonl"), file.name) for file in folder.iterdir())
    listed = ", ".join(name for _, name in names[:5]) or "nothing"
    file = folder / names[0][1] if names and not names[0][0] else "another .json or .jsonl file"
    raise DataError(
        str(folder),
        f"found {listed} in the folder, expected train.jsonl, Parquet files or a data set written by save_to_disk; "
        f"to use {file}, give its own path",
    )


def is_saved_dataset(folder: Path) -> bool:
    """Return whether a folder was written by `save_to_disk` of Hugging Face's `datasets`."""
    return any((folder / name).is_file() for name in _SAVED)


def splits_in(path: str) -> dict[str, str]:
    """Return the path of each split of `dataset.path`, by the name of the split.

    A folder has splits if it has `train.jsonl` (or `.json`, `.parquet`), files such as
    `train-00000-of-00004.parquet`, or splits written by `save_to_disk` of Hugging Face's `datasets`. Without a
    validation split, `test.jsonl` is also used for validation. Anything else is training data only: a file, a folder
    of files that are not named by split, a saved data set without splits, a data set on the hub.
    """
    folder = Path(path)
    if path.startswith(HUB) or not folder.is_dir():
        return {"train": path}

    def find_split(name: str) -> Path | None:
        for file in (folder / f"{name}.{kind}" for kind in ("jsonl", "json", "parquet")):
            if file.is_file():
                return file
        if any(folder.glob(f"{name}-*.parquet")):
            return folder / f"{name}-*.parquet"
        return folder / name if (folder / name / "state.json").is_file() else None

    found = {split: next(filter(None, map(find_split, names)), None) for split, names in _SPLITS.items()}
    if found["train"] is None:
        return {"train": path}
    return {split: str(file) for split, file in found.items() if file is not None}


def path_of_split(path: str, split: str) -> str:
    """Return the path of one split of `dataset.path`; raise DataError if there is no such split."""
    found = splits_in(path)
    if split not in found:
        raise DataError(path, f"found {', '.join(found)}, but no {split} split; use a folder that contains one")
    return found[split]
