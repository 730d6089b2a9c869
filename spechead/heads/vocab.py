"""The pruned draft vocabulary: d2t offsets and the t2d mask, and the maps in use that follow from them.

On disk (as in EAGLE-3): `d2t` int64 [D], an offset: target id of draft id i = i + d2t[i]; `t2d` bool [V], True where a
target id has a draft id. Kept ids are sorted, so the map is strictly ascending and injective. D == V needs neither.
"""

import torch


def offsets_from_ids(target_ids: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `d2t` and `t2d` for a set of kept target ids.

    Args:
        target_ids: Kept ids, strictly ascending, [D].
        vocab_size: V.

    Returns:
        d2t offsets int64 [D], t2d mask bool [V].

    Raises:
        ValueError: If the ids are not one row of strictly ascending ids in 0..V-1.
    """
    ids = torch.as_tensor(target_ids).to(torch.int64)
    if ids.dim() != 1 or ids.numel() == 0:
        raise ValueError(f"The draft vocabulary must be one row of ids, got a tensor of shape {tuple(ids.shape)}.")
    problem = map_problem(ids, vocab_size)
    if problem:
        raise ValueError(f"The draft vocabulary {problem}; give the kept target ids sorted, each once.")
    mask = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device)
    mask[ids] = True
    return ids - torch.arange(ids.numel(), device=ids.device), mask


def ids_from_offsets(d2t: torch.Tensor) -> torch.Tensor:
    """Return the target id of every draft id, [D], from the offsets."""
    return d2t + torch.arange(d2t.numel(), device=d2t.device)


def draft_ids(target_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the draft id of every target id, [V], -1 where it has none."""
    table = torch.full((vocab_size,), -1, dtype=torch.int64, device=target_ids.device)
    table[target_ids] = torch.arange(target_ids.numel(), device=target_ids.device)
    return table


def map_problem(target_ids: torch.Tensor, vocab_size: int) -> str | None:
    """Say what is wrong with a map from draft ids to target ids, or None.

    Args:
        target_ids: Absolute target ids, [D].
        vocab_size: V.
    """
    low, high = int(target_ids.min()), int(target_ids.max())
    if low < 0 or high >= vocab_size:
        return f"leaves the range 0..{vocab_size - 1} (lowest {low}, highest {high})"
    if target_ids.numel() > 1 and bool((target_ids[1:] <= target_ids[:-1]).any()):
        return "is not strictly ascending"
    return None


def check_maps(d2t: torch.Tensor, t2d: torch.Tensor | None, vocab_size: int) -> None:
    """Raise ValueError unless d2t holds offsets of a sound map and t2d, where given, agrees with it.

    Args:
        d2t: Offsets, [D].
        t2d: Membership mask, [V], or None.
        vocab_size: V.

    Raises:
        ValueError: Naming the trap: absolute ids instead of offsets, a map out of range or not ascending, a t2d that
            is a table of ids instead of a mask or that disagrees with d2t.
    """
    problem = map_problem(ids_from_offsets(d2t), vocab_size)
    if looks_absolute(d2t, t2d, vocab_size):
        raise ValueError(
            "d2t holds absolute target ids; it must hold offsets (target id = draft id + d2t[draft id]), else most "
            "ids are shifted. Subtract arange(D) from d2t."
        )
    if problem:
        raise ValueError(f"d2t, read as offsets, {problem}; it must map draft ids to ascending target ids.")
    if t2d is None:
        return
    if t2d.dtype != torch.bool or t2d.shape != (vocab_size,):
        raise ValueError(
            f"t2d is {t2d.dtype} of shape {tuple(t2d.shape)}; it must be a bool mask of shape ({vocab_size},), True "
            "where a target id is in the draft vocabulary (not a table of ids)."
        )
    _, mask = offsets_from_ids(ids_from_offsets(d2t), vocab_size)
    wrong = (mask != t2d).nonzero().flatten()
    if wrong.numel():
        raise ValueError(
            f"t2d and d2t disagree on {wrong.numel()} target id(s), the first is {int(wrong[0])}; the two must "
            "describe the same kept ids."
        )


def looks_absolute(d2t: torch.Tensor, t2d: torch.Tensor | None, vocab_size: int) -> bool:
    """Whether d2t is a table of absolute target ids, as several tools wrote by mistake.

    Offsets never fall from one draft id to the next and may repeat; absolute ids rise strictly. Offsets can rise
    strictly too (no two kept ids are neighbours), so t2d decides where it is there, and else the range does.
    """
    if d2t.numel() < 2 or map_problem(d2t, vocab_size) is not None:
        return False
    if t2d is not None and t2d.dtype == torch.bool and t2d.shape == (vocab_size,):
        return torch.equal(t2d.nonzero().flatten(), d2t) and not torch.equal(ids_from_offsets(d2t), d2t)
    as_offsets = map_problem(ids_from_offsets(d2t), vocab_size)
    return as_offsets is not None or torch.equal(d2t, torch.arange(d2t.numel(), device=d2t.device))
