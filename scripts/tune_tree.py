"""Find the tree with which a head is fastest on this machine: python scripts/tune_tree.py HEAD [--write]

An EAGLE head is tried with dynamic trees of several depths, sizes and confidence thresholds and with chains, Medusa
heads with dynamic trees and with the best static tree of several sizes for their measured accuracies. All are measured
on the package's own prompts in one process, against plain generation. `--write` makes the fastest the head's default,
in its config.json; of trees as fast to within `--tie`, the one with the longest acceptance, which gains more where
nodes cost less.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from spechead import SpeculativeConfig, enable_speculation, load_head
from spechead.bench.figures import summarise
from spechead.bench.measure import Method, run_once, twin
from spechead.bench.prompts import Prompt, encode, load_prompts
from spechead.bench.results import Cell, Load, Record
from spechead.bench.timing import MEAN, PLAIN, compare
from spechead.cli.loading import load_target, target_for
from spechead.config import DraftingConfig
from spechead.heads.base_config import DRAFTING_FIELDS
from spechead.heads.medusa import MedusaHeads
from spechead.proposers.choices import best_choices

RANKS = 10  # guesses of a Medusa head that a tree may use


def main(argv: list[str] | None = None) -> int:
    """Measure the trees, print them, fastest first; return the exit code."""
    options = parse(argv)
    console = Console()
    notes = Console(stderr=True)
    name = target_for(options.target, [str(options.head)], notes)
    target, tokenizer = load_target(name, notes, dtype=options.dtype)
    head = load_head(options.head, target)
    prompts = load_prompts(options.prompts, None, options.per_group)
    load = Load(max_new_tokens=options.max_new_tokens)
    if isinstance(head, MedusaHeads):
        accuracies = medusa_accuracies(target, head, tokenizer, prompts, load)
        for depth, ranks in enumerate(accuracies, 1):
            console.print(f"depth {depth}, by rank: " + " ".join(f"{share:.3f}" for share in ranks))
        trees = medusa_trees(accuracies, options.sizes, options.branching)
    else:
        trees = eagle_trees(options.depths, options.sizes, options.branching, options.thresholds)
    cells = measure(target, head, tokenizer, trees, prompts, load)
    for cell in cells:
        low, high = (cell.ratio_low or cell.ratio), (cell.ratio_high or cell.ratio)
        console.print(
            f"{cell.method:<38} {cell.ratio:.2f}x [{low:.2f}, {high:.2f}]  length {cell.acceptance_length:.2f}"
        )
    if options.write:
        chosen = pick(cells, options.tie)
        best = trees[chosen]
        for name in DRAFTING_FIELDS:
            setattr(head.config, name, getattr(best, name, None))
        head.config.confidence_threshold = best.drafting.confidence_threshold
        head.config.save_pretrained(options.head)
        console.print(f"{chosen} is now the default of {options.head}.")
    return 0


def pick(cells: Sequence[Cell], tie: float) -> str:
    """Return the tree of the longest acceptance among those whose speed is within `tie` of the fastest's.

    Args:
        cells: the trees' figures, the fastest first.
        tie: share of the fastest's speed.
    """
    ties = [cell for cell in cells if cell.ratio >= (1 - tie) * cells[0].ratio]
    return max(ties, key=lambda cell: cell.acceptance_length or 0.0).method


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Find the tree with which a head is fastest on this machine.")
    parser.add_argument("head", type=Path, help="the head's directory")
    parser.add_argument("--target", help="its target (default: what the head was trained for)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--prompts", default="builtin", help="builtin, a JSONL file, or a datasets source")
    parser.add_argument("--per-group", type=int, default=1, help="prompts of each group (default 1)")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--depths", type=int, nargs="+", default=[3, 5], help="of EAGLE's trees")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 12, 16, 24], help="nodes, the root excluded")
    parser.add_argument("--branching", type=int, nargs="+", default=[4, 6], help="children a node of dynamic trees")
    parser.add_argument(
        "--thresholds", type=float, nargs="+", default=[0, 0.1, 0.3], help="of confidence, below which EAGLE stops"
    )
    parser.add_argument("--tie", type=float, default=0.02, help="speeds so close count as equal (default 0.02)")
    parser.add_argument("--write", action="store_true", help="make the fastest the head's default")
    return parser.parse_args(argv)


def eagle_trees(
    depths: Sequence[int], sizes: Sequence[int], branchings: Sequence[int], thresholds: Sequence[float]
) -> dict[str, SpeculativeConfig]:
    """Return dynamic trees of every depth, size, branching and threshold, and the chains."""
    trees = {}
    for depth, threshold in itertools.product(depths, thresholds):
        drafting = DraftingConfig(confidence_threshold=threshold)
        until = f", from {threshold:g}" if threshold else ""
        trees[f"chain of {depth}{until}"] = SpeculativeConfig("eagle", depth, tree="chain", drafting=drafting)
        for size, branching in itertools.product(sizes, branchings):
            name = f"depth {depth}, {size} nodes by {branching}{until}"
            trees[name] = SpeculativeConfig(
                "eagle", depth, tree="dynamic", tree_size=size, branching=branching, drafting=drafting
            )
    return trees


def medusa_trees(
    accuracies: Sequence[Sequence[float]], sizes: Sequence[int], branchings: Sequence[int]
) -> dict[str, SpeculativeConfig]:
    """Return the best static tree of every size, and dynamic trees of every size and branching."""
    trees = {}
    for size in sizes:
        paths = [list(path) for path in best_choices(accuracies, size)]
        trees[f"best {size} nodes"] = SpeculativeConfig("medusa", tree=paths)
        for branching in branchings:
            trees[f"dynamic, {size} nodes by {branching}"] = SpeculativeConfig(
                "medusa", tree="dynamic", tree_size=size, branching=branching
            )
    return trees


def medusa_accuracies(
    target: PreTrainedModel, heads: MedusaHeads, tokenizer: Any, prompts: Sequence[Prompt], load: Load
) -> list[list[float]]:
    """Return, for each head and rank, the share of places at which that guess is the target's own greedy token."""
    counts = torch.zeros(heads.config.num_heads, RANKS)
    places = 0
    for prompt in prompts:
        row = encode(tokenizer, prompt.messages)
        answer = run_once(Method(PLAIN, target), [row], load, 0).tokens[0]
        ids = torch.tensor([[*row, *answer]], device=target.device)
        guesses = read_guesses(target, heads, ids)  # [K, L, RANKS]
        for place in range(len(row) - 1, ids.shape[1] - 1 - heads.config.num_heads):
            for depth in range(len(counts)):
                counts[depth] += (guesses[depth, place] == ids[0, place + 2 + depth]).cpu()
            places += 1
    return (counts / max(places, 1)).tolist()


