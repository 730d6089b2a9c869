"""A caller's own proposer: any object with `taps` and `propose(context)`, looked at where it enters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spechead import Proposal
from tests.tiny import VOCAB
from tests.unit.generate.harness import assert_speculated, padded, same_as_plain, single, speculate

NEW = 16


class Guess:
    """Proposes fixed guesses under each root, as a chain or as a tree."""

    taps: tuple[int, ...] = ()

    def __init__(self, tokens: list[int], parents: list[int]) -> None:
        self.tokens, self.parents = tokens, parents

    def propose(self, context: Any) -> Proposal:
        live = context.root >= 0
        tokens = torch.tensor([self.tokens]).repeat(context.batch, 1)
        tokens = torch.cat([context.root.clamp(min=0)[:, None], tokens], dim=1)
        parents = torch.tensor([[-1, *self.parents]]).expand_as(tokens)
        return Proposal(tokens, parents, live[:, None].expand_as(tokens))


@pytest.mark.parametrize("prompt", [single, padded])
@pytest.mark.parametrize("parents", [[0, 1, 2, 3], [0, 0, 0, 0], [0, 0, 1, 2], [0, 1, 1, 0]], ids=str)
def test_chains_and_trees_of_guesses(model: Any, parents: list[int], prompt: Any) -> None:
    text = model.generate(**prompt(), max_new_tokens=NEW)[:, 11:].tolist()
    often = [token for row in text for token in row]
    guesses = sorted(set(often), key=often.count)[-4:]  # some of them right now and then
    output = same_as_plain(model, prompt(), Guess(guesses, parents), keeps=False, max_new_tokens=NEW)
    assert output.stats.kept_tokens > 0
    assert output.stats.method == "Guess"


class Oracle:
    """Knows what comes: proposes the true continuation beside wrong siblings, in a tree whose kept nodes must move."""

    taps = ()
    name = "oracle"

    def __init__(self, texts: Tensor) -> None:
        self.texts = torch.cat([texts, torch.zeros(len(texts), 4, dtype=torch.long)], dim=1)

    def propose(self, context: Any) -> Proposal:
        ends = torch.tensor([row.end for row in context.rows])
        true = torch.stack([self.texts[row, end : end + 3] for row, end in enumerate(ends.tolist())])
        wrong = (true + 1) % VOCAB
        tokens = torch.stack(
            [context.root.clamp(min=0), wrong[:, 0], true[:, 0], wrong[:, 1], true[:, 1], true[:, 2]], 1
        )
        parents = torch.tensor([[-1, 0, 0, 2, 2, 4]]).expand_as(tokens)
        return Proposal(tokens, parents, (context.root >= 0)[:, None].expand_as(tokens))


@pytest.mark.parametrize("prompt", [single, padded])
def test_tree_whose_kept_nodes_move_in_the_cache(model: Any, prompt: Any) -> None:
    texts = model.generate(**prompt(), max_new_tokens=NEW)
    output = same_as_plain(model, prompt(), Oracle(texts), max_new_tokens=NEW)
    assert output.stats.acceptance_length == (NEW - 1) / output.stats.steps
    assert output.stats.steps == 4  # 15 tokens after the prompt's own, four a step
    assert output.stats.acceptance_rate_by_depth == [1.0, 1.0, 1.0]


class Drawn:
    """Draws a chain from a law of its own, and says which."""

    taps = ()

    def propose(self, context: Any) -> Proposal:
        law = torch.full((context.batch, 3, VOCAB), 1 / VOCAB)
        tokens = torch.multinomial(law.flatten(0, 1), 1).view(context.batch, 3)
        return Proposal.chain(context.root, tokens, torch.ones_like(tokens, dtype=torch.bool), law)


@pytest.mark.parametrize("prompt", [single, padded])
def test_drawn_drafts(model: Any, prompt: Any) -> None:
    output = speculate(model, prompt(), Drawn(), max_new_tokens=40, do_sample=True, temperature=3.0, top_k=0)
    assert_speculated(output.stats)
    assert same_as_plain(model, prompt(), Drawn(), keeps=False, max_new_tokens=NEW).stats.method == "Drawn"


class Tapping:
    """Takes the target's hidden states and checks that each cached position comes once, in order."""

    taps = (0, 2)

    def __init__(self) -> None:
        self.seen: list[list[Tensor]] = []
        self.calls: list[str] = []

    def start(self, context: Any) -> None:
        self.calls.append("start")
        self.seen = [[] for _ in context.rows]

    def propose(self, context: Any) -> Proposal:
        states, length = context.fresh[id(self)].take()
        assert set(states) == {0, 2}
        for row, count in enumerate(length.tolist()):
            self.seen[row] += list(states[0][row, :count])
        assert [len(seen) for seen in self.seen] == context.cached.tolist()
        guesses = torch.tensor([[30, 6]]).repeat(context.batch, 1)
        return Proposal.chain(context.root, guesses, torch.ones_like(guesses, dtype=torch.bool))


