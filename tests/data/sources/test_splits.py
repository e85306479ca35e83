"""What a path means: the same to training, to the inspection and to packing."""

import json

import qwen3vl_bridge
from qwen3vl_bridge.cli.data import main
from qwen3vl_bridge.data import DataError, open_source
from qwen3vl_bridge.data.sources.opening import split_of, splits_in

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ..conftest import write


def records(word: str, count: int) -> list[dict]:
    turns = [{"role": "user", "content": f"{word}?"}, {"role": "assistant", "content": "Seven."}]
    return [{"messages": turns}] * count


TRAIN, TEST = records("train", 5), records("test", 3)


def layout(folder, shape: str) -> str:
    """A path that means five conversations to train on, and three to test on where it can."""
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
    """A repository laid out as on the hub, which `datasets` reads by its name where it lies in this folder."""
    (tmp_path / "owner/name").mkdir(parents=True)
    layout(tmp_path / "owner/name", "shards")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return "hf://owner/name#train"


SHAPES = ("file", "json", "parquet", "shards", "parts", "saved", "saved splits", "hub")


@pytest.mark.parametrize("shape", SHAPES)
def test_training_the_inspection_and_packing_read_the_same(tmp_path, checkpoint, repository, capsys, shape):
    (tmp_path / "data").mkdir()
    path = repository if shape == "hub" else layout(tmp_path / "data", shape)
    settings = {"hf_processor_path": str(checkpoint), "seq_length": 64, "num_workers": 0}
    provider = qwen3vl_bridge.Qwen3VLConversationProvider(path=path, **settings)
    provider.finalize()
    names = sorted(name for batch in provider.evaluation("train") for name in batch.sample_ids)
    assert len(names) == 5

    command = ["--data", path, "--hf-model", str(checkpoint), "--seq-length", "64", "--json", "--no-progress"]
    assert main(["inspect", *command]) == 0
    shown = json.loads(capsys.readouterr().out)["samples"]
    assert sorted(sample["sample_id"] for sample in shown) == names
    assert main(["pack", *command, "--output", str(tmp_path / "rows"), "--workers", "0"]) == 0
    packed = qwen3vl_bridge.Qwen3VLConversationProvider(path=path, train_packing=str(tmp_path / "rows"), **settings)
    assert sorted(name for batch in packed.evaluation("train") for name in batch.sample_ids) == names

    if provider.path_of("valid") is None:
        assert shape in ("file", "parts", "saved", "hub")
        assert main(["inspect", *command, "--split", "valid"]) == 2
        assert "found train and no valid split, expected a folder that has one" in capsys.readouterr().err
    else:
        capsys.readouterr()
        assert main(["inspect", *command, "--split", "valid"]) == 0
        assert json.loads(capsys.readouterr().out)["num_samples"] == len(TEST)
        assert sum(len(batch.sample_ids) for batch in provider.evaluation("valid")) == len(TEST)


def test_splits_of_a_folder(tmp_path):
    assert splits_in(layout(tmp_path, "shards")) == {
        "train": f"{tmp_path}/train-*.parquet",
        "valid": f"{tmp_path}/test-*.parquet",
        "test": f"{tmp_path}/test-*.parquet",
    }
    write(tmp_path / "val.jsonl", TEST)
    assert split_of(str(tmp_path), "valid") == f"{tmp_path}/val.jsonl"
    assert split_of(str(tmp_path), "test") == f"{tmp_path}/test-*.parquet"
    assert splits_in("hf://owner/name") == {"train": "hf://owner/name"}
    with pytest.raises(DataError, match="files of the splits test, train, expected one"):
        open_source(tmp_path)  # which of them is not said here
