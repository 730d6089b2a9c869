"""The law of `verify`, exact: every branch of drafting and verification enumerated in float64.

The law of the first three tokens must be the target's to 1e-9, over trees of every kind of draft. Mutants of the
shipped code, each named, show that the check finds what it is there for.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
from transformers import LogitsProcessorList

from spechead import Proposal
from spechead import verify as verify_module
from spechead.sampling import Draws, Sampler
from tests.lossless.enumeration import completed, distance, mutated, outcomes

LENGTH, TOLERANCE = 3, 1e-9
DRAWN, AGAIN, POINT = "drawn without replacement", "drawn with replacement", "point mass"

# Trees as (parent, kind) of nodes 1, 2, ...; node 0 is the root.
TREES = {
    "root alone": [],
    "chain": [(0, DRAWN), (1, DRAWN)],
    "deep chain": [(0, DRAWN), (1, DRAWN), (2, DRAWN)],
    "chain of point masses": [(0, POINT), (1, POINT), (2, POINT)],
    "two siblings": [(0, DRAWN), (0, DRAWN)],
    "three siblings": [(0, DRAWN), (0, DRAWN), (0, DRAWN)],
    "three siblings with replacement": [(0, AGAIN), (0, AGAIN), (0, AGAIN)],
    "tree": [(0, DRAWN), (0, DRAWN), (1, DRAWN), (1, DRAWN), (2, DRAWN)],
    "deep tree": [(0, DRAWN), (0, DRAWN), (1, DRAWN), (3, DRAWN), (3, DRAWN)],
    "tree of point masses": [(0, POINT), (0, POINT), (0, POINT), (1, POINT), (1, POINT), (2, POINT), (4, POINT)],
    "drawn, then a point mass": [(0, DRAWN), (0, DRAWN), (0, POINT), (1, POINT), (3, DRAWN), (3, POINT)],
    "a point mass, then drawn": [(0, POINT), (0, DRAWN), (0, DRAWN), (1, DRAWN), (2, POINT)],
}


@dataclass(frozen=True)
class Case:
    """One draft of one tree: what its nodes hold, with what probability it is drafted, and the target's laws there."""

    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    laws: tuple[tuple[float, ...], ...]  # q of every node
    target: tuple[tuple[float, ...], ...]  # the target's law after every node
    weight: float


class Model:
    """A law after every prefix, drawn once; `support` tokens of it are possible."""

    def __init__(self, vocab, seed, support=None, sharpness=1.5):
        self.vocab, self.support, self.sharpness = vocab, support or vocab, sharpness
        self.generator, self.known = torch.Generator().manual_seed(seed), {}

    def __call__(self, prefix):
        if prefix not in self.known:
            scores = self.sharpness * torch.randn(self.vocab, generator=self.generator, dtype=torch.float64)
            scores[scores.argsort()[: self.vocab - self.support]] = -torch.inf
            self.known[prefix] = torch.softmax(scores, -1)
        return self.known[prefix]


def drafts(tree, target, draft):
    """Every way to draft a tree: nodes in order, drawn children by q given their earlier drawn siblings."""
    parents = (-1, *(parent for parent, _ in tree))
    partial = [((0,), (torch.zeros(draft.vocab, dtype=torch.float64),), ((),), 1.0)]  # tokens, laws, prefixes, weight
    for node, (parent, kind) in enumerate(tree, 1):
        grown = []
        for tokens, laws, prefixes, weight in partial:
            law = draft(prefixes[parent]).clone()
            siblings = [n for n in range(1, node) if parents[n] == parent]
            if kind != AGAIN:
                law[[tokens[n] for n in siblings if kind == POINT or tree[n - 1][1] == DRAWN]] = 0
            if float(law.sum()) == 0:  # without replacement, nothing is left: repeat the last token as a point mass
                law[tokens[siblings[-1]]] = 1
            if kind == POINT:
                law = torch.nn.functional.one_hot(law.argmax(), draft.vocab).double()
            law = law / law.sum()
            for x, q in enumerate(law.tolist()):
                if q > 0:
                    grown.append(((*tokens, x), (*laws, law), (*prefixes, (*prefixes[parent], x)), weight * q))
        partial = grown
    return [
        Case(
            parents,
            tokens,
            tuple(tuple(law.tolist()) for law in laws),
            tuple(tuple(target(prefix).tolist()) for prefix in prefixes),
            weight,
        )
        for tokens, laws, prefixes, weight in partial
    ]


