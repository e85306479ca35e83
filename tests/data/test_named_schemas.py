"""Test records of published data sets: read without settings, with one setting, or by a named schema."""

import base64
import json
import pickle
import re
from pathlib import Path
from typing import Any, NamedTuple

from qwen3vl_bridge.cli.data import main
from qwen3vl_bridge.data import Columns, DataError, PackedRows, open_source
from qwen3vl_bridge.data.conversations import DEFAULT_COLUMNS, SCHEMAS, find_schema, parse_conversation

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.bridge.data.sources import hf_adapters
from megatron.bridge.data.token_utils import json2token

from tests.data.conftest import picture, write
from tests.data.test_videos import clip
from tests.helpers.receipts import receipt, write_receipts

IMAGE = object()  # a picture, as the file holds it


class Published(NamedTuple):
    name: str
    ending: str
    record: dict[str, Any]
    question: str
    answer: str
    columns: dict[str, Any] = {}  # noqa: RUF012
    schema_adapter: str | None = None


def turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


# fmt: off
FORMATS = [
    Published("liuhaotian/LLaVA-Instruct-150K", "json",
        {"id": "000000033471", "image": "000000033471.png", "conversations": turns("<image>\nWhich?", "A bus.")},
        "[image]\nWhich?", "A bus."),
    # its text-only records have no image
    Published("liuhaotian/llava_v1_5_mix665k", "json",
        {"id": "wgByO4Y_0", "model": "", "conversations": turns("Write a tag.", "<b>")}, "Write a tag.", "<b>"),
    Published("liuhaotian/llava_v1_5_mix665k", "json",
        {"id": "33471", "image": "coco/train2017/33471.png", "conversations": turns("<image>\nWhich?", "A bus.")},
        "[image]\nWhich?", "A bus."),
    Published("Lin-Chen/ShareGPT4V", "json",
        {"id": "sa_545504", "image": "sam/sa_545504.png", "conversations": turns("Describe.\n<image>", "A barn.")},
        "Describe.\n[image]", "A barn."),
    Published("lmms-lab/LLaVA-OneVision-Data", "parquet",
        {"id": "a7.png", "image": IMAGE, "conversations": turns("<image>\nWhich?", "Two."), "data_source": "geo170k"},
        "[image]\nWhich?", "Two."),
    Published("HuggingFaceM4/the_cauldron", "parquet",
        {"images": [IMAGE, IMAGE], "texts": [{"user": "Same?", "assistant": "No.", "source": "nlvr2"}]},
        "[image][image]Same?", "No."),
    Published("HuggingFaceM4/FineVision", "parquet",
        {"images": [IMAGE], "texts": [{"user": "Which?", "assistant": "A."}, {"user": "Why?", "assistant": "So."}],
         "source": "ai2d", "relevance_ratings": [5, 4], "relevance_min": 4, "image_correspondence_ratings": [5, 5],
         "image_correspondence_min": 5, "visual_dependency_ratings": [4, 2], "visual_dependency_min": 2,
         "formatting_ratings": [5, 3], "formatting_min": 3}, "[image]Which?", "So."),
    Published("derek-thomas/ScienceQA", "parquet",
        {"image": IMAGE, "question": "Which?", "choices": ["north", "south"], "answer": 1, "hint": "A map.",
         "task": "closed choice", "grade": "grade2", "subject": "social science", "topic": "geography",
         "category": "Geography", "skill": "Read a map", "lecture": "Maps have ...", "solution": "Look."},
        "[image]A map.\nWhich?\nA. north\nB. south", "B",
        {"question": "{hint}\n{question}\n{choices:letters}", "answer": "{answer:letter}"}),
    Published("HuggingFaceM4/ChartQA", "parquet",
        {"image": IMAGE, "query": "How many?", "label": ["14"], "human_or_machine": 0},
        "[image]How many?\nAnswer briefly.", "14", {"question": r"{query}\nAnswer briefly.", "answer": "{label[0]}"}),
    Published("lmms-lab/DocVQA", "parquet",
        {"questionId": "337", "question": "What date?", "question_types": ["handwritten"], "image": IMAGE,
         "docId": 279, "ucsf_document_id": "xnbl0037", "ucsf_document_page_no": "1", "data_split": "val",
         "answers": ["1/8/93", "1/8/1993"]}, "[image]What date?", "1/8/93", {"answer": "{answers[0]}"}),
    Published("lmms-lab/textvqa", "parquet",
        {"image_id": "0054c91397f2fe05", "question_id": 0, "question": "What brand?", "image": IMAGE,
         "question_tokens": ["what", "brand"], "image_width": 1024, "image_height": 730, "set_name": "train",
         "flickr_original_url": "https://farm6.staticflickr.com/1.jpg", "image_classes": ["Camera"],
         "flickr_300k_url": "https://c4.staticflickr.com/2.jpg", "answers": ["nokia", "nokia"]},
        "[image]What brand?", "nokia", {"answer": "{answers[0]}"}),
    Published("HuggingFaceM4/VQAv2", "parquet",
        {"question_type": "what is", "multiple_choice_answer": "net", "image_id": 458752, "image": IMAGE,
         "answer_type": "other", "question_id": 458752000, "question": "What is behind?",
         "answers": [{"answer": "fence", "answer_confidence": "yes", "answer_id": 1}]},
        "[image]What is behind?", "net", {"answer": "multiple_choice_answer"}),
    Published("lmms-lab/OK-VQA", "parquet",
        {"question_id": "2971475", "image": IMAGE, "question": "What sport?", "answers": ["race", "race", "motocross"],
         "question_type": "one", "answer_type": "other"}, "[image]What sport?", "race", {"answer": "{answers[0]}"}),
    Published("hiyouga/geometry3k", "parquet", {"images": [IMAGE], "problem": "<image>Find x.", "answer": "3"},
        "[image]Find x.", "3", {"question": "problem"}),
    # "text" is a prompt of all three, which is not read
    Published("tatsu-lab/alpaca", "parquet",
        {"instruction": "Add.", "input": "3 and 4", "output": "Seven.", "text": "Below is ...\n### Response:\nSeven."},
        "Add.\n3 and 4", "Seven."),
    # its "<image>" is the video
    Published("lmms-lab/LLaVA-Video-178K", "json",
        {"id": "2440175990", "conversations": turns("<image>\nWhat is shown?", "A dog."),
         "data_source": "0_30_s_nextqa", "video": "NextQA/0/2440175990.mkv"},
        "[video]What is shown?", "A dog.", schema_adapter="llava_video_178k"),
    # parts say by their index which picture they are
    Published("HuggingFaceH4/llava-instruct-mix-vsft", "parquet",
        {"messages": [
            {"role": "user", "content": [
                {"index": None, "text": "Which?\n", "type": "text"}, {"index": 0, "text": None, "type": "image"}]},
            {"role": "assistant", "content": [{"index": None, "text": "A bus.", "type": "text"}]}],
         "images": [IMAGE]}, "Which?\n[image]", "A bus."),
    Published("trl-lib/llava-instruct-mix", "parquet",
        {"images": [IMAGE], "prompt": [{"content": "Which?", "role": "user"}],
         "completion": [{"content": "A bus.", "role": "assistant"}]}, "[image]Which?", "A bus."),
    Published("ms-swift, query and response", "jsonl",
        {"query": "<image>Which?", "response": "A cat.", "images": ["cat.png"], "history": []},
        "[image]Which?", "A cat."),
    Published("ms-swift and LLaMA-Factory (mllm_demo), messages", "json",
        {"messages": [{"role": "user", "content": "<image>Who?"}, {"role": "assistant", "content": "Kane."}],
         "images": ["mllm_demo_data/1.png"]}, "[image]Who?", "Kane."),
    Published("allenai/pixmo-cap", "parquet",
        {"image_url": "data:image/png;base64,", "caption": "A house.", "transcripts": ["Well, a house."]},
        "[image]Describe this image.", "A house.",
        {"image": "image_url", "question": "text:Describe this image.", "answer": "caption"}),
    # pictures in columns of their own, named by their numbers, in the options too; those are Python's text
    Published("MMMU/MMMU", "parquet",
        {"id": "validation_Art_1", "question": "Which of <image 1> is missing?",
         "options": "['<image 2>', '<image 3>', 'It\\'s \\\\frac']", "explanation": "", "image_1": IMAGE,
         "image_2": IMAGE, "image_3": IMAGE, **{f"image_{number}": None for number in range(4, 8)},
         "img_type": "['Paintings']", "answer": "B", "topic_difficulty": "Easy", "question_type": "multiple-choice",
         "subfield": "Drawing"},
        "Which of [image] is missing?\nA. [image]\nB. [image]\nC. It's \\frac", "B",
        {"image": "image_*", "question": r"{question}\n{options:letters}"}),
    Published("naver-clova-ix/cord-v2", "parquet", {"image": IMAGE, "ground_truth": receipt(0)["ground_truth"]},
        "[image]Describe this image.", "", schema_adapter="cord_v2"),
]
# fmt: on
NEED_A_SETTING = [published for published in FORMATS if published.columns or published.schema_adapter]


