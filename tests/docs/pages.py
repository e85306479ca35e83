"""Read the pages of docs/ and of the repository's root."""

import re
from pathlib import Path

from scripts.docs_site import hooks

ROOT = Path(__file__).resolve().parents[2]


def read(path: str) -> str:
    """Return the text of a page by its path in the repository."""
    return (ROOT / path).read_text("utf-8")


PAGES = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))}
PAGES |= {path: read(path) for path in hooks.ROOT_PAGES}


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def without_code(page: str) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"```.*?```", "", page, flags=re.DOTALL)


def section(page: str, title: str) -> str:
    """Return the text below a heading of the second level."""
    return page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def commands(page: str) -> list[str]:
    """Return the commands of a page's console and bash blocks, each on one line."""
    text = "".join(re.findall(r"```(?:console|bash)\n(.*?)```", page, re.DOTALL)).replace("\\\n", " ")
    return [" ".join(line.partition("    #")[0].split()) for line in text.splitlines() if line.strip()]
