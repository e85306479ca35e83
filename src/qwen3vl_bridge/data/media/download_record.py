"""What became of the addresses in some data when they were downloaded.

What lives here: the record of it, and its file. What may not: files by their addresses, and what the record means for
them (`url_cache.py`); downloading (`data/downloading.py`).

A sample whose address was given up is a bad one. Which those are must be the same in every process, on every machine,
and when a run goes on, whatever else is downloaded into the same folder meanwhile, or tried anew. So a download that
came to its end leaves a record under the name of its data, and that record decides.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from qwen3vl_bridge.data.errors import DataError, Unreachable
from qwen3vl_bridge.files.atomic import replace_file
from qwen3vl_bridge.files.parsing import read_json

_FOLDER, _VERSION, _DIGEST = "records", 1, 8


@dataclass(frozen=True)
class DownloadRecord:
    """Which addresses of some data were given up. Picklable, for data-loading workers.

    Attributes:
        total: addresses in the data.
        missing: of them those that are neither there nor given up: the download is to go on.
        given_up: digests of the others without a file, one after the other, in ascending order.
    """

    total: int = 0
    missing: int = 0
    given_up: bytes = b""

    @classmethod
    def of(cls, total: int, missing: int, given_up: Iterable[bytes]) -> Self:
        """Made of the digests of addresses (see `digest_of`); arguments as for the class."""
        return cls(total, missing, b"".join(sorted(digest[:_DIGEST] for digest in given_up)))

    @classmethod
    def read(cls, root: Path, data: str) -> Self:
        """What a folder of downloads has on record; nothing given up if nothing is.

        Args:
            root: the folder.
            data: as `write` was told.

        Raises:
            DataError: a record that is damaged, or of another version.
        """
        path = _path(root, data)
        try:
            found = read_json(path)
            if found["version"] != _VERSION:
                raise ValueError(f"version {found['version']}, expected {_VERSION}")
            given_up = bytes.fromhex(found["given_up"])
            if len(given_up) % _DIGEST:
                raise ValueError(f"{len(given_up)} bytes of digests, expected {_DIGEST} for each")
            return cls(int(found["total"]), int(found["missing"]), given_up)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                str(path), f"cannot read what was downloaded ({error}); qwen3vl data download of these data mends it"
            ) from error

    def write(self, root: Path, data: str) -> None:
        """Put it on record, in place of an earlier one.

        Args:
            root: the folder of downloads.
            data: what the data are called, the same wherever they lie.
        """
        path = _path(root, data)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"version": _VERSION, "total": self.total, "missing": self.missing, "given_up": self.given_up.hex()}
        replace_file(path, json.dumps(content).encode())

    def __contains__(self, digest: bytes) -> bool:
        """Whether an address was given up."""
        wanted, held = digest[:_DIGEST], len(self.given_up) // _DIGEST

        def one(place: int) -> bytes:
            return self.given_up[place * _DIGEST : (place + 1) * _DIGEST]

        place = bisect_left(range(held), wanted, key=one)
        return place < held and one(place) == wanted

    def __str__(self) -> str:
        digest = hashlib.sha256(self.given_up).hexdigest()[:16]
        return f"without {len(self.given_up) // _DIGEST:,} of {self.total:,} addresses ({digest})"

    def mark(self, fingerprint: str, place: str) -> str:
        """The fingerprint of data, with what is not there of them.

        Args:
            fingerprint: of all else.
            place: what messages call the data.

        Raises:
            Unreachable: addresses are neither there nor given up, so it is not known what the data will be.
        """
        if self.missing:
            raise Unreachable(
                place,
                f"found {self.missing:,} of {self.total:,} addresses neither downloaded nor given up, expected all of "
                "them to be one of both before training: run qwen3vl data download again, or with --give-up",
            )
        return f"{fingerprint}, {self}" if self.given_up else fingerprint


def _path(root: Path, data: str) -> Path:
    return root / _FOLDER / f"{hashlib.sha256(data.encode()).hexdigest()[:40]}.json"
