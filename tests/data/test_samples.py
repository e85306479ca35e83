"""Test truncated and bad samples, pixel limits, and which answers are trained on."""

import io
import re

from qwen3vl_bridge.data import BatchStream, Conversation, DataError, JsonLines, load_processor, one_pass, open_source
from qwen3vl_bridge.data.conversations import PixelLimits
from qwen3vl_bridge.data.encoding import Encoder, VisionLimits
from qwen3vl_bridge.data.prompts import Prompt, Prompts

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.conftest import assert_refused, picture, random_record, trained, with_template, write
from tests.data.test_media import file_of
from tests.data.test_videos import clip


def answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


def test_encoder_truncated_sample_is_prefix_without_partial_image_or_video(encoder, processor, tmp_path):
    clip(tmp_path / "a.mkv", 12, size=(64, 64))
    random = np.random.default_rng(1)
    records = [random_record(tmp_path, number, random) for number in range(6)]
    films = [{"type": "video", "video": "a.mkv"}] * 2
    records[0]["messages"] += [{"role": "user", "content": films}, answer("Seven. Seven. Seven.")]
    file = JsonLines(write(tmp_path / "train.jsonl", records))
    cut = 0
    for conversation in (file[index] for index in range(6)):
        whole = encoder(conversation)
        first = int(whole.loss_mask.nonzero()[0]) + 2
        for limit in range(first - 1, len(whole) + 2, 3):
            if limit < first:
                with pytest.raises(DataError, match=r"jsonl:\d: found \d+ tokens, and no answer among the first \d+"):
                    encoder(conversation, limit)
                continue
            sample = encoder(conversation, limit)
            length = len(sample)
            assert length <= limit and encoder.size(conversation, limit).tokens == length
            assert torch.equal(sample.input_ids, whole.input_ids[:length])
            assert torch.equal(sample.loss_mask[:-1], whole.loss_mask[: length - 1]) and sample.loss_mask[-1] == 0
            cut += length < len(whole)
            for kind, grids, pixels in (
                ("image", "image_grid_thw", "pixel_values"),
                ("video", "video_grid_thw", "pixel_values_videos"),
            ):
                found = getattr(sample, grids)
                count = 0 if found is None else int(found.prod(-1).sum())
                assert count == 4 * int((sample.input_ids == getattr(processor, f"{kind}_token_id")).sum())
                if found is not None:
                    assert torch.equal(found, getattr(whole, grids)[: len(found)])
                    assert torch.equal(getattr(sample, pixels), getattr(whole, pixels)[:count])
            if length < min(limit, len(whole)):  # only a picture, or a video with its times, leaves room
                follows = processor.tokenizer.decode(whole.input_ids[length : length + 10])
                assert re.match(r"<\|vision_start\|>|<0\.\d seconds>", follows), follows
    assert cut > 30


def test_sample_filter_with_on_long_truncate_counts_truncated_samples(make_rows, caplog):
    rows = make_rows(seq_length=64, seed=None, on_long="truncate", on_bad="drop")()
    batches = list(one_pass(rows))
    assert all(batch.input_ids.shape == (1, 64) for batch in batches)
    cut, dropped = rows.samples.sample_filter.num_truncated, rows.samples.sample_filter.num_dropped
    assert cut > 4 and dropped == 0
    assert len({name for batch in batches for name in batch.sample_ids}) == 40 - dropped
    assert any(f"expected at most 64: truncated, {min(cut, 4)} so far" in message for message in caplog.messages)


