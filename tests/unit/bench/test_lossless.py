"""The certificate's checks: they pass on the shipped code, and name four faults that are planted in it."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig

from spechead import SpeculativeConfig, enable_speculation
from spechead import verify as verify_module
from spechead.attach import Speculation
from spechead.bench import faults
from spechead.bench.certificate import CheckSettings, MethodCheck
from spechead.bench.lossless import GREEDY, NOTHING, SAMPLED, Check
from spechead.bench.measure import twin
from spechead.context import Context
from spechead.proposal import Proposal
from spechead.proposers.base import BaseProposer
from spechead.proposers.draft_model import DraftModelProposer
from spechead.target import Target
from tests import tiny
from tests.unit.heads.targets import make_head

SETTINGS = CheckSettings(max_new_tokens=16, batch_sizes=[1, 3], effect_size=0.3, power=0.9, law_prompts=1, rows=96)
PROMPTS = {name: tiny.prompt_ids(1, 8 + number, seed=number)[0].tolist() for number, name in enumerate("abc")}


def noisy(model: Any, noise: float = 0.03) -> Any:
    """A draft that agrees with its target often, not always."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return draft


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """An untouched target, and its twin with a draft and heads, probed."""
    plain = tiny.fresh_model("llama")
    heads = [make_head("medusa", plain), make_head("eagle", plain)]
    enabled = enable_speculation(twin(plain), draft_model=noisy(plain), head=heads)
    assert Speculation.of(enabled).target.verdict.tier == "tree"
    return plain, enabled


def check(pair: tuple[Any, Any], method: str, **changes: Any) -> MethodCheck:
    config = SpeculativeConfig(method=method, **changes)  # type: ignore[arg-type]  # strict
    return Check(*pair, config, SETTINGS).run(PROMPTS)


@pytest.mark.parametrize("method", ["draft_model", "eagle", "auto"])
def test_the_shipped_code_passes(pair: tuple[Any, Any], method: str) -> None:
    found = check(pair, method)
    assert found.passed is True
    assert found.faults == []
    assert [greedy.identical for greedy in found.greedy] == [3, 3]
    assert all(greedy.drafted_tokens > 0 for greedy in found.greedy)
    assert found.trees is not None
    assert found.trees.nodes > found.trees.steps
    assert found.trees.changed > 0
    assert found.trees.laws > 0
    assert found.law is not None
    assert found.law.drafted_tokens > 0
    assert found.law.power >= 0.9
    assert found.law.samples >= 700
    drawn, bonus, inside = found.draws
    assert (drawn.tokens > 0) == (method == "draft_model")
    assert min(bonus.tokens, inside.tokens) > 300


def test_sampled_chains_of_a_head_pass(pair: tuple[Any, Any]) -> None:
    found = check(pair, "eagle", tree="chain")
    assert found.passed
    assert found.draws[0].tokens > 1000


def names(found: MethodCheck) -> list[str]:
    assert found.passed is False
    return [fault.name for fault in found.faults]


Plant = tuple[Any, str, Any]  # whose attribute, which, and what takes its place


def below(proposal: Proposal, nodes: Tensor) -> Tensor:
    """Rows in which something is drafted under the node they stand on."""
    return (proposal.real & (proposal.parents == nodes[:, None])).any(1)


def wrong_q() -> Plant:
    """Tokens are drawn from the warped law; the law reported for them is the unwarped one."""
    shipped = DraftModelProposer._draw

    def draw(self: Any, context: Any, logits: Tensor, *rest: Any) -> Any:
        _, *others = shipped(self, context, logits, *rest)
        return (torch.softmax(logits.float(), dim=-1), *others)

    return DraftModelProposer, "_draw", draw


def argmax_for_a_draw() -> Plant:
    """The draft proposes its best token, and reports the whole law."""
    shipped = DraftModelProposer._draw

    def draw(self: Any, *arguments: Any) -> Any:
        law, *_ = shipped(self, *arguments)
        return law, law.argmax(-1)

    return DraftModelProposer, "_draw", draw


