"""Test mixtures of data sets: rows, resume, shares and invalid settings."""

import json
import re
from collections import Counter
from itertools import islice

from qwen3vl_bridge.cli.data import main
from qwen3vl_bridge.data import DataError, Mixture, one_pass
from qwen3vl_bridge.data.mixture import read_mixture

import pytest
import yaml
from qwen3vl_recipes import overrides, qwen3_vl_8b_sft_config

from tests.data.conftest import built, dialogue, ids, llava_record, picture, reloaded, same, write

SIZES = {"letters": 40, "charts": 12, "talk": 5}


@pytest.fixture(scope="module")
def folders(train_file, tmp_path_factory):
    """Write three data sets: our format with validation data, a list of LLaVA records, and text."""
    root = tmp_path_factory.mktemp("mixture")
    (root / "letters").symlink_to(train_file.parent)
    for name in ("a.png", "b.png"):
        picture(root / "charts" / name, 32, 32)
    records = [llava_record(number) for number in range(SIZES["charts"])]
    (root / "charts/charts.json").write_text(json.dumps(records))
    talk = [{"messages": dialogue(f"{n}?", f"{n}!")} for n in range(SIZES["talk"])]
    write(root / "talk/train.jsonl", talk)
    write(root / "talk/valid.jsonl", talk[:2])
    return root


@pytest.fixture
def sets(folders):
    def sets(**shares):
        places = {"letters": "letters/train.jsonl", "charts": "charts/charts.json", "talk": "talk"}
        return [{"path": str(folders / places[name]), "name": name, **share} for name, share in shares.items()]

    return sets


@pytest.fixture
def make(make_provider):
    def make(mixture, **changes):
        return make_provider(mixture=mixture, **({} if "train_packing" in changes else {"window_size": 8}) | changes)

    return make


EPOCHS = {"letters": {"epochs": 0.25}, "charts": {}, "talk": {"epochs": 3}}


@pytest.mark.parametrize("pack", [True, False])
def test_mixture_epochs_setting_repeats_samples_of_data_set(make, sets, pack):
    rows = make(sets(**EPOCHS), pack=pack).rows("train")
    seen = Counter(name for batch in one_pass(rows) for name in batch.sample_ids)
    found = {name: sorted(times for sample, times in seen.items() if sample.startswith(f"{name}/")) for name in SIZES}
    assert found == {"letters": [1] * 10, "charts": [1] * 12, "talk": [3] * 5}
    assert "talk/train.jsonl:1" in seen and "charts/charts.json[0]" in seen


def test_mixture_weights_are_shares_of_samples_in_each_epoch(make, sets):
    weights = {"letters": {"weight": 1}, "charts": {"weight": 0.5}, "talk": {"weight": 0.5}}
    rows = make(sets(**weights), pack=False).rows("train")
    for first in (0, 57, 114):  # 57 samples an epoch, as many as there are
        seen = Counter(rows[number].samples[0].sample_id.partition("/")[0] for number in range(first, first + 57))
        assert seen["letters"] in (28, 29) and seen["charts"] in (14, 15) and seen["talk"] in (14, 15)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("settings", [{}, {"pack": False}, {"pad_to_multiple_of": 8}])
def test_mixture_rows_do_not_depend_on_ranks_workers_or_resume(make, sets, settings):
    provider, number = make(sets(**EPOCHS), **settings), 24
    whole = list(islice(provider.stream("train"), number))
    for ranks, workers in ((1, 2), (2, 0), (4, 0)):
        streams = [
            make(sets(**EPOCHS), num_workers=workers, **settings).stream("train", dp_rank=rank, dp_size=ranks)
            for rank in range(ranks)
        ]
        assert ids(next(streams[place % ranks]) for place in range(number)) == ids(whole)
    stream = provider.stream("train")
    for stop in range(number):
        resumed = provider.stream("train")
        resumed.load_state_dict(reloaded(stream.state_dict()))
        assert same(next(resumed), whole[stop]) and same(next(stream), whole[stop])


