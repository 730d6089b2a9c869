"""Load a server on loopback, speculating and not, and write what it did as JSON.

python scripts/load_test.py --target <repo or directory> [--head H | --draft-model D] [--out load.json] [--quick]

One process, one target in memory, three servers over it: `auto`, one fixed method, and `off`. For each concurrency
every server answers the same chats in the same rounds, and servers take turns within a round, in an order that
rotates. Requests are greedy, so that the servers write the same text. The exit code is 1 where a request failed or
auto fell below its share of the better of the other two.
"""

import argparse
import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from rich.console import Console

from spechead import SpeculativeConfig, enable_speculation
from spechead.attach import Speculation
from spechead.bench.hardware import describe_hardware, describe_versions
from spechead.bench.prompts import Prompt, load_prompts
from spechead.cli.loading import load_target, target_for
from spechead.cli.methods import available
from spechead.cli.serve import served_name
from spechead.serving.app import create_app
from spechead.serving.engine import OFF
from spechead.serving.limits import Limits

AUTO, FIXED = "auto", "fixed"
MODES = (AUTO, FIXED, OFF)
SHARE = 0.95  # of the better of fixed and off that auto must reach
NAME = "load"
MOST_REQUESTS = 10_000
WARM_UP_TOKENS = 16


@dataclass
class Server:
    """One running server.

    Attributes:
        mode: auto, fixed or off.
        app: what it serves; its engine has the figures that HTTP does not show.
        url: where it listens.
    """

    mode: str
    app: FastAPI
    url: str


@dataclass
class Cell:
    """What one server did at one concurrency, all rounds together.

    Attributes:
        tokens: completion tokens of all answers.
        round_tokens_per_second: each round's.
        latencies, first_tokens: seconds of each request.
        steps, row_steps, emitted_tokens: of the engine; row_steps / steps is the mean batch.
        plans: steps by what auto chose.
    """

    concurrency: int
    mode: str
    requests: int = 0
    failures: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    round_tokens_per_second: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    steps: int = 0
    row_steps: int = 0
    emitted_tokens: int = 0
    plans: dict[str, int] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """Return what is written: counts, and the figures made of them."""
        kept = {name: value for name, value in asdict(self).items() if name not in ("latencies", "first_tokens")}
        return kept | {
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
            "latency": spread(self.latencies),
            "time_to_first_token": spread(self.first_tokens),
            "mean_batch": self.row_steps / self.steps if self.steps else 0.0,
            "acceptance_length": self.emitted_tokens / self.row_steps if self.row_steps else 0.0,
        }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return median, 95th percentile and maximum."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    return {
        "median": median(ordered),
        "p95": ordered[min(int(0.95 * len(ordered)), len(ordered) - 1)],
        "max": ordered[-1],
    }


@contextmanager
def serving(mode: str, model: Any, tokenizer: Any, speculative: Any, limits: Limits) -> Iterator[Server]:
    """Serve on a free port of 127.0.0.1 until the block ends."""
    app = create_app(model, tokenizer, name=NAME, speculative=speculative, limits=limits)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield Server(mode, app, f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            server.should_exit = True
            thread.join()


async def ask(client: httpx.AsyncClient, server: Server, prompt: Prompt, max_tokens: int, cell: Cell) -> None:
    """Ask one chat as a stream, and record it."""
    body = {
        "model": NAME,
        "messages": list(prompt.messages),
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, tokens, failure = time.perf_counter(), None, 0, "no token came"
    async with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith(("data: {", "{")):
                continue
            heard = json.loads(line.removeprefix("data: "))
            if "error" in heard:
                failure = heard["error"]["message"]
                break
            first = first or time.perf_counter()
            tokens = heard["usage"]["completion_tokens"] if heard.get("usage") else tokens
    cell.requests += 1
    if not tokens or first is None:
        cell.failures.append(failure)
        return
    cell.tokens += tokens
    cell.first_tokens.append(first - began)
    cell.latencies.append(time.perf_counter() - began)


async def run_round(server: Server, prompts: Sequence[Prompt], max_tokens: int, cell: Cell) -> None:
    """Ask all prompts, `cell.concurrency` at a time, and record the round."""
    stats = server.app.state.engine.stats
    before = (stats.steps, stats.row_steps, stats.emitted_tokens, dict(stats.plans), cell.tokens)
    queue = iter(prompts)
    async with httpx.AsyncClient(timeout=server.app.state.engine.limits.timeout) as client:

        async def worker() -> None:
            for prompt in queue:
                await ask(client, server, prompt, max_tokens, cell)

        began = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(cell.concurrency)))
        seconds = time.perf_counter() - began
    cell.seconds += seconds
    cell.round_tokens_per_second.append((cell.tokens - before[4]) / seconds)
    cell.steps += stats.steps - before[0]
    cell.row_steps += stats.row_steps - before[1]
    cell.emitted_tokens += stats.emitted_tokens - before[2]
    for plan, count in stats.plans.items():
        cell.plans[plan] = cell.plans.get(plan, 0) + count - before[3].get(plan, 0)


