"""spechead.proposers.prompt_lookup: what is looked up, and what a step costs."""

from types import SimpleNamespace

import pytest
import torch

from spechead import PromptLookupProposer
from spechead.proposers.prompt_lookup import NgramIndex


def index_of(tokens, max_ngram=3):
    index = NgramIndex(max_ngram)
    index.extend(list(tokens))
    return index


def context_of(rows, pads=None, room=100, done=()):
    """What the proposer reads of a context, for rows of ids that already hold their pads."""
    width = max(len(row) for row in rows)
    context = SimpleNamespace(
        ids=torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        pads=torch.tensor(pads or [0] * len(rows)),
        rows=[SimpleNamespace(end=len(row)) for row in rows],
        root=torch.tensor([-1 if b in done else row[-1] for b, row in enumerate(rows)]),
        state={},
    )
    context.room = lambda: torch.tensor([0 if b in done else room for b in range(len(rows))])
    return context


def emit(context, row, *tokens):
    end = context.rows[row].end
    context.ids = torch.nn.functional.pad(context.ids, (0, len(tokens)))
    context.ids[row, end : end + len(tokens)] = torch.tensor(tokens)
    context.rows[row].end += len(tokens)
    context.root[row] = tokens[-1]


def drafts(proposal):
    return [row[1:][real[1:]].tolist() for row, real in zip(proposal.tokens, proposal.real, strict=True)]


def test_the_longest_ngram_wins_over_a_more_recent_shorter_one():
    #                 1 2 3 -> 7      9 3 -> 8 is more recent
    assert index_of([1, 2, 3, 7, 0, 9, 3, 8, 5, 1, 2, 3]).continuation(1) == ([7], 3)


def test_of_equal_ngrams_the_most_recent_wins():
    assert index_of([1, 2, 5, 0, 1, 2, 6, 3, 1, 2]).continuation(2) == ([6, 3], 2)


def test_shorter_ngrams_are_tried_when_longer_ones_have_no_match():
    assert index_of([4, 3, 9, 8, 7, 3]).continuation(2) == ([9, 8], 1)
    assert index_of([1, 2, 9, 5, 0, 1, 2], max_ngram=1).continuation(1) == ([9], 1)


def test_max_ngram_bounds_what_is_matched():
    tokens = [1, 2, 3, 7, 5, 2, 3, 8, 1, 2, 3]
    assert index_of(tokens, max_ngram=3).continuation(1) == ([7], 3)
    assert index_of(tokens, max_ngram=2).continuation(1) == ([8], 2)


def test_the_tail_does_not_match_itself():
    assert index_of([1, 2, 3]).continuation(4) == ([], 0)
    assert index_of([]).continuation(4) == ([], 0)
    assert index_of([5]).continuation(4) == ([], 0)


def test_a_copy_goes_on_into_itself():
    assert index_of([9, 1, 2, 3, 1, 2, 3], max_ngram=3).continuation(8) == ([1, 2, 3, 1, 2, 3, 1, 2], 3)
    assert index_of([7, 7]).continuation(4) == ([7, 7, 7, 7], 1)


def test_an_index_grown_token_by_token_equals_one_built_at_once():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 5, (200,), generator=generator).tolist()
    grown = NgramIndex(3)
    for end, token in enumerate(tokens, 1):
        grown.extend([token])
        assert grown.continuation(6) == index_of(tokens[:end]).continuation(6)


