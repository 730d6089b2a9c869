"""Fill the lists of docs/support.md from the tables of spechead/support.py: `python scripts/render_support.py`.

What stands between `<!-- name -->` and `<!-- /name -->` is rendered; the rest is written by hand. A test compares the
page with what this renders, so that the page cannot fall behind the code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from spechead.sampling import PREFIX_FREE
from spechead.support import ARGUMENTS, FIELDS, ROW_FUNCTIONS, Rule

PAGE = Path(__file__).resolve().parent.parent / "docs" / "support.md"


def cell(rule: Rule) -> str:
    """Say how a rule treats its argument, in one table cell."""
    if not rule.remedy:
        return "honoured"
    values = dict.fromkeys(f"`{value}`" for value in rule.accepts if value not in (None, False))
    unless = f" unless {' or '.join(values)}" if values else ""
    return f"refused{unless}: {rule.remedy}"


def table(rules: dict[str, Rule]) -> str:
    """Render one table of rules, refused ones first."""
    ordered = sorted(rules.items(), key=lambda item: (not item[1].remedy, item[0]))
    rows = [f"| `{name}` | {cell(rule)} |" for name, rule in ordered]
    return "\n".join(["| name | with `speculative=` |", "|---|---|", *rows])


def names(kinds: tuple[Any, ...]) -> str:
    """List classes by name, one a line."""
    return "\n".join(f"- `{name}`" for name in sorted(kind.__name__ for kind in kinds))


PARTS = {
    "processors": names(ROW_FUNCTIONS),
    "prefix-free": names(PREFIX_FREE),
    "arguments": table(ARGUMENTS),
    "fields": table(FIELDS),
}


def render(page: str) -> str:
    """Return the page with its marked parts filled.

    Args:
        page: its text, with a pair of markers for every part.

    Raises:
        ValueError: if the markers of a part are missing.
    """
    for name, text in PARTS.items():
        opening, closing = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        parts = re.split(f"{re.escape(opening)}.*?{re.escape(closing)}", page, flags=re.DOTALL)
        if len(parts) != 2:
            raise ValueError(f"{PAGE.name} has {len(parts) - 1} pairs of <!-- {name} --> and {closing}; it needs one.")
        page = f"{parts[0]}{opening}{text}\n{closing}{parts[1]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
