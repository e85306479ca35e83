"""Providers of WebDatasets."""

import gc
from functools import partial

import pytest

from .webdatasets import provider_of, write_checkpoint


@pytest.fixture(autouse=True)
def _no_old_garbage():
    """Energon collects garbage as a stream begins, in workers too: among all that Megatron's import leaves."""
    gc.freeze()


@pytest.fixture(scope="module")
def make(processor, tmp_path_factory):
    """Makes providers."""
    return partial(provider_of, write_checkpoint(tmp_path_factory.mktemp("hf"), processor))
