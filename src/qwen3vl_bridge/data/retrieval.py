"""Records of a query with relevant and irrelevant documents, for embedding models and rerankers.

Two formats are read. One has the keys "query", "positive" and "negatives", or the names that sentence-transformers and
FlagEmbedding give them. The other is ms-swift's: `messages` with `positive_messages` and `negative_messages`.

Prompts are those of the scripts in QwenLM/Qwen3-VL-Embedding, `src/models/qwen3_vl_embedding.py` and
`qwen3_vl_reranker.py`. The last token of a prompt has the embedding or the score. The answer after the prompt completes
the conversation: "." for an embedding model; for a reranker "yes" or "no", the label of the document.
"""

from __future__ import annotations

import unicodedata
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qwen3vl_bridge.data.conversations import Columns, GroupRecord
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.records import KEYS_OF_KIND, MEDIA_KEYS, drop_nulls, short_repr

_QUERY_KEYS, _INSTRUCTION_KEYS = ("query", "anchor"), ("instruction", "prompt")
_DOCUMENT_KEYS = {"positive": ("positive", "positives", "pos"), "negative": ("negatives", "negative", "neg")}
# ms-swift's keys: messages of documents, and lists of their media.
_MESSAGES_KEYS = {kind: f"{kind}_messages" for kind in _DOCUMENT_KEYS}
_MEDIA_KEYS = {f"{kind}_{medium}": kind for kind in _DOCUMENT_KEYS for medium in ("images", "videos")}
_EXPECTED = (
    "'query', 'positive' and, where there are any, 'negatives', or ms-swift's 'messages' and 'positive_messages'"
)
_EMPTY = [{"type": "text", "text": "NULL"}]  # of a document without text, images and videos


@dataclass(kw_only=True)
class _RetrievalColumns(Columns):
    """Names of the columns of records with a query and documents."""

    @property
    def name(self) -> str:
        """Return a text that identifies the schema, which is part of the fingerprint of a data set."""
        return f"{super().name} of {type(self).__name__}".strip()

    def convert_record(self, record: Any, place: str) -> Any:
        """Return the conversations of a record as a `GroupRecord`; raise DataError for an unsupported format."""
        if not isinstance(record, dict):
            return record
        given = {key: value for key, value in drop_nulls(record).items() if key not in self.ignore}
        instruction = next((given.pop(key) for key in _INSTRUCTION_KEYS if key in given), None)
        if instruction is not None and not isinstance(instruction, str):
            raise DataError(place, f"found {short_repr(instruction)} as the instruction, expected a text")
        messages = {kind: given.pop(key, None) for kind, key in _MESSAGES_KEYS.items()}
        if messages["positive"] is not None:
            query = {"messages": given.pop("messages", None)}
            documents = {kind: _swift_documents(kind, listed, given, place) for kind, listed in messages.items()}
        else:
            query = {"text": next((given.pop(key) for key in _QUERY_KEYS if key in given), None)}
            found = {kind: [given.pop(key) for key in keys if key in given] for kind, keys in _DOCUMENT_KEYS.items()}
            documents = {kind: _listed(values[0]) if values else [] for kind, values in found.items()}
            if isinstance(query["text"], Mapping):
                query = dict(query["text"])
        query |= {key: given.pop(key) for key in MEDIA_KEYS if key in given}
        if not documents["positive"] or not any(value is not None for value in query.values()):
            raise DataError(place, f"found the keys {', '.join(map(str, record))}, expected {_EXPECTED}")
        parts = self._parts(query, f"{place}: query")
        encoded = {
            kind: [self._parts(one, f"{place}: {kind} {number}") for number, one in enumerate(values, start=1)]
            for kind, values in documents.items()
        }
        return self.make_record(parts, encoded["positive"], encoded["negative"], instruction, place)

    def columns_to_read(self, names: Sequence[str], place: str) -> list[str]:
        """Return the columns to read from a table with the columns `names`.

        Raises:
            DataError: there is no column of positive documents.
        """
        documents = [key for keys in _DOCUMENT_KEYS.values() for key in keys]
        known = (*_QUERY_KEYS, *_INSTRUCTION_KEYS, *documents, *_MESSAGES_KEYS.values(), *_MEDIA_KEYS, "messages")
        positive = {*_DOCUMENT_KEYS["positive"], _MESSAGES_KEYS["positive"]}
        if not positive & {*names}:
            raise DataError(place, f"found the columns {', '.join(names)}, expected {_EXPECTED}")
        return [name for name in names if name in {*known, *MEDIA_KEYS} and name not in self.ignore]

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
        if not isinstance(given, Mapping) or not {*given} <= {"text", "messages", *MEDIA_KEYS}:
            raise DataError(
                place, f"found {short_repr(value)}, expected a text, or an object with text, image or video"
            )
        if "messages" not in given:
            # Qwen's scripts write videos first, then images, then texts.
            media = [
                {"type": kind, kind: medium}
                for kind in ("video", "image")
                for key in KEYS_OF_KIND[kind]
                for medium in _listed(given.get(key, []))
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


def _swift_documents(kind: str, listed: Any, given: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """Return ms-swift's documents of a kind ("positive" or "negative"), with media that are removed from `given`.

    Args:
        kind: kind of the documents.
        listed: messages of each document; None for no documents.
        given: the record, with lists of media under keys such as "positive_images".
        place: location of the record, for error messages.

    Raises:
        DataError: a list of media has no entry for each document.
    """
    documents = [{"messages": messages} for messages in listed or ()]
    for key in [key for key in given if _MEDIA_KEYS.get(key) == kind]:
        media = given.pop(key)
        if not isinstance(media, list) or len(media) != len(documents):
            raise DataError(place, f"found {short_repr(media)} under {key!r}, expected a list for each document")
        for document, own in zip(documents, media, strict=True):
            document[key.removeprefix(f"{kind}_")] = own
    return documents
