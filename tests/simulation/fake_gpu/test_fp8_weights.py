"""FP8 runs create main weights from the loaded weights, not from FP8 values or the initialization."""

from importlib.util import find_spec

import pytest


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
def test_main_weights_of_fp8_model_equal_loaded_weights(on_fake_gpu, tmp_path):
    found = on_fake_gpu("tests.simulation.fake_gpu.load_fp8_model", str(tmp_path)).result
    assert len(found["names"]) == 4 * 4 and all("language_model.decoder." in name for name in found["names"])
    assert all(found["same"]) and all(found["changed"]) and all(found["others"])
