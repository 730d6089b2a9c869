"""Load exported heads with the real speculators package, on the CPU, and compare its logits with spechead's.

python scripts/check_speculators.py [--venv DIR]

speculators wants another transformers than spechead, so it runs in an environment of its own, which is created once
(about 1.5 GB). Heads on tiny random targets are exported with `spechead.hub.export`, loaded there with
`SpeculatorModel.from_pretrained`, and run over a sequence for three steps of its training-time test, the head's own
output fed back; every logit must be within 1e-5 of what spechead computes the way it decodes. Exit code 1 otherwise.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

VERSION = "0.9.0"
REQUIREMENTS = (
    "torch==2.13.0",
    "transformers==5.19.0",
    "datasets<=5.1.0",
    "accelerate",
    "pydantic-settings",
    "loguru",
    "openai>=2",
    "typer",
    "rich",
    "aiohttp",
    "psutil",
    "protobuf",
)
WITHOUT_DEPENDENCIES = (f"speculators=={VERSION}", "hs-connectors==0.9.0")
STEPS, LENGTH, VOCAB, HIDDEN, TOLERANCE = 3, 12, 48, 32, 1e-5
CASES: dict[str, dict[str, Any]] = {
    "llama": {"draft_vocab_size": 16},
    "qwen3": {"draft_vocab_size": 16, "layer_style": "qwen3"},
    "whole vocabulary": {},
    "residual normed": {"draft_vocab_size": 16, "norm_before_residual": True},
    "norm before fc": {"draft_vocab_size": 16, "norm_before_fc": True, "layer_style": "qwen3"},
    "norm per tap, output normed": {"draft_vocab_size": 16, "fc_norm": True, "norm_output": True},
    "two layers": {"draft_vocab_size": 16, "num_hidden_layers": 2},
    "shared LM head": {"share_lm_head": True},
}


def main(argv: list[str] | None = None) -> int:
    """Run the check; return the process's exit code."""
    parser = argparse.ArgumentParser(description="Compare exported heads with the real speculators package.")
    parser.add_argument("--venv", type=Path, help="environment to use or create; default: in spechead's cache")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child is not None:
        run_package(options.child)
        return 0
    python = environment(options.venv)
    with tempfile.TemporaryDirectory() as work:
        expected = export_cases(Path(work))
        settings = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "LOGURU_LEVEL": "ERROR"}
        subprocess.run([str(python), __file__, "--child", work], env=settings, check=True)
        return report(Path(work), expected)


def environment(directory: Path | None) -> Path:
    """Return the Python of the environment with speculators, creating it where it is missing."""
    from spechead.demo_target import cache_directory

    directory = directory or cache_directory() / "speculators-check"
    python = directory / "bin" / "python"
    ready = directory / f".spechead-{VERSION}"
    if not ready.exists():
        probe = f"import speculators, importlib.metadata as m; assert m.version('speculators') == '{VERSION}'"
        if not python.exists() or subprocess.run([str(python), "-c", probe], capture_output=True).returncode:
            print(f"Creating {directory} with speculators {VERSION}; this takes some minutes.")
            venv.create(directory, with_pip=True)
            pip = [str(python), "-m", "pip", "install", "--quiet"]
            subprocess.run([*pip, *REQUIREMENTS], check=True)
            subprocess.run([*pip, "--no-deps", *WITHOUT_DEPENDENCIES], check=True)
        ready.touch()
    return python


