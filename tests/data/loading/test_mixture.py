"""Several data sets in one run: rows and a resume as of one source, shares as they are set, and what is refused."""

import json
import re
from collections import Counter
from itertools import islice

from qwen3vl_bridge.cli.data import main
from qwen3vl_bridge.data import DataError, Mixture, one_pass
from qwen3vl_bridge.data.sources.mixture import mixed_sets

import pytest
import yaml
from qwen3vl_recipes import overrides, qwen3_vl_8b_sft_config

from ..conftest import built, dialogue, ids, llava_record, picture, reloaded, same, write

SIZES = {"letters": 40, "charts": 12, "talk": 5}


@pytest.fixture(scope="module")
def folders(train_file, tmp_path_factory):
    """A folder for each of three sets: our own records, LLaVA's as a list, and text; the first has validation data."""
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
def test_an_epoch_has_each_sample_as_often_as_said_and_names_its_set(make, sets, pack):
    rows = make(sets(**EPOCHS), pack=pack).rows("train")
    seen = Counter(name for batch in one_pass(rows) for name in batch.sample_ids)
    found = {name: sorted(times for sample, times in seen.items() if sample.startswith(f"{name}/")) for name in SIZES}
    assert found == {"letters": [1] * 10, "charts": [1] * 12, "talk": [3] * 5}
    assert "talk/train.jsonl:1" in seen and "charts/charts.json[0]" in seen


def test_weights_are_shares_of_the_samples(make, sets):
    weights = {"letters": {"weight": 1}, "charts": {"weight": 0.5}, "talk": {"weight": 0.5}}
    rows = make(sets(**weights), pack=False).rows("train")
    for first in (0, 57, 114):  # 57 samples an epoch, as many as there are
        seen = Counter(rows[number].samples[0].sample_id.partition("/")[0] for number in range(first, first + 57))
        assert seen["letters"] in (28, 29) and seen["charts"] in (14, 15) and seen["talk"] in (14, 15)


@pytest.mark.parametrize("settings", [{}, {"pack": False}, {"pad_to_multiple_of": 8}])
def test_rows_are_the_same_at_any_number_of_ranks_and_workers_and_after_a_resume(make, sets, settings):
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


def test_megatron_bridge_reads_the_same_rows_also_shared_by_context_parallel_ranks(make, sets):
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


def test_a_position_in_another_mixture_is_refused_and_one_in_moved_sets_is_not(make, sets, folders, tmp_path):
    state = make(sets(**EPOCHS)).stream("train").state_dict()
    with pytest.raises(ValueError, match=r"other data: found data .*\(20 an epoch\)"):
        make(sets(**{**EPOCHS, "letters": {"epochs": 0.5}})).stream("train").load_state_dict(state)
    (tmp_path / "moved").symlink_to(folders)
    moved = [{**one, "path": one["path"].replace(str(folders), str(tmp_path / "moved"))} for one in sets(**EPOCHS)]
    make(moved).stream("train").load_state_dict(state)


