"""Test the report of `qwen3vl data inspect`."""

import base64
import html
import io
import json
import re
import sys
import time
import unicodedata

from qwen3vl_bridge.cli.data import main
from qwen3vl_bridge.data import DataError, SampleFilter, Samples, inspection, open_source
from qwen3vl_bridge.data.conversations import Conversation
from qwen3vl_bridge.data.errors import group_errors
from qwen3vl_bridge.data.inspection import as_json, as_text, html_parts, inspect_samples, view_sample, write_html

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.image_utils import SizeDict

from tests.data.conftest import dialogue, picture, write

END = "<|im_end|>"
# With what takes several tokens a character, and a character that stands for a broken one.
TEXT = st.text(st.characters(codec="utf-8") | st.sampled_from("ab \n\ufffd\u0301é漢😀"), min_size=1, max_size=40)


@pytest.fixture
def inspect(encoder, processor):
    def inspect(path, **how):
        samples = Samples(open_source(path), SampleFilter(encoder, limit=sys.maxsize))
        return inspect_samples(samples, processor, **how)

    return inspect


def conversation(*answers, question="what is it"):
    turns = [dialogue(question, answer) for answer in answers]
    return {"messages": [message for turn in turns for message in turn]}


def trained_text(view):
    return "".join(piece.text for piece in view.pieces if piece.trained)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(answers=st.lists(TEXT, min_size=1, max_size=3), question=TEXT)
def test_inspection_marks_exactly_the_answers_as_trained(tmp_path, inspect, answers, question):
    file = write(tmp_path / "train.jsonl", [conversation(*answers, question=question)])
    (view,) = inspect(file).samples
    # The tokenizer itself writes characters in one of their equal forms.
    assert trained_text(view) == "".join(unicodedata.normalize("NFC", answer) + END for answer in answers)


def test_inspection_shows_all_tokens_in_order(train_file, encoder, processor):
    source = open_source(train_file)
    for number in range(len(source)):
        sample = encoder(source[number])
        view = view_sample(sample, processor)
        ids = [number for piece in view.pieces for number in piece.ids]
        assert ids == sample.input_ids.tolist()
        assert view.num_trained == int(sample.loss_mask.sum())
        words = "".join(piece.text * (len(piece.ids) if piece.vision else 1) for piece in view.pieces)
        assert words == processor.tokenizer.decode(ids)


def test_inspection_shows_answer_of_unicode_replacement_characters(tmp_path, inspect):
    answer = "\ufffd" * 500
    (view,) = inspect(write(tmp_path / "train.jsonl", [conversation(answer)])).samples
    assert trained_text(view) == answer + END


def test_inspection_text_marks_trained_tokens_and_abbreviates_image_tokens(tmp_path, inspect):
    picture(tmp_path / "a.png", 64, 96)
    record = conversation("a fox", question=[{"type": "image", "image": "a.png"}])
    text = as_text(inspect(write(tmp_path / "train.jsonl", [record])), brackets=True).plain
    assert f"assistant\n[[a fox{END}]]\n" in text
    assert "<|vision_start|><|image_pad|> x 6<|vision_end|>" in text
    assert "image 1: 96 x 64 pixels (width x height), 6 tokens, grid 1 x 4 x 6 (time x height x width)" in text
    assert "[[" not in as_text(inspect(tmp_path / "train.jsonl")).plain


def inlined(page):
    found = re.findall(r'src="data:image/(?:png|jpeg);base64,([^"]+)"', page)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).astype(int) for data in found]


def test_inspection_html_shows_images_as_resized_by_processor(tmp_path, inspect, processor):
    picture(tmp_path / "whole.png", 64, 96, seed=1)
    picture(tmp_path / "odd.png", 77, 50, seed=2)
    parts = [{"type": "image", "image": name} for name in ("whole.png", "odd.png")]
    found = inspect(write(tmp_path / "train.jsonl", [conversation("yes", question=parts)]), images=True)
    whole, odd = inlined("".join(html_parts(found, "train.jsonl")))

    def original(name):
        return np.asarray(Image.open(tmp_path / name)).astype(int)

    assert np.abs(whole - original("whole.png")).max() <= 1  # measured: 0
    assert odd.shape == (64, 64, 3)
    images, size = processor.image_processor, SizeDict(height=64, width=64)
    source = torch.from_numpy(original("odd.png")).permute(2, 0, 1).to(torch.uint8)
    resized = images.resize(source, size=size, resample=images.resample)
    assert np.abs(odd - resized.permute(1, 2, 0).numpy().astype(int)).max() <= 1  # measured: 0


