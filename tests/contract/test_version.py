"""Outside the tested minor version of transformers one warning is given, and the work goes on."""

from __future__ import annotations

import logging

import pytest
import transformers

from spechead import enable_speculation
from spechead.hf import TESTED_MINOR, warn_if_untested
from tests.tiny import fresh_model


def test_installed_version_is_the_tested_one() -> None:
    assert transformers.__version__.startswith(f"{TESTED_MINOR}.")


@pytest.mark.parametrize("version", ["5.25.0", "5.240.1", "6.0.0.dev0"])
def test_another_minor_version_warns_once(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transformers, "__version__", version)
    with caplog.at_level(logging.WARNING):
        model = enable_speculation(fresh_model("llama"))
        enable_speculation(model)
    messages = [record.getMessage() for record in caplog.records if "spechead is tested" in record.getMessage()]
    assert len(messages) == 1
    assert version in messages[0]
    assert f"transformers=={TESTED_MINOR}" in messages[0]


def test_a_patch_release_is_silent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(transformers, "__version__", f"{TESTED_MINOR}.9")
    with caplog.at_level(logging.WARNING):
        warn_if_untested()
    assert not caplog.records
