"""Fill in the table of docs/serve.md from what scripts/load_test.py measured. No figure in it is typed by hand.

python scripts/render_load.py

The page says which file it shows: <!-- load: docs/results/load.json --> ... <!-- /load -->.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/serve.md"
BLOCK = re.compile(r"(<!-- load: (?P<file>\S+) -->\n).*?(<!-- /load -->)", re.DOTALL)
HEAD = (
    "concurrency",
    "server",
    "tokens/s",
    "first token (median, p95)",
    "request (median, p95)",
    "mean batch",
    "tokens a row and step",
)


def render(text: str, root: Path = ROOT) -> str:
    """Return the page with its block made anew; one whose file is not there says how to measure it."""
    return BLOCK.sub(lambda match: match[1] + block(root / match["file"], match["file"]) + match[3], text)


def block(path: Path, name: str) -> str:
    """Return the text between the markers."""
    if not path.exists():
        return f"No figures yet: `python scripts/load_test.py --out {name}` measures them.\n"
    results = json.loads(path.read_text(encoding="utf-8"))
    hardware, versions = results["hardware"], results["versions"]
    lines = [
        f"{results['target']}, {results['dtype']}, on {hardware['device']} ({hardware['count']}), torch "
        f"{versions['torch']}; fixed = {results['fixed']}; {results['requests']} chats a server and concurrency, "
        f"{results['max_tokens']} new tokens at most, greedy.",
        "",
        _row(HEAD),
        _row(["---"] * len(HEAD)),
        *(_row(_cells(cell)) for cell in results["cells"]),
        "",
        *(_sentence(verdict) for verdict in results["verdicts"]),
    ]
    return "\n".join(lines) + "\n"


def _cells(cell: dict[str, Any]) -> list[str]:
    spans = [f"{span['median']:.2f} s, {span['p95']:.2f} s" for span in (cell["time_to_first_token"], cell["latency"])]
    speed, batch, length = cell["tokens_per_second"], cell["mean_batch"], cell["acceptance_length"]
    return [str(cell["concurrency"]), cell["mode"], f"{speed:.1f}", *spans, f"{batch:.1f}", f"{length:.2f}"]


def _sentence(verdict: dict[str, Any]) -> str:
    ratio = f"{verdict['ratio']:.2f} of {verdict['better']}, the better of the other two"
    return f"- At concurrency {verdict['concurrency']} auto reaches {ratio}."


def _row(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    """Rewrite the page; return the exit code."""
    page = ROOT / PAGE
    page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
