"""Write training prompts that carry a text, and chats of two turns: python scripts/make_prompts.py --output
prompts.jsonl

Texts come from this Python installation: its standard library's source and the language reference in pydoc_data. Each
prompt has 1,500 to 4,000 characters and asks to complete, edit, explain or summarise the text, or to answer a question
over it. The two-turn chats take their first turn from `--first-turns` (JSONL with `messages` or `prompt`) and add a
follow-up. The same seed and Python give the same file. Modules in HELD_BACK are left out, so that code to measure on
remains.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

LEAST, MOST = 1500, 4000  # characters of a prompt
HELD_BACK = frozenset(
    [
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
        "shlex",
        "statistics",
        "string",
        "textwrap",
    ]
)
LEFT_OUT_FOLDERS = frozenset(
    ("site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "__pycache__")
)

COMPLETE = (
    "Complete the following Python code. Continue exactly where it stops.",
    "Here is the beginning of a Python module. Write the next lines.",
    "Finish this function. Give only code.",
)
EDIT = (
    "Add type hints to every function below and return the whole code.",
    "Rewrite the code below with a docstring for every function. Return all of it.",
    "Rename the variables below so that they are easier to read. Return the whole code.",
    "Add comments to this code that explain each step. Return the whole code.",
    "Replace every `%` formatting below by f-strings and return the whole code.",
)
EXPLAIN = (
    "Explain what the following Python code does.",
    "Summarise the following code in a short paragraph.",
    "List the functions and classes below, each with one sentence about its purpose.",
    "Find possible problems in the following code.",
)
SUMMARISE = (
    "Summarise the following text in three sentences.",
    "List the main points of this text.",
    "Explain the following text to a beginner.",
    "Rewrite the following text in simpler words.",
)
ASK = (
    "Answer from the text alone: what does it say about {word}?",
    "According to the text below, when is {word} used?",
    "Use the passage to explain {word} with an example.",
)
FOLLOW_UPS = (
    "Now make your answer shorter.",
    "Explain the first part of your answer in more detail.",
    "Give another example.",
    "Rewrite your answer as a list of steps.",
    "Why is that so?",
    "Can you check your answer for mistakes and give the corrected version?",
    "Write the same for a ten-year-old.",
    "Turn your answer into a short e-mail to a colleague.",
    "Repeat your answer, but change one detail and say which.",
    "What would you do next?",
)


def modules() -> Iterator[Path]:
    """Yield the standard library's source files that may be trained on, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not LEFT_OUT_FOLDERS & set(parts) and parts[0].removesuffix(".py") not in HELD_BACK:
            yield path


def code_pieces(path: Path, draw: random.Random) -> Iterator[str]:
    """Yield runs of neighbouring top-level definitions (or methods of one class) of a usable size."""
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    lines = source.splitlines()
    bodies = [tree.body] + [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
    for body in bodies:
        nodes = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
        place = 0
        while place < len(nodes):
            wanted = draw.randint(LEAST, MOST - 300)
            taken = place
            text = ""
            while taken < len(nodes) and len(text) < wanted:
                node = nodes[taken]
                start = min([node.lineno, *[mark.lineno for mark in node.decorator_list]]) - 1
                text += "\n".join(lines[start : node.end_lineno]) + "\n\n"
                taken += 1
            yield textwrap.dedent(text).strip("\n")
            place = max(taken, place + 1)


def passages() -> Iterator[str]:
    """Yield passages of the language reference, whole paragraphs together."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        paragraphs, held = re.split(r"\n\s*\n", topics[name]), ""
        for paragraph in paragraphs:
            if len(held) + len(paragraph) > MOST - 300 and held:
                yield held.strip()
                held = ""
            held += paragraph + "\n\n"
        yield held.strip()


def framed(order: str, text: str, fence: str = "") -> str:
    """Return a prompt: the order, then the text (fenced if it is code)."""
    body = f"```{fence}\n{text}\n```" if fence else text
    return f"{order}\n\n{body}"


def about_code(text: str, draw: random.Random) -> tuple[str, str]:
    """Return a task over a piece of code and its kind."""
    kind = draw.choice(("complete", "complete", "edit", "edit", "explain"))
    if kind == "complete":
        lines = text.splitlines()
        keep = max(1, int(len(lines) * draw.uniform(0.6, 0.9)))
        short = "\n".join(lines[:keep])
        return framed(draw.choice(COMPLETE), short if len(short) >= LEAST - 100 else text, "python"), kind
    return framed(draw.choice(EDIT if kind == "edit" else EXPLAIN), text, "python"), kind


def about_text(text: str, draw: random.Random) -> tuple[str, str]:
    """Return a task over a passage and its kind."""
    words = sorted(
        {word for word in re.findall(r'"([A-Za-z_]{4,20})"|\b([a-z]{7,16})\b', text) for word in word if word}
    )
    if words and draw.random() < 0.5:
        return framed(draw.choice(ASK).format(word=f'"{draw.choice(words)}"'), text), "question"
    return framed(draw.choice(SUMMARISE), text), "summary"


def long_prompts(count: int, draw: random.Random) -> list[dict[str, object]]:
    """Return prompts that carry a text, three of code for one of prose, all different.

    Raises:
        SystemExit: if this installation has too little text.
    """
    code = [about_code(piece, draw) for path in modules() for piece in code_pieces(path, draw)]
    prose = [about_text(text, draw) for _ in range(3) for text in passages()]
    fitting = [[(prompt, kind) for prompt, kind in part if LEAST <= len(prompt) <= MOST] for part in (code, prose)]
    for part in fitting:
        draw.shuffle(part)
    chosen = dict(fitting[1][: count // 4])
    for prompt, kind in fitting[0]:
        if len(chosen) < count:
            chosen.setdefault(prompt, kind)
    if len(chosen) < count:
        raise SystemExit(
            f"This Python installation gives {len(chosen)} of {count} prompts; ask for fewer with --long."
        )
    rows: list[dict[str, object]] = [
        {"id": f"long-{place}", "source": f"python-{kind}", "messages": [{"role": "user", "content": prompt}]}
        for place, (prompt, kind) in enumerate(chosen.items())
    ]
    return rows


def chats(path: Path, count: int, draw: random.Random) -> list[dict[str, object]]:
    """Return chats whose first turn is a prompt of a file and whose second is a follow-up."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    firsts = [
        row["messages"][:1] if "messages" in row else [{"role": "user", "content": row["prompt"]}] for row in lines
    ]
    picked = draw.sample(range(len(firsts)), min(count, len(firsts)))
    return [
        {
            "id": f"chat-{place}",
            "source": f"two-turns-{lines[place].get('source', path.name)}",
            "messages": [*firsts[place], {"role": "user", "content": draw.choice(FOLLOW_UPS)}],
        }
        for place in picked
    ]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--long", type=int, default=1500, help="prompts that carry a text")
    parser.add_argument("--first-turns", type=Path, help="JSONL of prompts that open the two-turn chats")
    parser.add_argument("--chats", type=int, default=500, help="two-turn chats (with --first-turns)")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    rows = long_prompts(asked.long, draw)
    if asked.first_turns is not None:
        rows += chats(asked.first_turns, asked.chats, draw)
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    with asked.output.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"{len(rows)} prompts written to {asked.output}")


if __name__ == "__main__":
    main()