def written(folder: Path, published: Published) -> Path:
    """Write a file with the record, and its images."""
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
def test_named_schema_reads_published_data_set_format(tmp_path, encoder, published):
    path = written(tmp_path, published)
    sample = open_source(path, columns=Columns(**published.columns), schema_adapter=published.schema_adapter)[0]
    assert spelt(sample.messages[0]["content"]) == published.question
    assert spelt(sample.messages[-1]["content"]).startswith(published.answer)
    assert len(sample.images) == published.question.count("[image]")
    assert len(sample.videos) == published.question.count("[video]")
    assert encoder(sample).loss_mask.sum() > 0


@pytest.mark.parametrize("published", NEED_A_SETTING, ids=[published.name for published in NEED_A_SETTING])
def test_open_source_raises_if_data_set_needs_schema_or_columns_setting(tmp_path, published):
    path = written(tmp_path, published)
    problems = r"the (columns|keys) .*, expected|1,? expected a string|'image_1', which looks|1 placeholders"
    with pytest.raises(DataError, match=f"found ({problems})"):
        open_source(path)[0]


_VALUES = st.recursive(
    st.text(max_size=8) | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=5), inner, max_size=3),
    max_leaves=8,
)
_PARSES = st.dictionaries(st.text(min_size=1, max_size=5), _VALUES, min_size=1, max_size=3)
CORD_V2 = SCHEMAS["cord_v2"]


