"""The evaluation of Megatron-Bridge's loop, which gets more arguments in a run with separate vision ranks."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("joint_evaluation")
EVAL = "megatron.bridge.training.eval"


def test_evaluate_and_print_results_calls_evaluate():
    CONTRACT.takes(
        EVAL, "evaluate",
        *("state", "forward_step_func", "data_iterator", "model", "process_non_loss_data_func", "config", "verbose"),
        *("non_loss_data_func", "p2p_communicator", "pg_collection", "callback_manager", "is_test"),
    )  # fmt: skip
    CONTRACT.mentions(EVAL, "evaluate_and_print_results", "evaluate")


def test_add_arguments_of_evaluation_passes_added_arguments_to_evaluate(monkeypatch):
    CONTRACT.find(EVAL, "evaluate")
    from qwen3vl_bridge.upstream import replacements
    from qwen3vl_bridge.upstream.joint_evaluation import add_arguments_of_evaluation

    from megatron.bridge.training import eval as evaluation

    monkeypatch.setattr(evaluation, "evaluate", lambda state, *args, **kwargs: (state, args, kwargs))
    monkeypatch.setattr(replacements, "_done", {})
    for _ in range(2):  # the second time without effect
        add_arguments_of_evaluation(lambda state: {"pg_collection": state + 1})
    assert evaluation.evaluate(1, 2, is_test=True) == (1, (2,), {"is_test": True, "pg_collection": 2})
    assert [one.when for one in replacements.replaced()] == [replacements.When.DIST_TRAIN]
