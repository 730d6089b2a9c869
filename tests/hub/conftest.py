"""The stand-in as the Hub of the real client, and tiny heads ready to publish.

huggingface_hub reads its environment at import, so its constants are patched here; `test_end_to_end.py` sets the
environment of a fresh process instead.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import _http

from tests.hub import standin
from tests.hub.heads import head_directory
from tests.unit.heads.targets import make_target


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An 8-layer target on disk, so that the default taps are the engines'."""
    directory = tmp_path_factory.mktemp("target")
    model = make_target(layers=8)
    model.save_pretrained(directory)
    model.directory = str(directory)
    return model


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[standin.Hub]:
    """A running stand-in that huggingface_hub talks to, with an empty cache and a token."""
    cache = tmp_path / "hub-cache"
    with standin.running() as running:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.setenv("HF_TOKEN", standin.TOKEN)
        monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)  # the client's pauses between retries
        yield running


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """The directory of a head that passes every check of `publish`."""
    return head_directory(tmp_path / "head", draft_vocab_size=16)