@pytest.mark.parametrize("pack", [True, False])
def test_sample_filter_with_on_bad_drop_counts_dropped_samples(make_rows, tmp_path, caplog, pack):
    random = np.random.default_rng(1)
    records = [random_record(tmp_path, number, random) for number in range(10)]
    seen = picture(tmp_path / "broken.png", 64, 64)
    seen.write_bytes(seen.read_bytes()[:-2000])
    question = {"role": "user", "content": [{"type": "image", "image": "broken.jpg"}]}
    records[3] = {"messages": [question, answer("Seven.")]}
    broken = picture(tmp_path / "broken.jpg", 64, 64)
    broken.write_bytes(broken.read_bytes()[:-400])
    path = write(tmp_path / "train.jsonl", [*records, {"messages": []}])
    with pytest.raises(DataError, match=r"train.jsonl:11: found \[\]"):
        list(one_pass(make_rows(path, seed=None, pack=pack)()))
    rows = make_rows(path, seed=None, pack=pack, on_bad="drop")()
    batches = list(one_pass(rows))
    names = [name for batch in batches for name in batch.sample_ids]
    assert sorted(names) == sorted(f"train.jsonl:{line}" for line in range(1, 11))
    assert rows.samples.sample_filter.num_dropped == 2
    assert any("train.jsonl:11: found []" in text and "dropped, 1 so far" in text for text in caplog.messages)
    assert any("train.jsonl:4: " in text and "without loss (1 so far)" in text for text in caplog.messages)
    assert batches[-1].dropped == (1,) and sum(sum(batch.unreadable) for batch in batches) == 1
    batch = next(batch for batch in batches if "train.jsonl:4" in batch.sample_ids)
    assert batch.layout.lengths[batch.sample_ids.index("train.jsonl:4")] == 1


def test_encoder_raises_if_answers_setting_is_invalid(processor):
    with pytest.raises(ValueError, match="answers is 'first', expected 'all' or 'last'"):
        Encoder(processor, "first")


def test_vision_limits_reduce_image_and_video_grids(processor, tmp_path):
    processor.save_pretrained(tmp_path / "hf")
    limits = VisionLimits(image_max_pixels=64 * 64, video_fps=1, video_max_frames=8, video_max_pixels=8 * 64 * 64)
    encoder = Encoder(load_processor(tmp_path / "hf", limits))
    picture(tmp_path / "a.png", 128, 128), clip(tmp_path / "a.mkv", 100, size=(128, 128))
    parts = [{"type": "image", "image": "a.png"}, {"type": "video", "video": "a.mkv"}]
    file = JsonLines(write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": parts}, answer("7")]}]))
    sample = encoder(file[0])
    assert sample.image_grid_thw.tolist() == [[1, 4, 4]] and sample.video_grid_thw.tolist() == [[4, 4, 4]]
    for wrong, message in (
        ({"video_fps": 0}, "video_fps is 0, expected a positive number"),
        ({"image_min_pixels": 10**9}, "the minimum for images, 1000000000 pixels, is greater"),
        ({"video_min_frames": 100}, "video_min_frames is 100, expected at most 32"),
    ):
        with pytest.raises(ValueError, match=message):
            load_processor(tmp_path / "hf", VisionLimits(**wrong))


def test_batch_stream_position_does_not_advance_past_bad_sample(make_rows, tmp_path):
    random = np.random.default_rng(1)
    records = [random_record(tmp_path, number, random) for number in range(6)]
    path = write(tmp_path / "train.jsonl", [*records[:3], {"messages": []}, *records[3:]])
    stream = BatchStream(make_rows(path, seed=None, pack=False, window_size=1)())
    for _ in range(3):
        next(stream)
    for _ in range(2):
        with pytest.raises(DataError, match=r"train.jsonl:4: found \[\]"):
            next(stream)
    assert stream.state_dict()["row"] == 3


TOKEN = 32 * 32  # pixels
ANSWER = {"role": "assistant", "content": "7"}
sides = st.integers(min_value=1, max_value=300)
bounds = st.one_of(st.none(), st.integers(min_value=1, max_value=100 * TOKEN))
shown = st.lists(st.tuples(sides, sides, bounds, bounds), min_size=1, max_size=3)


def made(sizes) -> list[bytes]:
    noise = [np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8) for seed, size in enumerate(sizes)]
    return [file_of(Image.fromarray(pixels), "PNG") for pixels in noise]


