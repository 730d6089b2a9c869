"""The heads that `spechead demo` shows on the demo target: from the Hub, else from the clone that it runs in."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError
from rich.console import Console

from ..demo_target import HUB_TIMEOUT

REPOS = ("spechead/smollm2-135m-instruct-medusa", "spechead/smollm2-135m-instruct-eagle3")
CARDS = Path(__file__).resolve().parents[2] / "model_cards"  # of a clone; an installed package has none
FILES = ["config.json", "model.safetensors"]


def demo_heads(console: Console, cards: Path = CARDS) -> list[str]:
    """Return where each head of the demo target is, and say so; one that is nowhere is left out, and said too.

    Args:
        console: where it is said.
        cards: the clone's directory of heads.
    """
    found = []
    for repo in REPOS:
        local = cards / repo.rpartition("/")[2]
        on_hub = from_hub(repo)
        if on_hub is not None:
            found.append(on_hub)
            console.print(f"Head {repo}: from the Hub.")
        elif all((local / name).is_file() for name in FILES):
            found.append(str(local))
            console.print(f"Head {repo}: not to be had from the Hub, so from {local.parent.name}/{local.name}.")
        else:
            console.print(f"Head {repo}: neither on the Hub nor in a clone's model_cards/, so its row is missing.")
    return found


def from_hub(repo: str) -> str | None:
    """Return the directory of a repo's files, downloaded or cached, or None."""
    try:
        return snapshot_download(repo, allow_patterns=FILES, etag_timeout=HUB_TIMEOUT)
    except (OSError, HTTPError):  # no such repo, no network, or offline and not cached
        return None
