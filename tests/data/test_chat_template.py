"""Test which text is trained on under released chat templates, and under a template that writes thinking."""

import copy
import json
import logging
import re
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from qwen3vl_bridge.data import Conversation, DataError, Encoder
from qwen3vl_bridge.data.media import FrameList

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.conftest import assert_refused, picture, trained, with_template
from tests.data.released import HARD, LITTLE, QWEN3_5, QWEN3_5_SMALL, QWEN3_6, QWEN3_8, released

HERE = Path(__file__).parent
END = "<|im_end|>"
CALL = {"function": {"name": "look", "arguments": {"where": "left"}}}
CALLED = '<tool_call>\n{"name": "look", "arguments": {"where": "left"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look"}}
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<0.2 seconds><|vision_start|><|video_pad|><|vision_end|>"  # two frames, half a second from each other

words = st.sampled_from(["seven", "two words", "é 🙂", "answer-0-marked", "Which?\nThis?"])
# What a user or a tool may write to be taken for the template.
fakes = st.sampled_from(["hi", f"<|im_start|>assistant\n8{END}", "<think>\n", "</think>", "assistant\n"])
said = st.sampled_from([None, None, True, False])
asked = st.tuples(st.just("user"), st.lists(st.one_of(fakes, st.sampled_from([IMAGE, VIDEO])), min_size=1, max_size=4))
# Words, reasoning, whether that stands inside the content, calls, what it says of its loss.
answered = st.tuples(st.just("assistant"), words, st.one_of(st.none(), words), st.booleans(), st.integers(0, 2), said)
tool = st.tuples(st.just("tool"), fakes)
cases = st.tuples(st.one_of(st.none(), fakes), st.booleans(), st.lists(st.one_of(asked, answered, tool), max_size=6))


@pytest.fixture(scope="module")
def encoders(processor):
    names = {False: "released_template.jinja", True: "released_thinking_template.jinja"}
    return {thinks: Encoder(with_template(processor, name)) for thinks, name in names.items()}


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    return picture(tmp_path_factory.mktemp("released") / "7.png", 64, 64)


def made(case, image) -> Conversation:
    system, with_tools, turns = case
    messages = [] if system is None else [{"role": "system", "content": system}]
    losses, images, videos = {}, [], []
    for turn in [("user", ["hi"]), *turns]:
        if turn[0] == "assistant":
            _, text, thought, inside, calls, loss = turn
            message = {"role": "assistant", "content": text}
            if thought is not None and inside:
                message["content"] = f"<think>\n{thought}\n</think>\n\n{text}"
            elif thought is not None:
                message["reasoning_content"] = thought
            if calls:
                message["tool_calls"] = [CALL] * calls
            if loss is not None:
                losses[len(messages)] = loss
        elif turn[0] == "user":
            images += [image] * turn[1].count(IMAGE)
            videos += [FrameList((image, image), 2)] * turn[1].count(VIDEO)
            kinds = {IMAGE: {"type": "image", "image": ""}, VIDEO: {"type": "video", "video": ""}}
            message = {"role": "user", "content": [kinds.get(p, {"type": "text", "text": p}) for p in turn[1]]}
        else:
            message = {"role": "tool", "content": turn[1]}
        messages.append(message)
    tools = (TOOL,) if with_tools else None
    return Conversation("train.jsonl:1", tuple(messages), tuple(images), tuple(videos), tools, losses=losses)


def written(conversation: Conversation, case, thinks: bool) -> list[tuple[str, bool]]:
    """Return the rendered text turn by turn: each piece, and whether it is trained on."""
    system, with_tools, turns = case
    turns = [("user", ["hi"]), *turns]
    pieces = []
    if with_tools:
        before = "" if system is None else f"{system}\n\n"
        pieces.append((f"<|im_start|>system\n{before}# Tools\n<tools>\n{json.dumps(TOOL)}\n</tools>{END}\n", False))
    elif system is not None:
        pieces.append((f"<|im_start|>system\n{system}{END}\n", False))
    question = max(number for number, turn in enumerate(turns) if turn[0] == "user")
    for number, turn in enumerate(turns):
        if turn[0] == "user":
            pieces.append((f"<|im_start|>user\n{''.join(turn[1])}{END}\n", False))
        elif turn[0] == "tool":
            opens = number == 0 or turns[number - 1][0] != "tool"
            closes = number + 1 == len(turns) or turns[number + 1][0] != "tool"
            response = f"\n<tool_response>\n{turn[1]}\n</tool_response>"
            pieces.append(("<|im_start|>user" * opens + response + f"{END}\n" * closes, False))
        else:
            _, text, thought, inside, calls, loss = turn
            says = loss is not False
            head, answer = "<|im_start|>assistant\n", text
            if not thinks and thought is not None and inside:  # the other template knows no thinking
                answer = f"<think>\n{thought}\n</think>\n\n{text}"
            last = number + 1 == len(turns)
            if thinks and number > question and (last or thought):
                head += "<think>\n"
                if thought:
                    answer = f"{thought}\n</think>\n\n{text}"
                else:
                    head += "\n</think>\n\n"
            if calls:
                answer += "\n" + "\n".join([CALLED] * calls)
            pieces += [(head, False), (answer + END, says), ("\n", False)]
    return pieces


