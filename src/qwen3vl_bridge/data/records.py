"""Convert records of every supported format (docs/data.md lists them) to our own format.

Our format is {"messages": [{"role": "user", "content": "..."}, ...]}. Roles are system, user, assistant and tool.
Content is a string, or a list of parts {"type": "text", "text": "..."}, {"type": "image", "image": MEDIUM} and {"type":
"video", "video": MEDIUM}. A medium is a path, a URL, "data:...;base64,...", bytes, or {"bytes": ..., "path": ...}. A
video may also be a list of images with "sample_fps".

Tables, and JSON written from them, have null for keys that an object lacks. `Columns.convert_record` removes such keys
at every depth, for all sources. `tools` and `arguments` may be strings of JSON.

Media next to the messages are under "image" or "images", "video" or "videos": one medium or a list. A video in a list
may be a list of frames. Each "<image>" or "<video>" in a text is a placeholder for the next medium, and so is a part
{"type": "image"} without an image. In a content that is a list of parts, texts are literal. A record may use only one
of the other placeholder formats (docs/data.md), and only in prompts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from qwen3vl_bridge.core.files import parse_record
from qwen3vl_bridge.data.errors import DataError

Placeholders = Literal["media", "text"]

KEYS_OF_KIND = {"image": ("image", "images"), "video": ("video", "videos")}
MEDIA_KEYS = tuple(key for keys in KEYS_OF_KIND.values() for key in keys)
FPS_KEY = "sample_fps"  # frames per second of a video that is a list of frames, as Qwen's message format calls it
PIXEL_LIMIT_KEYS = ("min_pixels", "max_pixels")  # of one image, in its content part
_OWN_PLACEHOLDERS = ("<image>", "<video>")
_PLACEHOLDER = re.compile(
    r"<img>(?P<path>[^<>\n]{0,4096})</img>"
    r"|<(?P<bar>\|)?(?P<kind>image|img|video|audio)([ _-]?(?P<number>\d{1,4})|here|[ _-]?placeholder)?(?(bar)\|)>",
    re.IGNORECASE,
)
_AS_TEXT = "where text is meant, write the content as a list of parts, or set columns.placeholders=text"
# Names of keys that hold media, and of keys that hold ids, which may look like file names.
MEDIA_NAME = re.compile(
    r"(image|img|picture|photo|pic|video|clip|audio)s?"
    r"([_ -]?(path|file|file_?name|url|uri|bytes|base64|b64|data))?s?([_ -]?\d+)?",
    re.IGNORECASE,
)
_ID_NAME = re.compile(r"(.*_)?(id|ID)|.*Id")
# Beginnings of JPEG, PNG, GIF, RIFF (WebP, AVI), TIFF, BMP, MP4 and Matroska in base64.
_BASE64 = re.compile(
    r"(/9j/|iVBORw0KGgo|R0lGOD[dl]h|UklGR|SUkqA|TU0AK|Qk[\w+/]{6}AAAA|AAAA[\w+/]{2}Z0eX|GkXfo)[\w+/\s]{40,}=*\s*",
    re.ASCII,
)
_FILE = re.compile(
    r"data:(image|video)/.*"
    r"|[^\n]{1,4096}\.(jpe?g|png|webp|gif|bmp|tiff?|heic|avif|mp4|m4v|mov|mkv|webm|avi|mpe?g|flv|wmv)(\?\S*)?\s*",
    re.IGNORECASE | re.DOTALL,
)
_URL = re.compile(r"https?://", re.IGNORECASE)


def short_repr(value: Any) -> str:
    """Return the repr of a value, shortened to 60 characters for a message."""
    words = ascii(value) if isinstance(value, bytes) else repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."


def drop_nulls(value: Any) -> Any:
    """Return a copy of a value in which objects, at any depth, have no keys with null. Nulls in lists are kept."""
    if isinstance(value, dict):
        return {key: drop_nulls(inner) for key, inner in value.items() if inner is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def unwrap_stored_medium(item: Any) -> Any:
    """Return the bytes or the path in {"bytes": ..., "path": ...}, as Hugging Face datasets store images.

    Bytes take precedence. Any other value is returned unchanged.
    """
    if not isinstance(item, dict) or not item:
        return item
    return item.get("bytes") or item.get("path") if set(item) <= {"bytes", "path"} else item


def is_empty_medium(value: Any) -> bool:
    """Return whether a value means no medium: null, an empty string, list or object, or a list of these."""
    if isinstance(value, list):
        return not any(isinstance(item, list) or not is_empty_medium(item) for item in value)
    return unwrap_stored_medium(value) in (None, "", b"", {})


def normalize_medium(value: Any, place: str) -> Any:
    """Convert a medium, or each frame of a video, to a path, a URL or bytes. Return other values unchanged.

    A "file://" URL becomes a path with percent signs decoded, and base64 becomes a "data:" URL. Raise DataError for a
    "file://" URL that names another host, or has a query or a fragment.
    """
    if isinstance(value, list):
        return [normalize_medium(frame, place) for frame in value]
    value = unwrap_stored_medium(value)
    if not isinstance(value, str) or value[:6].lower() != "file:/":
        is_base64 = isinstance(value, str) and _BASE64.fullmatch(value)
        return f"data:;base64,{''.join(value.split())}" if is_base64 else value
    try:
        address = urlsplit(value)
        path = unquote(address.path, errors="strict")
    except ValueError as error:
        raise DataError(place, f"found the URL {value[:80]!r}, expected file:///PATH ({error})") from error
    if address.netloc.lower() not in ("", "localhost"):
        raise DataError(place, f"found the URL {value[:80]!r}, a file of {address.netloc!r}, expected file:///PATH")
    if address.query or address.fragment:
        raise DataError(place, f"found the URL {value[:80]!r}, expected '?' and '#' in a path as %3F and %23")
    return path


def pop_media(record: dict[str, Any], place: str) -> dict[str, list[dict[str, Any]]]:
    """Remove the keys "image", "images", "video" and "videos" from a record; return their media as parts, by kind.

    Raises:
        DataError: "image" and "images" (or "video" and "videos") are both set, or frame rates do not fit the videos.
    """
    media: dict[str, list[dict[str, Any]]] = {}
    for kind, keys in KEYS_OF_KIND.items():
        given = {key: value for key in keys if not is_empty_medium(value := record.pop(key, None))}
        if len(given) > 1:
            raise DataError(place, f"found both {' and '.join(map(repr, given))}, expected one of them")
        for value in given.values():
            media[kind] = [{"type": kind, kind: item} for item in (value if isinstance(value, list) else [value])]
    if is_empty_medium(rates := record.pop(FPS_KEY, None)):
        return media
    videos = media.get("video", [])
    are_frames = [isinstance(video["video"], list) for video in videos]
    each = rates if isinstance(rates, list) else [rates if frames else None for frames in are_frames]
    if (
        not any(are_frames)
        or len(each) != len(videos)
        or any(rate is not None and not frames for rate, frames in zip(each, are_frames, strict=True))
    ):
        raise DataError(
            place,
            f"found {short_repr(rates)} under {FPS_KEY!r} next to {sum(are_frames)} videos that are lists of frames, "
            f"expected one number, or a list with a value for each of the {len(videos)} videos: a number for a list of "
            f"frames, null for another video; to ignore the key, set columns.ignore=[{FPS_KEY}]",
        )
    for video, rate in zip(videos, each, strict=True):
        if rate is not None:
            video[FPS_KEY] = rate
    return media


def check_unread_keys(record: Mapping[str, Any], known: Collection[str], messages: list[Any], place: str) -> None:
    """Raise DataError if an unread key of a record seems to hold images or videos, by its name or its value.

    If the messages have media, then ids, URLs and other names of the same files are accepted. `messages` are in our own
    format, with their media; `known` are keys that are read or deliberately ignored.
    """
    unread = {key: value for key, value in record.items() if key not in known and not is_empty_medium(value)}
    if not unread:
        return
    parts = [
        part for message in messages if isinstance(message, dict) for part in _content_parts(message.get("content"))
    ]
    media = [part for part in parts if isinstance(part, dict) and part.get("type") in ("image", "video")]
    # Bytes that are read may have a name in the record.
    files = [*(part.get(part["type"]) for part in media), *(record.get(key) for key in MEDIA_KEYS)]
    names = [name for file in files for name in _first_media(file, named=True) if isinstance(name, str)]
    read = [PurePosixPath(name).parts for name in names if not name.startswith("data:")]
    for key, value in unread.items():
        leaves = _first_media(value)
        named = MEDIA_NAME.fullmatch(str(key)) and isinstance(value, (str, bytes, list, dict))
        if media and isinstance(value, str | dict) and isinstance(leaves[0], str):
            # One path that is the end of another may be the same file; A/1.png and B/1.png are not.
            end = PurePosixPath(leaves[0]).parts
            if _ID_NAME.fullmatch(str(key)) or any(a[-len(end) :] == end[-len(a) :] for a in read if a and end):
                continue
        are_urls = all(isinstance(leaf, str) and _URL.match(leaf) for leaf in leaves)
        if are_urls and any(not named or part["type"] == _kind_of_key(str(key)) for part in media):
            continue
        if named or (leaves and all(map(_looks_like_media, leaves))):
            raise DataError(place, unread_media_message(str(key), record))


def check_object_tags(record: Mapping[str, Any], messages: list[Any], place: str) -> None:
    """Raise DataError if a record has the key "objects", and a text contains <ref-object> or <bbox>.

    In ms-swift's format these placeholders stand for values under "objects". They are not filled here.
    """
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    found = [
        name for name in ("<ref-object>", "<bbox>") if any(isinstance(text, str) and name in text for text in texts)
    ]
    if found and "objects" in record:
        raise DataError(
            place,
            f"found {' and '.join(found)} in a text next to 'objects', but these placeholders are not filled here. "
            "Write each name, and each box in coordinates from 0 to 1000 of the image's width and height, into "
            "the text, as ms-swift does for Qwen3-VL",
        )


def unread_media_message(key: str, keys: Collection[str]) -> str:
    """Return the error message for a key that is not read and seems to hold media."""
    if re.match("audio", key, re.IGNORECASE):
        return f"found {key!r}: audio is not supported; to train without it, leave it out (columns.ignore=[{key}])"
    column = re.sub(r"\d+$", "*", key)  # one of several numbered columns
    return (
        f"found {key!r}, which looks like images or videos but is not read, expected media under "
        f"{', '.join(map(repr, MEDIA_KEYS))}; the keys are {', '.join(map(str, keys))}. Name the column "
        f"(columns.{_kind_of_key(key)}={column}, or another of these), or leave it out (columns.ignore=[{key}])"
    )


def _kind_of_key(key: str) -> str:
    return "video" if re.match("vid|clip", key, re.IGNORECASE) else "image"


def _first_media(value: Any, *, named: bool = False) -> list[Any]:
    """Return the values in `value` that may be images or videos.

    From an object such as {"bytes": ..., "path": ...}, return the bytes or else the URL or path. From a list, return
    only the first four items. If `named` is True, return all items, and prefer the path to the bytes.
    """
    if isinstance(value, list):
        return [leaf for item in (value if named else value[:4]) for leaf in _first_media(item, named=named)]
    if not isinstance(value, dict):
        return [value]
    order = ("path", "url", "bytes") if named else ("bytes", "url", "path")
    return [next((value[key] for key in order if value.get(key)), value)]


def _looks_like_media(value: Any) -> bool:
    return isinstance(value, bytes) or (
        isinstance(value, str) and bool(_FILE.fullmatch(value) or _BASE64.match(value[:256]))
    )


class _Placeholder(NamedTuple):
    """A placeholder in a message: for the next image or video, or for the medium with a given number or path."""

    kind: str
    text: str  # as written in the record
    number: int | None = None
    path: str | None = None
    part: dict[str, Any] | None = None  # a part without a medium of its own


def insert_media(
    messages: list[Any],
    media: Mapping[str, list[dict[str, Any]]],
    place: str,
    *,
    keys: Collection[str],
    placeholders: Placeholders = "media",
    in_front: bool = False,
) -> list[Any]:
    """Return the messages with each placeholder replaced by its image or video.

    Args:
        messages: messages in our own format.
        media: the images and videos of the record, as lists of content parts by kind, in order (`pop_media`).
        place: the record's location, used in error messages.
        keys: the record's keys, used in error messages.
        placeholders: "text" if "<image>" and "<video>" in strings are literal text.
        in_front: if a kind of media has no placeholder anywhere, insert its media at the start of the first prompt.

    Raises:
        DataError: the number of placeholders differs from the number of media, or placeholders are ambiguous.
    """
    contents = [list(_split_placeholders(message, placeholders)) for message in messages]
    for number, content in enumerate(contents, start=1):
        if audio := next((one for one in content if isinstance(one, _Placeholder) and one.kind == "audio"), None):
            problem = f"found {audio.text!r} in a text: audio is not supported; {_AS_TEXT}"
            raise DataError(f"{place}: message {number}", problem)
    front: list[dict[str, Any]] = []
    taken = {kind: iter(media.get(kind, ())) for kind in KEYS_OF_KIND}
    for kind in KEYS_OF_KIND:
        found, formats = [], dict[str, str]()
        for at, content in enumerate(contents):
            for one in (one for one in content if isinstance(one, _Placeholder) and one.kind == kind):
                if messages[at].get("role") == "assistant" and not one.part and one.text not in _OWN_PLACEHOLDERS:
                    raise DataError(
                        f"{place}: message {at + 1}",
                        f"found {short_repr(one.text)} in an answer, which may be a placeholder or text; expected "
                        f"'<{kind}>' for a placeholder; {_AS_TEXT}",
                    )
                found.append(one)
                formats.setdefault("path" if one.path else one.text if one.number is None else "number", one.text)
        given = media.get(kind, [])
        if in_front and not found:
            front += given
            continue
        if len(formats) > 1:
            first, second, *_ = map(short_repr, formats.values())
            problem = f"found both {first} and {second}, expected placeholders of one format; {_AS_TEXT}"
            raise DataError(place, problem)
        numbers = {one.number for one in found if one.number is not None}
        if given and numbers and numbers != set(range(1, len(given) + 1)):
            raise DataError(
                place,
                f"found placeholders for {kind}s with the numbers {', '.join(map(str, sorted(numbers)))}, expected "
                f"each number from 1 to {len(given)}, the number of {kind}s in the record; remove media that no "
                f"placeholder refers to, or write '<{kind}>' for the next",
            )
        count = len(given) if given and numbers else sum(one.path is None for one in found)
        if count != len(given):
            placeholder = short_repr(found[0].text if found else f"<{kind}>")
            words = f"{placeholder} in a text, or a part without its own {kind}"
            hint = "" if given else f". If one of them holds {kind}s, name it (columns.{kind}=KEY); {_AS_TEXT}"
            raise DataError(
                place,
                f"found {count} placeholders for {kind}s ({words}), expected {len(given)}, the number of {kind}s in "
                f"the record; the keys are {', '.join(map(str, keys))}{hint}",
            )

    def filled(one: Any) -> Any:
        if not isinstance(one, _Placeholder):
            return one
        if one.path:
            return {"type": one.kind, one.kind: one.path}
        return (next(taken[one.kind]) if one.number is None else media[one.kind][one.number - 1]) | (one.part or {})

    own = []
    for message, content in zip(messages, contents, strict=True):
        has_any = any(isinstance(one, _Placeholder) for one in content)
        own.append({**message, "content": list(map(filled, content))} if has_any else message)
    if front:
        at = next(number for number, message in enumerate(own) if message.get("role") == "user")
        content = own[at].get("content")
        content = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
        if isinstance(content, list):  # anything else raises later
            own[at] = {**own[at], "content": [*front, *content]}
    return own


def _split_placeholders(message: Any, placeholders: Placeholders) -> Iterator[Any]:
    """Yield the parts of a message's content: a `_Placeholder` for each placeholder, and the texts between."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str) and placeholders == "media":
        last = 0
        for match in _PLACEHOLDER.finditer(content):
            # White space next to a placeholder is text: LLaVA's "<image>\n" was trained on with its line break.
            if text := content[last : match.start()]:
                yield {"type": "text", "text": text}
            kind = (match["kind"] or "image").lower().replace("img", "image")
            number = None if match["number"] is None else int(match["number"])
            yield _Placeholder(kind, match[0], number, match["path"] or None)
            last = match.end()
        if text := content[last:]:
            yield {"type": "text", "text": text}
    for part in _content_parts(content):
        given = dict(part) if isinstance(part, dict) else {}
        kind, index = given.get("type"), given.pop("index", None)
        if (
            kind not in ("image", "video")
            or set(given) - {"type", FPS_KEY, *PIXEL_LIMIT_KEYS}
            or not isinstance(index, int | None)
        ):
            yield part
        elif index is None:
            yield _Placeholder(str(kind), f"<{kind}>", part=given)
        else:
            yield _Placeholder(str(kind), f"index {index}", index + 1, part=given)


