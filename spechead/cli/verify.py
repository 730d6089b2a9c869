"""`spechead verify`: proof that speculation on this target, with this head, changes nothing; a certificate as JSON.

Exit code 1 when a check failed. A lossy rule (`--acceptance typical`) gets a measured distance instead of a pass.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from transformers import PreTrainedModel

from ..attach import Speculation
from ..bench.certificate import Certificate, CheckSettings, MethodCheck
from ..bench.hardware import describe_hardware, describe_versions
from ..bench.lossless import Check
from ..bench.measure import twin
from ..bench.prompts import BUILTIN, Prompt, encode, load_prompts
from ..bench.results import Model
from ..bench.run import describe_model
from ..bench.strict_json import write_json
from ..config import METHODS, SpeculativeConfig
from ..mixin import enable_speculation
from . import loading
from .certificates import show
from .methods import available

Acceptance = Literal["exact", "typical"]
DEFAULT = CheckSettings()


MethodOption = Annotated[list[str] | None, typer.Option(help="Method to check; repeat it. Default: all that can run.")]
AcceptanceOption = Annotated[Acceptance, typer.Option(help="exact; typical is lossy and gets a distance.")]
PromptsOption = Annotated[
    str, typer.Option(help="builtin, a JSONL file (Spec-Bench's or of messages), or a datasets source.")
]
GroupOption = Annotated[list[str] | None, typer.Option(help="Group of prompts; repeat it. Default: all.")]
PerGroupOption = Annotated[int, typer.Option(min=1, help="Prompts of each group.")]
BatchOption = Annotated[
    list[int] | None, typer.Option(min=1, help="Rows of greedy batches; repeat it. Default: 1 and 4.")
]
TemperatureOption = Annotated[float, typer.Option(help="Of the sampled check.")]
TopKOption = Annotated[int, typer.Option(min=1, help="Of the sampled check; small keeps it feasible.")]
TokensOption = Annotated[int, typer.Option(min=1, help="First tokens whose joint law is tested.")]
EffectOption = Annotated[float, typer.Option(help="Cohen's w that must be found; the sample count follows.")]
PowerOption = Annotated[float, typer.Option(help="Chance to find it.")]
SignificanceOption = Annotated[float, typer.Option(help="Chance that an exact sampler fails.")]
LawPromptsOption = Annotated[int, typer.Option(min=1, help="Prompts that are sampled.")]
RowsOption = Annotated[int, typer.Option(min=1, help="Rows sampled at once.")]
OutputOption = Annotated[Path | None, typer.Option(help="Write the certificate here, as JSON.")]


def verify(
    target: loading.TargetOption = None,
    revision: loading.RevisionOption = None,
    method: MethodOption = None,
    head: loading.HeadOption = None,
    draft_model: loading.DraftModelOption = None,
    num_draft_tokens: loading.NumDraftTokensOption = None,
    acceptance: AcceptanceOption = "exact",
    prompts: PromptsOption = BUILTIN,
    group: GroupOption = None,
    per_group: PerGroupOption = 1,
    max_new_tokens: loading.MaxNewTokensOption = DEFAULT.max_new_tokens,
    batch_size: BatchOption = None,
    temperature: TemperatureOption = DEFAULT.temperature,
    top_k: TopKOption = DEFAULT.top_k,
    tokens: TokensOption = DEFAULT.tokens,
    effect_size: EffectOption = DEFAULT.effect_size,
    power: PowerOption = DEFAULT.power,
    significance: SignificanceOption = DEFAULT.significance,
    law_prompts: LawPromptsOption = DEFAULT.law_prompts,
    rows: RowsOption = DEFAULT.rows,
    chat_template_kwargs: loading.TemplateOption = None,
    seed: loading.SeedOption = 0,
    dtype: loading.DtypeOption = "float32",
    device: loading.DeviceOption = None,
    attention: loading.AttentionOption = None,
    output: OutputOption = None,
) -> None:
    """Prove that speculation changes nothing on this target and head; exit code 1 if it does."""
    console = Console(stderr=True)
    sampled = (temperature, top_k, tokens, significance, effect_size, power, law_prompts, rows)
    settings = CheckSettings(max_new_tokens, batch_size or DEFAULT.batch_sizes, *sampled, seed=seed)
    template = loading.template_arguments(chat_template_kwargs)
    asked = load_prompts(prompts, group, per_group)
    target = loading.target_for(target, head, console)
    model, tokenizer = loading.load_target(
        target, console, dtype=dtype, device=device, attention=attention, revision=revision
    )
    enabled = enable_speculation(twin(model), head=head or None, draft_model=draft_model, tokenizer=tokenizer)
    ids = {prompt.id: encode(tokenizer, prompt.messages, template) for prompt in asked}
    certificate = issue(
        checks(model, enabled, method, num_draft_tokens, acceptance, settings, ids, console),
        settings,
        described(model, enabled, target, head or [], draft_model),
        asked,
        prompts if prompts == BUILTIN else Path(prompts).name,
        template if tokenizer.chat_template else None,
        model.device,
    )
    show(certificate, Console())
    if output is not None:
        write_json(asdict(certificate), output)
        console.print(f"Written to {output}", markup=False, highlight=False)
    if certificate.passed is False:
        raise typer.Exit(code=1)


def issue(
    methods: list[MethodCheck],
    settings: CheckSettings,
    models: list[Model],
    asked: Sequence[Prompt],
    source: str,
    template: dict[str, Any] | None,
    device: torch.device,
) -> Certificate:
    """Make the certificate of what was found."""
    groups: dict[str, list[str]] = {}
    for prompt in asked:
        groups.setdefault(prompt.group, []).append(prompt.id)
    failed = any(method.passed is False for method in methods)
    return Certificate(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=["spechead", *sys.argv[1:]],
        versions=describe_versions(),
        hardware=describe_hardware(device),
        models=models,
        source=source,
        prompts=groups,
        template=template,
        settings=settings,
        methods=methods,
        passed=False if failed else (True if all(method.passed for method in methods) else None),
    )


def checks(
    model: PreTrainedModel,
    enabled: Any,
    names: list[str] | None,
    num_draft_tokens: int | None,
    acceptance: Acceptance,
    settings: CheckSettings,
    prompts: dict[str, list[int]],
    console: Console,
) -> list[MethodCheck]:
    """Check each method, saying what is being done.

    Raises:
        ValueError: if a method is unknown, or lacks its head or draft.
    """
    chosen = names or available(Speculation.of(enabled))
    if unknown := [name for name in chosen if name not in METHODS]:
        raise ValueError(f"{unknown[0]!r} is no method; there are {', '.join(METHODS)}.")
    configs = [
        SpeculativeConfig(method=name, num_draft_tokens=num_draft_tokens, acceptance=acceptance)  # type: ignore[arg-type]  # checked
        for name in chosen
    ]
    for config in configs:
        Speculation.of(enabled).proposer(config)  # refuses here what would fail after the first checks
    found = []
    for config in configs:
        with console.status(config.method) as status:
            check = Check(model, enabled, config, settings, status.update)
            described = {"num_draft_tokens": num_draft_tokens, "acceptance": acceptance}
            found.append(check.run(prompts, described))
    return found


def described(
    model: PreTrainedModel, enabled: Any, target: str, heads: list[str], draft_model: str | None
) -> list[Model]:
    """Describe the target, heads and draft, with their fingerprints."""
    state = Speculation.of(enabled)
    models = [describe_model(model, "target", target)]
    models += [describe_model(head, "head", path) for head, path in zip(state.heads, heads, strict=True)]
    if state.draft is not None:
        models.append(describe_model(state.draft.model, "draft", draft_model))
    return models
