"""The examples of docs/data.md: its records are read, its commands run, its settings exist."""

import json
import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

from qwen3vl_bridge.cli import data as command
from qwen3vl_bridge.data import DataError, open_source
from qwen3vl_bridge.data.sources.mixture import mixed_sets

import pytest
from qwen3vl_recipes import paths, qwen3_vl_8b_sft_config
from qwen3vl_recipes.overrides import apply

from tests.receipts import receipts

from .conftest import picture, write
from .media.test_video import clip

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text("utf-8")
THINKING = Path(__file__).parent / "processing" / "thinking_template.jinja"
BLOCKS = re.findall(r"```(json|bash|console)\n(.*?)```", PAGE, re.DOTALL)
# A record, and the command that follows it, if one does.
EXAMPLES = [
    (json.loads(text), following[1] if following[0] == "bash" else None)
    for (kind, text), following in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True)
    if kind == "json"
]
SECTION = PAGE.split("\n## Formats with a name\n", 1)[1].split("\n## ", 1)[0]
NAMES = re.findall(r"^\| `(\w+)` \|", SECTION, re.MULTILINE)
_MATHS = {
    "problem": "Half of 8?", "generated_solution": "Halve 8: $\\boxed{4}$", "expected_answer": "4",
    "problem_source": "augmented_math",
}  # fmt: skip
# A record of each format with a name.
NAMED: dict[str, dict[str, Any]] = {
    "cord_v2": {
        "image": "images/1.png",
        "ground_truth": json.dumps({
            "gt_parse": {"menu": [{"nm": "Tea", "price": "3"}], "total": {"total_price": "3"}},
        }),
    },
    "rdr": {"image": "images/1.png", "text": "A bolt, M8."},
    "medpix": {"image_id": "images/1.png", "question": "Which organ?", "answer": "A lung."},
    "raven": {
        "images": ["images/1.png", "images/1.png"],
        "texts": [{"user": "Which figure comes next?", "assistant": "B.", "source": "RAVEN"}],
    },
    "llava_video_178k": {
        "id": "1", "data_source": "0_30_s_nextqa", "video": "videos/1.mkv",
        "conversations": [{"from": "human", "value": "<image>\nWhat is shown?"}, {"from": "gpt", "value": "A dog."}],
    },
    "squad": {
        "id": "1", "title": "Tea", "context": "Tea is hot.", "question": "What is hot?",
        "answers": {"text": ["Tea"], "answer_start": [0]},
    },
    "gsm8k": {"question": "One and two?", "answer": "They are three.\n#### 3"},
    "openmathinstruct2": _MATHS, "openmathinstruct2_thinking": _MATHS,
}  # fmt: skip


def words_of(text: str) -> list[str]:
    return shlex.split(text.replace("\\\n", " "))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    picture(tmp_path / "images" / "1.png", 32, 32)
    (tmp_path / "videos").mkdir()
    clip(tmp_path / "videos" / "1.mkv", 4)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("record", "text"), EXAMPLES, ids=[str(number) for number in range(len(EXAMPLES))])
