"""Records with a chosen and a rejected answer, their rows, and log-probabilities of a reference model."""

import json
import random
from pathlib import Path

from qwen3vl_bridge.data import DataError
from qwen3vl_bridge.data.conversations import Columns, parse_conversation
from qwen3vl_bridge.data.pairs import (
    PairColumns,
    read_reference_logps,
    reference_model_digest,
    reference_rules,
    write_reference_logps,
)
from qwen3vl_bridge.data.sources import open_source

import datasets
import pytest
import torch

ASK, YES = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Seven."}
NO = YES | {"content": "No."}
EARLIER = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
HUMAN, GPT = {"from": "human", "value": "Which?"}, {"from": "gpt", "value": "Seven."}
SIMPLE = [
    {"prompt": "Which?", "chosen": "Seven.", "rejected": "No."},
    {"prompt": [ASK], "chosen": [YES], "rejected": [NO]},
    {"chosen": [ASK, YES], "rejected": [ASK, NO]},
    {"prompt": "Which?", "prompt_id": "a", "messages": [ASK, YES], "chosen": [ASK, YES], "rejected": [ASK, NO],
     "score_rejected": 2.0, "rejected_model": "tiny"},  # of zephyr
    {"messages": [ASK, YES], "rejected_response": "No."},
    {"messages": json.dumps([ASK, YES]), "rejected_response": "No."},
    {"messages": [ASK, YES], "rejected_messages": [ASK, NO]},
    {"query": "Which?", "response": "Seven.", "rejected_response": "No."},
    {"instruction": "Which?", "input": "", "chosen": "Seven.", "rejected": "No."},
    {"question": "Which?", "chosen": "Seven.", "rejected": "No."},
    {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "No."}},
]  # fmt: skip


def read(record: dict, **columns: object):
    own = PairColumns.of(Columns(**columns)).convert_record(record, "x")
    return parse_conversation(own, "x", Path())


@pytest.mark.parametrize("record", SIMPLE, ids=lambda record: ",".join(record))
def test_pair_record_of_every_format_becomes_two_conversations(record):
    before = json.dumps(record)
    pair = read(record)
    assert pair.messages == (ASK, YES) and pair.others[0].messages == (ASK, NO)
    assert json.dumps(record) == before and [one.sample_id for one in pair.documents] == ["x", "x (rejected)"]


def test_pair_record_with_several_turns_trains_only_last_answers():
    swift = {"messages": [*EARLIER, ASK, YES], "rejected_response": "No."}
    factory = {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}, HUMAN],
               "chosen": GPT, "rejected": {"from": "gpt", "value": "No."}}  # fmt: skip
    implicit = {"chosen": [*EARLIER, ASK, YES], "rejected": [*EARLIER, ASK, NO]}
    explicit = {"prompt": [*EARLIER, ASK], "chosen": [YES], "rejected": [NO]}
    history = {"query": "Which?", "history": [["Hello", "Hi"]], "response": "Seven.", "rejected_response": "No."}
    for record in (swift, factory, implicit, explicit, history):
        pair = read(record)
        for document, answer in zip(pair.documents, (YES, NO), strict=True):
            assert document.messages == (*EARLIER, ASK, answer) and document.losses == {1: False}


def test_pair_record_answers_of_several_messages_are_trained_from_first_difference():
    more = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "Six."}]
    pair = read({"chosen": [ASK, YES, *more], "rejected": [ASK, NO, *more]})
    assert pair.messages == (ASK, YES, *more) and not pair.losses and not pair.others[0].losses


def test_pair_record_answers_share_images_unless_rejected_has_its_own():
    ask = {"role": "user", "content": "<image>Which?"}
    record = {"messages": [ask, YES], "rejected_response": "No.", "images": [b"one"]}
    assert [one.images for one in read(record).documents] == [(b"one",)] * 2
    other = read(record | {"rejected_images": [b"two"]})
    assert [one.images for one in other.documents] == [(b"one",), (b"two",)]
    renamed = {"messages": [ask, YES], "rejected_response": "No.", "photo": [b"one"], "rejected_images": [b"two"]}
    assert [one.images for one in read(renamed, images="photo").documents] == [(b"one",), (b"two",)]


