"""Sources of conversations: JSON, Parquet, tables, the hub; splits and fingerprints."""

from pathlib import Path

HUB = "hf://"  # prefix of paths of data sets on the hub


def expect_data(name: str, path: str) -> None:
    """Refuse a path of data, of a setting, that does not exist (ValueError); patterns and names of the hub may not."""
    if not any(mark in path for mark in "*?[") and not path.startswith(HUB) and not Path(path).exists():
        raise ValueError(f"{name} is {path}: there is no such file or folder")
