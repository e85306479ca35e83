"""Generate the tables of docs/settings.md: settings from the source of their dataclasses, options from the parsers.

    python -m scripts.docs_site.reference    # writes the page

Megatron is not imported: settings are read with `ast`, and parsers defer slow imports.
"""

from __future__ import annotations

import argparse
import ast
import html
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
_OURS = "src/qwen3vl_bridge"


PAGE = ROOT / "docs/settings.md"
_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Group:
    """A dataclass of settings.

    Attributes:
        prefix: prefix of a field on the command line, such as "guard.".
        file: file of the class, relative to the package.
        name: name of the class.
        meanings: (file, name) of further classes with docstrings that describe fields of this class.
    """

    prefix: str
    file: str
    name: str
    meanings: tuple[tuple[str, str], ...] = ()

    @property
    def module(self) -> str:
        """Return the module's dotted name."""
        return "qwen3vl_bridge." + self.file.removesuffix(".py").replace("/", ".")


_FIELDS = ("config/fields.py", "VisionLanguageFields")
_EXPERTS = ("models/common/provider.py", "ExpertsMixin")
_QWEN3_VL, _QWEN3_5 = "models/qwen3_vl/provider.py", "models/qwen3_5/provider.py"
_HYBRID, _QWEN4_EXP = "models/common/hybrid_provider.py", "models/qwen4_exp/provider.py"
_HYBRID_FIELDS, _HYBRID_EXPERTS = (_HYBRID, "HybridModelProvider"), (_HYBRID, "HybridExpertsMixin")
_ROWS = ("data/dataset_provider.py", "ConversationSettings")

# Name of a generated part of the page -> the dataclasses in it.
GROUPS: dict[str, tuple[Group, ...]] = {
    "model": (
        Group("model.", *_FIELDS),
        Group("model.", *_EXPERTS),
        Group("model.", _QWEN3_VL, "Qwen3VLModelProvider", (_FIELDS,)),
        Group("model.", _QWEN3_VL, "Qwen3VLMoEModelProvider", (_EXPERTS, _FIELDS)),
        Group("model.", *_HYBRID_FIELDS, (_FIELDS,)),
        Group("model.", *_HYBRID_EXPERTS, (_EXPERTS, _FIELDS)),
        Group("model.", _QWEN3_5, "Qwen35VLModelProvider", (_HYBRID_FIELDS, _FIELDS)),
        Group("model.", _QWEN3_5, "Qwen35VLMoEModelProvider", (_HYBRID_EXPERTS, _EXPERTS, _FIELDS)),
        Group("model.", _QWEN4_EXP, "Qwen4ExpModelProvider", (_HYBRID_FIELDS, _HYBRID_EXPERTS, _EXPERTS, _FIELDS)),
    ),
    "dataset": (
        Group("dataset.", *_ROWS),
        Group("dataset.", "data/dataset_provider.py", "Qwen3VLConversationProvider", (_ROWS,)),
        Group("dataset.vision.", "data/encoding.py", "VisionLimits"),
        Group("dataset.columns.", "data/conversations.py", "Columns"),
        Group("", "data/mixture.py", "MixedSet"),
        Group("dataset.", "data/webdataset.py", "Qwen3VLEnergonProvider", (_ROWS,)),
    ),
    "training": (
        Group("", "training/config.py", "Qwen3VLConfigContainer"),
        Group("checkpoint.", "training/config.py", "Qwen3VLCheckpointConfig"),
        Group("objective.", "training/objective_settings.py", "ObjectiveConfig"),
        Group("guard.", "training/config.py", "GuardConfig"),
        Group("accuracy.", "training/config.py", "AccuracyConfig"),
        Group("optimizer_config_override_provider.", "training/config.py", "Qwen3VLLearningRates"),
        Group("peft.", "peft/lora.py", "Qwen3VLAdapters"),
    ),
}


@dataclass(frozen=True)
class Setting:
    """A field of a dataclass of settings.

    Attributes:
        name: name with the prefix of the group.
        type: annotation in the source; "" for an inherited field of Megatron-Bridge.
        default: default in the source; "" if there is none.
        meaning: description in the docstring; "" if there is none.
    """

    name: str
    type: str
    default: str
    meaning: str


def settings(group: Group) -> list[Setting]:
    """Return the fields of a group in the order of the source, then inherited fields that the docstring describes."""
    found = _class(group.file, group.name)
    own = _meanings(found)
    known = {
        name: text for file, cls in reversed(group.meanings) for name, text in _meanings(_class(file, cls)).items()
    }
    known |= own
    defined = {name: (kind, default) for name, kind, default in _fields(found)}
    listed = {name: defined.get(name, ("", "")) for name in (*defined, *own)}
    return [
        Setting(group.prefix + name, kind, default, known.get(name, "")) for name, (kind, default) in listed.items()
    ]


def table(group: Group) -> str:
    """Return a group as Markdown: a heading, the docstring's first paragraph, and a row for each setting."""
    found = _class(group.file, group.name)
    words = inspect.cleandoc(ast.get_docstring(found) or "").partition("\n\n")[0].replace("\n", " ")
    rows = [f"| {_code(one.name)} | {_code(one.type)} | {_code(one.default)} | {_cell(one.meaning)} |"
            for one in settings(group)]  # fmt: skip
    head = f"### {group.name}\n\n{_text(words)} (`{_OURS}/{group.file}`)\n"
    return "\n".join([head, "| setting | type | default | |", "|---|---|---|---|", *rows, ""])


