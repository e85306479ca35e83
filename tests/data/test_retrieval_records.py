"""Records of queries and documents, and labeled answers: formats, prompts, rows and errors."""

import json
from pathlib import Path

from qwen3vl_bridge.cli.data import main as data
from qwen3vl_bridge.data import DataError
from qwen3vl_bridge.data.conversations import Columns, parse_conversation
from qwen3vl_bridge.data.objectives import columns_for
from qwen3vl_bridge.data.sources import open_source

import datasets
import pytest
import torch
from PIL import Image

ASK, SEVEN = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Seven."}
QUERY = {"query": "A cat", "positive": "Tom", "negatives": ["Dog", "Car"]}
SAME = [
    QUERY,
    {"anchor": "A cat", "positive": ["Tom"], "negative": ["Dog", "Car"]},
    {"query": {"text": "A cat"}, "pos": ["Tom"], "neg": [{"text": "Dog"}, "Car"]},
    {"anchor": "A cat", "positive": "Tom", "negative_1": "Dog", "negative_2": "Car", "id": 7},
    {"messages": [{"role": "user", "content": "A cat"}], "positive_messages": [[{"role": "user", "content": "Tom"}]],
     "negative_messages": [[{"role": "user", "content": "Dog"}], [{"role": "user", "content": "Car"}]]},
]  # fmt: skip


def read(objective: str, record: dict, **columns: object):
    own = columns_for(objective, Columns(**columns)).convert_record(record, "x")
    return parse_conversation(own, "x", Path())


def texts(conversation) -> list[str]:
    """Return the text of each message."""
    parts = [message["content"] for message in conversation.messages]
    return [part if isinstance(part, str) else "|".join(one.get("text", one["type"]) for one in part) for part in parts]


@pytest.mark.parametrize("record", SAME, ids=lambda record: ",".join(record))
def test_embedding_record_of_every_format_has_query_and_documents(record):
    before = json.dumps(record)
    found = read("embedding", record)
    default = "Represent the user's input."
    assert [texts(one) for one in found.documents] == [[default, word, "."] for word in ("A cat", "Tom", "Dog", "Car")]
    assert json.dumps(record) == before
    assert [one.sample_id for one in found.documents] == ["x", "x (positive)", "x (negative 1)", "x (negative 2)"]


@pytest.mark.parametrize(("instruction", "expected"), [
    ("Find cats", "Find cats."), ("Find cats!", "Find cats!"), (" Find cats ", "Find cats."),
    ("", "Represent the user's input."),
])  # fmt: skip
def test_embedding_instruction_is_system_prompt_of_query_only(instruction, expected):
    found = read("embedding", QUERY | {"instruction": instruction})
    assert texts(found)[0] == expected and texts(found.others[0])[0] == "Represent the user's input."


@pytest.mark.parametrize("record", SAME, ids=lambda record: ",".join(record))
def test_reranker_record_asks_about_each_document(record):
    found = read("reranker", record | {"instruction": "Find it"})
    asked = [texts(one)[1:] for one in found.documents]
    assert asked == [
        [f"<Instruct>: Find it|<Query>:|A cat|\n<Document>:|{word}", answer]
        for word, answer in (("Tom", "yes"), ("Dog", "no"), ("Car", "no"))
    ]


def test_retrieval_record_media_belong_to_query_or_document():
    record = {"query": "Which?", "image": b"q", "positive": {"text": "Seven", "images": [b"a", b"b"]}, "negatives": []}
    for objective, expected in (("embedding", [(b"q",), (b"a", b"b")]), ("reranker", [(b"q", b"a", b"b")])):
        found = read(objective, record)
        assert [one.images for one in found.documents] == expected
    assert texts(read("reranker", record))[1].endswith("<Query>:|image|Which?|\n<Document>:|image|image|Seven")
    swift = SAME[4] | {"images": [b"q"], "negative_images": [[b"d"], []]}
    swift["messages"] = [{"role": "user", "content": "<image>A cat"}]
    swift["negative_messages"] = [[{"role": "user", "content": "Dog <image>"}], [{"role": "user", "content": "Car"}]]
    assert [one.images for one in read("embedding", swift).documents] == [(b"q",), (), (b"d",), ()]
    assert texts(read("embedding", {"query": "A", "positive": {}}).others[0])[1] == "NULL"


