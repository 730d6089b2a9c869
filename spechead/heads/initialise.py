"""Start an EAGLE head from its target: the last decoder layer's weights, the final norm, the kept LM head rows.

Called by `init_from_target` before training. Parts are found by what they are and by the names that most families
share with Llama. What the target does not have, or has in another shape or of another kind, keeps its fresh values
and is named in the log.
"""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .sizes import logit_scale

logger = logging.get_logger(__name__)

PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NORMS = ("self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm")


@torch.no_grad()
def copy_from_target(head: PreTrainedModel, target: PreTrainedModel) -> list[str]:
    """Copy the weights that fit; see the module's docstring.

    The attention of EAGLE-3's first layer is twice as wide as the target's: the target's projection goes to the half
    that reads the state, the half that reads the embedding keeps its fresh values.

    Args:
        head: An `EagleHead` or `Eagle3Head`.
        target: Its target.

    Returns:
        Names of the head's tensors that were copied, wholly or in part.

    Raises:
        ValueError: If the target's decoder layers cannot be found.
    """
    last, final_norm = find_decoder(target)
    sources: dict[str, torch.Tensor | None] = {}
    for index in range(head.config.num_hidden_layers):
        for path in PROJECTIONS:
            module = find(last, path)
            for kind in ("weight", "bias"):
                sources[f"layers.{index}.{path}.{kind}"] = getattr(module, kind, None)
        for path in NORMS:
            sources[f"layers.{index}.{path}.weight"] = gain(find_norm(last, path))
    sources["norm.weight"] = gain(final_norm)
    lm_head = target.get_output_embeddings().weight
    if "lm_head.weight" in head.state_dict() and readable(lm_head):
        factor = logit_scale(target.config.get_text_config(decoder=True)) / head.config.logit_scale
        sources["lm_head.weight"] = lm_head[kept_rows(head).to(lm_head.device)] * factor
    copied, skipped = [], []
    for name, parameter in head.named_parameters():
        if name not in sources:
            continue
        source = sources[name]
        part: torch.Tensor = parameter
        if source is not None and parameter.dim() == 2 and parameter.shape[1] == 2 * source.shape[1]:
            part = parameter[:, source.shape[1] :]
        if source is None or source.shape != part.shape or not readable(source):
            skipped.append(name)
            continue
        part.copy_(source)
        copied.append(name)
    if skipped:
        logger.warning(
            "Kept at fresh values, as %s has no tensor of that name, kind and shape in its last layer: %s.",
            type(target).__name__,
            ", ".join(skipped),
        )
    return copied


def readable(tensor: torch.Tensor) -> bool:
    """Whether a weight holds plain numbers here (quantised and offloaded ones do not)."""
    return tensor.is_floating_point() and not tensor.is_meta


def kept_rows(head: PreTrainedModel) -> torch.Tensor:
    """Return the target ids of the rows of the head's own LM head."""
    return getattr(head, "draft_to_target", torch.arange(head.config.vocab_size))


def find(module: nn.Module, path: str) -> nn.Module | None:
    """Return the submodule at a dotted path, or None."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def find_norm(layer: nn.Module, path: str) -> nn.Module | None:
    """Return the target's norm that stands where the head's does.

    Families that also norm what a sublayer puts out (Gemma 2 and 3, OLMo 2) use Llama's name for such a norm.
    """
    if path == "post_attention_layernorm" and find(layer, "post_feedforward_layernorm") is not None:
        path = "pre_feedforward_layernorm"
    return find(layer, path)


def gain(norm: nn.Module | None) -> torch.Tensor | None:
    """Return the weight an RMS norm multiplies with, also where it is stored as an offset from 1; None for others."""
    if norm is None or "RMSNorm" not in type(norm).__name__:
        return None
    return norm(torch.ones_like(norm.get_parameter("weight")))  # ones have RMS 1, so the output is the gain


def find_decoder(target: PreTrainedModel) -> tuple[nn.Module, nn.Module | None]:
    """Return the target's last decoder layer and its final norm (None where it has none).

    Raises:
        ValueError: If there is no list of layers as long as the config says.
    """
    count = target.config.get_text_config(decoder=True).num_hidden_layers
    for module in target.get_decoder().modules():
        for layers in module.children():
            if isinstance(layers, nn.ModuleList) and len(layers) == count:
                norms = [child for child in module.children() if "norm" in type(child).__name__.lower()]
                return layers[-1], norms[-1] if norms else None
    raise ValueError(
        f"{type(target).__name__} has no list of {count} decoder layers to start from; train from fresh weights."
    )