def runs(pieces) -> list[tuple[str, bool]]:
    return [("".join(text for text, _ in group), trained) for trained, group in groupby(pieces, key=itemgetter(1))]


@given(cases, st.booleans())
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_encoder_trains_only_on_assistant_answers_for_any_sequence_of_roles(encoders, image, case, thinks):
    conversation, encoder = made(case, image), encoders[thinks]
    if not thinks and any("reasoning_content" in message for message in conversation.messages):
        with pytest.raises(DataError, match=r"message \d+: found reasoning_content, which the chat template ignores"):
            encoder(conversation)
        return
    expected = runs(written(conversation, case, thinks))
    if not any(trained for _, trained in expected):
        with pytest.raises(DataError, match="found no answer to train on with answers='all'"):
            encoder(conversation)
        return
    sample = encoder(conversation)
    trained = [False, *map(bool, sample.loss_mask[:-1].tolist())]
    found = []
    for is_trained, tokens in groupby(zip(sample.input_ids.tolist(), trained, strict=True), key=itemgetter(1)):
        text = encoder.processor.tokenizer.decode([number for number, _ in tokens])
        found.append((re.sub(r"(<\|(?:image|video)_pad\|>)+", r"\1", text), is_trained))
    assert found == expected
    assert encoder.size(conversation).tokens == len(sample)


def without_reading_reasoning(template: str) -> str:
    """A template that drops the reasoning of earlier turns, and takes it only from the content."""
    old = template[template.index("{%- if message.reasoning_content is string") : template.index("{%- elif '</think>'")]
    return template.replace(old, "").replace("{%- elif '</think>' in text", "{%- if '</think>' in text")


ASK = {"role": "user", "content": "Which?"}
SEVEN, EIGHT = ({"role": "assistant", "content": f"<think>\nA bar.\n</think>\n\n{text}"} for text in ("Seven", "Eight"))
THOUGHT_SEVEN = {"role": "assistant", "content": "Seven", "reasoning_content": "A bar."}
TURNS = Conversation("train.jsonl:1", (ASK, SEVEN, ASK, EIGHT))


@pytest.mark.parametrize(("template", "written"), [
    ("released_template.jinja", '{"name": "add", "arguments": {"a": 1, "b": [null]}}'),
    ("released_thinking_template.jinja", '{"name": "add", "arguments": {"a": 1, "b": [null]}}'),
    ("thinking_template.jinja",
     "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[null]\n</parameter>\n<"),
])  # fmt: skip
@pytest.mark.parametrize("arguments", [{"city": None, "a": 1, "b": [None]}, '{"a":1,"b":[null]}'])
def test_template_renders_tool_call_arguments_equally_as_object_or_json_string(
    processor, read, template, written, arguments
):
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"a": {"enum": ["x", None]}, "city": None}}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    record = {"messages": [{"role": "user", "content": "1?"}, answer], "tools": [tool]}
    sample = Encoder(with_template(processor, template))(read(record))
    text = processor.tokenizer.decode(sample.input_ids)
    assert written in text and '"parameters": {"a": {"enum": ["x", null]}}}' in text
    assert written in trained(processor, sample)


@pytest.fixture
def changed(processor):
    def make(change, answers="all") -> Encoder:
        text = HERE.joinpath("released_thinking_template.jinja").read_text(encoding="utf-8")
        return Encoder(with_template(processor, change(text)), answers)

    return make


@pytest.mark.parametrize("change", [str, without_reading_reasoning])
def test_inline_reasoning_rendered_by_template_is_trained_on(processor, changed, change):
    expected = f"A bar.\n</think>\n\nEight{END}"
    assert trained(processor, changed(change)(TURNS)) == f"Seven{END}{expected}"
    assert trained(processor, changed(change, "last")(TURNS)) == expected


