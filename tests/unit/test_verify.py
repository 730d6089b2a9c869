"""spechead.verify: the walk, its bookkeeping, and the typical rule. The law itself is proved in tests/lossless."""

import pytest
import torch

from spechead import Proposal
from spechead.verify import TypicalAcceptance, verify


class Script:
    """Draws that answer coins from a list and samples with the likeliest token, and note what they were asked."""

    def __init__(self, *coins):
        self.coins, self.ratios, self.laws = list(coins), [], []

    def accept(self, probability, live):
        self.ratios.append(probability[live].tolist())
        return torch.full_like(live, self.coins.pop(0))

    def sample(self, p, live):
        self.laws.append(p[live].tolist())
        return p.argmax(-1)


class Walk:
    """Runs verify on laws given by node, and notes what was asked and emitted."""

    def __init__(self, laws, stops=()):
        self.laws, self.stops = torch.tensor(laws, dtype=torch.float64), stops  # [B, N, V]
        self.asked, self.emitted = [], []

    def probs_at(self, nodes):
        self.asked.append(nodes.tolist())
        rows = torch.arange(len(nodes))
        return torch.where((nodes >= 0)[:, None], self.laws[rows, nodes.clamp(min=0)], 0.0)

    def on_token(self, tokens, live):
        self.emitted.append([t if alive else None for t, alive in zip(tokens.tolist(), live.tolist(), strict=True)])
        return torch.tensor([t in self.stops for t in tokens.tolist()])

    def run(self, proposal, draws=None, typical=None):
        return verify(proposal, self.probs_at, draws or Script(), self.on_token, typical)


def one_hot(*tokens, vocab=4):
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).double().tolist()


def chain(*tokens, draft_probs=None):
    tokens = torch.tensor([tokens])
    real = torch.ones_like(tokens, dtype=torch.bool)[:, 1:]
    probs = None if draft_probs is None else torch.tensor([draft_probs], dtype=torch.float64)
    return Proposal.chain(tokens[:, 0], tokens[:, 1:], real, probs)


def tree(tokens, parents, draft_probs=None, real=None):
    parents = torch.tensor([parents])
    real = torch.ones_like(parents, dtype=torch.bool) if real is None else torch.tensor([real])
    probs = None if draft_probs is None else torch.tensor([draft_probs], dtype=torch.float64)
    return Proposal(torch.tensor([tokens]), parents, real, probs)


def test_a_greedy_chain_keeps_its_right_prefix_and_takes_the_bonus_there():
    walk = Walk([one_hot(1, 2, 3, 0)])  # after nodes 0, 1, 2, 3 the target says 1, 2, 3, 0
    acceptance = walk.run(chain(0, 1, 2, 0))
    assert acceptance.path.tolist() == [[0, 1, 2, -1]]
    assert acceptance.length.tolist() == [3]
    assert acceptance.next_token.tolist() == [3]
    assert acceptance.kept.tolist() == [2]
    assert walk.asked == [[0], [1], [2]]
    assert walk.emitted == [[1], [2], [3]]


def test_a_whole_chain_gives_one_token_more_than_was_drafted():
    acceptance = Walk([one_hot(1, 2, 3)]).run(chain(0, 1, 2))
    assert acceptance.path.tolist() == [[0, 1, 2]]
    assert (acceptance.length.tolist(), acceptance.next_token.tolist(), acceptance.kept.tolist()) == ([3], [3], [2])


def test_a_root_alone_emits_one_token():
    acceptance = Walk([one_hot(2)]).run(Proposal.root_only(torch.tensor([1])))
    assert acceptance.path.tolist() == [[0]]
    assert (acceptance.length.tolist(), acceptance.next_token.tolist(), acceptance.kept.tolist()) == ([1], [2], [0])


def test_a_row_that_stops_on_a_drafted_token_leaves_it_out_of_the_path():
    walk = Walk([one_hot(1, 2, 3, 0)], stops=(2,))
    acceptance = walk.run(chain(0, 1, 2, 3))
    assert acceptance.path.tolist() == [[0, 1, -1, -1]]
    assert acceptance.length.tolist() == [2]
    assert acceptance.next_token.tolist() == [2]
    assert acceptance.kept.tolist() == [2]
    assert walk.asked == [[0], [1]]  # the law after the stop is not asked for
    assert walk.emitted == [[1], [2]]