def _content_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else []


SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "developer": "system"}  # other names of roles
LOSS_KEYS = ("loss", "weight")  # keys of an assistant message: whether it is trained on
TURN_KEYS = ("messages", "conversations", "texts")
PROMPT_KEYS = {"question": "answer", "query": "response", "prompt": "completion", "instruction": "output"}
TEMPLATE_KWARGS = "chat_template_kwargs"  # TRL's key: variables of the chat template for one record
REFERENCES = "references"  # a list of all answers that an evaluation accepts
KEYS = (
    *(*TURN_KEYS, "system", "tools", TEMPLATE_KWARGS, *MEDIA_KEYS, FPS_KEY, *PROMPT_KEYS, *PROMPT_KEYS.values()),
    *("input", "history", REFERENCES),
)
# may be strings of JSON, because tables store mixed types this way
_JSON_KEYS = ("messages", "conversations", TEMPLATE_KWARGS)
# keys of a message or a content part
_MESSAGE_KEYS = (*LOSS_KEYS, "reasoning_content", "tool_calls", *PIXEL_LIMIT_KEYS)
PART_KINDS = ("text", "image", "video")
# OpenAI's types of content parts. A medium of any type may be under "url" or "path" too, as in transformers' templates.
_PART_TYPES = {
    "input_text": "text",
    "output_text": "text",
    "image_url": "image",
    "input_image": "image",
    "video_url": "video",
}


