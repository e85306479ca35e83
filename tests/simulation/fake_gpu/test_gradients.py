"""Without Transformer Engine, a microbatch copies and adds gradients only as megatron-core does."""

from collections import Counter
from importlib.util import find_spec

import pytest

KINDS = ("dense", "tied", "moe")  # as in gradients.py

pytestmark = pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="its layers add to main_grad")


@pytest.fixture(scope="module")
def found(on_fake_gpu):
    return on_fake_gpu("tests.simulation.fake_gpu.gradients").result


@pytest.mark.slow
class TestGradients:
    """One class: xdist gives a class to one process, and the program runs once."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_backward_writes_no_more_gradient_tensors_than_megatron_bridge(self, found, kind):
        ours, others = (found[f"{way} {kind}"] for way in ("ours", "Megatron-Bridge"))
        assert ours["parameters"] == others["parameters"]
        assert not Counter(ours["written"]) - Counter(others["written"])

    @pytest.mark.parametrize("kind", KINDS)
    def test_backward_adds_each_gradient_to_main_grad_once(self, found, kind):
        """Gradients are added to `main_grad`."""
        added = Counter()
        for entry, times in found[f"ours {kind}"]["written"].items():
            name, dtype, shape = entry.split(" ", 2)
            if (name, dtype) == ("add_", "torch.float32"):
                added[shape] += times
        assert added == found[f"ours {kind}"]["parameters"]

    def test_chunked_loss_writes_extra_gradients_only_for_output_layer_weight(self, found):
        unchunked, chunked = (Counter(found[name]["written"]) for name in ("ours dense", "chunked"))
        assert not unchunked - chunked
        more = {entry.rpartition(" [")[0]: times for entry, times in (chunked - unchunked).items()}
        assert more == {"_to_copy torch.float32": 1, "_to_copy torch.bfloat16": 1, "add_ torch.float32": 3}
        (shape,) = {entry.partition("[")[2] for entry in chunked - unchunked}
        assert shape == "512, 80]"
