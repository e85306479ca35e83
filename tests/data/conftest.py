"""Shared fixtures: a real processor of toy size, and files of conversations with images."""

import copy
import gc
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.vision_inputs import VisionSettings
from qwen3vl_bridge.data import DataError, Encoder, JsonLines, RowDataset, RowSettings, SampleFilter, Samples
from qwen3vl_bridge.data.collation import Collator, pad_token_id
from qwen3vl_bridge.data.samples import Sizes

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from tests.data.servers import Server


def groups(*, dp: int = 1, dp_rank: int = 0, cp: int = 1, tp_rank: int = 0) -> SimpleNamespace:
    """Process groups with the methods that data loading uses."""
    sizes = dict(dp=(dp, dp_rank), cp=(cp, 0), tp=(tp_rank + 1, tp_rank), pp=(1, 0))
    group = {
        name: SimpleNamespace(size=lambda size=size: size, rank=lambda rank=rank: rank)
        for name, (size, rank) in sizes.items()
    }
    return SimpleNamespace(**group)


def built(provider, train: int, valid: int = 0, **ranks: int) -> tuple:
    """Return what Megatron-Bridge's loop reads on a rank of these groups."""
    from megatron.bridge.data.base import DatasetBuildContext

    collection = groups(**ranks) if ranks else None
    return provider.build_datasets(DatasetBuildContext(train, valid, 0, pg_collection=collection))


@pytest.fixture
def server(monkeypatch):
    """Return a server that is requested without a proxy and retried immediately."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("qwen3vl_bridge.data.downloading.WAITS", (0.01, 0.02))
    monkeypatch.setattr("qwen3vl_bridge.data.downloading.RECONNECT", 0.1)
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def processor():
    from qwen3vl_bridge.testing.tiny_processor import make_processor

    return make_processor(512)


# White space that the released tokenizers have as one token each, also joined with a newline before it.
WHITE = ("\n", "\n\n", "\n\n\n", "\n\n\n\n", " \n", "\n \n", "\r\n", " \n\n")


@pytest.fixture(scope="session")
def joining():
    """Return a processor with a tokenizer that joins newlines, like the released ones."""
    from qwen3vl_bridge.testing import tiny_processor

    texts = [*tiny_processor._corpus(), *[f"a{white}b" for white in WHITE for _ in range(8)]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_processor, "_corpus", lambda: iter(texts))
        made = tiny_processor.make_processor(512)
    assert all(len(made.tokenizer(white)["input_ids"]) == 1 for white in WHITE)
    assert len(made.tokenizer("\n" + " \n")["input_ids"]) == 1
    return made


@pytest.fixture(scope="session")
def checkpoint(processor, tmp_path_factory) -> Path:
    from qwen3vl_bridge.testing.tiny_checkpoint import make_config

    folder = tmp_path_factory.mktemp("hf")
    processor.save_pretrained(folder)
    make_config(processor.tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_provider(checkpoint) -> Callable:
    """Return a function that makes finalized providers of rows of 256 tokens."""
    from qwen3vl_bridge import Qwen3VLConversationProvider

    def make(**settings):
        settings = {"hf_processor_path": checkpoint, "seq_length": 256, "num_workers": 0, **settings}
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
        provider = Qwen3VLConversationProvider(**settings)
        provider.finalize()
        return provider

    return make


def with_template(processor, template: str):
    """Return a copy of a processor with a chat template, given as text or as a file of this folder."""
    other = copy.copy(processor)
    path = Path(__file__).parent / template
    other.chat_template = path.read_text(encoding="utf-8") if template.endswith(".jinja") else template
    return other


def trained(processor, sample) -> str:
    """Return the trained text of a sample."""
    return processor.tokenizer.decode(sample.labels[sample.loss_mask.bool()])


def dialogue(*contents) -> list[dict]:
    """Return messages of the user and the assistant in turn."""
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


@pytest.fixture(scope="session")
def encoder(processor) -> Encoder:
    return Encoder(processor)


def assert_refused(encoder: Encoder, message: str, conversation, *limit: int) -> None:
    """Assert that encoding and measuring raise the same error."""
    for work in (encoder, encoder.size):
        with pytest.raises(DataError, match=message):
            work(conversation, *limit)


@pytest.fixture(scope="session")
def collator(processor) -> Collator:
    vision = VisionSettings(processor.image_token_id, processor.video_token_id, 2, 36)
    return Collator(vision, pad_token_id(processor.tokenizer), seq_length=256)


def same(first: TokenBatch, second: TokenBatch) -> bool:
    """Return whether two batches are bitwise equal."""
    names = ("input_ids", "labels", "loss_mask", "position_ids", "vision_slot")
    pixels = [None if batch.vision is None else batch.vision.pixel_values for batch in (first, second)]
    return (
        first.sample_ids == second.sample_ids
        and first.layout == second.layout
        and all(torch.equal(getattr(first, name), getattr(second, name)) for name in names)
        and (pixels[0] is pixels[1] is None or torch.equal(*pixels))
    )


def take(stream: Iterator[TokenBatch], number: int) -> list[TokenBatch]:
    return [next(stream) for _ in range(number)]


def ids(batches: Iterable[TokenBatch]) -> list[tuple[str, ...]]:
    return [batch.sample_ids for batch in batches]


def reloaded(state: dict) -> dict:
    """Return a position after a round trip through a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def segments(batch: TokenBatch) -> Iterator[tuple[str, slice]]:
    """Yield each sample of a packed row with its offset."""
    for segment, sample_id in enumerate(batch.sample_ids):
        yield sample_id, slice(*batch.layout.cu_seqlens_padded[segment : segment + 2].tolist())


