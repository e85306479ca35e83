"""The fingerprint of a data set of the `datasets` library."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("dataset_fingerprints")


def test_dataset_fingerprints_are_equal_only_for_equal_rows_of_dataset():
    CONTRACT.mentions("datasets", "Dataset.__init__", "_fingerprint")
    from qwen3vl_bridge.upstream.dataset_fingerprints import fingerprint_of

    import datasets

    datasets_of_rows = (datasets.Dataset.from_dict({"x": [1, last]}) for last in (2, 2, 3))
    one, same, other = map(fingerprint_of, datasets_of_rows)
    assert one == same != other
