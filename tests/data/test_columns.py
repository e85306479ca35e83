"""Test renamed columns in every container, in both providers, and on the command line."""

import base64
import json
from pathlib import Path
from types import SimpleNamespace

import qwen3vl_bridge
from qwen3vl_bridge.cli import data as command
from qwen3vl_bridge.data import Columns, DataError, StreamedDataset, open_source
from qwen3vl_bridge.data.conversations import parse_conversation
from qwen3vl_bridge.training.callbacks import Accuracy
from qwen3vl_bridge.training.config import AccuracyConfig

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from qwen3vl_recipes import qwen3_vl_8b_sft_config
from qwen3vl_recipes.overrides import apply

from tests.data.conftest import picture, write

ASK, ANSWER = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Seven."}
IMAGE = {"type": "image", "image": b"x"}


def read(record: dict, **columns) -> list:
    columns = Columns(**columns)
    columns.check()
    return columns.convert_record(record, "x")["messages"]


def asked(record: dict, **columns):
    """Return the converted question."""
    return read(record, **columns)[0]["content"]


def test_columns_setting_reads_renamed_keys_as_turns_and_images():
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "Seven."}]
    question = [IMAGE, {"type": "text", "text": "?"}]
    assert asked({"conversations": turns, "img": b"x"}, image="img") == question
    assert asked({"dialog": turns, "pics": [b"x"]}, conversations="dialog", images="pics") == question
    own = [{"role": "user", "content": "<image>?"}, ANSWER]
    assert asked({"chat": own, "img": b"x", "image": "preview.png"}, messages="chat", image="img") == question
    assert read({"q": "Which?", "a": "Seven.", "sys": "x"}, question="q", answer="a", system="sys") == [
        *({"role": "system", "content": "x"}, ASK, ANSWER)
    ]
    assert read({"query": "Which?", "response": "no", "a": "Seven."}, question="query", answer="a") == [ASK, ANSWER]
    # The other way round.
    assert read({"question": "Seven.", "answer": "Which?"}, question="answer", answer="question") == [ASK, ANSWER]


def test_columns_templates_are_filled_with_values_of_record():
    record = {"question": "Which?", "answers": ["Seven.", "7"], "choices": ["six", 7], "at": 1, "n": 0.5}
    keys = {"answer": "{answers[0]}"}
    assert read({**record, "query": "x", "response": "y"}, question="{question}", **keys) == [ASK, ANSWER]
    assert asked(record, question=r"{question}\nBe brief. {{{n}}}", **keys) == "Which?\nBe brief. {0.5}"
    assert asked(record, question="{choices:letters}\n{at:letter}, {at}", **keys) == "A. six\nB. 7\nB, 1"
    assert asked(record, question="text:Which?", **keys) == "Which?"
    assert read({**record, "answers": [{"answer": "Seven."}]}, answer="{answers[0][answer]}") == [ASK, ANSWER]
    assert read(record, system="text:Be {{}}.", **keys)[0] == {"role": "system", "content": "Be {}."}
    # What is filled in is no template, and what it names is a picture's place.
    assert asked({"problem": "<image> {x}", "image": b"x"}, question="{problem}!", answer="text:a") == [
        *(IMAGE, {"type": "text", "text": " {x}!"})
    ]
    assert asked({"file_name": "1.png", "image": b"x"}, question="{file_name}?", answer="text:a")[0] == IMAGE


def test_columns_setting_accepts_messages_without_image_column():
    turns = [ASK, ANSWER]
    assert read({"messages": turns}, image="img") == turns
    assert read({"messages": turns, "img": None}, image="img") == turns
    assert read({"question": "Which?", "answer": "Seven.", "img": None}, image="img") == turns
    with pytest.raises(DataError, match=r"found 1 placeholders for images .* expected 0"):
        read({"messages": [{"role": "user", "content": "<image>"}, ANSWER]}, image="img")
    with pytest.raises(DataError, match=r"x: found the keys question, answer, foto, expected 'img' \(columns.image\)"):
        read({"question": "Which?", "answer": "Seven.", "foto": "x"}, image="img")


@pytest.fixture
def numbered():
    """Return a record with images in numbered columns, unordered."""
    pictures = {f"image_{number}": number and f"{number}.png" for number in (10, 2, 1)}
    return {"question": "<image 3><image 1>?", "answer": "Seven.", **pictures, "image_type": "photo", "image_11": None}


