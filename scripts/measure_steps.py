"""Measure what a step costs on the demo target, and render the table of docs/step-costs.md.

python scripts/measure_steps.py [--repeats 40] [--threads 2] [--render]

Writes docs/results/step_costs.json and the page made of it. The heads have random weights of the real sizes: a cost
does not depend on weights. What they draft would never be kept, so the target's own next tokens are written over one
path.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM

from spechead import Eagle3Config, Eagle3Head, EagleProposer, MedusaConfig, MedusaHeads, MedusaProposer
from spechead.bench.hardware import describe_hardware, describe_versions
from spechead.bench.steps import (
    WARM_UP,
    KeptProposer,
    StepParts,
    middle,
    milliseconds,
    open_context,
    time_calls,
    time_forward,
    time_steps,
)
from spechead.context import Context
from spechead.demo_target import REPO_ID, demo_target_directory, is_complete
from spechead.proposers.base import BaseProposer
from spechead.proposers.sprout import Sprout
from spechead.target import Target

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "docs" / "results" / "step_costs.json", ROOT / "docs" / "step-costs.md"
NODES = (1, 2, 4, 8, 16, 32, 64)  # fed to the target, the root included
DRAFT_VOCAB, DEPTH, TREE_NODES, BRANCHING, KEPT = 8192, 5, 32, 8, 2


def main(argv: list[str] | None = None) -> int:
    """Measure (unless `--render`) and render; return the process's exit code."""
    options = parse(argv)
    console = Console(stderr=True)
    if not options.render:
        directory = options.target or demo_target_directory()
        if options.target is None and not is_complete(directory):
            console.print(f"error: the demo target is not in {directory}; run scripts/fetch_demo_target.py first.")
            return 1
        torch.set_num_threads(options.threads)
        torch.manual_seed(0)
        results = measure(directory, getattr(torch, options.dtype), options, console)
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=2) + "\n")
    if not options.results.exists():
        console.print(f"error: there is nothing to render: {options.results} does not exist; leave --render out.")
        return 1
    options.page.write_text(render(json.loads(options.results.read_text()), options.results.name))
    console.print(f"{options.page} is made of {options.results}.", markup=False, soft_wrap=True)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Measure what a step costs on the demo target.")
    parser.add_argument("--repeats", type=int, default=40, help="times each part is measured (default 40)")
    parser.add_argument("--threads", type=int, default=2, help="threads of the CPU (default 2)")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="tokens cached at the start (default 256)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--target", type=Path, help="another target than the demo target (a directory)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the JSON file to write")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to render from it")
    parser.add_argument("--render", action="store_true", help="render the page from the JSON file only")
    return parser.parse_args(argv)


def measure(directory: Path, dtype: torch.dtype, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Load the target and measure all parts; seconds throughout."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    target, repeats = Target(model), options.repeats
    size = min(DRAFT_VOCAB, target.vocab_size)
    eagle3 = Eagle3Head(Eagle3Config.for_target(model.config, draft_vocab_size=size)).bind(model).eval()
    medusa = MedusaHeads(MedusaConfig.for_target(model.config)).bind(model).eval()
    ids = torch.randint(0, target.vocab_size, (1, options.prompt_tokens), generator=torch.Generator().manual_seed(0))
    room = (KEPT + 1) * (WARM_UP + repeats) + DEPTH + 2
    text = greedy_text(model, ids, room)
    console.print(f"{repeats} repeats of each part, {options.threads} threads, {dtype}")
    plain = open_context(target, BaseProposer(), ids, room)
    forwards = {nodes: spread(time_forward(plain, nodes, repeats)) for nodes in NODES}
    tree = EagleProposer(eagle3, DEPTH, "dynamic", TREE_NODES - 1, BRANCHING)
    proposers: dict[str, BaseProposer] = {
        "EAGLE-3 tree": KeptProposer(tree, text, KEPT),
        "EAGLE-3 chain": KeptProposer(EagleProposer(eagle3, DEPTH, "chain"), text, KEPT),
        "Medusa tree": KeptProposer(MedusaProposer(medusa), text, KEPT),
        "nothing drafted": BaseProposer(),
    }
    contexts = {name: open_context(target, proposer, ids, room) for name, proposer in proposers.items()}
    steps = {}
    for name, context in contexts.items():
        console.print(f"steps: {name}")
        steps[name] = describe(middle(time_steps(context, repeats))) | {
            "nodes": round(context.stats.nodes_fed / context.stats.steps, 1),
            "emitted": round(context.stats.acceptance_length, 2),
        }
    level = spread(draft_level(contexts["EAGLE-3 tree"], tree, repeats))
    return {
        "target": {"name": REPO_ID if options.target is None else directory.name, "dtype": options.dtype},
        "settings": {
            "repeats": repeats, "threads": options.threads, "prompt_tokens": options.prompt_tokens,
            "draft_vocab_size": size, "depth": DEPTH, "tree_nodes": TREE_NODES, "branching": BRANCHING,
            "medusa_heads": medusa.config.num_heads, "kept": KEPT,
        },
        "hardware": asdict(describe_hardware(torch.device("cpu"))),
        "versions": asdict(describe_versions()),
        "target_forward": {str(nodes): figures for nodes, figures in forwards.items()},
        "eagle_draft_level": level,
        "steps": steps,
    }  # fmt: skip


def greedy_text(model: Any, ids: Tensor, count: int) -> Tensor:
    """Return the target's next `count` tokens, whatever they are: an end token does not end a measurement."""
    mask = torch.ones_like(ids)
    length = {"max_new_tokens": count, "min_new_tokens": count}
    out = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, eos_token_id=None, **length)
    return out[0, ids.shape[1] :]


