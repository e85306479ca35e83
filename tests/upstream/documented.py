"""The table of replaced names in docs/compatibility.md."""

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"


class Row(NamedTuple):
    """A name, perhaps with `*`, the condition under which it is replaced, and the file in `upstream/`."""

    name: str
    when: str
    file: str


def documented() -> list[Row]:
    """Return a row for each name of the table."""
    table = PAGE.read_text().split("| name | when |", 1)[1].split("\n\n")[0]
    rows, file = [], ""
    for line in table.splitlines()[2:]:
        names, when, files = line.split("|")[1:4]
        file = files.strip(" `") or file
        rows += [Row(name, when.strip(), file) for name in re.findall(r"`([^`]*)`", names)]
    return rows
