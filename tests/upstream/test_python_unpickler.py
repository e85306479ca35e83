"""Python's unpickler, whose methods for opcodes are overridden."""

import pickle

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("python_unpickler")


def test_python_unpickler_dispatches_to_methods_that_we_override():
    dispatch = CONTRACT.find("pickle", "_Unpickler.dispatch", dict)
    CONTRACT.mentions("pickle", "_Unpickler.load", "dispatch", "stack")
    CONTRACT.mentions("pickle", "_Unpickler.__init__", "memo")
    for name in ("load_build", "load_setitem", "load_setitems", "pop_mark"):
        CONTRACT.takes("pickle", f"_Unpickler.{name}", "self")
    for opcode, name in ((pickle.BUILD, "load_build"), (pickle.SETITEMS, "load_setitems")):
        if dispatch[opcode[0]] is not CONTRACT.find("pickle", f"_Unpickler.{name}"):
            CONTRACT.fail("pickle", f"opcode {opcode!r} is not dispatched to {name}")
