"""Copies and sums that a microbatch makes for gradients without Transformer Engine: megatron-core's own path's."""

from collections import Counter
from importlib.util import find_spec

import pytest

KINDS = ("dense", "tied", "moe")  # as in gradients.py

pytestmark = pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="its layers add to main_grad")


@pytest.fixture(scope="module")
def found(on_fake_gpu):
    return on_fake_gpu("tests.fake_gpu.gradients").result


class TestGradients:
    """One class: xdist gives a class to one process, and the program runs once."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_nothing_is_written_that_megatron_bridges_model_does_not_write(self, found, kind):
        ours, others = (found[f"{way} {kind}"] for way in ("ours", "Megatron-Bridge"))
        assert ours["parameters"] == others["parameters"]
        assert not Counter(ours["written"]) - Counter(others["written"])

    @pytest.mark.parametrize("kind", KINDS)
    def test_each_parameters_gradient_is_added_once(self, found, kind):
        """To `main_grad`."""
        added = Counter()
        for entry, times in found[f"ours {kind}"]["written"].items():
            name, dtype, shape = entry.split(" ", 2)
            if (name, dtype) == ("add_", "torch.float32"):
                added[shape] += times
        assert added == found[f"ours {kind}"]["parameters"]

    def test_chunks_of_the_loss_add_sums_and_two_casts_of_one_weight(self, found):
        whole, chunked = (Counter(found[name]["written"]) for name in ("ours dense", "chunked"))
        assert not whole - chunked
        more = {entry.rpartition(" [")[0]: times for entry, times in (chunked - whole).items()}
        assert more == {"_to_copy torch.float32": 1, "_to_copy torch.bfloat16": 1, "add_ torch.float32": 3}
        (shape,) = {entry.partition("[")[2] for entry in chunked - whole}
        assert shape == "512, 80]"