def proposal_of(cases):
    """One batch of cases, whose trees may differ; without laws where no node of the batch needs one."""
    nodes = max(len(case.tokens) for case in cases)
    vocab = len(cases[0].laws[0])

    def padded(rows, fill, dtype=None):
        return torch.tensor([[*row, *[fill] * (nodes - len(row))] for row in rows], dtype=dtype)

    real = padded([[True] * len(case.tokens) for case in cases], False)
    tokens, parents = padded([case.tokens for case in cases], 0), padded([case.parents for case in cases], 0)
    laws = padded([case.laws for case in cases], (0.0,) * vocab, torch.float64)
    target = padded([case.target for case in cases], (0.0,) * vocab, torch.float64)
    needed = bool(((laws > 0) & (laws < 1)).any())
    return Proposal(tokens, parents, real, laws if needed else None), target


def play(cases, draws, stop=-1, walks=None):
    """Verify every case with the shipped verify; returns the tokens each row emitted, and notes the walks if asked."""
    proposal, laws = proposal_of(cases)
    emitted = [[] for _ in cases]

    def on_token(tokens, live):
        for row in live.nonzero().flatten().tolist():
            emitted[row].append(int(tokens[row]))
        return tokens == stop

    rows = torch.arange(len(cases))
    acceptance = verify_module.verify(proposal, lambda nodes: laws[rows, nodes.clamp(min=0)], draws, on_token)
    if walks is not None:
        walks += [(proposal, acceptance, row, tokens) for row, tokens in enumerate(emitted)]
    return [tuple(tokens) for tokens in emitted]


def laws_of(trees, target, draft, stop=-1):
    """The law of the first tokens when each of `trees` is drafted and verified, all of them in one batch."""
    cases = [(name, case) for name in trees for case in drafts(TREES[name], target, draft)]
    parts = defaultdict(list)
    for (name, case), tokens, weight in outcomes(
        cases, lambda batch, draws: play([case for _, case in batch], draws, stop)
    ):
        parts[name].append((tokens, case.weight * weight))
    return {name: completed(parts[name], target, LENGTH, stop) for name in trees}


def worst(trees, target, draft, stop=-1):
    expected = completed([((), 1.0)], target, LENGTH, stop)
    return {name: distance(law, expected) for name, law in laws_of(trees, target, draft, stop).items()}


@pytest.mark.parametrize("vocab", [3, 4, 5])
@pytest.mark.parametrize("name", TREES)
def test_the_law_of_the_output_is_the_targets(name, vocab):
    if vocab == 5 and name in ("tree", "deep tree", "drawn, then a point mass"):
        vocab = 4  # five tokens give these trees tens of thousands of branches and no new kind of them
    for seed in range(2):
        assert worst([name], Model(vocab, seed), Model(vocab, 100 + seed))[name] < TOLERANCE


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("supports", [(2, 3), (3, 2), (2, 2), (1, 3), (3, 1)])
def test_laws_with_impossible_tokens(name, supports):
    """As top-k makes them; a support of one is greedy decoding, or a greedy draft."""
    target, draft = Model(3, 7, supports[0]), Model(3, 8, supports[1])
    assert worst([name], target, draft)[name] < TOLERANCE


@pytest.mark.parametrize("name", TREES)
def test_a_draft_that_is_the_target_is_always_kept(name):
    """p = q: rejections have probability zero, and siblings are tried with nothing left."""
    target = Model(3, 5)
    assert worst([name], target, target)[name] < TOLERANCE
    if name in ("chain", "deep chain"):
        depth = len(TREES[name])
        shares = [
            (len(tokens), case.weight * weight)
            for case, tokens, weight in outcomes(drafts(TREES[name], target, target), play)
        ]
        assert sum(weight for length, weight in shares if length == depth + 1) == pytest.approx(1.0)


@pytest.mark.parametrize("name", TREES)
def test_a_stop_token_ends_the_output_as_it_ends_the_targets(name):
    assert worst([name], Model(3, 11), Model(3, 12), stop=1)[name] < TOLERANCE


PAIRS = list(itertools.combinations(["chain", "two siblings", "tree of point masses", "tree"], 2))


@pytest.mark.parametrize("pair", PAIRS)
def test_rows_with_other_trees_in_one_batch(pair):
    assert max(worst(pair, Model(3, 3), Model(3, 4)).values()) < TOLERANCE


@pytest.mark.parametrize("stop", [-1, 1])
@pytest.mark.parametrize("name", TREES)
def test_the_path_holds_what_was_emitted_on_every_branch(name, stop):
    walks = []
    outcomes(drafts(TREES[name], Model(3, 3), Model(3, 4)), lambda cases, draws: play(cases, draws, stop, walks))
    for proposal, acceptance, row, tokens in walks:
        path = acceptance.path[row][acceptance.path[row] >= 0]
        assert int(acceptance.length[row]) == len(path) == len(tokens)
        assert int(acceptance.next_token[row]) == tokens[-1]
        assert proposal.tokens[row, path[1:]].tolist() == tokens[:-1]
        assert proposal.parents[row, path[1:]].tolist() == path[:-1].tolist()
        assert int(acceptance.kept[row]) - (len(path) - 1) in (0, 1)  # 1 where a drafted token was the stop


