"""Test rows packed before training: the same samples as packed during training, and errors for other rules."""

import copy
import json
import logging
import pickle
import shutil
from dataclasses import replace
from itertools import islice

from qwen3vl_bridge.cli.data import main
from qwen3vl_bridge.data import DataError, Encoder, JsonLines, PackedRows, SampleFilter, Samples, offline_packing
from qwen3vl_bridge.data.loading import BatchStream, RowDataset, RowSettings, one_pass
from qwen3vl_bridge.data.offline_packing import pack
from qwen3vl_bridge.data.samples import Sizes

import numpy as np
import pytest

from tests.data.conftest import picture, segments, write


@pytest.fixture(scope="module")
def packed(tmp_path_factory, train_file, encoder, collator) -> PackedRows:
    folder = tmp_path_factory.mktemp("packed") / "rows"
    samples = Samples(JsonLines(train_file), SampleFilter(encoder, limit=256))
    pack(RowDataset(samples, RowSettings(collator, seed=0)), folder)
    return PackedRows(folder)


def samples_of(batch) -> dict[str, tuple]:
    """Return tokens and mask of each sample of a packed row."""
    return {
        name: tuple(tuple(whole.flatten()[tokens].tolist()) for whole in (batch.input_ids, batch.loss_mask))
        for name, tokens in segments(batch)
    }


def test_offline_packed_rows_contain_each_sample_once(packed, make_rows):
    expected = {
        name: tokens for batch in one_pass(make_rows(seed=None)()) for name, tokens in samples_of(batch).items()
    }
    batches = list(one_pass(make_rows(packed=packed)()))
    found = {name: tokens for batch in batches for name, tokens in samples_of(batch).items()}
    assert sum(len(batch.sample_ids) for batch in batches) == 40 == len(found)
    for name, (tokens, mask) in expected.items():  # rows differ in what a sample is padded by at their end
        assert found[name][0][: len(tokens)] == tokens[: len(found[name][0])]
        assert sum(found[name][1]) == sum(mask)


@pytest.mark.parametrize("workers", [0, 2])
def test_offline_packing_stores_measured_size_of_each_sample(tmp_path, make_rows, packed, workers):
    rows = make_rows()()
    report = pack(rows, tmp_path / "rows", workers=workers)
    again = PackedRows(tmp_path / "rows")
    fresh = make_rows()().samples
    assert [again.size(sample) for sample in range(40)] == [fresh.size(sample) for sample in range(40)]
    assert (report.samples, report.dropped, report.truncated, report.rows) == (40, 0, 0, len(again))
    assert report.tokens == sum(again.size(sample).tokens for sample in range(40))
    assert report.patches == sum(again.size(sample).patches for sample in range(40))
    assert report.fill == report.tokens / (256 * len(again)) and report.patch_fill is None
    assert again.digest == packed.digest
    pack(make_rows(seed=1)(), tmp_path / "other")
    assert PackedRows(tmp_path / "other").digest != packed.digest


def test_offline_packed_rows_are_read_without_measuring_samples(packed, make_rows, monkeypatch):
    rows = make_rows(packed=packed)()
    monkeypatch.setattr(SampleFilter, "measure", lambda *_: pytest.fail("measured"))
    assert len([rows[number] for number in range(10)]) == 10


@pytest.mark.slow
def test_offline_packed_rows_are_reshuffled_each_epoch(packed, make_rows):
    make = make_rows(packed=packed)
    whole, per_epoch = BatchStream(make()), len(packed)
    seen = [next(whole).sample_ids for _ in range(3 * per_epoch)]
    epochs = [seen[first : first + per_epoch] for first in range(0, 3 * per_epoch, per_epoch)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2]) and epochs[0] != epochs[1] != epochs[2]
    for done in (1, per_epoch, per_epoch + 3):
        before = BatchStream(make())
        for _ in range(done):
            next(before)
        shares = [BatchStream(make(), dp_rank=rank, dp_size=2, num_workers=1) for rank in range(2)]
        for share in shares:
            share.load_state_dict(before.state_dict())
        rest = [batch.sample_ids for pair in islice(zip(*shares, strict=True), 4) for batch in pair]
        assert rest == seen[done : done + 8]


