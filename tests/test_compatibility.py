"""scripts/compatibility.py: which versions it chooses, what it installs, and the rows that it writes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts import compatibility, upstream_tests
from scripts.compatibility import PACKAGES, Result, Row

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = {"megatron-core": "0.19.2", "megatron-bridge": "0.6.2", "transformers": "5.12.1", "torch": "2.13.0"}
TABLE = """Before.

| row | megatron-core | megatron-bridge | transformers | torch | tests | date | commit |
|---|---|---|---|---|---|---|---|
| oldest | 0.19.0 | 0.6.0 | 5.8.0 | 2.13.0 | 1 passed | 2026-01-01 | abc |
| newest | 0.19.1 | 0.6.1 | 5.11.0 | 2.13.0 | 1 passed | 2026-01-01 | abc |
| chosen | 0.19.2 | 0.6.2 | 5.12.1 | 2.13.0 | 2 passed | 2026-01-01 | abc |
| chosen | 0.19.2 | 0.6.2 | 5.9.0 | 2.13.0 | 3 passed | 2026-01-01 | abc |

After.

| another | table |
|---|---|
"""


def row(name: str, **versions: str) -> Row:
    results = {part: Result({"passed": 2}, [], 1.0) for part in compatibility.SELECTION}
    return Row(name, VERSIONS | versions, [], "def", results)


def test_compatibility_selection_lists_only_existing_tests():
    for part in compatibility.SELECTION.values():
        paths = [word.removeprefix("--ignore=") for word in part if word.startswith(("tests/", "--ignore="))]
        assert paths
        for path in paths:
            file, _, name = path.partition("::")
            assert (ROOT / file).exists(), path
            assert not name or f"def {name}(" in (ROOT / file).read_text(), path


@pytest.mark.parametrize("bad", ["transformers==5.7.0", "numpy==2.0", "transformers==", "latest"])
def test_chosen_versions_raises_if_argument_is_invalid(bad):
    with pytest.raises(SystemExit, match=r"expected one of|allows"):
        compatibility.chosen_versions([bad])


def test_chosen_versions_with_beyond_option_allows_undeclared_versions():
    assert list(compatibility.allowed()) == list(compatibility.BOUNDED)
    found = compatibility.chosen_versions(["transformers==5.7.0", "torch==2.14.0"], beyond=True)
    assert found == ("chosen", {"transformers": "5.7.0", "torch": "2.14.0"})
    name, versions = compatibility.chosen_versions(["transformers"])
    assert name == "transformers" and not compatibility.allowed()[name].specifier.contains(versions[name])


def test_replace_lines_changes_named_packages_only():
    text = "# torch\ntorch==2.13.0\ntorchvision==0.28.0 # why\ntransformer-engine; sys_platform == 'never'\n"
    found = compatibility.replace_lines(text, {"torch": "torch==2.15.0"}, ("torchvision",))
    assert found == "# torch\ntorch==2.15.0\ntorchvision\ntransformer-engine; sys_platform == 'never'\n"


def test_requirements_cpu_in_lists_every_package_that_compatibility_replaces():
    text = (ROOT / "requirements/cpu.in").read_text()
    names = {Requirement(line).name for line in text.splitlines() if line and not line.startswith("#")}
    assert names >= {*PACKAGES, *(one for following in compatibility.FOLLOWS.values() for one in following)}


def test_export_source_exports_only_src_of_given_commit(tmp_path):
    repository, target = tmp_path / "repository", tmp_path / "exported"
    (repository / "src").mkdir(parents=True)
    (repository / "src/first.py").write_text("first")
    (repository / "large").write_text("not needed for a build")
    git = ["git", "-C", str(repository), "-c", "user.name=n", "-c", "user.email=e"]
    commits = []
    for name in ("first.py", "second.py"):
        (repository / "src" / name).write_text(name)
        for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", name]):
            subprocess.run([*git, *words], check=True)
        commits.append(subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip())
    found = compatibility.export_source(f"{repository}@{commits[0]}", target)
    assert commits[0].startswith(found)
    assert [path.name for path in target.rglob("*")] == ["src", "first.py"]
    assert commits[1].startswith(compatibility.export_source(str(repository), tmp_path / "newest"))


def written(tmp_path, *rows: Row) -> list[str]:
    table = tmp_path / "table.md"
    table.write_text(TABLE)
    for one in rows:
        compatibility.record(one, table)
    text = table.read_text()
    assert text.startswith("Before.\n") and text.partition("\n\nAfter.")[2] == TABLE.partition("\n\nAfter.")[2]
    return [
        " ".join(line.split(" | ")[:5]).strip("| ") for line in text.splitlines() if re.match(r"\| \w+ \| \d", line)
    ]


def test_record_replaces_versions_table_rows_of_same_name(tmp_path):
    found = written(tmp_path, row("newest"), row("newest"))
    assert found == [
        "oldest 0.19.0 0.6.0 5.8.0 2.13.0",
        "newest 0.19.2 0.6.2 5.12.1 2.13.0",
        "chosen 0.19.2 0.6.2 5.9.0 2.13.0",
    ]


def test_record_adds_versions_table_rows_in_fixed_order(tmp_path):
    found = written(tmp_path, row("main", torch="2.14.0"), row("torch", torch="2.15.0"), row("chosen", torch="2.12.0"))
    assert [line.split()[0] for line in found] == [*("oldest", "newest", "torch", "main"), *["chosen"] * 3]
    assert found[-1].endswith("2.12.0")


def test_row_summary_names_missing_parts_and_replaced_packages():
    one = row("torch")
    one.results = {"upstream": Result({"passed": 2, "failed": 1}, ["a"], 1.0), "data": Result({"passed": 3}, [], 1.0)}
    one.others = ["nvidia-cublas==13.4", "hydra-core==1.3.2"]
    missing = [part for part in compatibility.SELECTION if part not in one.results]
    assert one.summary() == f"1 failed, 5 passed; not run: {', '.join(missing)}; with hydra-core==1.3.2"


def test_row_load_keeps_saved_results_only_for_same_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(compatibility, "RESULTS", tmp_path)
    first = row("main", torch="2.14.0 (abc)")
    first.save()
    for commit, kept in (("def", first.results), ("other", {})):
        again = row("main", torch="2.14.0 (abc)")
        again.commit, again.results = commit, {}
        again.load()
        assert again.results == kept


def test_run_tests_counts_failures_and_crashes(tmp_path):
    test = tmp_path / "test_one.py"
    test.write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -ra\n")
    python = Path(sys.executable)
    found = compatibility.run_tests(python, ["-c", str(tmp_path / "pytest.ini"), str(test)])
    assert found.counts == {"passed": 1, "failed": 1}
    assert [name.rpartition("::")[2] for name in found.failed] == ["test_bad"]
    crashed = compatibility.run_tests(python, ["--no-such-option"])
    assert crashed.counts == {"error": 1} and "exit status 4" in crashed.failed[0]


def test_read_failures_reads_listed_failures_of_upstream_tests():
    assert len(upstream_tests.read_failures()) > 5


def test_upstream_compare_reports_unlisted_failures_and_listed_passes():
    entries = [
        {"kind": "intended", "why": "so", "tests": ["a.py::T", "b.py::test_one[x]"]},
        {"kind": "machine", "why": "no GPU", "tests": ["c.py"]},
    ]

    def compare(outcomes, *, whole=True, stock=False):
        found = {f"tests/unit_tests/{name}": {"outcome": outcome, "why": "E"} for name, outcome in outcomes.items()}
        return upstream_tests.compare(found, entries, whole=whole, stock=stock)

    listed = {"a.py::T::test_one": "failed", "a.py::T::test_two[1]": "failed", "b.py::test_one[x]": "failed"}
    others = {"b.py::test_one[y]": "passed", "c.py::test_one": "failed", "c.py::test_two": "passed"}
    assert compare(listed | others) == []
    assert compare(listed | others | {"a.py::T::test_two[1]": "passed"}) == ["listed, and no longer fails: a.py::T"]
    (message,) = compare(listed | others | {"b.py::test_one[y]": "failed"})
    assert message.startswith("not listed, and fails: b.py::test_one[y]")
    assert compare({"c.py::test_one": "passed"}, whole=False) == []
    assert len(compare({"c.py::test_one": "passed"})) == 2
    assert compare(others, stock=True) == [] and len(compare(listed | others, stock=True)) == 3