@given(_PARSES, st.booleans())
def test_cord_v2_answers_equal_megatron_bridge_json2token(parse, several):
    truth = {"gt_parses": [parse, {"other": "one"}]} if several else {"gt_parse": parse}
    record = {"image": b"file", "ground_truth": json.dumps({**truth, "meta": {}}), "other": 1}
    question, answer = CORD_V2.convert_record(record, "x")["messages"]
    assert answer == {"role": "assistant", "content": [{"type": "text", "text": json2token(parse, sort_json_key=True)}]}
    assert question["content"][0] == {"type": "image", "image": b"file"}


@pytest.mark.parametrize(("record", "message"), [
    ([], "x: found None under 'image', expected a non-empty value; the keys are none, and schema cord_v2"),
    ({"image": b"file", "text": "a"}, "found None under 'ground_truth', expected a non-empty string; the keys are"),
    ({"image": b"file", "ground_truth": {"gt_parse": {}}}, "x: found {.* under 'ground_truth', expected a non-empty"),
    ({"image": b"file", "ground_truth": "{"}, r"x: found {'ground_truth': '{'}, which schema cord_v2 cannot read"),
    ({"image": b"file", "ground_truth": '{"gt_parse": {}}'}, r"x: found \[''\] as the answer, expected a non-empty"),
])  # fmt: skip
def test_cord_v2_raises_if_record_is_invalid(record, message):
    with pytest.raises(DataError, match=message):
        CORD_V2.convert_record(record, "x")


def test_cord_v2_raises_if_table_lacks_its_columns(folder):
    for name in ("train.parquet", "saved"):
        with pytest.raises(DataError, match="expected 'image' and 'ground_truth' under schema cord_v2"):
            open_source(folder / name, schema_adapter="cord_v2")