def test_mixture_with_cp_and_balancing_keeps_rows_of_global_batches(make, sets):
    provider = make(sets(**EPOCHS), balance_over=4)
    train, valid, test = built(provider, 16, 2, dp=2, cp=2)
    expected = make(sets(**EPOCHS), pad_to_multiple_of=4).rows("train")
    for first in range(0, 16, 4):
        found = [[sample.sample_id for sample in train[number].samples] for number in range(first, first + 4)]
        assert sorted(found) == sorted(
            [sample.sample_id for sample in expected[number].samples] for number in range(first, first + 4)
        )
    assert [sample.sample_id for sample in valid[0].samples] == ["talk/valid.jsonl:1", "talk/valid.jsonl:2"]
    assert test is None and provider.position["data"]["samples"] == sum(SIZES.values())


def test_mixture_resume_raises_if_epochs_setting_changed(make, sets, folders, tmp_path):
    state = make(sets(**EPOCHS)).stream("train").state_dict()
    with pytest.raises(ValueError, match=r"other data: found data .*\(20 an epoch\)"):
        make(sets(**{**EPOCHS, "letters": {"epochs": 0.5}})).stream("train").load_state_dict(state)
    (tmp_path / "moved").symlink_to(folders)
    moved = [{**one, "path": one["path"].replace(str(folders), str(tmp_path / "moved"))} for one in sets(**EPOCHS)]
    make(moved).stream("train").load_state_dict(state)


def test_mixture_opened_twice_logs_sample_shares_once(make, sets, caplog):
    caplog.set_level("INFO", "qwen3vl_bridge")
    mixed = [{**one, "name": f"{one['name']}_opened_twice"} for one in sets(**EPOCHS)]
    for _ in range(2):
        make(mixed).rows("train")
    assert [line.partition(" samples")[0] for line in caplog.messages] == ["train: letters_opened_twice: 40"]


