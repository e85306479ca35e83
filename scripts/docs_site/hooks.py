"""Functions that mkdocs calls while it builds the site (`hooks` in mkdocs.yml).

Add the pages at the repository's root and the API reference, convert GitHub's Markdown to the dialect of mkdocs, and
reject a site that loads something from the network.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# Path in the repository of a page outside of docs/ -> its path on the site.
ROOT_PAGES = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "requirements/README.md": "installing.md",
}
# Packages with public names that `docs/api.md` shows. Each package lists its public names in `_PUBLIC`.
PUBLIC = {
    "package": "src/qwen3vl_bridge/__init__.py",
    "checkpoint": "src/qwen3vl_bridge/checkpoint/__init__.py",
    "data": "src/qwen3vl_bridge/data/__init__.py",
}
_MARK = re.compile(r"<!-- api: (\w+) -->")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(?<=<code>)[^<]+")
_BREAK = re.compile(r"(?<=\w)[._]|[/,=:}](?=\S)")
_ITEM = re.compile(r"^(\s*)(?:[-*+]|\d+\.)\s")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages at the root of the repository (`ROOT_PAGES`) to the site."""
    from mkdocs.structure.files import File

    for path, name in ROOT_PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Convert the Markdown of a page from GitHub's dialect, and insert the API reference."""
    name = page.file.src_uri
    path = {site: path for path, site in ROOT_PAGES.items()}.get(name, f"docs/{name}")
    text = _MARK.sub(lambda mark: api(mark[1]), dialect(markdown, path))
    return re.sub(r"^<!-- .*? -->$", "", text, flags=re.MULTILINE)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Let browsers break long names in tables after dots, slashes and underscores."""
    cells = re.compile(r"(?<=<td>).*?(?=</td>)", re.DOTALL)
    return cells.sub(lambda cell: _CODE.sub(lambda code: _BREAK.sub(r"\g<0><wbr>", code[0]), cell[0]), content)


def on_post_build(config: Any) -> None:
    """Raise PluginError if a page of the site would load something from the network."""
    from mkdocs.exceptions import PluginError

    for page in sorted(Path(config.site_dir).rglob("*.html")):
        if found := re.search(
            r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"(?:https?:)?//[^\"]*|"
            r"<link\b(?![^>]*rel=\"canonical\")[^>]*\bhref=\"(?:https?:)?//[^\"]*",
            page.read_text(),
        ):
            raise PluginError(f"{page} loads {found[0]!r}, expected nothing from the network")


def api(package: str) -> str:
    """Return the text that replaces `<!-- api: PACKAGE -->`: mkdocstrings' markers for a package's public names."""
    return "\n".join(f"::: {name}\n" for name in public_names(ROOT / PUBLIC[package]))


def public_names(file: Path) -> list[str]:
    """Return the dotted public names that `_PUBLIC` of a package lists, except packages."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_PUBLIC":
            listed = sorted(ast.literal_eval(node.value).items())
            return [f"{module}.{name}" for name, module in listed if not _is_package(module)]
    raise ValueError(f"{file} has no _PUBLIC, expected its public names")


def _is_package(module: str) -> bool:
    return (ROOT / "src" / module.replace(".", "/") / "__init__.py").is_file()


def dialect(markdown: str, path: str) -> str:
    """Convert GitHub's Markdown for Python-Markdown, which needs empty lines before lists and code.

    Nested lists are indented by four columns.

    Args:
        markdown: text of a page.
        path: path of the page in the repository, to which its links are relative.
    """
    lines: list[str] = []
    fence, in_list = "", False
    for line in markdown.splitlines():
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and not fence:
            fence = mark[1]
            lines += ["", line]
            continue
        if fence:
            ends = bool(mark) and line.strip() == fence
            fence = "" if ends else fence
            lines += [line, ""] if ends else [line]
            continue
        item = _ITEM.match(line)
        if item and lines and lines[-1].strip() and not in_list:
            lines.append("")
        if line.startswith("|") and lines and lines[-1].strip() and not lines[-1].startswith("|"):
            lines.append("")
        if in_list and line.startswith("  "):
            deep = len(line) - len(line.lstrip())
            line = " " * (deep if deep % 4 == 0 else deep + 2) + line.lstrip()
        in_list = bool(item) or (in_list and (not line.strip() or line.startswith(" ") or bool(lines[-1].strip())))
        lines.append(_LINK.sub(lambda link: _on_site(link, path), line))
    return "\n".join(lines) + "\n"


def _on_site(link: re.Match[str], path: str) -> str:
    """Return a link in the form for the site. A link to a file that is not on the site becomes text with a tooltip."""
    image, text, target = link.groups()
    if re.match(r"[a-z]+:|#", target):
        return link[0]
    place, hash_, anchor = target.partition("#")
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), place))
    inside = ROOT_PAGES.get(found) or (found.removeprefix("docs/") if found.startswith("docs/") else None)
    if inside and path.startswith("docs/"):
        inside = posixpath.relpath(inside, posixpath.dirname(path.removeprefix("docs/")) or ".")
    return f"{image}[{text}]({inside}{hash_}{anchor})" if inside else f'<span title="{found}">{text}</span>'
