"""auto: exact whatever it chooses, led by costs and acceptance, quiet where nothing pays, and without a trace."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from spechead import SpeculativeConfig, enable_speculation
from spechead.attach import Speculation
from spechead.config import DraftingConfig
from spechead.decoding import step
from spechead.proposers.auto import LOSSES, PROBE_FIRST, AutoProposer, Plan
from spechead.proposers.costs import LEAD, Ledger
from spechead.proposers.draft_model import DraftModelProposer
from spechead.proposers.eagle import EagleProposer
from spechead.proposers.prompt_lookup import PromptLookupProposer
from spechead.target import Target
from tests import tiny
from tests.running import start
from tests.unit.generate.harness import llama
from tests.unit.heads.targets import make_head

NEW = 64
FREE = {"step_seconds": lambda nodes: 1.0, "draft_seconds": lambda depth: 0.01 * depth}
STEEP = {"step_seconds": lambda nodes: 1 + 0.3 * nodes, "draft_seconds": lambda depth: 0.2 * depth}


@pytest.fixture(scope="module")
def target() -> Any:
    """A target whose greedy text repeats n-grams."""
    return enable_speculation(llama())


def perturbed(model: Any, noise: float) -> Any:
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return draft


def drafter(kind: str, target: Any) -> Any:
    if kind == "eagle":
        return EagleProposer(make_head("eagle", target))
    if kind == "draft_model":
        return DraftModelProposer(Target(perturbed(target, 0.02)))
    return None


def prompts(batch: int) -> dict[str, Tensor]:
    """Prompts in which n-grams repeat, left-padded where there are several."""
    rows = [[5, 9, 33, 12, 7, 13, 45, 20, 30, 9, 33], [13, 30, 13, 30, 11, 13], [31, 20, 20], [4, 5, 6, 4, 5]][:batch]
    width = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def generate(target: Any, proposer: Any, batch: int = 1, new: int = NEW, **settings: Any) -> Any:
    return target.generate(
        **prompts(batch),
        speculative=proposer,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        **settings,
    )


def auto(kind: str, target: Any, ledger: Ledger | None = None) -> AutoProposer:
    return AutoProposer(PromptLookupProposer(), drafter(kind, target), ledger)


class TestExact:
    @pytest.mark.parametrize("batch", [1, 4])
    @pytest.mark.parametrize("kind", ["lookup only", "eagle", "draft_model"])
    def test_greedy_equals_plain(self, target: Any, kind: str, batch: int) -> None:
        plain = target.generate(**prompts(batch), max_new_tokens=NEW, do_sample=False)
        output = generate(target, auto(kind, target, Ledger(**FREE)), batch)
        assert output.sequences.tolist() == plain.tolist()
        stats = output.stats
        assert stats.speculating_steps > 0
        assert stats.kept_tokens > 0 or kind == "eagle", "a random head need not hit"
        if kind == "draft_model":
            assert stats.plans.get("lookup+draft", 0) > 0, "one tree held both"

    @pytest.mark.parametrize("batch", [1, 4])
    def test_by_name_it_measures_its_costs_and_stays_exact(self, batch: int) -> None:
        model = enable_speculation(llama(), draft_model=perturbed(llama(), 0.02))
        plain = model.generate(**prompts(batch), max_new_tokens=NEW, do_sample=False)
        output = generate(model, "auto", batch)
        assert output.sequences.tolist() == plain.tolist()
        assert output.stats.method == "auto"

    def test_sampled_merged_trees_repeat_by_seed_when_costs_are_given(self, target: Any) -> None:
        def sampled() -> Any:
            torch.manual_seed(5)
            return target.generate(
                **prompts(4),
                speculative=auto("draft_model", target, Ledger(**FREE)),
                max_new_tokens=40,
                do_sample=True,
                top_k=3,
                return_dict_in_generate=True,
            )

        first, second = sampled(), sampled()
        assert first.sequences.tolist() == second.sequences.tolist()
        assert first.stats.plans == second.stats.plans
        assert first.stats.plans.get("lookup+draft", 0) > 0


class TestChoice:
    def plans(self, target: Any, kind: str, **costs: Any) -> dict[str, int]:
        return dict(generate(target, auto(kind, target, Ledger(**costs))).stats.plans)

    def test_other_costs_make_other_choices(self, target: Any) -> None:
        free = self.plans(target, "draft_model", **FREE)
        dear_draft = self.plans(target, "draft_model", step_seconds=FREE["step_seconds"], draft_seconds=lambda d: 50.0)
        dear_nodes = self.plans(target, "draft_model", step_seconds=lambda n: 5.0 * n, draft_seconds=lambda d: 0.0)
        assert free.get("draft", 0) + free.get("lookup+draft", 0) > 0
        assert dear_draft.keys() <= {"plain", "lookup"}
        assert dear_draft["lookup"] > 0
        assert max(dear_nodes, key=lambda plan: dear_nodes[plan]) == "plain"

    def test_dear_nodes_make_shallow_drafts(self, target: Any) -> None:
        def depth(**costs: Any) -> float:
            stats = generate(target, AutoProposer(PromptLookupProposer(1), exact_draft(target), Ledger(**costs))).stats
            return stats.drafted_tokens / max(stats.speculating_steps, 1)

        deep = depth(**FREE)
        shallow = depth(step_seconds=lambda n: 1 + 0.35 * n, draft_seconds=lambda d: 0.25 * d)
        assert deep > 4.5
        assert 0 < shallow < deep - 1

    def test_nothing_is_drafted_where_there_is_no_room(self, target: Any) -> None:
        stats = generate(target, auto("draft_model", target, Ledger(**FREE)), new=2).stats
        assert stats.plans == {"plain": 1}

    def test_every_step_shows_its_decision(self, target: Any) -> None:
        stats = generate(target, auto("eagle", target, Ledger(**STEEP))).stats
        assert sum(stats.plans.values()) == stats.steps
        assert sum(count for plan, count in stats.plans.items() if plan != "plain") >= stats.speculating_steps

    def test_names_of_plans(self) -> None:
        assert [Plan().name, Plan(4).name, Plan(0, 2).name, Plan(4, 2).name] == [
            "plain",
            "lookup",
            "draft",
            "lookup+draft",
        ]


def exact_draft(target: Any) -> DraftModelProposer:
    return DraftModelProposer(Target(copy.deepcopy(target)))


class TestStepsBack:
    @pytest.mark.parametrize("batch", [1, 4])
    @pytest.mark.parametrize("kind", ["eagle", "medusa", "draft_model"])
    def test_a_random_head_at_steep_costs_speculates_in_a_tenth_of_the_steps(self, kind: str, batch: int) -> None:
        model = enable_speculation(tiny.fresh_model("llama"))
        if kind == "draft_model":
            part: Any = DraftModelProposer(Target(tiny.fresh_model("llama", seed=7)))
        else:
            attached = enable_speculation(tiny.fresh_model("llama"), head=make_head(kind, model))
            part = Speculation.of(attached).proposer(SpeculativeConfig(method=kind))[0]  # type: ignore[arg-type]
        ids = tiny.prompt_ids(batch, 12, seed=4)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            speculative=AutoProposer(PromptLookupProposer(), part, Ledger(**STEEP)),
            max_new_tokens=NEW,
            do_sample=False,
            return_dict_in_generate=True,
        )
        assert output.stats.steps >= 60
        assert output.stats.speculating_steps <= 0.1 * output.stats.steps
        assert batch > 1 or output.stats.speculating_steps > 0, "a dear probe of four rows would come after this call"

    def test_the_dearer_a_probe_the_longer_it_waits(self, target: Any) -> None:
        def probes(per_level: float) -> int:
            ledger = Ledger(step_seconds=STEEP["step_seconds"], draft_seconds=lambda depth: per_level * depth)
            part = DraftModelProposer(Target(tiny.fresh_model("llama", seed=7)))
            stats = generate(target, AutoProposer(PromptLookupProposer(), part, ledger), new=400).stats
            return stats.plans.get("draft", 0) + stats.plans.get("lookup+draft", 0)

        cheap, dear = probes(0.0), probes(1.0)
        assert 0 < dear <= 6, "about one for each hundred plain steps that it costs"
        assert cheap > dear

    def test_free_drafts_that_never_hit_are_given_up_too(self, target: Any) -> None:
        """Their cost is small, and so is the reason to go on."""
        part = exact_draft(target)
        shipped = part.propose

        def wrong(context: Any) -> Any:
            proposal = shipped(context)
            tokens = (proposal.tokens + 1) % tiny.VOCAB
            tokens[:, 0] = proposal.tokens[:, 0]
            return type(proposal)(tokens, proposal.parents, proposal.real, None, proposal.max_depth)

        part.propose = wrong  # type: ignore[method-assign]
        proposer = AutoProposer(PromptLookupProposer(), part, Ledger(**FREE))
        proposer.lookup.find = lambda context, count: [([], 0)] * context.batch  # type: ignore[method-assign]
        stats = generate(target, proposer).stats
        assert stats.kept_tokens == 0
        assert LOSSES <= stats.speculating_steps <= 0.1 * stats.steps

    @pytest.mark.parametrize("batch", [1, 4])
    def test_a_good_draft_speculates_in_four_fifths_of_the_steps(self, target: Any, batch: int) -> None:
        costs = {"step_seconds": lambda nodes: 1 + 0.02 * nodes, "draft_seconds": lambda depth: 0.08 * depth}
        stats = generate(target, auto("draft_model", target, Ledger(**costs)), batch).stats
        assert stats.speculating_steps >= 0.8 * stats.steps
        assert stats.acceptance_length > 1.5

    def test_it_comes_back_when_drafts_begin_to_hit(self, target: Any) -> None:
        """A draft that is wrong at first and right later: after the rest a probe finds out."""
        part = exact_draft(target)
        shipped, calls = part.propose, []

        def late(context: Any) -> Any:
            proposal = shipped(context)
            calls.append(proposal)
            if len(calls) <= LOSSES:
                wrong = (proposal.tokens + 1) % tiny.VOCAB
                wrong[:, 0] = proposal.tokens[:, 0]
                return type(proposal)(wrong, proposal.parents, proposal.real, None, proposal.max_depth)
            return proposal

        part.propose = late  # type: ignore[method-assign]
        proposer = AutoProposer(PromptLookupProposer(), part, Ledger(**FREE))
        proposer.lookup.find = lambda context, count: [([], 0)] * context.batch  # type: ignore[method-assign]
        output = generate(target, proposer)
        plain = target.generate(**prompts(1), max_new_tokens=NEW, do_sample=False)
        assert output.sequences.tolist() == plain.tolist()
        emitted = [count for count, _ in output.stats.emitted_per_step[0]]
        assert emitted[:LOSSES] == [1] * LOSSES
        assert emitted[LOSSES : LOSSES + PROBE_FIRST - 1] == [1] * (PROBE_FIRST - 1), "it rested"
        assert max(emitted[LOSSES + PROBE_FIRST - 1 :]) > 3, "and came back"


class TestLooksBack:
    """What a copy would have been is known from every step, drafted or not."""

    CYCLE = (0, 1, 2, 3, 5, 6, 7, 4, *range(9, 48), 8)

    def decode(self, ledger: Ledger, prompt: list[int], new: int = 40) -> Any:
        model = enable_speculation(tiny.table_model(self.CYCLE))
        ids = torch.tensor([prompt])
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            speculative=AutoProposer(PromptLookupProposer(), None, ledger),
            max_new_tokens=new,
            do_sample=False,
            return_dict_in_generate=True,
        ).stats

    def test_copies_that_were_right_are_learnt_without_a_draft(self) -> None:
        ledger = Ledger(step_seconds=lambda nodes: 1.0 if nodes == 1 else 1000.0, draft_seconds=lambda depth: 0.0)
        stats = self.decode(ledger, [4, 5, 6, 7, 4, 5])
        assert stats.speculating_steps == 0
        assert ledger.copy_of(3).curve(1)[0] > 0.9
        assert ledger.copy_of(3).trials >= 30

    def test_copies_that_were_wrong_are_learnt_too(self) -> None:
        ledger = Ledger(step_seconds=lambda nodes: 1.0 if nodes == 1 else 1000.0, draft_seconds=lambda depth: 0.0)
        model = enable_speculation(tiny.fresh_model("llama"))
        stats = generate(model, AutoProposer(PromptLookupProposer(), None, ledger)).stats
        assert stats.speculating_steps == 0
        assert ledger.copy_of(1).trials > 10
        assert ledger.copy_of(1).curve(1)[0] < 0.2

    def test_a_copy_that_would_have_been_right_ends_a_rest(self) -> None:
        part = AutoProposer(PromptLookupProposer(), None, Ledger(**FREE))
        start = part.start

        def resting(context: Any) -> None:
            start(context)
            part._resting, part._losses, part._credit = True, LOSSES, -1.0

        part.start = resting  # type: ignore[method-assign]
        model = enable_speculation(tiny.table_model(self.CYCLE))
        ids = torch.tensor([[4, 5, 6, 7, 4, 5]])
        stats = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            speculative=part,
            max_new_tokens=40,
            do_sample=False,
            return_dict_in_generate=True,
        ).stats
        emitted = [count for count, _ in stats.emitted_per_step[0]]
        assert emitted[0] == 1, "it rested one step, and saw that the copy was right"
        assert emitted[1] == 9


def test_a_draft_that_stopped_unsure_counts_as_wrong_from_there_on(target: Any) -> None:
    """Only sure steps go deep; were they alone counted, every plan would promise what they give."""
    settings = {"num_draft_tokens": 4, "tree": "chain"}
    curves = {}
    for threshold in (0.0, 0.999):
        ledger = Ledger(**FREE)
        head = make_head("eagle", target)
        draft = EagleProposer(head, drafting=DraftingConfig(confidence_threshold=threshold), **settings)
        generate(target, AutoProposer(PromptLookupProposer(), draft, ledger))
        curves[threshold] = ledger.drafts.curve(4)
        assert ledger.drafts.trials > 5
    assert curves[0.999][3] <= curves[0.0][3] + 0.05


def test_the_plan_is_priced_by_the_nodes_that_were_really_drafted(target: Any) -> None:
    """A draft that stops unsure feeds fewer nodes than its tree could hold."""
    head = make_head("eagle", target)
    settings = {"num_draft_tokens": 6, "tree": "dynamic", "tree_size": 20, "branching": 3}
    priced = {}
    for threshold in (0.0, 0.999):
        draft = EagleProposer(head, drafting=DraftingConfig(confidence_threshold=threshold), **settings)
        proposer = AutoProposer(PromptLookupProposer(), draft, Ledger(**FREE))
        assert proposer._nodes(6) == 20
        generate(target, proposer)
        priced[threshold] = proposer._nodes(6)
    assert priced[0.999] <= 4 < priced[0.0]


@pytest.mark.parametrize("change", ["none", "a row leaves", "a row joins", "both"])
def test_every_step_teaches_though_rows_join_and_leave_after_it(target: Any, change: str) -> None:
    """A server's batch changes at almost every step: what those steps showed must not be lost."""
    ledger = Ledger(draft_seconds=FREE["draft_seconds"], step_seconds=FREE["step_seconds"])
    proposer = AutoProposer(PromptLookupProposer(), exact_draft(target), ledger)
    rows = [[5, 9, 33, 12], [13, 30, 11], [31, 20]]
    context = start(Target(target), proposer, rows, 40)
    tried = 0
    for _ in range(4):
        step(context)
        plan = proposer._pending.plan
        tried += context.batch if plan.depth else 0
        if change in ("a row leaves", "both") and context.batch > 1:
            context.select_rows(range(context.batch - 1))
        if change in ("a row joins", "both"):
            context.add_rows(start(Target(target), proposer, [[4, 17, 8]], 40))
    step(context)
    assert tried > 3
    assert ledger.drafts.trials == tried
    timed = 0 if change == "a row joins" else 4  # unless a prompt was fed since, the time of a step is known
    assert ledger.step_clocks.samples == timed


