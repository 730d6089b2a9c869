"""Which method suits a load, and what an acceptance would be worth: rules with their reasons, before anything is run.

Called by `spechead plan`. Every piece of advice names the command that measures it; only that decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .footprint import Footprint
from .plan import Draft, Plan, Workload

SHORT_ANSWER = 24  # tokens; below, the prompt's forward is most of the time
LARGE_BATCH = 8  # rows; above, a forward is no longer bound by reading weights on most machines
COPIED = 0.3  # share of the answer found in the prompt from which lookup pays
HEAVY_DRAFT = 0.25  # cost of a draft token, as a share of the target's, from which little is left to gain
DEPTHS = 8


@dataclass(frozen=True)
class Advice:
    """One method, whether to try it, why, and the command that measures it."""

    method: str
    worth: str
    reason: str
    command: str


@dataclass(frozen=True)
class Expected:
    """What drafting `depth` tokens a step is worth at an acceptance.

    Attributes:
        depth: drafted tokens a step.
        tokens: expected emitted tokens a step.
        best, worst: tokens of the best and of the worst step.
        speed_up: over plain, on average.
        slowest: the same if nothing is ever kept.
    """

    depth: int
    tokens: float
    best: int
    worst: int
    speed_up: float
    slowest: float


def expected(acceptance: float, depth: int, draft_cost: float, step_cost: float = 1.0) -> Expected:
    """Return what a chain of `depth` drafted tokens is worth (Leviathan et al. 2023, theorem 3.8).

    Args:
        acceptance: chance that a drafted token is kept, given that those before it were.
        depth: drafted tokens a step.
        draft_cost: of one drafted token, as a share of a plain step.
        step_cost: of a target forward over all nodes, as a multiple of a plain step.

    Raises:
        ValueError: if an argument is out of range.
    """
    if not 0 <= acceptance <= 1 or depth < 1 or draft_cost < 0 or step_cost <= 0:
        raise ValueError(
            f"acceptance={acceptance} must lie in 0..1, depth={depth} be at least 1, draft_cost={draft_cost} not be "
            f"negative and step_cost={step_cost} be above 0."
        )
    tokens = sum(acceptance**power for power in range(depth + 1))
    cost = step_cost + depth * draft_cost
    return Expected(depth, tokens, depth + 1, 1, tokens / cost, 1 / cost)


def table(acceptance: float, draft_cost: float, step_cost: float = 1.0) -> list[Expected]:
    """Return what 1 to 8 drafted tokens a step are worth."""
    return [expected(acceptance, depth, draft_cost, step_cost) for depth in range(1, DEPTHS + 1)]


def draft_cost(target: Footprint, draft: Draft) -> float:
    """Guess the cost of one drafted token from parameter counts: what is read for it, as a share of the target's."""
    if draft.model is None:
        return 0.0
    share = draft.model.active / target.active
    return share / draft.depth if draft.method == "medusa" else share  # all heads run at once


def advise(
    target: Footprint, drafts: Sequence[Draft], plans: Sequence[Plan], load: Workload, memory: int, command: str
) -> list[Advice]:
    """Judge each method for a load, the most promising first.

    Args:
        target: its sizes.
        drafts: what could draft.
        plans: memory of each, in the same order.
        load: the load.
        memory: bytes of the device.
        command: the bench command without a method.
    """
    found = []
    for draft, plan in zip(drafts, plans, strict=True):
        worth, reason = judge(target, draft, plan, load, memory)
        found.append(Advice(draft.method, worth, reason, f"{command} --method {draft.method}"))
    if not any(advice.worth == "try" for advice in found):
        if all(draft.model is None for draft in drafts) and load.max_new_tokens >= SHORT_ANSWER:
            reason = "nothing that drafts was given but lookup, and little is copied: a trained head drafts new text"
            found.append(Advice("eagle", "train one", reason, "spechead train eagle --config recipe.yaml"))
        reason = "nothing is likely to pay; auto keeps to plain steps and probes at a low rate"
        found.append(Advice("auto", "try", reason, f"{command} --method auto"))
    order = ("try", "train one", "measure first", "leave")
    return sorted(found, key=lambda advice: order.index(advice.worth))


def judge(target: Footprint, draft: Draft, plan: Plan, load: Workload, memory: int) -> tuple[str, str]:
    """Return "try", "measure first" or "leave", and the reason."""
    cost = draft_cost(target, draft)
    rows, nodes = load.batch_size, load.batch_size * (draft.nodes + 1)
    length = load.prompt_tokens + load.max_new_tokens
    known = draft.model.positions if draft.model is not None else None
    if plan.peak > memory:
        return "leave", f"it needs {plan.peak / 1e9:.1f} GB of the device's {memory / 1e9:.1f} GB"
    if load.max_new_tokens < SHORT_ANSWER:
        return "leave", f"{load.max_new_tokens} new tokens: most of the time goes into the prompt"
    if cost >= HEAVY_DRAFT:
        return "leave", f"a drafted token costs {cost:.0%} of the target's; give one below {HEAVY_DRAFT:.0%}"
    if target.is_sparse:
        return "measure first", moe_warning(target)
    if rows > LARGE_BATCH:
        return "measure first", f"{rows} rows feed {nodes} nodes a step, which reading weights may no longer hide"
    if draft.method == "prompt_lookup":
        return judge_lookup(load.overlap)
    if known is not None and length > known:
        return "measure first", f"it knows {known} positions of {length}; beyond, decoding goes on without drafts"
    return "try", f"a drafted token costs about {cost:.1%} of the target's, and {rows} rows leave room"


def judge_lookup(overlap: float | None) -> tuple[str, str]:
    """Judge prompt lookup by the share of the answer that repeats the prompt."""
    if overlap is None:
        return "measure first", "it pays where answers repeat the prompt; give --overlap, or measure your prompts"
    copied = f"{overlap:.0%} of the answer comes from the prompt"
    if overlap < COPIED:
        return "leave", f"{copied}; lookup pays from about {COPIED:.0%}"
    return "try", f"{copied}, and copies cost nothing to draft"


def moe_warning(target: Footprint) -> str:
    """Say why a mixture of experts gains less."""
    used, whole = target.active / 1e9, target.parameters / 1e9
    return (
        f"mixture of experts: a token uses {used:.2f} of {whole:.2f} billion parameters; each drafted token wakes "
        "other experts, so a step over several reads more weights than a plain one"
    )
