"""Ask a checkpoint a question through the Megatron model, without exporting it.

    python conversion/generate.py --hf-path HF_FOLDER --megatron-path MEGATRON --image cat.png "What is this?"

`--hf-path` gives configuration, processor and, where no `--megatron-path` is given, the weights. The answer is greedy:
the one transformers' `generate(do_sample=False)` gives on the export.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Ask a checkpoint a question, without exporting it.")
    parser.add_argument("question")
    parser.add_argument("--hf-path", required=True, help="Hugging Face folder or hub id: configuration and processor")
    parser.add_argument("--megatron-path", help="fsdp_dtensor checkpoint; without it, the weights of --hf-path")
    parser.add_argument("--image", action="append", default=[], help="a picture to show; may be given several times")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    arguments = parser.parse_args()
    if missing := [path for path in arguments.image if not Path(path).is_file()]:
        parser.error(f"--image is {missing[0]}, expected a file that exists")
    if arguments.max_new_tokens < 1:
        parser.error(f"--max-new-tokens is {arguments.max_new_tokens}, expected 1 or more")
    return arguments


def main() -> None:
    """Print the answer."""
    arguments = parse_arguments()

    from qwen3vl_bridge.compat.library_logs import quiet

    quiet()
    from qwen3vl_bridge import generate
    from qwen3vl_bridge.training.checkpointing.all_or_none import is_first
    from qwen3vl_bridge.training.checkpointing.model_loading import load_model
    from qwen3vl_bridge.training.process_groups import shutdown

    from PIL import Image
    from transformers import AutoProcessor

    model = load_model(arguments.hf_path, arguments.megatron_path)
    processor = AutoProcessor.from_pretrained(arguments.hf_path)
    pictures = [{"type": "image", "image": Image.open(path).convert("RGB")} for path in arguments.image]
    content = [*pictures, {"type": "text", "text": arguments.question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    ).to(next(model[0].parameters()).device)
    answer = generate(model, **inputs, max_new_tokens=arguments.max_new_tokens)
    new = answer[:, inputs["input_ids"].shape[1] :]
    if is_first():  # of several, which all decode
        print(processor.batch_decode(new, skip_special_tokens=True)[0])
    shutdown()


if __name__ == "__main__":
    main()
