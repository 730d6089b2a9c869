"""Average heads that were trained on from one another: python scripts/average_heads.py HEAD HEAD... --output DIR

Runs that go on from the same head along different data or learning rates often draft better together than each alone
(Wortsman et al. 2022, model soups). The first head gives the config and the recipe, which says so; the digests of all
their training prompts are kept, so that a measurement on any of them is found.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from spechead import load_head
from spechead.heads.base import Head
from spechead.hub.provenance import carry_on


def main(argv: list[str] | None = None) -> int:
    """Average, save, and carry the provenance on; return the exit code."""
    parser = argparse.ArgumentParser(description="Average the weights of heads that were trained on from one another.")
    parser.add_argument("heads", nargs="+", type=Path, help="their directories")
    parser.add_argument("--output", required=True, type=Path, help="directory of the average")
    options = parser.parse_args(argv)
    if len(options.heads) < 2:
        parser.error(f"{len(options.heads)} head has no average; give at least two.")
    loaded = [load_head(path) for path in options.heads]
    head = average(loaded)
    head.save_pretrained(options.output)
    note = f"The weights are the average of {len(loaded)} heads; this is how the first was trained."
    carry_on(options.heads, options.output, note)
    print(f"{options.output}: the average of {len(loaded)} heads")
    return 0


def average(heads: list[Head]) -> Head:
    """Return the first head with the mean of all weights; what is no weight (the draft vocabulary) must be the same.

    Raises:
        ValueError: if the heads are not of one kind, shape and vocabulary.
    """
    states = [head.state_dict() for head in heads]
    shapes = [{name: tensor.shape for name, tensor in state.items()} for state in states]
    if any(type(head) is not type(heads[0]) for head in heads) or any(shape != shapes[0] for shape in shapes):
        raise ValueError("only heads of one kind and size have an average; the weights differ in name or shape.")
    mean = {}
    for name, first in states[0].items():
        if first.is_floating_point():
            mean[name] = torch.stack([state[name].float() for state in states]).mean(0).to(first.dtype)
        elif not all(torch.equal(first, state[name]) for state in states[1:]):
            raise ValueError(f"{name} differs; heads of another draft vocabulary have no average.")
        else:
            mean[name] = first
    heads[0].load_state_dict(mean)
    return heads[0]


if __name__ == "__main__":
    sys.exit(main())
