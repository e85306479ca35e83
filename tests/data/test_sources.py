"""Test which source a path opens, and that all file formats give the same conversations."""

import json
import pickle

from qwen3vl_bridge.cli.data import main
from qwen3vl_bridge.data import DataError, JsonLines, JsonList, open_source
from qwen3vl_bridge.data.data_paths import path_of_split, splits_in
from qwen3vl_bridge.data.loading import make_worker_init

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.data.conftest import dialogue, llava_record, write

ASK, ANSWER = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Seven."}
SHAPES = ("train.jsonl", "lines.json", "list.json", "train.parquet", "parts", "parts/part-*.parquet", "saved")


def contents(source, order) -> list:
    return [(source[index].messages, source[index].images) for index in order]


@pytest.mark.parametrize("shape", SHAPES)
def test_open_source_gives_equal_conversations_for_every_file_format(folder, shape):
    source, expected = open_source(folder / shape, folder), JsonLines(folder / "train.jsonl")
    assert len(source) == len(expected) == 20
    assert contents(source, range(20)) == contents(expected, range(20))
    assert len({source.sample_id(index) for index in range(20)}) == 20
    assert all(source[index].sample_id == source.sample_id(index) for index in range(20))
    assert source.sample_id(-1) == source.sample_id(19) and contents(source, [-1]) == contents(source, [19])
    assert source.fingerprint() == open_source(folder / shape, folder).fingerprint()
    for method in (source.__getitem__, source.sample_id):
        with pytest.raises(IndexError):
            method(20)


def test_open_source_sample_ids_name_file_and_line_or_index(folder):
    names = [open_source(folder / shape, folder).sample_id(7) for shape in SHAPES]
    assert names[:4] == ["train.jsonl:8", "lines.json:8", "list.json[7]", "train.parquet[7]"]
    assert names[4:] == ["part-1.parquet[2]", "part-1.parquet[2]", "saved[7]"]


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=10)
@given(order=st.permutations(range(20)), spent=st.integers(0, 19))
def test_open_source_random_access_and_pickled_copy_give_same_samples(folder, shape, order, spent):
    source = open_source(folder / shape, folder)
    expected = dict(zip(range(20), contents(source, range(20)), strict=True))
    source[spent]
    copy = pickle.loads(pickle.dumps(source))
    assert contents(copy, order) == contents(source, order) == [expected[index] for index in order]


@pytest.mark.parametrize("shape", ["list.json", "parts", "saved"])
def test_open_source_dataloader_workers_read_equal_conversations(folder, shape):
    source, order = open_source(folder / shape, folder), np.random.default_rng(0).permutation(20).tolist()
    expected = [source[index] for index in order]
    loader = DataLoader(
        source, sampler=order, num_workers=2, batch_size=5, collate_fn=list, worker_init_fn=make_worker_init(None)
    )
    assert [conversation for batch in loader for conversation in batch] == expected


@pytest.mark.parametrize("shape", ["train.parquet", "saved", "train.jsonl", "list.json"])
def test_open_source_fingerprint_changes_with_data(folder, shape, tmp_path):
    assert open_source(folder / shape, folder).fingerprint() != open_source(folder / "parts").fingerprint()
    other = [llava_record(number) for number in range(1, 21)]
    if shape == "saved":
        datasets.Dataset.from_list(other).save_to_disk(tmp_path / shape)
    elif shape == "train.parquet":
        pq.write_table(pa.Table.from_pylist(other), tmp_path / shape)
    else:
        write(tmp_path / shape, other)
    assert open_source(folder / shape).fingerprint() != open_source(tmp_path / shape).fingerprint()


LIST = "expected objects with commas between them"


@pytest.mark.parametrize(("text", "message"), [
    (b"[]", "train.json: found an empty list, expected conversations"),
    (b"[{}", "train.json: found 'the end of the file' inside the list, expected a complete list"),
    (b'[{"a": "b]', "found 'the end of the file' inside the list"),
    (b"[{}, ", "found 'the end of the file' inside the list"), (b"[{} {}]", rf"found '{{' after 1 records, {LIST}"),
    (b"[{}, 7, {}]", rf"found ', 7,{{' after 1 records, {LIST}"),
    (b'[{}, "x"]', f"""found ', "x"]' after 1 records, {LIST}"""),
    (b"[[{}]]", rf"found '\[' after 0 records, {LIST}"), (b"[{},]", rf"found ',\]' after 1 records, {LIST}"),
    (b"[,{}]", rf"found ',{{' after 0 records, {LIST}"), (b"[}", rf"found '}}' after 0 records, {LIST}"),
    (b"[{}] x", "found 'x' after the list, expected the end of the file"),
    (b"[{}][", r"found '\[' after the list, expected the end"),
    (b"[\xff]", rf"found '\\\\xff\]' after 0 records, {LIST}"), (b"[" * 100_000, "after 0 records, expected"),
])  # fmt: skip
def test_json_list_raises_if_file_is_malformed(tmp_path, text, message):
    (tmp_path / "train.json").write_bytes(text)
    with pytest.raises(DataError, match=message) as caught:
        open_source(tmp_path / "train.json")
    assert str(caught.value).startswith(str(tmp_path))


