"""Test samples of WebDatasets: tokens and pixels equal to JSON lines, and bad samples."""

import base64
import json
from dataclasses import replace
from itertools import islice

from qwen3vl_bridge.data import Columns, DataError, JsonLines

import pytest
import torch

from tests.data.conftest import picture, same
from tests.data.energon.conftest import ASKED, CRUDE, FIRST_SAMPLE, keys, write_folder, write_tar
from tests.data.test_videos import ask, clip


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> dict[str, bytes]:
    """Return the contents of images and a video."""
    folder = tmp_path_factory.mktemp("media")
    paths = [picture(folder / f"{n}.png", 32 * (n + 1), 64, seed=n) for n in range(3)]
    paths.append(clip(folder / "clip.mkv", 10, size=(32, 64)))
    return {path.name: path.read_bytes() for path in paths}


@pytest.fixture(scope="session")
def samples(files) -> list:
    one, two, three = (files[f"{n}.png"] for n in range(3))
    uri = "data:image/png;base64," + base64.b64encode(two).decode()
    names, image = ["0.png", "1.png"], {"type": "image", "image": "png"}
    frames = {"type": "video", "video": names, "sample_fps": 2}
    turns = [{"from": "human", "value": "<image>\nand <image>?"}, {"from": "gpt", "value": "Both are."}]
    llava = {"conversations": turns, "images": names, "id": 7}
    return [
        ("text", {"json": {"messages": ASKED}}),
        ("image", {"png": one, "json": {"messages": ask(image)}}),
        ("images", {"json": {"messages": ask(image, {"type": "image", "image": "b.png"})}, "png": two, "b.png": one}),
        ("llava", {"json": llava, "0.png": two, "1.png": one}),
        ("sharegpt", {"json": {"conversations": [{"from": "human", "value": "Six?"}, turns[1]]}}),
        ("video", {"clip.mkv": files["clip.mkv"], "json": {"messages": ask({"type": "video", "video": "clip.mkv"})}}),
        ("frames", {"0.png": one, "1.png": one, "json": {"messages": ask(frames)}}),
        ("uri", {"json": {"messages": ask({"type": "image", "image": uri})}}),
        ("folder/whole", {"png": three, "json": {"messages": ask({"type": "image", "image": "whole.png"})}}),
    ]


@pytest.fixture
def expected(samples, encoder, tmp_path):
    encoded = {}
    for key, parts in samples:
        folder = tmp_path / "lines" / key
        folder.mkdir(parents=True)
        for name, contents in parts.items():
            if name != "json":
                (folder / name).write_bytes(contents)
                (folder / f"{folder.name}.{name}").write_bytes(contents)
        (folder / "train.jsonl").write_text(json.dumps(parts["json"]) + "\n")
        place = f"train-0.tar:{key}"
        encoded[place] = replace(encoder(JsonLines(folder / "train.jsonl")[0]), sample_id=place)
    return encoded


@pytest.mark.parametrize(
    "settings", [{"packing_buffer_size": 9}, {"pack": False}, {"pack": False, "micro_batch_size": 3}]
)
def test_energon_samples_equal_samples_of_json_lines(make, samples, expected, collator, tmp_path, settings):
    folder = write_folder(tmp_path / "wds", train=[samples])
    rows = list(islice(make(folder, **settings).stream("train"), 9 if "micro_batch_size" not in settings else 3))
    seen = set()
    for batch in rows:
        lay_out = collator.collate_padded if "pack" in settings else collator.collate_packed
        assert same(batch, lay_out([expected[sample_id] for sample_id in batch.sample_ids]))
        seen |= set(batch.sample_ids)
    assert seen == expected.keys()
    if "pack" not in settings:
        assert max(len(batch.sample_ids) for batch in rows) > 2


