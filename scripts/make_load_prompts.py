"""Write prompts of one kind of load: python scripts/make_load_prompts.py --kind completion|random --output FILE

"completion": a Python file is cut after some lines and is to be continued, as an editor asks for it. The files are
those modules of this Python's standard library that scripts/make_prompts.py holds back from training. "random": words
of random letters, which nothing can draft for. The same Python and seed give the same file.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODULES = (
    "bisect",
    "calendar",
    "colorsys",
    "configparser",
    "csv",
    "fractions",
    "graphlib",
    "heapq",
    "queue",
    "sched",
    "statistics",
    "textwrap",
)
LINES = 48  # of a file that an editor has shown before the cursor
WORDS, LETTERS = 120, 6
REQUEST = "Complete this file. Repeat the last function from its first line and go on to the end of it.\n\n```python\n"


def completions(count: int) -> Iterator[dict[str, Any]]:
    """Yield one prompt a module: the head of the file, cut in the middle of a function."""
    library = Path(sysconfig.get_path("stdlib"))
    for module in MODULES[:count]:
        lines = (library / f"{module}.py").read_text(encoding="utf-8").splitlines()
        ends = [number for number, line in enumerate(lines) if line.strip().startswith("return")]
        ends = [number for number in ends if "def " in "".join(lines[max(0, number - LINES) : number])]
        end = next((number for number in ends if number > LINES), ends[-1])
        text = REQUEST + "\n".join(lines[max(0, end - LINES) : end]) + "\n```"
        yield {"id": f"complete-{module}", "group": "completion", "messages": [{"role": "user", "content": text}]}


def noise(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield prompts of random words."""
    draw = random.Random(seed)
    for number in range(count):
        words = ("".join(draw.choices(string.ascii_lowercase, k=LETTERS)) for _ in range(WORDS))
        yield {"id": f"random-{number}", "group": "random", "messages": [{"role": "user", "content": " ".join(words)}]}


def main(argv: list[str] | None = None) -> int:
    """Write the file; return the exit code."""
    parser = argparse.ArgumentParser(description="Write prompts of one kind of load.")
    parser.add_argument("--kind", choices=("completion", "random"), required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=len(MODULES), help="prompts; completion has 12 at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.count < 1 or (options.kind == "completion" and options.count > len(MODULES)):
        parser.error(f"--count {options.count} is out of range; completion has 1 to {len(MODULES)}.")
    rows = completions(options.count) if options.kind == "completion" else noise(options.count, options.seed)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
