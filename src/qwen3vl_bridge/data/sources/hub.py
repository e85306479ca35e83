"""Conversations in data sets of Hugging Face's `datasets`: on disk, or on the hub."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media.media_access import MediaRoot, media_access
from qwen3vl_bridge.data.schemas.conversations import Conversation
from qwen3vl_bridge.data.schemas.record_schemas import Schema, marked
from qwen3vl_bridge.data.sources.tables import columns_of, conversation_in, library

HUB = "hf://"
SPELLINGS = "hf://owner/name, hf://owner/name:configuration#split or hf://datasets/owner/name/files"
_NAME = re.compile(
    r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[^@:/#]+))?(:(?P<configuration>[^#]+)|/(?P<files>[^#]+))?"
    r"(#(?P<split>.+))?"
)
_FILES = re.compile(r"[*?\[]|\.(parquet|jsonl?|arrow)(\.\w+)?$")  # anything else is a folder


@dataclass(frozen=True)
class HubName:
    """Name of a data set of the hub.

    Attributes:
        repository: "owner/name".
        configuration: the configuration, if the data set has several, such as The Cauldron's "ai2d".
        split: the split; optional if there is only one.
        revision: branch, tag or commit; the main branch if None.
        files: a folder of the repository, a file or a pattern, instead of a configuration; `datasets` treats these as
            one split, "train", unless a folder's files are named by splits.
    """

    repository: str
    configuration: str | None = None
    split: str | None = None
    revision: str | None = None
    files: str | None = None

    @classmethod
    def of(cls, path: str) -> Self:
        """Read "hf://owner/name@revision:configuration#split"; all parts except owner and name are optional.

        Hugging Face's own "hf://datasets/owner/name@revision/files" means the same, and "/" in a revision is "%2F".

        Raises:
            DataError: a path of another form.
        """
        name = path.removeprefix(HUB)
        spelled = _NAME.fullmatch(name.removeprefix("datasets/"))
        if spelled is None or (spelled["files"] and not name.startswith("datasets/")):
            raise DataError(path, f"found the name {name!r}, expected {SPELLINGS}")
        found = spelled.groupdict()
        return cls(**found | {"revision": found["revision"] and unquote(found["revision"])})

    def __str__(self) -> str:
        """The name for messages and sample ids, without "hf://"."""
        parts = (("@", self.revision), (":", self.configuration), ("/", self.files), ("#", self.split))
        name = "".join(f"{mark}{part}" for mark, part in parts if part is not None)
        return f"{'datasets/' if self.files else ''}{self.repository}{name}"

    def arguments(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """Arguments for functions of `datasets`, except the split."""
        named = (self.repository,) if self.configuration is None else (self.repository, self.configuration)
        of_files = "data_files" if self.files and _FILES.search(self.files) else "data_dir"
        others = {"revision": self.revision, of_files: self.files and self.files.strip("/")}
        return named, {name: value for name, value in others.items() if value is not None}


class HubDataset:
    """A map-style data set of Hugging Face's `datasets`, read as it is stored: images are not decoded here."""

    def __init__(
        self,
        dataset: Any,
        name: str,
        media_root: MediaRoot = None,
        schema: Schema | None = None,
        recorded_as: str | None = None,
    ) -> None:
        """Read a data set's rows as conversations.

        Args:
            dataset: a `datasets.Dataset`.
            name: its name in messages.
            media_root: folder that paths are relative to and must not leave; None if paths are not allowed; or a
                `MediaAccess`.
            schema: schema of the records, or None.
            recorded_as: name of the data in the download record; the library's fingerprint if None.

        Raises:
            DataError: a streaming data set, several splits, no column of messages, or no rows.
        """
        datasets = library("datasets", name)
        if isinstance(dataset, (datasets.IterableDataset, datasets.IterableDatasetDict)):
            raise DataError(
                name,
                "found a streaming dataset, which has no length and no rows by number, expected another: give it to "
                "StreamedDataset, or load it without streaming",
            )
        if isinstance(dataset, datasets.DatasetDict):
            raise DataError(name, f"found the splits {', '.join(dataset)}, expected one of them")
        if not len(dataset):
            raise DataError(name, "found no rows, expected one conversation a row")
        self.name, self._schema = name, schema
        columns = columns_of(dataset.features.arrow_schema, name, schema)
        self._rows = dataset.select_columns(columns).with_format("arrow")
        self.recorded_as, self._fingerprint = marked(recorded_as or dataset._fingerprint, schema), dataset._fingerprint
        self.media = media_access(media_root, None).of_data(self.recorded_as)

    @classmethod
    def saved(cls, folder: str | Path, media_root: MediaRoot = None, schema: Schema | None = None) -> HubDataset:
        """A folder written by `save_to_disk`. Paths are relative to that folder by default.

        Raises:
            DataError: as for the class, or a folder that cannot be loaded; `datasets` is not installed.
        """
        folder = Path(folder)
        if (folder / "dataset_dict.json").is_file():
            splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
            raise DataError(str(folder), f"found the splits {', '.join(splits)}, expected one, as {folder}/SPLIT")
        try:
            dataset = library("datasets", str(folder)).load_from_disk(str(folder))
        except DataError:
            raise
        except Exception as error:  # any of Arrow's, JSON's and its own
            raise DataError(str(folder), f"found a data set that does not load ({error})") from error
        return cls(dataset, folder.name, media_access(media_root, folder), schema)

    @classmethod
    def named(
        cls,
        name: str,
        split: str | None = None,
        media_root: MediaRoot = None,
        schema: Schema | None = None,
    ) -> HubDataset:
        """A data set of the hub, downloaded or from the cache.

        Args:
            name: "owner/name", or any form that `HubName.of` reads.
            split: the split, if the name has none; optional if there is only one.
            media_root: as for the class.
            schema: as for the class.

        Raises:
            DataError: as for the class; an unknown data set, configuration or split, or several and none chosen.
        """
        dataset, called = load_named(name, split)
        source = cls(dataset, called, media_root, schema, recorded_as=called)
        # The library's own fingerprint contains times of cached files, which differ between machines.
        source._fingerprint = f"{called}, {len(source)} rows, {dataset.info.dataset_size} bytes"
        return source

    def __len__(self) -> int:
        return len(self._rows)

    def sample_id(self, index: int) -> str:
        """The data set's name and the row, counted from 0."""
        return f"{self.name}[{range(len(self))[index]}]"

    def fingerprint(self) -> str:
        """The library's own for a saved data set; name, rows and bytes for one of the hub; and the files that were not
        downloaded.

        Raises:
            Unreachable: the download is not complete.
        """
        return self.media.mark(marked(self._fingerprint, self._schema), self.name)

    def __getitem__(self, index: int) -> Conversation:
        """Read one conversation.

        Raises:
            DataError: a row that cannot be read, or is not a conversation.
        """
        place = self.sample_id(index)
        try:
            table = self._rows[range(len(self))[index]]
        except (OSError, library("pyarrow", place).ArrowException) as error:
            raise DataError(place, f"found a row unreadable ({error})") from error
        return conversation_in(table, 0, place, self.media, self._schema)