def test_inspection_html_stores_large_images_as_jpeg(tmp_path, inspect, monkeypatch):
    Image.new("RGB", (96, 64), (200, 30, 90)).save(tmp_path / "a.png")
    record = conversation("yes", question=[{"type": "image", "image": "a.png"}])
    monkeypatch.setattr("qwen3vl_bridge.data.inspection._MOST_PNG_PIXELS", 0)
    page = "".join(html_parts(inspect(write(tmp_path / "train.jsonl", [record]), images=True), "train.jsonl"))
    (found,) = inlined(page)
    assert "data:image/jpeg;" in page and found.shape == (64, 96, 3)
    assert np.abs(found - [200, 30, 90]).max() <= 3  # measured: 1


def test_inspection_html_shows_all_frames_of_video(tmp_path, inspect):
    frames = [picture(tmp_path / f"{number}.png", 64, 96, seed=number).name for number in range(4)]
    record = conversation("yes", question=[{"type": "video", "video": frames, "sample_fps": 2}])
    found = inspect(write(tmp_path / "train.jsonl", [record]), images=True)
    ((video,),) = (view.media for view in found.samples)
    assert (video.kind, video.grid, video.num_tokens) == ("video", (2, 4, 6), 12)
    page = "".join(html_parts(found, "train.jsonl"))
    for frame, name in zip(inlined(page), frames, strict=True):
        assert np.abs(frame - np.asarray(Image.open(tmp_path / name)).astype(int)).max() <= 1  # measured: 0
    assert "<|video_pad|> x 6" in as_text(found).plain


def test_inspection_lists_invalid_records_as_errors(tmp_path, inspect):
    records = [conversation("one"), {"messages": []}, conversation("two"), {"wrong": 1}]
    found = inspect(write(tmp_path / "train.jsonl", records), show=4)
    assert [sample_id for sample_id, *_ in found.errors] == ["train.jsonl:2", "train.jsonl:4"]
    assert [view.sample_id for view in found.samples] == ["train.jsonl:1", "train.jsonl:3"]
    assert len(found.lengths) == 2
    assert "found [] under 'messages'" in as_text(found).plain


def test_inspection_lists_samples_with_empty_answers(tmp_path, inspect, encoder):
    records = [conversation("yes"), conversation(""), conversation("yes", " \n"), conversation("", "no")]
    records[3]["messages"][1]["loss"] = False
    found = inspect(write(tmp_path / "train.jsonl", records))
    assert not found.errors and found.empty_answers == ("train.jsonl:2", "train.jsonl:3")
    assert "\nempty answers  2 (train.jsonl:2, train.jsonl:3)\n" in as_text(found).plain
    for said in ({"reasoning_content": "Nothing to say."}, {"tool_calls": [{"name": "look", "arguments": {}}]}):
        assert not encoder.has_empty_answer(Conversation("x", ({"role": "assistant", "content": "", **said},)))
    assert "empty answers" not in as_text(inspect(write(tmp_path / "sound.jsonl", records[:1]))).plain


def test_inspection_text_groups_errors_that_differ_only_in_names(tmp_path, inspect):
    (tmp_path / "elsewhere").mkdir()
    for number in range(9):
        picture(tmp_path / f"elsewhere/{number}.png", 64, 64)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/images").symlink_to(tmp_path / "elsewhere")
    asked = [[{"type": "image", "image": f"images/{number}.png"}] for number in range(9)]
    records = [conversation("yes", question=question) for question in asked] + [{"messages": []}]
    found = inspect(write(tmp_path / "data/train.jsonl", records))
    assert len(found.errors) == len(json.loads(as_json(found))["errors"]) == 10
    first, others, last = as_text(found).plain.splitlines()[-3:]
    image = f"'images/0.png' is {tmp_path}/elsewhere/0.png"
    assert first.startswith(f"  train.jsonl:1: message 1, part 1: {image}: expected a path inside the media root")
    numbers = ", ".join(f"train.jsonl:{number}" for number in range(2, 7))
    assert others == f"  the same in 8 more: {numbers} and 3 more"
    assert last.startswith("  train.jsonl:10: found [] under 'messages'")
    assert list(group_errors(found.errors, 1))[-1] == "and 1 more"