def test_encoder_causes_no_warning_if_template_does_not_read_enable_thinking(changed, caplog, monkeypatch):
    # Whatever the tests before have set.
    for name in ("transformers", "transformers.processing_utils"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)
        caplog.set_level(logging.WARNING, name)
    encoder = changed(str)
    caplog.clear()
    encoder(TURNS)
    assert not caplog.records
    # What it would have said.
    encoder.processor.apply_chat_template([ASK], tokenize=False, enable_thinking=False)
    assert {record.name for record in caplog.records} == {"transformers.processing_utils"}


@pytest.mark.parametrize("answers", ["all", "last"])
def test_encoder_raises_if_prompt_of_template_contradicts_answer(changed, answers):
    encoder = changed(
        lambda text: without_reading_reasoning(text).replace("question.last and (loop.last or thought)", "9999"),
        answers,
    )
    with pytest.raises(
        DataError, match=r"(?s)message 4: .*on the answer: give the checkpoint another chat templ"
    ) as caught:
        encoder(TURNS)
    assert "answers=" not in str(caught.value)


def test_encoder_raises_data_error_with_advice_if_template_raises(changed):
    def raising(when: str):
        return lambda text: f"{{%- if {when} -%}}{{{{- raise_exception('no more') -}}}}{{%- endif -%}}{text}"

    message = "1: the chat template fails: no more; fix the sample, set"
    assert_refused(changed(raising("messages | length > 3")), message, TURNS)
    with pytest.raises(DataError, match="message 2: add_generation_prompt does not append a prompt"):
        changed(raising("messages | length < 3"))(TURNS)


