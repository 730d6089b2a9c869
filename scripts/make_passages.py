"""Write training data out of passages that others wrote: python scripts/make_passages.py --source DIR --texts FILE

The source is JSONL with `prompt` and `completion` (such as the T0 sample in github.com/yizhongw/self-instruct,
data/finetuning/t0_train_50k) or with `text`. Out of its paragraphs come two files:

- `--texts`: chats whose answer is a passage. The target's law over them is learnt with one forward and no generation.
- `--prompts`: passages to be summarised or asked about, and the short questions found in the source, for
  `generate_data.py`.

Rows that share ten words in a row with a file given as `--exclude` are left out: what a head is measured on, such as
the questions of github.com/hemingkx/Spec-Bench (data/spec_bench/question.jsonl). The same inputs and seed give the
same files.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

SHARED_WORDS = 10  # in a row, with an excluded text
SHORTEST = 220  # characters of a passage
PIECE = 1800  # characters of a passage that is an answer
PLAIN = 0.85  # least share of letters and spaces: no tables, no lists of numbers
BEGINNINGS = ("Write about {}", "Continue this text: {}", "Write a text that begins with: {}", "Tell me more: {}")
SUMMARIES = ("Summarize: {}", "{}\n\nSummarize the text above.", "Write a short summary of this article:\n\n{}")
QUESTIONS = ("what is known about {}?", "who or what is {}?", "why is {} important?", "how is {} described?")
OVER_PASSAGES = (
    "{passages}\n\n{question}",
    "Read the passages and answer the question.\n\n{passages}\n\nQuestion: {question}",
    "Answer the question with the passages below: {question}\n\n{passages}",
)
QUESTION = re.compile(r'(?:^|[:\n"])\s*([A-Za-z][^:\n"?]{14,160}\?)')


def shingles(text: str) -> set[str]:
    """Return all runs of `SHARED_WORDS` words."""
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[at : at + SHARED_WORDS]) for at in range(len(words) - SHARED_WORDS + 1)}


def strings(value: object) -> Iterator[str]:
    """Yield every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def records(source: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of every JSONL file under a path."""
    for file in sorted(source.rglob("*.jsonl")) if source.is_dir() else [source]:
        for line in file.read_text(encoding="utf-8").splitlines():
            yield {name: text for name, text in json.loads(line).items() if isinstance(text, str)}


def passages(rows: Iterable[dict[str, str]], taken: set[str]) -> list[str]:
    """Return the paragraphs of all rows, each once, that are long, plain and share no run of words with `taken`."""
    found: dict[str, str] = {}
    for row in rows:
        for text in (row.get(name, "") for name in ("prompt", "completion", "text")):
            for part in re.split(r"\n+|\|{5}", text.replace("<|endoftext|>", "")):
                passage = re.sub(r"\s+", " ", part).strip(" -")
                plain = sum(letter.isalpha() or letter == " " for letter in passage)
                if len(passage) >= SHORTEST and plain > PLAIN * len(passage):
                    found.setdefault(passage[:120], passage)
    return [passage for passage in found.values() if not shingles(passage) & taken]


def asked(rows: Iterable[dict[str, str]], taken: set[str]) -> list[str]:
    """Return the questions found in the rows' prompts, each once."""
    found = {question.strip(): None for row in rows for question in QUESTION.findall(row.get("prompt", ""))}
    return [question for question in found if not shingles(question) & taken]


def pieces(passage: str) -> list[str]:
    """Cut a passage at sentence ends into pieces of about `PIECE` characters."""
    made = [""]
    for sentence in re.split(r"(?<=[.!?]) ", passage):
        if made[-1] and len(made[-1]) + len(sentence) > PIECE:
            made.append("")
        made[-1] = f"{made[-1]} {sentence}".strip()
    return [piece for piece in made if len(piece) >= SHORTEST] or made[:1]


def prompts_over(found: list[str], draw: random.Random, summaries: int, over: int) -> Iterator[tuple[str, str]]:
    """Yield passages to summarise, and runs of one to three with a question about the first of them."""
    for passage in draw.sample(found, min(summaries, len(found))):
        yield "summary", draw.choice(SUMMARIES).format(pieces(passage)[0])
    for _ in range(over):
        some = draw.sample(found, min(draw.randint(1, 3), len(found)))
        names = re.findall(r"\b[A-Z][a-z]{3,}(?: [A-Z][a-z]+)*", some[0])
        question = draw.choice(QUESTIONS).format(draw.choice(names or ["it"]))
        draw.shuffle(some)
        yield "passages", draw.choice(OVER_PASSAGES).format(passages="\n\n".join(some), question=question)


def write(path: Path, chats: Iterable[tuple[str, list[dict[str, str]]]]) -> None:
    """Write (source, messages) pairs as rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for number, (source, messages) in enumerate(chats):
            file.write(json.dumps({"id": f"{source}-{number}", "source": source, "messages": messages}) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Write the files; return the exit code."""
    parser = argparse.ArgumentParser(description="Write training data out of passages that others wrote.")
    parser.add_argument("--source", type=Path, required=True, help="a JSONL file, or a directory of them")
    parser.add_argument("--exclude", type=Path, action="append", default=[], help="JSONL that a head is measured on")
    parser.add_argument("--texts", type=Path, help="file of chats whose answer is a passage")
    parser.add_argument("--text-count", type=int, default=7000)
    parser.add_argument("--prompts", type=Path, help="file of prompts to be answered")
    parser.add_argument("--summaries", type=int, default=200)
    parser.add_argument("--over-passages", type=int, default=200)
    parser.add_argument("--questions", type=int, default=900)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.texts is None and options.prompts is None:
        parser.error("nothing to write: give --texts, --prompts, or both.")
    for name in ("source", "exclude"):
        for path in [options.source] if name == "source" else options.exclude:
            if not path.exists():
                parser.error(f"--{name} {path} does not exist.")
    taken = {
        run
        for path in options.exclude
        for row in path.open(encoding="utf-8")
        for text in strings(json.loads(row))
        for run in shingles(text)
    }
    rows = list(records(options.source))
    found, questions = passages(rows, taken), asked(rows, taken)
    if not found:
        parser.error(f"--source {options.source} holds no passage of {SHORTEST} characters.")
    draw = random.Random(options.seed)
    draw.shuffle(found)
    draw.shuffle(questions)
    if options.texts is not None:
        answers = [piece for passage in found for piece in pieces(passage)][: options.text_count]
        write(options.texts, (("passage", chat(draw, piece)) for piece in answers))
    if options.prompts is not None:
        prompts = [*prompts_over(found, draw, options.summaries, options.over_passages)]
        prompts += [("question", question) for question in questions[: options.questions]]
        draw.shuffle(prompts)
        write(options.prompts, ((source, [{"role": "user", "content": text}]) for source, text in prompts))
    print(f"{len(found)} passages and {len(questions)} questions found.")
    return 0


def chat(draw: random.Random, piece: str) -> list[dict[str, str]]:
    """Return a chat whose answer is a passage, asked for by its first words."""
    begin = draw.choice(BEGINNINGS).format(" ".join(piece.split()[:6]))
    return [{"role": "user", "content": begin}, {"role": "assistant", "content": piece}]


if __name__ == "__main__":
    sys.exit(main())