def test_taps_hand_over_each_position_once(model: Any) -> None:
    proposer = Tapping()
    output = same_as_plain(model, padded(), proposer, keeps=False, max_new_tokens=NEW)
    assert proposer.calls == ["start"]
    embeddings = model.get_input_embeddings()
    for row, mask in enumerate(padded()["attention_mask"]):
        fed = output.sequences[row, int((mask == 0).sum()) :][: len(proposer.seen[row])]
        torch.testing.assert_close(torch.stack(proposer.seen[row]), embeddings(fed))  # tap 0: what enters layer 0


class Wrong:
    """Proposes whatever it was given."""

    def __init__(self, make: Any, taps: tuple[int, ...] = ()) -> None:
        self.make, self.taps = make, taps

    def propose(self, context: Any) -> Any:
        return self.make(context.root)


def with_laws(law: Tensor) -> Any:
    return lambda root: Proposal.chain(root, torch.tensor([[5]]), torch.ones(1, 1, dtype=torch.bool), law[None, None])


def tree(parents: list[int]) -> Any:
    tokens = torch.tensor([[33, 5, 6]])
    real = torch.ones(1, 3, dtype=torch.bool)
    return lambda root: Proposal(torch.cat([root[:, None], tokens[:, 1:]], 1), torch.tensor([parents]), real, None, 2)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "nothing": (lambda root: None, TypeError, r"Wrong.propose must return a spechead.Proposal; got NoneType"),
    "another root": (lambda root: Proposal.root_only(root + 1), ValueError, "node 0 must be each row's root"),
    "no root": (lambda root: Proposal.root_only(root * 0 - 1), ValueError, "node 0 must be each row's root"),
    "too few rows": (lambda root: Proposal.root_only(root[:0]), ValueError, "node 0 must be each row's root"),
    "token beyond the vocabulary": (
        lambda root: Proposal.chain(root, torch.tensor([[VOCAB]]), torch.ones(1, 1, dtype=torch.bool)),
        ValueError,
        rf"ids outside 0\.\.{VOCAB - 1}",
    ),
    "child before its parent": (tree([-1, 2, 0]), ValueError, r"parents \[\[-1, 2, 0\]\].*after its parent"),
    "two roots": (tree([-1, -1, 0]), ValueError, "every other node comes after its parent"),
    "law of another vocabulary": (with_laws(torch.ones(7) / 7), ValueError, "over 7 tokens.*the target's 48"),
    "token without a chance": (with_laws(torch.eye(VOCAB)[3]), ValueError, "give no chance"),
    "law that is not a number": (with_laws(torch.full((VOCAB,), torch.nan)), ValueError, "give no chance"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_proposals_are_refused_with_the_reason(model: Any, case: str) -> None:
    make, kind, match = WRONG[case]
    with pytest.raises(kind, match=match):
        speculate(model, single(), Wrong(make), max_new_tokens=NEW)


@pytest.mark.parametrize("taps", [(3,), (-1,), (0, 9)])
def test_taps_that_the_target_lacks_are_refused(model: Any, taps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"taps \[.*\] are not hidden states.*0\.\.1 is what enters layer k, 2"):
        speculate(model, single(), Wrong(Proposal.root_only, taps), max_new_tokens=NEW)


@pytest.mark.parametrize("thing", [object(), 3, lambda context: None])
def test_things_that_are_no_proposer_are_refused(model: Any, thing: Any) -> None:
    with pytest.raises(TypeError, match=r"a proposer has `taps`"):
        speculate(model, single(), thing, max_new_tokens=NEW)


def test_proposer_that_never_drafts_is_plain_decoding(model: Any) -> None:
    output = speculate(model, padded(), Wrong(Proposal.root_only), max_new_tokens=NEW)
    assert output.sequences.tolist() == model.generate(**padded(), max_new_tokens=NEW).tolist()
    assert output.stats.steps == NEW - 1
    assert output.stats.nodes_fed == 3 * (NEW - 1)
    assert output.stats.acceptance_length == 1.0
