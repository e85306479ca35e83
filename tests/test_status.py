"""The README's status table is the one that the repository gives, and what it names exists."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from scripts import status
from scripts.gpu_check.results import RESULTS, Outcome
from scripts.gpu_check.steps import STEPS

README = (status.ROOT / "README.md").read_text()
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.recipes.test_twins" name="test_a"/>
<testcase classname="tests.recipes.test_twins.Group" name="test_b"><skipped/></testcase>
<testcase classname="tests.recipes.test_twins_too" name="test_c"/>
<testcase classname="tests.planning.test_memory" name="test_d[a::b[1]]"/>
</testsuite></testsuites>"""


def test_the_readmes_table_is_up_to_date():
    done = subprocess.run([sys.executable, status.__file__, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_it_names_exists():
    steps = {step.name for step in STEPS}
    for feature in status.FEATURES:
        assert all((status.ROOT / test).exists() for test in feature.tests), feature
        assert feature.step is None or feature.step in steps, feature
        assert all((status.ROOT / page).is_file() for page in re.findall(r"\((.*?)\)", feature.estimated)), feature


def test_recorded_tests_are_those_of_features_and_passed():
    named = {test for feature in status.FEATURES for test in feature.tests}
    for path, row in status.recorded(status.CPU).items():
        assert path in named and row.passed and not row.failed, row
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", row.date) and re.fullmatch(
            r"[0-9a-f]{7,40}( [0-9a-f]{7,40})*", row.commit
        ), row


def test_runs_of_pytest_fill_the_column_of_paths_of_which_every_test_ran(tmp_path):
    junit, slow = tmp_path / "junit.xml", tmp_path / "slow.xml"
    junit.write_text(JUNIT)
    twins, planning = "tests/recipes/test_twins.py", "tests/planning/test_memory.py::test_d[a::b[1]]"
    collected = [f"{twins}::test_a", f"{twins}::Group::test_b", f"{twins}_too::test_c", planning]
    twins_row, planning_row = status.read_junit({junit: "abc1234"}, collected)
    assert (twins_row.path, twins_row.passed, twins_row.failed, twins_row.skipped) == (twins, 1, 0, 1)
    assert (planning_row.path, planning_row.passed) == ("tests/planning", 1)
    assert "[test_twins](tests/recipes/test_twins.py) 1 passed, 1 skipped |" in status.table({twins: twins_row}, {})
    assert "[test_twins](tests/recipes/test_twins.py) no run recorded |" in status.table({}, {})

    collected.append(f"{twins}::test_slow")  # that this run left out
    assert [row.path for row in status.read_junit({junit: "abc1234"}, collected)] == ["tests/planning"]
    slow.write_text('<testsuites><testcase classname="tests.recipes.test_twins" name="test_slow"/></testsuites>')
    twins_row, _ = status.read_junit({junit: "abc1234", slow: "def5678"}, collected)
    assert twins_row.passed == 2 and twins_row.commit == "abc1234 def5678"

    junit.write_text(JUNIT.replace("<skipped/>", "<failure/>"))
    twins_row, _ = status.read_junit({junit: "abc1234"}, collected[:-1])
    assert twins_row.words == "1 failed, 1 passed"  # of two


def test_results_of_a_gpu_check_fill_the_column(tmp_path):
    assert "passed" not in status.table({}, status.outcomes(tmp_path / "none.jsonl"))
    results = tmp_path / RESULTS
    results.write_text(Outcome("train, 2B", "passed", 1.0).line)
    rows = status.table({}, status.outcomes(results)).splitlines()
    (row,) = (row for row in rows if "Recipes" in row)
    assert "| passed (2B, one GPU) |" in row  # one step of one size does not show all recipes


@pytest.mark.parametrize("row", README.split("| shown by |\n")[1].split("\n\n")[0].splitlines()[1:])
def test_facts_about_megatron_bridge_name_tests_or_results(row):
    *_, shown = row.strip("| ").split(" | ")
    targets = re.findall(r"\[[^]]*\]\(([^)#]+)[^)]*\)", shown)
    assert all((status.ROOT / target).is_file() for target in targets), row
    assert any(re.match(r"tests/(.*/)?test_\w+\.py$|benchmarks/results/\w+\.csv$", target) for target in targets), row
