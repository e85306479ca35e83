"""Data configurations of Megatron-Bridge for a tiny checkpoint, offline."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

SEQ_LENGTH = 512
ANSWERS = ("one", "This is the digit two, two.", "3", "I cannot tell; the writing is too faint.", "five", "6")


def mock(hf: Path, **settings):
    """Made-up conversations about noise. A picture has 196 tokens: their collator enlarges small ones."""
    from megatron.bridge.data.builders.mock_vlm_sft import MockVLMSFTDatasetConfig

    given = dict(image_size=(32, 64), num_base_examples=6, num_workers=0) | settings
    return MockVLMSFTDatasetConfig(seq_length=SEQ_LENGTH, hf_processor_path=str(hf), **given)


def write_conversations(folder: Path, *, pictures: tuple[int, ...] = (1, 0, 2)) -> Path:
    rng, path = np.random.default_rng(0), folder / "conversations.jsonl"
    with path.open("w") as file:
        for number, answer in enumerate(ANSWERS):
            content = []
            for picture in range(pictures[number % len(pictures)]):
                name = folder / f"{number}-{picture}.png"
                Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(name)
                content.append({"type": "image", "image": str(name)})
            content.append({"type": "text", "text": "Which digit is this?"})
            answered = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
            file.write(json.dumps({"messages": [{"role": "user", "content": content}, answered]}) + "\n")
    return path


def direct(hf: Path, path: Path, **settings):
    """A JSON file through Hugging Face's own reader, whose cache is beside it."""
    from megatron.bridge.data.builders.direct_hf_sft import DirectHFSFTDatasetConfig
    from megatron.bridge.data.sources.hf import HFDatasetSourceConfig

    load = {"data_files": str(path), "cache_dir": str(path.parent / "cache")}
    source = HFDatasetSourceConfig(path_or_dataset="json", load_kwargs=load)
    given = dict(validation_source=source, do_test=False, num_workers=0) | settings
    return DirectHFSFTDatasetConfig(seq_length=SEQ_LENGTH, source=source, hf_processor_path=str(hf), **given)


def batch_of(dataset, numbers=(0, 1)) -> dict:
    from megatron.bridge.data.utils import get_dataset_provider

    train, _, _ = get_dataset_provider(dataset)([8, 0, 0], dataset)
    return train.collate_fn([train[number] for number in numbers])


def write_webdataset(folder: Path) -> Path:
    """Conversations about a picture each, prepared by energon itself."""
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        with tarfile.open(folder / f"{split}.tar", "w") as tar:
            for number, answer in enumerate(ANSWERS):
                picture = io.BytesIO()
                Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(picture, "JPEG")
                asked = {"role": "user", "content": "<image>Which digit is this?"}
                turns = [asked, {"role": "assistant", "content": answer}]
                parts = {"json": json.dumps(turns).encode(), "jpgs": pickle.dumps([picture.getvalue()])}
                for extension, contents in parts.items():
                    entry = tarfile.TarInfo(f"{split}{number}.{extension}")
                    entry.size = len(contents)
                    tar.addfile(entry, io.BytesIO(contents))
    splits = [(split, f"{split}.tar") for split in ("train", "val")]
    names = [name for _, name in splits]
    WebdatasetPreparator.prepare_dataset(folder, names, split_parts_patterns=splits, shuffle_seed=None, workers=1)
    (folder / ".nv-meta" / "dataset.yaml").write_text(
        "__module__: megatron.bridge.data.energon.task_encoder_utils\n__class__: ChatMLWebdataset\n"
        "field_map:\n  conversation: json\n  imgs: jpgs\n"
    )
    return folder


def energon(hf: Path, path: Path, **settings):
    from megatron.bridge.data.builders.energon import EnergonDatasetConfig, QwenVLEnergonTaskEncoderConfig

    return EnergonDatasetConfig(
        path=str(path), seq_length=SEQ_LENGTH, micro_batch_size=2,
        task_encoder=QwenVLEnergonTaskEncoderConfig(hf_processor_path=str(hf)), shuffle_buffer_size=1, num_workers=0,
        **settings,
    )  # fmt: skip