def test_columns_setting_selects_question_and_answers_of_pair():
    record = {"q": "Which?", "a": "Seven.", "rejected": "No."}
    for columns in ({"question": "q", "answer": "a"}, {"question": "Well: {q}", "answer": "a"}):
        pair = read(record, **columns)
        assert [one.messages[1] for one in pair.documents] == [YES, NO]
    assert read({"q": "Which?", "chosen": "Seven.", "rejected": "No."}, question="q").messages == (ASK, YES)


@pytest.mark.parametrize(("record", "message"), [
    ({"messages": [ASK, YES]}, r"x: found the keys messages, expected a chosen and a rejected .*sft for conversations"),
    ({"messages": [ASK, YES], "rejected": "a", "rejected_response": "b"}, "found both 'rejected' and 'rejected_resp"),
    ({"chosen": "Human: Which? Seven.", "rejected": "Human: Which? No."}, "without a question"),
    ({"chosen": [ASK, YES], "rejected": [ASK, YES]}, "found equal conversations"),
    ({"messages": "[", "rejected_response": "b"}, "found messages that are not valid JSON"),
    ({"prompt": [{"role": "system", "content": "S"}], "chosen": [ASK, YES], "rejected": [ASK, NO]},
     "the text of 'prompt' differs from the beginning of both"),
    ({"prompt": "Other?", "chosen": [ASK, YES], "rejected": [ASK, NO]}, "the text of 'prompt' differs from the b"),
    ({"messages": [*EARLIER], "chosen": [ASK, YES], "rejected": [ASK, NO]}, "the text of 'messages' differs from"),
    ({"chosen": [{"role": "user", "content": "A?"}, YES], "rejected": [ASK, NO]}, "found no prompt that ends with a q"),
    ({"messages": [ASK, YES], "chosen": "Seven.", "rejected": "No."}, "found no prompt that ends with a question"),
    ({"messages": [ASK, YES, ASK], "rejected_response": "No."}, "found no prompt that ends with a question"),
    ({"prompt": "Which?", "chosen": "Seven.", "rejected": "Seven."}, "found equal answers"),
    ({"prompt": [ASK], "chosen": [YES], "rejected": [YES]}, "found equal answers"),
    ({"query": "Which?", "response": "Seven.", "rejected_response": "No.", "rejected_image": "a.png"},
     "found 'rejected_image', expected only 'rejected_images'"),
    ({"prompt": "Which?", "chosen": "Seven.", "rejected": ["No."]}, r"x \(rejected\): 'completion': found \['No.'\]"),
])  # fmt: skip
def test_pair_record_raises_if_pair_is_invalid_or_ambiguous(record, message):
    with pytest.raises(DataError, match=message):
        read(record)


def test_pair_columns_read_the_same_from_parquet_and_json_lines(tmp_path):
    records = [SIMPLE[0] | {"extra": 3}, SIMPLE[0]]
    datasets.Dataset.from_list(records).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    sources = [open_source(tmp_path / name, columns=PairColumns()) for name in ("a.parquet", "a.jsonl")]
    for source in sources:
        assert [document.messages for document in source[1].documents] == [(ASK, YES), (ASK, NO)]
    assert sources[1].fingerprint() != open_source(tmp_path / "a.jsonl").fingerprint()
    datasets.Dataset.from_list([{"messages": [ASK, YES]}]).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match="found the columns messages, expected a chosen"):
        open_source(tmp_path / "b.parquet", columns=PairColumns())[0]


@pytest.fixture
def pairs_file(tmp_path):
    rng = random.Random(0)

    def answer() -> str:
        return " ".join(rng.choice(("seven", "eight", "no")) for _ in range(rng.randrange(1, 20)))

    records = [{"prompt": answer(), "chosen": answer(), "rejected": answer()} for _ in range(40)]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("multiple", [None, 8])
