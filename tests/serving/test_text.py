"""spechead.serving.text: whole characters, whole texts, and stop strings that never show."""

import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from spechead.serving.text import Detokenizer, TextStream, token_text
from tests.serving.loopback import END, byte_tokenizer

TEXT = "Grüße, 你好 🙂🙃 — naïve café, ok? " * 4


def piece_tokenizer():
    """A tokenizer as SentencePiece models have it: words carry their space, unknown characters fall back to bytes."""
    words = ["▁the", "▁cat", "s", "▁", "a", "▁sat", "."]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def stream(stops, pieces, ends=frozenset()):
    """Feed a TextStream pieces of text, one a token; returns what each token released, and the stream."""

    class Pieces:
        def push(self, token):
            return pieces[token]

        def finish(self):
            return ""

    text, released = TextStream(Pieces(), stops, ends), []
    for token in range(len(pieces)):
        stopped = text(torch.tensor([[token]]), None)
        released.append(text.close() if stopped or token == len(pieces) - 1 else text.take())
        if stopped:
            break
    return released, text


def test_every_piece_is_whole_characters_and_all_of_them_are_the_text():
    tokenizer = byte_tokenizer()
    ids = tokenizer(TEXT)["input_ids"]
    detokenizer = Detokenizer(tokenizer, [104, 105])
    pieces = [detokenizer.push(token) for token in ids]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == TEXT
    assert detokenizer.finish() == ""
    assert pieces[2:4] == ["", "ü"]  # a character comes with its last byte
    assert len(detokenizer._window) <= 40


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_are_no_text_give_what_decoding_all_of_them_gives(seed):
    tokenizer = byte_tokenizer()
    draw = random.Random(seed)
    pool = range(256) if seed % 2 else [*range(97, 123), *TEXT.encode(), 0xC3, 0xF0, END]
    ids = draw.choices(pool, k=300)
    detokenizer = Detokenizer(tokenizer, [])
    pieces = [detokenizer.push(token) for token in ids] + [detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_an_unfinished_character_at_the_end_is_shown_as_such():
    detokenizer = Detokenizer(byte_tokenizer(), [])
    assert [detokenizer.push(token) for token in "a你".encode()[:3]] == ["a", "", ""]
    assert detokenizer.finish() == "\ufffd"


def test_words_carry_their_space_after_a_prompt_and_bytes_fall_back():
    tokenizer = piece_tokenizer()
    words = {word: tokenizer.convert_tokens_to_ids(word) for word in ("▁the", "▁cat", "s", "▁sat", ".")}
    prompt = [words["▁the"]]
    ids = [words["▁cat"], words["s"], *"é".encode(), words["▁sat"], words["."]] * 12
    detokenizer = Detokenizer(tokenizer, prompt)
    pieces = [detokenizer.push(token) for token in ids] + [detokenizer.finish()]
    assert "".join(pieces) == " catsé sat." * 12
    assert tokenizer.decode(prompt) + "".join(pieces) == tokenizer.decode(prompt + ids)


def test_the_cost_of_a_token_does_not_grow_with_the_text():
    longest = 0

    class Counting:
        def decode(self, ids, **_):
            nonlocal longest
            longest = max(longest, len(ids))
            return inner.decode(ids, **_)

    inner = byte_tokenizer()
    for ids in ([97, 98] * 500, [255] * 1000, [END] * 1000):
        detokenizer = Detokenizer(Counting(), [])
        for token in ids:
            detokenizer.push(token)
    assert longest <= 130


def test_a_stop_string_over_several_tokens_never_shows():
    released, text = stream(["END"], ["ab", "cE", "N", "x E", "N", "D tail"])
    assert released == ["ab", "c", "", "ENx ", "", ""]
    assert "".join(released) == "abcENx "
    assert text.stopped
    assert text.released == text.known == 7


def test_the_first_of_several_stop_strings_cuts_even_inside_one_token():
    released, text = stream(["lo", "he"], ["say hello"])
    assert released == ["say "]
    assert text.stopped


def test_held_text_comes_out_when_it_is_no_stop_string_after_all():
    released, text = stream(["aab"], ["a", "a", "a", "b"])
    assert released == ["", "", "a", ""]  # "aab" it is, one character later
    assert text.stopped
    released, text = stream(["xyz"], ["x", "y", "-"])
    assert released == ["", "", "xy-"]
    assert not text.stopped


@pytest.mark.parametrize("seed", range(30))
def test_released_text_is_the_text_before_the_first_stop_string(seed):
    draw = random.Random(seed)
    pieces = ["".join(draw.choices("ab", k=draw.randint(0, 3))) for _ in range(draw.randint(1, 12))]
    stops = ["".join(draw.choices("ab", k=draw.randint(1, 5))) for _ in range(draw.randint(1, 3))]
    released, text = stream(stops, pieces)
    shown = ""
    seen = 0
    for piece, more in zip(pieces, released, strict=False):
        seen += len(piece)
        shown += more
        assert not any(stop in shown for stop in stops)
    whole = "".join(pieces)[:seen]  # later tokens were never made
    found = [whole.find(stop) for stop in stops if stop in whole]
    assert text.stopped == bool(found)
    assert shown == (whole[: min(found)] if found else whole)


def test_end_tokens_have_no_text():
    text = TextStream(Detokenizer(byte_tokenizer(), []), [], frozenset([END]))
    for token in (72, 105, END):
        assert text(torch.tensor([[token]]), None) is False
    assert text.close() == "Hi"


def test_a_tokens_own_bytes():
    assert token_text(byte_tokenizer(), 0xE4) == ("\ufffd", b"\xe4")
    assert token_text(byte_tokenizer(), 97) == ("a", b"a")
    assert token_text(byte_tokenizer(), END) == ("<end>", b"<end>")
    assert token_text(piece_tokenizer(), 0xE4) == ("\ufffd", b"\xe4")
