"""Every `spechead` command of the guides runs: on tiny models, with names replaced and loads made small.

A command is a line of a fenced bash block that begins with `spechead`. What is replaced are models, files and sizes;
methods and every other option are run as they are printed.
"""

import copy
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from spechead.demo_target import REPO_ID
from tests.cli.conftest import Run
from tests.tiny import build, tiny_config
from tests.tiny_tokenizer import tiny_tokenizer
from tests.unit.heads.targets import make_head

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/guide.md", "docs/zh/guide.md", "docs/code-completion.md", "docs/benchmark.md", "README.zh-CN.md")
FENCE = re.compile(r"^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROMPTS = ("spec_bench.jsonl", "log.jsonl", "completion.jsonl", "random.jsonl", "code.jsonl")
LARGEST_BATCH = 3
QUICK_PROOF = {"--effect-size": "0.6", "--power": "0.9", "--law-prompts": "1", "--rows": "128"}
SMALL = {
    "demo": {"--max-new-tokens": "6", "--dtype": "float32"},
    "generate": {"--max-new-tokens": "6"},
    "bench": {"--max-new-tokens": "6", "--per-group": "1", "--batch-prompts": "1"},
    "verify": {"--max-new-tokens": "6", **QUICK_PROOF},
}


def commands(page: str) -> list[str]:
    """The commands of a page, lines that end in a backslash joined."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = [line for block in FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith("spechead ")]


ALL = list(dict.fromkeys(command for page in PAGES for command in commands(page)))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The names that the pages use -> what they stand for here."""
    directory = tmp_path_factory.mktemp("guide")
    target = build(tiny_config("llama", max_position_embeddings=4096, num_hidden_layers=3))
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    saved: dict[str, Any] = {
        REPO_ID: target,
        "drafts/my-draft": draft,
        "heads/my-medusa": make_head("medusa", target),
        "heads/my-eagle3": make_head("eagle3", target),
        "heads/random": make_head("eagle3", target),
    }
    names = {}
    for number, (name, model) in enumerate(saved.items()):
        place = directory / f"model-{number}"
        model.save_pretrained(place)
        if name in (REPO_ID, "drafts/my-draft"):
            tiny_tokenizer().save_pretrained(place)
        names[name] = str(place)
    for name in PROMPTS:  # ids name prompts, also across files
        row = {"id": name, "messages": [{"role": "user", "content": "w4 w5 w6 w4 w5 w6 w4"}]}
        (directory / name).write_text(json.dumps(row))
        names[name] = str(directory / name)
    return names


def made_small(words: list[str]) -> list[str]:
    """Return a command's words with the options of its load replaced by small ones."""
    small = SMALL.get(words[0], {})
    if words[0] in ("bench", "verify") and "--prompts" not in words:
        small = {**small, "--group": "code"}
    out, seen = words[:1], set()
    rest: Iterator[str] = iter(words[1:])
    for word in rest:
        if word in small:
            next(rest)
            continue
        if word == "--batch-size" and words[0] == "bench":
            size = str(min(int(next(rest)), LARGEST_BATCH))
            out += [] if size in seen else [word, size]
            seen.add(size)
            continue
        out.append(word)
    return [*out, *(part for option in small.items() for part in option)]


def words_of(command: str, models: dict[str, str]) -> list[str]:
    """Return what to run for a printed command."""
    words = [models.get(word, word) for word in shlex.split(command)[1:]]
    if words[0] not in ("inspect", "export") and "--target" not in words:
        words += ["--target", models[REPO_ID]]
    if words[0] == "export":  # a head on disk says which target it was trained for by name
        words += ["--target", models[REPO_ID]]
    return made_small(words)


@pytest.mark.parametrize("command", ALL)
def test_a_printed_command_runs(
    command: str, run: Run, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []
    monkeypatch.setattr("uvicorn.run", lambda app, **settings: served.append((app, settings)))
    result = run(*words_of(command, models))
    assert result.exit_code == 0, f"{command}\n{result.output}"
    assert (command.split()[1] == "serve") == bool(served)


def test_every_page_has_commands_and_the_guides_have_the_same() -> None:
    counts = {page: len(commands(page)) for page in PAGES}
    assert min(counts.values()) >= 2, counts
    assert commands("docs/guide.md") == commands("docs/zh/guide.md")
    assert {command.split()[1] for command in ALL} >= {
        "plan", "demo", "generate", "serve", "inspect", "export", "bench", "verify",
    }  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_no_command_hides_in_another_fence(page: str) -> None:
    rest = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    assert not [line for line in rest.splitlines() if line.startswith("spechead ")]


def test_what_the_pages_name_is_replaced(models: dict[str, str]) -> None:
    """A path that nobody replaced would only work on somebody's machine."""
    known = {*models, "certificate.json", "exported/vllm"}
    for command in ALL:
        for word in shlex.split(command):
            if "/" in word and not word.startswith("docs/results/"):
                assert word in known, f"{word} in {command!r}"
