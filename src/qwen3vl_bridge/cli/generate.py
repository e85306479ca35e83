"""`qwen3vl generate`: ask a checkpoint a question through the Megatron model, without exporting it."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from qwen3vl_bridge.cli.generation_options import (
    add_options,
    find_weights,
    generation_settings,
    hide_logs,
    parallel_settings,
)
from qwen3vl_bridge.terminal import CommandParser, at_least, run, show


def main(arguments: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Print the answer to one question; return exit code 0, 2 for invalid input, or 130 if interrupted."""
    options = _parse(prog, arguments)
    return run(lambda: _generate(options), ValueError, OSError)  # a CheckpointError is a ValueError


def _generate(options: argparse.Namespace) -> int:
    hide_logs()
    with contextlib.redirect_stdout(sys.stderr):  # Megatron-Bridge prints what it loads
        answer = _answer(options)
    if answer is not None:
        found = {"question": options.question, "images": options.image, "answer": answer}
        show(json.dumps(found, indent=2) if options.json else answer)
        if not answer.strip():
            show("the answer is empty: the model generated only end tokens or tokens without text", error=True)
    return 0


def _parse(prog: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog=prog,
        description="Ask a checkpoint a question without exporting it. By default the most likely tokens are chosen: "
        "the answer equals that of transformers' generate(do_sample=False) on the export. Start the command with "
        "torchrun to divide the model over several ranks.",
    )
    add = parser.add_argument
    add("question")
    add("--hf-model", required=True, metavar="MODEL", help="Hugging Face folder or hub id with "
    "configuration and processor, and the weights unless --megatron-path is given")  # fmt: skip
    add(
        "--megatron-path",
        metavar="FOLDER",
        help="weights: a Megatron checkpoint of either format, or a run's folder",
    )
    add("--image", action="append", default=[], metavar="FILE", help="image to show; may be given several times")
    add("--max-new-tokens", type=at_least(1), default=128, metavar="N",
        help="maximum length of the answer in tokens (default: %(default)s)")  # fmt: skip
    add_options(parser)
    add("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if missing := [path for path in options.image if not Path(path).is_file()]:
        parser.error(f"--image is {missing[0]}, expected a file that exists")
    return options


def _answer(options: argparse.Namespace) -> str | None:
    """Return the answer on rank 0 and None on the other ranks. All ranks decode."""
    parallel, hf_folder = parallel_settings(options), find_weights(options)
    from qwen3vl_bridge.data.media import load_image

    images = [{"type": "image", "image": load_image(Path(path), "--image")} for path in options.image]
    settings = generation_settings(options)
    from qwen3vl_bridge.core.collectives import is_rank_zero
    from qwen3vl_bridge.inference.generation import end_token_ids, generate
    from qwen3vl_bridge.training.process_groups import shutdown
    from qwen3vl_bridge.training.weight_loading import load_model

    from transformers import AutoProcessor

    try:
        model = load_model(hf_folder, options.megatron_path, **parallel)
        processor = AutoProcessor.from_pretrained(hf_folder, trust_remote_code=False)
        asked = [{"role": "user", "content": [*images, {"type": "text", "text": options.question}]}]
        inputs = processor.apply_chat_template(
            asked, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        ).to(next(model[0].parameters()).device)
        ends = end_token_ids([*model], processor.tokenizer, hf_folder)
        settings |= dict(max_new_tokens=options.max_new_tokens, eos_token_id=ends)
        answer = generate([*model], **inputs, **settings)
        new = answer[:, inputs["input_ids"].shape[1] :]
        return processor.batch_decode(new, skip_special_tokens=True)[0] if is_rank_zero() else None
    finally:
        shutdown()
