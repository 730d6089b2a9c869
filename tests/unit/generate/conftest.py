"""The target that the parity tests share; tests that change a model build their own."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.unit.generate.harness")


@pytest.fixture(scope="session")
def model() -> Any:
    """A tiny enabled target with a copy of itself as draft; not to be modified."""
    return importlib.import_module("tests.unit.generate.harness").speculating()
