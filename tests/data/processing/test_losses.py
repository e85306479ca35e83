"""Messages that say themselves whether they are trained on: in every spelling, mix of roles and kind of template."""

import copy
from pathlib import Path

from qwen3vl_bridge import Qwen3VLConversationProvider
from qwen3vl_bridge.data import Conversation, DataError, Encoder, open_source
from qwen3vl_bridge.data.questions import questions

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ..conftest import write

END = "<|im_end|>"
THINKING = Path(__file__).with_name("thinking_template.jinja").read_text(encoding="utf-8")
ASK, ANSWER = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Seven."}
turns = st.lists(st.tuples(st.booleans(), st.sampled_from([None, True, False])), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def templates(processor):
    other = copy.copy(processor)
    other.chat_template = THINKING
    return processor, other


def trained(encoder: Encoder, conversation: Conversation) -> str:
    sample = encoder(conversation)
    return encoder.processor.tokenizer.decode(sample.labels[sample.loss_mask.bool()])


@given(turns, st.sampled_from(["all", "last"]), st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_a_message_says_goes_before_the_setting(templates, case, answers, thinks):
    """Under a template that writes thinking, too; answers follow one another, or a question."""
    messages, says = [{"role": "system", "content": "Be brief."}, ASK], {}
    for number, (asks, said) in enumerate(case):
        if asks and number:
            messages.append(ASK)
        if said is not None:
            says[len(messages)] = said
        messages.append({"role": "assistant", "content": f"answer {number}"})
    found = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    expected = [n for n in found if says.get(n, answers == "all" or n == found[-1])]
    conversation = Conversation("train.jsonl:1", tuple(messages), losses=says)
    encoder = Encoder(templates[thinks], answers)
    if not expected:
        for work in (encoder, encoder.size):
            with pytest.raises(DataError, match=f"train.jsonl:1: found no answer to train on with answers='{answers}'"):
                work(conversation)
        return
    assert trained(encoder, conversation) == "".join(messages[n]["content"] + END for n in expected)
    silent = Conversation("train.jsonl:1", tuple(messages))
    assert encoder(conversation).input_ids.tolist() == encoder(silent).input_ids.tolist()
    assert encoder.size(conversation) == encoder.size(silent)


@pytest.mark.parametrize(("key", "yes", "no"), [("loss", True, False), ("weight", 1, 0), ("weight", 1.0, 0.0)])
def test_both_spellings_are_read_from_lines_and_tables(encoder, tmp_path, key, yes, no):
    messages = [
        {**ASK, key: no}, {**ANSWER, "content": "Six.", key: no}, {**ASK, key: None}, {**ANSWER, key: yes}, ASK,
        ANSWER,
    ]  # fmt: skip
    write(tmp_path / "train.jsonl", [{"messages": messages}])
    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "train.parquet")
    for name in ("train.jsonl", "train.parquet"):
        conversation = open_source(tmp_path / name)[0]
        assert conversation.losses == {1: False, 3: True}
        # No template sees them.
        assert all(set(message) == {"role", "content"} for message in conversation.messages)
        assert trained(encoder, conversation) == f"Seven.{END}" * 2


def test_reasoning_of_an_answer_left_out_is_left_out_too(templates):
    thought = {**ANSWER, "reasoning_content": "A bar."}
    call = {**thought, "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    messages = (ASK, call, {"role": "tool", "content": "A bar."}, thought)
    without = Conversation("train.jsonl:1", messages, losses={1: False})
    assert trained(Encoder(templates[1]), without) == f"A bar.\n</think>\n\nSeven.{END}"


@pytest.mark.parametrize(("message", "problem"), [
    ({**ANSWER, "loss": 1}, "message 2: found 1 under 'loss', expected true or false"),
    ({**ANSWER, "loss": "false"}, "found \"false\" under 'loss', expected true or false"),
    ({**ANSWER, "weight": True}, "found true under 'weight', expected 0 or 1"),
    ({**ANSWER, "weight": 0.5}, "found 0.5 under 'weight', expected 0 or 1"),
    ({**ANSWER, "weight": []}, r"found \[\] under 'weight', expected 0 or 1"),
    ({**ANSWER, "weight": 1, "loss": True}, "found both 'loss' and 'weight', expected one of them"),
    ({**ASK, "loss": True}, "found 'loss' on a message of the role 'user', expected it on the assistant's: only an"),
    ({"role": "system", "content": "a", "weight": 1}, "found 'weight' on a message of the role 'system', expected"),
    ({"role": "tool", "content": "a", "loss": True}, "found 'loss' on a message of the role 'tool', expected it"),
])  # fmt: skip
def test_what_says_nothing_clear_is_refused(read, message, problem):
    with pytest.raises(DataError, match=problem) as caught:
        read([ASK, message, ANSWER])
    assert str(caught.value).startswith("train.jsonl:1: message 2: ")


def test_a_cut_that_leaves_only_answers_without_loss_is_refused(encoder):
    conversation = Conversation("train.jsonl:1", (ASK, ANSWER, ASK, ANSWER), losses={1: False})
    tokens = encoder.size(conversation).tokens
    for work in (encoder, encoder.size):
        with pytest.raises(DataError, match="and no answer among the first"):
            work(conversation, tokens // 2 + 1)


def test_questions_are_asked_whatever_is_trained_on(tmp_path, checkpoint, processor):
    """Accuracy asks for the last answer, also where a run trains on another."""
    messages = [ASK, {**ANSWER, "loss": True}, ASK, {**ANSWER, "content": "Eight.", "loss": False}]
    path = write(tmp_path / "train.jsonl", [{"messages": messages}])
    rows = Qwen3VLConversationProvider(train_path=str(path), hf_processor_path=str(checkpoint), seq_length=64)
    (question,) = questions(open_source(path), rows, 1)
    asked = processor.tokenizer.decode(question.prompt.input_ids)
    assert asked.endswith(f"Seven.{END}\n<|im_start|>user\nWhich?{END}\n<|im_start|>assistant\n")
    assert question.answer == "Eight."


def test_reasoning_is_no_part_of_an_answer(tmp_path, checkpoint, templates):
    """Accuracy asks with the prompt that the template makes, and compares what follows the reasoning."""
    for name, template in (("plain", templates[0]), ("thinking", templates[1])):
        (tmp_path / name).mkdir()
        for file in checkpoint.iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
        template.save_pretrained(tmp_path / name)
    inside = {**ANSWER, "content": "<think>\nA bar.\n</think>\n\nSeven."}
    records = [ANSWER, inside, {**ANSWER, "reasoning_content": "A bar."}]

    def asked(template: str, answers: list[dict], **settings):
        path = write(tmp_path / "train.jsonl", [{"messages": [ASK, answer]} for answer in answers])
        rows = Qwen3VLConversationProvider(
            train_path=str(path), hf_processor_path=str(tmp_path / template), seq_length=64, **settings
        )
        return questions(open_source(path), rows, 9)

    found = asked("thinking", records)
    assert [(question.answer.strip(), question.thinks) for question in found] == [
        *(("Seven.", False), ("Seven.", True), ("Seven.", True))
    ]
    assert [question.answer.strip() for question in asked("plain", records[:2])] == ["Seven."] * 2
    (prompted,) = asked("thinking", [ANSWER], empty_thinking="train")
    assert prompted.thinks
    plain, _, thinks = found
    assert (
        plain.answer_in("Seven.") == "Seven." and plain.answer_in("<think>\nHm.</think>\n\nSeven.").strip() == "Seven."
    )
    assert thinks.answer_in("A bar.\n</think>\n\nSeven.").strip() == "Seven."
    assert thinks.answer_in("Seven. It may be seven.") == ""  # it has not answered yet