def draft_level(context: Context, proposer: EagleProposer, repeats: int) -> list[float]:
    """Time one level of EAGLE's tree: logits of `BRANCHING` nodes, their best children, and feeding as many."""
    head, state = proposer.head, context.state[id(proposer)]
    hidden = torch.zeros(1, BRANCHING, head.config.hidden_size, dtype=head.dtype)
    under_root = torch.full((1, BRANCHING), -1)

    def level() -> None:
        state.cache.truncate(state.entries)
        sprout = Sprout(head, state.cache, context.cached - 1, hidden[:, 0])
        best = torch.log_softmax(sprout.logits(hidden), dim=-1).topk(BRANCHING, dim=-1).indices
        sprout.feed(sprout.target_ids(best[..., 0]), hidden, under_root, 1)

    return time_calls(level, repeats, context.root.device)


def spread(seconds: list[float]) -> dict[str, float]:
    """Return the median, and the 10th and 90th of a hundred."""
    tenths = quantiles(seconds, n=10) if len(seconds) > 1 else seconds * 9
    return {"median": median(seconds), "low": tenths[0], "high": tenths[-1]}


def describe(parts: StepParts) -> dict[str, float]:
    """Return the medians of a step's parts and the share that is not the target's forward."""
    return asdict(parts) | {"whole": parts.whole, "overhead": parts.overhead}


def render(results: dict[str, Any], file: str) -> str:
    """Return the page of a results file of that name."""
    ms = milliseconds
    settings, hardware, target = results["settings"], results["hardware"], results["target"]
    forwards = [
        f"| {nodes} | {ms(row['median'])} | {ms(row['low'])} to {ms(row['high'])} |"
        for nodes, row in results["target_forward"].items()
    ]
    steps = [
        f"| {name} | {row['nodes']:g} | {row['emitted']:g} | {ms(row['draft'])} | {ms(row['target'])} | "
        f"{ms(row['verify'])} | {ms(row['keep'])} | {ms(row['whole'])} | {100 * row['overhead']:.0f} % |"
        for name, row in results["steps"].items()
    ]
    level = results["eagle_draft_level"]
    return PAGE_TEMPLATE.format(
        target=target["name"], dtype=target["dtype"], forwards="\n".join(forwards), steps="\n".join(steps),
        level=ms(level["median"]), file=file, device=hardware["device"], versions=results["versions"], **settings,
    )  # fmt: skip


PAGE_TEMPLATE = """# What a step costs

Made by `python scripts/measure_steps.py` from `{file}`; do not edit.

One row of {target} in {dtype} on {device} with {threads} thread(s), {prompt_tokens} tokens cached at the start.
Medians of {repeats} repeats, in milliseconds. torch {versions[torch]}, transformers {versions[transformers]}.

The heads have random weights in the sizes of real ones (EAGLE-3: a draft vocabulary of {draft_vocab_size} ids;
Medusa: {medusa_heads} heads that share the target's LM head), because a cost does not depend on weights. So that a
step keeps something, the target's own next tokens are written over one path of each draft, to depth {kept}.

## The target's forward

Nodes behind the cached tokens, the root included; masks and positions are part of it.

| nodes | median | 10th to 90th of 100 |
|---|---|---|
{forwards}

## A step, part by part

*Draft* is `propose`: for EAGLE-3 one forward of the head over the tokens kept last and one a further level (depth
{depth}, {branching} children a node; the tree has {tree_nodes} nodes with its root). *Target* is the model's own
forward, *verify* the masks, the laws and the walk, *keep* the cache, the statistics and the next root. The last column
is the share of the step that is not the target's forward.

| step | nodes | emitted | draft | target | verify | keep | whole | not the target's |
|---|---|---|---|---|---|---|---|---|
{steps}

One level of EAGLE-3's tree (logits of {branching} nodes, their best children, one forward of the head) takes {level}.
"""

if __name__ == "__main__":
    sys.exit(main())
