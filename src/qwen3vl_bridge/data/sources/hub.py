"""Conversations in data sets of Hugging Face's `datasets`: on disk, or on the hub.

What lives here: names on the hub, loading a data set and finding a row. What may not: what a row means (`tables.py`),
streaming (`hub_streaming.py`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media.images import MediaRoot, media_access
from qwen3vl_bridge.data.schemas.conversations import Conversation
from qwen3vl_bridge.data.schemas.named_schemas import NamedSchema, marked
from qwen3vl_bridge.data.sources.tables import columns_of, conversation_in, library

HUB = "hf://"


class HubDataset:
    """A map-style data set of Hugging Face's `datasets`, read as it is stored: pictures are not decoded here."""

    def __init__(
        self, dataset: Any, name: str, media_root: MediaRoot = None, schema: NamedSchema | None = None
    ) -> None:
        """Take a data set's rows as conversations.

        Args:
            dataset: a `datasets.Dataset`.
            name: what messages call it.
            media_root: folder that paths are relative to and may not leave, without which there may be none; or a
                `MediaAccess`.
            schema: of the records, where they have a named one.

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
        self.media = media_access(media_root, None)
        self._rows = dataset.select_columns(columns_of(dataset.column_names, name, schema)).with_format("arrow")
        self._fingerprint = dataset._fingerprint

    @classmethod
    def saved(cls, folder: str | Path, media_root: MediaRoot = None, schema: NamedSchema | None = None) -> HubDataset:
        """What `save_to_disk` left in a folder. Paths are relative to that folder by default.

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
        schema: NamedSchema | None = None,
    ) -> HubDataset:
        """A data set of the hub, downloaded or from the cache.

        Args:
            name: "owner/name".
            split: which; needless where there is but one.
            media_root: as for the class.
            schema: likewise.

        Raises:
            DataError: as for the class, no such data set or split, or several and none chosen.
        """
        dataset, split = load_named(name, split)
        source = cls(dataset, f"{name}#{split}", media_root, schema)
        # The library's own holds times of files in the cache, which differ from machine to machine.
        source._fingerprint = f"{len(source)} rows, {dataset.info.dataset_size} bytes"
        return source

    def __len__(self) -> int:
        return len(self._rows)

    def sample_id(self, index: int) -> str:
        """The data set's name and the row, counted from 0."""
        return f"{self.name}[{range(len(self))[index]}]"

    def fingerprint(self) -> str:
        """The library's own for a saved data set; rows and bytes for one of the hub."""
        return marked(self._fingerprint, self._schema)

    def __getitem__(self, index: int) -> Conversation:
        """Read one conversation.

        Raises:
            DataError: a row that cannot be read, or is no conversation.
        """
        place = self.sample_id(index)
        try:
            table = self._rows[range(len(self))[index]]
        except (OSError, library("pyarrow", place).ArrowException) as error:
            raise DataError(place, f"found a row unreadable ({error})") from error
        return conversation_in(table, 0, place, self.media, self._schema)


def name_on_hub(path: str) -> tuple[str, str | None]:
    """Name and split of "hf://owner/name#split", None for no split.

    Raises:
        DataError: a path of another form.
    """
    name, _, split = path.removeprefix(HUB).partition("#")
    if not path.startswith(HUB) or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise DataError(path, f"found the name {name!r}, expected hf://owner/name or hf://owner/name#split")
    return name, split or None


def load_named(name: str, split: str | None, **how: Any) -> tuple[Any, str]:
    """A data set of the hub, and which split it is.

    Args:
        name: "owner/name".
        split: which; needless where there is but one.
        how: what else `datasets.load_dataset` is told.

    Raises:
        DataError: no such data set or split, or several and none chosen; `datasets` is not installed.
    """
    place = f"{HUB}{name}"
    datasets = library("datasets", place)
    try:
        splits = [split] if split else datasets.get_dataset_split_names(name)
        dataset = datasets.load_dataset(name, split=splits[0], **how) if len(splits) == 1 else None
    except Exception as error:  # the network's, the hub's, and those of whatever reads its files
        raise DataError(place, f"found a data set that does not load ({error})") from error
    if dataset is None:
        raise DataError(place, f"found the splits {', '.join(splits)}, expected one, as {place}#{splits[0]}")
    return dataset, splits[0]