def _normalize_key(key: object) -> str:
    return re.sub(r"[\W_]", "", str(key)).lower()


def is_checked_key(key: str) -> bool:
    """Return whether the checks of a record need this key, so that a table must read even a column of numbers."""
    return _normalize_key(key) in _SIMILAR_KEYS or key == "objects" or bool(MEDIA_NAME.fullmatch(key))


_SIMILAR_KEYS = {_normalize_key(key): key for key in (*KEYS, *_MESSAGE_KEYS)} | dict.fromkeys(
    ("lossmask", "lossscale", "lossweight", "completionmask", "assistantmask", "assistantmasks"), "loss"
)
EXPECTED_KEYS = (
    "'messages' or 'conversations', 'texts', a question with its answer ("
    + ", ".join(f"{question!r} and {answer!r}" for question, answer in PROMPT_KEYS.items())
    + "), or the setting columns with the names of these keys in the data"
)


def convert_record(record: Any, place: str, *, placeholders: Placeholders = "media") -> Any:
    """Convert a record of any supported format to {"messages": [...]}, as a copy. `place` is its location, for errors.

    Keys that are null count as missing, at every depth: tables, and JSON written from them, give each object all keys.
    A value that is not an object, or has no messages, is returned for later checks.

    Raises:
        DataError: the record has keys of several formats or of none, placeholders that do not match its media, or an
            unknown key that seems to hold media.
    """
    if not isinstance(record, dict):
        return record
    record = drop_nulls(record)
    own = dict(record)
    for key in _JSON_KEYS:
        if isinstance(text := own.get(key), str) and text.strip():
            try:
                own[key] = drop_nulls(parse_record(text))
            except ValueError as error:
                raise DataError(
                    place, f"found a value that does not decode ({error}), expected JSON under {key!r}"
                ) from error
    keys, format_key = list(record), find_format_key(record, place)
    if format_key is None:
        if keys:
            raise DataError(place, f"found the keys {', '.join(map(str, record))}, expected {EXPECTED_KEYS}")
        return own
    for key, with_keys in (("history", tuple(PROMPT_KEYS)), ("input", ("instruction",))):
        if format_key not in with_keys and record.get(key) not in (None, "", []):
            raise DataError(
                place,
                f"found {key!r} next to {format_key!r}, where it is ignored, expected it next to "
                f"{' or '.join(map(repr, with_keys))}; leave it out (columns.ignore=[{key}]), or write it into a "
                "question (columns.question)",
            )
    messages = own["messages"] = _pop_messages(own, format_key, place)
    tools = own.pop("tools", None)
    try:
        text = tools.strip() if isinstance(tools, str) else None
        tools = tools if text is None else parse_record(text) if text else None
    except ValueError as error:
        problem = f"found a string that is not valid JSON ({error}), expected a list"
        raise DataError(f"{place}: 'tools'", problem) from error
    if tools is not None:
        own["tools"] = tools
    if not isinstance(messages, list):
        return own
    system = own.pop("system", None)
    if not isinstance(system, str | None):
        raise DataError(place, f"found {short_repr(system)} under 'system', expected a string")
    messages = [{"role": "system", "content": system}, *messages] if system else messages
    messages = [_convert_message(message, f"{place}: message {i}") for i, message in enumerate(messages, start=1)]
    if system and any(isinstance(message, dict) and message.get("role") == "system" for message in messages[1:]):
        raise DataError(place, "found the key 'system' and a system message, expected only one of them")
    check_object_tags(record, messages, place)
    in_front = format_key not in ("messages", "conversations")
    media = pop_media(own, place)
    messages = insert_media(messages, media, place, keys=keys, placeholders=placeholders, in_front=in_front)
    check_unread_keys(record, KEYS, messages, place)
    # If misspelled keys were ignored, the training data would differ from what the record means.
    for key in keys:
        if key not in KEYS and (meant := _SIMILAR_KEYS.get(_normalize_key(key))):
            expected = f"{meant!r} in a message or its content" if meant in _MESSAGE_KEYS else repr(meant)
            problem = f"found {key!r}, which is ignored here, expected {expected}"
            raise DataError(place, f"{problem}; or leave it out (columns.ignore=[{key}])")
    for number, message in enumerate(messages, start=1):
        content = message.get("content") if isinstance(message, dict) else None
        for at, part in enumerate(content if isinstance(content, list) else (), start=1):
            if isinstance(part, dict) and (kind := part.get("type")) in ("image", "video") and kind in part:
                part[kind] = normalize_medium(part[kind], f"{place}: message {number}, part {at}")
    own["messages"] = messages
    return own