def test_a_proposer_used_again_learns_nothing_from_the_end_of_another_call(target: Any) -> None:
    ledger = Ledger(**FREE)
    proposer = AutoProposer(PromptLookupProposer(), exact_draft(target), ledger)
    generate(target, proposer, batch=2)
    learnt = ledger.drafts.trials, ledger.step_clocks.samples
    context = start(Target(target), proposer, [[5, 9, 33]], 40)
    step(context)
    assert (ledger.drafts.trials, ledger.step_clocks.samples) == learnt


class TestFirstDraft:
    """Before the first draft its cost is guessed from sizes: the draft's weights, and what it has to feed first."""

    def proposer(self, target: Any) -> AutoProposer:
        proposer = AutoProposer(PromptLookupProposer(), EagleProposer(make_head("eagle", target)), Ledger())
        return proposer

    def test_the_draft_is_sized_and_its_backlog_counted(self, target: Any) -> None:
        proposer = self.proposer(target)
        context = start(Target(target), proposer, [[5, 9, 33, 12], [13, 30, 11]], 40)
        head = sum(parameter.numel() for parameter in proposer.draft.head.parameters())
        whole = sum(parameter.numel() for parameter in target.parameters())
        assert proposer.ledger.draft_share == pytest.approx(head / whole)
        assert proposer.draft.backlog(context) == 4 + 3
        step(context)
        assert proposer.draft.backlog(context) == 4 + 3 + 2
        proposer.draft.propose(context)
        assert proposer.draft.backlog(context) == 0

    def test_a_long_backlog_of_many_rows_makes_the_first_draft_wait(self, target: Any) -> None:
        def plan(backlog: int, room: int) -> Plan:
            proposer = self.proposer(target)
            context = start(Target(target), proposer, [[5, 9, 33, 12]], room)
            proposer.ledger.draft_share = 0.1
            proposer.ledger.step_clocks.add(1, 1, 1.0)
            proposer.ledger.step_clocks.add(1, 9, 1.08)
            proposer.draft.backlog = lambda _: backlog  # type: ignore[method-assign]
            return proposer._choose(context, [0], [1.0])

        assert plan(10, 40).depth > 0
        assert plan(100_000, 40) == Plan()
        assert plan(1_000, 40).depth > 0, "0.05 plain steps a step"
        assert plan(20_000, 400).depth > 0, "spread over a longer answer"


