"""Check spechead on an accelerator: random-weight Llama and Qwen3 of 1B and 8B shapes, at most eight minutes.

python scripts/gpu_check.py [--device cuda] [--minutes 8]      (--device cpu --tiny only tries the script itself)

For each shape: greedy equality with plain `generate` in float32 on sdpa (a copy that shares the target's weights as
draft, and EAGLE-3 and Medusa heads of random weights; alone and in a left-padded batch), then in bfloat16 the
milliseconds of a step by nodes, the share that is not the target's forward, host synchronisations a step, and peak
memory. Prints tables to stderr and JSON to stdout; the exit code is 1 if an output differs by more than a tie.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from time import monotonic
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from spechead import (
    Eagle3Config,
    Eagle3Head,
    EagleProposer,
    MedusaConfig,
    MedusaHeads,
    SpeculativeConfig,
    disable_speculation,
    enable_speculation,
)
from spechead.bench.differences import Judge, first_difference
from spechead.bench.hardware import describe_hardware, describe_versions
from spechead.bench.measure import twin
from spechead.bench.steps import WARM_UP, KeptProposer, middle, open_context, time_steps
from spechead.context import Context
from spechead.decoding import step
from spechead.proposers.base import BaseProposer
from spechead.target import Target

NODES = (1, 8, 32, 64)
DEPTH, BRANCHING, KEPT = 5, 8, 2
DRAFT_VOCAB, ROWS, WIDTH = 32000, 4, 32
REPEATS, COUNTED_STEPS = 30, 10
METHODS = {
    "copy as draft": SpeculativeConfig(method="draft_model", num_draft_tokens=8),
    "EAGLE-3": SpeculativeConfig(method="eagle", tree="dynamic"),
    "Medusa": SpeculativeConfig(method="medusa", tree="static"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the check; return the process's exit code."""
    parser = argparse.ArgumentParser(description="Check spechead on an accelerator.")
    parser.add_argument("--device", default="cuda", help="where to run (default cuda)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try this script without an accelerator")
    parser.add_argument("--minutes", type=float, default=8.0, help="no shape is begun after this long (default 8)")
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens of each equality run (default 48)")
    options = parser.parse_args(argv)
    console, device = Console(stderr=True), torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        console.print("error: no CUDA device is here, so nothing was checked. --device cpu --tiny tries the script.")
        return 1
    torch.set_float32_matmul_precision("highest")
    report: dict[str, Any] = {
        "ran_on": {**asdict(describe_hardware(device)), "kind": device.type, **asdict(describe_versions())},
        "remark": remark(device, options.tiny),
        "shapes": {},
    }
    started = monotonic()
    for name, config in shapes(options.tiny):
        reason = why_not(config, device, monotonic() - started, 60 * options.minutes)
        console.print(f"{name}: {reason or 'running'}")
        report["shapes"][name] = {"not_run": reason} if reason else check(config, device, options.new_tokens)
    report["seconds"] = round(monotonic() - started, 1)
    show(report, console)
    print(json.dumps(report, indent=2))
    return int(any(cell["bugs"] for shape in report["shapes"].values() for cell in shape.get("equality", ())))


def remark(device: torch.device, tiny: bool) -> str:
    """Say what the figures are worth."""
    where = "an accelerator" if device.type != "cpu" else "the CPU, so nothing here tells how an accelerator behaves"
    what = "tiny shapes, which only try this script" if tiny else "full shapes with random weights"
    return f"run on {where}; {what}"


def shapes(tiny: bool) -> Iterator[tuple[str, PreTrainedConfig]]:
    """Yield the targets' names and configs, small ones first."""
    if tiny:
        small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
        same = {"vocab_size": 256, "head_dim": 8, "num_key_value_heads": 2, "initializer_range": 0.3}
        yield "llama tiny", LlamaConfig(**small, **same)
        yield "qwen3 tiny", Qwen3Config(**small, **same)
        return
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    llama: dict[str, Any] = {"vocab_size": 128256, "num_key_value_heads": 8}
    qwen: dict[str, Any] = {"vocab_size": 151936, "num_key_value_heads": 8}

    def sizes(*values: int) -> dict[str, Any]:
        return dict(zip(names, values, strict=True))

    yield "llama 1B", LlamaConfig(**llama, **sizes(2048, 8192, 16, 32, 64), tie_word_embeddings=True)
    yield "qwen3 1.7B", Qwen3Config(**qwen, **sizes(2048, 6144, 28, 16, 128), tie_word_embeddings=True)
    yield "llama 8B", LlamaConfig(**llama, **sizes(4096, 14336, 32, 32, 128))
    yield "qwen3 8B", Qwen3Config(**qwen, **sizes(4096, 12288, 36, 32, 128))


def why_not(config: PreTrainedConfig, device: torch.device, seconds: float, limit: float) -> str | None:
    """Say why a shape cannot be run, or None."""
    if seconds > limit:
        return f"not run: {seconds:.0f} of {limit:.0f} seconds were used up"
    if device.type != "cuda":
        return None
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    needed, there = 4 * parameters * 1.2, torch.cuda.get_device_properties(device).total_memory
    return f"not run: needs {needed / 2**30:.0f} GiB in float32" if needed > there else None


