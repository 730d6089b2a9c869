"""What is wrong, by name: recorded steps are computed again by plain forwards, and differences are explained.

Used by lossless.py. Every drafted node's logits are compared with those of a plain forward over the same text. Where
they differ, the explanations are tried in turn: a node that it must not see moves it (mask leak), or the plain forward
agrees once the new tokens' positions are shifted (off-by-one). Then each law that verification was given is compared
with the processors' over those very logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from .. import hf
from ..proposal import Proposal
from ..target import Target
from .certificate import DrawCheck, Fault, TreeCheck
from .chi_square import uniformity
from .exact_law import ExactLaw, cached_logits, plain_logits
from .witness import Seen, SeenStep

WRONG_Q = "wrong q"
BONUS = "bonus token from raw logits"
BONUS_LAW = "bonus token does not follow its law"
LEAK = "mask leak between siblings"
POSITION = "off-by-one position"
LOGITS = "node logits differ"
LAW = "law of a node differs"
ACCEPTANCE = "acceptance rule"
TRIED = 6  # wrong steps for which a shift is looked for
CHANGED = 4  # steps of which nodes are changed
LEAVES = 6  # root paths of a step that are computed again
LAW_TOLERANCE = 1e-5  # total variation; both laws are made of the same float32 logits


@dataclass
class Rounding:
    """What rounding explains: the largest distance of plain's own two ways over the steps, and the logits' scale."""

    dtype: torch.dtype
    noise: float = 0.0
    scale: float = 1.0

    @property
    def floor(self) -> float:
        """Units of rounding in the measured dtype, as a share of the scale."""
        low = self.dtype not in (torch.float32, torch.float64)
        return 4 * torch.finfo(self.dtype).eps if low else 1e-5

    @property
    def bound(self) -> float:
        """The largest difference of a logit that counts as rounding."""
        return max(3 * self.noise, self.floor * self.scale)

    @property
    def still(self) -> float:
        """The largest movement that counts as none when an unseen node changes: shapes and kernels are the same."""
        return 4 * torch.finfo(self.dtype).eps * self.scale


@dataclass
class Finding:
    """Differences of one step: node -> largest difference of its logits."""

    step: SeenStep
    reference: dict[int, Tensor]
    differences: dict[int, float] = field(default_factory=dict)


@torch.no_grad()
def check_trees(target: Target, plain: PreTrainedModel, steps: Sequence[SeenStep]) -> tuple[TreeCheck, list[Fault]]:
    """Compare recorded nodes with plain forwards, and explain what differs.

    Args:
        target: the target that speculation ran on.
        plain: the untouched target.
        steps: recorded steps, in the order of decoding.
    """
    rounding = Rounding(plain.dtype)
    findings = []
    for step in steps:
        finding = Finding(step, reference_logits(plain, step))
        alone = cached_logits(plain, step.prefix[:-1], [step.prefix[-1:]])[0] if len(step.prefix) > 1 else None
        if alone is not None and 0 in finding.reference:
            rounding.noise = max(rounding.noise, float((alone - finding.reference[0]).abs().max()))
        rounding.scale = max(rounding.scale, *(float(logits.abs().max()) for logits in finding.reference.values()))
        for node, logits in finding.reference.items():
            finding.differences[node] = float((logits - step.logits[node]).abs().max())
        findings.append(finding)
    worst = max((max(finding.differences.values()) for finding in findings), default=0.0)
    changed, moved = 0, 0.0
    for step in sorted(steps, key=lambda step: -len(step.tokens))[:CHANGED]:
        for node in changeable(step):
            changed += 1
            moved = max(moved, movement(target, step, node))
    check = TreeCheck(
        steps=len(steps),
        nodes=sum(len(finding.reference) for finding in findings),
        worst=worst,
        bound=rounding.bound,
        changed=changed,
        moved=moved,
        moved_bound=rounding.still,
        laws=0,
    )
    return check, explain(plain, findings, rounding, moved)


def explain(plain: PreTrainedModel, findings: Sequence[Finding], rounding: Rounding, moved: float) -> list[Fault]:
    """Name what makes recorded logits differ from the plain ones."""
    faults = []
    if moved > rounding.still:
        evidence = (
            f"changing a drafted node moves the logits of nodes that are not below it by {moved:.3g} "
            f"(rounding explains {rounding.still:.3g})"
        )
        faults.append(Fault(LEAK, evidence))
    wrong = [finding for finding in findings if max(finding.differences.values()) > rounding.bound]
    if not wrong or faults:
        return faults
    for finding in wrong[:TRIED]:  # once shifted tokens are in the cache, later steps match no single shift
        node = max(finding.differences, key=lambda n: finding.differences[n])
        shift = shift_of(plain, finding.step, node, rounding.bound)
        if shift is not None:
            which = "the new tokens" if shift[1] == 0 else "drafted tokens"
            evidence = (
                f"logits of a drafted node differ from a plain forward by {finding.differences[node]:.3g} and agree "
                f"with it when the positions of {which} are shifted by {shift[0]:+d}"
            )
            return [Fault(POSITION, evidence)]
    far = max(max(finding.differences.values()) for finding in wrong)
    evidence = (
        f"in {len(wrong)} of {len(findings)} steps logits differ from a plain forward over the same text by up to "
        f"{far:.3g} (rounding explains {rounding.bound:.3g}); neither a mask leak nor a shift by one explains it"
    )
    return [Fault(LOGITS, evidence)]


def reference_logits(plain: PreTrainedModel, step: SeenStep) -> dict[int, Tensor]:
    """Return plain float32 logits `[V]` of the nodes on some root paths of a step, the walked one among them."""
    inner = set(step.parents)
    leaves = [node for node in range(len(step.tokens)) if node not in inner]
    walked = max(step.laws, default=0)
    spread = leaves[:: max(len(leaves) // LEAVES, 1)][:LEAVES]
    paths = [step.path(node) for node in dict.fromkeys([walked, *spread])]
    texts = [step.prefix + [step.tokens[node] for node in path] for path in paths]
    width = max(len(text) for text in texts)
    first = len(step.prefix) - 1
    logits = plain_logits(plain, texts, width - first)  # [R, 1 + deepest, V]
    found: dict[int, Tensor] = {}
    for row, path in enumerate(paths):
        for place, node in enumerate([0, *path]):
            found[node] = logits[row, place]
    return found


def shift_of(plain: PreTrainedModel, step: SeenStep, node: int, bound: float) -> tuple[int, int] | None:
    """Return (shift, 0 or 1) under which a plain forward gives the recorded logits: 0 shifts the root too."""
    if not hf.takes(plain, "position_ids"):
        return None
    text = step.text(node)
    for start in (0, 1):
        for shift in (1, -1):
            positions = torch.arange(len(text))[None]
            positions[:, len(step.prefix) - 1 + start :] += shift
            logits = plain_logits(plain, [text], 1, positions)[0, 0]
            if float((logits - step.logits[node]).abs().max()) <= bound:
                return shift, start
    return None


def changeable(step: SeenStep) -> list[int]:
    """Return up to three nodes to change: the last one, and the first and the last of those that have a sibling."""
    drafted = range(1, len(step.tokens))
    having = [node for node in drafted if step.parents.count(step.parents[node]) > 1]
    return list(dict.fromkeys([*drafted[-1:], *having[:1], *having[-1:]]))


def movement(target: Target, step: SeenStep, node: int) -> float:
    """Return how far the logits of nodes that are not below a node move when its token is changed."""
    device = target.device
    prompt = torch.tensor([step.prefix[:-1]], device=device)
    tokens = torch.tensor([step.tokens], device=device)
    parents = torch.tensor([step.parents], device=device)
    proposal = Proposal(tokens, parents, torch.ones_like(tokens, dtype=torch.bool))
    other = tokens.clone()
    other[0, node] = (other[0, node] + 1) % target.vocab_size
    logits = []
    for tree in (proposal, replace(proposal, tokens=other)):
        cache = target.new_cache(1, prompt.shape[1] + tokens.shape[1])
        if prompt.shape[1]:
            target.prefill(prompt, None, cache)
        logits.append(target.forward(tree, cache).logits[0].float())
    rest = [n for n in range(len(step.tokens)) if node not in step.path(n)]
    return float((logits[0][rest] - logits[1][rest]).abs().max())


def check_laws(exact: ExactLaw, processors: LogitsProcessorList, steps: Sequence[SeenStep]) -> tuple[int, list[Fault]]:
    """Compare the laws that verification was given with the call's processors over the same logits.

    Args:
        exact: the target's exact law, for the same sampling arguments.
        processors: of the prompt.
        steps: recorded steps of sampled rows.

    Returns:
        How many laws were compared, and the faults.
    """
    compared = 0
    faults: dict[str, Fault] = {}
    for step in steps:
        inner = set(step.parents)
        for node, law in step.laws.items():
            if step.padded:
                continue
            compared += 1
            right = exact.of(processors, step.text(node), step.logits[node])
            if _apart(law, right) <= LAW_TOLERANCE:
                continue
            raw = torch.softmax(step.logits[node].double(), -1)
            others = [n for n in range(len(step.tokens)) if n != node]
            shifted = [
                n for n in others if _apart(law, exact.of(processors, step.text(n), step.logits[n])) <= LAW_TOLERANCE
            ]
            if _apart(law, raw) <= LAW_TOLERANCE and node not in inner:
                name, how = BONUS, "the law behind the last drafted token is that of the logits without the processors"
            elif _apart(law, raw) <= LAW_TOLERANCE:
                name, how = LAW, "a drafted node's law is that of the logits without the processors"
            elif shifted:
                name, how = POSITION, "a node was given the law of another node of its tree"
            else:
                name, how = (
                    LAW,
                    f"a node's law is {_apart(law, right):.3g} away from the processors' law over its logits",
                )
            faults.setdefault(name, Fault(name, how))
    return compared, list(faults.values())


def _apart(law: Tensor, other: Tensor) -> float:
    """Return the total variation of two laws `[V]`."""
    return float((law.double().cpu() - other.double().cpu()).abs().sum() / 2)


def check_draws(seen: Seen, significance: float) -> tuple[list[DrawCheck], list[Fault]]:
    """Say whether drafted tokens follow their reported q, and chosen tokens the law they were chosen by."""
    checks, faults = [], []
    expected = (
        (WRONG_Q, "drafted tokens in the reported q", seen.drafted),
        (BONUS, "tokens behind the last drafted one in their law", seen.bonus),
        (ACCEPTANCE, "tokens where something was drafted in their law", seen.inside),
    )
    for name, what, places in expected:
        check = DrawCheck(what, len(places.values), uniformity(places.values), places.impossible)
        checks.append(check)
        if places.impossible:
            faults.append(Fault(name, f"{places.impossible} of {check.tokens} {what} have probability 0 there"))
        elif check.p_value < significance:
            evidence = f"{check.tokens} {what}: p = {check.p_value:.2g} that they follow it"
            faults.append(Fault(BONUS_LAW if name == BONUS else name, evidence))
    if seen.excess > LAW_TOLERANCE * 100:
        faults.append(Fault(WRONG_Q, f"a reported q sums to 1 +- {seen.excess:.3g}"))
    if any(fault.name == WRONG_Q for fault in faults):  # which makes the rule's outcome wrong, too
        faults = [fault for fault in faults if fault.name != ACCEPTANCE]
    return checks, faults