@pytest.mark.slow
def test_energon_applies_max_patches_padding_and_pixel_dtype_settings(make, samples, tmp_path):
    folder = write_folder(tmp_path / "wds", train=[samples])

    def most(**changes) -> int:
        batches = islice(make(folder, packing_buffer_size=9, on_long="drop", **changes).stream("train"), 9)
        return max(0 if batch.vision is None else len(batch.vision.pixel_values) for batch in batches)

    free = most()
    assert most(max_patches=free - 1) < free
    batch = next(make(folder, pad_to_multiple_of=16, pixel_dtype=torch.bfloat16).stream("train"))
    assert all(length % 16 == 0 for length in batch.layout.padded_lengths) and batch.input_ids.shape == (1, 256)
    assert batch.vision.pixel_values.dtype == torch.bfloat16


PNG = {"type": "image", "image": "png"}
BAD = [
    ({"json": b"{no"}, "found invalid JSON"),
    ({"json": {"messages": ask(PNG)}, "jpg": b"1"}, "found 'png', expected a file of .*bad.jpg"),
    ({"json": {"messages": ask({"type": "image", "image": "/etc/passwd"})}}, "the sample has none"),
    ({"json": {"messages": ask({"type": "image", "image": "jpg"})}, "jpg": b"broken"}, "does not decode as an image"),
    ({"txt": "x"}, "found the files txt, expected 'json' among them"),
    ({"json": {"messages": []}}, "expected an object with a list of messages"),
    ({"json": {"conversations": [{"from": "human", "value": "<image>"}], "images": []}}, "expected 0"),
]


