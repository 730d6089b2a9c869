"""Render README.md of the heads in model_cards/ from the files beside it, or say where one differs.

python scripts/render_model_cards.py [--check] [--repo-id USER/NAME --license ID] [DIRECTORY ...]

A card that exists says its own repo and licence; a new one needs both. Exit code 1 if --check finds a difference.
"""

import argparse
import sys
from pathlib import Path

from spechead.hub.card import CARD, check_card, render_card, repo_of

ROOT = Path(__file__).resolve().parent.parent / "model_cards"


def main(argv: list[str] | None = None) -> int:
    """Render or check the cards; return the process's exit code."""
    parser = argparse.ArgumentParser(description="Render the cards of the shipped heads from their results.")
    parser.add_argument("directories", nargs="*", type=Path, help="heads; default: all in model_cards/")
    parser.add_argument("--check", action="store_true", help="write nothing; print what differs")
    parser.add_argument("--repo-id", help="repo of a head that has no card yet")
    parser.add_argument("--license", help="licence of a head that has no card yet")
    options = parser.parse_args(argv)
    directories = options.directories or sorted(path for path in ROOT.glob("*") if path.is_dir())
    if options.repo_id and len(directories) != 1:
        parser.error(f"--repo-id is for one directory, got {len(directories)}")
    different = 0
    for directory in directories:
        if options.check:
            lines = check_card(directory)
            print("\n".join(lines) if lines else f"{directory}: in step")
            different += bool(lines)
            continue
        repo_id = options.repo_id or repo_of(directory)
        if repo_id is None:
            parser.error(f"{directory} has no card that says its repo; give --repo-id and --license")
        (directory / CARD).write_text(render_card(directory, repo_id, license=options.license), encoding="utf-8")
        print(f"{directory / CARD}")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
