"""Exact laws by enumeration: draws that take every branch, and patches of shipped code for mutants.

A run is repeated, all its unexplored branches as rows of one batch, until every branch of every coin and sample has
been taken once; each outcome carries the product of its branches' probabilities. No rule of verification is repeated.
"""

import inspect
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Law = dict[tuple[int, ...], float]


class Enumeration:
    """The draws of a batch, each row of which follows its own script and then its first open branch.

    Args:
        scripts: for each row, the choices already made for it.
    """

    def __init__(self, scripts: Sequence[tuple[int, ...]]) -> None:
        self.scripts = scripts
        self.taken: list[list[int]] = [[] for _ in scripts]
        self.weight = [1.0] * len(scripts)
        self.open: list[tuple[int, tuple[int, ...]]] = []  # (row, script) of branches seen and not taken

    def accept(self, probability: Tensor, live: Tensor) -> Tensor:
        """Branch on a coin: True with min(1, probability)."""
        answers = torch.zeros_like(live)
        for row in live.nonzero().flatten().tolist():
            yes = min(float(probability[row]), 1.0)
            answers[row] = bool(self._choose(row, {1: yes, 0: 1.0 - yes}))
        return answers

    def sample(self, p: Tensor, live: Tensor) -> Tensor:
        """Branch on a token: each with its share of p, as a multinomial draw has it."""
        tokens = torch.zeros(len(live), dtype=torch.long)
        for row in live.nonzero().flatten().tolist():
            shares = (p[row] / p[row].sum()).tolist()
            tokens[row] = self._choose(row, dict(enumerate(shares)))
        return tokens

    def _choose(self, row: int, options: dict[int, float]) -> int:
        possible = [choice for choice, weight in options.items() if weight > 0]
        taken, script = self.taken[row], self.scripts[row]
        if len(taken) < len(script):
            choice = script[len(taken)]
        else:
            choice = possible[0]
            self.open += [(row, (*taken, other)) for other in possible[1:]]
        taken.append(choice)
        self.weight[row] *= options[choice]
        return choice


def outcomes(
    cases: Iterable[Any], run: Callable[[list[Any], Enumeration], list[Hashable]]
) -> list[tuple[Any, Hashable, float]]:
    """Return (case, outcome, probability) of every branch of `run`, which plays each case once in one batch."""
    pending: list[tuple[Any, tuple[int, ...]]] = [(case, ()) for case in cases]
    found = []
    while pending:
        draws = Enumeration([script for _, script in pending])
        results = run([case for case, _ in pending], draws)
        played = zip(pending, results, draws.weight, strict=True)
        found += [(case, result, weight) for (case, _), result, weight in played]
        pending = [(pending[row][0], script) for row, script in draws.open]
    return found


def completed(
    parts: Iterable[tuple[tuple[int, ...], float]], target: Callable[..., Tensor], length: int, stop: int = -1
) -> Law:
    """Turn probabilities of outputs of any length into the law of the first `length` tokens.

    Longer outputs are cut; shorter ones go on as the target does, unless they end with the stop token.
    """
    law: Law = defaultdict(float)
    stack = [(tuple(tokens[:length]), weight) for tokens, weight in parts]
    while stack:
        tokens, weight = stack.pop()
        if len(tokens) == length or (tokens and tokens[-1] == stop):
            law[tokens] += weight
            continue
        stack += [((*tokens, x), weight * p) for x, p in enumerate(target(tokens).tolist()) if p > 0]
    return law


def distance(law: Law, other: Law) -> float:
    """The largest difference between two laws."""
    return max(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in {*law, *other})


def mutated(function: Callable[..., Any], *edits: tuple[str, str]) -> Callable[..., Any]:
    """Return a shipped function with pieces of its source replaced; each piece must occur exactly once."""
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in edits:
        if source.count(old) != 1:
            raise ValueError(
                f"{function.__qualname__} holds {old!r} {source.count(old)} times; adapt the mutant to the code."
            )
        source = source.replace(old, new)
    scratch: dict[str, Any] = {}
    exec(
        compile(source, f"<mutant of {function.__qualname__}>", "exec"),
        vars(sys.modules[function.__module__]),
        scratch,
    )
    return scratch[function.__name__]


def argmax_draft(draw: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make a mutant of a proposer's draw: its best token, reported with the law it was not drawn from."""

    def mutant(*arguments: Any) -> tuple[Tensor, Tensor]:
        law, _ = draw(*arguments)
        return law, law.argmax(-1)

    return mutant


def misreported(draw: Callable[..., tuple[Tensor, Tensor]], power: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make a mutant of a proposer's draw: the token is drawn as shipped, and q reported at another temperature."""

    def mutant(*arguments: Any) -> tuple[Tensor, Tensor]:
        law, token = draw(*arguments)
        other = law.pow(power)
        return other / other.sum(-1, keepdim=True), token

    return mutant
