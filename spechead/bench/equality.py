"""Greedy speculation against plain `generate`, token for token, and what rounding explains.

Used by lossless.py. In float32 two tokens tie when their logits lie within 1e-4. In lower precision the bound is
measured: twice the largest distance between the dtype's and the float32 logits of the likeliest tokens over the very
answer, since a turned decision needs one of the two tokens to be off by half the gap.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from .certificate import CheckSettings, GreedyCheck
from .differences import FLOAT32_TOLERANCE, Judge, first_difference
from .exact_law import plain_logits
from .measure import Method, run_once
from .results import Difference, Load
from .timing import PLAIN

LIKELIEST = 10  # tokens whose logits are compared between dtypes


def check_greedy(
    plain: PreTrainedModel, method: Method, rows: Sequence[list[int]], size: int, settings: CheckSettings
) -> GreedyCheck:
    """Compare the greedy answers of a method with plain's.

    Args:
        plain: the untouched target.
        method: the method, on the enabled twin.
        rows: prompts' ids.
        size: rows of a batch; both sides get the same batches.
        settings: how many tokens.
    """
    load = Load(settings.max_new_tokens, size)
    judge = Judge(plain)
    exact = plain.dtype in (torch.float32, torch.float64)
    check = GreedyCheck(size, 0, 0, 0, 0, 0, 0, 0, 0, FLOAT32_TOLERANCE, bound_source(plain.dtype))
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        theirs = run_once(Method(PLAIN, plain), batch, load, 0)
        ours = run_once(method, batch, load, 0)
        if ours.stats is None:
            raise ValueError(f"{method.name} returned no stats; it did not speculate.")
        check.drafted_tokens += ours.stats.drafted_tokens
        check.kept_tokens += ours.stats.kept_tokens
        check.near_ties += ours.stats.near_ties if exact else 0
        for prompt, expected, got in zip(batch, theirs.tokens, ours.tokens, strict=True):
            bound = FLOAT32_TOLERANCE
            if not exact:
                bound, near = rounding_of(plain, judge.reference, prompt, expected)
                check.near_ties += near
            check.bound = max(check.bound, bound)
            check.rows += 1
            check.tokens += len(expected)
            difference = first_difference(expected, got)
            if difference is None:
                check.identical += 1
                continue
            judged = ruled(judge.judge(difference, prompt, expected), bound)
            check.differences.append(judged)
            check.ties += judged.verdict == "tie"
            check.bugs += judged.verdict == "bug"
    return check


def ruled(difference: Difference, bound: float) -> Difference:
    """Return a judged difference, ruled by another bound."""
    if difference.gap is None:
        return difference
    return replace(difference, tolerance=bound, verdict="tie" if difference.gap <= bound else "bug")


@torch.no_grad()
def rounding_of(
    plain: PreTrainedModel, reference: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]
) -> tuple[float, int]:
    """Return what rounding explains over an answer, in logits, and how many of its decisions lie within that.

    Args:
        plain: the target in its low precision.
        reference: the same weights in float32.
        prompt: ids.
        answer: plain's new ids.
    """
    text = [*prompt, *answer]
    low, high = (plain_logits(model, [text], len(answer) + 1)[0, :-1] for model in (plain, reference))  # [T, V]
    top = high.topk(min(LIKELIEST, high.shape[1]), dim=-1)
    noise = float((low.gather(1, top.indices) - top.values).abs().max())
    bound = max(2 * noise, FLOAT32_TOLERANCE)
    gaps = top.values[:, 0] - top.values[:, 1]
    return bound, int((gaps <= bound).sum())


def bound_source(dtype: torch.dtype) -> str:
    """Say where the bound of a tie comes from."""
    if dtype in (torch.float32, torch.float64):
        return "1e-4 of the logits, as stats.near_ties counts"
    name = str(dtype).removeprefix("torch.")
    return (
        f"twice the largest distance of {name} from float32 logits among the {LIKELIEST} likeliest tokens of an answer"
    )
