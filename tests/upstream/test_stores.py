"""torch's store of the processes of a job."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("stores")


def test_torch_default_store_has_methods_that_we_call():
    CONTRACT.takes("torch.distributed.distributed_c10d", "_get_default_store")
    for name in ("add", "set", "get"):
        CONTRACT.find("torch.distributed", f"Store.{name}")
