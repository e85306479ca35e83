"""How many of our files a reader passes on four ways through the code: lower a limit when a way gets shorter.

A file counts if one of its functions is called; executing a module, with the bodies of its classes, does not count.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples.digits.checkpoint import make_checkpoint
from examples.digits.dataset import make_dataset
from tests.data.conftest import picture, write

ROOT = Path(__file__).resolve().parents[1]

COUNT = """
import inspect, sys, threading
from pathlib import Path

entered = set()

def count(frame, event, argument):
    code = frame.f_code
    name = code.co_filename
    # Only functions are optimized. Type parameters are a function's that Python calls where it executes a `def`.
    is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<generic parameters")
    if event == "call" and is_function and "/qwen3vl_bridge/" in name:
        entered.add(name.rpartition("/qwen3vl_bridge/")[2])

def enter(way, others=()):
    threading.setprofile(count)
    sys.setprofile(count)
    way()
    sys.setprofile(None)
    # Python calls the hook for each module that a library imports late.
    print("entered", *sorted(entered.difference(others, ["compat/import_hook.py"])))

hf, target = sys.argv[1:]
"""

# From a Hugging Face folder to the end of the first forward pass, of a padded row with an image.
MODEL = """
import torch
import qwen3vl_bridge
from megatron.bridge import AutoBridge
from transformers import AutoProcessor
from PIL import Image
from qwen3vl_bridge.training.process_groups import initialize

asked = [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (64, 64))}]}]
processor = AutoProcessor.from_pretrained(hf)
inputs = processor.apply_chat_template(asked, tokenize=True, return_dict=True, return_tensors="pt")
inputs.pop("mm_token_type_ids", None)

def way():
    bridge = AutoBridge.from_hf_pretrained(hf)
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.finalize()
    initialize(provider, seed=0)
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    model(**inputs)

enter(way)
"""

IMPORT = """
from qwen3vl_bridge.checkpoint import import_checkpoint
enter(lambda: import_checkpoint(hf, target, progress=False))
"""

# From a data file to a batch with the pixels of its image.
DATA = """
from qwen3vl_bridge.data import Collator, Encoder, SampleFilter, Samples, VisionSettings
from qwen3vl_bridge.data import load_processor, open_source, pad_token_id

def way():
    processor = load_processor(hf)
    samples = Samples(open_source(target), SampleFilter(Encoder(processor), limit=256))
    vision = VisionSettings.of_checkpoint(hf, processor)
    collator = Collator(vision, pad_token_id(processor.tokenizer), seq_length=256)
    assert len(collator.packed([samples.encode(0)]).vision.pixel_values)

enter(way)
"""

# A run's save, and the same save by Megatron-Bridge's own manager, which calls our model and callbacks too: the files
# that it enters are no part of ours.
SAVE = """
import qwen3vl_bridge
from megatron.bridge.training.checkpointing import DefaultCheckpointManager
from megatron.bridge.training.finetune import finetune
from qwen3vl_bridge.training.checkpoint_manager import Qwen3VLCheckpointManager
from tests.training.conftest import Inputs
from tests.training.running import replicated

save = Qwen3VLCheckpointManager.save

def saves(manager, ctx, callbacks):
    settings, run = ctx.state.cfg.checkpoint, ctx.state.cfg.checkpoint.save
    settings.save = run + "_of_megatron_bridge"
    sys.setprofile(count)
    DefaultCheckpointManager.save(manager, ctx, callbacks)
    sys.setprofile(None)
    theirs, settings.save = set(entered), run
    entered.clear()
    enter(lambda: save(manager, ctx, callbacks), theirs)
    assert (Path(run) / "iter_0000001" / "hf" / "config.json").is_file()

Qwen3VLCheckpointManager.save = saves
settings = dict(train__train_iters=1, scheduler__lr_warmup_iters=0, validation__eval_iters=0)
cfg = replicated(Inputs(Path(hf), Path(target), None), Path(target) / "run", **settings)
finetune(cfg, qwen3vl_bridge.forward_step, callbacks=qwen3vl_bridge.training_callbacks(cfg))
"""


def files_entered(program: str, *paths: Path) -> list[str]:
    words = [sys.executable, "-c", COUNT + program, *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("entered ")]
    return line.split()[1:]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder)
    return folder


@pytest.fixture
def train_file(tmp_path) -> Path:
    picture(tmp_path / "1.png", 64, 64)
    asked = {"role": "user", "content": [{"type": "image", "image": "1.png"}, {"type": "text", "text": "Which digit?"}]}
    return write(tmp_path / "train.jsonl", [{"messages": [asked, {"role": "assistant", "content": "Seven."}]}])


def test_a_model(model, tmp_path):
    files = files_entered(MODEL, model, tmp_path)
    assert len(files) <= 30, files


def test_an_import(model, tmp_path):
    files = files_entered(IMPORT, model, tmp_path / "megatron")
    assert len(files) <= 25, files


def test_an_image(model, train_file):
    files = files_entered(DATA, model, train_file)
    assert len(files) <= 16, files


def test_a_save(model, tmp_path):
    make_dataset(tmp_path)
    files = files_entered(SAVE, model, tmp_path)
    assert len(files) <= 3, files
