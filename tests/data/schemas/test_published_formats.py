"""Records as well-known data sets publish them: each is read as it is, or with one setting.

The columns are those of the published files, with values written here. Where a set is published as Parquet, so is it
here, with pictures as Hugging Face's `datasets` stores them.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, NamedTuple

from qwen3vl_bridge.data import Columns, DataError, open_source

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.receipts import receipt

from ..conftest import picture
from ..media.test_video import clip

IMAGE = object()  # a picture, as the file holds it


class Published(NamedTuple):
    """A data set's format.

    Attributes:
        name: of the data set.
        ending: of its files.
        record: one of them.
        question: what is asked first, with "[image]" for a picture.
        answer: what is answered last.
        columns: the setting, if it needs it.
        schema_adapter: likewise.
    """

    name: str
    ending: str
    record: dict[str, Any]
    question: str
    answer: str
    columns: dict[str, Any] = {}  # noqa: RUF012
    schema_adapter: str | None = None


def turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


FORMATS = [
    Published(
        "liuhaotian/LLaVA-Instruct-150K",
        "json",
        {"id": "000000033471", "image": "000000033471.png", "conversations": turns("<image>\nWhich?", "A bus.")},
        "[image]\nWhich?",
        "A bus.",
    ),
    Published(  # its text-only records have no image
        "liuhaotian/llava_v1_5_mix665k",
        "json",
        {"id": "wgByO4Y_0", "model": "", "conversations": turns("Write a tag.", "<b>")},
        "Write a tag.",
        "<b>",
    ),
    Published(
        "liuhaotian/llava_v1_5_mix665k",
        "json",
        {"id": "33471", "image": "coco/train2017/33471.png", "conversations": turns("<image>\nWhich?", "A bus.")},
        "[image]\nWhich?",
        "A bus.",
    ),
    Published(
        "Lin-Chen/ShareGPT4V",
        "json",
        {"id": "sa_545504", "image": "sam/sa_545504.png", "conversations": turns("Describe.\n<image>", "A barn.")},
        "Describe.\n[image]",
        "A barn.",
    ),
    Published(
        "lmms-lab/LLaVA-OneVision-Data",
        "parquet",
        {"id": "a7.png", "image": IMAGE, "conversations": turns("<image>\nWhich?", "Two."), "data_source": "geo170k"},
        "[image]\nWhich?",
        "Two.",
    ),
    Published(
        "HuggingFaceM4/the_cauldron",
        "parquet",
        {"images": [IMAGE, IMAGE], "texts": [{"user": "Same?", "assistant": "No.", "source": "nlvr2"}]},
        "[image][image]Same?",
        "No.",
    ),
    Published(
        "HuggingFaceM4/FineVision",
        "parquet",
        {
            "images": [IMAGE],
            "texts": [{"user": "Which?", "assistant": "A."}, {"user": "Why?", "assistant": "So."}],
            "source": "ai2d",
            "relevance_ratings": [5, 4],
            "relevance_min": 4,
            "image_correspondence_ratings": [5, 5],
            "image_correspondence_min": 5,
            "visual_dependency_ratings": [4, 2],
            "visual_dependency_min": 2,
            "formatting_ratings": [5, 3],
            "formatting_min": 3,
        },
        "[image]Which?",
        "So.",
    ),
    Published(
        "derek-thomas/ScienceQA",
        "parquet",
        {
            "image": IMAGE,
            "question": "Which?",
            "choices": ["north", "south"],
            "answer": 1,
            "hint": "A map.",
            "task": "closed choice",
            "grade": "grade2",
            "subject": "social science",
            "topic": "geography",
            "category": "Geography",
            "skill": "Read a map",
            "lecture": "Maps have ...",
            "solution": "Look.",
        },
        "[image]A map.\nWhich?\nA. north\nB. south",
        "B",
        {"question": "{hint}\n{question}\n{choices:letters}", "answer": "{answer:letter}"},
    ),
    Published(
        "HuggingFaceM4/ChartQA",
        "parquet",
        {"image": IMAGE, "query": "How many?", "label": ["14"], "human_or_machine": 0},
        "[image]How many?\nAnswer briefly.",
        "14",
        {"question": r"{query}\nAnswer briefly.", "answer": "{label[0]}"},
    ),
    Published(
        "lmms-lab/DocVQA",
        "parquet",
        {
            "questionId": "337",
            "question": "What date?",
            "question_types": ["handwritten"],
            "image": IMAGE,
            "docId": 279,
            "ucsf_document_id": "xnbl0037",
            "ucsf_document_page_no": "1",
            "data_split": "val",
            "answers": ["1/8/93", "1/8/1993"],
        },
        "[image]What date?",
        "1/8/93",
        {"answer": "{answers[0]}"},
    ),
    Published(
        "lmms-lab/textvqa",
        "parquet",
        {
            "image_id": "0054c91397f2fe05",
            "question_id": 0,
            "question": "What brand?",
            "image": IMAGE,
            "question_tokens": ["what", "brand"],
            "image_width": 1024,
            "image_height": 730,
            "set_name": "train",
            "flickr_original_url": "https://farm6.staticflickr.com/1.jpg",
            "image_classes": ["Camera"],
            "flickr_300k_url": "https://c4.staticflickr.com/2.jpg",
            "answers": ["nokia", "nokia"],
        },
        "[image]What brand?",
        "nokia",
        {"answer": "{answers[0]}"},
    ),
    Published(
        "HuggingFaceM4/VQAv2",
        "parquet",
        {
            "question_type": "what is",
            "multiple_choice_answer": "net",
            "image_id": 458752,
            "image": IMAGE,
            "answer_type": "other",
            "question_id": 458752000,
            "question": "What is behind?",
            "answers": [{"answer": "fence", "answer_confidence": "yes", "answer_id": 1}],
        },
        "[image]What is behind?",
        "net",
        {"answer": "multiple_choice_answer"},
    ),
    Published(
        "lmms-lab/OK-VQA",
        "parquet",
        {
            "question_id": "2971475",
            "image": IMAGE,
            "question": "What sport?",
            "answers": ["race", "race", "motocross"],
            "question_type": "one",
            "answer_type": "other",
        },
        "[image]What sport?",
        "race",
        {"answer": "{answers[0]}"},
    ),
    Published(
        "hiyouga/geometry3k",
        "parquet",
        {"images": [IMAGE], "problem": "<image>Find x.", "answer": "3"},
        "[image]Find x.",
        "3",
        {"question": "problem"},
    ),
    Published(  # "text" is a prompt of all three, which is not read
        "tatsu-lab/alpaca",
        "parquet",
        {"instruction": "Add.", "input": "3 and 4", "output": "Seven.", "text": "Below is ...\n### Response:\nSeven."},
        "Add.\n3 and 4",
        "Seven.",
    ),
    Published(  # its "<image>" is the video
        "lmms-lab/LLaVA-Video-178K",
        "json",
        {
            "id": "2440175990",
            "conversations": turns("<image>\nWhat is shown?", "A dog."),
            "data_source": "0_30_s_nextqa",
            "video": "NextQA/0/2440175990.mkv",
        },
        "[video]What is shown?",
        "A dog.",
        schema_adapter="llava_video_178k",
    ),
    Published(  # parts say by their index which picture they are
        "HuggingFaceH4/llava-instruct-mix-vsft",
        "parquet",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"index": None, "text": "Which?\n", "type": "text"},
                        {"index": 0, "text": None, "type": "image"},
                    ],
                },
                {"role": "assistant", "content": [{"index": None, "text": "A bus.", "type": "text"}]},
            ],
            "images": [IMAGE],
        },
        "Which?\n[image]",
        "A bus.",
    ),
    Published(
        "trl-lib/llava-instruct-mix",
        "parquet",
        {
            "images": [IMAGE],
            "prompt": [{"content": "Which?", "role": "user"}],
            "completion": [{"content": "A bus.", "role": "assistant"}],
        },
        "[image]Which?",
        "A bus.",
    ),
    Published(
        "ms-swift, query and response",
        "jsonl",
        {"query": "<image>Which?", "response": "A cat.", "images": ["cat.png"], "history": []},
        "[image]Which?",
        "A cat.",
    ),
    Published(
        "ms-swift and LLaMA-Factory (mllm_demo), messages",
        "json",
        {
            "messages": [{"role": "user", "content": "<image>Who?"}, {"role": "assistant", "content": "Kane."}],
            "images": ["mllm_demo_data/1.png"],
        },
        "[image]Who?",
        "Kane.",
    ),
    Published(
        "allenai/pixmo-cap",
        "parquet",
        {"image_url": "data:image/png;base64,", "caption": "A house.", "transcripts": ["Well, a house."]},
        "[image]Describe this image.",
        "A house.",
        {"image": "image_url", "question": "text:Describe this image.", "answer": "caption"},
    ),
    Published(  # pictures in columns of their own, named by their numbers, in the options too; those are Python's text
        "MMMU/MMMU",
        "parquet",
        {
            "id": "validation_Art_1",
            "question": "Which of <image 1> is missing?",
            "options": "['<image 2>', '<image 3>', 'It\\'s \\\\frac']",
            "explanation": "",
            "image_1": IMAGE,
            "image_2": IMAGE,
            "image_3": IMAGE,
            **{f"image_{number}": None for number in range(4, 8)},
            "img_type": "['Paintings']",
            "answer": "B",
            "topic_difficulty": "Easy",
            "question_type": "multiple-choice",
            "subfield": "Drawing",
        },
        "Which of [image] is missing?\nA. [image]\nB. [image]\nC. It's \\frac",
        "B",
        {"image": "image_*", "question": r"{question}\n{options:letters}"},
    ),
    Published(
        "naver-clova-ix/cord-v2",
        "parquet",
        {"image": IMAGE, "ground_truth": receipt(0)["ground_truth"]},
        "[image]Describe this image.",
        "",
        schema_adapter="cord_v2",
    ),
]


def written(folder: Path, published: Published) -> Path:
    """A file with the record, and its pictures."""
    content = picture(folder / "content.png", 32, 32).read_bytes()
    record = {key: filled(value, content) for key, value in published.record.items()}
    for key in ("image", "images"):
        for name in [record[key]] if isinstance(record.get(key), str) else record.get(key, []):
            if isinstance(name, str) and name != "bytes" and name != "path":
                picture(folder / name, 32, 32)
    if "video" in record:
        (folder / record["video"]).parent.mkdir(parents=True)
        clip(folder / record["video"], 4)
    path = folder / f"train.{published.ending}"
    if published.ending == "parquet":
        pq.write_table(pa.Table.from_pylist([record]), path)
    else:
        path.write_text(json.dumps([record] if published.ending == "json" else record), "utf-8")
    return path


def filled(value: Any, content: bytes) -> Any:
    if isinstance(value, list):
        return [filled(one, content) for one in value]
    if isinstance(value, str) and value.startswith("data:"):
        return value + base64.b64encode(content).decode()
    return {"bytes": content, "path": "1.png"} if value is IMAGE else value


def spelt(content: str | list) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in content)


@pytest.mark.parametrize("published", FORMATS, ids=[published.name for published in FORMATS])
def test_a_published_format_is_read(tmp_path, encoder, published):
    path = written(tmp_path, published)
    sample = open_source(path, columns=Columns(**published.columns), schema_adapter=published.schema_adapter)[0]
    assert spelt(sample.messages[0]["content"]) == published.question
    assert spelt(sample.messages[-1]["content"]).startswith(published.answer)
    assert len(sample.images) == published.question.count("[image]")
    assert len(sample.videos) == published.question.count("[video]")
    assert encoder(sample).loss_mask.sum() > 0


@pytest.mark.parametrize(
    "published", [one for one in FORMATS if one.columns or one.schema_adapter], ids=lambda one: one.name
)
def test_a_format_that_needs_a_setting_is_refused_without(tmp_path, published):
    """So that a record is never read as something else."""
    path = written(tmp_path, published)
    with pytest.raises(
        DataError,
        match=r"found (the (columns|keys) .*, expected|1,? expected a string|'image_1', which looks|1 places for im)",
    ):
        open_source(path)[0]