def longest_match(tokens, max_ngram, count):
    """The rule by exhaustive search: longest n-gram, then the most recent earlier occurrence, continued."""
    for size in range(min(max_ngram, len(tokens)), 0, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                copied = list(tokens)
                for i in range(count):
                    copied.append(copied[start + size + i])
                return copied[len(tokens) :], size
    return [], 0


@pytest.mark.parametrize("seed", range(4))
def test_drafts_equal_an_exhaustive_search(seed):
    tokens = torch.randint(0, 6, (150,), generator=torch.Generator().manual_seed(seed)).tolist()
    index = NgramIndex(3)
    for end, token in enumerate(tokens, 1):
        index.extend([token])
        assert index.continuation(5) == longest_match(tokens[:end], 3, 5)


def test_rows_without_a_match_get_their_root_alone():
    proposer = PromptLookupProposer(4)
    context = context_of([[1, 2, 3, 1, 2], [1, 2, 3, 4, 5]])
    proposer.start(context)
    proposal = proposer.propose(context)
    assert drafts(proposal) == [[3, 1, 2, 3], []]
    assert proposal.tokens[:, 0].tolist() == [2, 5]
    assert proposal.draft_probs is None
    assert proposal.is_chain


def test_without_any_match_the_step_feeds_one_token_a_row():
    proposer = PromptLookupProposer(4)
    context = context_of([[1, 2, 3], [4, 5, 6]])
    proposer.start(context)
    assert proposer.propose(context).tokens.shape == (2, 1)


def test_drafts_end_at_the_room_a_row_has():
    proposer = PromptLookupProposer(8)
    context = context_of([[1, 1, 1], [2, 2, 2]], room=3, done=(1,))
    proposer.start(context)
    proposal = proposer.propose(context)
    assert drafts(proposal) == [[1, 1, 1], []]
    assert proposal.real[1].tolist() == [False] * 4


def test_pads_are_never_indexed_but_a_token_of_the_pads_id_is():
    proposer = PromptLookupProposer(2)
    context = context_of([[0, 0, 0, 5, 7, 0], [3, 0, 9, 4, 1, 0]], pads=[3, 0])
    proposer.start(context)
    assert drafts(proposer.propose(context)) == [[], [9, 4]]  # row 0: what followed a pad is no match


def test_new_tokens_are_indexed_and_the_prompt_is_not_indexed_again():
    proposer = PromptLookupProposer(3)
    context = context_of([[1, 2, 3]])
    proposer.start(context)
    emit(context, 0, 8, 2)
    assert drafts(proposer.propose(context)) == [[3, 8, 2]]
    assert context.state[id(proposer)][0].tokens == [1, 2, 3, 8, 2]


def test_rows_leave_and_join_with_their_indexes():
    proposer = PromptLookupProposer(2)
    context, other = context_of([[1, 2, 1], [3, 4, 3]]), context_of([[5, 6, 5]])
    proposer.start(context)
    proposer.start(other)
    proposer.select_rows(context, torch.tensor([1]))
    proposer.add_rows(context, other)
    assert [index.tokens for index in context.state[id(proposer)]] == [[3, 4, 3], [5, 6, 5]]


@pytest.mark.parametrize("field", ["num_draft_tokens", "max_ngram"])
def test_settings_below_one_are_refused(field):
    with pytest.raises(ValueError, match=f"{field}=0 proposes nothing"):
        PromptLookupProposer(**{field: 0})


class CountedList(list):
    """A list that counts every element read from it."""

    reads = 0

    def __getitem__(self, key):
        got = super().__getitem__(key)
        CountedList.reads += len(got) if isinstance(key, slice) else 1
        return got


class CountedDict(dict):
    """A dict that counts look-ups and inserts."""

    uses = 0

    def get(self, *arguments):
        CountedDict.uses += 1
        return super().get(*arguments)

    def __setitem__(self, key, value):
        CountedDict.uses += 1
        super().__setitem__(key, value)


def cost_of_a_step(length):
    """Reads and table uses of 20 steps of 3 tokens behind `length` indexed ones, each matching near the beginning."""
    index = index_of(range(length))
    index.tokens = CountedList(index.tokens)
    index._after = [CountedDict(table) for table in index._after]
    CountedList.reads = CountedDict.uses = 0
    for start in range(100, 200, 5):
        index.extend([start, start + 1, start + 2])
        assert index.continuation(8) == (list(range(start + 3, start + 11)), 3)
    return CountedList.reads + CountedDict.uses


def test_a_step_costs_the_same_at_64k_tokens_as_at_1k():
    short, long = cost_of_a_step(1_000), cost_of_a_step(64_000)
    assert short > 0
    assert long <= 3 * short
