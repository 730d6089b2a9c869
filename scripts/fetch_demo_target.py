"""Fetch the demo target into the user's cache.

python scripts/fetch_demo_target.py [--print-path]
"""

import argparse
import sys

from rich.console import Console

from spechead.demo_target import DemoTargetError, fetch_demo_target


def main(argv: list[str] | None = None) -> int:
    """Fetch the target; return the process's exit code."""
    parser = argparse.ArgumentParser(description="Fetch the demo target into the user's cache.")
    parser.add_argument("--print-path", action="store_true", help="print the directory as the last line of stdout")
    options = parser.parse_args(argv)
    console = Console(stderr=True)
    try:
        directory = fetch_demo_target(console)
    except DemoTargetError as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1
    console.print(f"The demo target is ready: {directory}", markup=False, soft_wrap=True)
    if options.print_path:
        print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