@pytest.mark.parametrize(("text", "message"), [
    (b'{"a": ]}', r"no valid JSON \(.*\), expected one conversation"), (b'{"a": [}]', "no valid JSON"),
    (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "no valid JSON .*more than 50 deep"),
    (b'{"a": ' + b"1" * 5000 + b"}", "no valid JSON .*digits"),
    (b'{"messages": "\xff"}', "found bytes that are not valid UTF-8"),
    (b'{"messages": []}', r"found \[\] under 'messages'"),
    (b'{"messages": [{"role": "user", "content": "<image>"}], "image": "../x"}', r"'../x' is .* inside the media"),
])  # fmt: skip
def test_json_list_and_json_lines_errors_name_invalid_record(tmp_path, text, message):
    good = json.dumps({"messages": [ASK, ANSWER]}).encode()
    (tmp_path / "train.json").write_bytes(b"[" + good + b"," + text + b"]")
    if b"[}" not in text and b": ]" not in text:  # brackets that don't match may end a record early
        source = JsonList(tmp_path / "train.json")
        assert source[0].messages == (ASK, ANSWER)
        with pytest.raises(DataError, match=message) as caught:
            source[1]
        assert str(caught.value).startswith("train.json[1]: ")
    (tmp_path / "train.jsonl").write_bytes(good + b"\n" + text)
    with pytest.raises(DataError, match=message) as caught:
        JsonLines(tmp_path / "train.jsonl")[1]
    assert str(caught.value).startswith("train.jsonl:2: ")


texts = st.text('[]{}",\\ \né7', max_size=5)


@settings(max_examples=100)
@given(
    records=st.lists(
        st.dictionaries(texts, texts | st.lists(texts | st.lists(texts, max_size=2), max_size=2), max_size=2),
        min_size=1,
        max_size=3,
    ),
    indent=st.sampled_from([None, 0, 1]),
    ascii_only=st.booleans(),
)
def test_json_list_finds_begin_and_end_of_every_record(tmp_path_factory, records, indent, ascii_only):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(records, indent=indent, ensure_ascii=ascii_only), "utf-8")
    source, text = JsonList(path), path.read_bytes()
    found = [json.loads(text[start:end]) for start, end in zip(source._starts, source._ends, strict=True)]
    assert found == records


@pytest.mark.parametrize(("path", "message"), [
    ("no.jsonl", "no.jsonl: the file does not exist, expected JSON lines"),
    ("no.json", "no.json: the file does not exist, expected JSON lines"),
    ("no.parquet", "no.parquet: there is no such Parquet file, and no folder with Parquet"),
    ("no-*.parquet", "there is no such Parquet file"),
    ("empty", "empty: found nothing in the folder, expected train.jsonl, Parquet files or a data set"),
    (".", r"found empty.json, empty, train.csv in the folder, expected .*to use /.*/empty.json, give its own"),
    ("empty.json", "empty.json: found no lines"),
    ("train.csv", "train.csv: expected a folder, or a file that ends with .jsonl, .json"),
])  # fmt: skip
def test_open_source_raises_if_path_is_invalid(tmp_path, path, message):
    (tmp_path / "empty").mkdir()
    for name in ("empty.json", "train.csv"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=message):
        open_source(tmp_path / path)
    with pytest.raises(DataError, match=r"empty.json: the file does not exist or is empty, expected a list"):
        JsonList(tmp_path / "empty.json")


@pytest.mark.parametrize("shape", SHAPES)
def test_open_source_raises_if_media_root_is_missing(folder, shape):
    with pytest.raises(DataError, match="nowhere: there is no such folder, expected the folder of images"):
        open_source(folder / shape, folder / "nowhere")


