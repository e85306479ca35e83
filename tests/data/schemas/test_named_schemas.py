"""Records of published data sets by the name of their schema, against Megatron-Bridge's own adapters."""

from __future__ import annotations

import base64
import json

import qwen3vl_bridge
from qwen3vl_bridge.data import DataError, StreamedDataset, open_source
from qwen3vl_bridge.data.schemas.named_schemas import named_schema

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.bridge.data.token_utils import json2token

from tests.receipts import receipt, receipts

from ..conftest import write

_VALUES = st.recursive(
    st.text(max_size=8) | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=5), inner, max_size=3),
    max_leaves=8,
)
_PARSES = st.dictionaries(st.text(min_size=1, max_size=5), _VALUES, min_size=1, max_size=3)
CORD_V2 = named_schema("cord_v2")


@given(_PARSES, st.booleans())
def test_an_answer_is_the_text_megatron_bridge_trains_on(parse, several):
    truth = {"gt_parses": [parse, {"other": "one"}]} if several else {"gt_parse": parse}
    record = {"image": b"file", "ground_truth": json.dumps({**truth, "meta": {}}), "other": 1}
    question, answer = CORD_V2.messages_of(record, "x")["messages"]
    assert answer == {"role": "assistant", "content": [{"type": "text", "text": json2token(parse, sort_json_key=True)}]}
    assert question["content"][0] == {"type": "image", "image": b"file"}


def test_the_documented_text_of_an_answer():
    parse = {"menu": [{"nm": "Tea", "price": "3"}, {"nm": "Rice"}], "total": {"total_price": "45"}}
    record = {"image": b"file", "ground_truth": json.dumps({"gt_parse": parse})}
    question, answer = CORD_V2.messages_of(record, "x")["messages"]
    assert question["content"][1]["text"] == "Describe this image."
    assert answer["content"][0]["text"] == (
        "<s_total><s_total_price>45</s_total_price></s_total>"
        "<s_menu><s_price>3</s_price><s_nm>Tea</s_nm><sep/><s_nm>Rice</s_nm></s_menu>"
    )


def test_every_container_gives_the_same_receipts(tmp_path):
    dataset, rows = receipts(5), [receipt(number) for number in range(5)]
    dataset.save_to_disk(tmp_path / "saved")
    dataset.to_parquet(tmp_path / "train.parquet")
    urls = [{**row, "image": f"data:image/png;base64,{base64.b64encode(row['image']).decode()}"} for row in rows]
    lines = write(tmp_path / "train.jsonl", urls)
    (tmp_path / "list.json").write_text(json.dumps(urls), "utf-8")
    paths = (tmp_path / "saved", tmp_path / "train.parquet", lines, tmp_path / "list.json")
    for source in [open_source(path, schema_adapter="cord_v2") for path in paths]:
        assert len(source) == 5 and "schema cord_v2" in source.fingerprint()
        found = [source[index] for index in range(5)]
        assert [sample.images for sample in found] == [(row["image"],) for row in rows]
        truths = [json.loads(row["ground_truth"])["gt_parse"] for row in rows]
        assert [sample.messages[1]["content"][0]["text"] for sample in found] == [json2token(t) for t in truths]
    streamed = StreamedDataset(dataset.to_iterable_dataset(), "x", schema=CORD_V2)
    assert streamed[streamed.numbers(0, 3, 1)[0]].images == (rows[3]["image"],)
    assert "schema cord_v2" in streamed.fingerprint()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "x: found list, expected image and ground_truth under schema cord_v2"),
        ({"image": b"file", "text": "a"}, "x: found the keys image, text, expected image and ground_truth"),
        ({"image": None, "ground_truth": "{}"}, "expected image and ground_truth"),
        ({"image": b"file", "ground_truth": {"gt_parse": {}}}, "x: found dict under 'ground_truth', expected a string"),
        ({"image": b"file", "ground_truth": "{"}, r"x: found a 'ground_truth' that is no JSON \(.*\), expected an obj"),
        ({"image": b"file", "ground_truth": "[]"}, r"x: found '\[\]' as 'ground_truth', expected .* 'gt_parse'"),
        ({"image": b"file", "ground_truth": '{"gt_parse": {}}'}, "expected an object with 'gt_parse'"),
        ({"image": b"file", "ground_truth": '{"gt_parses": []}'}, "expected an object with 'gt_parse'"),
        ({"image": b"file", "ground_truth": '{"gt_parse": "7"}'}, "expected an object with 'gt_parse'"),
    ],
)
def test_a_record_of_another_format_is_refused(record, message):
    with pytest.raises(DataError, match=message):
        CORD_V2.messages_of(record, "x")


def test_a_table_without_its_columns_is_refused(folder):
    for name in ("train.parquet", "saved"):
        with pytest.raises(DataError, match="expected 'image' and 'ground_truth' under schema cord_v2"):
            open_source(folder / name, schema_adapter="cord_v2")


def test_a_name_of_no_schema_is_refused(tmp_path):
    provider = qwen3vl_bridge.Qwen3VLConversationProvider(
        train_path="x.jsonl", hf_processor_path="x", seq_length=64, schema_adapter="cord"
    )
    with pytest.raises(ValueError, match="schema_adapter is 'cord', expected one of cord_v2, or none"):
        provider.finalize()
    with pytest.raises(ValueError, match="schema_adapter is 'cord'"):
        open_source(tmp_path, schema_adapter="cord")
