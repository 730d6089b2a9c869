"""The model card of a head, rendered from the files beside it: config.json, results.json, recipe.yaml.

    text = render_card(Path("model_cards/x"), "user/x", license="apache-2.0")

No figure is typed: what is not in the files is not on the card. A card says its own repo, licence and data sets, so
that `check_card` can render it again from its directory and compare. Called by publish.py and
scripts/render_model_cards.py.
"""

import difflib
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from yaml import YAMLError

from ..bench import results as results_file
from ..bench.results import Results
from ..heads.base_config import DRAFTING_FIELDS, HeadConfig
from ..heads.checkpoint import Checkpoint, read_checkpoint
from ..heads.config import DraftLayerConfig, Eagle3Config
from ..heads.load import make_config
from . import card_figures as figures
from .exporters import FORMATS
from .exporters.features import problems_of
from .inspect import describe_taps, kind_of
from .provenance import RECIPE_FILE, hub_datasets, read_recipe

CARD, RESULTS = "README.md", "results.json"
TEMPLATE = Path(__file__).with_name("card_template.md")
TAGS = ["speculative-decoding", "text-generation"]


def render_card(
    directory: Path, repo_id: str, *, license: str | None = None, datasets: list[str] | None = None
) -> str:
    """Render a head's card.

    Args:
        directory: The head's directory, in spechead's own layout.
        repo_id: The repo that it is, or will be, published as.
        license: Licence identifier; None = what the directory's own README.md says.
        datasets: Hub datasets trained on; None = what README.md says, else the recipe's.

    Returns:
        README.md.

    Raises:
        ValueError: If no licence is known, the head names no target, or a file beside it is broken.
    """
    checkpoint = read_checkpoint(directory)
    config = make_config(checkpoint, None)
    target = config.target_name
    if target is None:
        raise ValueError(
            f"{directory / 'config.json'} names no target (target_name); a card must say what a head is for."
        )
    said = card_data_of(directory)
    license = license or said.get("license")
    if license is None:
        raise ValueError(f"{directory} has no card that says the licence; give it, for example --license apache-2.0.")
    recipe = read_recipe(directory)
    datasets = datasets if datasets is not None else said.get("datasets") or hub_datasets(recipe)
    results = read_results(directory)
    method = method_of(config)
    scores = [] if results is None else figures.eval_results(results, config.model_type)
    data = ModelCardData(
        base_model=target,
        base_model_relation="adapter",
        library_name="spechead",
        license=license,
        tags=[*TAGS, {"medusa": "medusa", "eagle": "eagle"}[method]],
        datasets=datasets or None,
        eval_results=scores or None,
        model_name=repo_id,
    )
    if not scores:
        data["model_id"] = repo_id  # without scores the library drops the name
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=repo_id.split("/")[-1],
        repo_id=repo_id,
        target=target,
        kind=kind_of(config),
        method=method,
        facts=facts(config, checkpoint),
        formats=", ".join(name for name, module in FORMATS.items() if not problems_of(config, module.RUNS)),
        measured="" if results is None else measured(results, config.model_type),
        recipe=(directory / RECIPE_FILE).read_text(encoding="utf-8").strip() if recipe else "",
        limits=limits(config, results),
    )
    return str(card).rstrip() + "\n"


def method_of(config: HeadConfig) -> str:
    """Return the method that drafts with a head."""
    return figures.method_of_kind(config.model_type)


def read_results(directory: Path) -> Results | None:
    """Return a head's results, None where there are none.

    Raises:
        ValueError: If the file is broken.
    """
    path = directory / RESULTS
    return results_file.load(path) if path.is_file() else None


def card_data_of(directory: Path) -> dict[str, Any]:
    """Return the metadata of a directory's README.md, {} where it has none.

    Raises:
        ValueError: If they are broken.
    """
    path = directory / CARD
    if not path.is_file():
        return {}
    try:
        return dict(ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True).data.to_dict())
    except (YAMLError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{path} begins with metadata that cannot be read ({said}); mend or delete it.") from error


def repo_of(directory: Path) -> str | None:
    """Return the repo that a directory's README.md was rendered for."""
    said = card_data_of(directory)
    index = said.get("model-index")
    name = index[0].get("name") if index else said.get("model_id")
    return str(name) if name else None


def check_card(directory: Path) -> list[str]:
    """Compare a directory's README.md with what its other files render to.

    Args:
        directory: A head's directory with a card.

    Returns:
        The lines of a unified diff; empty if they are equal.

    Raises:
        ValueError: If there is no card, or it does not say its repo.
    """
    path = directory / CARD
    repo_id = repo_of(directory)
    if repo_id is None:
        raise ValueError(f"{path} is no card rendered by spechead: it names no repo; render it anew.")
    before, after = path.read_text(encoding="utf-8"), render_card(directory, repo_id)
    names = (str(path), "rendered from the files beside it")
    return list(difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm="", n=1))


