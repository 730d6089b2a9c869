"""Load a head from spechead's own layout or a published one, strictly, and check it against its target.

    head = load_head("<directory or Hub repo>", target)

Nothing is guessed: a missing, an unexpected or a wrongly shaped tensor is an error that names it, and so is every
known trap of the formats (`heads/traps.py`). Called by the mixin, the recipes and `spechead inspect`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging

from .base import Head, check_pair, refuse_key_errors
from .checkpoint import Checkpoint, read_checkpoint, resolve
from .config import Eagle3Config, EagleConfig, HeadConfig, MedusaConfig
from .convert import OWN
from .eagle import EagleHead
from .eagle3 import Eagle3Head
from .fingerprint import describe_mismatch
from .medusa import MedusaHeads
from .published import complete, config_for
from .sizes import text_config
from .traps import find_traps

logger = logging.get_logger(__name__)

HEADS: dict[type[HeadConfig], type[Head]] = {
    MedusaConfig: MedusaHeads,
    EagleConfig: EagleHead,
    Eagle3Config: Eagle3Head,
}
OWN_CONFIGS = {config.model_type: config for config in HEADS}
ROWS_AT_ONCE = 4096  # compared without a float32 copy of the whole table


def load_head(
    path_or_repo: str | Path,
    target: PreTrainedModel | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    allow_pickle: bool = False,
    taps: Sequence[int] | None = None,
    target_revision: str | None = None,
    **hub_kwargs: Any,
) -> Head:
    """Load a head and, where a target is given, check the pair and bind it.

    Args:
        path_or_repo: A directory or a Hub repo id: spechead's own layout, FasterDecoding's or vLLM's Medusa,
            EAGLE-1/2, EAGLE-3 (midlayer.* or layers.0.*), speculators eagle3.
        target: The model whose output is kept; without it the head still has to be bound.
        revision: Branch, tag or commit of the repo.
        token: Hub token.
        allow_pickle: Whether weights that exist only as pickles may be read (tensors alone).
        taps: Taps of a published EAGLE-3 head whose config is ambiguous or silent about them.
        target_revision: The target's revision, compared with the one the head was trained for.
        **hub_kwargs: More of `huggingface_hub.snapshot_download`'s arguments.

    Returns:
        The head, in evaluation mode; bound to the target where one is given.

    Raises:
        ValueError: If the checkpoint is broken or does not fit the target.
    """
    path = resolve(path_or_repo, revision=revision, token=token, allow_pickle=allow_pickle, **hub_kwargs)
    checkpoint = read_checkpoint(path, allow_pickle=allow_pickle)
    config = make_config(checkpoint, None if target is None else target.config, taps)
    if target is not None:
        check_pair(config, target.config)
    traps = find_traps(checkpoint.layout, checkpoint.source, config, checkpoint.tensors, taps_stated=taps is not None)
    for trap in traps:
        if trap.level == "error":
            raise ValueError(f"{path}: {trap.message} [{trap.name}]")
        if trap.level == "warning":
            logger.warning("%s: %s [%s]", path, trap.message, trap.name)
    head = build_head(config, complete(config, checkpoint.source, checkpoint.tensors), str(path))
    if target is None:
        return head
    if checkpoint.layout != OWN:
        share_equal_parts(head, target)
    mismatch = describe_mismatch(config, target, target_revision)
    if mismatch:
        logger.warning("%s may draft badly here: %s.", path, mismatch)
    saved = head.dtype
    head.bind(target)
    if head.dtype != saved:
        logger.warning(
            "%s was saved in %s and follows the target's %s; acceptance may differ a little.", path, saved, head.dtype
        )
    return head


def make_config(
    checkpoint: Checkpoint, target_config: PreTrainedConfig | None, taps: Sequence[int] | None = None
) -> HeadConfig:
    """Return the own config of a checkpoint.

    Args:
        checkpoint: A checkpoint as read.
        target_config: The target's config, where there is one.
        taps: Taps that the caller states for a published checkpoint.

    Raises:
        ValueError: If config.json is not valid for its kind of head.
    """
    layout, source = checkpoint.layout, checkpoint.source
    if layout == OWN and source["model_type"] not in OWN_CONFIGS:
        known = ", ".join(sorted(OWN_CONFIGS))
        raise ValueError(f"model_type={source['model_type']!r} is no head that this version knows; it knows {known}.")
    if layout == OWN and taps is not None:
        raise ValueError(f"taps={list(taps)} is for published checkpoints; this one says its own.")
    try:
        if layout == OWN:
            return OWN_CONFIGS[source["model_type"]](**source)
        num_layers = None if target_config is None else text_config(target_config).num_hidden_layers
        return config_for(layout, source, checkpoint.tensors, num_layers=num_layers, taps=taps)
    except StrictDataclassError as error:
        raise ValueError(f"{checkpoint.path / 'config.json'}: {error}") from error


def build_head(config: HeadConfig, tensors: Mapping[str, Tensor], source: str) -> Head:
    """Build a head and give it its tensors.

    Args:
        config: The own config.
        tensors: Tensors under own names.
        source: Where they are from, for errors.

    Raises:
        ValueError: Naming every tensor that is missing, unexpected or of another shape.
    """
    with no_init_weights():  # every tensor is given below; the caller's random state stays as it is
        head = HEADS[type(config)](config)
    expected = head.state_dict()
    refuse_key_errors(source, expected.keys() - tensors.keys(), tensors.keys() - expected.keys())
    shapes = [
        f"{name} is {tuple(tensors[name].shape)}, by the config {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if tensors[name].shape != tensor.shape
    ]
    if shapes:
        raise ValueError(f"{source} has tensors of other shapes than its config describes: {'; '.join(shapes)}.")
    head.load_state_dict(tensors, strict=True, assign=True)
    return head.eval()


@torch.no_grad()
def share_equal_parts(head: Head, target: PreTrainedModel) -> list[str]:
    """Replace a published head's copies of the target's embedding and LM head by the target's own.

    Equal means equal within the rounding of the coarser dtype: a float16 copy of a bfloat16 table counts.

    Args:
        head: A head that is not bound yet.
        target: Its target.

    Returns:
        The names of the modules that are shared now.
    """
    shared = []
    rows = target.get_output_embeddings().weight
    if isinstance(head, MedusaHeads):
        tables = [] if head.config.share_lm_head else [own.get_parameter("weight") for own in head.lm_heads]
        if tables and all(same_table(table, rows) for table in tables):
            del head.lm_heads
            head.config.share_lm_head = True
            shared.append("lm_heads")
        return shared
    for name, flag, table in (
        ("embed_tokens", "share_embeddings", target.get_input_embeddings().weight),
        ("lm_head", "share_lm_head", rows),
    ):
        own: nn.Module | None = getattr(head, name, None)
        if own is None or head.config.hidden_size != head.config.target_hidden_size:
            continue
        if same_table(own.get_parameter("weight"), table):
            delattr(head, name)
            setattr(head.config, flag, True)
            shared.append(name)
        elif name == "embed_tokens":
            logger.warning("The head brings embeddings that differ from the target's; it keeps its own.")
    return shared


def same_table(own: Tensor, table: Tensor) -> bool:
    """Whether two tables hold the same values within rounding; unreadable ones (quantised, offloaded) never do."""
    if own.shape != table.shape or not table.is_floating_point() or table.device.type == "meta":
        return False
    exact = own.dtype == table.dtype
    for start in range(0, len(own), ROWS_AT_ONCE):
        ours = own[start : start + ROWS_AT_ONCE].float()
        theirs = table[start : start + ROWS_AT_ONCE].to(own.device).float()
        if not (torch.equal(ours, theirs) if exact else torch.allclose(ours, theirs, rtol=2**-7, atol=2**-20)):
            return False
    return True
