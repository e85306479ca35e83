"""A run on receipts in the published format of CORD-V2, as their files are."""

import math

from tests.receipts import write_receipts

from .running import replicated, train


def test_a_run_trains_on_records_of_cord_v2(inputs, tmp_path):
    """Each step's loss is a number, and the last is below the first."""
    data = write_receipts(tmp_path / "cord", train=8, valid=2)
    cfg = replicated(
        inputs,
        None,
        train__train_iters=3,
        dataset__path=str(data),
        dataset__schema_adapter="cord_v2",
        dataset__seq_length=512,
        model__seq_length=512,
    )
    steps = [entry for entry in train(cfg) if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2, 3]
    assert all(math.isfinite(entry["loss"]) and entry["trained_tokens"] > 0 for entry in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]