def load_named(name: str, split: str | None = None, **how: Any) -> tuple[Any, str]:
    """A data set of the hub, and its name with the split.

    Args:
        name: any form that `HubName.of` reads.
        split: the split, if the name has none; optional if there is only one.
        how: further arguments of `datasets.load_dataset`.

    Raises:
        DataError: an unknown data set, configuration or split, or several and none chosen; `datasets` is not installed.
    """
    found = HubName.of(name)
    if split and found.split not in (None, split):
        raise DataError(name, f"found the split {split!r} in addition, expected one split")
    found = replace(found, split=found.split or split)
    place = f"{HUB}{replace(found, split=None)}"
    datasets = library("datasets", place)
    named, others = found.arguments()
    try:
        splits = [found.split] if found.split else datasets.get_dataset_split_names(*named, **others)
        dataset = datasets.load_dataset(*named, split=splits[0], **others, **how) if len(splits) == 1 else None
    except Exception as error:  # errors of the network, the hub, and file formats
        _check_configuration(datasets, found, error)
        raise DataError(place, f"found a data set that does not load ({error})") from error
    if dataset is None:
        raise DataError(place, f"found the splits {', '.join(splits)}, expected one, as {place}#{splits[0]}")
    return dataset, str(replace(found, split=splits[0]))


def _check_configuration(datasets: Any, name: HubName, error: Exception) -> None:
    """Add the available configurations to the library's error message."""
    names: list[str] = []
    if isinstance(error, ValueError) and name.files is None:  # not an error of the network or the hub
        with suppress(Exception):
            names = datasets.get_dataset_config_names(name.repository, revision=name.revision)
    if names and name.configuration not in (names if len(names) > 1 else (None, *names)):
        known = replace(name, configuration=None, split=None)
        example = replace(name, configuration=names[0])
        raise DataError(
            f"{HUB}{known}",
            f"found the configurations {', '.join(names)}, expected one of them, as {HUB}{example}",
        ) from error