def picture(path: Path, height: int, width: int, seed: int = 0) -> Path:
    """Write an image of colored noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


def random_record(folder: Path, number: int, random: np.random.Generator) -> dict:
    """Return a random conversation of one or two turns with up to two images."""
    messages = []
    for turn in range(random.integers(1, 3)):
        parts = []
        for i in range(random.integers(0, 3)):
            height, width = random.choice([32, 64, 96], 2)
            name = f"images/{number}-{turn}-{i}.png"
            picture(folder / name, height, width, seed=number)
            parts.append({"type": "image", "image": name})
        words = " ".join(random.choice(["digit", "seven", "what", "fox", "is"], random.integers(1, 12)))
        messages.append({"role": "user", "content": [*parts, {"type": "text", "text": words}]})
        messages.append({"role": "assistant", "content": f"{number} " * random.integers(1, 6)})
    return {"messages": messages}


def write(path: Path, records: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def train_file(tmp_path_factory) -> Path:
    """Write 40 random conversations."""
    folder, random = tmp_path_factory.mktemp("conversations"), np.random.default_rng(0)
    return write(folder / "train.jsonl", [random_record(folder, number, random) for number in range(40)])


@pytest.fixture(scope="session")
def even_file(train_file) -> Path:
    """Write the conversations of `train_file` with all contents of one type, as tables require."""
    records = [json.loads(line) for line in train_file.read_text().splitlines()]
    for message in (message for record in records for message in record["messages"]):
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
    return write(train_file.parent / "even.jsonl", records)


@pytest.fixture(scope="session")
def stream(even_file) -> datasets.IterableDataset:
    return datasets.load_dataset("json", data_files=str(even_file), split="train", streaming=True)


@pytest.fixture(scope="module")
def streams_end_at_once():
    """Skip the five seconds that `datasets` waits for Arrow's threads at the end of each epoch of a stream."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)
        yield
        gc.collect()  # of what was not read to its end, while nothing waits for it


@pytest.fixture
def read(tmp_path) -> Callable:
    def read(record):
        record = {"messages": record} if isinstance(record, list) else record
        return JsonLines(write(tmp_path / "train.jsonl", [record]))[0]

    return read


@pytest.fixture
def make_rows(train_file, encoder, collator) -> Callable[..., Callable]:
    """Return a function that returns a factory of rows of 256 tokens."""

    def make(
        path=train_file, on_long="error", on_bad="error", most_patches=None, seq_length=256, multiple=1, **settings
    ) -> Callable:
        settings = {"seed": 0, "window_size": 8, **settings}

        def rows(begin=None, ranks=1) -> RowDataset:
            policies = {"most_patches": most_patches, "on_long": on_long, "on_bad": on_bad}
            packed = settings.get("packed")
            sizes = None if packed is None else Sizes(known=packed.size)
            sample_filter = SampleFilter(encoder, limit=seq_length, **policies)
            samples = Samples(JsonLines(path), sample_filter, sizes)
            lay_out = replace(collator, seq_length=seq_length, multiple=multiple)
            return RowDataset(samples, RowSettings(lay_out, **settings), begin=begin, ranks=ranks)

        return rows

    return make


def llava_record(number: int) -> dict:
    """Return a conversation with up to two images in the format of LLaVA and ShareGPT; some with null for no image."""
    paths = ["a.png", "b.png"][: number % 3]
    turns = [{"from": "human", "value": "<image>" * len(paths) + f"é{number}?"}, {"from": "gpt", "value": "[7] {,\"'"}]
    return {"conversations": turns, "images": paths or None, "other": number}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Write twenty conversations in every file format."""
    folder, records = tmp_path_factory.mktemp("sources"), [llava_record(number) for number in range(20)]
    for name in ("a.png", "b.png"):
        picture(folder / name, 32, 32)
    for name in ("train.jsonl", "lines.json"):
        write(folder / name, records)
    (folder / "list.json").write_text(" \n" + json.dumps(records, indent=1, ensure_ascii=False) + "\n", "utf-8")
    table = pa.Table.from_pylist(records)
    pq.write_table(table, folder / "train.parquet", row_group_size=3)
    (folder / "parts").mkdir()
    for number in range(4):
        pq.write_table(table.slice(number * 5, 5), folder / f"parts/part-{number}.parquet", row_group_size=2)
    datasets.Dataset.from_list(records).save_to_disk(folder / "saved")
    return folder
