"""The Python of docs/modelopt.md, as printed: a model is quantised, trained from a teacher and exported."""

import importlib.util
import re
from pathlib import Path

from tests.parity.batches import make_samples
from tests.training.conftest import Inputs, inputs  # noqa: F401  a fixture
from tests.training.running import replicated, train

from .quantized import tensors_in
from .support import make_larger

PAGE = (Path(__file__).parents[2] / "docs" / "modelopt.md").read_text()


def test_its_python_runs(inputs: Inputs, tmp_path, monkeypatch):  # noqa: F811
    from megatron.bridge import AutoBridge

    distil, quantise, restore, export = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    config = AutoBridge.from_hf_pretrained(str(inputs.hf)).hf_pretrained.config
    samples = [dict(input_ids=one.ids[None], **one.pixels) for one in make_samples("mixed", config, seed=1)]
    run = tmp_path / "run"
    cfg = replicated(inputs, run, train__train_iters=2, checkpoint__save_interval=2)
    places = {
        "TEACHER": make_larger(tmp_path / "teacher"), "HF_FOLDER": inputs.hf, "QUANTISED": tmp_path / "quantised",
        "RUN": run, "EXPORTED": tmp_path / "exported",
    }  # fmt: skip
    names = dict(cfg=cfg, samples=samples)
    for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost").items():  # as torchrun does
        monkeypatch.setenv(name, value)

    def run_printed(python: str) -> None:
        exec(re.sub('"([A-Z_]{3,})"', lambda found: repr(str(places[found[1]])), python), names)

    for python in (quantise, restore, distil):
        run_printed(python)
    assert len(train(cfg)) > 0
    run_printed(export)
    exported, own = tensors_in(places["EXPORTED"]), tensors_in(inputs.hf)
    assert own.keys() <= exported.keys()
    assert exported["model.language_model.layers.0.mlp.down_proj.weight"].itemsize == 1


def test_pruning_needs_transformer_engine():
    import modelopt.torch.prune as mtp

    assert hasattr(mtp, "mcore_minitron") == (importlib.util.find_spec("transformer_engine") is not None)
