"""spechead.proposers.vocabulary: which ids a draft may use."""

import pytest

from spechead.proposers import vocabulary
from spechead.proposers.vocabulary import shared_vocabulary


class Words:
    """A tokenizer as far as vocabularies are compared: token -> id."""

    def __init__(self, *tokens):
        self.vocab = {token: index for index, token in enumerate(tokens)}

    def get_vocab(self):
        return self.vocab

    def __len__(self):
        return len(self.vocab)


ABC = Words("a", "b", "c", "d")


@pytest.fixture
def warnings(monkeypatch):
    said = []
    monkeypatch.setattr(vocabulary.logger, "warning", said.append)
    return said


def test_padded_sizes_are_one_vocabulary_and_padding_is_not_drafted(warnings):
    assert shared_vocabulary(152064, 151936, ABC, Words("a", "b", "c", "d")) == 4
    assert warnings == []


def test_ids_beyond_either_models_rows_are_not_drafted():
    assert shared_vocabulary(4, 3, ABC, ABC) == 3
    assert shared_vocabulary(2, 8, ABC, ABC) == 2


def test_ids_beyond_either_tokenizer_are_not_drafted():
    assert shared_vocabulary(8, 8, ABC, Words("a", "b", "c", "d", "added")) == 4


def test_the_first_difference_is_refused_by_name():
    swapped = Words("a", "c", "b", "d")
    with pytest.raises(ValueError, match=r"2 of 4 ids differ \(target / draft: 1: 'b' / 'c', 2: 'c' / 'b'\)"):
        shared_vocabulary(8, 8, ABC, swapped)


def test_a_hole_in_one_tokenizer_is_a_difference():
    holed = Words("a", "b", "c", "d")
    del holed.vocab["b"]
    holed.vocab["e"] = 4
    with pytest.raises(ValueError, match="1: 'b' / None"):
        shared_vocabulary(8, 8, ABC, holed)


@pytest.mark.parametrize(("tokenizer", "draft_tokenizer"), [(None, None), (ABC, None), (None, ABC)])
def test_unknown_tokenizers_of_unequal_sizes_are_taken_as_padding_with_a_warning(tokenizer, draft_tokenizer, warnings):
    assert shared_vocabulary(64, 48, tokenizer, draft_tokenizer) == 48
    assert len(warnings) == 1
    assert "64" in warnings[0]
    assert "48" in warnings[0]
    assert "tokenizer=" in warnings[0]


def test_unknown_tokenizers_of_equal_sizes_are_not_worth_a_warning(warnings):
    assert shared_vocabulary(48, 48) == 48
    assert warnings == []