def test_mixture_rows_can_be_packed_offline(make, sets, checkpoint, tmp_path, capsys):
    whole = {**EPOCHS, "letters": {"epochs": 1}}
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump(sets(**whole)))
    common = ["--mixture", str(tmp_path / "mix.yaml"), "--hf-model", str(checkpoint), "--no-progress"]
    rows = tmp_path / "rows"
    assert main(["pack", *common, "--seq-length", "256", "--output", str(rows), "--workers", "2", "--json"]) == 0
    assert "talk: 5 samples, 3 times an epoch" in (printed := capsys.readouterr()).err
    assert json.loads(printed.out)["samples"] == 57
    packed = make(str(tmp_path / "mix.yaml"), train_packing=str(rows)).rows("train")
    seen = Counter(name for batch in one_pass(packed) for name in batch.sample_ids)
    assert seen == Counter(name for batch in one_pass(make(sets(**whole)).rows("train")) for name in batch.sample_ids)
    with pytest.raises(ValueError, match="was packed for another run: this run has data"):
        make(sets(**EPOCHS), train_packing=str(rows)).rows("train")
    assert main(["inspect", *common, "--samples", "2", "--start", "51", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["sample_id"] for one in found["samples"]] == ["charts/charts.json[11]", "talk/train.jsonl:1"]
    assert main(["inspect", "--mixture", str(tmp_path / "no.yaml"), "--hf-model", str(checkpoint)]) == 2
    assert "--mixture: dataset.mixture is" in capsys.readouterr().err


def test_mixture_error_names_data_set_of_bad_record(make, folders, tmp_path):
    write(tmp_path / "bad.jsonl", [{"messages": [{"role": "user", "content": [{"type": "image", "image": "no.png"}]}]}])
    provider = make([{"path": str(tmp_path / "bad.jsonl")}, {"path": str(folders / "talk"), "epochs": 0.2}])
    with pytest.raises(DataError, match=r"^bad/bad.jsonl:1: message 1, part 1: 'no.png' .*does not exist"):
        for _ in provider.stream("train"):
            pass


def test_mixture_data_set_overrides_common_media_root_and_schema(tmp_path):
    setting = [{"path": "a", "media_root": "/pictures", "schema_adapter": "cord_v2"}, {"path": "b"}]
    first, second = read_mixture(setting, media_root="/other")
    assert (first.media_root, first.schema_adapter) == ("/pictures", "cord_v2")
    assert (second.media_root, second.schema_adapter) == ("/other", None)


@pytest.mark.parametrize(("path", "name"), [
    ("/data/llava/train.jsonl", "llava"), ("/data/llava", "llava"), ("charts.json", "charts"),
    ("/data/docs/data/train-*.parquet", "docs"), ("hf://me/digits#train", "me/digits#train"),
])  # fmt: skip
def test_mixture_data_set_without_name_is_named_after_its_path(path, name):
    assert read_mixture([{"path": path}])[0].name == name


@pytest.mark.parametrize(("mixture", "message"), [
    ([{"path": "a", "weight": 0}], r"dataset.mixture\[0\].weight is 0, expected a number above 0"),
    ([{"path": "a"}, {"path": "b", "epochs": -1}], r"dataset.mixture\[1\].epochs is -1, expected a number above 0"),
    ([{"path": "a", "weight": True}], "weight is True, expected a number above 0"),
    ([{"path": "a", "weight": float("nan")}], "weight is nan, expected a number above 0"),
    ([{"path": "a", "weight": 1, "epochs": 1}], "sets both weight 1 and epochs 1; set only"),
    ([{"path": "a", "weight": 1}, {"path": "b"}], "sets `weight` for some data sets, but not for b; set it"),
    ([{"path": "a", "ratio": 1}], r"has 'ratio', which is not a setting of a data set; expected any of path"),
    ([{"path": "/x/a"}, {"path": "/y/a"}], "has 2 data sets with the name 'a'; set a `name` for each"),
    ([{"weight": 1}], "expected a `path`"), ([{"path": "a", "schema_adapter": "cord"}], "cord"),
    ([], r"has \[\], expected a list of data sets"),
    ("/nowhere/mix.yaml", "is '/nowhere/mix.yaml', which cannot be read .* expected a YAML file"),
])  # fmt: skip
def test_mixture_raises_if_settings_are_invalid(make, mixture, message):
    with pytest.raises(ValueError, match=message):
        make(mixture)


@pytest.mark.parametrize(("changes", "message"), [
    ({"path": "x"}, "the split train is set to 'x' by dataset.path and .* by dataset.mixture; use only one of these"),
    ({"train_path": "x"}, "the split train is set to 'x' by dataset.train_path and .*talk'.* by dataset.mixture"),
    ({"valid_path": "x"}, "the split valid is set to 'x' by dataset.valid_path and .*talk'.* by dataset.mixture"),
    ({"streaming": True}, "mixture is .*, but streaming is on, and this setting needs random access"),
])  # fmt: skip
def test_mixture_raises_if_data_path_or_streaming_is_also_set(make, sets, changes, message):
    with pytest.raises(ValueError, match=message):
        make(sets(talk={}), **changes)


def test_mixture_raises_if_data_set_is_empty_or_epoch_has_no_samples(make, sets, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=re.escape("empty.jsonl: found no lines")):
        make([*sets(talk={}), {"path": str(tmp_path / "empty.jsonl")}]).rows("train")
    with pytest.raises(DataError, match="none: found no conversations"):
        Mixture(["none"], [[]])
    with pytest.raises(ValueError, match=r"an epoch would take 0\.05 of 5 samples"):
        make(sets(talk={"epochs": 0.01})).rows("train")


def test_mixture_is_set_by_command_line_override_or_yaml_file(sets, tmp_path):
    cfg = qwen3_vl_8b_sft_config()
    overrides.apply(cfg, ["dataset.mixture=[{path: /a, weight: 2}, {path: /b, weight: 0.5, name: c}]"])
    assert cfg.dataset.mixture == [{"path": "/a", "weight": 2}, {"path": "/b", "weight": 0.5, "name": "c"}]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"dataset": {"mixture": sets(talk={"epochs": 2})}}))
    overrides.apply(cfg, files=[tmp_path / "run.yaml"])
    assert [one.epochs for one in cfg.dataset.mixture_sets("train")] == [2]


def test_mixture_counts_dropped_samples_per_data_set(make, sets, tmp_path):
    broken = picture(tmp_path / "broken.jpg", 64, 64)
    broken.write_bytes(broken.read_bytes()[:-400])
    parts = [{"type": "image", "image": "broken.jpg"}]
    asked = dialogue(parts, "7")
    write(tmp_path / "bad.jsonl", [{"messages": []}, {"messages": asked}, {"messages": []}])
    rows = make([*sets(talk={"epochs": 2}), {"path": str(tmp_path / "bad.jsonl")}], on_bad="drop", pack=False)
    stream, epoch = rows.stream("train"), 2 * 5 + 1
    batches = [next(stream) for _ in range(2 * epoch)]
    assert batches[epoch - 1].dropped == (0, 2) and batches[-1].dropped == (0, 2)
    assert [batch.unreadable for batch in batches if batch.unreadable] == [(0, 1)] * 2