def export_cases(work: Path) -> dict[str, Any]:
    """Export every case into `work`, write its inputs, and return spechead's own logits [STEPS, L, D] by case."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    from spechead.heads import Eagle3Config, Eagle3Head
    from spechead.hub.export import export_head

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 40, "num_hidden_layers": 8}
    target = AutoModelForCausalLM.from_config(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    ).eval()
    target.save_pretrained(work / "target")
    ids = torch.randint(0, VOCAB, (1, LENGTH + 1))
    with torch.no_grad():
        states = target(input_ids=ids, output_hidden_states=True).hidden_states
    expected = {}
    for number, (name, fields) in enumerate(CASES.items()):
        head = Eagle3Head(Eagle3Config.for_target(target.config, **fields)).eval()
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.dim() == 1))
        if head.pruned:
            kept = torch.randperm(VOCAB)[: head.config.draft_vocab_size].sort().values
            head.set_draft_vocab(kept)
        head.config.target_name = str(work / "target")
        head.bind(target)
        features = torch.cat([states[tap] for tap in head.taps], dim=-1)[:, :-1]
        directory = work / f"case-{number}"
        export_head(head, "speculators", directory)
        save_file({"ids": ids[:, 1:].contiguous(), "features": features.contiguous()}, directory / "inputs.st")
        expected[name] = decoded(head, ids[0, 1:], features)
    return expected


def decoded(head: Any, ids: Any, features: Any) -> Any:
    """Return the logits [STEPS, L, D] of drafting the true tokens from each position: NaN where the text has ended."""
    import torch
    from transformers import DynamicCache

    logits = torch.full((STEPS, LENGTH, head.config.draft_vocab_size), float("nan"))
    with torch.no_grad():
        fused = head.fuse(features)
        for start in range(LENGTH):
            cache = DynamicCache()
            state = head(ids[None, : start + 1], fused[:, : start + 1], torch.arange(start + 1)[None], cache=cache)
            for step in range(min(STEPS, LENGTH - start)):
                if step:
                    place = start + step
                    state = head(ids[None, place : place + 1], state[:, -1:], torch.tensor([[place]]), cache=cache)
                logits[step, start] = head.logits(state[:, -1:])[0, 0]
    return logits


def run_package(work: Path) -> None:
    """In speculators' environment: load every case, run it, and write its logits beside it."""
    import torch
    from safetensors.torch import load_file, save_file
    from speculators import SpeculatorModel, SpeculatorModelConfig

    torch.set_num_threads(1)
    for directory in sorted(work.glob("case-*")):
        config = SpeculatorModelConfig.from_pretrained(directory)
        config.transformer_layer_config._attn_implementation = "eager"  # the default runs on accelerators alone
        model = SpeculatorModel.from_pretrained(directory, config=config).eval()
        inputs = load_file(directory / "inputs.st")
        seen: list[Any] = []
        hook = model.lm_head.register_forward_hook(lambda _module, _args, output, seen=seen: seen.append(output))
        with torch.no_grad():
            model(
                hidden_states=inputs["features"],
                input_ids=inputs["ids"],
                document_ids=torch.zeros_like(inputs["ids"]),
                position_ids=torch.arange(LENGTH)[None],
                ttt_steps=STEPS,
            )
        hook.remove()
        save_file({"logits": torch.cat(seen).contiguous()}, directory / "logits.st")
        facts = {"class": type(model).__name__, "dtype": str(model.lm_head.weight.dtype)}
        (directory / "facts.json").write_text(json.dumps(facts))


def report(work: Path, expected: dict[str, Any]) -> int:
    """Print the largest difference of each case and step; return 1 if one is too large."""
    from safetensors.torch import load_file

    worst = 0.0
    print(f"speculators {VERSION} against spechead: largest |difference of a logit| by step of the drafted chain")
    for number, (name, ours) in enumerate(expected.items()):
        directory = work / f"case-{number}"
        theirs = load_file(directory / "logits.st")["logits"]  # [STEPS, L, D]
        facts = json.loads((directory / "facts.json").read_text())
        gaps = [
            float((ours[step, : LENGTH - step] - theirs[step, : LENGTH - step]).abs().max()) for step in range(STEPS)
        ]
        worst = max(worst, *[gap if gap == gap else float("inf") for gap in gaps])
        spread = float(theirs[0].max() - theirs[0].min())
        print(
            f"  {name:28} {facts['class']:18} {'  '.join(f'{gap:.1e}' for gap in gaps)}   (logits spread {spread:.1f})"
        )
    print(f"largest: {worst:.1e}, allowed: {TOLERANCE:.0e}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