def test_rows_of_pairs_keep_both_answers_of_each_pair(make_provider, pairs_file, multiple):
    """Each document of a row equals the supervised sample with its answer."""
    provider = make_provider(train_path=pairs_file, objective="dpo", seq_length=128, pad_to_multiple_of=multiple)
    rows, seen = provider.rows("train"), []
    encoder = provider.processor_settings().encoder
    conversations = {one.sample_id: one for one in map(rows.samples.source.__getitem__, range(40))}
    for number in range(rows.plan.end_of_epoch()):
        batch = rows.collate_fn([rows[number]])
        starts, ids = batch.layout.cu_seqlens_padded.tolist(), batch.sample_ids
        assert (
            batch.groups.num_documents == len(ids)
            and batch.input_ids.shape == (1, 128)
            and batch.groups.reference_logps is None
        )
        for place, name in enumerate(ids):
            assert name.endswith(" (rejected)") == bool(place % 2) and name.startswith(ids[place - place % 2])
            document = conversations[name.removesuffix(" (rejected)")].documents[place % 2]
            encoded, here = encoder(document), slice(starts[place], starts[place] + batch.layout.lengths[place])
            assert torch.equal(batch.input_ids[0, here], encoded.input_ids)
            assert torch.equal(batch.loss_mask[0, here], encoded.loss_mask) and encoded.loss_mask.any()
            assert starts[place] % (multiple or 1) == 0
        seen += ids[::2]
    assert sorted(seen) == sorted(conversations)


@pytest.mark.parametrize(("changes", "message"), [
    ({"pack": False}, "dataset.pack is False for objective.kind=dpo"),
    ({"on_long": "truncate"}, "dataset.on_long is 'truncate'"),
])  # fmt: skip
def test_provider_of_pairs_raises_if_pack_is_false_or_on_long_truncate(make_provider, pairs_file, changes, message):
    with pytest.raises(ValueError, match=message):
        make_provider(train_path=pairs_file, objective="dpo", **changes).finalize()


def test_unreadable_pair_becomes_pair_without_loss(make_provider, pairs_file, monkeypatch):
    provider = make_provider(train_path=pairs_file, objective="dpo", seq_length=256, on_bad="drop")
    rows = provider.rows("train")
    rows.plan.row(0)
    first, encoder = rows.plan.row(0)[0], type(provider.processor_settings().encoder)
    bad, call = rows.samples.source.sample_id(first), encoder.__call__

    def fail(self, conversation, limit=None):
        if conversation.sample_id == f"{bad} (rejected)":
            raise DataError(bad, "the file is truncated")
        return call(self, conversation, limit)

    monkeypatch.setattr(encoder, "__call__", fail)
    batch = rows.collate_fn([rows[0]])
    assert len(batch.groups.sizes) == len(rows.plan.row(0)) and batch.layout.lengths[:2] == (1, 1)
    assert not batch.loss_mask[0, :2].any() and batch.loss_mask[0, 2:].any() and batch.unreadable == (1,)


def test_reference_logps_reach_batches_and_are_checked_against_data(make_provider, pairs_file, tmp_path):
    settings = dict(train_path=pairs_file, objective="dpo", seq_length=128)
    rows = make_provider(**settings).rows("train")
    logps = torch.rand(40, 2, dtype=torch.float64)
    rules = reference_rules(rows.samples.source, rows.samples.sample_filter)
    write_reference_logps(tmp_path / "scores", "train", logps, rules, "digest")
    assert reference_model_digest(tmp_path / "scores", "train") == "digest"
    scored = make_provider(**settings, reference_logps=str(tmp_path / "scores"))
    rows = scored.rows("train")
    for number in range(rows.plan.end_of_epoch()):
        batch = rows.collate_fn([rows[number]])
        assert torch.equal(batch.groups.reference_logps, logps[list(rows.plan.row(number))])
    logps[3] = torch.nan
    write_reference_logps(tmp_path / "scores", "train", logps, rules, "digest")
    with pytest.raises(DataError, match=r"train.jsonl:4: found no log-probabilities of the reference model"):
        scored.rows("train").samples.encode(3)
    for changes, message in (({"answers": "last"}, "found encoding"), ({"seed": 3}, None)):
        if message is None:
            make_provider(**settings, reference_logps=str(tmp_path / "scores"), **changes).rows("train")
            continue
        with pytest.raises(DataError, match=message):
            make_provider(**settings, reference_logps=str(tmp_path / "scores"), **changes).rows("train")
    pairs_file.write_text(pairs_file.read_text().replace("seven", "nine", 1))
    with pytest.raises(DataError, match="computed for other data or another chat template: found data"):
        scored.rows("train")
    (tmp_path / "scores" / "train.safetensors").write_bytes(b"damaged")
    with pytest.raises(DataError, match="cannot read log-probabilities"):
        read_reference_logps(tmp_path / "scores", "train", rules)