def test_offline_packed_rows_raise_if_settings_or_data_differ(packed, make_rows, train_file, tmp_path):
    for settings, message in (
        ({"seq_length": 512}, r"seq_length 512 \(packed with 256\). Pack again$"),
        ({"multiple": 8}, r" 8 \(packed with 1\). Pack again with --pad-to-multiple-of 8"),
        ({"most_patches": 900}, r"most_patches 900 \(packed with None\). Pack again$"),
    ):
        with pytest.raises(ValueError, match=f"was packed for another run: .*{message}"):
            make_rows(packed=packed, **settings)()
    other = write(tmp_path / "train.jsonl", [json.loads(line) for line in train_file.read_text().splitlines()[1:]])
    with pytest.raises(ValueError, match=r"samples 39 \(packed with 40\), data .*\. Pack again$"):
        make_rows(packed=packed, path=other)()
    with pytest.raises(ValueError, match="the rows are packed already"):
        pack(make_rows(packed=packed)(), tmp_path / "again")


def test_rows_packed_with_on_bad_error_are_accepted_with_on_bad_drop(packed, make_rows, tmp_path):
    for settings in ({"on_long": "drop", "on_bad": "drop"}, {"on_long": "truncate"}):
        found = [batch.sample_ids for batch in one_pass(make_rows(packed=packed, **settings)())]
        assert found == [batch.sample_ids for batch in one_pass(make_rows(packed=packed)())]
    pack(make_rows(on_long="drop", on_bad="drop")(), tmp_path / "dropping")
    with pytest.raises(ValueError, match=r"on_long error \(packed with drop\), on_bad error \(packed with drop\)"):
        make_rows(packed=PackedRows(tmp_path / "dropping"))()


def test_offline_packed_rows_raise_if_chat_template_differs(packed, make_rows, processor, collator, train_file):
    other = copy.deepcopy(processor)
    other.chat_template = other.chat_template.replace("<|im_start|>", "<|im_start|>Look! ")
    samples = Samples(JsonLines(train_file), SampleFilter(Encoder(other), limit=256), Sizes(known=packed.size))
    with pytest.raises(ValueError, match="was packed for another run: this run has encoding"):
        RowDataset(samples, RowSettings(collator, seed=0, packed=packed))
    stream = BatchStream(RowDataset(samples, RowSettings(collator, seed=0, window_size=8)))
    with pytest.raises(ValueError, match="position belongs to other data: found encoding"):
        stream.load_state_dict(BatchStream(make_rows()()).state_dict())


def test_offline_packed_stream_rejects_state_dict_of_online_packing(packed, make_rows):
    state = BatchStream(make_rows()()).state_dict()
    with pytest.raises(ValueError, match=f"found window_size None, expected 8; packed {packed.digest}, expected None"):
        BatchStream(make_rows(packed=packed)()).load_state_dict(state)


