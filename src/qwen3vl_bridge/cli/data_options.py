"""Command-line options that choose conversations, and that set how they are encoded."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen3vl_bridge.config.other_trainers import describe_ignored_variables
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.terminal import at_least, show

# The fields of `VisionLimits`, which is in a module that needs torch.
_LIMITS = {
    "image_min_pixels": (int, "pixels to which a smaller image is enlarged (default of all these: the model's)"),
    "image_max_pixels": (int, "pixels to which a larger image is reduced"),
    "video_min_pixels": (int, "pixels to which a smaller video is enlarged, over all its frames together"),
    "video_max_pixels": (int, "pixels to which a larger video is reduced, over all its frames together"),
    "video_fps": (float, "frames sampled per second"),
    "video_min_frames": (int, "minimum number of frames sampled from a video, if it has them"),
    "video_max_frames": (int, "maximum number of frames sampled from a video"),
}


def add_records(parser: argparse.ArgumentParser, split: bool = True) -> None:
    """Add the options that choose the data set, --no-progress and --json; and --split, if `split` is set."""
    add = parser.add_argument
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--data", metavar="PATH",
                      help="conversations, as in dataset.path: a file, a folder (with or without splits), or "
                      "hf://owner/name:configuration#split")  # fmt: skip
    data.add_argument(
        "--mixture", type=Path, metavar="FILE", help="YAML file with several data sets, as in dataset.mixture"
    )
    add("--schema-adapter", metavar="NAME",
        help="format of the records, such as cord_v2 (default: conversations)")  # fmt: skip
    add("--columns", nargs="+", default=[], metavar="KEY=COLUMN",
        help="names of the records' columns: image=img 'answer={answers[0]}'")  # fmt: skip
    add("--media-root", action="append", metavar="FOLDER",
        help="folder of images and videos (default: the folder of --data); may be given several times: "
        "paths are looked up in each folder, and links may lead from one to another")  # fmt: skip
    add("--url-cache", metavar="FOLDER", help="folder for downloads (default: the user's cache folder)")
    add("--no-progress", action="store_true", help="show no progress")
    add("--json", action="store_true", help="print JSON")
    if split:
        add("--split", choices=("train", "valid", "test"), default="train",
            help="which split of a folder with splits (default: %(default)s)")  # fmt: skip


def add_objective(parser: argparse.ArgumentParser) -> None:
    """Add --objective, which determines the kind of records as the setting `objective.kind` does."""
    parser.add_argument(
        "--objective", choices=("sft", "dpo", "kto", "embedding", "reranker"), default="sft",
        help="as objective.kind: conversations (sft), pairs of answers (dpo), labeled answers (kto), or queries with "
        "documents (embedding, reranker) (default: %(default)s)",
    )  # fmt: skip


def add_template(parser: argparse.ArgumentParser) -> None:
    """Add the options for encoding prompts: the model, variables of its chat template, and the limits of images."""
    add = parser.add_argument
    add("--hf-model", required=True, metavar="MODEL",
        help="the model, a folder or hub id: its processor and template")  # fmt: skip
    add("--reasoning-effort", metavar="EFFORT",
        help="as in dataset.reasoning_effort, for templates such as Qwen3.8's (default: the template's)")  # fmt: skip
    add("--preserve-thinking", action=argparse.BooleanOptionalAction,
        help="whether reasoning of earlier answers is written, as in dataset.preserve_thinking "
        "(default: the template's)")  # fmt: skip
    for name, (kind, words) in _LIMITS.items():
        add(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=words)


def add_encoding(parser: argparse.ArgumentParser) -> None:
    """Add the options for encoding training samples: those of prompts, the answers, and the row length."""
    add_template(parser)
    add = parser.add_argument
    add("--answers", choices=("all", "last"), default="all",
        help="train on all answers, or only on the last one (default: %(default)s)")  # fmt: skip
    add("--empty-thinking", choices=("prompt", "train"), default="prompt",
        help="whether the template's empty thinking blocks count as the end of the prompt, or are "
        "trained on (default: %(default)s)")  # fmt: skip
    add("--seq-length", type=at_least(1), default=4096, metavar="N", help="tokens in a row (default: %(default)s)")
    add("--on-long", choices=("error", "drop", "truncate"), default="error",
        help="what training does with a sample longer than a row (default: %(default)s)")  # fmt: skip


def open_records(options: argparse.Namespace, url_cache: Any = None) -> Any:
    """Open the data set or the mixture that the options name. `url_cache` replaces the folder of downloads.

    Raises:
        DataError: the data do not exist or are damaged, or an option has a wrong value.
    """
    from qwen3vl_bridge.data.conversations import Columns
    from qwen3vl_bridge.data.data_paths import path_of_split
    from qwen3vl_bridge.data.objectives import columns_for
    from qwen3vl_bridge.data.sources import open_source

    url_cache = url_cache or make_url_cache(options)
    with naming_options("--columns"):
        columns = Columns.from_words(options.columns)
    objective = getattr(options, "objective", "sft")
    columns = columns_for(objective, columns)
    if options.mixture is not None:
        from qwen3vl_bridge.data.mixture import open_mixture, read_mixture

        with naming_options("--mixture"):
            sets = read_mixture(str(options.mixture), options.media_root, options.schema_adapter, columns)
            # Also sets with their own names of columns.
            sets = tuple(replace(one, columns=columns_for(objective, one.columns)) for one in sets)
            mixture = open_mixture(sets, options.split, url_cache)
        show(mixture.summary().replace("; ", "\n"), error=True)
        return mixture
    with naming_options("--schema-adapter"):
        return open_source(
            path_of_split(options.data, options.split),
            options.media_root,
            url_cache=url_cache,
            schema_adapter=options.schema_adapter,
            columns=columns,
        )


def make_url_cache(options: argparse.Namespace) -> Any:
    """Return the `UrlCache` for --url-cache, by default for the user's cache folder."""
    from qwen3vl_bridge.data.media import UrlCache

    return UrlCache(None if options.url_cache is None else Path(options.url_cache))