@pytest.mark.parametrize(("record", "message"), [
    ({"query": "A cat"}, "found the keys query, expected 'query', 'positive'"),
    ({"positive": "Tom"}, "found the keys positive, expected 'query', 'positive'"),
    ({"messages": [ASK, SEVEN]}, "found the keys messages, expected 'query', 'positive'"),
    (QUERY | {"positive": ["Tom", "Kit"]}, "found 2 positive documents, expected one"),
    (QUERY | {"instruction": 3}, "found 3 as the instruction"),
    (QUERY | {"label": 0.0}, "found 'label', which would be ignored"),
    (QUERY | {"positive_image": "a.png"}, "found 'positive_image', which would be ignored"),
    (QUERY | {"picture": "a.png"}, "found 'picture', which would be ignored"),
    (QUERY | {"pos": ["Tom"]}, "found 'positive' and 'pos', expected one of them"),
    ({"query": {"text": "A", "image": "a.png"}, "image": "b.png", "positive": "B"}, "found 'image' in the query and"),
    ({"prompt": "Q", "chosen": "A", "rejected": "B"}, "objective.kind must fit the records"),
    (QUERY | {"negatives": [3]}, "x: negative 1: found 3, expected a text"),
    (QUERY | {"negatives": [{"txt": "Dog"}]}, "x: negative 1: found {'txt': 'Dog'}, expected a text"),
    (SAME[4] | {"positive_images": [[b"a"], [b"b"]]}, "under 'positive_images', expected a list for each document"),
    (SAME[4] | {"messages": [ASK, SEVEN]}, "x: query: found .* expected one message"),
])  # fmt: skip
def test_embedding_record_raises_clear_error(record, message):
    with pytest.raises(DataError, match=message):
        read("embedding", record)


def image(color: int) -> Image.Image:
    return Image.new("RGB", (64, 96), (color, 20, 30))


@pytest.mark.parametrize("objective", ["embedding", "reranker"])
def test_retrieval_prompts_equal_tokens_of_qwens_scripts(processor, checkpoint, make_provider, tmp_path, objective):
    """Both scripts render system and user message with a generation prompt, and read the last token of the prompt."""
    image(0).save(tmp_path / "q.png")
    image(200).save(tmp_path / "d.png")
    record = {"query": {"text": "Which digit?", "image": "q.png"}, "instruction": "Retrieve digits",
              "positive": {"text": "It is seven.", "image": "d.png"}, "negatives": ["Nothing"]}  # fmt: skip
    (tmp_path / "train.jsonl").write_text(json.dumps(record) + "\n")
    provider = make_provider(train_path=tmp_path / "train.jsonl", objective=objective, seq_length=1024)
    encoder, found = provider.processor_settings().encoder, provider.rows("train").samples.source[0]

    def part(kind: str, value: object = "") -> dict:
        return {"type": kind, kind: value}

    query, document = [part("image"), part("text", "Which digit?")], [part("image"), part("text", "It is seven.")]
    if objective == "embedding":
        asked = [("Retrieve digits.", query, [image(0)]), ("Represent the user's input.", document, [image(200)]),
                 ("Represent the user's input.", [part("text", "Nothing")], [])]  # fmt: skip
    else:
        rule = ("Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
                'that the answer can only be "yes" or "no".')  # fmt: skip
        begin = [part("text", "<Instruct>: Retrieve digits"), part("text", "<Query>:"), *query]
        asked = [(rule, [*begin, part("text", "\n<Document>:"), *document], [image(0), image(200)]),
                 (rule, [*begin, part("text", "\n<Document>:"), part("text", "Nothing")], [image(0)])]  # fmt: skip
    assert len(asked) == len(found.documents)
    for (system, user, images), one in zip(asked, found.documents, strict=True):
        messages = [{"role": "system", "content": [part("text", system)]}, {"role": "user", "content": user}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        expected = processor(text=[text], images=images or None, return_tensors="pt")
        sample = encoder(one)
        last = int(sample.loss_mask.argmax())  # the last token of the prompt, whose label is the answer
        assert torch.equal(sample.input_ids[: last + 1], expected["input_ids"][0])
        if images:
            torch.testing.assert_close(sample.pixel_values, expected["pixel_values"])


def test_rows_for_retrieval_keep_documents_of_record_and_limit_their_number(make_provider, tmp_path):
    records = [{"query": f"q {n}", "positive": f"p {n}", "negatives": ["n"] * (n % 3)} for n in range(30)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = dict(train_path=tmp_path / "train.jsonl", seq_length=1024, objective="embedding")
    for most in (None, 8):
        rows = make_provider(**settings, max_documents=most).rows("train")
        batches = [rows.collate_fn([rows[number]]) for number in range(rows.plan.end_of_epoch())]
        sizes = [size for batch in batches for size in batch.groups.sizes]
        assert sorted(sizes) == sorted(2 + n % 3 for n in range(30))
        largest = max(batch.groups.num_documents for batch in batches)
        assert largest > 12 if most is None else 4 < largest <= most
        for batch in batches:
            names = [name.partition(" (")[0] for name in batch.sample_ids]
            starts = torch.tensor(batch.groups.sizes).cumsum(0) - torch.tensor(batch.groups.sizes)
            assert len(set(names)) == len(batch.groups.sizes)
            assert all("(" not in batch.sample_ids[start] for start in starts.tolist())
    rows = make_provider(**settings | {"objective": "reranker"}).rows("train")
    batches = [rows.collate_fn([rows[number]]) for number in range(rows.plan.end_of_epoch())]
    labels = torch.cat([batch.labels[batch.loss_mask > 0] for batch in batches]).tolist()
    answers = [labels.count(token) for token in batches[0].groups.answer_tokens]
    assert answers == [30, sum(n % 3 for n in range(30))]


def test_retrieval_columns_read_the_same_from_parquet_and_json_lines(tmp_path):
    datasets.Dataset.from_list([QUERY | {"extra": 3}]).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps(QUERY | {"extra": 3}) + "\n")
    columns = columns_for("embedding", Columns())
    found = [open_source(tmp_path / name, columns=columns)[0] for name in ("a.parquet", "a.jsonl")]
    assert [texts(one) for one in found[0].documents] == [texts(one) for one in found[1].documents]
    assert len(found[0].documents) == 4
    datasets.Dataset.from_list([{"messages": [ASK, SEVEN]}]).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match="found the columns messages, expected 'query'"):
        open_source(tmp_path / "b.parquet", columns=columns)