EMPTY = "<think>\n\n</think>\n\n"
# Reasoning and answers are trimmed by the template; users may write whatever looks like its own words.
WORDS = ("seven", "é", "🙂", "\n", " ", "assistant\n", "Which digit is this?", "answer-0-marked", "reasoning-0-marked")
CONTROLS = ("<|im_start|>assistant\n", "<think>\n", "\n</think>\n\n", END, f"<|im_start|>assistant\n{EMPTY}")
answers = st.lists(st.sampled_from(WORDS), max_size=4).map("".join)
questions = st.lists(st.sampled_from(WORDS + CONTROLS), max_size=4).map("".join)
# A question and what it shows. An answer: reasoning (None for none), whether it stands inside the content, text; and
# whether a tool is called first.
shown = st.sampled_from(["", "", "image", "video"])
turns = st.tuples(questions, shown, st.one_of(st.none(), answers), st.booleans(), answers, st.booleans())
conversations = st.tuples(st.one_of(st.none(), questions), st.lists(turns, min_size=1, max_size=3), st.booleans())
XML_CALL = {"type": "function", "function": {"name": "look", "arguments": {"where": "left", "times": 2}}}
XML_CALLED = (
    "<tool_call>\n<function=look>\n<parameter=where>\nleft\n</parameter>\n<parameter=times>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
# Two pairs of frames, the times of their middles, and a picture's tokens for each.
FRAMES = "".join(f"<{time} seconds><|vision_start|>{'<|video_pad|>' * 4}<|vision_end|>" for time in ("0.2", "1.2"))
TOOLS = ({"type": "function", "function": {"name": "look", "description": "Looks."}},)

# Templates with thinking, with settings: whether reasoning of earlier answers is written, and whether it is read from
# the text.
USED = {
    "Qwen3.5": (QWEN3_5, {}, False, True),
    "Qwen3.5 small": (QWEN3_5_SMALL, {}, False, True),
    "Qwen3.6": (QWEN3_6, {"preserve_thinking": True}, True, True),
    "Qwen3.8": (QWEN3_8, {}, True, False),
    "Qwen3.8 low": (QWEN3_8, {"reasoning_effort": "low", "preserve_thinking": False}, False, False),
}


@pytest.fixture(scope="module")
def thinking(processor):
    return with_template(processor, QWEN3_5)


def answer(reasoning, inside, text) -> dict:
    if reasoning is not None and inside:
        return {"role": "assistant", "content": f"<think>\n{reasoning}\n</think>\n\n{text}"}
    beside = {} if reasoning is None else {"reasoning_content": reasoning}
    return {"role": "assistant", "content": text, **beside}


def with_reasoning(case, image, keeps=False, reads=True) -> tuple[Conversation, list[tuple[str, str]]]:
    """Generate a conversation with the reasoning and text of each answer as the template writes them."""
    system, rounds, with_tools = case
    messages, expected, images, videos = [], [], [], []
    if system is not None:
        messages.append({"role": "system", "content": system})
    for number, (question, shows, reasoning, inside, text, calls) in enumerate(rounds):
        # A question is never empty, and never looks like a tool's answer.
        parts = [{"type": "text", "text": f"{number}: {question}"}]
        if shows:
            parts.insert(0, {"type": shows, shows: ""})
            (images if shows == "image" else videos).append(image if shows == "image" else FrameList((image,) * 4, 2))
        messages.append({"role": "user", "content": parts})
        thought = (reasoning or "").strip() if keeps or number == len(rounds) - 1 else ""
        inside = inside and reads
        if calls and with_tools:
            messages.append({**answer(reasoning, False, text), "tool_calls": [XML_CALL]})
            messages.append({"role": "tool", "content": f"{question}."})
            expected.append((thought, f"{text.strip()}\n\n{XML_CALLED}" if text.strip() else XML_CALLED))
        messages.append(answer(reasoning, inside, text))
        # Of a text behind its own reasoning only newlines are trimmed.
        expected.append((thought, text.rstrip().lstrip("\n") if inside and reasoning is not None else text.strip()))
    tools = TOOLS if with_tools else None
    return Conversation("train.jsonl:1", tuple(messages), tuple(images), tuple(videos), tools), expected


def block(thought: str, empty: str) -> str:
    return f"{thought}\n</think>\n\n" if thought else empty


def check_release(processor, image, case, variables: dict, keeps: bool, reads: bool) -> None:
    """Assert that only answers and their reasoning are trained on, each after its prompt."""
    conversation, expected = with_reasoning(case, image, keeps, reads)
    for answers, parts in (("all", expected), ("last", expected[-1:])):
        sample = Encoder(processor, answers, **variables)(conversation)
        assert trained(processor, sample) == "".join(block(thought, "") + text + END for thought, text in parts)
        # They are the ends of their turns, and no words alike elsewhere: what is before the last is the prompt for it.
        mask = sample.loss_mask.tolist()
        begin = len(mask) - mask[::-1].index(1) - 1
        while begin and mask[begin - 1]:
            begin -= 1
        before = processor.tokenizer.decode(sample.input_ids[: begin + 1])
        before = before.replace("<|image_pad|>" * 4, "<|image_pad|>").replace(FRAMES, "<|video_pad|>")
        # Reasoning of earlier answers may be dropped; they ask for thinking all the same.
        trained_on = [m for m in conversation.messages if m["role"] == "assistant"][-len(parts) :]
        asks = any((m.get("reasoning_content") or "").strip() for m in trained_on) or bool(expected[-1][0])
        known = {"tools": conversation.tools, "add_generation_prompt": True, "enable_thinking": asks, **variables}
        prompt = processor.apply_chat_template(copy.deepcopy([*conversation.messages[:-1]]), tokenize=False, **known)
        # transformers 5 leaves the template's start and end of vision around a video's frames.
        prompt = prompt.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
        assert before == prompt + ("" if expected[-1][0] or not asks else "\n</think>\n\n")
        grids = [grid for grid in (sample.image_grid_thw, sample.video_grid_thw) if grid is not None]
        assert sum(map(len, grids)) == len(conversation.images) + len(conversation.videos)


@pytest.mark.one_case_in(5)
@pytest.mark.parametrize("name", USED)
@given(conversations)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_thinking_template_trains_only_on_answers_and_reasoning(processor, image, name, case):
    template, *usage = USED[name]
    check_release(with_template(processor, template), image, case, *usage)


@pytest.mark.parametrize("name", USED)
@given(conversations)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_released_thinking_template_trains_only_on_answers_and_reasoning(processor, image, name, case):
    if (template := released(name.removesuffix(" low"))) is None:
        pytest.skip("needs the released template, which the package trl 1.16 has")
    check_release(with_template(processor, template), image, case, *USED[name][1:])


@given(conversations)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_encoder_with_empty_thinking_train_trains_on_think_end_tag(thinking, image, case):
    conversation, expected = with_reasoning(case, image)
    sample = Encoder(thinking, "last", empty_thinking="train")(conversation)
    thought, text = expected[-1]
    assert trained(thinking, sample) == block(thought, "\n</think>\n\n") + text + END


def test_template_prompt_enables_thinking_if_a_trained_answer_has_reasoning(processor):
    release, system = with_template(processor, QWEN3_8), {"role": "system", "content": "Be brief."}
    thought, plain = THOUGHT_SEVEN, SEVEN | {"content": "Eight"}
    begins, said = "<|im_start|>system\n", f"A bar.\n</think>\n\nSeven{END}"

    def text(messages, losses=None, **variables) -> tuple[str, str]:
        sample = Encoder(release, **variables)(Conversation("x", tuple(messages), losses=losses or {}))
        return processor.tokenizer.decode(sample.input_ids), trained(processor, sample)

    for first, silent in ((system, f"{begins}Be brief.{END}"), (None, "<|im_start|>user")):
        asked = [ASK] if first is None else [first, ASK]
        turns = [*asked, thought, ASK, plain]
        for effort, words in ((None, HARD), ("xhigh", HARD), ("low", LITTLE), ("medium", "")):
            loud = begins + "\n\n".join(filter(None, [words, first and "Be brief."])) + END
            whole, found = text(turns, reasoning_effort=effort)
            assert whole.startswith(loud if words else silent) and found == f"{said}Eight{END}"
            assert f"assistant\n{EMPTY}Eight" in whole
            for messages, losses in ((turns, {len(asked): False}), ([*asked, plain], None)):
                whole, found = text(messages, losses, reasoning_effort=effort)
                assert whole.startswith(silent) and found == f"Eight{END}" and f"{EMPTY}Eight" in whole
        assert f"assistant\n<think>\n{said}" in text(turns, {len(asked): False})[0]
        whole, found = text(turns, preserve_thinking=False)
        assert "A bar." not in whole and found == f"Seven{END}Eight{END}"


def test_encoder_raises_if_template_rejects_or_ignores_a_setting(processor):
    release = with_template(processor, QWEN3_8)
    with pytest.raises(ValueError, match="the chat template fails with reasoning_effort='high': No effort high"):
        Encoder(release, reasoning_effort="high")
    for name, value in (("reasoning_effort", "low"), ("preserve_thinking", False)):
        with pytest.raises(ValueError, match=f"{name} is {value!r}, but the chat template ignores it"):
            Encoder(with_template(processor, QWEN3_5), **{name: value})
        assert Encoder(release, **{name: value}).fingerprint != Encoder(release).fingerprint


def test_encoder_raises_if_template_finds_no_user_message(processor):
    encoder = Encoder(with_template(processor, QWEN3_8))
    with pytest.raises(DataError, match=r"^x: the chat template fails: No user query found"):
        encoder(Conversation("x", ({"role": "system", "content": "Be brief."}, SEVEN)))


CONVERSATION = Conversation("train.jsonl:1", (ASK, THOUGHT_SEVEN, ASK, {**THOUGHT_SEVEN, "content": "Eight"}))


@pytest.mark.parametrize(("old", "new", "message"), [
    # Counts the letters of what is before, behind it.
    ("{%- if add_generation", "{{- messages[1].content | length -}}{%- if add_generation", "the text after the answer"),
    # Writes answers twice.
    ("        {{- text -}}", "        {{- text + text -}}", "writes the answer 2 times, expected once"),
    # Shouts.
    ("        {{- text -}}", "        {{- text | upper -}}", "writes the answer 0 times, expected once"),
    ("text = written(m.content) | trim -%}\n    {%- if m.role == 'system'",
     "text = written(m.content) | trim -%}{{- text | length -}}\n    {%- if m.role == 'system'",
     "the text before the answer"),
    # Asks somebody else.
    ("{{- '<|im_start|>assistant\\n<think>\\n' -}}\n    {%- if enable",
     "{{- '<|im_start|>model\\n<think>\\n' -}}\n    {%- if enable",
     "the prompt to generate it, with enable_thinking True"),
    ("{%- if add_generation_prompt -%}", "{%- if false -%}", "add_generation_prompt does not append a prompt"),
    ("{{- called(call) -}}\n        {%- endfor -%}\n        {{- '<|im_end|>\\n' -}}",
     "{%- endfor -%}\n        {{- '\\n' -}}", "expected a special token that ends the turn"),
])  # fmt: skip
def test_encoder_raises_if_answer_cannot_be_located_in_rendered_text(thinking, old, new, message):
    assert QWEN3_5.count(old) == 1
    with pytest.raises(DataError, match=f"^train.jsonl:1: message [24]: .*{message}"):
        Encoder(with_template(thinking, QWEN3_5.replace(old, new)))(CONVERSATION)


@pytest.mark.parametrize("settled", [{"answers": "last"}, {}])
def test_encoder_accepts_unlocatable_answer_if_excluded_from_loss(thinking, settled):
    counting = "{%- if messages[1] -%}{{- messages[1].content | length -}}{%- endif -%}{%- if add_generation"
    other = with_template(thinking, QWEN3_5.replace("{%- if add_generation", counting))
    with pytest.raises(DataError, match="on the answer: train on only the last answer with answers='last', leave this"):
        Encoder(other)(CONVERSATION)
    conversation = CONVERSATION if settled else replace(CONVERSATION, losses={1: False})
    assert trained(other, Encoder(other, **settled)(conversation)) == f"A bar.\n</think>\n\nEight{END}"


def test_encoder_raises_if_empty_thinking_option_is_invalid(processor, thinking):
    with pytest.raises(
        ValueError, match="empty_thinking is 'train', but the chat template does not read 'reasoning_cont"
    ):
        Encoder(processor, empty_thinking="train")
    with pytest.raises(ValueError, match="empty_thinking"):
        Encoder(thinking, empty_thinking="all")
    assert Encoder(thinking).fingerprint != Encoder(thinking, empty_thinking="train").fingerprint


def test_chat_template_kwargs_of_record_override_encoder_settings(processor):
    turns = (ASK, THOUGHT_SEVEN, ASK, {**THOUGHT_SEVEN, "content": "Eight"})

    def ids(own, **settings):
        encoder = Encoder(with_template(processor, QWEN3_8), **settings)
        conversation = Conversation("x", turns, template_kwargs=own)
        sample = encoder(conversation)
        assert encoder.size(conversation).tokens == len(sample)
        return sample.input_ids.tolist(), sample.loss_mask.tolist()

    for own in ({"preserve_thinking": False}, {"reasoning_effort": "low"}):
        assert ids(own) == ids({}, **own) != ids({})
    assert ids({"reasoning_effort": "low"}, reasoning_effort="medium") == ids({}, reasoning_effort="low")
    with pytest.raises(DataError, match=r"^x: the chat template fails: No effort high"):
        ids({"reasoning_effort": "high"})


@pytest.mark.parametrize("name", ["thinking_budget", "messages", "tools", "add_generation_prompt", "m", "range"])
def test_chat_template_kwargs_raise_if_reserved_or_not_read_by_template(processor, name):
    encoder = Encoder(with_template(processor, QWEN3_6))
    conversation = Conversation("x", (ASK, SEVEN), template_kwargs={name: True})
    message = f"^x: found '{name}' under 'chat_template_kwargs', .* reads only enable_thinking, preserve_thinking"
    for work in (encoder, encoder.size):
        with pytest.raises(DataError, match=message):
            work(conversation)


def test_enable_thinking_of_record_overrides_empty_thinking_option(processor):
    plain = Encoder(with_template(processor, QWEN3_5))
    trains = Encoder(with_template(processor, QWEN3_5), empty_thinking="train")

    said = {"role": "assistant", "content": "Seven"}

    def sample(encoder, answer, **own):
        found = encoder(Conversation("x", (ASK, answer), template_kwargs=own))
        return found.input_ids.tolist(), found.loss_mask.tolist()

    assert sample(plain, said, enable_thinking=True) == sample(trains, said)
    assert sample(trains, said, enable_thinking=False) == sample(plain, said) != sample(trains, said)
    assert sample(plain, THOUGHT_SEVEN, enable_thinking=True) == sample(plain, THOUGHT_SEVEN)
    with pytest.raises(DataError, match=r"found enable_thinking false .* but an answer that is trained on has"):
        sample(plain, THOUGHT_SEVEN, enable_thinking=False)


def test_chat_template_kwargs_as_object_or_json_string_are_read(read):
    for value in ({"enable_thinking": False, "a": None}, '{"enable_thinking": false, "a": null}'):
        found = read({"messages": [ASK, SEVEN], "chat_template_kwargs": value})
        assert found.template_kwargs == {"enable_thinking": False}
    assert read([ASK, SEVEN]).template_kwargs == {}
    with pytest.raises(DataError, match=r"found \[1\] under 'chat_template_kwargs', expected an object"):
        read({"messages": [ASK, SEVEN], "chat_template_kwargs": [1]})
