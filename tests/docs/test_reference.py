"""The settings reference has every field of our configurations, as the classes have it; the site's own Markdown."""

import dataclasses
import importlib
import re
import sys
from pathlib import Path

import qwen3vl_bridge

import pytest

from scripts.docs_site import hooks, reference

ROOT = Path(__file__).resolve().parents[2]
GROUPS = [group for groups in reference.GROUPS.values() for group in groups]


def class_of(group: reference.Group) -> type:
    return getattr(importlib.import_module(group.module), group.name)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_fields_types_and_defaults_are_those_of_the_class(group):
    found, kind = {one.name.removeprefix(group.prefix): one for one in reference.settings(group)}, class_of(group)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    own = {name for name in vars(kind).get("__annotations__", {}) if name in fields}
    assert own <= found.keys()
    assert {name for name, one in found.items() if one.type} == own
    assert found.keys() <= fields.keys() | {"moe_layer_freq"}, "a docstring speaks of a field that is none"
    for name in own:
        assert found[name].type == fields[name].type
        default = fields[name].default
        if default is dataclasses.MISSING:
            given = fields[name].default_factory is not dataclasses.MISSING
            assert bool(found[name].default) == given
        elif isinstance(default, int | float | str | None):
            assert eval(found[name].default, vars(sys.modules[kind.__module__])) == default


def test_every_configuration_that_a_group_leads_to_is_a_group():
    known = {class_of(group) for group in GROUPS}
    for group in GROUPS:
        for field in dataclasses.fields(class_of(group)):
            made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            if dataclasses.is_dataclass(made) and type(made).__module__.startswith("qwen3vl_bridge"):
                assert type(made) in known, f"{group.name}.{field.name} is a {type(made).__name__}"
    for name in qwen3vl_bridge.__all__:
        found = getattr(qwen3vl_bridge, name)
        ours = dataclasses.is_dataclass(found) and name.startswith("Qwen3VL")
        assert not ours or found in known or issubclass(found, class_of(GROUPS[-1])), f"{name} is not in the reference"


def test_our_own_settings_have_words():
    """A field without any is Megatron-Bridge's, with another default."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.peft.lora import VLMLoRA
    from megatron.bridge.training.config import ConfigContainer

    theirs = {field.name for kind in (GPTModelProvider, VLMLoRA, ConfigContainer) for field in dataclasses.fields(kind)}
    for group in GROUPS:
        for one in reference.settings(group):
            name = one.name.removeprefix(group.prefix)
            assert one.meaning or name in theirs, f"{group.name}.{name}: the docstring says nothing of it"


def test_commands_and_recipes():
    text = reference.commands()
    for expected in ("### qwen3vl convert import", "### qwen3vl train", "### qwen3vl doctor", "--dry-<", "--resume"):
        assert expected.replace("--dry-<", "--dry-run") in text
    assert "`qwen3_vl_8b_sft_config` | 8 H100 |" in reference.recipes()


def test_public_names_are_found_in_their_modules():
    for file in hooks.PUBLIC.values():
        names = hooks.public_names(ROOT / file)
        assert names
        for name in names:
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize(("markdown", "expected"), [
    ("words:\n- a\n- b\n", "words:\n\n- a\n- b\n"), ("- a\n  - b\n  words\n", "- a\n    - b\n    words\n"),
    ("words\n| a |\n|---|\n", "words\n\n| a |\n|---|\n"),
    ("a\n```\nb\n- c [d](../README.md)\n```\ne\n", "a\n\n```\nb\n- c [d](../README.md)\n```\n\ne\n"),
    ("[a](../README.md#try-it) [b](train.md)\n", "[a](overview.md#try-it) [b](train.md)\n"),
    ("[a](../tests/docs)\n", '<span title="tests/docs">a</span>\n'),
    ("![a](images/loss.png) [b](https://x.org) [c](#d)\n", "![a](images/loss.png) [b](https://x.org) [c](#d)\n"),
])  # fmt: skip
def test_markdown_of_the_site(markdown, expected):
    assert hooks.dialect(markdown, "docs/page.md") == expected


def test_long_names_in_tables_may_break():
    html = "<p><code>a_b</code></p><td><code>a_b.c/d</code> e_f</td>"
    expected = "<p><code>a_b</code></p><td><code>a_<wbr>b.<wbr>c/<wbr>d</code> e_f</td>"
    assert hooks.on_page_content(html, None, None, None) == expected


def test_places_for_generated_parts_are_known():
    for page in (ROOT / "docs").glob("*.md"):
        for kind, which in re.findall(r"<!-- generated: (\w+)(?: (\w+))? -->", page.read_text()):
            assert hooks.generated(kind, which or None)
