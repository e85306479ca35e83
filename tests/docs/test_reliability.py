"""Numbers on the page about reliability are those of the tests that it names."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.checkpoint.engine import test_killed
from tests.checkpoint.formats import test_fuzz
from tests.checkpoint.stock_readers import test_megatron_fsdp
from tests.training.checkpointing.ranks_that_die import MOMENTS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reliability.md").read_text()
WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
NUMBERS = {word: number for number, word in enumerate([*WORDS.split(" "), "seventeen", "eighteen"], start=1)}


def said(pattern: str) -> int:
    """The number that the page has in a sentence, in digits or in words."""
    (found,) = re.findall(pattern, " ".join(PAGE.split()))
    return NUMBERS[found] if found in NUMBERS else int(found)


def source(file: str) -> str:
    return (ROOT / file).read_text()


def test_killed_conversions():
    assert said(r"(\w+) combinations with at least \d+ kills") == len(test_killed.KILLED)
    assert said(r"combinations with at least (\d+) kills each") == test_killed.MOMENTS


def examples(name: str) -> int:
    """How many examples hypothesis makes for a test, or for all of a file's."""
    file, _, test = name.partition("::")
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    tests = [test] if test else [one for one in vars(module) if one.startswith("test_")]
    made = [getattr(getattr(module, one), "_hypothesis_internal_use_settings", None) for one in tests]
    (number,) = {settings.max_examples for settings in made if settings is not None}
    return number


@pytest.mark.parametrize("row", re.findall(r"^\| .* \| (\d+(?: each)?) \| (.*) \|$", PAGE, re.MULTILINE), ids=str)
def test_generated_files(row):
    number, names = row
    for name in re.findall(r"`(.*?)`", names):
        assert examples(name) == int(number.split()[0]), name


def test_generated_urls():
    made = source("tests/data/media/test_addresses.py")
    numbers = re.search(r"URLs that only look allowed \| (\d+) and (\d+) \|", PAGE).groups()
    assert list(numbers) == re.findall(r"max_examples=(\d+)", made)


def test_all_readers_are_given_the_same_number_of_files():
    assert test_fuzz.FUZZ.max_examples == said(r"safetensors: any header, any file, any index \| (\d+) each")


def test_killed_runs_and_saves():
    rounds = re.search(r"for _ in range\((\d+)\)", source("tests/training/checkpointing/test_interrupted.py"))
    assert said(r"SIGKILL, (\w+) times, at random steps") == int(rounds[1])
    cases = source("tests/training/checkpointing/test_journeys.py")
    assert "list(MOMENTS))," in cases and "[STEP, *list(MOMENTS)[:4]])" in cases and "list(MOMENTS)[:4])," in cases
    assert said(r"(\w+) cases under Megatron-FSDP") == len(MOMENTS)
    assert said(r"Megatron-FSDP, (\w+) under tensor parallelism") == 4
    assert said(r"and (\w+) with separate vision ranks") == 1 + 4
    (splits,) = re.findall(r"found\.interrupted == \[True\] \* (\d+)", cases)
    assert said(r"equals an uninterrupted one for (\w+) splits") == int(splits)


def test_loads_by_other_readers():
    """Those of the other names, and the two whose read bytes are counted, besides the table's; one more is refused."""
    tables = (test_megatron_fsdp.TOPOLOGIES, test_megatron_fsdp.BY_DEFAULT)
    loads = sum(len(rows) for table in tables for rows in table.values())
    assert said(r"own Megatron-FSDP: (\w+) loads") == loads + 2
    tree = ast.parse(source("tests/checkpoint/stock_readers/test_torch_dist.py"))
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    made = next(node.value for node in assigned if ast.unparse(node.targets[0]) == "loads")
    assert isinstance(made, ast.List) and said(r"own loader: (\w+) loads") == len(made.elts)