def check(config: PreTrainedConfig, device: torch.device, new_tokens: int) -> dict[str, Any]:
    """Check one shape: equality in float32, then costs in bfloat16."""
    torch.manual_seed(0)
    config.bos_token_id = config.eos_token_id = None
    config.pad_token_id = 0
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    eagle3 = Eagle3Config.for_target(config, draft_vocab_size=min(DRAFT_VOCAB, config.vocab_size))
    heads = [Eagle3Head(eagle3).bind(model), MedusaHeads(MedusaConfig.for_target(config)).bind(model)]
    report = {"parameters": model.num_parameters(), "equality": equality(model, heads, new_tokens)}
    model.to(torch.bfloat16)
    return report | costs(model, heads[0].bind(model), device)


def prompts(model: Any) -> tuple[Tensor, Tensor]:
    """Return random prompts `[B, P]` and their mask; row b has 5 * b left pads."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, model.config.vocab_size, (ROWS, WIDTH), generator=draw)
    mask = (torch.arange(WIDTH)[None, :] >= 5 * torch.arange(ROWS)[:, None]).long()
    return (ids * mask).to(model.device), mask.to(model.device)


def equality(model: Any, heads: list[Any], new_tokens: int) -> list[dict[str, Any]]:
    """Compare every method with plain `generate`, for one row and for a left-padded batch."""
    ids, mask = prompts(model)
    judge, cells = Judge(model), []
    length = {"max_new_tokens": new_tokens, "do_sample": False}
    plain = [model.generate(ids[:rows], attention_mask=mask[:rows], **length)[:, WIDTH:] for rows in (1, ROWS)]
    enable_speculation(model, head=heads, draft_model=twin(model))
    for name, method in METHODS.items():
        for theirs in plain:
            rows = len(theirs)
            call = {"attention_mask": mask[:rows], **length, "speculative": method, "return_dict_in_generate": True}
            output = model.generate(ids[:rows], **call)
            judged = []
            for row, tokens in enumerate(output.sequences[:, WIDTH:].tolist()):
                difference = first_difference(theirs[row].tolist(), tokens)
                if difference is not None:
                    prompt = ids[row, mask[row] > 0].tolist()
                    judged.append(judge.judge(difference, prompt, theirs[row].tolist()))
            stats = output.stats
            cells.append(
                {
                    "method": name, "rows": rows, "identical": rows - len(judged),
                    "ties": sum(one.verdict == "tie" for one in judged),
                    "bugs": sum(one.verdict == "bug" for one in judged) + int(stats.drafted_tokens == 0),
                    "acceptance_length": round(stats.acceptance_length, 2), "near_ties": stats.near_ties,
                }
            )  # fmt: skip
    disable_speculation(model)
    return cells


def costs(model: Any, head: Any, device: torch.device) -> dict[str, Any]:
    """Measure steps of EAGLE-3's dynamic tree in bfloat16, by nodes."""
    ids = prompts(model)[0][:1]
    room = (KEPT + 1) * (2 * WARM_UP + REPEATS + COUNTED_STEPS)
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=room, do_sample=False)[0, WIDTH:]
    target, rows = Target(model), []
    weights = memory(device, "memory_allocated")
    for nodes in NODES:
        reset_peak(device)
        proposer = BaseProposer()
        if nodes > 1:
            proposer = KeptProposer(EagleProposer(head, DEPTH, "dynamic", nodes - 1, BRANCHING), text, KEPT)
        context = open_context(target, proposer, ids, room)
        parts = middle(time_steps(context, REPEATS))
        rows.append(
            {
                "nodes": nodes, "step_ms": 1000 * parts.whole, "draft_ms": 1000 * parts.draft,
                "target_ms": 1000 * parts.target, "not_the_targets": parts.overhead,
                "emitted": context.stats.acceptance_length, "host_synchronisations": synchronisations(context, device),
                "peak_bytes": memory(device, "max_memory_allocated"),
            }
        )  # fmt: skip
    return {"weights_bytes": weights, "steps": rows}


@torch.no_grad()
def synchronisations(context: Context, device: torch.device) -> float | None:
    """Count how often the host waits for the device in a step; None where that cannot be counted."""
    if device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(COUNTED_STEPS):
                step(context)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught) / COUNTED_STEPS


def memory(device: torch.device, figure: str) -> int | None:
    """Return one of the allocator's figures in bytes; None on the CPU."""
    return None if device.type == "cpu" else int(getattr(torch.get_device_module(device), figure)())


def reset_peak(device: torch.device) -> None:
    """Forget the peak so far."""
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats()


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report as tables."""
    ran_on = report["ran_on"]
    title = f"{ran_on['device']}, torch {ran_on['torch']}, transformers {ran_on['transformers']}: {report['remark']}"
    equal = Table("shape", "method", "rows", "identical", "ties", "bugs", "acceptance length", title=title)
    steps = Table("shape", "nodes", "step ms", "draft ms", "target ms", "not the target's", "host syncs", "peak GiB")
    for name, shape in report["shapes"].items():
        if "not_run" in shape:
            equal.add_row(name, shape["not_run"])
            continue
        for cell in shape["equality"]:
            figures = ("rows", "identical", "ties", "bugs", "acceptance_length")
            equal.add_row(name, cell["method"], *(str(cell[figure]) for figure in figures))
        for row in shape["steps"]:
            times = [f"{row[figure]:.2f}" for figure in ("step_ms", "draft_ms", "target_ms")]
            peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}"
            syncs = "-" if row["host_synchronisations"] is None else f"{row['host_synchronisations']:.0f}"
            steps.add_row(name, str(row["nodes"]), *times, f"{row['not_the_targets']:.0%}", syncs, peak)
    console.print(equal)
    console.print(steps)


if __name__ == "__main__":
    sys.exit(main())