@pytest.mark.parametrize("form", ["a.jsonl", "lines.json", "list.json"])
def test_json_byte_order_mark_is_ignored(tmp_path, form):
    record = {"messages": dialogue("a", "b")}
    text = json.dumps([record, record]) if form == "list.json" else f"{json.dumps(record)}\n" * 2
    (tmp_path / form).write_text(text, encoding="utf-8-sig")
    source = open_source(tmp_path / form)
    assert len(source) == 2 and source[0].messages == source[1].messages


def records(word: str, count: int) -> list[dict]:
    turns = dialogue(f"{word}?", "Seven.")
    return [{"messages": turns}] * count


TRAIN, TEST = records("train", 5), records("test", 3)


def layout(folder, shape: str) -> str:
    """Write five conversations for training, and three for testing where the format supports splits."""
    tables = [pa.Table.from_pylist(rows) for rows in (TRAIN, TEST)]
    if shape == "file":
        return str(write(folder / "any.jsonl", TRAIN))
    if shape == "json":
        for name, rows in (("train", TRAIN), ("test", TEST)):
            write(folder / f"{name}.jsonl", rows)
    elif shape == "parquet":
        for name, table in zip(("train", "test"), tables, strict=True):
            pq.write_table(table, folder / f"{name}.parquet")
    elif shape == "shards":  # as on the hub
        for number in range(2):
            pq.write_table(tables[0].slice(3 * number, 3), folder / f"train-0000{number}-of-00002.parquet")
        pq.write_table(tables[1], folder / "test-00000-of-00001.parquet")
    elif shape == "parts":
        for number in range(2):
            pq.write_table(tables[0].slice(3 * number, 3), folder / f"part-{number}.parquet")
    elif shape == "saved":
        datasets.Dataset.from_list(TRAIN).save_to_disk(folder)
    else:
        splits = {"train": datasets.Dataset.from_list(TRAIN), "validation": datasets.Dataset.from_list(TEST)}
        datasets.DatasetDict(splits).save_to_disk(folder)
    return str(folder)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Return a local repository that `datasets` reads by name."""
    (tmp_path / "owner/name").mkdir(parents=True)
    layout(tmp_path / "owner/name", "shards")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return "hf://owner/name#train"


LAYOUTS = ("file", "json", "parquet", "shards", "parts", "saved", "saved splits", "hub")


@pytest.mark.parametrize("shape", LAYOUTS)
def test_inspect_and_pack_commands_read_same_samples_as_training(
    tmp_path, checkpoint, make_provider, repository, capsys, shape
):
    (tmp_path / "data").mkdir()
    path = repository if shape == "hub" else layout(tmp_path / "data", shape)
    provider = make_provider(path=path, seq_length=64)
    names = sorted(name for batch in provider.evaluation("train") for name in batch.sample_ids)
    assert len(names) == 5

    command = ["--data", path, "--hf-model", str(checkpoint), "--seq-length", "64", "--json", "--no-progress"]
    assert main(["inspect", *command, "--samples", "5"]) == 0
    shown = json.loads(capsys.readouterr().out)["samples"]
    assert sorted(sample["sample_id"] for sample in shown) == names
    assert main(["pack", *command, "--output", str(tmp_path / "rows"), "--workers", "0"]) == 0
    packed = make_provider(path=path, seq_length=64, train_packing=tmp_path / "rows")
    assert sorted(name for batch in packed.evaluation("train") for name in batch.sample_ids) == names

    if provider.path_of("valid") is None:
        assert shape in ("file", "parts", "saved", "hub")
        assert main(["inspect", *command, "--split", "valid"]) == 2
        assert "found train, but no valid split; use a folder that contains one" in capsys.readouterr().err
    else:
        capsys.readouterr()
        assert main(["inspect", *command, "--split", "valid"]) == 0
        assert json.loads(capsys.readouterr().out)["num_samples"] == len(TEST)
        assert sum(len(batch.sample_ids) for batch in provider.evaluation("valid")) == len(TEST)


def test_missing_valid_split_falls_back_to_test_files(tmp_path):
    assert splits_in(layout(tmp_path, "shards")) == {
        "train": f"{tmp_path}/train-*.parquet",
        "valid": f"{tmp_path}/test-*.parquet",
        "test": f"{tmp_path}/test-*.parquet",
    }
    write(tmp_path / "val.jsonl", TEST)
    assert path_of_split(str(tmp_path), "valid") == f"{tmp_path}/val.jsonl"
    assert path_of_split(str(tmp_path), "test") == f"{tmp_path}/test-*.parquet"
    assert splits_in("hf://owner/name") == {"train": "hf://owner/name"}
