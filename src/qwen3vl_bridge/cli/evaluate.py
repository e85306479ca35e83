"""`qwen3vl evaluate`: generate answers to the prompts of a data set, and score them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.cli.data_options import (
    add_records,
    add_template,
    check_output,
    make_encoder,
    open_records,
    progress_bar,
)
from qwen3vl_bridge.cli.generation_options import (
    add_options,
    find_weights,
    generation_settings,
    hide_logs,
    parallel_settings,
)
from qwen3vl_bridge.inference.scorers import SCORERS
from qwen3vl_bridge.terminal import CommandParser, at_least, run, show

if TYPE_CHECKING:
    from qwen3vl_bridge.inference.evaluation import ScoredAnswer

_MOST_SHOWN = 10  # wrong answers


def main(arguments: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Print the mean score; return exit code 0, 2 for invalid input, or 130 if interrupted."""
    options = _parse(prog, arguments)
    return run(lambda: _evaluate(options), ValueError, OSError)  # DataError and CheckpointError are ValueErrors


def _parse(prog: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog=prog,
        description="Generate answers to the prompts of a data set and compare each with the last answer of its "
        "conversation, or with the list `references` of its record. Start the command with torchrun to divide the "
        "model, or the prompts, over several ranks.",
    )
    add_records(parser, split=False)
    add_template(parser)
    add = parser.add_argument
    add("--split", choices=("train", "valid", "test"),
        help="which split of a folder with splits, or of the data sets of a mixture (default: test)")  # fmt: skip
    add("--megatron-path", metavar="FOLDER", help="weights: a Megatron checkpoint of either format, or a run's folder "
        "(default: those of --hf-model)")  # fmt: skip
    add("--metric", choices=tuple(SCORERS), default="exact", help="how an answer is scored, see docs/evaluation.md "
        "(default: %(default)s)")  # fmt: skip
    add(
        "--samples",
        type=at_least(1),
        metavar="N",
        help="only the first N conversations of each data set (default: all)",
    )
    add("--max-new-tokens", type=at_least(1), default=128, metavar="N",
        help="maximum length of an answer in tokens, reasoning included (default: %(default)s)")  # fmt: skip
    add("--batch-size", type=at_least(1), default=16, metavar="N",
        help="prompts that are decoded together (default: %(default)s)")  # fmt: skip
    add_options(parser)
    add("--output", type=Path, metavar="FILE", help="also write every answer with its score, as JSON Lines")
    add("--overwrite", action="store_true", help="replace an earlier file")
    parser.set_defaults(answers="last", empty_thinking="prompt")
    options = parser.parse_args(arguments)
    if options.split is None and options.mixture is not None:
        parser.error("--split is missing, which --mixture needs; a data set that is one file is its train split")
    if options.split is None:
        options.split = "test" if Path(options.data).is_dir() else "train"  # a file is the train split
    return options


def _evaluate(options: argparse.Namespace) -> int:
    hide_logs()
    if options.output is not None and os.environ.get("RANK", "0") == "0":  # other ranks do not write
        check_output(options, "answers")
    parallel = parallel_settings(options)
    source = open_records(options)  # before torch, so that a mistyped name is reported at once
    with contextlib.redirect_stdout(sys.stderr):  # Megatron-Bridge prints what it loads
        found = _answers(options, source, parallel)
    if found is None:  # not the first rank
        return 0
    scores = _mean_scores(found)
    if options.output is not None:
        from qwen3vl_bridge.core.atomic import replace_file

        lines = (f"{json.dumps(asdict(one))}\n" for answers in found.values() for one in answers)
        replace_file(options.output, "".join(lines).encode())
    if options.json:
        print(json.dumps({"metric": options.metric, **scores}, indent=2))
    else:
        _print_scores(options.metric, scores, found)
    return 0


def _answers(
    options: argparse.Namespace, source: Any, parallel: dict[str, Any]
) -> dict[str, list[ScoredAnswer]] | None:
    """Return the scored answers on rank 0, by name of the data set, and None on the other ranks."""
    folder = find_weights(options)
    options.hf_model = str(folder)  # requested from the hub once
    settings = generation_settings(options)
    encoder, _ = make_encoder(options)
    from qwen3vl_bridge.core.collectives import is_rank_zero
    from qwen3vl_bridge.data.prompts import Prompts
    from qwen3vl_bridge.inference.drafts import drafts_tokens
    from qwen3vl_bridge.inference.evaluation import evaluate, make_references
    from qwen3vl_bridge.inference.generation import end_token_ids
    from qwen3vl_bridge.training.process_groups import shutdown
    from qwen3vl_bridge.training.weight_loading import load_model

    sets = zip(getattr(source, "names", [options.data]), getattr(source, "sources", [source]), strict=True)
    prompts = {}
    for name, one in sets:
        first = len(one) if options.samples is None else min(options.samples, len(one))
        prompts[name] = Prompts(one, encoder, range(first))
        make_references(prompts[name].questions, options.metric)  # raises before the model is loaded
    try:
        model = load_model(folder, options.megatron_path, **parallel)
        settings |= dict(max_new_tokens=options.max_new_tokens, batch_size=options.batch_size)
        settings["count_drafts"] = not options.do_sample and drafts_tokens(model)
        settings |= dict(eos_token_id=end_token_ids([*model], encoder.processor.tokenizer, folder))
        found = {}
        for name, asked in prompts.items():
            progress = (lambda numbers: progress_bar(options, numbers, "batches")) if is_rank_zero() else iter
            found[name] = evaluate([*model], asked, options.metric, progress=progress, **settings)
        return found if is_rank_zero() else None
    finally:
        shutdown()


def _mean_scores(found: Mapping[str, Sequence[ScoredAnswer]]) -> dict[str, Any]:
    """Return a dict with the mean score and the number of all answers.

    If there are several data sets, the key "sets" has such a dict for each of them.

    For models with multi-token prediction, the dicts also have the fraction of drafts that are accepted.
    """
    from qwen3vl_bridge.inference.evaluation import acceptance_rate, mean_score

    def mean(answers: Sequence[ScoredAnswer]) -> dict[str, Any]:
        rate = acceptance_rate(answers)
        drafts = {} if rate is None else {"draft_acceptance": rate, "drafts": sum(one.drafts for one in answers)}
        return {"score": mean_score(answers), "answers": len(answers)} | drafts

    total = mean([one for ones in found.values() for one in ones])
    return total | ({"sets": {name: mean(ones) for name, ones in found.items()}} if len(found) > 1 else {})


def _print_scores(metric: str, scores: Mapping[str, Any], found: Mapping[str, Sequence[ScoredAnswer]]) -> None:
    def drafts(one: Mapping[str, Any]) -> str:
        rate = one.get("draft_acceptance")
        return "" if rate is None else f"; {rate:.1%} of {one['drafts']:,} drafted tokens accepted"

    show(f"{metric}: {scores['score']:.4f}, the mean of {scores['answers']:,} answers{drafts(scores)}")
    for name, one in scores.get("sets", {}).items():
        show(f"  {name}: {one['score']:.4f}, {one['answers']:,} answers{drafts(one)}")
    wrong = [one for ones in found.values() for one in ones if one.score < 1]
    if wrong:
        show(f"below 1: {len(wrong):,} answers" + (f", the first {_MOST_SHOWN}" if len(wrong) > _MOST_SHOWN else ""))
    for one in wrong[:_MOST_SHOWN]:
        accepted = " or ".join(map(repr, one.references))
        show(f"  {one.sample_id}: {one.score:.2f}, expected {accepted}, the model answered {one.answer!r}")