def bonus_from_raw_logits() -> Plant:
    """Where nothing is drafted below a node, the processors are left out."""
    shipped = Context.probs_at

    def probs_at(self: Context, proposal: Proposal, logits: Tensor) -> Any:
        law = shipped(self, proposal, logits)

        def at(nodes: Tensor) -> Tensor:
            raw = torch.softmax(logits[torch.arange(len(nodes)), nodes.clamp(min=0)].float(), dim=-1)
            return torch.where(below(proposal, nodes)[:, None], law(nodes), raw)

        return at

    return Context, "probs_at", probs_at


def bonus_past_its_law() -> Plant:
    """The law handed to verification is right; behind the last drafted token another one is drawn from."""
    shipped = verify_module.choose

    def choose(proposal: Proposal, p: Tensor, at: Tensor, live: Tensor, draws: Any) -> Any:
        flatter = (p + 0.01) / (p + 0.01).sum(1, keepdim=True)
        return shipped(proposal, torch.where(below(proposal, at)[:, None], p, flatter), at, live, draws)

    return verify_module, "choose", choose


def siblings_seen() -> Plant:
    """A node attends to its siblings, too."""
    shipped = Proposal.tree_mask.fget  # type: ignore[attr-defined]  # a property

    def tree_mask(self: Proposal) -> Tensor:
        return shipped(self) | (self.parents[:, :, None] == self.parents[:, None, :])

    return Proposal, "tree_mask", property(tree_mask)


class Shifted(Proposal):
    """A proposal whose drafted nodes say that they are one level deeper."""

    root_too = False

    @property
    def depths(self) -> Tensor:
        depths = super().depths
        return depths + 1 if self.root_too else depths + (depths > 0)


class AllShifted(Shifted):
    """A proposal whose root does so, too."""

    root_too = True


def forward_of(kind: type[Proposal]) -> Plant:
    shipped = Target.forward

    def forward(self: Target, proposal: Proposal, *rest: Any) -> Any:
        fields = (proposal.tokens, proposal.parents, proposal.real, proposal.draft_probs, proposal.max_depth)
        return shipped(self, kind(*fields), *rest)

    return Target, "forward", forward


def drafted_one_further() -> Plant:
    """Drafted nodes stand one position too far."""
    return forward_of(Shifted)


def all_one_further() -> Plant:
    """Every new token stands one position too far."""
    return forward_of(AllShifted)


def law_of_the_node_before() -> Plant:
    """A node gets its parent's logits."""
    shipped = Context.probs_at

    def probs_at(self: Context, proposal: Proposal, logits: Tensor) -> Any:
        rows = torch.arange(len(logits))[:, None]
        return shipped(self, proposal, logits[rows, proposal.parents.clamp(min=0)])

    return Context, "probs_at", probs_at


PLANTED = [
    (wrong_q, "draft_model", faults.WRONG_Q),
    (bonus_from_raw_logits, "draft_model", faults.BONUS),
    (siblings_seen, "medusa", faults.LEAK),
    (drafted_one_further, "draft_model", faults.POSITION),
    (law_of_the_node_before, "draft_model", faults.POSITION),
]
MORE = [
    (argmax_for_a_draw, "draft_model", faults.WRONG_Q),
    (bonus_from_raw_logits, "eagle", faults.BONUS),
    (bonus_past_its_law, "draft_model", faults.BONUS),
    (siblings_seen, "eagle", faults.LEAK),
    (drafted_one_further, "eagle", faults.POSITION),
    (all_one_further, "draft_model", faults.POSITION),
]


