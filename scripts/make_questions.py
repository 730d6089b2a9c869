"""Write short training prompts of open questions and translations: python scripts/make_questions.py --output FILE

Questions are templates over countries, people, things, ideas and events; nothing knows their answers, which are the
target's to give. With `--parallel FOREIGN ENGLISH` (two text files, a sentence a line, the same sentence on the same
line; blank ones are left out) some sentences are to be translated, and runs of the English ones are to be summarised
or asked about. The same inputs and seed give the same file.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

WORDS = Path(__file__).with_name("question_words.yaml")
TRANSLATE = "Translate German to English: {}"
OVER_TEXT = (
    "Summarize: {}",
    "Summarize the following text in three sentences: {}",
    "{}\n\nAnswer the question with the context above: what does it say about {}?",
    "Read the passages and answer: {}\n\nQuestion: who or what is connected with {}?",
)
SENTENCES = (12, 32)  # of a text


def questions() -> Iterator[tuple[str, str]]:
    """Yield every open question with its kind."""
    for kind in yaml.safe_load(WORDS.read_text(encoding="utf-8")).values():
        for thing in kind["things"]:
            for template in kind["templates"]:
                yield "question", template.format(thing)


def over_sentences(
    foreign: list[str], english: list[str], draw: random.Random, translations: int, texts: int
) -> Iterator[tuple[str, str]]:
    """Yield translations of single sentences, and tasks over runs of English ones."""
    for sentence in draw.sample(foreign, min(translations, len(foreign))):
        yield "translation", TRANSLATE.format(sentence)
    for number in range(texts):
        length = draw.randint(*SENTENCES)
        start = draw.randrange(max(1, len(english) - length))
        text = " ".join(english[start : start + length])
        words = [word for word in text.split() if word.isalpha() and word[0].isupper() and len(word) > 4]
        yield "text", OVER_TEXT[number % len(OVER_TEXT)].format(text, draw.choice(words or ["it"]))


def main(argv: list[str] | None = None) -> int:
    """Write the file; return the exit code."""
    parser = argparse.ArgumentParser(description="Write short training prompts: open questions and translations.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=1000, help="open questions (default 1000)")
    parser.add_argument("--parallel", type=Path, nargs=2, metavar=("FOREIGN", "ENGLISH"), help="two text files")
    parser.add_argument("--translations", type=int, default=600)
    parser.add_argument("--texts", type=int, default=500, help="tasks over runs of English sentences")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    for name in ("questions", "translations", "texts"):
        if getattr(options, name) < 0:
            parser.error(f"--{name} {getattr(options, name)} asks for less than nothing; give 0 or more.")
    draw = random.Random(options.seed)
    asked = list(questions())
    draw.shuffle(asked)
    asked = asked[: options.questions]
    if options.parallel:
        foreign, english = (path.read_text(encoding="utf-8").splitlines() for path in options.parallel)
        if len(foreign) != len(english):
            parser.error(f"--parallel: {len(foreign)} and {len(english)} lines; sentences must be on the same lines.")
        both = [pair for pair in zip(foreign, english, strict=True) if all(part.strip() for part in pair)]
        if not both:
            parser.error("--parallel: no line holds a sentence in both files.")
        foreign, english = (list(part) for part in zip(*both, strict=True))
        asked += over_sentences(foreign, english, draw, options.translations, options.texts)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", encoding="utf-8") as file:
        for number, (kind, text) in enumerate(asked):
            row = {"id": f"{kind}-{number}", "source": kind, "messages": [{"role": "user", "content": text}]}
            file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