N = 200_000


@pytest.mark.parametrize(
    "long", ["x" * N, "'" + "." * N, "'" * N, "1" * N, "x/" * (N // 2)],
    ids=["x", "dots", "quotes", "digits", "slashes"],
)  # fmt: skip
def test_group_errors_takes_linear_time_for_long_word(long):
    """Measured 0.04 s; quadratic time would be minutes."""
    begun = time.monotonic()
    errors = [(str(n), f"{n}: {long}", f"found '/a/{n} b.png' in {long} and {n}.5/x") for n in range(3)]
    assert list(group_errors(errors, 1)) == [f"0: {long}", "the same in 2 more: 1, 2"]
    assert time.monotonic() - begun < 20


def test_inspection_reports_all_errors_in_one_pass(tmp_path, inspect):
    picture(tmp_path / "sound.png", 64, 64)
    cut = picture(tmp_path / "cut.png", 64, 64)
    cut.write_bytes(cut.read_bytes()[:-200])
    names = ["sound.png", "none/1.png", "http://a.example/1.png", "cut.png", "none/2.png", "http://b.example/22.png"]
    records = [conversation("yes", question=[{"type": "image", "image": name}]) for name in names]
    records += [conversation("yes", question="<image>"), {"messages": []}, conversation("no")]
    file = write(tmp_path / "train.jsonl", records)
    found = inspect(file, show=1)
    assert [name for name, *_ in found.errors] == [f"train.jsonl:{line}" for line in range(2, 9)]
    lines = as_text(found).plain.splitlines()[-8:]
    assert lines[0] == "errors         7"
    for line, words in zip(lines[1:], [
        "train.jsonl:2: .*none/1.png, which does not exist", "the same in 1 more: train.jsonl:5",
        "train.jsonl:3: .* no download of it in", "the same in 1 more: train.jsonl:6",
        "train.jsonl:4: .*cut.png does not decode as an image", "train.jsonl:7: found 1 placeholder", "train.jsonl:8: ",
    ], strict=True):  # fmt: skip
        assert re.search(rf"^  {words}", line)
    assert "\nerrors         1 (--lengths 9 looks at all samples)\n" in as_text(inspect(file, show=2, lengths=1)).plain


def test_inspection_reports_no_lengths_if_all_samples_are_invalid(tmp_path, inspect):
    file = write(tmp_path / "train.jsonl", [{"messages": "none"}] * 3)
    found = inspect(file)
    write_html(found, tmp_path / "report.html", "train.jsonl", "model")
    for text in (as_text(found).plain, (tmp_path / "report.html").read_text()):
        assert "none measured" in text and "the same in 2 more: train.jsonl:2, train.jsonl:3" in text
    assert json.loads(as_json(found))["length"] is None


def test_inspection_adds_note_naming_sample_to_unexpected_exception(train_file, inspect, monkeypatch):
    def fail(*_, **__):
        raise TypeError("no such thing")

    monkeypatch.setattr("qwen3vl_bridge.data.inspection.view_sample", fail)
    with pytest.raises(TypeError, match="no such thing") as caught:
        inspect(train_file, start=3)
    assert caught.value.__notes__ == ["while looking at sample 3, counted from 0"]


def test_inspection_lengths_and_row_fill_match_row_plan(train_file, inspect, make_rows):
    rows = make_rows(window_size=512)()
    found = inspect(train_file, seq_length=256)
    assert found.lengths == tuple(rows.samples.size(index).tokens for index in range(40))
    assert len(found.row_fills) == rows.plan.end_of_epoch()
    assert found.fill == pytest.approx(sum(found.lengths) / (256 * len(found.row_fills)))
    alone = inspect(train_file, seq_length=256, pack=False)
    assert len(alone.row_fills) == 40
    longest = max(found.lengths)
    short = inspect(train_file, seq_length=longest - 1)
    assert len(short.too_long) == found.lengths.count(longest)
    assert f"(--seq-length): {short.too_long[0]}" in as_text(short).plain
    assert inspect(train_file, seq_length=1).row_fills == ()


def test_inspection_options_select_shown_and_measured_samples(train_file, inspect):
    def lines(**how):
        return [int(view.sample_id.rpartition(":")[2]) for view in inspect(train_file, lengths=1, **how).samples]

    assert lines(start=38) == [39, 40]
    assert lines(seed=1, show=5) == lines(seed=1, show=5) != lines(seed=2, show=5)
    assert len(inspect(train_file, lengths=0, show=3).lengths) == 3
    assert len(inspect(train_file, lengths=7, show=0).lengths) == 7
    with pytest.raises(DataError, match="start is 40, expected less than 40"):
        lines(start=40)


def test_inspection_escapes_untrusted_text(tmp_path, inspect):
    wicked = "<script>alert('x')</script> & \" \x1b[31m \u202e ]]"
    found = inspect(write(tmp_path / "train.jsonl", [conversation(wicked, question=wicked)]))
    page, text = "".join(html_parts(found, "<b>.jsonl")), as_text(found).plain
    assert "<script" not in page and "<b>" not in page and "\x1b" not in page and "\u202e" not in page
    words = html.unescape(re.sub(r"<[^>]*>", "", page[page.index('class="text"') :]))
    assert words.count("<script>alert('x')</script> & \" \\x1b[31m \\u202e ]]") == 2
    assert "\x1b" not in text and "\\x1b[31m" in text


def test_inspection_json_lists_every_sample_and_token(train_file, inspect):
    found = json.loads(as_json(inspect(train_file, show=40, images=True)))
    assert found["num_samples"] == len(found["samples"]) == len(found["lengths"]) == 40
    for sample in found["samples"]:
        assert sum(piece.get("count") or len(piece["ids"]) for piece in sample["pieces"]) == sample["num_tokens"]
    empty = json.loads(as_json(inspect(train_file, show=0, lengths=0)))
    assert empty["length"] is None and empty["row_fills"] == []


def test_inspection_html_names_data_and_model_and_shows_images_and_frames(tmp_path, inspect):
    picture(tmp_path / "wide.png", 64, 640, seed=1)
    frames = [picture(tmp_path / f"{number}.png", 64, 96, seed=number).name for number in range(12)]
    records = [
        conversation("yes", question=[{"type": "image", "image": "wide.png"}, {"type": "text", "text": "w" * 300}]),
        conversation("no", question=[{"type": "video", "video": frames, "sample_fps": 2}]),
        conversation("word " * 800),
        {"messages": []},
    ]
    records[0]["messages"].insert(0, {"role": "system", "content": "be brief"})
    found = inspect(write(tmp_path / "train.jsonl", records), show=4, images=True, seq_length=700)
    page = "".join(html_parts(found, "train.jsonl", "owner/model<1>"))
    assert page.count("train.jsonl for owner/model&lt;1&gt;, rows of 700 tokens") == 2  # title and heading
    assert "640 x 64 pixels (width x height)" in page and page.count("video 1: 96 x 64 pixels") == 1
    figures = re.findall(r"<figure>(.*?)</figure>", page)
    assert [figure.count("<img") for figure in figures] == [1, 12]
    assert len(re.findall(r"does not fit into a row: [\d,]+ tokens, and a row has 700", page)) == 1


def test_inspection_html_collapses_long_sample(tmp_path, inspect):
    records = [conversation("7 " * 200), conversation("7 " * 1000)]
    found = inspect(write(tmp_path / "train.jsonl", records), images=True, seq_length=20_000)
    assert len(found.samples[0].pieces) <= inspection._MOST_OPEN < len(found.samples[1].pieces)
    page = "".join(html_parts(found, "train.jsonl"))
    assert [fold != "" for fold in re.findall(r"<details( open)?>", page)] == [True, False]


@pytest.mark.parametrize(("values", "rows"), [
    ([48] * 3, {"48": 3}), ([48, 49, 49], {"48": 1, "49": 2}), ([0, 1, 24], {"0 to 8": 2, "9 to 17": 0, "18 to 24": 1}),
    ([*range(1000)], {f"{low} to {min(low + 41, 999)}": min(42, 1000 - low) for low in range(0, 1000, 42)}),
])  # fmt: skip
def test_inspection_histogram_bins_have_expected_edges_and_counts(values, rows):
    found = re.findall(r"<td>([^<]+)</td><td>(\d+)</td>", inspection._histogram("tokens", "samples", values))
    assert {edges: int(number) for edges, number in found} == rows


@pytest.fixture
def run(checkpoint):
    """Return a function that runs the command and returns its exit status."""
    return lambda file, *how: main(["inspect", "--data", str(file), "--hf-model", str(checkpoint), *map(str, how)])


def test_inspect_command_overwrites_report_only_with_overwrite_option(run, train_file, tmp_path, capsys):
    report = tmp_path / "report.html"
    command = (train_file, "--samples", "2", "--output", report)
    assert run(*command) == 0
    assert "samples        40: 2 shown, 40 measured" in capsys.readouterr().out
    page = report.read_text()
    assert page.count("<section>") == 2 and page.count('class="bar"') > 2 and "http://" not in page
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]

    report.write_text("mine")
    assert run(*command) == 2
    assert "the path exists already" in capsys.readouterr().err
    assert report.read_text() == "mine"
    assert run(*command, "--overwrite", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["samples"]) == 2
    assert report.read_text() == page


def test_inspect_command_writes_no_report_if_no_record_is_valid(run, tmp_path, capsys):
    file, report = write(tmp_path / "train.jsonl", [{"messages": []}] * 3), tmp_path / "report.html"
    command = (file, "--output", report)
    assert run(*command) == 1 and not report.exists()
    said = capsys.readouterr()
    assert "train.jsonl:1" in said.out
    assert f"{report} is not written: none of the inspected samples can be used\n" in said.err
    write(file, [conversation("one"), {"messages": []}])
    assert run(*command) == 1 and "train.jsonl:2" in report.read_text()


def test_inspect_command_reads_images_below_second_media_root(run, train_file, tmp_path, capsys):
    (tmp_path / "images").symlink_to(train_file.parent / "images")
    (tmp_path / "train.jsonl").write_bytes(train_file.read_bytes())
    command = (tmp_path / "train.jsonl", "--samples", "0")
    assert run(*command) == 1
    assert f"media_root=[{tmp_path},{train_file.parent / 'images'}]" in capsys.readouterr().out
    assert run(*command, "--media-root", tmp_path, "--media-root", train_file.parent) == 0


def test_inspect_command_with_answers_option_last_marks_last_answer(run, tmp_path, capsys):
    file = write(tmp_path / "train.jsonl", [conversation("one", "two")])
    assert run(file, "--answers", "last") == 0
    assert re.findall(r"\[\[.*\]\]", capsys.readouterr().out) == [f"[[two{END}]]"]


def test_inspect_command_exit_code_is_1_for_bad_samples_and_2_for_wrong_usage(run, tmp_path, capsys):
    file = write(tmp_path / "train.jsonl", [conversation("one"), {"messages": []}])
    assert run(file) == 1
    assert "train.jsonl:2" in capsys.readouterr().out
    sound = write(tmp_path / "sound.jsonl", [conversation("one"), conversation("one " * 90)])
    assert run(sound) == run(sound, "--seq-length", "64", "--on-long", "drop") == 0
    assert "0 of 2 for a row of 4,096 tokens (--seq-length)\n" in capsys.readouterr().out
    assert run(sound, "--seq-length", "64") == 1
    assert "1 of 2 for a row of 64 tokens (--seq-length): sound.jsonl:2\n" in capsys.readouterr().out
    assert run(tmp_path / "none") == run(file, "--hf-model", tmp_path) == 2
    assert run(file, "--output", tmp_path / "none" / "report.html") == 2
    assert "the folder for the report does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(file, "--seq-length", "0")
