"""Streamers get the prompt as plain puts it, each token once and in order, and one `end()`, also after an error."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

from tests.unit.generate.harness import METHODS, PROMPTS, assert_speculated, padded, single, speculate, tokenizer

NEW = 20


class Recorder(BaseStreamer):
    """Notes every call."""

    def __init__(self) -> None:
        self.puts: list[Tensor] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        assert not self.ends
        assert value.device.type == "cpu"
        self.puts.append(value.clone())

    def end(self) -> None:
        self.ends += 1

    @property
    def calls(self) -> list[Any]:
        return [value.tolist() for value in self.puts]


class FailsAt:
    """A processor that raises when it sees ids of a given width."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == self.width:
            raise RuntimeError("processor broke")
        return scores


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("end", [None, 6, 30])
def test_calls_equal_plains(model: Any, prompt: str, method: str, end: int | None) -> None:
    plain, ours = Recorder(), Recorder()
    settings = {"max_new_tokens": NEW, "eos_token_id": end}
    model.generate(**PROMPTS[prompt](), streamer=plain, **settings)
    output = speculate(model, PROMPTS[prompt](), method, streamer=ours, **settings)
    assert ours.calls == plain.calls
    assert ours.ends == plain.ends == 1
    assert torch.stack(ours.puts[1:], dim=1).tolist() == output.sequences[:, 11:].tolist()
    assert ours.puts[0].tolist() == PROMPTS[prompt]()["input_ids"].tolist()
    if end is None:
        assert_speculated(output.stats)


@pytest.mark.parametrize("method", METHODS)
def test_sampled_tokens_stream(model: Any, method: str) -> None:
    ours = Recorder()
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 3}
    output = speculate(model, single(), method, streamer=ours, **settings)
    assert ours.puts[0].tolist() == single()["input_ids"].tolist() * 3
    assert torch.stack(ours.puts[1:], dim=1).tolist() == output.sequences[:, 11:].tolist()
    assert ours.ends == 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("width", [11, 12, 16])
def test_end_once_after_an_error_and_all_tokens_before_it(model: Any, method: str, width: int) -> None:
    text = model.generate(**single(), max_new_tokens=NEW)[0].tolist()
    ours = Recorder()
    with pytest.raises(RuntimeError, match="processor broke"):
        speculate(model, single(), method, streamer=ours, max_new_tokens=NEW, logits_processor=[FailsAt(width)])
    assert ours.ends == 1
    assert ours.calls == [[text[:11]], *([token] for token in text[11:width])]


def test_batch_streams_the_columns_that_every_row_has_reached_before_an_error(model: Any) -> None:
    ours = Recorder()
    text = model.generate(**padded(), max_new_tokens=NEW)
    with pytest.raises(RuntimeError, match="processor broke"):
        speculate(model, padded(), "draft_model", streamer=ours, max_new_tokens=NEW, logits_processor=[FailsAt(17)])
    assert ours.ends == 1
    assert ours.calls[1:] == text[:, 11:17].T.tolist()


@pytest.mark.parametrize(
    "refused",
    [
        {"num_beams": 2},
        {"cache_implementation": "static"},
        {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1]])},
        {"generator": [torch.Generator(), torch.Generator()]},
        {"stop_strings": "ab"},
    ],
    ids=["argument", "cache", "mask", "generators", "tokenizer"],
)
def test_refusals_come_before_the_prompt_is_streamed(model: Any, refused: dict[str, Any]) -> None:
    ours = Recorder()
    with pytest.raises(ValueError, match=next(iter(refused)).replace("generator", "generator=")):
        model.generate(**(single() | refused), speculative="prompt_lookup", streamer=ours, max_new_tokens=4)
    assert ours.calls == []
    assert ours.ends == 1  # whoever reads from the streamer is let go


@pytest.mark.parametrize("method", METHODS)
def test_text_streamer(model: Any, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for speculative in (None, method):
        streamer = TextStreamer(tokenizer(), skip_prompt=True)
        model.generate(**single(), max_new_tokens=NEW, streamer=streamer, speculative=speculative)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert len(printed[1]) > NEW


def test_iterator_of_a_failing_call_ends(model: Any) -> None:
    streamer = TextIteratorStreamer(tokenizer(), skip_prompt=True, timeout=20)
    errors = []

    def run() -> None:
        try:
            speculate(
                model, single(), "draft_model", streamer=streamer, max_new_tokens=NEW, logits_processor=[FailsAt(15)]
            )
        except RuntimeError as error:
            errors.append(str(error))

    thread = Thread(target=run)
    thread.start()
    text = "".join(streamer)
    thread.join(timeout=20)
    assert errors == ["processor broke"]
    assert text == tokenizer().decode(model.generate(**single(), max_new_tokens=NEW)[0, 11:15])


def test_streamer_that_refuses_a_batch_does_so_as_in_plain(model: Any) -> None:
    for speculative in (None, "draft_model"):
        with pytest.raises(ValueError, match="only supports batch size 1"):
            model.generate(**padded(), max_new_tokens=4, speculative=speculative, streamer=TextStreamer(tokenizer()))


def test_streamer_that_breaks_is_ended_once(model: Any) -> None:
    class Breaks(Recorder):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.puts) == 4:
                raise OSError("pipe closed")

    ours = Breaks()
    with pytest.raises(OSError, match="pipe closed"):
        speculate(model, single(), "draft_model", streamer=ours, max_new_tokens=NEW)
    assert ours.ends == 1
    assert len(ours.puts) == 4


class PutsOnly:
    """Half a streamer."""

    def put(self, tokens: Tensor) -> None:
        pytest.fail("a token was streamed")


@pytest.mark.parametrize(
    ("streamer", "lacks"), [(PutsOnly(), r"no end\(\);"), ("stdout", r"no put\(\) and no end\(\)")]
)
def test_what_cannot_be_streamed_to_is_refused_first(model: Any, streamer: Any, lacks: str) -> None:
    with pytest.raises(ValueError, match=lacks):
        speculate(model, single(), "prompt_lookup", streamer=streamer, max_new_tokens=4)
