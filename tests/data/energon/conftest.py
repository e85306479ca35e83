"""WebDatasets on disk, prepared by energon, and providers that read them."""

import gc
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from qwen3vl_bridge import Qwen3VLEnergonProvider
from qwen3vl_bridge.core.batch import TokenBatch

import pytest
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

from tests.data.conftest import segments

CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"

ASKED = [{"role": "user", "content": "What is seven?"}, {"role": "assistant", "content": "A digit."}]
# A metadataset beside the folder "wds".
FIRST_SAMPLE = (
    "__module__: megatron.energon\n__class__: MetadatasetV2\n"
    "splits:\n  train:\n    path: wds\n    subset: {range: [0, 1]}\n"
)
Sample = tuple[str, Mapping[str, Any]]


def provider_of(checkpoint: Path, path: Path, **changes: Any) -> Qwen3VLEnergonProvider:
    settings = {"seq_length": 256, "num_workers": 0, "shuffle_buffer_size": 1, **changes}
    provider = Qwen3VLEnergonProvider(path=str(path), hf_processor_path=str(checkpoint), **settings)
    provider.finalize()
    return provider


def write_tar(path: Path, samples: Iterable[Sample]) -> None:
    """Write a tar of samples: (key, {extension: contents}); other contents than bytes and text become JSON."""
    with tarfile.open(path, "w") as tar:
        for key, parts in samples:
            for extension, contents in parts.items():
                if not isinstance(contents, (bytes, str)):
                    contents = json.dumps(contents)
                contents = contents.encode() if isinstance(contents, str) else contents
                entry = tarfile.TarInfo(f"{key}.{extension}")
                entry.size = len(contents)
                tar.addfile(entry, io.BytesIO(contents))


def write_folder(folder: Path, *, yaml: str = CRUDE, **splits: list[list[Sample]]) -> Path:
    """Write a prepared folder. Each split is a list of tars."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, tars in splits.items():
        for number, samples in enumerate(tars):
            write_tar(folder / f"{split}-{number}.tar", samples)
    names = sorted(path.name for path in folder.glob("*.tar"))
    patterns = [(split, f"{split}-.*") for split in splits]
    WebdatasetPreparator.prepare_dataset(folder, names, split_parts_patterns=patterns, shuffle_seed=None, workers=1)
    (folder / ".nv-meta" / "dataset.yaml").write_text(yaml)
    return folder


def keys(batches: Iterable[TokenBatch]) -> list[str]:
    """Return the keys of the samples of batches, without samples that have no loss."""
    found = []
    for batch in batches:
        for sample_id, tokens in segments(batch):
            if batch.loss_mask.flatten()[tokens].any():
                found.append(sample_id.rpartition(":")[2])
    return found


@pytest.fixture(autouse=True)
def _no_old_garbage():
    """Freeze the objects of Megatron's import: energon collects garbage when a stream begins, also in workers."""
    gc.freeze()


@pytest.fixture(scope="module")
def make(checkpoint):
    return partial(provider_of, checkpoint)
