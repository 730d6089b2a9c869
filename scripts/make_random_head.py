"""Write a head that knows nothing: python scripts/make_random_head.py HEAD --output DIR [--seed N]

It has the config and the draft vocabulary of HEAD, and matrices drawn anew at the old ones' spread. With it
`spechead bench` shows what a useless head costs, and that `auto` puts it aside.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from spechead import load_head
from spechead.heads.base import Head


def main(argv: list[str] | None = None) -> int:
    """Draw, save, and return the exit code."""
    parser = argparse.ArgumentParser(description="Write a head of random weights, in the image of another.")
    parser.add_argument("head", type=Path, help="its directory")
    parser.add_argument("--output", required=True, type=Path, help="directory of the random head")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    head = load_head(options.head)
    randomise(head, options.seed)
    head.save_pretrained(options.output)
    print(f"{options.output}: {options.head.name} with random weights")
    return 0


@torch.no_grad()
def randomise(head: Head, seed: int) -> None:
    """Draw every matrix of a head anew, normal with the mean and spread that it had."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            old = parameter.float()
            drawn = torch.randn(parameter.shape, generator=generator) * old.std() + old.mean()
            parameter.copy_(drawn.to(parameter.dtype))


if __name__ == "__main__":
    sys.exit(main())