@pytest.mark.parametrize(
    ("plant", "method", "name"), [*PLANTED, *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE)]
)
def test_a_planted_fault_is_named(
    plant: Callable[[], Plant],
    method: str,
    name: str,
    pair: tuple[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, attribute, mutant = plant()
    monkeypatch.setattr(owner, attribute, mutant)
    found = check(pair, method)
    assert names(found)[0] == name
    assert next(fault.evidence for fault in found.faults if fault.name == name)


def test_the_sampled_law_alone_finds_a_wrong_q(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, mutant = argmax_for_a_draw()
    monkeypatch.setattr(owner, attribute, mutant)
    found = check(pair, "draft_model")
    assert SAMPLED in names(found)
    assert found.law is not None
    assert found.law.p_value < 1e-6
    assert [greedy.bugs for greedy in found.greedy] == [0, 0], "greedy checks cannot see a wrong q"


def test_a_wrong_greedy_output_is_a_bug_with_its_gap(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, mutant = law_of_the_node_before()
    monkeypatch.setattr(owner, attribute, mutant)
    found = check(pair, "draft_model")
    assert GREEDY in names(found)
    bugs = [difference for greedy in found.greedy for difference in greedy.differences]
    assert bugs
    assert all(bug.verdict == "bug" and bug.gap is not None and bug.gap > 1e-2 for bug in bugs)


class Silent(BaseProposer):
    """Drafts nothing."""


def test_a_method_that_drafts_nothing_shows_nothing(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftModelProposer, "propose", lambda self, context: Proposal.root_only(context.root))
    assert names(check(pair, "draft_model")) == [NOTHING]


def test_a_lossy_rule_gets_a_distance_instead_of_a_pass(pair: tuple[Any, Any]) -> None:
    found = check(pair, "draft_model", acceptance="typical")
    assert found.lossy
    assert found.passed is None
    assert found.law is None
    assert found.distance is not None
    assert 0 < found.distance.low <= found.distance.total_variation <= found.distance.high
    assert found.distance.total_variation > 1.5 * found.distance.exact


def test_low_precision_is_bounded_by_measured_rounding() -> None:
    plain = tiny.fresh_model("llama").to(torch.bfloat16)
    enabled = enable_speculation(twin(plain), draft_model=noisy(plain))
    found = Check(plain, enabled, SpeculativeConfig(method="draft_model"), SETTINGS).run(PROMPTS)
    assert found.passed, found.faults
    for greedy in found.greedy:
        assert greedy.bound > 1e-3
        assert "bfloat16" in greedy.bound_source
        assert greedy.identical + greedy.ties == 3


def test_a_certain_target_is_refused_before_anything_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spechead.bench.lossless.check_greedy", lambda *given: pytest.fail("checked first"))
    plain = tiny.table_model([(token + 1) % 48 for token in range(48)])
    plain.lm_head.weight.data *= 100
    enabled = enable_speculation(twin(plain), draft_model=copy.deepcopy(plain))
    with pytest.raises(ValueError, match="certain of the first token"):
        Check(plain, enabled, SpeculativeConfig(method="draft_model"), SETTINGS).run(PROMPTS)


def bloom() -> Any:
    config = BloomConfig(
        vocab_size=48, hidden_size=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None, pad_token_id=0
    )
    return tiny.build(config, "eager")


OTHERS = {
    "a chain target": bloom,
    "learned positions": lambda: tiny.fresh_model("gpt2"),
    "windows": lambda: tiny.fresh_model("gemma3"),
    "eager attention": lambda: tiny.fresh_model("gpt_neox", "eager"),
}


@pytest.mark.parametrize("name", ["a chain target", *(pytest.param(n, marks=pytest.mark.slow) for n in [*OTHERS][1:])])
def test_other_targets_pass(name: str) -> None:
    plain = OTHERS[name]()
    enabled = enable_speculation(twin(plain), draft_model=noisy(plain))
    settings = replace(SETTINGS, effect_size=0.6)
    found = Check(plain, enabled, SpeculativeConfig(method="draft_model"), settings).run(PROMPTS)
    assert found.passed, found.faults
    sizes = [greedy.batch_size for greedy in found.greedy]
    assert sizes == ([1] if name == "a chain target" else [1, 3]), "a chain is verified one row at a time"