def measure(
    servers: Sequence[Server], prompts: Sequence[Prompt], concurrency: int, rounds: int, max_tokens: int
) -> list[Cell]:
    """Measure every server at one concurrency, after a short warm-up that is left out."""
    cells = {server.mode: Cell(concurrency, server.mode) for server in servers}
    for server in servers:
        warm = Cell(concurrency, server.mode)
        asyncio.run(run_round(server, prompts[:concurrency], min(WARM_UP_TOKENS, max_tokens), warm))
    for number in range(rounds):
        part = prompts[number::rounds]
        shift = number % len(servers)
        for server in [*servers[shift:], *servers[:shift]]:
            asyncio.run(run_round(server, part, max_tokens, cells[server.mode]))
    return list(cells.values())


def verdict(cells: Sequence[Cell]) -> dict[str, Any]:
    """Compare auto with the better of the two others at one concurrency."""
    speed = {cell.mode: cell.tokens / cell.seconds for cell in cells}
    better = max((FIXED, OFF), key=lambda mode: speed[mode])
    by_round = zip(*(cell.round_tokens_per_second for cell in cells), strict=True)
    ratios = [own / max(others) for own, *others in by_round]
    ratio = speed[AUTO] / speed[better]
    return {
        "concurrency": cells[0].concurrency,
        "better": better,
        "ratio": ratio,
        "round_ratios": ratios,
        "passed": ratio >= SHARE and not any(cell.failures for cell in cells),
    }


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Load a server on loopback, speculating and not.")
    parser.add_argument("--target", help="Hub repo id or directory (default: what the head was trained for)")
    parser.add_argument("--head", action="append", help="head; repeat for several")
    parser.add_argument("--draft-model", help="draft model")
    parser.add_argument("--fixed", help="the fixed method; default: the last that is attached, else prompt_lookup")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--device", help="default: an accelerator if there is one, else cpu")
    parser.add_argument("--requests", type=int, default=64, help="for each server and concurrency")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=2, help="turns that the servers take")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path("load.json"))
    parser.add_argument(
        "--quick", action="store_true", help="8 requests, concurrency 1 and 4, 16 tokens: does it run?"
    )
    options = parser.parse_args(argv)
    if options.quick:
        options.requests, options.concurrency, options.rounds, options.max_tokens = 8, [1, 4], 2, 16
    bounded = options.requests * len(options.concurrency) * len(MODES) <= MOST_REQUESTS
    if not bounded or not 1 <= options.rounds <= options.requests or min(options.concurrency) < 1:
        parser.error(
            f"give 1 <= --rounds <= --requests, --concurrency >= 1, and at most {MOST_REQUESTS} requests in all"
        )
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load; return the process's exit code."""
    options, console = arguments(argv), Console(stderr=True)
    options.target = target_for(options.target, options.head, console)
    model, tokenizer = load_target(options.target, console, dtype=options.dtype, device=options.device)
    model = enable_speculation(model, head=options.head, draft_model=options.draft_model, tokenizer=tokenizer)
    method = options.fixed or available(Speculation.of(model))[-1]
    known = load_prompts("builtin")
    prompts = [known[number * 7 % len(known)] for number in range(options.requests)]  # kinds take turns
    limits = Limits(max_rows=max(options.concurrency), max_queue=options.requests)
    speculative = {AUTO: AUTO, FIXED: SpeculativeConfig(method=method), OFF: OFF}  # type: ignore[arg-type]  # strict
    cells: list[Cell] = []
    verdicts = []
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(mode, model, tokenizer, speculative[mode], limits)) for mode in MODES]
        for concurrency in options.concurrency:
            measured = measure(servers, prompts, concurrency, options.rounds, options.max_tokens)
            cells += measured
            verdicts.append(verdict(measured))
            for cell in measured:
                print(f"concurrency {concurrency:3d}  {cell.mode:5s}  {cell.tokens / cell.seconds:8.1f} tokens/s")
            print(f"concurrency {concurrency:3d}  auto / {verdicts[-1]['better']}: {verdicts[-1]['ratio']:.3f}")
    results = {
        "target": served_name(options.target),
        "dtype": str(model.dtype).removeprefix("torch."),
        "fixed": method,
        "requests": options.requests,
        "rounds": options.rounds,
        "max_tokens": options.max_tokens,
        "share": SHARE,
        "hardware": asdict(describe_hardware(model.device)),
        "versions": asdict(describe_versions()),
        "cells": [cell.figures() for cell in cells],
        "verdicts": verdicts,
    }
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if all(one["passed"] for one in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