def find_format_key(keys: Collection[str], place: str) -> str | None:
    """Return the key of a record that contains its turns or its question, such as "messages"; None if there is none.

    Raises:
        DataError: the record has several such keys.
    """
    # A prompt without its answer is not a format: HuggingFaceH4/ultrachat_200k has `messages` and repeats the first as
    # `prompt`.
    asked = [question for question, answer in PROMPT_KEYS.items() if question in keys and answer in keys]
    found = [*(key for key in TURN_KEYS if key in keys), *asked]
    if len(found) > 1:
        words = [f"{key!r} with {PROMPT_KEYS[key]!r}" if key in PROMPT_KEYS else repr(key) for key in found]
        raise DataError(
            place,
            f"found both {words[0]} and {words[1]}, which each give the turns, expected one of them: ignore the "
            f"others, such as columns.ignore=[{','.join(found[1:])}]",
        )
    return found[0] if found else None


def _pop_messages(own: dict[str, Any], format_key: str, place: str) -> Any:
    """Remove the conversation from the record `own`, and return it as a list of messages with role and content.

    `format_key` is the result of `find_format_key`. Invalid "messages" or "conversations" are returned unchanged.
    """
    turns = own.pop(format_key)
    if format_key in ("messages", "conversations"):
        return turns
    if format_key == "texts":  # the format of the_cauldron
        names, others = {"user", "assistant"}, {"user", "assistant", "source"}
        pairs = turns if isinstance(turns, list) else []
        each = [set(pair) if isinstance(pair, dict) else set() for pair in pairs]
        if not each or not all(names <= given <= others for given in each):
            expected = "a list of objects with user and assistant, and optionally source"
            raise DataError(place, f"found {short_repr(turns)} under 'texts', expected {expected}")
        pairs = [(pair["user"], pair["assistant"]) for pair in turns]
    # the format of TRL: answers in the prompt are not trained on
    elif format_key == "prompt" and isinstance(turns, list):
        completion = own.pop("completion")
        roles = [one.get("role") if isinstance(one, dict) else None for one in turns]
        if not isinstance(completion, list) or "user" not in roles:
            raise DataError(
                place,
                f"found {short_repr(turns)} under 'prompt' and {short_repr(completion)} under 'completion', expected "
                "two texts, or two lists of messages with role and content, the first with a question",
            )
        earlier = zip(turns, roles, strict=True)
        return [*({"loss": False} | one if role == "assistant" else one for one, role in earlier), *completion]
    else:
        question = _require_text(turns, format_key, place)
        if format_key == "instruction" and (given := own.pop("input", None)) not in (None, ""):
            question = f"{question}\n{_require_text(given, 'input', place)}"
        answer = _require_text(own.pop(PROMPT_KEYS[format_key]), PROMPT_KEYS[format_key], place)
        history = own.pop("history", None) or []  # the format of ms-swift and LLaMA-Factory
        if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
            raise DataError(
                place, f"found {short_repr(history)} under 'history', expected a list of [question, answer]"
            )
        pairs = [*history, (question, answer)]
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]