@torch.no_grad()
def read_guesses(target: PreTrainedModel, heads: MedusaHeads, ids: Tensor) -> Tensor:
    """Return each head's best tokens at every place of `ids [1, L]`, `[K, L, RANKS]`."""
    states = target(ids, output_hidden_states=True).hidden_states[heads.taps[0]]
    return heads(states[0]).topk(RANKS, dim=-1).indices


def measure(
    target: PreTrainedModel,
    head: Any,
    tokenizer: Any,
    trees: dict[str, SpeculativeConfig],
    prompts: Sequence[Prompt],
    load: Load,
) -> list[Cell]:
    """Return each tree's mean figures, the fastest first."""
    enabled = enable_speculation(twin(target), head=head)
    methods = [Method(PLAIN, target)]
    methods += [Method(name, enabled, {"speculative": config}) for name, config in trees.items()]
    records: list[Record] = []
    compare(methods, prompts, load, tokenizer, lambda found, _: records.extend(found))
    cells = summarise(records, [method.name for method in methods], [load])
    total = MEAN if any(cell.group == MEAN for cell in cells) else prompts[0].group
    return sorted(
        (cell for cell in cells if cell.group == total and cell.method != PLAIN), key=lambda cell: -cell.ratio
    )


if __name__ == "__main__":
    sys.exit(main())