def test_rows_are_packed_before_training(make, sets, checkpoint, tmp_path, capsys):
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
    with pytest.raises(ValueError, match="does not fit this run, which has data"):
        make(sets(**EPOCHS), train_packing=str(rows)).rows("train")
    assert main(["inspect", *common, "--samples", "2", "--start", "51", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["sample_id"] for one in found["samples"]] == ["charts/charts.json[11]", "talk/train.jsonl:1"]
    assert main(["inspect", "--mixture", str(tmp_path / "no.yaml"), "--hf-model", str(checkpoint)]) == 2
    assert "--mixture: dataset.mixture is" in capsys.readouterr().err


def test_a_bad_sample_is_named_with_its_set(make, folders, tmp_path):
    write(tmp_path / "bad.jsonl", [{"messages": [{"role": "user", "content": [{"type": "image", "image": "no.png"}]}]}])
    provider = make([{"path": str(tmp_path / "bad.jsonl")}, {"path": str(folders / "talk"), "epochs": 0.2}])
    with pytest.raises(DataError, match=r"^bad/bad.jsonl:1: message 1, part 1: 'no.png' .*there is no such file"):
        for _ in provider.stream("train"):
            pass


def test_sets_have_roots_and_schemas_of_their_own_or_the_data_sets(tmp_path):
    setting = [{"path": "a", "media_root": "/pictures", "schema_adapter": "cord_v2"}, {"path": "b"}]
    first, second = mixed_sets(setting, media_root="/other")
    assert (first.media_root, first.schema_adapter) == ("/pictures", "cord_v2")
    assert (second.media_root, second.schema_adapter) == ("/other", None)


@pytest.mark.parametrize(("path", "name"), [
    ("/data/llava/train.jsonl", "llava"), ("/data/llava", "llava"), ("charts.json", "charts"),
    ("/data/docs/data/train-*.parquet", "docs"), ("hf://me/digits#train", "me/digits#train"),
])  # fmt: skip
def test_sets_are_called_by_their_path(path, name):
    assert mixed_sets([{"path": path}])[0].name == name


@pytest.mark.parametrize(("mixture", "message"), [
    ([{"path": "a", "weight": 0}], r"dataset.mixture\[0\].weight is 0, expected a number above 0"),
    ([{"path": "a"}, {"path": "b", "epochs": -1}], r"dataset.mixture\[1\].epochs is -1, expected a number above 0"),
    ([{"path": "a", "weight": True}], "weight is True, expected a number above 0"),
    ([{"path": "a", "weight": float("nan")}], "weight is nan, expected a number above 0"),
    ([{"path": "a", "weight": 1, "epochs": 1}], "has weight 1 and epochs 1, expected one of the two"),
    ([{"path": "a", "weight": 1}, {"path": "b"}], "has weights, but none for b; expected `weight` for all sets"),
    ([{"path": "a", "ratio": 1}], r"has 'ratio', which is no setting of a set; expected any of path, name, weight"),
    ([{"path": "/x/a"}, {"path": "/y/a"}], "has 2 sets that are called 'a'; expected a `name` for each"),
    ([{"weight": 1}], "expected a `path`"), ([{"path": "a", "schema_adapter": "cord"}], "cord"),
    ([], r"has \[\], expected a list of sets"),
    ("/nowhere/mix.yaml", "is '/nowhere/mix.yaml', which cannot be read .* expected a YAML file"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(make, mixture, message):
    with pytest.raises(ValueError, match=message):
        make(mixture)


@pytest.mark.parametrize(("changes", "message"), [
    ({"path": "x"}, "found data for train in 'x' by dataset.path and .* by dataset.mixture, expected one of these"),
    ({"train_path": "x"}, "found data for train in 'x' by dataset.train_path and .*talk'.* by dataset.mixture"),
    ({"valid_path": "x"}, "found data for valid in 'x' by dataset.valid_path and .*talk'.* by dataset.mixture"),
    ({"streaming": True}, "mixture is .*, but streaming is on; it needs samples by number"),
])  # fmt: skip
def test_a_mixture_beside_what_it_replaces_is_refused(make, sets, changes, message):
    with pytest.raises(ValueError, match=message):
        make(sets(talk={}), **changes)


def test_an_empty_set_is_refused(make, sets, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=re.escape("empty.jsonl: found no lines")):
        make([*sets(talk={}), {"path": str(tmp_path / "empty.jsonl")}]).rows("train")
    with pytest.raises(DataError, match="none: found no conversations"):
        Mixture(["none"], [[]])
    with pytest.raises(ValueError, match=r"epochs that take 0\.05 of 5 samples"):
        make(sets(talk={"epochs": 0.01})).rows("train")


def test_a_mixture_is_set_by_words_and_by_yaml(sets, tmp_path):
    cfg = qwen3_vl_8b_sft_config()
    overrides.apply(cfg, ["dataset.mixture=[{path: /a, weight: 2}, {path: /b, weight: 0.5, name: c}]"])
    assert cfg.dataset.mixture == [{"path": "/a", "weight": 2}, {"path": "/b", "weight": 0.5, "name": "c"}]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"dataset": {"mixture": sets(talk={"epochs": 2})}}))
    overrides.apply(cfg, files=[tmp_path / "run.yaml"])
    assert [one.epochs for one in cfg.dataset.mixed("train")] == [2]


def test_what_is_left_out_is_counted_by_set(make, sets, tmp_path):
    broken = picture(tmp_path / "broken.jpg", 64, 64)
    broken.write_bytes(broken.read_bytes()[:-400])
    parts = [{"type": "image", "image": "broken.jpg"}]
    asked = dialogue(parts, "7")
    write(tmp_path / "bad.jsonl", [{"messages": []}, {"messages": asked}, {"messages": []}])
    rows = make([*sets(talk={"epochs": 2}), {"path": str(tmp_path / "bad.jsonl")}], on_bad="drop", pack=False)
    stream, epoch = rows.stream("train"), 2 * 5 + 1
    batches = [next(stream) for _ in range(2 * epoch)]
    assert batches[epoch - 1].dropped == (0, 2) and batches[-1].dropped == (0, 4)
    assert [batch.unreadable for batch in batches if batch.unreadable] == [(0, 1)] * 2
