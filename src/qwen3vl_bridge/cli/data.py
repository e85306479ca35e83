"""`qwen3vl data`: inspect, pack and download data, and score preference data."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qwen3vl_bridge.cli.data_options import (
    add_encoding,
    add_objective,
    add_records,
    check_output,
    make_encoder,
    make_url_cache,
    naming_options,
    open_records,
    progress_bar,
    vision_limits,
)
from qwen3vl_bridge.cli.generation_options import add_sizes, find_weights, hide_logs, parallel_settings
from qwen3vl_bridge.core.files import CheckpointError
from qwen3vl_bridge.data.errors import DataError, group_errors
from qwen3vl_bridge.terminal import CommandParser, at_least, run, show, show_report

_BAD_SAMPLES = _FAILURES = 1
_MOST_SHOWN = 10  # kinds of failed downloads, and unreadable samples


def main(arguments: Sequence[str] | None = None, *, prog: str = "qwen3vl data") -> int:
    """Run one command. `arguments` is the command line; None for the arguments of the process.

    Returns:
        Exit status: 0, 1 if there were samples with errors or failed downloads, 2 for bad input, 130 if interrupted.
    """
    options = _parser(prog).parse_args(arguments)
    return run(lambda: options.run(options), DataError, CheckpointError, OSError)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = CommandParser(prog=prog, description="Inspect, pack or score conversations, or download their images.")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    _inspect(
        verbs.add_parser("inspect", help="show samples as the model will see them, and which tokens are trained on")
    )
    _pack(verbs.add_parser("pack", help="measure all samples and pack them into rows, before training"))
    _download(verbs.add_parser("download", help="download images and videos that samples refer to by URL"))
    _score(verbs.add_parser("score", help="compute log-probabilities of preference data under a reference model"))
    return parser


def _pack(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure all samples, pack them into rows by best fit, and record which samples are in which row, for "
        "dataset.train_packing. Images are not copied. Use the same options as in the training data set."
    )
    add_records(parser, split=False)  # only training rows are packed
    add_objective(parser)
    add_encoding(parser)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FOLDER", help="folder to write the rows to")
    add("--overwrite", action="store_true", help="replace an earlier packing in that folder")
    add("--max-patches", type=at_least(1), metavar="N",
        help="maximum number of patches in a row (default: no limit)")  # fmt: skip
    add("--max-documents", type=at_least(2), metavar="N",
        help="maximum number of documents in a row, as objective.max_documents (default: no limit)")  # fmt: skip
    add("--pad-to-multiple-of", type=at_least(1), default=1, metavar="N",
        help="pad each sample in a row to a multiple of this; under context parallelism, twice "
        "the number of its ranks (default: %(default)s)")  # fmt: skip
    add("--on-bad", choices=("error", "drop"), default="error",
        help="what to do with a sample that cannot be encoded (default: %(default)s)")  # fmt: skip
    add("--seed", type=int, default=1234, metavar="N",
        help="seed of the order in which samples are packed (default: %(default)s)")  # fmt: skip
    add("--workers", type=at_least(0), default=os.cpu_count() or 0, metavar="N",
        help="number of processes that measure samples; 0 measures in this process (default: %(default)s)")  # fmt: skip
    parser.set_defaults(run=_run_pack, split="train")


def _score(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compute the log-probabilities of the answers of preference data under a model, for objective.reference_logps "
        "of a run. Use the same options as in the run's data set. Start the command with torchrun to divide the model, "
        "or the rows, over several ranks."
    )
    add_records(parser)
    add_encoding(parser)
    add = parser.add_argument
    add("--megatron-path", metavar="FOLDER", help="weights: a Megatron checkpoint of either format, or a run's folder "
        "(default: those of --hf-model)")  # fmt: skip
    add("--output", type=Path, required=True, metavar="FOLDER", help="folder for the log-probabilities, one file for "
        "each split")  # fmt: skip
    add("--overwrite", action="store_true", help="replace an earlier file")
    add("--max-patches", type=at_least(1), metavar="N",
        help="maximum number of patches in a row (default: no limit)")  # fmt: skip
    add("--on-bad", choices=("error", "drop"), default="error",
        help="what to do with a record that cannot be encoded (default: %(default)s)")  # fmt: skip
    add("--seed", type=int, default=1234, metavar="N",
        help="seed of the order in which records are packed (default: %(default)s)")  # fmt: skip
    add_sizes(parser)
    add("--objective", choices=("dpo", "kto"), default="dpo",
        help="as objective.kind of the run (default: %(default)s)")  # fmt: skip
    parser.set_defaults(run=_run_score)


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show samples as the model will see them: tokens, which of them are trained on, images; and how long "
        "samples are, how full rows are, and which samples cannot be used. The exit status is 1 if some samples "
        "cannot be used, or are longer than a row and --on-long is error."
    )
    add_records(parser)
    add_objective(parser)
    add_encoding(parser)
    add = parser.add_argument
    add("--samples", type=at_least(0), default=2, metavar="N", help="how many samples to show (default: %(default)s)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--start", type=at_least(0), default=0, metavar="N",
                       help="index of the first sample to show, counted from 0 (default: %(default)s)")  # fmt: skip
    which.add_argument("--seed", type=int, metavar="N", help="show randomly chosen samples instead, with this seed")
    add("--lengths", type=at_least(0), default=2000, metavar="N",
        help="how many samples to measure, spread over the file; 0 measures only those shown "
        "(default: %(default)s)")  # fmt: skip
    add("--no-pack", action="store_true", help="one sample per row, padded")
    add("--output", type=Path, metavar="FILE", help="also write an HTML report with images")
    add("--overwrite", action="store_true", help="replace an earlier report")
    parser.set_defaults(run=_run_inspect)


def _download(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Download the images and videos that samples refer to by URL. Do this before training, which downloads "
        "nothing. Finished downloads are kept, so the command can be stopped and run again. The exit status is 1 if "
        "some downloads failed."
    )
    add_records(parser)
    add_objective(parser)
    add = parser.add_argument
    add("--allowed-urls", nargs="+", required=True, metavar="URL",
        help="URL prefixes that may be fetched, such as https://images.example.org/; https:// allows "
        "every host, including hosts of your own network")  # fmt: skip
    add("--workers", type=at_least(1), default=16, metavar="N",
        help="number of simultaneous downloads (default: %(default)s)")  # fmt: skip
    add("--retry", action="store_true",
        help="retry downloads that failed permanently in an earlier run; a training run that began "
        "without them cannot be resumed with them")  # fmt: skip
    add("--give-up", action="store_true",
        help="treat hosts that did not answer as permanent failures, too, which later downloads do not "
        "retry")  # fmt: skip
    add("--manifest", type=Path, metavar="FILE",
        help="JSON Lines file of failures (default: failed.jsonl in the download folder); written to "
        "FILE.unfinished until the download ends")  # fmt: skip
    parser.set_defaults(run=_run_download)


def _run_inspect(options: argparse.Namespace) -> int:
    if output := options.output:
        check_output(options, "report")  # before any work is done
    source = open_records(options)  # before torch, so that a mistyped name is reported at once
    encoder, _ = make_encoder(options)

    from qwen3vl_bridge.data.inspection import as_json, inspect_samples, print_text, write_html
    from qwen3vl_bridge.data.samples import SampleFilter, Samples

    found = inspect_samples(
        Samples(source, SampleFilter(encoder, limit=sys.maxsize)),
        encoder.processor,
        seq_length=options.seq_length,
        show=options.samples,
        start=options.start,
        seed=options.seed,
        lengths=options.lengths,
        pack=not options.no_pack,
        images=output is not None,
        progress=lambda numbers: progress_bar(options, numbers),
    )
    if output is not None and found.errors and not (found.samples or found.lengths):
        show(f"{output} is not written: none of the inspected samples can be used", error=True)
    elif output is not None:
        write_html(found, output, Path(options.data or options.mixture).name, options.hf_model)
    if options.json:
        print(as_json(found))
    else:
        print_text(found)
    stopping = found.errors or (found.too_long and options.on_long == "error")
    return _BAD_SAMPLES if stopping else 0


def _run_pack(options: argparse.Namespace) -> int:
    source = open_records(options)
    encoder, folder = make_encoder(options)

    from qwen3vl_bridge.data.collation import Collator, pad_token_id, read_vision_settings
    from qwen3vl_bridge.data.loading import RowDataset, RowSettings
    from qwen3vl_bridge.data.offline_packing import pack
    from qwen3vl_bridge.data.samples import SampleFilter, Samples

    sample_filter = SampleFilter(
        encoder,
        limit=options.seq_length,
        most_patches=options.max_patches,
        on_long=options.on_long,
        on_bad=options.on_bad,
        multiple=options.pad_to_multiple_of,
    )
    vision = read_vision_settings(folder, encoder.processor)
    padding = pad_token_id(encoder.processor.tokenizer)
    with naming_options("--seq-length and --pad-to-multiple-of"):
        collator = Collator(vision, padding, options.seq_length, options.pad_to_multiple_of)
    if options.objective != "sft" and options.on_long == "truncate":
        raise DataError("--on-long", "found truncate, expected error or drop: a shortened document cannot be compared")
    if options.max_documents is not None:
        sample_filter = sample_filter.with_max_documents(options.max_documents)

    def progress(steps: Iterable[int]) -> Iterable[int]:
        bar = progress_bar(options, range(len(source)))
        with bar:
            for step in steps:
                bar.update(step)
                yield step

    report = pack(
        RowDataset(Samples(source, sample_filter), RowSettings(collator, seed=options.seed)),
        options.output,
        workers=options.workers,
        overwrite=options.overwrite,
        progress=progress,
        say=functools.partial(show, error=True),
    )
    lines = {
        "samples": f"{report.samples:,}, of them {report.dropped:,} dropped and {report.truncated:,} cut",
        "rows": f"{report.rows:,}, {100 * report.fill:.1f} % full of tokens",
        "tokens": f"{report.tokens:,}",
        "patches": f"{report.patches:,}, {report.patches / report.rows:,.0f} a row",
    }
    if report.patch_fill is not None:
        lines["patches"] += f", {100 * report.patch_fill:.1f} % of the most"
    text = "\n".join(f"{name:15}{value}" for name, value in lines.items())
    show_report(json.dumps(asdict(report), indent=2) if options.json else text, options.output)
    return 0


def _run_score(options: argparse.Namespace) -> int:
    hide_logs()
    is_first, path = os.environ.get("RANK", "0") == "0", options.output / f"{options.split}.safetensors"
    if is_first and path.exists() and not options.overwrite:
        raise DataError(str(path), "the file exists already; --overwrite replaces it")
    if options.output.exists() and not (options.output.is_dir() and os.access(options.output, os.W_OK)):
        raise DataError(str(options.output), "expected a folder that can be written to, for the log-probabilities")
    with naming_options("parallel sizes"):
        parallel = parallel_settings(options) | {"seq_length": options.seq_length}
    if options.pp > 1:  # the size of tensors that stages send depends on the images in a row
        parallel["variable_seq_lengths"] = True
    open_records(options)  # before torch, so that a mistyped name is reported at once
    folder = find_weights(options)

    from qwen3vl_bridge.data.conversations import Columns
    from qwen3vl_bridge.data.dataset_provider import Qwen3VLConversationProvider
    from qwen3vl_bridge.data.pairs import write_reference_logps
    from qwen3vl_bridge.training.process_groups import shutdown
    from qwen3vl_bridge.training.reference_scores import rows_to_score, score_pairs, weights_digest
    from qwen3vl_bridge.training.weight_loading import load_model

    names = ("seq_length", "max_patches", "on_long", "on_bad", "seed", "answers", "empty_thinking", "reasoning_effort",
             "preserve_thinking", "media_root", "url_cache", "schema_adapter")  # fmt: skip
    given: dict[str, Any] = {name: getattr(options, name) for name in names}
    given |= {"path": options.data} if options.mixture is None else {"mixture": str(options.mixture)}
    with naming_options("settings of the data"):
        settings = Qwen3VLConversationProvider(
            hf_processor_path=str(folder),
            columns=Columns.from_words(options.columns),
            vision=vision_limits(options),
            objective=options.objective,
            **given,
        )
        settings.finalize()
    try:
        digest = weights_digest(options.megatron_path or folder) if is_first else ""
        with contextlib.redirect_stdout(sys.stderr):  # Megatron-Bridge prints what it loads
            model = load_model(folder, options.megatron_path, **parallel)
            rows, rules = rows_to_score(settings.for_context_parallel(options.cp), options.split)
            logps = score_pairs(model, rows, lambda groups: progress_bar(options, groups, "groups of rows"))
        if is_first:
            write_reference_logps(options.output, options.split, logps, rules, digest)
            report = {"records": len(logps), "left out": int(logps.isnan().any(1).sum())}
            text = "\n".join(f"{name:15}{number:,}" for name, number in report.items())
            show_report(json.dumps(report, indent=2) if options.json else text, path)
    finally:
        shutdown()
    return 0


def _run_download(options: argparse.Namespace) -> int:
    from qwen3vl_bridge.data.downloading import Downloader, UrlCollector, download
    from qwen3vl_bridge.data.media import MOST_RETRYABLE

    cache, book = make_url_cache(options), UrlCollector()
    with naming_options("--allowed-urls"):
        fetch = Downloader(cache, options.allowed_urls)
    source = open_records(options, book)
    manifest = options.manifest or cache.root / "failed.jsonl"
    report = download(
        getattr(source, "sources", [source]),
        book,
        fetch,
        manifest,
        workers=options.workers,
        retry=options.retry,
        give_up=options.give_up,
        progress=lambda numbers: progress_bar(options, numbers),
    )
    lines = [f"downloaded: {report.downloaded:,}; there before: {report.present:,}"]
    final = sum(failure.final for failure in report.failures)
    if report.failures:
        lines.append(f"failed: {len(report.failures):,}, permanently {final:,}; all of them: {manifest}")
        failures = ((_record_of(one.place), f"{one.place}: {one.problem}", one.problem) for one in report.failures)
        lines += [f"  {line}" for line in group_errors(failures, _MOST_SHOWN)]
    if report.unread:
        lines.append(f"samples that cannot be read: {len(report.unread):,}")
        unread = ((_record_of(problem), problem, problem) for problem in report.unread)
        lines += [f"  {line}" for line in group_errors(unread, _MOST_SHOWN)]
    if report.failures:
        lines.append("training drops records with these URLs if dataset.on_bad=drop, and stops at them otherwise")
    if final < len(report.failures):
        lines.append(
            "run this again to retry those that did not fail permanently; if they are more than "
            f"{MOST_RETRYABLE:.0%} of the URLs of a data set, training stops, unless --give-up is given here"
        )
    print(json.dumps(asdict(report), indent=2) if options.json else "\n".join(lines))
    return _FAILURES if report.failures or report.unread else 0


def _record_of(place: str) -> str:
    """Return the name of a record from a location or an error message: the text before ": "."""
    return place.partition(": ")[0]
