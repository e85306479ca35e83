"""Processes of saves: the queue of megatron-core's writer, and multiprocessing's mark of a spawned process."""

import multiprocessing
import queue

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("async_save")
WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"


def test_results_in_this_process_replaces_results_queue_of_writer():
    CONTRACT.find(WRITER, "_results_queue")
    CONTRACT.takes(WRITER, "get_write_results_queue", "mp_mode")
    CONTRACT.mentions(WRITER, "get_write_results_queue", "_results_queue")
    from qwen3vl_bridge.upstream.async_save import results_in_this_process

    from megatron.core.dist_checkpointing.strategies import filesystem_async

    with results_in_this_process():
        found = filesystem_async.get_write_results_queue()
    if not isinstance(found, queue.Queue):
        CONTRACT.fail(WRITER, f"the writer's queue is a {type(found).__name__}, expected the one that is set")
    assert vars(filesystem_async)["_results_queue"] is None


def test_is_importing_main_script_follows_inheriting_flag_of_multiprocessing():
    CONTRACT.mentions("multiprocessing.spawn", "_main", "_inheriting")
    CONTRACT.mentions("multiprocessing.spawn", "_check_not_importing_main", "_inheriting")
    from qwen3vl_bridge.upstream.async_save import is_importing_main_script

    assert not is_importing_main_script()
    process = multiprocessing.current_process()
    process._inheriting = True
    try:
        assert is_importing_main_script()
    finally:
        del process._inheriting
