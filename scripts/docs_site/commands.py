"""The reference of the commands and recipes: options as their parsers have them, recipes as their registry has them.

What lives here: finding the parsers, and tables. What may not: any option's meaning. Imports the command lines, which
import nothing that takes long before an option asks for it.
"""

from __future__ import annotations

import argparse
import html
import importlib
from collections.abc import Iterator
from unittest import mock

from scripts.docs_site.settings import breakable


class _Found(Exception):
    """A command has made its parser, and is about to use it."""


def parser_of(target: str, prog: str) -> argparse.ArgumentParser:
    """The parser that a command's function makes.

    Args:
        target: "module:function", as `qwen3vl_bridge.cli.main.COMMANDS` has it.
        prog: the command's name.
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
    """Every command and its verbs as Markdown, with a row for each option."""
    from qwen3vl_bridge.cli.main import COMMANDS

    parts = []
    for name, (target, words) in COMMANDS.items():
        for prog, parser in _verbs(parser_of(target, f"qwen3vl {name}")):
            rows = [f"| {_code(_usage(one))} | {_meaning(parser, one)} |" for one in _options(parser)]
            if rows:
                said = parser.description or words
                parts += [f"### {prog}\n", " ".join(said.split()), "", "| option | |", "|---|---|", *rows, ""]
    return "\n".join(parts)


def recipes() -> str:
    """Every recipe as Markdown: its name, the GPUs that it is meant for, and its first sentence."""
    from qwen3vl_recipes.registry import recipes as registered

    rows = [
        f"| `{name}` | {f'{one.gpus} {one.gpu}' if one.gpus else 'none'} | {one.summary} |"
        for name, one in registered().items()
    ]
    return "\n".join(["| recipe | GPUs | |", "|---|---|---|", *rows, ""])


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


def _code(text: str) -> str:
    return f"<code>{breakable(text)}</code>"