class TestWeights:
    def weights(self, target: Any, news: list[int], opened: bool = False) -> list[float]:
        proposer = AutoProposer(PromptLookupProposer(), None, Ledger(**FREE))
        context = start(Target(target), proposer, [[5, 9, 33]], news[0])
        for new in news[1:]:
            context.add_rows(start(Target(target), proposer, [[13, 30, 11]], new))
        proposer._open = opened
        return proposer._weights(context)

    def test_a_token_counts_the_same_where_others_take_the_places_of_rows_that_end(self, target: Any) -> None:
        assert self.weights(target, [40, 4, 20], opened=True) == pytest.approx([1 / 3] * 3)

    def test_a_leading_row_counts_less_in_a_batch_that_ends_with_its_last_row(self, target: Any) -> None:
        last, leading = self.weights(target, [41, 31])
        assert last + leading == pytest.approx(1.0)
        assert leading / last == pytest.approx(math.exp(-10 / (LEAD * 40)))

    def test_a_row_that_gains_little_counts_more_before_others_lead(self, target: Any) -> None:
        """Both have all their tokens to go; the one whose drafts were kept will not be the last."""
        proposer = AutoProposer(PromptLookupProposer(), None, Ledger(**FREE))
        context = start(Target(target), proposer, [[5, 9, 33]] * 2, 40)
        assert proposer._weights(context) == pytest.approx([0.5, 0.5])
        for _ in range(3):
            proposer._paces.add([4, 1])
        quick, slow = proposer._weights(context)
        assert slow > 0.9
        assert quick + slow == pytest.approx(1.0)
        proposer._paces.select_rows([1, 0])
        assert proposer._weights(context) == pytest.approx([slow, quick])
        proposer._open = True
        assert proposer._weights(context) == pytest.approx([0.5, 0.5])

    def test_rows_of_the_next_call_begin_anew(self, target: Any) -> None:
        proposer = AutoProposer(PromptLookupProposer(), None, Ledger(**FREE))
        start(Target(target), proposer, [[5, 9, 33]] * 2, 40)
        proposer._paces.add([4, 1])
        context = start(Target(target), proposer, [[13, 30, 11]] * 2, 40)
        assert proposer._weights(context) == pytest.approx([0.5, 0.5])

    def test_rows_that_stopped_count_nothing(self, target: Any) -> None:
        assert self.weights(target, [40, 1]) == [1.0, 0.0]

    def test_copies_of_leading_rows_alone_are_not_drafted_at_the_end_of_a_batch(self, target: Any) -> None:
        """Were all tokens worth the same, a sure copy of two rows in three would pay for this forward."""

        def plan(rooms: list[int]) -> Plan:
            ledger = Ledger(step_seconds=lambda nodes: 1 + 0.05 * nodes)
            proposer = AutoProposer(PromptLookupProposer(num_draft_tokens=4), None, ledger)
            ledger.step_clocks.add(3, 3, 1.0)
            context = start(Target(target), proposer, [[5, 9, 33]] * 3, 60)
            for row, room in zip(context.rows, rooms, strict=True):
                row.max_length = row.end + room
            return proposer._choose(context, [3, 3, 0], proposer._weights(context))

        assert plan([40, 40, 40]).copied > 0
        assert plan([8, 8, 40]) == Plan()


