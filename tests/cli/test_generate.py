"""`spechead generate`: where the prompt comes from, what is printed, what is refused."""

from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from spechead.cli.text import DRAFTED, MarkingStreamer, TextPieces, marked
from tests.cli.conftest import Run
from tests.tiny_tokenizer import tiny_tokenizer

PROMPT = "w5 w6 w7 w4 w5"  # <user> w5 .. <answer>: the answer token 2 is followed by itself in the table
GREEN, RESET = "\x1b[32m", "\x1b[0m"


def generate(run: Run, target: str, *arguments: str, **kwargs: str) -> object:
    return run("generate", *arguments, "--target", target, "--raw", "--max-new-tokens", "9", **kwargs)


@pytest.mark.parametrize("method", ["none", "prompt_lookup", "auto"])
def test_every_method_writes_the_same_text(run: Run, target_directory: str, method: str) -> None:
    result = generate(run, target_directory, PROMPT, "--speculative", method)
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == ["w6", "w7", "w4", "w5", "w6", "w7", "w4", "w5", "w6"]
    line = "plain generation" if method == "none" else "acceptance length"
    assert line in result.stderr


def test_the_prompt_comes_from_an_argument_a_file_or_standard_input(run: Run, target_directory: str) -> None:
    Path("prompt.txt").write_text(PROMPT + "\n")
    by_argument = generate(run, target_directory, PROMPT)
    assert by_argument.exit_code == 0
    assert generate(run, target_directory, "--file", "prompt.txt").stdout == by_argument.stdout
    assert generate(run, target_directory, input=PROMPT).stdout == by_argument.stdout
    assert generate(run, target_directory, "-", input=PROMPT).stdout == by_argument.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hello", "--file", "x"], "not both"),
        (["  "], "the prompt is empty"),
        (["hello", "--chat-template-kwargs", "{oops"], "is no JSON"),
        (["hello", "--chat-template-kwargs", "[1]"], "must be a JSON object"),
        (["hello", "--raw", "--system", "x"], "--raw takes no --system"),
    ],
)
def test_wrong_prompts_are_usage_errors(run: Run, arguments: list[str], message: str) -> None:
    result = run("generate", *arguments, "--target", "is-not-loaded")
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--speculative", "medusa"], "needs a head"),
        (["--speculative", "draft_model"], "needs a draft"),
        (["--speculative", "guessing"], "guessing"),
        (["--max-new-tokens", "5000"], "exceed the target's 4096 positions"),
        (["--chat-template-kwargs", '{"tokenize": false}'], "cannot be set: tokenize"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    run: Run, target_directory: str, arguments: list[str], message: str
) -> None:
    result = run("generate", "w5", "--target", target_directory, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_chat_template_its_arguments_and_a_system_message(run: Run, target_directory: str) -> None:
    plain = run("generate", "w5", "--target", target_directory, "--max-new-tokens", "3")
    assert plain.exit_code == 0
    assert plain.stdout.split() == ["<answer>"] * 3  # the template ends with <answer>, the table repeats it
    arguments = ["--chat-template-kwargs", '{"start": "w5"}', "--max-new-tokens", "3", "--system", "w9"]
    started = run("generate", "w5", "--target", target_directory, *arguments)
    assert started.exit_code == 0, started.output
    assert started.stdout.split() == ["w6", "w7", "w4"]


def test_sampling_repeats_by_seed(run: Run, target_directory: str) -> None:
    sampled = ["--temperature", "50", "--top-p", "0.99", "--top-k", "40", "--speculative", "prompt_lookup"]
    texts = [generate(run, target_directory, PROMPT, *sampled, "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_color_marks_accepted_draft_tokens(run: Run, target_directory: str) -> None:
    arguments = ["--speculative", "prompt_lookup", "--num-draft-tokens", "3", "--color"]
    result = generate(run, target_directory, PROMPT, *arguments)
    assert result.exit_code == 0
    text = result.stdout.replace(RESET, "")
    # w6 is the prompt's own; then steps of three drafts and a bonus token
    assert text.count(GREEN) == 6
    assert not text.startswith(GREEN)
    assert text.replace(GREEN, "").split() == ["w6", "w7", "w4", "w5", "w6", "w7", "w4", "w5", "w6"]


class TestText:
    def test_bytes_of_one_character_wait_for_each_other(self) -> None:
        class Bytes:
            def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
                return bytes(ids).decode("utf-8", errors="replace")

        pieces = TextPieces(Bytes())  # type: ignore[arg-type]
        assert [pieces.add(byte) for byte in "aé!".encode()] == ["a", "", "é", "!"]
        assert pieces.rest() == ""
        assert pieces.add(0xC3) == ""
        assert pieces.rest() == "\N{REPLACEMENT CHARACTER}"

    def test_pieces_join_to_the_whole_text(self) -> None:
        tokenizer = tiny_tokenizer()
        ids = [4, 5, 6, 7, 8]
        pieces = TextPieces(tokenizer)
        assert "".join([pieces.add(token) for token in ids] + [pieces.rest()]) == tokenizer.decode(ids)

    def test_marked_colours_what_a_step_kept(self) -> None:
        text = marked(tiny_tokenizer(), [4, 5, 6, 7, 8], [(3, 2), (1, 1)])
        drafted = [text.plain[span.start : span.end].strip() for span in text.spans if span.style == DRAFTED]
        assert drafted == ["w5", "w6", "w8"]

    @pytest.mark.parametrize(("last_kept", "expected"), [(1, ["w5"]), (2, ["w5", "w6"])])
    def test_the_last_step_may_end_on_a_drafted_token(self, last_kept: int, expected: list[str]) -> None:
        console = Console(record=True, force_terminal=True, color_system="standard", file=StringIO())
        streamer = MarkingStreamer(tiny_tokenizer(), console, mark=True)
        streamer.put(torch.tensor([[4]]))
        streamer.forward_begins()
        streamer.put(torch.tensor([4]))
        streamer.forward_begins()
        for token in (5, 6):
            streamer.put(torch.tensor([token]))
        streamer.finish([(2, last_kept)])
        coloured = console.export_text(styles=True).split(GREEN)[1:]
        assert [part.partition("\x1b")[0].strip() for part in coloured] == expected
