"""Record of which URLs of a data set were given up when it was downloaded.

A sample whose URL was given up is bad. These samples have to be the same in every process, on every machine and in a
resumed run, regardless of other downloads into the same folder or later retries. Therefore a completed download writes
a record under the name of its data, and this record is decisive.
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
from qwen3vl_bridge.io.atomic import replace_file
from qwen3vl_bridge.io.parsing import read_json

_FOLDER, _VERSION, _DIGEST = "records", 1, 8


@dataclass(frozen=True)
class DownloadRecord:
    """Which URLs of a data set were given up. Picklable, for data-loading workers.

    Attributes:
        total: number of URLs in the data.
        missing: number of URLs that are neither downloaded nor given up; if any, the download is to be continued.
        given_up: concatenated digests of the URLs that are given up, in ascending order.
    """

    total: int = 0
    missing: int = 0
    given_up: bytes = b""

    @classmethod
    def of(cls, total: int, missing: int, given_up: Iterable[bytes]) -> Self:
        """A record with the digests of URLs (see `digest_of`); arguments as for the class."""
        return cls(total, missing, b"".join(sorted(digest[:_DIGEST] for digest in given_up)))

    @classmethod
    def read(cls, root: Path, data: str) -> Self:
        """Read the record from a folder of downloads; an empty one if there is none.

        Args:
            root: the folder.
            data: name of the data, as for `write`.

        Raises:
            DataError: the record is damaged or has another version.
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
        """Write the record, replacing an earlier one.

        Args:
            root: the folder of downloads.
            data: name of the data, which does not depend on their path.
        """
        path = _path(root, data)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"version": _VERSION, "total": self.total, "missing": self.missing, "given_up": self.given_up.hex()}
        replace_file(path, json.dumps(content).encode())

    def __contains__(self, digest: bytes) -> bool:
        """Whether the URL with this digest was given up."""
        wanted, held = digest[:_DIGEST], len(self.given_up) // _DIGEST

        def one(place: int) -> bytes:
            return self.given_up[place * _DIGEST : (place + 1) * _DIGEST]

        place = bisect_left(range(held), wanted, key=one)
        return place < held and one(place) == wanted

    def __str__(self) -> str:
        digest = hashlib.sha256(self.given_up).hexdigest()[:16]
        return f"without {len(self.given_up) // _DIGEST:,} of {self.total:,} addresses ({digest})"

    def mark(self, fingerprint: str, place: str) -> str:
        """Add the URLs that were given up to the fingerprint of data.

        Args:
            fingerprint: fingerprint of the data without its downloads.
            place: name of the data in messages.

        Raises:
            Unreachable: some URLs are neither downloaded nor given up, so the data are not determined yet.
        """
        if self.missing:
            raise Unreachable(
                place,
                f"found {self.missing:,} of {self.total:,} URLs not downloaded; run `qwen3vl data download` again, or "
                "with --give-up to exclude them",
            )
        return f"{fingerprint}, {self}" if self.given_up else fingerprint


def _path(root: Path, data: str) -> Path:
    return root / _FOLDER / f"{hashlib.sha256(data.encode()).hexdigest()[:40]}.json"
