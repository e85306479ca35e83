"""Answer held-out questions with a checkpoint, and draw the results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FuncFormatter
from PIL import Image
from tqdm import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor

BLUE, RED, GRAY = "#1f5fa8", "#c8102e", "#555555"
COLUMNS, ROWS = 15, 4


class Answer(NamedTuple):
    """An image, the expected answer and the answer of the model."""

    image: Path
    truth: str
    answer: str

    @property
    def right(self) -> bool:
        """Return True if the answer is exactly the expected text."""
        return self.answer == self.truth


def _text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _questions(path: Path) -> list[tuple[list[dict], Answer]]:
    """Return the prompt of each conversation with full image paths, and its expected answer."""
    questions = []
    for line in path.read_text(encoding="utf-8").splitlines():
        *prompt, reply = json.loads(line)["messages"]
        parts = [part for message in prompt if isinstance(message["content"], list) for part in message["content"]]
        pictures = [part for part in parts if part["type"] == "image"]
        for part in pictures:
            part["image"] = str(path.parent / part["image"])
        if not pictures or reply["role"] != "assistant":
            raise ValueError(
                f"{path}: {line}: expected a picture in the question, and an assistant's answer at the end"
            )
        questions.append((prompt, Answer(Path(pictures[0]["image"]), _text(reply["content"]), "")))
    return questions


@torch.inference_mode()
def answer(
    hf_folder: str | Path, test_jsonl: str | Path, *, batch_size: int = 60, max_new_tokens: int = 4
) -> list[Answer]:
    """Answer the questions in a file with transformers, by greedy decoding.

    Args:
        hf_folder: folder of a checkpoint with its processor.
        test_jsonl: file with one conversation per line; image paths are relative to its folder.
        batch_size: number of conversations in a batch.
        max_new_tokens: maximum length of an answer.

    Returns:
        The answer to each conversation, in the order of the file.

    Raises:
        ValueError: a line has no image, or does not end with the assistant.
    """
    questions = _questions(Path(test_jsonl))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    processor = AutoProcessor.from_pretrained(hf_folder)
    processor.tokenizer.padding_side = "left"
    model = AutoModelForImageTextToText.from_pretrained(hf_folder, dtype="auto").to(device).eval()
    answers = []
    for start in tqdm(range(0, len(questions), batch_size), desc="answering", unit="batch"):
        prompts, expected = zip(*questions[start : start + batch_size], strict=True)
        inputs = processor.apply_chat_template(
            list(prompts),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        ).to(device)
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        new = tokens[:, inputs["input_ids"].shape[1] :]
        texts = processor.batch_decode(new, skip_special_tokens=True)
        answers += [one._replace(answer=text.strip()) for one, text in zip(expected, texts, strict=True)]
    return answers


def accuracy(answers: Sequence[Answer]) -> float:
    """Return the fraction of right answers."""
    if not answers:
        raise ValueError("0 answers, expected at least 1")
    return sum(one.right for one in answers) / len(answers)


def _shown(text: str, limit: int = 6) -> str:
    """Return at most `limit` characters of a text, with characters that the font cannot draw replaced by "?"."""
    text = "".join(c if c.isascii() and c.isprintable() else "?" for c in text) or "(none)"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _pictures(figure: SubFigure, title: str, answers: Sequence[Answer]) -> None:
    """Draw the image and the answer of each question into a part of a figure, row by row."""
    figure.suptitle(title, x=0.012, ha="left", fontsize=11, color=GRAY)
    rows = -(-len(answers) // COLUMNS)
    for place, axes in enumerate(figure.subplots(rows, COLUMNS, squeeze=False).flat):
        axes.set(xticks=[], yticks=[], anchor="N")
        if place >= len(answers):
            axes.set_visible(False)
            continue
        one = answers[place]
        axes.imshow(Image.open(one.image).convert("RGB"))
        axes.spines[:].set(color=GRAY if one.right else RED, linewidth=0.6 if one.right else 2.2)
        label = _shown(one.answer) if one.right else f"{_shown(one.answer)} (is {_shown(one.truth)})"
        axes.set_xlabel(label, color=BLUE if one.right else RED, fontsize=13 if one.right else 9, parse_math=False)


def answer_sheet(answers: Sequence[Answer], path: str | Path, *, most: int = COLUMNS * ROWS) -> None:
    """Draw images with the model's answers under them. Wrong answers are red, with the expected answer next to them.

    The upper part has the first answers. The lower part has wrong answers, unless the upper part has no right answer.

    Args:
        answers: all answers.
        path: the PNG file to write.
        most: maximum number of images in each part.
    """
    right = sum(one.right for one in answers)
    wrong = [one for one in answers if not one.right]
    first = answers[:most]
    parts = [(f"The first {len(first)}, each with the model's answer", first)]
    if wrong and any(one.right for one in first):
        which = f"The first {most} of {len(wrong)}" if len(wrong) > most else f"All {len(wrong)}"
        parts.append((f"{which} it got wrong", wrong[:most]))
    heights = [0.3 + 1.05 * -(-len(shown) // COLUMNS) for _, shown in parts]
    figure = Figure(figsize=(COLUMNS * 0.9, sum(heights) + 0.5), dpi=110, layout="constrained")
    figure.suptitle(
        f"Held-out pictures: {right} of {len(answers)} right ({accuracy(answers):.1%})", x=0.012, ha="left", fontsize=15
    )
    boxes = figure.subfigures(len(parts), 1, height_ratios=heights, squeeze=False).flat
    for box, (title, shown) in zip(boxes, parts, strict=True):
        _pictures(box, title, shown)
    figure.savefig(path)


def loss_curve(log: Sequence[Mapping[str, float]], path: str | Path) -> None:
    """Draw the loss of a run over its steps.

    Args:
        log: entries with `step` and `loss`, and perhaps entries with `step` and `valid_loss`. If there are two entries
            for a step, the later one counts.
        path: the PNG file to write.
    """
    train, held_out = ({e["step"]: e[key] for e in log if key in e} for key in ("loss", "valid_loss"))
    if not train:
        raise ValueError(f"{len(log)} entries, none with a loss; expected one a step")
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*sorted(train.items()), strict=True), color=BLUE, linewidth=0.9, label="training, each step")
    if held_out:
        points = zip(*sorted(held_out.items()), strict=True)
        axes.plot(*points, color=RED, marker="o", markersize=5, linewidth=1.4, label="held-out")
    axes.set(xlabel="step", ylabel="loss per answer token (log scale)", yscale="log", title="Fine-tuning on digits")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
