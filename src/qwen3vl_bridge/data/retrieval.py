"""Records of a query with relevant and irrelevant documents, for embedding models and rerankers.

Two formats are read. One has the keys "query", "positive" and "negatives", or the names that sentence-transformers and
FlagEmbedding give them. The other is ms-swift's: `messages` with `positive_messages` and `negative_messages`.

Prompts are those of the scripts in QwenLM/Qwen3-VL-Embedding, `src/models/qwen3_vl_embedding.py` and
`qwen3_vl_reranker.py`. The last token of a prompt has the embedding or the score. The answer after the prompt completes
the conversation: "." for an embedding model; for a reranker "yes" or "no", the label of the document.
"""

from __future__ import annotations

import re
import unicodedata
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qwen3vl_bridge.data.conversations import OTHER_OBJECTIVES, POSITIVE_KEYS, Columns, GroupRecord
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.records import (
    FPS_KEY,
    KEYS_OF_KIND,
    MEDIA_KEYS,
    MEDIA_NAME,
    drop_nulls,
    is_empty_medium,
    short_repr,
)

# Names of the same value; a record has one of them.
_NAMES = {
    "query": ("query", "anchor"),
    "instruction": ("instruction", "prompt"),
    "positive": POSITIVE_KEYS,
    "negative": ("negatives", "negative", "neg", "hard_negatives", "negative_messages"),
}
_NUMBERED = re.compile(r"negative_\d+")  # of sentence-transformers
# ms-swift's lists of the media of each document.
_MEDIA_KEYS = {f"{kind}_{medium}": kind for kind in ("positive", "negative") for medium in ("images", "videos")}
# Keys of other formats that would change what is trained, such as the similarity of a pair.
_UNREAD = re.compile(
    r"labels?|scores?|similarity|system|tools|response|completion|(positive|negative|pos|neg|query)_\w+"
)
_EXPECTED = "'query', 'positive' and, if there are any, 'negatives', or ms-swift's 'messages' and 'positive_messages'"
_EMPTY = [{"type": "text", "text": "NULL"}]  # of a document without text, images and videos


@dataclass(kw_only=True)
class _RetrievalColumns(Columns):
    """Names of the columns of records with a query and documents."""

    @property
    def name(self) -> str:
        """Return a text that identifies the schema, which is part of the fingerprint of a data set."""
        return f"{super().name} of {type(self).__name__}".strip()

    def check(self) -> None:
        """Raise ValueError for names of columns: these records have fixed names."""
        if given := sorted({*self.settings()} - {"ignore"}):
            raise ValueError(
                f"columns.{given[0]} is set, but records for an embedding model or a reranker have fixed names of "
                f"columns: {_EXPECTED}"
            )
        super().check()

    def convert_record(self, record: Any, place: str) -> Any:
        """Return the conversations of a record as a `GroupRecord`.

        Raises:
            DataError: the record has another format, or a key that would be ignored.
        """
        if not isinstance(record, dict):
            return record
        given = {key: value for key, value in drop_nulls(record).items() if key not in self.ignore}
        found = {name: _take_one(given, keys, place) for name, keys in _NAMES.items()}
        instruction, numbered = found["instruction"], sorted(filter(_NUMBERED.fullmatch, map(str, given)))
        negatives = [*_listed([] if found["negative"] is None else found["negative"]), *map(given.pop, numbered)]
        documents = {"positive": _listed([] if found["positive"] is None else found["positive"]), "negative": negatives}
        query: dict[str, Any] = {}
        if "messages" in given:
            query["messages"] = turns = given.pop("messages")
            if isinstance(turns, list) and len(turns) == 2 and _is_system(turns[0]) and instruction is None:
                instruction, query["messages"] = turns[0].get("content"), turns[1:]
            documents = {kind: [{"messages": one} for one in listed] for kind, listed in documents.items()}
            for key in [key for key in given if key in _MEDIA_KEYS]:
                _add_media(documents[_MEDIA_KEYS[key]], key, given.pop(key), place)
        elif found["query"] is not None:
            query = dict(found["query"]) if isinstance(found["query"], Mapping) else {"text": found["query"]}
        for key in [key for key in given if key in (*MEDIA_KEYS, FPS_KEY)]:
            if key in query:
                raise DataError(place, f"found {key!r} in the query and next to it, expected it once")
            query[key] = given.pop(key)
        if not documents["positive"] or not query:
            raise DataError(
                place, f"found the keys {', '.join(map(str, record))}, expected {_EXPECTED}; {OTHER_OBJECTIVES}"
            )
        if unread := [key for key in map(str, given) if _UNREAD.fullmatch(key) or MEDIA_NAME.fullmatch(key)]:
            problem = f"found {unread[0]!r}, which would be ignored, expected {_EXPECTED}"
            raise DataError(place, f"{problem}. Remove it, or set columns.ignore=[{unread[0]}]")
        if instruction is not None and not isinstance(instruction, str):
            raise DataError(place, f"found {short_repr(instruction)} as the instruction, expected a text")
        parts = self._parts(query, f"{place}: query")
        encoded = {
            kind: [self._parts(one, f"{place}: {kind} {number}") for number, one in enumerate(values, start=1)]
            for kind, values in documents.items()
        }
        return self.make_record(parts, encoded["positive"], encoded["negative"], instruction, place)

    def columns_to_read(self, names: Sequence[str], place: str) -> list[str]:
        """Return the columns to read from a table with the columns `names`; raise DataError if some are missing."""
        if not {*POSITIVE_KEYS} & {*names}:
            raise DataError(place, f"found the columns {', '.join(names)}, expected {_EXPECTED}; {OTHER_OBJECTIVES}")
        return [name for name in names if name not in self.ignore]  # other columns are rejected record by record

    @abstractmethod
    def make_record(
        self, query: list[Any], positives: list[list[Any]], negatives: list[list[Any]], instruction: str | None,
        place: str,
    ) -> GroupRecord:  # fmt: skip
        """Return the conversations for a query and its documents, which are given as lists of content parts."""

    def _parts(self, value: Any, place: str) -> list[Any]:
        """Return the content parts of a query or document.

        `value` is a text, or a mapping with `text` and media, or a mapping with `messages` and media.
        """
        given = {"text": value} if isinstance(value, str) else value
        if not isinstance(given, Mapping) or not {*given} <= {"text", "messages", FPS_KEY, *MEDIA_KEYS}:
            raise DataError(
                place, f"found {short_repr(value)}, expected a text, or an object with text, image or video"
            )
        if "messages" not in given:
            # Qwen's scripts write videos first, then images, then texts. With a rate, a video is a list of frames.
            rate = {FPS_KEY: given[FPS_KEY]} if FPS_KEY in given else {}
            media = [
                {"type": kind, kind: medium} | (rate if kind == "video" else {})
                for kind in ("video", "image")
                for key in KEYS_OF_KIND[kind]
                for medium in ([given[key]] if rate and key == "video" else _listed(given.get(key, [])))
                if not is_empty_medium(medium)
            ]
            texts = [{"type": "text", "text": text} for text in _listed(given.get("text", []))]
            given = {"messages": [{"role": "user", "content": [*media, *texts]}]}
        turns = given["messages"]
        if not isinstance(turns, list) or len(turns) != 1 or not isinstance(turns[0], Mapping):
            raise DataError(place, f"found {short_repr(turns)}, expected one message")
        if turns[0].get("content") == []:
            return _EMPTY
        pair = [{"role": "user", "content": turns[0].get("content")}, {"role": "assistant", "content": "."}]
        converted = super().convert_record({**given, "messages": pair}, place)["messages"][0]["content"]
        return [{"type": "text", "text": converted}] if isinstance(converted, str) else converted