def check_output(options: argparse.Namespace, kind: str) -> None:
    """Raise DataError if `--output` cannot be written. `kind` names its content, for the message."""
    path: Path = options.output
    if path.exists() and (not options.overwrite or not path.is_file()):
        raise DataError(str(path), "the path exists already; --overwrite replaces a file")
    if not path.parent.is_dir():
        raise DataError(str(path.parent), f"the folder for the {kind} does not exist; create it")


def make_encoder(options: argparse.Namespace) -> tuple[Any, Path]:
    """Return (encoder, folder of the model) for the options.

    The model is requested from the hub once: transformers would request each of its files again.
    """
    from qwen3vl_bridge.checkpoint.formats.huggingface import find_model

    _warn_of_environment(options)
    folder = find_model(options.hf_model, weights=False)

    from qwen3vl_bridge.data.encoding import Encoder, load_processor  # slow

    with naming_options("limits of images and videos"):
        processor = load_processor(folder, vision_limits(options))
    names = ("answers", "empty_thinking", "reasoning_effort", "preserve_thinking")
    with naming_options("settings of the chat template"):
        return Encoder(processor, **{name: getattr(options, name) for name in names}), folder


def vision_limits(options: argparse.Namespace) -> Any:
    """Return the `VisionLimits` of the options."""
    from qwen3vl_bridge.data.encoding import VisionLimits

    return VisionLimits(**{name: getattr(options, name) for name in _LIMITS})


def _warn_of_environment(options: argparse.Namespace) -> None:
    """Warn about environment variables that other trainers read, unless the matching option is given."""

    def spelt(setting: str, value: str) -> str | None:
        name = setting.rpartition(".")[2]
        return None if getattr(options, name) is not None else f"--{name.replace('_', '-')} {value}"

    if warning := describe_ignored_variables(os.environ, spelt):
        show(warning, error=True)


@contextmanager
def naming_options(options: str) -> Iterator[None]:
    """Convert a ValueError inside the `with` block to a DataError with `options` in front of its message.

    `options` is a text that names the command-line options to correct.
    """
    try:
        yield
    except DataError:
        raise
    except ValueError as error:
        raise DataError(options, str(error)) from error


def progress_bar(options: argparse.Namespace, numbers: Sequence[int], kind: str = "samples") -> Any:
    """Return an iterable over `numbers` that shows a progress bar on a terminal, unless --no-progress is given.

    `kind` is the label of the bar.
    """
    from tqdm import tqdm

    # None lets tqdm decide: a bar on a terminal, nothing elsewhere.
    hidden = True if options.no_progress else None
    return tqdm(numbers, desc=kind, leave=False, disable=hidden, file=sys.stderr)
