"""A run in 8 bits begins with the weights that it was given, not with their 8-bit values or those of its set-up."""

from importlib.util import find_spec

import pytest


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
def test_main_weights_are_those_that_were_loaded(on_fake_gpu, tmp_path):
    found = on_fake_gpu("tests.fake_gpu.loaded_in_8_bits", str(tmp_path)).result
    assert len(found["names"]) == 4 * 4 and all("language_model.decoder." in name for name in found["names"])
    assert all(found["same"]) and all(found["changed"]) and all(found["others"])
