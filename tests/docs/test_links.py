"""Links, file names, options and settings on the pages exist."""

import re
import shlex
import subprocess

from qwen3vl_bridge.cli.main import COMMANDS
from qwen3vl_bridge.config.other_trainers import translate_setting

import pytest
import yaml
from qwen3vl_recipes import overrides, qwen3_vl_30b_a3b_peft_config, qwen3_vl_30b_a3b_sft_config
from qwen3vl_recipes.cli import _parse, _parser
from qwen3vl_recipes.registry import recipes

from scripts import compatibility, upstream_tests
from scripts.docs_site import hooks
from scripts.docs_site.reference import parser_of
from tests.docs.pages import PAGES, ROOT, blocks, commands, read, without_code


def pages_of_the_nav() -> list[str]:
    """Return the pages of the nav in mkdocs.yml, in order."""

    def walk(entry: object):
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict | list):
            for inner in entry.values() if isinstance(entry, dict) else entry:
                yield from walk(inner)

    # Read only the nav: below it mkdocs.yml has tags that yaml does not know.
    found = re.search(r"^nav:\n(?: .*\n)+", read("mkdocs.yml"), re.MULTILINE)
    assert found
    return list(walk(yaml.safe_load(found[0])["nav"]))


def tracked_files() -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}


def test_mkdocs_nav_lists_every_page_once():
    listed = pages_of_the_nav()
    assert len(set(listed)) == len(listed)
    here = {hooks.ROOT_PAGES.get(path, path.removeprefix("docs/")) for path in PAGES}
    assert set(listed) == here


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, "benchmarks/results/README.md", "benchmarks/results/recipes.md"])
def test_links_of_page_lead_to_existing_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(read(page))):
        if re.match(r"[a-z]+:", target):
            assert target.startswith("https://"), target
            continue
        place, _, anchor = target.partition("#")
        file = (ROOT / page).parent / place if place else ROOT / page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text()), target


OURS = (r"\.ci", r"\.github", "benchmarks", "examples", "recipes", "requirements", "scripts", "src", "docs", "tests")
NAMES_OTHER_REPOSITORIES = ("docs/callers.md", "docs/recipes.md")


@pytest.mark.parametrize("page", PAGES)
def test_files_tests_and_make_targets_named_on_page_exist(page):
    text, tracked = PAGES[page], tracked_files()
    folders = {name.rpartition("/")[0] for name in tracked}
    folders |= {"/".join(name.split("/")[:depth]) for name in folders for depth in range(1, name.count("/") + 1)}
    ours = OURS[-2:] if page in NAMES_OTHER_REPOSITORIES else OURS
    for name in [] if page == "CHANGELOG.md" else re.findall(rf"`((?:{'|'.join(ours)})/[^`\s]*)`", text):
        file, _, test = name.partition("::")
        assert file in tracked or file.rstrip("/") in folders, name
        assert not test or f"def {test}(" in read(file), name
    for target in set(re.findall(r"`make ([a-z-]+)", text)):
        assert subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True).returncode == 0, target


def test_docs_pages_named_in_source_code_exist():
    for name in tracked_files():
        if name.endswith((".py", ".sh", ".toml")) or name == "Makefile":
            for page in re.findall(r"docs/[\w/]+\.md", read(name)):
                if not name.startswith("tests/"):
                    assert (ROOT / page).is_file(), f"{name} names {page}"


def programs(page: str) -> list[list[str]]:
    """Return the words after `qwen3vl` of a page's commands, with torchrun or without."""
    found = (re.search(r"(?:^|-m |--no-python )qwen3vl(?:_bridge)? (.*)", line) for line in commands(page))
    return [shlex.split(one[1]) for one in found if one]


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if programs(text)])
def test_commands_options_and_recipes_on_page_exist(page):
    for command, *words in programs(PAGES[page]):
        parser = parser_of(COMMANDS[command][0], f"qwen3vl {command}")
        if command != "train":
            parser.parse_args(words)
            continue
        options = _parse(parser, words)
        assert options.recipe in recipes() or ":" in options.recipe, options.recipe
        assert all(re.match(r"[\w.]+=.", setting) for setting in options.settings), options.settings


@pytest.mark.parametrize("page", ["docs/upgrading.md", "docs/compatibility.md"])
def test_script_commands_on_page_are_accepted_by_parsers(page):
    parsers = {"compatibility": compatibility.make_parser(), "upstream_tests": upstream_tests._parser()}
    lines = [shlex.split(line, comments=True) for block in blocks(PAGES[page], "bash") for line in block.splitlines()]
    for program, *words in [[word for word in line if not re.match(r"[A-Z_]+=", word)] for line in lines if line]:
        if program == "make":
            assert subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True).returncode == 0
        elif words[:2] == ["-m", "pytest"]:
            assert all((ROOT / path).exists() for path in words[2:] if path.startswith("tests")), words
        else:
            assert (ROOT / words[0]).is_file() and program == ".venv/bin/python", words
            options = parsers[words[0].removeprefix("scripts/").removesuffix(".py")].parse_args(words[1:])
            if "==" in getattr(options, "which", [""])[0]:
                compatibility.chosen_versions(options.which, beyond=options.beyond)


ROWS = [line.strip("|").split("|") for line in PAGES["docs/coming_from.md"].splitlines() if re.match(r"\|.*`", line)]
OUR_WORDS = [word for row in ROWS for code in re.findall(r"`([^`]+)`", row[-1]) for word in code.split()]


def test_coming_from_md_names_existing_settings_and_options():
    settings = [word for word in OUR_WORDS if re.match(r"[a-z_.]+=", word)]
    for make in (qwen3_vl_30b_a3b_peft_config, qwen3_vl_30b_a3b_sft_config):
        words = [word for word in settings if not word.startswith("peft.") or make is qwen3_vl_30b_a3b_peft_config]
        cfg = overrides.apply(make(), words)
        assert cfg.model.recompute_granularity == "full" and cfg.dataset.vision.image_max_pixels == 1003520
    known = {option for action in _parser("qwen3vl train")._actions for option in action.option_strings}
    assert {word for word in OUR_WORDS if word.startswith("--") and word not in known} == {"--propose"}


def test_coming_from_md_matches_hints_of_command_line():
    for row in ROWS:
        for alias in re.findall(r"`-{0,2}(\w+)`", " ".join(row[1:-1])):
            for name in re.findall(r"[a-z]+\.[\w.]+", translate_setting(alias) or ""):
                assert name in row[-1] or alias == "output_dir", (alias, name)


def test_upstream_patch_pages_name_existing_code():
    index = PAGES["docs/upstream/index.md"]
    for page, text in PAGES.items():
        if page.startswith("docs/upstream/") and not page.endswith("index.md"):
            assert f"]({page.rpartition('/')[2]})" in index
            for name, file in re.findall(r"`(\w+)` \(`([\w/]+\.py)`\)", text):
                path = ROOT / "src" / "qwen3vl_bridge" / file
                if path.exists() or name[0].isupper():
                    assert name in path.read_text(), f"{page}: {name}"
