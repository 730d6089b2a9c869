"""Speculative decoding inside `model.generate`, with one verified sampling path for every way of drafting."""

from .config import SpeculativeConfig
from .mixin import SpeculativeGenerationMixin, disable_speculation, enable_speculation
from .proposal import Acceptance, Proposal
from .proposers.draft_model import DraftModelProposer
from .proposers.prompt_lookup import PromptLookupProposer
from .stats import DecodeStats

__all__ = [
    "Acceptance",
    "DecodeStats",
    "DraftModelProposer",
    "PromptLookupProposer",
    "Proposal",
    "SpeculativeConfig",
    "SpeculativeGenerationMixin",
    "disable_speculation",
    "enable_speculation",
]
