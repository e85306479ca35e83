"""The pages of docs/: all are in the site's nav, their links lead somewhere."""

import itertools
import re
import shlex
import subprocess
from pathlib import Path

from qwen3vl_bridge.cli.main import COMMANDS
from qwen3vl_bridge.registry import family

import pytest
import yaml
from qwen3vl_recipes.cli import _parse
from qwen3vl_recipes.registry import recipes

from scripts.docs_site import hooks
from scripts.docs_site.reference import parser_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.relative_to(ROOT / "docs").as_posix(): path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
SOURCES = {f"docs/{name}": text for name, text in PAGES.items()} | {
    path: (ROOT / path).read_text() for path in hooks.ROOT_PAGES
}
QUICK_STARTS = [name for name in PAGES if name.startswith("quickstart_")]
# Pages whose commands run in tests: tests/test_readme.py.
TESTED = ("README.md", "docs/convert.md", "docs/train.md")


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def nav() -> list[str]:
    """The pages of the nav, in its order."""

    def walk(entry: object):
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict | list):
            for inner in entry.values() if isinstance(entry, dict) else entry:
                yield from walk(inner)

    # The nav alone: what stands below has mkdocs' own tags.
    found = re.search(r"^nav:\n(?: .*\n)+", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert found
    return list(walk(yaml.safe_load(found[0])["nav"]))


def test_every_page_is_in_the_nav_once():
    listed = nav()
    assert len(set(listed)) == len(listed)
    here = set(PAGES) | set(hooks.ROOT_PAGES.values())
    assert set(listed) == here, f"mkdocs.yml, nav: {sorted(here ^ set(listed))} is on one side alone"


def slugs(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", SOURCES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(SOURCES[page])):
        if re.match(r"[a-z]+:", target):
            assert target.startswith("https://"), f"{page}: {target}"
            continue
        place, _, anchor = target.partition("#")
        file = (ROOT / page).parent / place if place else ROOT / page
        assert file.exists(), f"{page}: {target}"
        assert not anchor or anchor in slugs(file.read_text()), f"{page}: {target}"


def commands(text: str) -> list[str]:
    """The commands of a page's console and bash blocks, each on one line."""
    blocks = re.findall(r"```(?:console|bash)\n(.*?)```", text, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(line.partition("    #")[0].split()) for line in lines if line.strip()]


@pytest.mark.parametrize("page", [*QUICK_STARTS, "verify.md"])
def test_commands_of_a_quick_start_are_those_that_run_in_a_test(page):
    tested = {line for name in TESTED for line in commands(SOURCES[name])}
    found = commands(PAGES[page])
    assert found
    for command in found:
        if page == "quickstart_cpu.md" and command.startswith("qwen3vl train "):
            continue  # test_own_records_on_a_cpu of tests/test_readme.py
        assert command in tested, f"{page}: `{command}` is on none of {', '.join(TESTED)}"
        if command.startswith("make "):
            target = command.split()[1]
            assert subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True).returncode == 0


def programs(page: str) -> list[list[str]]:
    """The words after `qwen3vl` of a page's commands, with torchrun or without."""
    found = (re.search(r"(?:^|-m |--no-python )qwen3vl(?:_bridge)? (.*)", line) for line in commands(PAGES[page]))
    return [shlex.split(one[1]) for one in found if one]


@pytest.mark.parametrize("page", [name for name in PAGES if programs(name)])
def test_options_of_commands_exist(page):
    """By the parsers of the commands; recipes by their registry."""
    for command, *words in programs(page):
        parser = parser_of(COMMANDS[command][0], f"qwen3vl {command}")
        if command != "train":
            parser.parse_args(words)
            continue
        options = _parse(parser, words)
        assert options.recipe in recipes(), f"{page}: {options.recipe}"
        assert all(re.match(r"[\w.]+=.", setting) for setting in options.settings), f"{page}: {options.settings}"


def names_in(pattern: str) -> list[str]:
    """What a pattern such as `a{b,c}{,-d}` stands for."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def test_the_table_of_releases_has_every_name_that_presets_know():
    section = PAGES["compatibility.md"].partition("## Released models\n")[2].partition("| chat template of |")[0]
    found = [name for pattern in re.findall(r"`(Qwen/.*?)`", section) for name in names_in(pattern)]
    presets = [family(name).presets for name in ("qwen3_vl", "qwen3_5")]
    assert sorted(found) == sorted({name for one in presets for size in one.PRESETS for name in one.hub_ids(size)})