class TestSettings:
    def test_a_depth_is_also_lookups(self) -> None:
        model = enable_speculation(llama(), head=make_head("eagle", llama()))
        proposer, _ = Speculation.of(model).proposer(SpeculativeConfig("auto", num_draft_tokens=2))
        assert proposer.copy_lengths == [1, 2]
        assert proposer.deepest == 2
        proposer, _ = Speculation.of(model).proposer("auto")
        assert proposer.copy_lengths[-1] > 2

    @pytest.mark.parametrize(
        ("draft", "field"),
        [
            (False, {"tree": "chain"}),
            (False, {"tree_size": 4}),
            (False, {"branching": 4}),
            (False, {"drafting": DraftingConfig(temperature=0.5)}),
            (True, {"tree": "chain"}),
        ],
    )
    def test_what_nothing_attached_could_use_is_refused(self, draft: bool, field: dict[str, Any]) -> None:
        model = enable_speculation(llama(), draft_model=llama() if draft else None)
        with pytest.raises(ValueError, match=f"{next(iter(field))}=.* none is attached"):
            Speculation.of(model).proposer(SpeculativeConfig("auto", **field))


class TestState:
    def test_a_second_call_starts_fresh(self, target: Any) -> None:
        first, second = (generate(target, auto("eagle", target, Ledger(**STEEP))).stats for _ in range(2))
        assert first.plans == second.plans
        assert first.emitted_per_step == second.emitted_per_step

    def test_a_shared_ledger_is_kept(self, target: Any) -> None:
        ledger = Ledger(step_seconds=lambda nodes: 1 + 0.02 * nodes, draft_seconds=lambda depth: 0.02 * depth)
        first = generate(target, auto("eagle", target, ledger)).stats
        known = ledger.drafts.trials
        assert known > 0
        second = generate(target, auto("eagle", target, ledger)).stats
        assert second.speculating_steps <= first.speculating_steps
        assert ledger.drafts.curve(1)[0] < 0.6

    def test_nothing_stays_on_the_model_or_the_parts(self) -> None:
        model = enable_speculation(llama(), draft_model=perturbed(llama(), 0.02))
        state = Speculation.of(model)
        before, attached = dict(model.__dict__), dict(vars(state))
        config = copy.deepcopy(model.config.to_dict())
        generate(model, "auto", 4)
        assert model.__dict__.keys() == before.keys()
        assert {name: value for name, value in vars(state).items() if name != "target"} == {
            name: value for name, value in attached.items() if name != "target"
        }
        assert model.config.to_dict() == config

    def test_one_object_serves_batches_one_after_the_other(self, target: Any) -> None:
        part = drafter("draft_model", target)
        proposer = AutoProposer(PromptLookupProposer(), part, Ledger(**FREE))
        for batch in (4, 1, 3):
            plain = target.generate(**prompts(batch), max_new_tokens=20, do_sample=False)
            assert generate(target, proposer, batch, 20).sequences.tolist() == plain.tolist()
        assert part.num_draft_tokens == proposer.deepest == 5, "a plan's depth is not left on the part"