@pytest.mark.parametrize(("record", "expected"), [
    ({"prompt": "Which?", "completion": "Seven.", "label": True}, True),
    ({"prompt": [ASK], "completion": [SEVEN], "label": False}, False),
    ({"messages": [ASK, SEVEN], "label": 0}, False),
    ({"conversations": [{"from": "human", "value": "Which?"}, {"from": "gpt", "value": "Seven."}], "kto_tag": "true"},
     True),
    ({"instruction": "Which?", "output": "Seven.", "desirable": True}, True),
])  # fmt: skip
def test_labeled_record_of_every_format_has_answer_and_label(record, expected):
    found = read("kto", record)
    assert found.messages == (ASK, SEVEN) and found.is_desirable is expected and not found.others


def test_labeled_record_with_two_labels_reads_one_that_is_not_ignored():
    record = {"messages": [ASK, SEVEN], "label": 3, "kto_tag": False}
    assert read("kto", record, ignore=("label",)).is_desirable is False


def test_labeled_record_trains_only_last_answer():
    earlier = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    found = read("kto", {"messages": [*earlier, ASK, SEVEN], "label": True})
    assert found.losses == {1: False}


@pytest.mark.parametrize(("record", "message"), [
    ({"messages": [ASK, SEVEN]}, "found messages, expected one of 'label', 'kto_tag', 'desirable'"),
    ({"messages": [ASK, SEVEN], "label": True, "kto_tag": True}, "found 'label' and 'kto_tag'"),
    ({"messages": [ASK, SEVEN], "label": 2}, "found 2 under 'label', expected true"),
    ({"messages": [ASK, SEVEN, ASK], "label": True}, "as messages, expected a conversation with an answer"),
    ({"messages": [], "label": True}, "expected"),
    ({"prompt": None, "label": True}, "expected"),
    ({"messages": [ASK, {"role": "assistant", "content": [{"type": "image", "image": b"a"}]}], "label": 1},
     "found an image or video in the answer"),
    (QUERY, "objective.kind must fit the records"),
])  # fmt: skip
def test_labeled_record_raises_clear_error(record, message):
    with pytest.raises(DataError, match=message):
        read("kto", record)