def test_a_row_that_stops_on_the_bonus_token():
    acceptance = Walk([one_hot(1, 3, 3)], stops=(3,)).run(chain(0, 1, 2))
    assert acceptance.path.tolist() == [[0, 1, -1]]
    assert (acceptance.length.tolist(), acceptance.next_token.tolist(), acceptance.kept.tolist()) == ([2], [3], [1])


def test_rows_walk_on_their_own_and_done_rows_not_at_all():
    tokens = torch.tensor([[0, 1, 2], [0, 3, 3], [0, 0, 0]])
    real = torch.tensor([[True, True], [True, True], [False, False]])
    proposal = Proposal.chain(torch.tensor([0, 0, -1]), tokens[:, 1:], real)
    walk = Walk([one_hot(1, 2, 3)] * 3)
    acceptance = walk.run(proposal)
    assert acceptance.path.tolist() == [[0, 1, 2], [0, -1, -1], [-1, -1, -1]]
    assert acceptance.length.tolist() == [3, 1, 0]
    assert acceptance.next_token.tolist()[:2] == [3, 1]
    assert acceptance.kept.tolist() == [2, 0, 0]
    assert walk.asked == [[0, 0, -1], [1, -1, -1], [2, -1, -1]]
    assert walk.emitted == [[1, 1, None], [2, None, None], [3, None, None]]


def test_a_tree_is_walked_along_the_sibling_that_equals_the_token():
    proposal = tree([0, 1, 2, 3, 3, 0], [-1, 0, 0, 1, 2, 4])
    acceptance = Walk([one_hot(2, 0, 3, 0, 0, 1)]).run(proposal)
    assert acceptance.path.tolist() == [[0, 2, 4, 5]]
    assert acceptance.next_token.tolist() == [1]


def test_nodes_that_are_not_real_are_never_kept():
    proposal = tree([0, 1, 1], [-1, 0, 0], real=[True, False, True])
    assert Walk([one_hot(1, 2, 3)]).run(proposal).path.tolist() == [[0, 2]]
    assert Walk([one_hot(1, 2, 3)]).run(tree([0, 1, 1], [-1, 0, 0], real=[True, False, False])).length.tolist() == [1]


def test_of_equal_point_masses_the_first_is_kept():
    acceptance = Walk([one_hot(1, 2, 3)]).run(tree([0, 1, 1], [-1, 0, 0]))
    assert acceptance.path.tolist() == [[0, 1]]
    assert acceptance.next_token.tolist() == [2]


def test_a_drawn_child_is_tried_with_p_over_q():
    p, q = [0.1, 0.6, 0.2, 0.1], [0.25, 0.3, 0.25, 0.2]
    draws = Script(True)
    acceptance = Walk([[p, one_hot(3)[0]]]).run(chain(0, 1, draft_probs=[q]), draws)
    assert draws.ratios == [pytest.approx([2.0])]  # above 1: certain
    assert acceptance.path.tolist() == [[0, 1]]
    assert acceptance.next_token.tolist() == [3]


def test_after_a_rejection_the_rest_of_p_is_renormalised():
    p, q = [0.1, 0.2, 0.3, 0.4], [0.4, 0.4, 0.1, 0.1]
    draws = Script(False)
    acceptance = Walk([[p, one_hot(0)[0]]]).run(chain(0, 0, draft_probs=[q]), draws)
    assert draws.ratios == [pytest.approx([0.25])]
    assert draws.laws[-1] == [pytest.approx([0.0, 0.0, 0.4, 0.6])]
    assert acceptance.path.tolist() == [[0, -1]]
    assert (acceptance.next_token.tolist(), acceptance.kept.tolist()) == ([3], [0])


def test_siblings_are_tried_in_draw_order_each_with_what_is_left():
    p = [0.1, 0.2, 0.3, 0.4]
    laws = [[0.0] * 4, [0.4, 0.4, 0.1, 0.1], [0.0, 0.6, 0.2, 0.2]]
    draws = Script(False, True)
    acceptance = Walk([[p, *one_hot(0, 1)]]).run(tree([0, 0, 3], [-1, 0, 0], laws), draws)
    assert draws.ratios == [pytest.approx([0.25]), pytest.approx([0.6 / 0.2])]
    assert acceptance.path.tolist() == [[0, 2]]


def test_a_rejection_of_probability_zero_samples_p_itself_and_ends_the_walk():
    p = [0.25, 0.25, 0.5, 0.0]
    draws = Script(False)  # cannot happen in exact arithmetic: p = q is accepted with certainty
    proposal = tree([0, 0, 2], [-1, 0, 0], [[0.0] * 4, p, one_hot(2)[0]])
    acceptance = Walk([[p, *one_hot(0, 0)]]).run(proposal, draws)
    assert draws.laws == [[p]]
    assert acceptance.path.tolist() == [[0, -1]]
    assert acceptance.next_token.tolist() == [2]


