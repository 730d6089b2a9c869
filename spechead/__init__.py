"""Speculative decoding inside `model.generate`, with one verified sampling path for every way of drafting."""

from .config import SpeculativeConfig
from .heads.config import Eagle3Config, EagleConfig, MedusaConfig
from .heads.eagle import EagleHead
from .heads.eagle3 import Eagle3Head
from .heads.load import load_head
from .heads.medusa import MedusaHeads
from .mixin import SpeculativeGenerationMixin, disable_speculation, enable_speculation
from .proposal import Acceptance, Proposal
from .proposers.draft_model import DraftModelProposer
from .proposers.eagle import EagleProposer
from .proposers.medusa import MedusaProposer
from .proposers.prompt_lookup import PromptLookupProposer
from .stats import DecodeStats

__all__ = [
    "Acceptance",
    "DecodeStats",
    "DraftModelProposer",
    "Eagle3Config",
    "Eagle3Head",
    "EagleConfig",
    "EagleHead",
    "EagleProposer",
    "MedusaConfig",
    "MedusaHeads",
    "MedusaProposer",
    "PromptLookupProposer",
    "Proposal",
    "SpeculativeConfig",
    "SpeculativeGenerationMixin",
    "disable_speculation",
    "enable_speculation",
    "load_head",
    "publish",
]


def __getattr__(name: str) -> object:
    """Load `publish` at its first use: it needs the bench and the Hub client, which decoding does not."""
    if name == "publish":
        from .hub.publish import publish

        return publish
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
