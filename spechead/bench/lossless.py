"""Is speculation lossless on this target, with this head? Greedy equality, recomputed nodes, and the law of samples.

Called by `spechead verify`. All of it runs the shipped `generate`; what it is compared with comes from the untouched
target: plain `generate`, plain forwards over whole texts, and the processors that transformers makes.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from ..attach import Speculation
from ..config import SpeculativeConfig
from .certificate import CheckSettings, Distance, Fault, GreedyCheck, LawCheck, MethodCheck
from .chi_square import Cells, critical_value, effect_between, merged, p_value, power_of, total_variation
from .equality import check_greedy
from .exact_law import Law
from .faults import check_draws, check_laws, check_trees
from .first_tokens import FirstTokens, Prompts
from .measure import Method as Timeable
from .measure import run_once
from .results import Load
from .witness import Seen, SeenStep, Witness

GREEDY = "greedy output differs"
SAMPLED = "sampled tokens do not follow the target's law"
NOTHING = "nothing was drafted"
NOTED_STEPS = (0, 1, 2, 4, 8, 16, 32)  # of a greedy call; the first ones have a clean cache
WATCHED_PROMPTS = 3

Said = Callable[[str], None]


class Check:
    """The checks of one method.

    Args:
        plain: the untouched target.
        enabled: its twin, on which speculation is enabled.
        config: the method.
        settings: how much to check.
        say: told what is being done.
    """

    def __init__(
        self,
        plain: PreTrainedModel,
        enabled: Any,
        config: SpeculativeConfig,
        settings: CheckSettings,
        say: Said = lambda text: None,
    ) -> None:
        self.plain, self.enabled, self.config, self.settings, self.say = plain, enabled, config, settings, say
        self.state = Speculation.of(enabled)
        self.lossy = config.acceptance != "exact"
        self.first = FirstTokens(plain, enabled, config, settings)
        self.exact = self.first.exact
        self.drafted = 0

    def run(self, prompts: Prompts, described: dict[str, Any] | None = None) -> MethodCheck:
        """Run all checks.

        Args:
            prompts: id -> ids of the prompt.
            described: the method's arguments as the certificate keeps them.

        Raises:
            ValueError: if there is no prompt, or their laws are too narrow to test.
        """
        if not prompts:
            raise ValueError("verify needs at least one prompt.")
        chosen = self.first.uncertain(prompts)  # first: it may refuse them
        found = MethodCheck(self.config.method, described or {}, self.lossy, None)
        for size in self.settings.batch_sizes:
            if size > 1 and self.state.target.verdict.tier == "chain":
                continue
            self.say(f"greedy, batch {size}")
            method = Timeable(self.config.method, self.enabled, {"speculative": self.config})
            check = check_greedy(self.plain, method, list(prompts.values()), size, self.settings)
            found.greedy.append(check)
            self.drafted += check.drafted_tokens
            if check.bugs and not self.lossy:
                found.faults.append(Fault(GREEDY, describe_bugs(check)))
        if self.lossy:
            found.distance = self.distance(chosen)
            return found
        bound = self.nodes(prompts, found)
        self.law(chosen, found, bound)
        if self.drafted + self.first.drafted == 0:
            found.faults.append(Fault(NOTHING, "no step of any check drafted a token, so nothing has been shown"))
        found.faults = named_once(found.faults)
        found.passed = not found.faults
        return found

    def nodes(self, prompts: Prompts, found: MethodCheck) -> float:
        """Compute nodes of greedy steps again; returns what rounding explains, in logits."""
        self.say("nodes of drafted trees")
        rows = list(prompts.values())
        calls: list[list[list[int]]] = [[row] for row in rows[:WATCHED_PROMPTS]]
        if self.state.target.verdict.tier == "tree" and len(rows) > 1:
            calls.append(rows[: max(self.settings.batch_sizes)])
        steps: list[list[SeenStep]] = []
        load = Load(self.settings.max_new_tokens)
        for call in calls:
            witness = Witness(self.first.proposer(), lambda step: step in NOTED_STEPS)
            run_once(Timeable(self.config.method, self.enabled, {"speculative": witness}), call, load, 0)
            steps.append(sorted(witness.seen.steps, key=lambda step: len(step.tokens) == 1))  # with drafts first
        found.trees, faults = check_trees(self.state.target, self.plain, in_turn(steps, self.settings.steps))
        found.faults += faults
        return found.trees.bound

    def law(self, chosen: Prompts, found: MethodCheck, bound: float) -> None:
        """Compare sampled tokens with the target's joint law, and each draw with the law it was made by."""
        laws = {name: self.exact.joint(row, self.settings.tokens) for name, row in chosen.items()}
        samples = self.first.samples(laws)
        self.say(f"{samples} samples of {len(chosen)} prompts")
        cells, all_seen, rounding = [], Seen(), 0.0
        for number, (name, row) in enumerate(chosen.items()):
            counts, seen = self.first.sample(row, samples // len(chosen) + 1, number)
            all_seen.add(seen)
            for outcome in [outcome for outcome in counts if outcome not in laws[name]]:
                if self.exact.excluded_by_a_tie(row, outcome, bound):
                    del counts[outcome]
            cells.append(merged(laws[name], counts))
            other = self.exact.joint(row, self.settings.tokens, cached=True)
            rounding += counts.total() * effect_between(laws[name], other) ** 2
            compared, faults = check_laws(self.exact, self.exact.processors(row), seen.steps)
            found.faults += faults
            if found.trees is not None:
                found.trees = replace(found.trees, laws=found.trees.laws + compared)
        found.law = self.chi_square(list(chosen), cells, rounding)
        found.draws, faults = check_draws(all_seen, self.settings.significance)
        found.faults += faults
        if found.law.p_value < self.settings.significance or found.law.impossible:
            found.faults.append(Fault(SAMPLED, describe_law(found.law)))

    def chi_square(self, names: list[str], cells: Sequence[Cells], rounding: float) -> LawCheck:
        """Pool the cells of all prompts into one test."""
        settings = self.settings
        degrees = sum(each.degrees for each in cells)
        statistic = sum(each.statistic for each in cells)
        samples = sum(sum(each.observed) + each.impossible for each in cells)
        return LawCheck(
            prompts=names,
            tokens=settings.tokens,
            samples=samples,
            cells=sum(len(each.expected) for each in cells),
            degrees=degrees,
            statistic=statistic,
            p_value=p_value(statistic, degrees, rounding),
            significance=settings.significance,
            effect_size=settings.effect_size,
            power=power_of(samples, degrees, settings.effect_size, settings.significance, rounding),
            rounding=(rounding / samples) ** 0.5,
            impossible=sum(each.impossible for each in cells),
            drafted_tokens=self.first.drafted,
        )

    def distance(self, chosen: Prompts) -> Distance:
        """Measure how far a lossy method's first tokens are from the target's law: the mean over prompts."""
        laws = {name: self.exact.joint(row, self.settings.tokens) for name, row in chosen.items()}
        samples = self.first.samples(laws)
        self.say(f"{samples} samples of {len(chosen)} prompts")
        law: Law = {}
        counts: Counter[tuple[int, ...]] = Counter()
        for number, (name, row) in enumerate(chosen.items()):
            drawn, _ = self.first.sample(row, samples // len(chosen) + 1, number)
            # One law over (prompt, outcome): every prompt is sampled equally often, so its distance is their mean.
            law |= {(number, *outcome): share / len(chosen) for outcome, share in laws[name].items()}
            counts.update({(number, *outcome): count for outcome, count in drawn.items()})
        measured = total_variation(law, counts)
        return Distance(
            prompts=list(chosen),
            tokens=self.settings.tokens,
            samples=counts.total(),
            total_variation=measured.estimate,
            low=measured.low,
            high=measured.high,
            exact=measured.exact,
        )


def in_turn(calls: Sequence[Sequence[SeenStep]], count: int) -> list[SeenStep]:
    """Take steps of all calls in turn, the first of each first."""
    longest = max((len(call) for call in calls), default=0)
    mixed = [call[place] for place in range(longest) for call in calls if place < len(call)]
    return mixed[:count]


def named_once(faults: Sequence[Fault]) -> list[Fault]:
    """Keep one fault a name, causes before what they lead to."""
    last = (GREEDY, SAMPLED, NOTHING)
    first: dict[str, Fault] = {}
    for fault in faults:
        first.setdefault(fault.name, fault)
    return sorted(first.values(), key=lambda fault: fault.name in last)


def describe_bugs(check: GreedyCheck) -> str:
    """Say where the first row parted from plain."""
    bug = next(each for each in check.differences if each.verdict == "bug")
    gap = "one of the two had ended" if bug.gap is None else f"float32 gap {bug.gap:.3g}, bound {bug.tolerance:.3g}"
    return (
        f"{check.bugs} of {check.rows} rows at batch {check.batch_size}; first at new token {bug.position}: "
        f"{bug.token} instead of {bug.plain_token} ({gap})"
    )


def describe_law(law: LawCheck) -> str:
    """Say how improbable the sample is."""
    critical = critical_value(law.degrees, law.significance, law.rounding**2 * law.samples)
    text = f"chi-square {law.statistic:.1f} over {law.degrees} degrees of freedom (critical {critical:.1f})"
    return text + (f"; {law.impossible} of {law.samples} outcomes are impossible" if law.impossible else "")
