"""A check at the start of every training: what is predicted must not depend on what comes later.

A head that sees the future trains to a beautiful loss and drafts nothing. The loss of the first half of a row's answer
is computed twice, the second time with all later tokens and states replaced; it must not change.
"""

from __future__ import annotations

import torch

from .batch import collate
from .dataset import Features, RowDataset
from .objective import Objective

MOST_TOKENS = 256  # of the row that is probed: enough for every depth, cheap for every head
TOLERANCE = 1e-3


@torch.no_grad()
def check_causality(objective: Objective, dataset: RowDataset, features: Features, device: torch.device) -> None:
    """Compare the loss of a row's beginning with and without its true continuation.

    Args:
        objective: what will be trained.
        dataset: the training rows.
        features: where the target's states come from.
        device: of the objective.

    Raises:
        ValueError: if the loss changes.
    """
    fitting = [place for place, length in enumerate(dataset.lengths) if length <= MOST_TOKENS]
    place = max(fitting, key=lambda place: dataset.lengths[place], default=0)
    batch = {name: part.to(device) for name, part in collate([dataset[place]]).items()}
    batch.pop("numbers")
    batch = features(batch, objective.taps)
    answers = batch["supervised"][0].nonzero().flatten()
    cut = int(answers[len(answers) // 2])
    batch["supervised"][:, cut + 1 :] = (
        False  # token `cut` is the last to be predicted; it and all after it are the future
    )
    changed = {name: part.clone() for name, part in batch.items()}
    vocabulary = int(objective.head.config.vocab_size)
    changed["input_ids"][:, cut:] = (changed["input_ids"][:, cut:] + 1) % vocabulary
    changed["states"][:, cut:] = torch.randn(
        changed["states"][:, cut:].shape, generator=torch.Generator().manual_seed(0)
    ).to(changed["states"])
    was_training = objective.training
    objective.eval()
    before, after = objective(**batch)["loss"].item(), objective(**changed)["loss"].item()
    objective.train(was_training)
    if not abs(before - after) <= TOLERANCE * max(abs(before), 1.0):
        raise ValueError(
            f"The loss of the first half of an answer changes from {before:.4f} to {after:.4f} when the second half "
            "is replaced: the head sees the future. Its attention mask or its inputs are shifted; it would draft "
            "nothing."
        )