# A record of each published set, with a column or two that nobody reads.
# fmt: off
RECORDS = {
    "rdr": {"image": "7.png", "text": "A bolt, M8."},
    "medpix": {"image_id": "7.png", "question": "Which organ?", "answer": "A lung.", "mode": "train"},
    "raven": {"images": ["7.png", "8.png"], "texts": [
        {"user": "Which comes <image> next?", "assistant": "B.", "source": "RAVEN"},
        {"user": "And then?", "assistant": "C.", "source": "RAVEN"}]},
    "llava_video_178k": {"id": "x/1", "data_source": "0_30_s_nextqa", "video": "clips/1.mkv", "conversations": [
        *turns("<image>\nWhat is shown?", " A dog. "), *turns("And <video> then?", "A cat.")]},
    "squad": {"id": "1", "title": "Tea", "context": "Tea is hot.", "question": "What is hot?",
              "answers": {"text": ["Tea", "tea"], "answer_start": [0, 0]}},
    "gsm8k": {"question": "One and two?", "answer": "They are three.\n#### 3"},
    "openmathinstruct2": {"problem": "Half of 8?", "generated_solution": "Halve 8: $\\boxed{4}$",
                          "expected_answer": "4", "problem_source": "augmented_math"},
}
# fmt: on
RECORDS["openmathinstruct2_thinking"] = RECORDS["openmathinstruct2"]


def by_megatron_bridge(name: str, record: dict, **settings) -> list[tuple]:
    """Return roles, reasoning and parts as Megatron-Bridge's adapter makes them."""
    (made,) = hf_adapters.adapt_hf_dataset([record], adapter_name=name, adapter_kwargs=settings)
    if "prompt" in made:
        return [("user", None, [made["prompt"]]), ("assistant", None, [made["completion"]])]
    messages = made.get("conversation") or made["messages"]
    return [(m["role"], m.get("thinking"), [_told(part) for part in _parts(m["content"])]) for m in messages]


def _parts(content) -> list:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _told(part: dict):
    return part["text"] if part["type"] == "text" else part.get("image") or part["path"]


@pytest.fixture
def media(tmp_path):
    for name in ("7.png", "8.png"):
        picture(tmp_path / name, 32, 32)
    (tmp_path / "clips").mkdir()
    clip(tmp_path / "clips/1.mkv", 4)
    return tmp_path


def test_schema_adapters_cover_all_of_megatron_bridge_except_audio():
    for name in hf_adapters._ADAPTERS:
        if name in ("cv17", "default_audio", "valor32k_avqa"):
            with pytest.raises(ValueError, match=f"schema_adapter is '{name}', which contains audio that the"):
                find_schema(name, DEFAULT_COLUMNS)
        else:
            assert pickle.loads(pickle.dumps(find_schema(name, DEFAULT_COLUMNS))) == SCHEMAS[name]
    assert set(RECORDS) == set(SCHEMAS) - {"cord_v2"}


@pytest.mark.parametrize("name", RECORDS)
def test_schema_adapter_messages_equal_megatron_bridge_adapter(media, encoder, name):
    record = RECORDS[name]
    expected = by_megatron_bridge(name, record, video_root_path=str(media))
    lines = write(media / "train.jsonl", [record])
    datasets.Dataset.from_list([record]).to_parquet(media / "train.parquet")
    for path in (lines, media / "train.parquet"):
        sample = open_source(path, schema_adapter=name)[0]
        found, seen = [], iter((*sample.images, *sample.videos))
        for message in sample.messages:
            parts = [p["text"] if p["type"] == "text" else next(seen) for p in _parts(message["content"])]
            found.append((message["role"], message.get("reasoning_content"), parts))
        at_media = [(role, thought, [_there(media, part) for part in parts]) for role, thought, parts in expected]
        assert found == at_media
        if name == "openmathinstruct2_thinking":
            with pytest.raises(DataError, match="message 2: found reasoning_content, which the chat template ignores"):
                encoder(sample)
        else:
            assert len(encoder(sample)) == encoder.size(sample).tokens


def _there(media, part: str):
    """Return media as Megatron-Bridge names them, with absolute video paths."""
    return media / part if (media / part).is_file() else part


