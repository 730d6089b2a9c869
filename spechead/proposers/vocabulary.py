"""Which token ids a draft model and a target share.

Called once by enable_speculation. Sizes say little: checkpoints of one family pad their embedding tables differently
(152064 and 151936 rows over one tokenizer), so tokens are compared by id wherever tokenizers are known.
"""

from __future__ import annotations

from typing import Any

from transformers.utils import logging

logger = logging.get_logger(__name__)


def shared_vocabulary(target_size: int, draft_size: int, tokenizer: Any = None, draft_tokenizer: Any = None) -> int:
    """Return how many leading ids may be drafted.

    Args:
        target_size: rows of the target's vocabulary.
        draft_size: rows of the draft's.
        tokenizer: the target's tokenizer, or None when unknown.
        draft_tokenizer: the draft's tokenizer, or None when unknown.

    Raises:
        ValueError: if one id means different tokens to the two tokenizers.
    """
    size = min(target_size, draft_size)
    if tokenizer is None or draft_tokenizer is None:
        if target_size != draft_size:
            logger.warning(
                f"The target has {target_size} vocabulary rows, the draft {draft_size}; without both tokenizers this "
                "is taken as padding of one vocabulary. Pass tokenizer= and draft_tokenizer= to have it checked."
            )
        return size
    size = min(size, len(tokenizer), len(draft_tokenizer))
    ours, theirs = (
        {index: token for token, index in known.get_vocab().items()} for known in (tokenizer, draft_tokenizer)
    )
    different = [index for index in range(size) if ours.get(index) != theirs.get(index)]
    if different:
        first = ", ".join(f"{i}: {ours.get(i)!r} / {theirs.get(i)!r}" for i in different[:3])
        raise ValueError(
            f"the draft's tokenizer is another one: {len(different)} of {size} ids differ (target / draft: {first}). "
            "Use a draft of the same family and revision, or a head trained for this target."
        )
    return size
