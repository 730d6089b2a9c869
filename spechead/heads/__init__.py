"""Trained draft modules: Medusa heads and EAGLE-1/2/3 layers, registered with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel

from .config import Eagle3Config, EagleConfig, MedusaConfig
from .eagle import EagleHead
from .eagle3 import Eagle3Head
from .load import load_head
from .medusa import MedusaHeads

for _config, _head in ((MedusaConfig, MedusaHeads), (EagleConfig, EagleHead), (Eagle3Config, Eagle3Head)):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _head, exist_ok=True)

__all__ = ["Eagle3Config", "Eagle3Head", "EagleConfig", "EagleHead", "MedusaConfig", "MedusaHeads", "load_head"]
