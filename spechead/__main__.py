"""`python -m spechead` is the `spechead` command."""

from .cli.main import main

main()