def test_columns_image_wildcard_reads_numbered_columns_in_numeric_order(numbered):
    expected = [*({"type": "image", "image": name} for name in ("10.png", "1.png")), {"type": "text", "text": "?"}]
    with pytest.raises(DataError, match="placeholders for images with the numbers 1, 3, expected each number from 1"):
        read(numbered, image="image_*")
    numbered["question"] = "<image 3><image 1><image 2>?"
    assert asked(numbered, image="image_*")[::3] == expected[::2]
    assert asked(numbered, images="image_*")[1] == expected[1]
    # An empty one among them would move the others' numbers.
    for nothing in (None, "", {"bytes": None, "path": None}):
        with pytest.raises(DataError, match=r"part 2: found .* under 'image', expected a path or bytes"):
            record = {**numbered, "image_1": nothing, "image_2": b"2", "image_10": b"10"}
            parse_conversation({"messages": read(record, image="image_*")}, "x", Path())
    words = {"question": "Which?", "answer": "Seven.", "image_1": None, "image_2": ""}
    assert read(words, image="image_*") == [ASK, ANSWER]
    assert read({"messages": [ASK, ANSWER]}, image="image_*") == [ASK, ANSWER]
    clips = {"question": "<video>?", "answer": "Seven.", "clip_1": "1.mp4"}
    assert asked(clips, video="clip_*")[0] == {"type": "video", "video": "1.mp4"}
    with pytest.raises(DataError, match=r"found 'image_2', which looks like .*columns.image=image_\*, or another"):
        read({"question": "Which?", "answer": "Seven.", "image_2": "2.png"})


def test_columns_template_renders_option_list_as_lettered_lines():
    record = {"question": "Which?", "options": "['a', \"it's\", 3]", "none": "[]", "hint": "", "answer": "A"}
    assert asked(record, question=r"{hint}\n{question}\n{options:letters}") == "Which?\nA. a\nB. it's\nC. 3"
    assert asked({**record, "options": '["a", "b"]'}, question="{options:letters}") == "A. a\nB. b"
    assert asked(record, question="{hint}\n{question}\n\n{hint}{none:letters}\n.") == "Which?\n\n."
    assert asked(record, question="{hint}: {question}") == ": Which?"


def test_columns_ignore_setting_skips_media_columns_of_record():
    record = {"messages": [ASK, ANSWER], "thumbnail": "1.png", "preview": {"bytes": b"x", "path": None}}
    assert read(record, ignore=("thumbnail", "preview")) == [ASK, ANSWER]
    with pytest.raises(DataError, match="found 'preview', which looks like"):
        read(record, ignore=["thumbnail"])
    html = [{"role": "user", "content": "Is <image> a tag?"}, ANSWER]
    assert read({"messages": html}, placeholders="text") == html


def test_columns_setting_raises_for_rejected_answers_unless_ignored(tmp_path):
    for key, other in (("rejected_response", "Eight."), ("rejected", {"role": "assistant", "content": "Eight."})):
        record = {"messages": [ASK, ANSWER], key: other}
        with pytest.raises(
            DataError, match=rf"^x: found '{key}', a key of preference data.* set columns.ignore=\[{key}\]$"
        ):
            read(record)
        assert read(record, ignore=[key]) == read(record | {key: None}) == [ASK, ANSWER]
        datasets.Dataset.from_list([record]).to_parquet(tmp_path / "train.parquet")
        with pytest.raises(DataError, match=f"found '{key}', a key of preference data"):
            open_source(tmp_path / "train.parquet")[0]