def facts(config: HeadConfig, checkpoint: Checkpoint) -> str:
    """Return the table of what the head is."""
    parameters = sum(tensor.numel() for tensor in checkpoint.tensors.values() if tensor.is_floating_point())
    dtypes = sorted(
        {str(t.dtype).removeprefix("torch.") for t in checkpoint.tensors.values() if t.is_floating_point()}
    )
    rows = [
        ["parameters", f"{parameters / 1e6:.2f} M in {', '.join(dtypes)}, {checkpoint.size / 2**20:.1f} MiB"],
        ["shares with the target", shared_parts(config)],
        ["reads the target's states", describe_taps(config)],
    ]
    if isinstance(config, Eagle3Config) and config.draft_vocab_size < config.vocab_size:
        rows.append(["draft vocabulary", f"{config.draft_vocab_size} of the target's {config.vocab_size} ids"])
    if config.trained_positions:
        rows.append(["drafts up to position", str(config.trained_positions)])
    shape = {name: getattr(config, name) for name in DRAFTING_FIELDS}
    if isinstance(shape["tree"], list):
        shape["tree"] = f"of {len(shape['tree'])} nodes"
    best = ", ".join(f"{name} {value}" for name, value in shape.items() if value is not None)
    rows.append(["default drafting", best or "the method's own"])
    if config.target_revision:
        rows.append(["target revision", config.target_revision])
    return figures.table(("", ""), rows).replace("--:|", ":--|")


def shared_parts(config: HeadConfig) -> str:
    """Return which of the target's parts the head uses instead of own ones."""
    parts = ["the LM head"] if config.share_lm_head else []
    if isinstance(config, DraftLayerConfig) and config.share_embeddings:
        parts.append("the embeddings")
    return " and ".join(parts) or "nothing"


def measured(results: Results, kind: str) -> str:
    """Return the card's figures as Markdown, of the head of this kind (a `model_type`)."""
    names = figures.head_methods(results, kind)
    count = sum(len(ids) for ids in results.prompts.values())
    parts = [
        f"Measured on {figures.describe_hardware(results)}. Prompts: {results.source}, {count} in "
        f"{len(results.prompts)} group(s). Plain is `generate` on an untouched instance, alternated with the others "
        "in one process; the interval is a 95 % bootstrap over prompts."
    ]
    for index, load in enumerate(results.loads):
        parts.append(f"### {figures.describe_load(load)[0].upper()}{figures.describe_load(load)[1:]}")
        for name in names:
            parts += [f"`{name}`, with this head:", figures.group_table(results, index, name)]
            losing = figures.losing_groups(results, index, name)
            parts.append(f"Slower than plain: {', '.join(losing)}." if losing else "No group was slower than plain.")
        others = [name for name in results.methods if name != figures.PLAIN]
        if len(others) > len(names):
            parts += ["All methods of the run, speed against plain:", figures.method_table(results, index)]
    command = " ".join(results.command)
    parts.append(f"Repeat it: `{command}` (every call is in `results.json`).")
    return "\n\n".join(parts)


def limits(config: HeadConfig, results: Results | None) -> list[str]:
    """Return what a user must not expect."""
    lines = [
        f"For {config.target_name} and nothing else: with another target, a fine-tune of it included, the output "
        "stays the target's own but the guesses get worse; spechead warns when the weights differ.",
        "Speed depends on hardware, dtype, batch size and text: measure on your own requests with `spechead bench`, "
        'and use `speculative="auto"` where it must never be slower.',
    ]
    if config.trained_positions:
        lines.append(f"Drafts up to position {config.trained_positions}; beyond it decoding goes on without drafts.")
    if results is not None:
        batches = sorted({load.batch_size for load in results.loads})
        lines.append(f"Measured at batch size {', '.join(map(str, batches))} only.")
        if not results.complete:
            lines.append("The measurement was interrupted: some prompts are missing from the figures.")
    return lines
