"""Write prompts of one kind of load: python scripts/make_load_prompts.py --kind completion|code|random --output FILE

"completion": a Python file is cut after some lines and is to be continued, as an editor asks for it. The files are
those modules of this Python's standard library that scripts/make_prompts.py holds back from training. "code": the same
files, every second one to be edited instead. "random": words of random letters, which nothing can draft for. The same
Python and seed give the same file.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import sys
import sysconfig
from collections.abc import Callable, Iterator
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
EDIT = "Write one short comment above every function of this code, change nothing else, and print it.\n\n```python\n"


def code(count: int) -> Iterator[dict[str, Any]]:
    """Yield completions, and edits of the same kind of code in turn."""
    for number, (module, text) in enumerate(cut_files(count)):
        name, request = ("edit", EDIT) if number % 2 else ("complete", REQUEST)
        yield asked(f"{name}-{module}", "code", request + text)


def completions(count: int) -> Iterator[dict[str, Any]]:
    """Yield one prompt a module: the cut file is to be continued."""
    for module, text in cut_files(count):
        yield asked(f"complete-{module}", "completion", REQUEST + text)


def cut_files(count: int) -> Iterator[tuple[str, str]]:
    """Yield modules and the heads of their files, cut in the middle of a function, up to the closing fence."""
    library = Path(sysconfig.get_path("stdlib"))
    for module in MODULES[:count]:
        lines = (library / f"{module}.py").read_text(encoding="utf-8").splitlines()
        ends = [number for number, line in enumerate(lines) if line.strip().startswith("return")]
        ends = [number for number in ends if "def " in "".join(lines[max(0, number - LINES) : number])]
        end = next((number for number in ends if number > LINES), ends[-1])
        yield module, "\n".join(lines[max(0, end - LINES) : end]) + "\n```"


def noise(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield prompts of random words."""
    draw = random.Random(seed)
    for number in range(count):
        words = ("".join(draw.choices(string.ascii_lowercase, k=LETTERS)) for _ in range(WORDS))
        yield asked(f"random-{number}", "random", " ".join(words))


def asked(name: str, group: str, text: str) -> dict[str, Any]:
    """Return a prompt as a row."""
    return {"id": name, "group": group, "messages": [{"role": "user", "content": text}]}


KINDS: dict[str, Callable[[int, int], Iterator[dict[str, Any]]]] = {
    "completion": lambda count, seed: completions(count),
    "code": lambda count, seed: code(count),
    "random": noise,
}


def main(argv: list[str] | None = None) -> int:
    """Write the file; return the exit code."""
    parser = argparse.ArgumentParser(description="Write prompts of one kind of load.")
    parser.add_argument("--kind", choices=tuple(KINDS), required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=len(MODULES), help="prompts; code has 12 at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.count < 1 or (options.kind != "random" and options.count > len(MODULES)):
        parser.error(f"--count {options.count} is out of range; {options.kind} has 1 to {len(MODULES)}.")
    rows = KINDS[options.kind](options.count, options.seed)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
