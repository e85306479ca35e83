"""Generation on a GPU: every tensor is on the device that uses it, and new tokens do not synchronize."""

import pytest

GENERATE = """
import qwen3vl_bridge
from qwen3vl_bridge.inference.generation import generate
from qwen3vl_bridge.testing.tiny_checkpoint import make_checkpoint
from qwen3vl_bridge.training.weight_loading import load_model
from tests.models.qwen3_5.tiny import make_checkpoint as make_hybrid
from pathlib import Path

folder = Path(sys.argv[2])
if sys.argv[1] == "qwen3_vl":
    make_checkpoint(folder)
else:
    make_hybrid(folder, moe=False)  # values of the router, which the fake GPU does not compute, would be sizes
(model,) = load_model(folder, bf16=True, params_dtype=torch.bfloat16)
config = model.config
ids = torch.full((2, 14), 5)
ids[0, 3:11] = torch.tensor([config.vision_start_token_id, *[config.image_token_id] * 6, config.vision_end_token_id])
mask = torch.ones_like(ids)
mask[1, 9:] = 0
pixels, grid = torch.randn(24, 1536, device="cuda"), torch.tensor([[1, 4, 6]], device="cuda")
batch = dict(input_ids=ids.cuda(), attention_mask=mask.cuda(), pixel_values=pixels, image_grid_thw=grid)
shapes, syncs = [], []
for tokens in (4, 4, 12):  # the first call copies constants to the device
    seen = []
    with on_sync(lambda *where: seen.append(str(where))):
        found = generate(model, **batch, max_new_tokens=tokens, eos_token_id=[])
    shapes.append(list(found.shape))
    syncs.append(seen)
result = dict(shapes=shapes, syncs=syncs, device=str(found.device))
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_generate_without_eos_token_does_not_sync_per_new_token(on_fake_gpu, tmp_path, family):
    run = on_fake_gpu(GENERATE, family, str(tmp_path / "model"))
    assert run.result["shapes"] == [[2, 18], [2, 18], [2, 26]] and run.result["device"] == "cuda:0"
    _, few, many = run.result["syncs"]
    assert len(few) == len(many), many[len(few) - 4 :]