def test_packed_rows_raise_if_folder_is_damaged(packed, tmp_path):
    def damaged(name: str, contents: bytes | None):
        folder = tmp_path / "damaged"
        folder.mkdir(exist_ok=True)
        for file in packed.folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        if contents is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(contents)
        with pytest.raises(DataError) as caught:
            PackedRows(folder)
        return str(caught.value)

    whole = {file.name: file.read_bytes() for file in packed.folder.iterdir()}
    for name, contents in whole.items():
        for wrong in (None, b"", contents[: len(contents) // 2]):
            assert "cannot read the packed rows" in damaged(name, wrong)
    assert "checksum of the arrays differs" in damaged("starts.npy", whole["rows.npy"])
    rows = bytearray(whole["rows.npy"])
    rows[-8] ^= 1  # another sample in the last place
    assert "checksum of the arrays differs" in damaged("rows.npy", bytes(rows))
    assert "cannot read the packed rows" in damaged("packing.json", b"[]")


def test_packed_rows_unpickled_read_same_rows(packed):
    assert len(pickle.dumps(packed)) < 500
    assert pickle.loads(pickle.dumps(packed))[0] == packed[0]


def test_offline_packing_report_counts_dropped_and_truncated_samples(make_rows, tmp_path):
    lengths = sorted(make_rows()().samples.size(sample).tokens for sample in range(40))
    limit = lengths[30]
    for policy in ("drop", "truncate"):
        make = make_rows(seq_length=limit, on_long=policy)
        expected = make()
        sizes = [expected.samples.size(sample) for sample in range(40)]
        report = pack(make(), tmp_path / policy, workers=1)
        assert (report.dropped, report.truncated) == (
            expected.samples.sample_filter.num_dropped,
            expected.samples.sample_filter.num_truncated,
        )
        assert report.dropped or report.truncated
        packed = PackedRows(tmp_path / policy)
        assert sorted(np.concatenate([packed[row] for row in range(len(packed))])) == [
            sample for sample, size in enumerate(sizes) if size.tokens
        ]
    with pytest.raises(
        DataError, match=r"train.jsonl:\d+: found a sample of \d+ tokens, expected at most 8 \(dataset.seq_length"
    ):
        pack(make_rows(seq_length=8)(), tmp_path / "none", workers=1)
    with pytest.raises(DataError, match="all samples are bad or too long"):
        pack(make_rows(seq_length=8, on_long="drop")(), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("workers", [0, 3])
def test_offline_packing_logs_dropped_samples_once_over_all_workers(make_rows, tmp_path, monkeypatch, workers):
    monkeypatch.setattr(offline_packing, "_CHUNK", 2)  # so that every process drops some
    said = tmp_path / "said"
    handler = logging.FileHandler(said)  # appends, from any process
    logger = logging.getLogger("qwen3vl_bridge.data.samples")
    logger.addHandler(handler)
    try:
        for part in ("one", "other"):  # a packing counts for itself
            report = pack(make_rows(seq_length=64, on_long="drop")(), tmp_path / part, workers=workers)
            lines = said.read_text().splitlines()
            said.write_text("")
            numbers = sorted(int(line.partition("dropped, ")[2].split()[0]) for line in lines)
            expected = [number for number in range(1, report.dropped + 1) if number <= 4 or number.bit_count() == 1]
            assert report.dropped > 8 and numbers == expected
    finally:
        logger.removeHandler(handler)
        handler.close()


@pytest.mark.parametrize("on_bad", ["error", "drop"])
def test_offline_packed_row_raises_if_image_size_changed(make_rows, tmp_path, on_bad):
    path = picture(tmp_path / "a.png", 32, 32)
    asked = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, {"role": "assistant", "content": "7"}]
    file = write(tmp_path / "train.jsonl", [{"messages": asked}])
    pack(make_rows(path=file, on_bad=on_bad)(), tmp_path / "rows")
    make = make_rows(path=file, on_bad=on_bad, packed=PackedRows(tmp_path / "rows"))
    picture(path, 32, 32, seed=1)
    assert len(make()[0].samples) == 1
    picture(path, 96, 64)
    with pytest.raises(DataError, match=r"train.jsonl:1: found \d+ tokens and \d+ patches, but its row was packed"):
        make()[0]


def test_offline_packed_rows_respect_padded_length_and_max_patches(make_rows, tmp_path):
    most = max(make_rows()().samples.size(sample).patches for sample in range(40))
    make = make_rows(most_patches=most, multiple=16)
    report = pack(make(), tmp_path / "rows")
    packed = PackedRows(tmp_path / "rows")
    for row in range(len(packed)):
        sizes = [packed.size(sample) for sample in packed[row]]
        assert sum(-(-size.tokens // 16) * 16 for size in sizes) <= 256
        assert sum(size.patches for size in sizes) <= most
    assert report.patch_fill == report.patches / (most * len(packed))
    rows = make_rows(most_patches=most, multiple=16, packed=packed)()
    assert_row_of(packed, rows, next(BatchStream(rows)))


def assert_row_of(packed, rows, batch):
    names = [sorted(map(rows.samples.source.sample_id, packed[row])) for row in range(len(packed))]
    assert sorted(batch.sample_ids) in names


@pytest.fixture
def command(checkpoint, train_file) -> list[str]:
    return ["pack", "--data", str(train_file), "--hf-model", str(checkpoint), "--seq-length", "256", "--workers", "0"]


def test_pack_command_writes_rows_for_training(command, checkpoint, tmp_path, capsys, packed, train_file):
    from qwen3vl_bridge import Qwen3VLConversationProvider

    output = tmp_path / "out"
    assert main([*command, "--output", str(output), "--seed", "0"]) == 0
    assert f"40, of them 0 dropped and 0 cut\nrows           {len(packed)}, " in capsys.readouterr().out
    provider = Qwen3VLConversationProvider(
        train_path=str(train_file), hf_processor_path=str(checkpoint), seq_length=256, train_packing=str(output),
        balance_over=2,
    )  # fmt: skip
    provider.finalize()
    assert provider.rows("train").plan.end_of_epoch() == len(packed) == len(PackedRows(output))
    assert_row_of(packed, provider.rows("train"), next(provider.stream("train", dp_rank=1, dp_size=2)))
    assert main([*command, "--output", str(output)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*command, "--output", str(output), "--overwrite", "--json", "--seed", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == len(PackedRows(output))
    (output / "diary.txt").write_text("mine")
    assert main([*command, "--output", str(output), "--overwrite"]) == 2
    said = capsys.readouterr().err
    assert "holds 1 files that are not part of our packing, which would be deleted: diary.txt;" in said
    for wrong in (
        replace(provider, seq_length=512),
        replace(provider, answers="last"),
        replace(provider, vision=replace(provider.vision, image_max_pixels=64 * 64)),
    ):
        for refusing in (wrong.check_samples, lambda wrong=wrong: wrong.rows("train")):
            with pytest.raises(ValueError, match="was packed for another run: this run has"):
                refusing()
    provider.check_samples()
    with pytest.raises(ValueError, match=r"to a multiple of 4 \(packed with 1\)"):
        provider.check_samples(cp_size=2)
    for changes, message in (
        ({"pack": False, "train_packing": None}, "balance_over is 2, but pack is off"),
        ({"window_size": 8}, "window_size is 8, but train_packing already sets the rows"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(provider, **changes).finalize()


def test_pack_command_exits_with_code_2_and_keeps_files_if_options_are_invalid(command, tmp_path, capsys):
    output = ["--output", str(tmp_path / "out")]
    assert main([*command, *output, "--image-min-pixels", "900000", "--image-max-pixels", "100"]) == 2
    assert "reduce image_min_pixels or increase image_max_pixels" in capsys.readouterr().err
    assert main([*command, *output, "--pad-to-multiple-of", "7"]) == 2
    assert "seq_length is 256, expected a multiple of 7" in capsys.readouterr().err
    assert main([*command, *output, "--no-preserve-thinking"]) == 2
    assert "preserve_thinking is False, but the chat template ignores it" in capsys.readouterr().err
    assert main([*command, *output, "--seed", str(2**70)]) == 0  # as good as any
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "diary.txt").write_text("mine")
    assert main([*command, *output, "--overwrite"]) == 2
    assert "does not hold packed rows" in capsys.readouterr().err
    assert (tmp_path / "out" / "diary.txt").read_text() == "mine"
