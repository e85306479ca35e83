"""Pictures and videos that were downloaded before training, found by their addresses.

What lives here: the folder of what `qwen3vl data download` has fetched, and what it says of an address. What may not:
the network (`downloads.py`), decoding (`images.py`, `videos.py`).

Of each address the folder has the file, or a text file with the reason why there never will be one, or nothing.
Training reads the first, takes the second as a bad sample, and stops at the third: the folder is not whole, and which
samples are dropped must be the same in every process, on every machine, and when a run goes on. So training stops, too,
where the folder and what is on record of the data (`download_record.py`) differ.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from qwen3vl_bridge.data.errors import DataError, Unreachable
from qwen3vl_bridge.data.media.download_record import DownloadRecord
from qwen3vl_bridge.data.media.urls import read_url, shown


def default_cache() -> Path:
    """The user's folder of what was downloaded."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "qwen3vl_bridge" / "media"


@dataclass(frozen=True)
class UrlCache:
    """A folder of downloaded files. Picklable, for data-loading workers.

    Attributes:
        folder: it; the user's own if None.
        record: of the data that ask for files; None to go by the folder alone.
    """

    folder: Path | None = None
    record: DownloadRecord | None = None

    @property
    def root(self) -> Path:
        """The folder."""
        return self.folder or default_cache()

    def of_data(self, data: str) -> UrlCache:
        """The same, for data of which it has a record, or not.

        Args:
            data: what the record calls them.

        Raises:
            DataError: a damaged record.
        """
        return replace(self, record=DownloadRecord.read(self.root, data))

    def __call__(self, address: str, place: str) -> Path:
        """The file that was downloaded from an address.

        Args:
            address: it begins with "http://" or "https://".
            place: where it stands, for messages.

        Raises:
            DataError: it was tried, and given up.
            Unreachable: it was not downloaded, or not as the record says.
        """
        path, found = self.path_of(address), f"found the address {shown(address)}"
        is_there, is_recorded = path.is_file(), self.record is not None and digest_of(address) in self.record
        if is_there and not is_recorded:
            return path
        if is_there:
            raise Unreachable(
                place,
                f"{found}, which is there by now, and had been given up when these data were downloaded; expected the "
                "same as then: qwen3vl data download of these data takes it in, for a run from the beginning",
            )
        problem = self.problem_of(address)
        if is_recorded or (problem is not None and self.record is None):
            raise DataError(place, f"{found}, which could not be downloaded: {problem or 'it was given up'}")
        if problem is not None:
            raise Unreachable(
                place,
                f"{found}, which could not be downloaded ({problem}), and no record of that in a download of these "
                "data; expected one: run qwen3vl data download for them",
            )
        raise Unreachable(
            place,
            f"{found}, and no download of it in {self.root} (url_cache); expected all to be there before training: "
            "qwen3vl data download fetches them, with --columns and --schema-adapter as in the run",
        )

    def path_of(self, address: str) -> Path:
        """Where the file is, if there is one: a name for each address, with its end, so that FFmpeg sees an ending."""
        digest, url = digest_of(address).hex(), read_url(address)
        name = "" if url is None else url.path.rpartition("/")[2]
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


def digest_of(address: str) -> bytes:
    """What an address is told by, without its fragment, which nobody is asked for."""
    url = read_url(address)
    text = address if url is None else str(url.copy_with(fragment=None))
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()


def _problem_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.problem")
