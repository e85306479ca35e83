"""Compares the data with those that a checkpoint's position or a packing refers to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Names of the entries that differ or that one of them lacks."""
    return [name for name in dict.fromkeys((*expected, *found)) if found.get(name) != expected.get(name)]


def check_position(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse a position in other data.

    Args:
        found: fingerprint of the present data.
        expected: fingerprint stored with the position.

    Raises:
        ValueError: they differ.
    """
    now, then = found.get("parts"), expected.get("parts")
    if then is not None and now is not None and now != then:
        raise ValueError(
            f"the position is in a stream that was read in {then} parts, found {now}, expected {then}: as many "
            "data-parallel ranks x data-loading processes as before, or others of which it is a multiple and "
            f"dataset.stream_parts={then}"
        )
    if names := differing(found, expected):
        differ = "; ".join(f"{name} {found.get(name)}, expected {expected.get(name)}" for name in names)
        raise ValueError(f"the checkpoint's position belongs to other data: found {differ}")


def check_alike(found: Sequence[Any], what: str) -> None:
    """Refuse data that are not the same in every process.

    Args:
        found: fingerprints by rank.
        what: the data, for messages.

    Raises:
        ValueError: they differ.
    """
    other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
    if other is not None:
        raise ValueError(
            f"{what} differ among the processes: found {found[other]} on rank {other}, expected {found[0]} as on rank "
            "0. Every machine needs the same files, and the same downloads: copy the folder url_cache, records and all"
        )


def check_assignment(row: int, before: tuple[int, int], now: tuple[int, int]) -> None:
    """Refuse a position within rows that were assigned to ranks differently.

    Args:
        row: the position.
        before: how many rows were assigned together, and to how many ranks.
        now: the same for the present run.

    Raises:
        ValueError: the position is within such rows.
    """
    if before != now and any(row % over for over, _ in (before, now)):
        raise ValueError(
            f"the position, row {row}, is among {before[0]} rows that were assigned to {before[1]} ranks, "
            f"and now {now[0]} rows are to {now[1]}: expected the same, or a checkpoint between them"
        )
