"""Other libraries log under the names that are hidden."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("library_logs")


@pytest.mark.parametrize(
    "module", ["megatron.bridge.utils.import_utils", "megatron.bridge.peft.lora", "megatron.bridge.peft.dora"]
)
def test_silenced_library_loggers_are_named_after_their_modules(module):
    logger = CONTRACT.find(module, "logger")
    if logger.name != module:
        CONTRACT.fail(module, f"logs as {logger.name}")


def test_pretrain_logger_and_transformers_verbosity_functions_exist():
    CONTRACT.find("megatron.bridge.training.pretrain", "logger")
    CONTRACT.find("transformers.utils.logging", "set_verbosity_error")
    CONTRACT.find("transformers.utils.logging", "disable_progress_bar")