@pytest.mark.parametrize(("record", "columns", "message"), [
    ({"a": "b"}, {"question": "q", "answer": "a"}, r"x: found the keys a, expected 'q' \(columns.question\)"),
    ({"q": None, "a": "b"}, {"question": "q", "answer": "a"}, r"expected 'q' \(columns.question\)"),
    ({"q": "b", "a": 7}, {"question": "q", "answer": "a"}, "'answer': found 7, expected a string"),
    ({"q": "b"}, {"question": "q", "answer": "{a}"}, "x: columns.answer: found the keys q, expected 'a' with a value"),
    ({"q": "b", "a": [1]}, {"question": "q", "answer": "{a}"}, r"found \[1\], expected a text or a number"),
    ({"q": "b", "a": True}, {"question": "q", "answer": "{a}"}, "found True, expected a text or a number"),
    ({"q": "b", "a": []}, {"question": "q", "answer": "{a[0]}"}, r"'{a\[0\]}' cannot be filled: list index"),
    ({"q": "b", "a": {}}, {"question": "q", "answer": "{a[x]}"}, "cannot be filled: 'x'"),
    ({"q": "b", "a": "c"}, {"question": "q", "answer": "{a:letter}"}, "found 'c' for {NAME:letter}, expected an int"),
    ({"q": "b", "a": 26}, {"question": "q", "answer": "{a:letter}"}, "found 26 for {NAME:letter}, expected a number"),
    ({"q": "b", "a": "c"}, {"question": "q", "answer": "{a:letters}"}, "found 'c' for {NAME:letters}, expected a"),
    ({"q": "b", "a": "[c]"}, {"question": "q", "answer": "{a:letters}"}, r"found '\[c\]' for {NAME:letters}, exp"),
    ({"q": "b", "a": "[" * 9999}, {"question": "q", "answer": "{a:letters}"}, "expected a list of up to 26"),
    ({"q": "b", "a": "[{}]"}, {"question": "q", "answer": "{a:letters}"}, "found {}, expected a text or a number"),
    ({"question": "q", "answer": "a"}, {"image": "image_*"}, r"expected 'image_\*' \(columns.image\)"),
    ({"messages": [], "q": "b"}, {"question": "q"}, r"found 'messages' in addition to columns.q.*ignore=\[mess"),
    ({"question": "a", "answer": "b", "tools": []}, {"system": "s"}, r"expected 's' \(columns.system\)"),
])  # fmt: skip
def test_columns_setting_raises_if_record_does_not_fit_columns(record, columns, message):
    with pytest.raises(DataError, match=message):
        read(record, **columns)


@pytest.mark.parametrize(("columns", "message"), [
    ({"image": ""}, "columns.image is '', expected the name of a column"),
    ({"image": 7}, "columns.image is 7, expected the name of a column"),
    ({"question": "{}"}, "columns.question is '{}', expected a template: found {}; write a column as {NAME}"),
    ({"question": "{a"}, "columns.question is '{a', expected a template: expected '}'"),
    ({"question": "a}"}, "expected a template: Single '}'"),
    ({"answer": "{a.__class__}"}, "found {a.__class__}; write a column as"),
    ({"answer": "{a!r}"}, "found {a}; write a column as"), ({"answer": "{a:>9}"}, "found {a}; write a column as"),
    ({"ignore": "thumbnail"}, r"columns.ignore is 'thumbnail', expected a list of columns, such as \[thumbnail\]"),
    ({"ignore": ["img"], "image": "img"}, "columns.ignore has 'img', but columns.image reads it"),
    ({"image": "*"}, r"is '\*', .*; for image, images, video, videos one '\*' in the name may stand for num"),
    ({"image": "image_**"}, r"columns.image is 'image_\*\*', expected the name of a column; for image"),
    ({"question": "question_*"}, r"columns.question is 'question_\*', expected the name of a column"),
    ({"ignore": ["image_2"], "image": "image_*"}, "columns.ignore has 'image_2', but columns.image reads it"),
    ({"placeholders": "none"}, "columns.placeholders is 'none', expected 'media' or 'text'"),
])  # fmt: skip
def test_columns_setting_with_invalid_value_raises(columns, message):
    with pytest.raises(ValueError, match=message):
        Columns(**columns).check()
    for provider, place in (("Qwen3VLConversationProvider", "train_path"), ("Qwen3VLEnergonProvider", "path")):
        settings = {place: "x.jsonl", "hf_processor_path": "x", "seq_length": 64}
        with pytest.raises(ValueError, match=message):
            getattr(qwen3vl_bridge, provider)(**settings, columns=Columns(**columns)).finalize()


def test_open_source_raises_if_schema_adapter_and_columns_are_both_set(tmp_path):
    with pytest.raises(ValueError, match=r"schema_adapter is 'cord_v2', .* schema of columns image='img'; set only"):
        open_source(tmp_path, schema_adapter="cord_v2", columns=Columns(image="img"))


@pytest.fixture
def sources(tmp_path):
    """Write the same three records in every container: a question, its answers, and an optional image."""
    contents = [picture(tmp_path / f"{n}.png", 32, 32, seed=n).read_bytes() for n in range(3)]
    rows = [{"q": f"{n}?", "answers": [str(n), "x"], "img": content, "note": "a"} for n, content in enumerate(contents)]
    dataset = datasets.Dataset.from_list([{**row, "img": {"bytes": row["img"], "path": None}} for row in rows])
    dataset = dataset.cast_column("img", datasets.Image())
    dataset.save_to_disk(tmp_path / "saved")
    dataset.to_parquet(tmp_path / "train.parquet")
    urls = [{**row, "img": f"data:image/png;base64,{base64.b64encode(row['img']).decode()}"} for row in rows]
    write(tmp_path / "train.jsonl", urls)
    (tmp_path / "list.json").write_text(json.dumps(urls), "utf-8")
    return dataset, contents, [tmp_path / name for name in ("saved", "train.parquet", "train.jsonl", "list.json")]


