"""Prompts to measure with: the package's own set, Spec-Bench, a user's request log, any `datasets` source.

Used by `spechead demo`, `spechead bench` and the tests. A prompt belongs to a group, and every figure is reported by
group. Spec-Bench's thirteen categories make six groups, as in its paper (Xia et al. 2024).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from ..training.chat import UnusableRow, check_messages, messages_of
from ..training.rows import load_source

BUILTIN = "builtin"
KINDS = ("chat", "code", "summary", "passage", "maths", "translation", "extraction")
MULTI_TURN = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH_GROUPS: dict[str, str] = {
    **dict.fromkeys(MULTI_TURN, "multi-turn"),
    **{name: name for name in ("translation", "summarization", "qa", "math_reasoning", "rag")},
}


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: unique within a run.
        group: under which its figures are reported.
        messages: the chat up to and with the user's turn.
        follow_ups: later user turns; each is asked after the target's own answer to the one before.
    """

    id: str
    group: str
    messages: tuple[dict[str, str], ...]
    follow_ups: tuple[str, ...] = ()


def load_prompts(
    source: str | Sequence[str], groups: Sequence[str] | None = None, per_group: int | None = None
) -> list[Prompt]:
    """Load prompts.

    Args:
        source: "builtin", a JSONL file (Spec-Bench's layout, or a log of `messages`, `conversations` or `prompt`),
            another file or directory that `datasets` reads, or the Hub name of a data set (`name:split`); or several.
        groups: the groups to keep; None keeps all.
        per_group: how many prompts of each group, spread evenly over the group; None takes all.

    Raises:
        ValueError: if there is nothing under that name, a row is unusable, an id stands for two prompts, or a group is
            unknown.
    """
    sources = [source] if isinstance(source, str) else source
    prompts = [prompt for each in sources for prompt in _load(each)]
    refuse_same_ids(prompts, ", ".join(sources))
    return select(prompts, groups, per_group)


def _load(source: str) -> list[Prompt]:
    if source == BUILTIN:
        return list(builtin_prompts())
    if Path(source).suffix in (".jsonl", ".json") and Path(source).is_file():
        prompts = from_jsonl(Path(source))
    else:
        prompts = from_rows(load_source(source), Path(source).name)
    if not prompts:
        raise ValueError(f"{source} holds no prompt; each row needs messages, conversations or prompt.")
    return prompts


def refuse_same_ids(prompts: Sequence[Prompt], name: str) -> None:
    """Raise ValueError if two prompts have one id, which names prompts in results files."""
    ids = [prompt.id for prompt in prompts]
    if twice := sorted({prompt_id for prompt_id in ids if ids.count(prompt_id) > 1}):
        raise ValueError(f"{name}: several rows have the id {twice[0]!r}; ids name prompts in results files.")


def select(prompts: Sequence[Prompt], groups: Sequence[str] | None, per_group: int | None) -> list[Prompt]:
    """Keep some groups, and of each group some prompts, evenly spread so that its sub-categories are all there."""
    known = list(dict.fromkeys(prompt.group for prompt in prompts))
    if unknown := [group for group in groups or () if group not in known]:
        raise ValueError(f"no prompt is of group {', '.join(unknown)}; there are {', '.join(known)}.")
    if per_group is not None and per_group < 1:
        raise ValueError(f"per_group={per_group} measures nothing; give at least 1.")
    kept: list[Prompt] = []
    for group in groups or known:
        members = [prompt for prompt in prompts if prompt.group == group]
        count = min(per_group or len(members), len(members))
        kept += [members[place * len(members) // count] for place in range(count)]
    return kept


@cache
def builtin_prompts() -> tuple[Prompt, ...]:
    """Return the package's own prompts, in the order of KINDS."""
    kinds = yaml.safe_load(files(__package__).joinpath("prompts.yaml").read_text(encoding="utf-8"))
    return tuple(
        Prompt(entry["id"], kind, ({"role": "user", "content": entry["text"].strip()},))
        for kind in KINDS
        for entry in kinds[kind]
    )


def from_jsonl(path: Path) -> list[Prompt]:
    """Read a JSONL file: Spec-Bench's questions, or a log of requests.

    Raises:
        ValueError: naming the line that is no JSON object or no prompt.
    """
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path.name}, line {number} is no JSON: {error.msg}.") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path.name}, line {number} must hold an object; it holds {type(row).__name__}.")
            rows.append(row)
    return from_rows(rows, path.stem)


def from_rows(rows: Iterable[Mapping[str, Any]], name: str) -> list[Prompt]:
    """Make prompts of rows.

    Args:
        rows: of Spec-Bench (`category`, `turns`), or with `messages`, `conversations` or `prompt`; `id` and `group`
            are used where a row has them.
        name: the group of rows that name none, and the start of their ids.

    Raises:
        ValueError: naming the row that is no prompt.
    """
    prompts = []
    for number, row in enumerate(rows, 1):
        try:
            prompts.append(_spec_bench(row) if row.get("turns") else _logged(row, name, number))
        except UnusableRow as error:
            raise ValueError(f"row {number} of {name} cannot be a prompt: {error}.") from error
    refuse_same_ids(prompts, name)
    return prompts


def _spec_bench(row: Mapping[str, Any]) -> Prompt:
    group = SPEC_BENCH_GROUPS.get(str(row.get("category")))
    if group is None:
        raise UnusableRow(f"category {row.get('category')!r} is none of {', '.join(SPEC_BENCH_GROUPS)}")
    turns = row["turns"]
    if not isinstance(turns, list) or not all(isinstance(turn, str) and turn for turn in turns):
        raise UnusableRow(f"turns={turns!r} must be a list of texts")
    if row.get("question_id") is None:
        raise UnusableRow("question_id is missing")
    first, *later = turns
    return Prompt(str(row["question_id"]), group, ({"role": "user", "content": first},), tuple(later))


def _logged(row: Mapping[str, Any], name: str, number: int) -> Prompt:
    messages = messages_of(row)
    while messages and messages[-1].get("role") == "assistant":  # a log holds the answers too
        messages.pop()
    check_messages(messages)
    given = row.get("id")
    return Prompt(
        f"{name}-{number}" if given in (None, "") else str(given), str(row.get("group") or name), tuple(messages)
    )


def encode(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    template: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the ids that the target is given for a chat.

    Args:
        tokenizer: the target's. Without a chat template (a base model) it encodes the contents, a blank line apart.
        messages: the chat, its last turn the user's.
        template: keyword arguments for the chat template.

    Raises:
        ValueError: if `template` is given to a tokenizer without a chat template, or sets what is fixed here.
    """
    if tokenizer.chat_template:
        fixed = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        if clash := sorted(fixed.keys() & (template or {}).keys()):
            raise ValueError(f"chat template arguments that cannot be set: {', '.join(clash)}; they are fixed here.")
        return list(tokenizer.apply_chat_template(list(messages), **fixed, **(template or {}))["input_ids"])
    if template:
        raise ValueError(
            f"chat template arguments {dict(template)} were given, but this tokenizer has no chat template."
        )
    return list(tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"])