def test_a_point_mass_beside_drawn_siblings_is_met_by_the_rest():
    p, q = [0.1, 0.2, 0.3, 0.4], [0.4, 0.4, 0.1, 0.1]
    draws = Script(False)
    proposal = tree([0, 0, 3], [-1, 0, 0], [[0.0] * 4, q, one_hot(3)[0]])
    acceptance = Walk([[p, *one_hot(0, 1)]]).run(proposal, draws)
    assert draws.ratios == [pytest.approx([0.25])]  # no coin for the point mass
    assert acceptance.path.tolist() == [[0, 2]]
    assert acceptance.next_token.tolist() == [1]


def test_laws_in_float32_are_taken_in_the_precision_of_the_target():
    p, q = [0.1, 0.2, 0.3, 0.4], [0.4, 0.4, 0.1, 0.1]
    proposal = chain(0, 0, draft_probs=[q])
    single = Proposal(proposal.tokens, proposal.parents, proposal.real, proposal.draft_probs.float())
    draws = Script(False)
    Walk([[p, one_hot(0)[0]]]).run(single, draws)
    assert draws.laws[-1] == [pytest.approx([0.0, 0.0, 0.4, 0.6], abs=1e-6)]


LEVEL = [0.25, 0.25, 0.25, 0.25]  # entropy log 4: threshold min(0.09, 0.3 / 4) = 0.075


def test_typical_keeps_what_the_threshold_lets_pass():
    low = [0.05, 0.45, 0.45, 0.05]
    acceptance = Walk([[low, LEVEL, one_hot(2)[0]]]).run(chain(0, 1, 0), typical=TypicalAcceptance())
    assert acceptance.path.tolist() == [[0, 1, 2]]
    assert acceptance.next_token.tolist() == [2]
    acceptance = Walk([[low, LEVEL, one_hot(2)[0]]]).run(chain(0, 0, 0), typical=TypicalAcceptance())
    assert acceptance.path.tolist() == [[0, -1, -1]]  # 0.05 is below min(0.09, 0.3 * exp(-entropy))
    assert (acceptance.next_token.tolist(), acceptance.kept.tolist()) == ([1], [0])


@pytest.mark.parametrize(("delta", "kept"), [(1.0, False), (0.9, True)])
def test_typical_compares_strictly(delta, kept):
    # entropy log 4 and delta 1 make the threshold 0.25 exactly; the token's own probability is 0.25
    acceptance = Walk([[LEVEL, one_hot(2)[0]]]).run(chain(0, 1), typical=TypicalAcceptance(epsilon=0.9, delta=delta))
    assert bool(acceptance.kept[0]) is kept


def test_typical_takes_the_longest_passing_path_and_of_equal_ones_the_first():
    proposal = tree([0, 1, 2, 1, 3, 2], [-1, 0, 0, 1, 2, 2])
    laws = [LEVEL, one_hot(0)[0], LEVEL, LEVEL, LEVEL, LEVEL]  # node 3 fails under node 1; nodes 4 and 5 pass under 2
    acceptance = Walk([laws]).run(proposal, typical=TypicalAcceptance())
    assert acceptance.path.tolist() == [[0, 2, 4]]


def test_typical_does_not_jump_over_a_failing_node():
    laws = [one_hot(0)[0], LEVEL, LEVEL]
    acceptance = Walk([laws]).run(chain(0, 1, 2), typical=TypicalAcceptance())
    assert acceptance.path.tolist() == [[0, -1, -1]]


def test_typical_stops_and_leaves_done_rows_alone():
    proposal = Proposal.chain(
        torch.tensor([0, -1]), torch.tensor([[1, 2], [1, 2]]), torch.ones(2, 2, dtype=torch.bool)
    )
    walk = Walk([[LEVEL] * 3] * 2, stops=(1,))
    acceptance = walk.run(proposal, typical=TypicalAcceptance())
    assert acceptance.path.tolist() == [[0, -1, -1], [-1, -1, -1]]
    assert acceptance.length.tolist() == [1, 0]
    assert (acceptance.next_token.tolist()[0], acceptance.kept.tolist()) == (1, [1, 0])
    assert walk.emitted == [[1, None]]