@given(shown)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_min_and_max_pixels_of_image_part_match_transformers_processor(processor, encoder, case):
    reader = processor.image_processor
    usual = reader.size["shortest_edge"], reader.size["longest_edge"]
    files = made([(height, width) for height, width, _, _ in case])
    own = [PixelLimits(least, most) for _, _, least, most in case]
    parts = [{"type": "image", "image": ""} for _ in case]
    limits = {n: limit for n, limit in enumerate(own) if limit != PixelLimits()}
    messages = ({"role": "user", "content": parts}, ANSWER)
    conversation = Conversation("x", messages, tuple(files), limits=limits)
    whole = [(limit[0] or usual[0], limit[1] or usual[1]) for limit in own]
    flat = any(max(h, w) / min(h, w) > 200 for h, w, _, _ in case)
    if flat or any(least > most or most < TOKEN for least, most in whole):
        assert_refused(encoder, r"^x: (image \d: found|the processor rejects an .*aspect)", conversation)
        return
    expected = [
        reader(images=[Image.open(io.BytesIO(file))], min_pixels=least, max_pixels=most, return_tensors="pt")
        for file, (least, most) in zip(files, whole, strict=True)
    ]
    sample, size = encoder(conversation), encoder.size(conversation)
    assert torch.equal(sample.image_grid_thw, torch.cat([one["image_grid_thw"] for one in expected]))
    assert torch.equal(sample.pixel_values, torch.cat([one["pixel_values"] for one in expected]))
    tokens = int((sample.input_ids == processor.image_token_id).sum())
    assert tokens * 4 == size.patches == len(sample.pixel_values)
    assert size.tokens == len(sample)


def user(*parts) -> list:
    return [{"role": "user", "content": list(parts)}, ANSWER]


