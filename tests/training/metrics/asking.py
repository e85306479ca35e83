"""Questions of which the tiny checkpoint answers some right, and a run that asks them. Run on ranks, too.

torchrun --nproc_per_node N -m tests.training.metrics.asking OUTPUT HF DATA SPLITS

SPLITS is a JSON list of fields of the provider.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.ranks import begin, leave

from ..running import replicate, train

NEW_TOKENS = 4


def write_questions(folder: Path, hf: Path, picture: Path, texts: list[str]) -> list[bool]:
    """Write `questions.jsonl`: every other expected answer is what transformers generates; returns which are."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(hf)
    model = AutoModelForImageTextToText.from_pretrained(hf, attn_implementation="eager")
    right, lines = [], []
    for number, text in enumerate(texts):
        content: list[dict[str, str]] = [{"type": "text", "text": text}]
        if number % 3:
            content.insert(0, {"type": "image", "image": str(picture)})
        user = {"role": "user", "content": content}
        prompt = processor.apply_chat_template(
            [user], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        ids = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[:, prompt["input_ids"].shape[1] :]
        answer = processor.tokenizer.decode(ids[0], skip_special_tokens=True)
        right.append(number % 2 == 0 and bool(answer.strip()))
        expected = answer if right[-1] else "none of its words"
        lines.append(json.dumps({"messages": [user, {"role": "assistant", "content": expected}]}) + "\n")
    (folder / "questions.jsonl").write_text("".join(lines))
    return right


def asking(hf: Path, data: Path, fields: dict[str, Any]) -> Any:
    from qwen3vl_recipes.digits import qwen3_vl_digits_sft_config
    from qwen3vl_recipes.paths import set_paths

    cfg = set_paths(qwen3_vl_digits_sft_config(), hf_path=hf, data_path=data, pretrained_checkpoint=hf)
    cfg.mixed_precision = cfg.checkpoint.save = cfg.checkpoint.load = cfg.logger.tensorboard_dir = None
    cfg.model.seq_length = cfg.dataset.seq_length = 128
    cfg.dataset.num_workers, cfg.train.train_iters, cfg.scheduler.lr_warmup_iters = 0, 1, 0
    cfg.optimizer.lr = cfg.optimizer.min_lr = 0.0
    cfg.validation.eval_interval = cfg.validation.eval_iters = 1
    cfg.accuracy.path, cfg.accuracy.max_new_tokens = str(data / "questions.jsonl"), NEW_TOKENS
    for name, value in fields.items():
        assert hasattr(cfg.model, name)
        setattr(cfg.model, name, value)
    return replicate(cfg)


def main(output: str, hf: str, data: str, splits: list[dict[str, Any]]) -> None:
    found = [train(asking(Path(hf), Path(data), fields))[-1]["accuracy"] for fields in splits]
    leave(found, output)


if __name__ == "__main__":
    begin()
    main(*sys.argv[1:4], json.loads(sys.argv[4]))