COLUMNS = Columns(image="img", question="{q}\nBe brief.", answer="{answers[0]}")


def test_columns_give_equal_samples_in_every_file_format(sources):
    dataset, contents, paths = sources
    found = [open_source(path, columns=COLUMNS) for path in paths]
    streamed = StreamedDataset(dataset.to_iterable_dataset(), "x", schema=COLUMNS)
    for source, number in [*((one, 2) for one in found), (streamed, streamed.sample_numbers(0, 2, 1)[0])]:
        sample = source[number]
        assert sample.images == (contents[2],)
        assert sample.messages[0]["content"][1] == {"type": "text", "text": "2?\nBe brief."}
        assert sample.messages[1]["content"] == "2"
        assert r"of columns image='img', question='{q}\nBe brief.'" in source.fingerprint()
    other = Columns(image="img", question="q", answer="{answers[1]}")
    assert {source.fingerprint() for source in found}.isdisjoint(
        open_source(path, columns=other).fingerprint() for path in paths
    )
    plain = write(paths[2].with_name("plain.jsonl"), [{"messages": [ASK, ANSWER]}])
    assert "columns" not in open_source(plain).fingerprint()
    assert open_source(plain).fingerprint() == open_source(plain, columns=Columns(ignore=[])).fingerprint()


def test_open_source_raises_if_columns_are_not_in_table(sources):
    _, _, (saved, parquet, _, _) = sources
    for path in (saved, parquet):
        for setting, column in (("image", "foto"), ("ignore", "foto"), ("answer", "foto")):
            value = ["foto"] if setting == "ignore" else "foto"
            with pytest.raises(DataError, match=rf"the columns q, answers, img, note, expected '{column}' .*{setting}"):
                open_source(path, columns=Columns(**{setting: value}))
        with pytest.raises(DataError, match=r"found 'img', which looks like .*columns.image=img"):
            open_source(path, columns=Columns(question="q", answer="{answers[0]}"))
        ignored = open_source(path, columns=Columns(question="q", answer="{answers[0]}", ignore=("img",)))
        assert ignored[1].images == () and ignored[1].messages[0]["content"] == "1?"
        with pytest.raises(DataError, match="the columns q, answers, img, note, expected 'messages' or"):
            open_source(path)


