"""Images and videos that were downloaded before training, by URL.

For each URL the folder contains the file, or a text file with the reason why the URL was given up, or nothing. Training
reads a file, treats a sample with a URL that was given up as bad, and stops if there is nothing: then the folder is
incomplete, and the dropped samples have to be the same in every process, on every machine and in a resumed run. For the
same reason training stops if the folder and the record of the data (`download_record.py`) differ.
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
    """The user's default folder of downloads."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "qwen3vl_bridge" / "media"


@dataclass(frozen=True)
class UrlCache:
    """A folder of downloaded files. Picklable, for data-loading workers.

    Attributes:
        folder: the folder; `default_cache()` if None.
        record: record of the data whose files are read; None to use only the state of the folder.
    """

    folder: Path | None = None
    record: DownloadRecord | None = None

    @property
    def root(self) -> Path:
        """The folder."""
        return self.folder or default_cache()

    def of_data(self, data: str) -> UrlCache:
        """The same folder, with the record of a data set; an empty record if there is none.

        Args:
            data: name of the data in the record.

        Raises:
            DataError: the record is damaged.
        """
        return replace(self, record=DownloadRecord.read(self.root, data))

    def __call__(self, address: str, place: str) -> Path:
        """The file that was downloaded from a URL.

        Args:
            address: a URL that begins with "http://" or "https://".
            place: the sample that contains it, for messages.

        Raises:
            DataError: the URL was given up.
            Unreachable: the URL was not downloaded, or its state differs from the record.
        """
        path, found = self.path_of(address), f"found the URL {shown(address)}"
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
        """Path of a URL's file, whether or not it exists: a digest and the end of the URL, so that FFmpeg gets a file
        extension.
        """
        digest, url = digest_of(address).hex(), read_url(address)
        name = "" if url is None else url.path.rpartition("/")[2]
        ending = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[-60:]
        return self.root / digest[:2] / f"{digest[2:42]}-{ending}"

    def problem_of(self, address: str) -> str | None:
        """Why a URL was given up; None if it was not, or if the file with the reason is damaged."""
        try:
            return _problem_file(self.path_of(address)).read_text("utf-8")
        except (FileNotFoundError, UnicodeDecodeError):
            return None

    def give_up(self, address: str, problem: str) -> None:
        """Store that a URL is given up, and why."""
        path = self.path_of(address)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.problem")
        partial.write_text(problem, "utf-8")
        partial.replace(_problem_file(path))

    def forget_problem(self, address: str) -> None:
        """Remove the reason of an earlier failure."""
        _problem_file(self.path_of(address)).unlink(missing_ok=True)


def digest_of(address: str) -> bytes:
    """SHA-256 that identifies a URL, without its fragment, which is not sent to the server."""
    url = read_url(address)
    text = address if url is None else str(url.copy_with(fragment=None))
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()


def _problem_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.problem")
