"""How a process joins the others. What NCCL does then takes GPUs, and is not tried here."""

from qwen3vl_bridge.training import process_groups
from qwen3vl_bridge.training.weight_loading import load_model

import pytest
import torch


@pytest.fixture
def joined(monkeypatch):
    """What a process has done, in order, that finds CUDA."""
    found = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append(device))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **_: found.append(backend))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return found


def test_each_has_the_gpu_of_its_number(joined, monkeypatch):
    """`load_model`, and so `conversion/generate.py`, under torchrun on several GPUs."""
    for name, value in dict(WORLD_SIZE="8", RANK="11", LOCAL_RANK="3").items():
        monkeypatch.setenv(name, value)
    process_groups._join()
    assert joined == [3, "nccl"]


def test_load_model_joins_so(joined, monkeypatch, untied_folder):
    """Before it makes anything on a GPU, or all of a machine's processes would be on the first."""
    process_groups.shutdown()  # groups of other tests
    for name, value in dict(WORLD_SIZE="2", RANK="1", LOCAL_RANK="1").items():
        monkeypatch.setenv(name, value)

    def meet(backend):
        joined.append(backend)
        raise ConnectionError("the others")

    monkeypatch.setattr(torch.distributed, "init_process_group", meet)
    with pytest.raises(ConnectionError, match="the others"):
        load_model(untied_folder)
    assert joined == [1, "nccl"]


def test_one_by_itself_stays_where_it_is(joined):
    process_groups._join()
    assert joined == ["nccl"]