def _require_text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{place}: {name!r}",
            f"found {short_repr(value)}, expected a string; a template can make one, such as "
            f"columns.answer='{{{name}[0]}}' for the first of a list, or '{{{name}}}' for a number",
        )
    return value


def _convert_message(message: Any, place: str) -> Any:
    """Convert a message to our format (role, content). Return an invalid message unchanged; it raises later."""
    if not isinstance(message, dict):
        return message
    own = dict(message)
    if "from" in own and own.get("role") is None and own.get("content") is None:  # the format of ShareGPT
        own |= {"role": own.pop("from"), **({"content": own.pop("value")} if "value" in own else {})}
    if isinstance(role := own.get("role"), str):
        own["role"] = SPEAKERS.get(role, role)
    if isinstance(calls := own.get("tool_calls"), list):
        own["tool_calls"] = list(map(_convert_tool_call, calls))
    if isinstance(content := own.get("content"), list):
        own["content"] = [
            _convert_part(part, f"{place}, part {number}") for number, part in enumerate(content, start=1)
        ]
    return own


def _convert_tool_call(call: Any) -> Any:
    """Return a tool call with its arguments as an object instead of JSON text.

    Inference servers also parse the JSON text of OpenAI's format before they render a chat template.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = parse_record(arguments) if arguments.strip() else {}
    own = {**function, "arguments": arguments}
    return {**call, "function": own} if "function" in call else own


def _convert_part(part: Any, place: str) -> Any:
    """Return a content part with its text or medium under the key "text", "image" or "video"."""
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        return part
    kind = _PART_TYPES.get(part["type"], part["type"])
    own = part | {"type": kind}
    if kind not in ("image", "video"):
        return own
    names = [name for name in (kind, f"{kind}_url", "url", "path") if name in own]
    if len(names) == 1:
        own = {kind if key == names[0] else key: value for key, value in own.items()}
        medium = own[kind]
        if isinstance(medium, dict) and "url" in medium:
            own |= medium
            own[kind] = own.pop("url")
    if own.get("detail") not in (None, "auto", "high"):  # OpenAI's "low" would be another image
        expected = "'auto' or 'high': image sizes are set by dataset.vision"
        raise DataError(place, f"found the detail {short_repr(own['detail'])}, expected {expected}")
    own.pop("detail", None)
    return own