def test_min_and_max_pixels_of_image_part_are_read_from_json_lines_and_parquet(encoder, tmp_path):
    picture(tmp_path / "7.png", 256, 256)
    part = {"type": "image", "image": "7.png"}
    parts = [part, {**part, "max_pixels": 4 * TOKEN}, {**part, "min_pixels": 100 * TOKEN, "max_pixels": 100 * TOKEN}]
    messages = [{"role": "user", "content": parts}, {**ANSWER, "content": [{"type": "text", "text": "7"}]}]
    write(tmp_path / "train.jsonl", [{"messages": messages}])
    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "train.parquet")
    for name in ("train.jsonl", "train.parquet"):
        conversation = open_source(tmp_path / name)[0]
        assert all(set(part) == {"type", "image"} for part in conversation.messages[0]["content"])
        grids = encoder(conversation).image_grid_thw
        assert (grids.prod(-1) // 4).tolist() == [64, 4, 100]


@pytest.mark.parametrize(("beside", "message"), [
    ({"max_pixels": 0}, "found 0 under 'max_pixels', expected a number of pixels up to"),
    ({"max_pixels": -1}, "found -1 under 'max_pixels', expected a number of pixels"),
    ({"max_pixels": 1e5}, "found 100000.0 under 'max_pixels', expected a number of pixels"),
    ({"min_pixels": True}, "found True under 'min_pixels', expected a number of pixels"),
    ({"min_pixels": "64"}, "found '64' under 'min_pixels', expected a number of pixels"),
    ({"min_pixels": 10**12}, "found 1000000000000 under 'min_pixels', expected a number of pixels up to"),
    ({"resized_height": 64, "resized_width": 64}, "resized_width, expected 'type' and 'image', and 'min_pixels' and"),
])  # fmt: skip
def test_image_part_raises_if_min_or_max_pixels_is_invalid(read, tmp_path, beside, message):
    picture(tmp_path / "7.png", 64, 64)
    with pytest.raises(DataError, match=f"^train.jsonl:1: message 1, part 1: .*{message}"):
        read(user({"type": "image", "image": "7.png", **beside}))


@pytest.mark.parametrize(("beside", "message"), [
    ({"max_pixels": 1023}, "image 2: found 'max_pixels' 1023, expected at least 1024, the pixels of one token"),
    ({"min_pixels": 65 * TOKEN}, "image 2: found 'min_pixels' 66560 above 'max_pixels' 65536; if"),
    ({"min_pixels": 4096, "max_pixels": 2048}, "image 2: found 'min_pixels' 4096 above 'max_pixels' 2048; if"),
])  # fmt: skip
def test_encoder_raises_if_min_or_max_pixels_cannot_be_satisfied(encoder, read, tmp_path, beside, message):
    picture(tmp_path / "7.png", 64, 64)
    part = {"type": "image", "image": "7.png"}
    conversation = read(user(part, {**part, **beside}))
    assert_refused(encoder, f"^train.jsonl:1: {message}", conversation)


@pytest.mark.parametrize("key", ["min_pixels", "total_pixels", "fps", "nframes", "resized_height", "video_start"])
def test_video_part_raises_if_it_has_pixel_or_frame_limits(read, key):
    with pytest.raises(DataError, match=rf"part 1: found the keys type, video, {key}, .* for all videos in"):
        read(user({"type": "video", "video": "7.mkv", key: 4}))


END = "<|im_end|>"
ASK, SEVEN = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Seven."}
turns = st.lists(st.tuples(st.booleans(), st.sampled_from([None, True, False])), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def templates(processor):
    return processor, with_template(processor, "thinking_template.jinja")


def trained_of(encoder: Encoder, conversation: Conversation) -> str:
    return trained(encoder.processor, encoder(conversation))


@pytest.mark.slow
@given(turns, st.sampled_from(["all", "last"]), st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_loss_key_of_message_overrides_answers_setting(templates, case, answers, thinks):
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
        assert_refused(encoder, f"train.jsonl:1: found no answer to train on with answers='{answers}'", conversation)
        return
    assert trained_of(encoder, conversation) == "".join(messages[n]["content"] + END for n in expected)
    silent = Conversation("train.jsonl:1", tuple(messages))
    assert encoder(conversation).input_ids.tolist() == encoder(silent).input_ids.tolist()
    assert encoder.size(conversation) == encoder.size(silent)


@pytest.mark.parametrize(("key", "yes", "no"), [("loss", True, False), ("weight", 1, 0), ("weight", 1.0, 0.0)])
def test_loss_and_weight_keys_are_read_from_json_lines_and_parquet(encoder, tmp_path, key, yes, no):
    six = {**SEVEN, "content": "Six.", key: no}
    messages = [{**ASK, key: no}, six, {**ASK, key: None}, {**SEVEN, key: yes}, ASK, SEVEN]
    write(tmp_path / "train.jsonl", [{"messages": messages}])
    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "train.parquet")
    for name in ("train.jsonl", "train.parquet"):
        conversation = open_source(tmp_path / name)[0]
        assert conversation.losses == {1: False, 3: True}
        # No template sees them.
        assert all(set(message) == {"role", "content"} for message in conversation.messages)
        assert trained_of(encoder, conversation) == f"Seven.{END}" * 2


def test_reasoning_and_tool_call_are_not_trained_on_if_message_loss_is_false(templates):
    thought = {**SEVEN, "reasoning_content": "A bar."}
    call = {**thought, "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    messages = (ASK, call, {"role": "tool", "content": "A bar."}, thought)
    without = Conversation("train.jsonl:1", messages, losses={1: False})
    assert trained_of(Encoder(templates[1]), without) == f"A bar.\n</think>\n\nSeven.{END}"


@pytest.mark.parametrize(("message", "problem"), [
    ({**SEVEN, "loss": 1}, "found 1 under 'loss', expected true or false"),
    ({**SEVEN, "loss": "false"}, "found 'false' under 'loss', expected true or false"),
    ({**SEVEN, "weight": True}, "found True under 'weight', expected 0 or 1"),
    ({**SEVEN, "weight": 0.5}, "found 0.5 under 'weight', expected 0 or 1"),
    ({**SEVEN, "weight": []}, r"found \[\] under 'weight', expected 0 or 1"),
    ({**SEVEN, "weight": 1, "loss": True}, "found both 'loss' and 'weight', expected one of them"),
    ({**ASK, "loss": True}, "found 'loss' on a message of the role 'user', expected it only on messages of the role"),
    ({"role": "system", "content": "a", "weight": 1}, "found 'weight' on a message of the role 'system', expected"),
    ({"role": "tool", "content": "a", "loss": True}, "found 'loss' on a message of the role 'tool', expected it"),
])  # fmt: skip
def test_message_raises_if_loss_or_weight_is_invalid(read, message, problem):
    with pytest.raises(DataError, match=f"^train.jsonl:1: message 2: {problem}"):
        read([ASK, message, SEVEN])


def test_encoder_raises_if_truncated_sample_has_no_trained_answer(encoder):
    conversation = Conversation("train.jsonl:1", (ASK, SEVEN, ASK, SEVEN), losses={1: False})
    tokens = encoder.size(conversation).tokens
    assert_refused(encoder, "and no answer among the first", conversation, tokens // 2 + 1)


def test_evaluation_prompts_ignore_loss_keys_of_messages(tmp_path, make_provider, processor):
    messages = [ASK, {**SEVEN, "loss": True}, ASK, {**SEVEN, "content": "Eight.", "loss": False}]
    path = write(tmp_path / "train.jsonl", [{"messages": messages}])
    rows = make_provider(train_path=path, seq_length=64, answers="last")
    prompts = Prompts(open_source(path), rows.processor_settings().encoder, [0])
    (question,) = prompts.questions
    asked = processor.tokenizer.decode(prompts.encode(question).sample.input_ids)
    assert asked.endswith(f"Seven.{END}\n<|im_start|>user\nWhich?{END}\n<|im_start|>assistant\n")
    assert question.references == ("Eight.",) and question.text == ASK["content"]


def test_evaluation_prompts_read_references_key_of_record(tmp_path, make_provider):
    records = [{"messages": [ASK, SEVEN], "references": given} for given in (["7", "seven"], "seven")]
    path = write(tmp_path / "train.jsonl", records)
    encoder = make_provider(train_path=path, seq_length=64, answers="last").processor_settings().encoder
    assert Prompts(open_source(path), encoder, [0]).questions[0].references == ("7", "seven")
    with pytest.raises(DataError, match=r"^train\.jsonl:2: found 'seven' under 'references', expected a list of texts"):
        Prompts(open_source(path), encoder, [1])


def test_evaluation_prompts_remove_reasoning_from_references(tmp_path, checkpoint, make_provider, templates):
    for name, template in (("plain", templates[0]), ("thinking", templates[1])):
        (tmp_path / name).mkdir()
        for file in checkpoint.iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
        template.save_pretrained(tmp_path / name)
    inside = {**SEVEN, "content": "<think>\nA bar.\n</think>\n\nSeven."}
    records = [SEVEN, inside, {**SEVEN, "reasoning_content": "A bar."}]

    def asked(template: str, answers: list[dict], **settings) -> list[Prompt]:
        path = write(tmp_path / "train.jsonl", [{"messages": [ASK, answer]} for answer in answers])
        settings |= dict(hf_processor_path=tmp_path / template, seq_length=64, answers="last")
        encoder = make_provider(train_path=path, **settings).processor_settings().encoder
        prompts = Prompts(open_source(path), encoder, range(len(answers)))
        assert [question.references[0].strip() for question in prompts.questions] == ["Seven."] * len(answers)
        return [prompts.encode(question) for question in prompts.questions]

    found = asked("thinking", records)
    assert [prompt.thinks for prompt in found] == [False, True, True]
    asked("plain", records[:2])
    (prompted,) = asked("thinking", [SEVEN], empty_thinking="train")
    assert prompted.thinks
    plain, _, thinks = found
    assert plain.extract_answer("Seven.") == plain.extract_answer("<think>\nHm.</think>\n\nSeven.").strip() == "Seven."
    assert thinks.extract_answer("A bar.\n</think>\n\nSeven.").strip() == "Seven."
    assert thinks.extract_answer("Seven. It may be seven.") == ""  # it has not answered yet