def _code(text: str) -> str:
    # GitHub and Python-Markdown treat an escaped bar in a code span of a table differently, but HTML the same.
    return (
        f"<code>{html.escape(text, quote=False).replace('|', '&#124;')}</code>" if "|" in text else text and f"`{text}`"
    )


def _cell(text: str) -> str:
    return _text(text).replace("|", "\\|") or "Megatron-Bridge's field; its default here"


def _text(words: str) -> str:
    """Return a docstring as Markdown, with HTML escaped outside code."""
    parts = words.split("`")
    return "`".join(part if place % 2 else html.escape(part, quote=False) for place, part in enumerate(parts))


def _class(file: str, name: str) -> ast.ClassDef:
    source = (ROOT / _OURS / file).read_text()
    (found,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name]
    lines = source.splitlines()
    for field in found.body:
        field.type_comment = lines[field.end_lineno - 1].partition("  # ")[2] or _comment_above(lines, field.lineno - 1)
    return found


def _comment_above(lines: Sequence[str], line: int) -> str:
    """Return the comment directly above the line with index `line`; "" if there is none."""
    first = line
    while lines[first - 1].strip().startswith("# "):
        first -= 1
    return " ".join(above.strip().removeprefix("# ") for above in lines[first:line])


def _fields(found: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    for node in found.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        kind = ast.unparse(node.annotation)
        if not kind.startswith("ClassVar"):
            yield node.target.id, kind, _default(node.value)


def _default(value: ast.expr | None) -> str:
    if value is None:
        return ""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        given = {word.arg: word.value for word in value.keywords}
        if "default" in given:
            return ast.unparse(given["default"])
        factory = given["default_factory"]
        made = ast.unparse(factory.body) if isinstance(factory, ast.Lambda) else f"{ast.unparse(factory)}()"
        return {"list()": "[]", "dict()": "{}"}.get(made, made)
    return ast.unparse(value)


def _meanings(found: ast.ClassDef) -> dict[str, str]:
    """Return descriptions of fields by name, from "Attributes" in the docstring, or from comments at the fields."""
    names = {name for name, _, _ in _fields(found)}
    lines = (node for node in found.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in names)
    comments = {ast.unparse(node.target): node.type_comment for node in lines if node.type_comment}
    _, _, listed = (ast.get_docstring(found) or "").partition("Attributes:\n")
    listed = re.split(r"\n(?=\S)", listed)[0]  # other sections begin at the margin
    entries = re.findall(r"^    (\w[\w, ]*):\s(.*?)(?=^    \w|\Z)", listed, re.DOTALL | re.MULTILINE)
    return comments | {name: " ".join(text.split()) for names, text in entries for name in re.split(r",\s*", names)}


class _Found(Exception):
    """Raised to stop a command after it has created its parser."""


def parser_of(target: str, prog: str) -> argparse.ArgumentParser:
    """Return the argument parser of a command.

    Args:
        target: function of the command as "module:function", as in `qwen3vl_bridge.cli.main.COMMANDS`.
        prog: name of the command.
    """
    made: list[argparse.ArgumentParser] = []

    def parse(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        made.append(parser)
        raise _Found

    module, _, function = target.partition(":")
    run = getattr(importlib.import_module(module), function)
    names = ("parse_args", "parse_known_args", "parse_intermixed_args")
    try:
        with mock.patch.multiple(argparse.ArgumentParser, **dict.fromkeys(names, parse)):
            run([], prog=prog)
    except _Found:
        return made[0]
    raise ValueError(f"{target} has no parser, expected one to be asked for")


def commands() -> str:
    """Return all commands and their verbs as Markdown, with a table of options for each."""
    from qwen3vl_bridge.cli.main import COMMANDS

    parts = []
    for name, (target, words) in COMMANDS.items():
        for prog, parser in _verbs(parser_of(target, f"qwen3vl {name}")):
            rows = [f"| {_code(_usage(one))} | {_meaning(parser, one)} |" for one in _options(parser)]
            if rows:
                said = parser.description or words
                parts += [f"### {prog}\n", " ".join(said.split()), "", "| option | |", "|---|---|", *rows, ""]
    return "\n".join(parts)


def _verbs(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser.prog, parser
    for action in below:
        for inner in action.choices.values():
            yield from _verbs(inner)


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS:
            yield action


def _usage(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else str(action.metavar or "|".join(map(str, action.choices or ())) or action.dest)
    return f"{', '.join(action.option_strings)} {value}".strip()


def _meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    said = parser._get_formatter()._expand_help(action) if action.help else ""
    needed = " (needed)" if action.required and action.option_strings else ""
    return html.escape(said + needed, quote=False).replace("|", "\\|")


def fill(page: str) -> str:
    """Return the page with generated text between `<!-- generated: NAME -->` and `<!-- end -->`."""

    def part(found: re.Match[str]) -> str:
        name = found[2]
        text = commands() if name == "commands" else "\n".join(table(group) for group in GROUPS[name])
        return f"{found[1]}\n{text}\n{found[3]}"

    return _PART.sub(part, page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