def test_schema_adapter_raises_if_video_path_is_outside_media_root(media):
    path = write(media / "clips/train.jsonl", [{**RECORDS["llava_video_178k"], "video": "../7.png"}])
    with pytest.raises(DataError, match=r"part 1: '../7.png' is .*: expected a path inside the media root"):
        open_source(path, schema_adapter="llava_video_178k")[0]


def video_turns(*changes) -> dict:
    return {"conversations": [{"from": "human", "value": "What?"}, *changes]}


@pytest.mark.parametrize(("name", "change", "message"), [
    ("rdr", {"text": None}, "found None under 'text', expected a non-empty string"),
    ("rdr", {"text": " "}, "found ' ' under 'text', expected a non-empty string"),
    ("raven", {"images": []}, r"found \[\] under 'images', expected a non-empty list"),
    ("raven", {"images": "7.png"}, "found '7.png' under 'images', expected a non-empty list"),
    ("raven", {"texts": [{"user": "a"}]}, "which schema raven cannot read"),
    ("llava_video_178k", {"video": ""}, "message 1, part 1: found '' under 'video', expected a path"),
    ("llava_video_178k", {"conversations": "a"}, "found 'a' under 'conversations', expected a non-empty list"),
    ("llava_video_178k", video_turns(7), "turn 2: found 7, expected an object with 'from', human or gpt"),
    ("llava_video_178k", video_turns({"from": "system", "value": "a"}), "turn 2: found {'from': 'system'.*, exp"),
    ("llava_video_178k", video_turns({"from": "gpt", "value": ""}), "turn 2: found {'from': 'gpt', 'value': ''}"),
    ("squad", {"answers": ["Tea"]}, r"found \['Tea'\] under 'answers', expected a non-empty object"),
    ("squad", {"answers": {"text": []}}, "'Tea is hot.*which schema squad cannot read .IndexError"),
    ("squad", {"answers": {"text": [7]}}, "found .7. as the answer, expected a non-empty"),
])  # fmt: skip
def test_schema_adapter_raises_if_record_is_invalid(tmp_path, name, change, message):
    picture(tmp_path / "7.png", 32, 32)
    record = {**RECORDS[name], **change}
    with pytest.raises(DataError, match=f"^x: .*{message}"):
        parse_conversation(SCHEMAS[name].convert_record(record, "x"), "x", tmp_path)


@pytest.mark.parametrize("kind", ["train.jsonl", "train.parquet"])
def test_inspect_and_pack_commands_read_cord_v2_data(tmp_path, checkpoint, capsys, kind):
    rows = [receipt(number) for number in range(5)]
    write_receipts(tmp_path, train=5, valid=1)
    urls = [{**row, "image": f"data:image/png;base64,{base64.b64encode(row['image']).decode()}"} for row in rows]
    write(tmp_path / "train.jsonl", urls)
    source = ["--data", str(tmp_path / kind), "--hf-model", str(checkpoint), "--schema-adapter", "cord_v2"]
    assert main(["inspect", *source, "--seq-length", "1024", "--samples", "5"]) == 0
    shown = re.findall(r"\[\[(.*?)<\|im_end\|>\]\]", capsys.readouterr().out)
    assert shown == [json2token(json.loads(row["ground_truth"])["gt_parse"]) for row in rows]
    packing = ["--output", str(tmp_path / "rows"), "--seq-length", "1024", "--workers", "0"]
    assert main(["pack", *source, *packing]) == 0
    assert "5, of them 0 dropped and 0 cut" in capsys.readouterr().out and len(PackedRows(tmp_path / "rows")) >= 1
    rest = [*source[:4], "--schema-adapter", "cord"]
    assert main(["inspect", *rest]) == main(["pack", *rest, "--output", str(tmp_path / "no")]) == 2
    said = "--schema-adapter: schema_adapter is 'cord', expected one of cord_v2, rdr,"
    assert capsys.readouterr().err.count(said) == 2


def test_schema_adapter_raises_if_name_is_unknown(make_provider):
    with pytest.raises(ValueError, match=r"schema_adapter is 'cord', expected one of cord_v2, rdr, .*, or none"):
        make_provider(train_path="x.jsonl", schema_adapter="cord")
