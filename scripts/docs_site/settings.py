"""The settings reference: fields of our configuration dataclasses, read from their source.

What lives here: which dataclasses are settings, and a table of each: name, type, default, what its docstring says.
What may not: any fact about a setting. Standard library only: the site is built without Megatron.
"""

from __future__ import annotations

import ast
import html
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_OURS = "src/qwen3vl_bridge"


@dataclass(frozen=True)
class Group:
    """A dataclass of settings.

    Attributes:
        prefix: what stands before a field on the command line.
        file: where it is, below the package.
        name: of the class.
        meanings: further classes whose docstrings speak of its fields.
    """

    prefix: str
    file: str
    name: str
    meanings: tuple[tuple[str, str], ...] = ()

    @property
    def module(self) -> str:
        """The module's dotted name."""
        return "qwen3vl_bridge." + self.file.removesuffix(".py").replace("/", ".")


_FIELDS = ("models/settings/fields.py", "VisionLanguageFields")
_EXPERTS = ("models/provider.py", "ExpertsMixin")
_QWEN3_VL, _QWEN3_5 = "models/qwen3_vl/provider.py", "models/qwen3_5/provider.py"
_ROWS = ("data/dataset_provider.py", "ConversationRows")

# By the place that a page has for them.
GROUPS: dict[str, tuple[Group, ...]] = {
    "model": (
        Group("model.", *_FIELDS),
        Group("model.", *_EXPERTS),
        Group("model.", _QWEN3_VL, "Qwen3VLModelProvider", (_FIELDS,)),
        Group("model.", _QWEN3_VL, "Qwen3VLMoEModelProvider", (_EXPERTS, _FIELDS)),
        Group("model.", _QWEN3_5, "Qwen35VLModelProvider", (_FIELDS,)),
        Group("model.", _QWEN3_5, "Qwen35VLMoEModelProvider", (_EXPERTS, _FIELDS)),
        Group("model.dist_train.", "models/settings/fields.py", "DistTrainConfig"),
    ),
    "dataset": (
        Group("dataset.", *_ROWS),
        Group("dataset.", "data/dataset_provider.py", "Qwen3VLConversationProvider", (_ROWS,)),
        Group("dataset.vision.", "data/encoding.py", "VisionLimits"),
        Group("dataset.columns.", "data/schemas/record_schemas.py", "Columns"),
        Group("", "data/sources/mixture.py", "MixedSet"),
        Group("dataset.", "data/energon/energon_provider.py", "Qwen3VLEnergonProvider", (_ROWS,)),
    ),
    "training": (
        Group("", "training/config.py", "Qwen3VLConfigContainer"),
        Group("guard.", "training/config.py", "GuardConfig"),
        Group("accuracy.", "training/config.py", "AccuracyConfig"),
        Group("optimizer_config_override_provider.", "training/tower_settings.py", "Qwen3VLTowers"),
        Group("peft.", "peft/lora.py", "Qwen3VLParts"),
    ),
}


@dataclass(frozen=True)
class Setting:
    """A field.

    Attributes:
        name: with the group's prefix.
        type: as annotated; "" for a field of Megatron-Bridge's that a docstring speaks of.
        default: as written, or "" where one has to be given.
        meaning: what the docstring says; "" where it says nothing.
    """

    name: str
    type: str
    default: str
    meaning: str


def settings(group: Group) -> list[Setting]:
    """The fields of a group, in the order of the source; then those of its bases that its docstring speaks of."""
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
    """A group as Markdown: a heading, the docstring's first paragraph, and a row for each setting."""
    found = _class(group.file, group.name)
    words = inspect.cleandoc(ast.get_docstring(found) or "").partition("\n\n")[0].replace("\n", " ")
    rows = [f"| {_code(one.name)} | {_code(one.type)} | {_code(one.default)} | {_cell(one.meaning)} |"
            for one in settings(group)]  # fmt: skip
    head = f"### {group.name}\n\n{_text(words)} (`{_OURS}/{group.file}`)\n"
    return "\n".join([head, "| setting | type | default | |", "|---|---|---|---|", *rows, ""])


def breakable(text: str) -> str:
    """Code as HTML for a table's cell, with places where a line may end."""
    return re.sub(r"(?<=\w)([._])(?=\w)", r"\1<wbr>", html.escape(text).replace("|", "&#124;"))


def _code(text: str) -> str:
    return f"<code>{breakable(text)}</code>" if text else ""


def _cell(text: str) -> str:
    return _text(text).replace("|", "\\|") or "Megatron-Bridge's field; its default here"


def _text(words: str) -> str:
    """A docstring as Markdown: `<image>` in it is not an HTML tag; code spans are escaped by Markdown itself."""
    parts = words.split("`")
    return "`".join(part if place % 2 else html.escape(part, quote=False) for place, part in enumerate(parts))


def _class(file: str, name: str) -> ast.ClassDef:
    tree = ast.parse((ROOT / _OURS / file).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return found


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
    """What the docstring's "Attributes" say, by name."""
    _, _, listed = (ast.get_docstring(found) or "").partition("Attributes:\n")
    listed = re.split(r"\n(?=\S)", listed)[0]  # other sections begin at the margin
    entries = re.findall(r"^    (\w[\w, ]*):\s(.*?)(?=^    \w|\Z)", listed, re.DOTALL | re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in entries for name in re.split(r",\s*", names)}
