"""Trim an EAGLE-3 head's vocabulary: python scripts/trim_vocabulary.py HEAD --data FILE... --size N --output DIR

Each level of a draft tree reads the head's LM head once, most of what a small head weighs. What the target's answers
use least is cut off; the other weights stay as they are, so no training follows.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path

import torch

from spechead import load_head
from spechead.demo_target import REPO_ID
from spechead.heads.eagle3 import Eagle3Head
from spechead.hub.provenance import carry_on
from spechead.training.recipe import DataArguments
from spechead.training.selection import draft_vocabulary, report_coverage
from spechead.training.sources import load_rows, load_tokenizer


def main(argv: list[str] | None = None) -> int:
    """Count, trim, save, and carry the provenance on; return the exit code."""
    parser = argparse.ArgumentParser(description="Keep the draft tokens that the target's answers use most.")
    parser.add_argument("head", type=Path, help="its directory")
    parser.add_argument("--data", nargs="+", required=True, help="answers to count tokens in, as a recipe names them")
    parser.add_argument("--size", required=True, type=int, help="draft tokens to keep")
    parser.add_argument("--target", help="whose tokenizer reads the answers (default: what the head was trained for)")
    parser.add_argument("--output", required=True, type=Path, help="directory of the smaller head")
    options = parser.parse_args(argv)
    head = load_head(options.head)
    if not isinstance(head, Eagle3Head):
        parser.error(
            f"{options.head} holds a {type(head).__name__}; only EAGLE-3 heads have a vocabulary of their own."
        )
    if head.config.share_lm_head:
        parser.error(f"{options.head} reads the target's LM head (share_lm_head), of which nothing can be cut off.")
    before = head.config.draft_vocab_size
    if not 0 < options.size < before:
        parser.error(
            f"--size {options.size} trims nothing of {before} draft tokens; give a number from 1 to {before - 1}."
        )
    data = DataArguments(target=options.target or head.config.target_name or REPO_ID, data=options.data)
    rows = load_rows(data, load_tokenizer(data))
    kept = draft_vocabulary(rows, options.size, head.config.vocab_size, head.draft_to_target.tolist())
    smaller = trim(head, torch.tensor(kept))
    report_coverage(rows, smaller.draft_to_target)
    smaller.save_pretrained(options.output)
    note = f"The draft vocabulary was trimmed from {before} to {options.size} tokens after this training."
    carry_on([options.head], options.output, note)
    print(f"{options.output}: {options.size} of {before} draft tokens")
    return 0


def trim(head: Eagle3Head, target_ids: torch.Tensor) -> Eagle3Head:
    """Return the head with only some of its draft tokens.

    Args:
        head: has its own LM head of D rows.
        target_ids: the tokens to keep, ascending, all of them in the head's draft vocabulary, `[D']`.

    Raises:
        ValueError: if the head lacks one of them.
    """
    places = head.target_to_draft[target_ids]
    if bool((places < 0).any()):
        raise ValueError("only tokens of the head's own draft vocabulary can be kept.")
    config = copy.deepcopy(head.config)
    config.draft_vocab_size = len(target_ids)
    smaller = Eagle3Head(config).to(head.fc.weight.dtype)
    smaller.set_draft_vocab(target_ids)
    state = head.state_dict() | {"d2t": smaller.d2t, "t2d": smaller.t2d}
    state["lm_head.weight"] = state["lm_head.weight"][places]
    smaller.load_state_dict(state)
    return smaller


if __name__ == "__main__":
    sys.exit(main())
