"""Pictures and videos that were downloaded before training, found by their addresses.

What lives here: the folder of what `qwen3vl data download` has fetched, and what it says of an address. What may not:
the network (`downloads.py`), decoding (`images.py`, `videos.py`).

Of each address the folder has the file, or a text file with the reason why there never will be one, or nothing.
Training reads the first, takes the second as a bad sample, and stops at the third: the folder is not whole, and which
samples are dropped must be the same in every process, on every machine, and when a run goes on.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from qwen3vl_bridge.data.errors import DataError, Unreachable
from qwen3vl_bridge.data.media.urls import read_url, shown


def default_cache() -> Path:
    """The user's folder of what was downloaded."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "qwen3vl_bridge" / "media"


@dataclass(frozen=True)
class UrlCache:
    """A folder of downloaded files. Picklable, for data-loading workers.

    Attributes:
        folder: it; the user's own if None.
    """

    folder: Path | None = None

    @property
    def root(self) -> Path:
        """The folder."""
        return self.folder or default_cache()

    def __call__(self, address: str, place: str) -> Path:
        """The file that was downloaded from an address.

        Args:
            address: it begins with "http://" or "https://".
            place: where it stands, for messages.

        Raises:
            DataError: it was tried, and given up.
            Unreachable: it was not downloaded.
        """
        path = self.path_of(address)
        if path.is_file():
            return path
        if (problem := self.problem_of(address)) is not None:
            raise DataError(place, f"found the address {shown(address)}, which could not be downloaded: {problem}")
        raise Unreachable(
            place,
            f"found the address {shown(address)}, and no download of it in {self.root} "
            "(url_cache); expected all to be there before training: qwen3vl data download fetches them",
        )

    def path_of(self, address: str) -> Path:
        """Where the file is, if there is one: a name for each address, with its end, so that FFmpeg sees an ending."""
        url = read_url(address)
        text, name = (address, "") if url is None else (str(url.copy_with(fragment=None)), url.path.rpartition("/")[2])
        digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
        ending = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[-60:]
        return self.root / digest[:2] / f"{digest[2:42]}-{ending}"

    def problem_of(self, address: str) -> str | None:
        """Why there will be no file; None where that is not known, or was written down and is damaged."""
        try:
            return _problem_file(self.path_of(address)).read_text("utf-8")
        except (FileNotFoundError, UnicodeDecodeError):
            return None

    def give_up(self, address: str, problem: str) -> None:
        """Write down that there will be no file, and why."""
        path = self.path_of(address)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.problem")
        partial.write_text(problem, "utf-8")
        partial.replace(_problem_file(path))

    def forget_problem(self, address: str) -> None:
        """Leave no word of an earlier failure."""
        _problem_file(self.path_of(address)).unlink(missing_ok=True)


def _problem_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.problem")