def test_a_chain_is_kept_with_the_overlap_of_the_laws():
    target, draft = Model(4, 21), Model(4, 22)
    overlap = float(torch.minimum(target(()), draft(())).sum())
    cases = drafts([(0, DRAWN)], target, draft)
    kept = sum(case.weight * weight for case, tokens, weight in outcomes(cases, play) if len(tokens) == 2)
    assert kept == pytest.approx(overlap, abs=1e-12)


# name: (function, edits, trees that must show the mutant)
MUTANTS = {
    "residual not renormalised": (
        "try_drawn",
        [("residual / mass.clamp(min=torch.finfo(p.dtype).tiny)[:, None]", "residual")],
        ["two siblings", "three siblings"],
    ),
    "siblings tried with the original p": (
        "try_drawn",
        [("drawn = live.clone(), drawn.clone()", "drawn, whole = live.clone(), drawn.clone(), p"),
         ("ratio = p[rows, x]", "ratio = whole[rows, x]")],
        ["two siblings", "three siblings", "three siblings with replacement"],
    ),
    "no residual after a rejection": (
        "try_drawn",
        [("p = torch.where((rejected & ~empty)", "p = torch.where((rejected & empty)")],
        ["chain", "two siblings", "drawn, then a point mass"],
    ),
    "residual not cut at zero": ("try_drawn", [("torch.relu(p - q)", "(p - q).abs()")], ["chain", "two siblings"]),
    "coin turned over": ("try_drawn", [("p[rows, x] / q[rows, x]", "q[rows, x] / p[rows, x]")], ["chain", "tree"]),
    "always accepted": ("try_drawn", [("draws.accept(ratio, trying)", "trying")], ["chain", "two siblings"]),
    "siblings tried last to first": (
        "try_drawn",
        [("node = drawn.int().argmax(1)", "node = drawn.shape[1] - 1 - drawn.flip(1).int().argmax(1)")],
        ["two siblings", "three siblings"],
    ),
    "a point mass met by any token": (
        "choose",
        [("(proposal.tokens == drawn[:, None])", "(proposal.tokens >= 0)")],
        ["chain of point masses", "tree of point masses"],
    ),
    "the law of the node before": (
        "verify",
        [("at = torch.where(live, child, at)", "at, before = torch.where(live, child, at), at"),
         ("probs_at(torch.where(live, at, -1))", "probs_at(torch.where(live, at if depth < 2 else before, -1))")],
        ["chain", "chain of point masses"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_law_check_kills_the_mutant(mutant, monkeypatch):
    function, edits, trees = MUTANTS[mutant]
    monkeypatch.setattr(verify_module, function, mutated(getattr(verify_module, function), *edits))
    seen = [worst(trees, Model(4, seed), Model(4, 100 + seed)) for seed in range(2)]
    for name in trees:
        assert max(far[name] for far in seen) > 1e-3, f"{mutant} is not seen on {name}"


def impossible_token(draws):
    """Whether a drawn token that the target never says comes out, when the generator gives exactly u = 0."""
    p, q = torch.tensor([[0.0, 1.0]]), torch.tensor([[[0.0, 0.0], [1 / 3, 2 / 3]]])
    chain = Proposal(torch.tensor([[1, 0]]), torch.tensor([[-1, 0]]), torch.ones(1, 2, dtype=torch.bool), q)
    acceptance = verify_module.verify(chain, lambda nodes: p, draws, lambda tokens, live: torch.zeros_like(live))
    return int(acceptance.kept[0]) > 0


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_a_coin_accepts_strictly_below_its_probability(generator, monkeypatch):
    """Kills the mutant `<=`: u = 0 would accept what has probability 0."""
    other = torch.Generator()  # two generators take the way of rows with their own
    rows = [Sampler(LogitsProcessorList(), 0, True, generator)]
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.zeros(*shape, dtype=torch.float64))
    if generator is not None:
        monkeypatch.setattr(Draws, "_generators", lambda self: [other])
    assert not impossible_token(Draws(rows))
    old, new = ("return live & (u < probability)", "return live & (u <= probability)")
    if generator is None:
        old, new = ("return u < probability\n", "return u <= probability\n")
    monkeypatch.setattr(Draws, "accept", mutated(Draws.accept, (old, new)))
    assert impossible_token(Draws(rows))