def test_mismatched_answer_skips_records_with_same_prompt_and_unreadable_ones(tmp_path):
    """As in a file in which both answers of each pair follow one another."""
    records = [{"prompt": f"Q{n // 2}", "completion": f"A{n}", "label": n % 2 == 0} for n in range(6)]
    records[1] = {"prompt": "Q0", "label": True}
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    source = open_source(tmp_path / "train.jsonl", columns=columns_for("kto", Columns()))
    found = [source[n].others[0].messages[-1]["content"] for n in (0, 2, 3, 4, 5)]
    assert found == ["A5", "A0", "A0", "A3", "A3"]
    (tmp_path / "one.jsonl").write_text(json.dumps(records[0]) + "\n")
    with pytest.raises(DataError, match=r"one.jsonl:1: found no readable answer to another prompt"):
        open_source(tmp_path / "one.jsonl", columns=columns_for("kto", Columns()))[0]


def test_supervised_record_raises_for_query_with_documents():
    with pytest.raises(DataError, match=r"found 'positive' next to a query.*embedding or reranker"):
        read("sft", QUERY)


def test_retrieval_columns_raise_for_names_of_columns():
    with pytest.raises(ValueError, match=r"columns.image is set, but records for an embedding model"):
        columns_for("embedding", Columns(image="img")).check()
    assert read("embedding", QUERY | {"label": 1}, ignore=("label",)).others


def test_retrieval_record_reads_frames_and_system_message_and_skips_empty_media():
    frames = {"query": "What?", "positive": {"video": [b"1", b"2"], "sample_fps": 2}}
    assert [len(one.videos) for one in read("embedding", frames).documents] == [0, 1]
    swift = SAME[4] | {"messages": [{"role": "system", "content": "Find it"}, {"role": "user", "content": "A cat"}]}
    assert texts(read("embedding", swift))[0] == "Find it."
    assert not read("embedding", QUERY | {"image": ""}).images


def test_labeled_records_get_answer_of_previous_record(make_provider, tmp_path):
    records = [{"prompt": f"Q{n}", "completion": f"A{n}", "label": n % 2 == 0} for n in range(5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = make_provider(train_path=tmp_path / "train.jsonl", objective="kto").rows("train")
    source = rows.samples.source
    for n in range(5):
        own, other = source[n].documents
        assert [own.messages[0]["content"], own.messages[1]["content"]] == [f"Q{n}", f"A{n}"]
        assert [other.messages[0]["content"], other.messages[1]["content"]] == [f"Q{n}", f"A{(n - 1) % 5}"]
        assert other.sample_id == f"{source.sample_id(n)} (answer of {source.sample_id((n - 1) % 5)})"
    batch = rows.collate_fn([rows[0]])
    labels = [int(name.rpartition(":")[2].partition(" ")[0]) % 2 for name in batch.sample_ids[::2]]
    assert batch.groups.is_desirable.tolist() == labels  # lines count from 1


def test_rows_packed_before_training_need_same_limit_of_documents(make_provider, checkpoint, tmp_path):
    records = [{"query": f"q {n}", "positive": f"p {n}"} for n in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ["--data", str(tmp_path / "train.jsonl"), "--hf-model", str(checkpoint), "--seq-length", "1024"]
    options += ["--objective", "embedding", "--max-documents", "8", "--workers", "0", "--no-progress"]
    assert data(["pack", *options, "--output", str(tmp_path / "rows")]) == 0
    assert data(["pack", *options, "--output", str(tmp_path / "other"), "--on-long", "truncate"]) == 2
    settings = dict(train_path=tmp_path / "train.jsonl", seq_length=1024, objective="embedding")
    packed = dict(train_packing=tmp_path / "rows", max_documents=8)
    rows, direct = (make_provider(**settings, **one).rows("train") for one in (packed, {"max_documents": 8}))
    count = direct.plan.end_of_epoch()
    assert sorted(len(rows.plan.row(n)) for n in range(count)) == sorted(len(direct.plan.row(n)) for n in range(count))
    with pytest.raises((ValueError, DataError), match="document_tokens"):
        make_provider(**settings, **packed | {"max_documents": 16}).rows("train")


def test_record_with_too_many_documents_raises_with_limit(make_provider, tmp_path):
    record = {"query": "q", "positive": "p", "negatives": ["n"] * 30}
    (tmp_path / "train.jsonl").write_text(json.dumps(record) + "\n")
    settings = dict(train_path=tmp_path / "train.jsonl", seq_length=2048, objective="embedding", max_documents=16)
    with pytest.raises(DataError, match=r"found 32 documents, expected at most 16 \(objective.max_documents\)"):
        make_provider(**settings).rows("train").samples.size(0)