@pytest.mark.one_case_in(5)
@pytest.mark.parametrize(("parts", "problem"), BAD)
def test_energon_bad_sample_raises_or_is_dropped_with_on_bad_drop(make, tmp_path, caplog, parts, problem):
    folder = write_folder(tmp_path / "wds", train=[[("good", {"json": {"messages": ASKED}}), ("bad", parts)]])
    with pytest.raises(DataError, match=rf"^train-0.tar:bad: .*{problem}"):
        list(islice(make(folder, pack=False).stream("train"), 2))
    batches = islice(make(folder, pack=False, on_bad="drop").stream("train"), 4)
    assert keys(batches) == ["good"] * 4
    assert "train-0.tar:bad" in caplog.text and "dropped, 3 so far" in caplog.text


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("pack", [True, False])
def test_energon_truncated_image_raises_or_is_dropped_with_on_bad_drop(make, tmp_path, caplog, pack):
    whole = picture(tmp_path / "a.jpg", 96, 96).read_bytes()
    broken = {"jpg": whole[: len(whole) // 2], "json": {"messages": ask({"type": "image", "image": "jpg"})}}
    folder = write_folder(tmp_path / "wds", train=[[("good", {"json": {"messages": ASKED}}), ("bad", broken)]])
    settings = {"pack": pack, "packing_buffer_size": 1 if pack else None}
    with pytest.raises(DataError, match=r"^train-0.tar:bad: .*does not decode"):
        list(islice(make(folder, **settings).stream("train"), 2))
    assert keys(islice(make(folder, on_bad="drop", **settings).stream("train"), 3)) == ["good"] * 3
    assert "dropped, 2 so far" in caplog.text


def test_energon_error_in_worker_raises_data_error_without_traceback(make, tmp_path):
    folder = write_folder(tmp_path / "wds", train=[[("bad", {"json": b"{no"})]])
    with pytest.raises(DataError, match=r"^train-0.tar:bad: file 'json': found invalid JSON") as error:
        next(make(folder, num_workers=1).stream("train"))
    assert "Traceback" not in str(error.value)


def test_energon_raises_if_all_samples_are_dropped(make, tmp_path):
    folder = write_folder(tmp_path / "wds", train=[[("a", {"json": b"{no"}), ("b", {"json": b"{no"})]])
    with pytest.raises(DataError, match="3 consecutive samples were dropped, expected a valid one"):
        next(make(folder, on_bad="drop").stream("train"))


def test_energon_columns_setting_reads_renamed_columns(make, files, samples, tmp_path):
    ours = dict(samples)["image"] | {"json": {"question": "Which digit?", "answer": "Seven.", "image": "png"}}
    theirs = ours | {"json": {"q": "Which digit?", "label": ["Seven."], "img": "png"}}
    rows = []
    for name, parts, columns in (("ours", ours, {}), ("theirs", theirs, {"image": "img", "question": "q"})):
        folder = write_folder(tmp_path / name, train=[[("a", parts)]])
        columns = Columns(**columns, answer="{label[0]}") if columns else Columns()
        stream = make(folder, pack=False, columns=columns).stream("train")
        rows.append(next(stream))
        assert ("of columns image='img'" in stream.fingerprint()["data"]) == bool(columns.settings())
        if columns.settings():
            with pytest.raises(DataError, match="found the keys q, label, img, expected"):
                next(make(folder, pack=False).stream("train"))
    assert same(*rows)


@pytest.mark.parametrize(("record", "setting", "time"), [
    ({"sample_fps": ["4"]}, None, "0.1"), ({"sample_fps": ["4"]}, 1.0, "0.1"), ({}, 1.0, "0.5"),
])  # fmt: skip
def test_energon_record_sample_fps_overrides_dataset_setting(make, files, encoder, tmp_path, record, setting, time):
    chat = {"messages": [{"role": "user", "content": "<video>Which?"}, {"role": "assistant", "content": "Seven."}]}
    parts = {"json": chat | {"videos": [["0.png", "0.png"]]} | record, "0.png": files["0.png"]}
    folder = write_folder(tmp_path / "wds", train=[[("a", parts)]])
    batch = next(make(folder, pack=False, sample_fps=setting).stream("train"))
    assert f"<{time} seconds>" in encoder.processor.tokenizer.decode(batch.input_ids[0])


def test_energon_raises_if_frame_list_has_no_sample_fps(make, files, tmp_path):
    record = {"messages": ask({"type": "video", "video": ["0.png"]})}
    folder = write_folder(tmp_path / "wds", train=[[("video", {"json": record, "0.png": files["0.png"]})]])
    with pytest.raises(DataError, match=r"^train-0.tar:video: .*'sample_fps' of a list of frames"):
        next(make(folder).stream("train"))


def test_energon_raises_if_dataset_is_missing_or_unsupported(make, tmp_path):
    yaml = "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\nfield_map:\n  text: txt\n"
    folder = write_folder(tmp_path / "wds", yaml=yaml, train=[[("a", {"txt": "a"})]])
    with pytest.raises(DataError, match="found a StandardWebdatasetFactory of TextSample, expected a CrudeWebdataset"):
        make(folder).stream("train")
    with pytest.raises(DataError, match=r"nowhere: energon cannot read it"):
        make(tmp_path / "nowhere").stream("train")
    with pytest.raises(DataError, match=r"wds: energon cannot read it"):
        make(write_folder(tmp_path / "wds", yaml=CRUDE, train=[[("a", {"txt": "a"})]])).stream("valid")


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (1, 3)])
def test_energon_raises_if_samples_are_fewer_than_ranks_times_workers(make, tmp_path, ranks, workers):
    folder = write_folder(tmp_path / "wds", train=[[(name, {"json": {"messages": ASKED}}) for name in "abc"]])
    (tmp_path / "part.yaml").write_text(FIRST_SAMPLE)
    few = make(tmp_path / "part.yaml", pack=False, num_workers=workers, num_val_workers=0)
    for rank in range(ranks):
        with pytest.raises(DataError, match=f"^{folder}: .* at least {ranks * max(1, workers)}: "):
            few.stream("train", dp_rank=rank, dp_size=ranks)
    assert keys(few.evaluation("train")) == ["a"]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_energon_error_names_truncated_tar_file(make, tmp_path, workers):
    samples = [(name, {"json": {"messages": ASKED}}) for name in "abcd"]
    folder = write_folder(tmp_path / "wds", train=[samples[:1], samples[1:]])
    write_tar(folder / "train-1.tar", samples[1:2])
    provider = make(folder, pack=False, num_workers=workers, on_bad="drop")
    for batches in (islice(provider.stream("train"), 4), provider.evaluation("train")):
        with pytest.raises(DataError, match=rf"^{folder}/train-1.tar: .* ValueError: Unexpected end of tar") as error:
            list(batches)
        assert "Traceback" not in str(error.value)