def test_a_record_is_read(folder, checkpoint, capsys, record, text):
    path = write(folder / "train.jsonl", [record])
    if text is None:
        sample = open_source(path)[0]
        assert len(sample.images) == json.dumps(record).count("images/1.png")
        return
    assert read(words_of(text.replace("HF_FOLDER", str(checkpoint))), capsys) == 1
    with pytest.raises(DataError):
        open_source(path)[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_record_of_a_format_with_a_name_is_read(folder, checkpoint, capsys, name):
    path = write(folder / "train.jsonl", [NAMED[name]])
    if name.endswith("_thinking"):  # a template that reads reasoning
        checkpoint = shutil.copytree(checkpoint, folder / "hf")
        shutil.copyfile(THINKING, checkpoint / "chat_template.jinja")
    (text,) = [text for kind, text in BLOCKS if kind == "bash" and "--schema-adapter" in text]
    text = text.replace("HF_FOLDER", str(checkpoint)).replace("cord_v2", name)
    assert read(words_of(text), capsys) == 1
    if name not in ("gsm8k", "raven"):  # whose records are also in a format that has no name
        with pytest.raises(DataError):
            open_source(path)[0]


def read(words: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """How many samples the command of the page finds."""
    assert words[:3] == ["qwen3vl", "data", "inspect"]
    assert command.main([*words[2:], "--json", "--no-progress"]) == 0
    return json.loads(capsys.readouterr().out)["num_samples"]


def commands() -> list[Any]:
    texts = "".join(text for kind, text in BLOCKS if kind == "console").replace("\\\n", " ").splitlines()
    return [shlex.split(text) for text in texts]


def test_settings_of_runs_exist():
    settings = [[word for word in words if word.startswith("dataset.")] for words in commands()]
    assert sum(map(len, settings)) >= 8
    for words in settings:
        apply(qwen3_vl_8b_sft_config(), words)
    cfg = apply(qwen3_vl_8b_sft_config(), settings[0])
    assert (cfg.dataset.columns.question, cfg.dataset.columns.answer) == (r"{query}\nAnswer briefly.", "{label[0]}")


def test_sets_of_a_mixture_are_ones(tmp_path):
    found = []
    for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / "mixture.yaml").write_text(text)
        found.append(mixed_sets(str(tmp_path / "mixture.yaml")))
    (first, second), shares = found
    assert first.schema_adapter == "cord_v2" and second.columns.answer == "{label[0]}"
    assert [(one.name, one.weight) for one in shares] == [("llava", 3), ("docs", 1), ("receipts", 0.5)]


def test_options_of_commands_exist():
    for words in commands():
        if words[:2] == ["qwen3vl", "data"]:
            command._parser("qwen3vl data").parse_args(words[2:])


def walk(title: str, checkpoint: Path) -> list[list[str]]:
    """The commands of a section that goes from the download to training, apart from the download."""
    section = PAGE.split(f"## {title}, from the download to training", 1)[1].split("\n## ", 1)[0]
    text = re.findall(r"```console\n(.*?)```", section, re.DOTALL)[0].replace("\\\n", " ")
    lines = [shlex.split(line.replace("HF_FOLDER", str(checkpoint))) for line in text.splitlines()]
    return [line for line in lines if line[0] in ("qwen3vl", "torchrun")]


def training(words: list[str], checkpoint: Path) -> Any:
    """The data of a run, as a command that trains has them."""
    options = dict(pairwise(words))
    assert (options["--recipe"], options["--hf-model"]) == ("qwen3_vl_8b_sft_config", str(checkpoint))
    cfg = qwen3_vl_8b_sft_config()
    cfg.dataset.hf_processor_path = options["--hf-model"]
    apply(cfg, [word for word in words if word.startswith("dataset.")])
    paths.check_data(cfg)
    cfg.dataset.finalize()
    return cfg.dataset.shared_by(cfg.model.context_parallel_size)


def test_llava_from_the_download_to_training(tmp_path, checkpoint, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    records = []
    for number, words in enumerate(("Seven.", "seven " * 9000, "Six.", "Five.")):
        name = f"{number:012}.jpg"
        if number < 3:
            picture(tmp_path / "LLAVA/train2017" / name, 64, 64)
        turns = [{"from": "human", "value": "<image>\nWhich digit?"}, {"from": "gpt", "value": words}]
        records.append({"id": name[:-4], "image": name, "conversations": turns})
    (tmp_path / "LLAVA/llava_instruct_150k.json").write_text(json.dumps(records))

    inspect, pack, train = walk("LLaVA", checkpoint)
    assert command.main([*inspect[2:], "--no-progress"]) == 1  # says that one has no picture
    assert command.main([*pack[2:], "--workers", "0", "--no-progress"]) == 0
    assert "4, of them 2 dropped and 0 cut" in capsys.readouterr().out
    row = training(train, checkpoint).rows("train")[0]
    assert sorted(sample.sample_id for sample in row.samples) == [f"llava_instruct_150k.json[{n}]" for n in (0, 2)]


def test_cord_v2_from_the_download_to_training(tmp_path, checkpoint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "CORD/data").mkdir(parents=True)
    for split, shards in (("train", 4), ("validation", 1)):
        for shard in range(shards):
            receipts(2).to_parquet(tmp_path / f"CORD/data/{split}-{shard:05}-of-{shards:05}-b4aaeceff1d90ecb.parquet")
    inspect, train = walk("CORD-V2", checkpoint)
    assert command.main([*inspect[2:], "--no-progress"]) == 0
    data = training(train, checkpoint)
    for split, count in (("train", 8), ("valid", 2)):
        rows = data.rows(split)
        assert rows.samples.total == count and rows[0].samples[0].loss_mask.sum() > 0