class EmbeddingColumns(_RetrievalColumns):
    """Column names of data for an embedding model: a query, one relevant document, and irrelevant documents."""

    def make_record(
        self, query: list[Any], positives: list[list[Any]], negatives: list[list[Any]], instruction: str | None,
        place: str,
    ) -> GroupRecord:  # fmt: skip
        """Return one conversation each for the query, the positive document and every negative document, in order.

        Raises:
            DataError: there are several positive documents.
        """
        if len(positives) != 1:
            raise DataError(place, f"found {len(positives)} positive documents, expected one in each record")
        instruction = (instruction or "").strip()
        if instruction and not unicodedata.category(instruction[-1]).startswith("P"):
            instruction += "."

        def conversation(parts: list[Any], instruction: str = "") -> dict[str, Any]:
            system = [{"type": "text", "text": instruction or "Represent the user's input."}]
            return _conversation(system, parts, ".")

        documents = [("positive", conversation(positives[0]))]
        documents += [(f"negative {n}", conversation(parts)) for n, parts in enumerate(negatives, start=1)]
        return GroupRecord(conversation(query, instruction), documents)


class RerankerColumns(_RetrievalColumns):
    """Column names of data for a reranker: a query, and relevant and irrelevant documents."""

    def make_record(
        self, query: list[Any], positives: list[list[Any]], negatives: list[list[Any]], instruction: str | None,
        place: str,
    ) -> GroupRecord:  # fmt: skip
        """Return one conversation per document. Its answer is "yes" for a positive and "no" for a negative document."""
        rule = (
            "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that "
            'the answer can only be "yes" or "no".'
        )
        given = instruction or "Given a search query, retrieve relevant candidates that answer the query."

        def conversation(document: list[Any], answer: str) -> dict[str, Any]:
            texts = [{"type": "text", "text": text} for text in (f"<Instruct>: {given}", "<Query>:", "\n<Document>:")]
            content = [*texts[:2], *query, texts[2], *document]
            return _conversation([{"type": "text", "text": rule}], content, answer)

        first, *others = [conversation(parts, "yes") for parts in positives]
        others += [conversation(parts, "no") for parts in negatives]
        return GroupRecord(first, [(f"document {n}", one) for n, one in enumerate(others, start=2)])


def _conversation(system: list[Any], user: list[Any], answer: str) -> dict[str, Any]:
    roles = (("system", system), ("user", user), ("assistant", answer))
    return {"messages": [{"role": role, "content": content} for role, content in roles]}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_system(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "system"


def _take_one(given: dict[str, Any], keys: Sequence[str], place: str) -> Any:
    """Remove and return the value of the only one of `keys` in a record, or None; raise DataError for several."""
    found = [key for key in keys if key in given]
    if len(found) > 1:
        raise DataError(place, f"found {' and '.join(map(repr, found))}, expected one of them")
    return given.pop(found[0]) if found else None


def _add_media(documents: list[dict[str, Any]], key: str, media: Any, place: str) -> None:
    """Give each document its entry of ms-swift's list `media`, which the record has under `key`."""
    if not isinstance(media, list) or len(media) != len(documents):
        raise DataError(place, f"found {short_repr(media)} under {key!r}, expected a list for each document")
    for document, own in zip(documents, media, strict=True):
        document[key.partition("_")[2]] = own
