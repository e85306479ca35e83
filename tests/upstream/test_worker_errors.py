"""torch says in words that a data-loading process has ended."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("worker_errors")


def test_lost_worker_reads_process_id_and_signal_from_torch_message():
    CONTRACT.find("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter._try_get_data")
    CONTRACT.mentions(
        "torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter._try_get_data",
        "DataLoader worker (pid(s)", "exited unexpectedly",
    )  # fmt: skip
    from qwen3vl_bridge.upstream.worker_errors import lost_worker

    exited = RuntimeError("DataLoader worker (pid(s) 12, 13) exited unexpectedly")
    assert lost_worker(exited) == ("12, 13", None)
    exited.__cause__ = RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. ")
    assert lost_worker(exited) == ("12", "Killed")
    assert lost_worker(RuntimeError("CUDA error")) is None and lost_worker(ValueError(str(exited))) is None