def test_open_source_reads_parquet_with_image_paths_and_json_turns(tmp_path):
    picture(tmp_path / "1.png", 32, 32)
    rows = [{"question": "Which?", "answer": "Seven.", "image": "1.png", "n": 7, "foto": None}]
    rows += [{**rows[0], "foto": "2.png"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    source = open_source(tmp_path / "train.parquet")
    assert source[0].images == (tmp_path / "1.png",) and source[0].messages[1] == ANSWER
    with pytest.raises(DataError, match=r"train.parquet\[1\]: found 'foto', which looks like"):
        source[1]
    turns = json.dumps([{"from": "human", "value": "Which?"}, {"from": "gpt", "value": "7"}])
    pq.write_table(pa.Table.from_pylist([{"dialog": turns, "answer": "x"}]), tmp_path / "turns.parquet")
    assert open_source(tmp_path / "turns.parquet", columns=Columns(messages="dialog"))[0].messages[0] == ASK


def test_columns_overrides_set_columns_of_dataset_config():
    cfg = qwen3_vl_8b_sft_config()
    words = ["dataset.columns.image=img", "dataset.columns.ignore=[thumbnail]"]
    words += [r"dataset.columns.question='{question}\nBe brief.'", "dataset.columns.answer='{answers[0]}'"]
    apply(cfg, words)
    assert cfg.dataset.columns == Columns(
        image="img", ignore=["thumbnail"], question="{question}\\nBe brief.", answer="{answers[0]}"
    )
    for name in ("imag", "query"):
        with pytest.raises(ValueError, match=rf"there is no setting dataset.columns.{name}"):
            apply(cfg, [f"dataset.columns.{name}=x"])


def test_columns_survive_yaml_round_trip_of_run_config(tmp_path):
    cfg = apply(qwen3_vl_8b_sft_config(), ["dataset.columns.image=img", "dataset.columns.ignore=[a, b]"])
    cfg.to_yaml(str(tmp_path / "run_config.yaml"))
    again = type(cfg).from_yaml(str(tmp_path / "run_config.yaml"))
    assert again.dataset.columns == Columns(image="img", ignore=["a", "b"])


def test_columns_setting_is_used_for_streaming_and_for_accuracy_path(sources, checkpoint, monkeypatch):
    dataset, _, (_, parquet, _, _) = sources
    stream = dataset.to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **how: stream)
    settings = {"hf_processor_path": str(checkpoint), "seq_length": 256, "num_workers": 0, "columns": COLUMNS}
    streamed = qwen3vl_bridge.Qwen3VLConversationProvider(train_path="hf://a/b#train", streaming=True, **settings)
    streamed.finalize()
    assert len(next(streamed.stream("train")).sample_ids) == 3
    rows = qwen3vl_bridge.Qwen3VLConversationProvider(train_path=str(parquet), **settings)
    cfg = SimpleNamespace(accuracy=AccuracyConfig(path=str(parquet)), dataset=rows)
    assert [question.references for question in Accuracy(cfg).prompts.questions] == [("0",), ("1",), ("2",)]


def test_columns_of_data_set_in_mixture_override_common_columns(sources, checkpoint, tmp_path):
    _, _, (_, parquet, lines, _) = sources
    theirs = {"image": "img", "question": "q", "answer": "{answers[1]}"}
    own = write(tmp_path / "own.jsonl", [{"messages": [ASK, ANSWER]}])
    sets = [{"path": str(parquet)}, {"path": str(lines), "name": "b", "columns": theirs}]
    sets += [{"path": str(own), "columns": {}}]

    def rows(sets):
        made = qwen3vl_bridge.Qwen3VLConversationProvider(
            mixture=sets, hf_processor_path=str(checkpoint), seq_length=256, num_workers=0, columns=COLUMNS
        )
        made.finalize()
        return made.rows("train", shuffle=False)

    source = rows(sets).samples.source
    assert [source[number].messages[1]["content"] for number in range(7)] == ["0", "1", "2", "x", "x", "x", "Seven."]
    for columns, message in (
        ({"imag": "x"}, r"dataset.mixture\[0\].columns is {'imag': 'x'}, expected {KEY: COLUMN} with keys of messages"),
        ({"image": ""}, "columns.image is '', expected the name of a column"),
    ):
        with pytest.raises(ValueError, match=message):
            rows([{"path": str(parquet), "columns": columns}])
    with pytest.raises(ValueError, match=r"schema_adapter is 'cord_v2', .* set only schema_adapter or"):
        rows([{"path": str(parquet), "columns": theirs, "schema_adapter": "cord_v2"}])


def test_inspect_and_pack_commands_apply_columns_option(sources, checkpoint, tmp_path, capsys):
    _, _, (_, parquet, _, _) = sources
    common = ["--data", str(parquet), "--hf-model", str(checkpoint), "--seq-length", "256", "--no-progress"]
    words = ["image=img", r"question={q}\nBe brief.", "answer={answers[0]}"]
    assert command.main(["inspect", *common, "--json", "--columns", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_samples"] == 3 and not found["errors"] and found["trained_share"] > 0
    assert command.main(["inspect", *common, "--columns", "query=q"]) == 2
    assert "columns has 'query=q', expected KEY=COLUMN, each key once, with KEY one of mess" in capsys.readouterr().err
    assert Columns.from_words(["ignore=a,b", "placeholders=text"]) == Columns(ignore=("a", "b"), placeholders="text")
    rows, workers = tmp_path / "rows", ["--workers", "0", "--output"]
    assert command.main(["pack", *common, *workers, str(rows), "--columns", *words]) == 0

    def provider(**columns):
        made = qwen3vl_bridge.Qwen3VLConversationProvider(
            train_path=str(parquet), hf_processor_path=str(checkpoint), seq_length=256, num_workers=0,
            train_packing=str(rows), columns=Columns(**columns),
        )  # fmt: skip
        made.finalize()
        return made.rows("train")

    settings = dict(word.split("=", 1) for word in words)
    assert len(provider(**settings)[0].samples) == 3
    with pytest.raises(ValueError, match="columns"):
        provider(**{**settings, "answer": "{answers[1]}"})
