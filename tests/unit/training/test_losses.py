"""The chunked loss equals the plain one, value and gradients, for any chunk, rule and offset."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from spechead.training import losses
from spechead.training.ends import LogitRule
from spechead.training.losses import LogitRows, soft_cross_entropy

T, J, H, D, V = 11, 3, 16, 20, 30


def head_of(weight, offset=None):
    return LogitRows(weight, LogitRule(), offset=offset)


@pytest.fixture
def parts():
    draw = torch.Generator().manual_seed(0)
    full = torch.randn(V, H, generator=draw)
    final = torch.randn(T, H, generator=draw)
    hidden = torch.randn(T, J, H, generator=draw, requires_grad=True)
    weight = torch.randn(D, H, generator=draw, requires_grad=True)
    weights = torch.rand(T, J, generator=draw) * (torch.rand(T, J, generator=draw) > 0.3)
    return full, final, hidden, weight, weights


def plain(full, final, hidden, weight, weights, rule, offset=None):
    logits = rule(final @ full.T)
    share = torch.softmax(logits, -1)[:, :D].sum(-1)
    kept = logits[:, :D] if offset is None else logits[:, :D] + offset
    p = torch.softmax(kept, -1)
    own = hidden @ weight.T if offset is None else hidden @ weight.T + offset
    divergence = (p[:, None] * (p.log()[:, None] - F.log_softmax(own, -1))).sum(-1)
    return divergence * weights * share[:, None]


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(scale=0.5), LogitRule(softcap=4.0)])
@pytest.mark.parametrize("chunk_bytes", [1, 700, 2**20])
def test_value_and_gradients_are_those_of_the_plain_loss(parts, rule, chunk_bytes, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_BYTES", chunk_bytes)
    full, final, hidden, weight, weights = parts
    expected = plain(full, final, hidden, weight, weights, rule)
    wanted = torch.autograd.grad(expected.sum() * 2, (hidden, weight))
    mass = rule(final @ full.T).logsumexp(-1)
    loss, by_depth, _ = soft_cross_entropy(hidden, [head_of(weight)], final, mass, weights, LogitRows(full[:D], rule))
    found = torch.autograd.grad(loss * 2, (hidden, weight))
    torch.testing.assert_close(loss, expected.sum(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(by_depth, expected.sum(0).detach(), atol=1e-5, rtol=1e-5)
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-4)


def test_a_frozen_lm_head_gets_no_gradient_and_the_hidden_state_the_same_one(parts):
    full, final, hidden, weight, weights = parts
    law, mass = LogitRows(full[:D], LogitRule()), (final @ full.T).logsumexp(-1)
    both = torch.autograd.grad(soft_cross_entropy(hidden, [head_of(weight)], final, mass, weights, law)[0], hidden)[0]
    alone = soft_cross_entropy(hidden, [head_of(weight.detach())], final, mass, weights, law)[0]
    torch.testing.assert_close(torch.autograd.grad(alone, hidden)[0], both)


def test_the_best_ids_are_filled_without_gradients(parts):
    full, final, hidden, weight, weights = parts
    law, mass = LogitRows(full[:D], LogitRule()), (final @ full.T).logsumexp(-1)
    with torch.no_grad():
        best = soft_cross_entropy(hidden, [head_of(weight)], final, mass, weights, law)[2]
    assert torch.equal(best, (hidden @ weight.T).argmax(-1))


def test_an_offset_stands_for_many_rows(parts):
    full, final, hidden, weight, weights = parts
    offset = torch.linspace(0, 2, D)
    law = LogitRows(full[:D], LogitRule(), offset=offset)
    mass = torch.full((T,), -1e9)  # the share is clamped to 1
    loss = soft_cross_entropy(hidden, [head_of(weight, offset)], final, mass, weights, law)[0]
    share = torch.softmax(final @ full.T, -1)[:, :D].sum(-1)
    expected = plain(full, final, hidden, weight, weights / share[:, None], LogitRule(), offset)
    torch.testing.assert_close(loss, expected.sum(), atol=1e-5, rtol=1e-5)


def test_no_positions_give_a_zero_loss_with_zero_gradients(parts):
    full, _, hidden, weight, _ = parts
    law = LogitRows(full[:D], LogitRule())
    empty = hidden[:0]
    loss = soft_cross_entropy(empty, [head_of(weight)], torch.zeros(0, H), torch.zeros(0), torch.zeros(0, J), law)[0]
    gradient = torch.autograd.grad(loss, weight)[0]
    assert loss.item() == 0.0
    assert not gradient.any()


def test_peak_memory_is_a_chunk_of_logits_and_not_the_whole(monkeypatch):
    """With a 4k vocabulary and 512 positions the whole float32 logits are 8 MB a depth; a chunk must stay below 1
    MB."""
    monkeypatch.setattr(losses, "CHUNK_BYTES", 2**19)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel() * tensor.element_size())
            return result

    rows = torch.randn(4096, 8)
    hidden = torch.randn(512, 1, 8, requires_grad=True)
    final, mass = torch.randn(512, 8), torch.full((512,), 20.0)
    with Watch():
        loss = soft_cross_entropy(hidden, [head_of(rows)], final, mass, torch.ones(512, 1), head_of(rows))[0]
        loss.backward()
    assert hidden.grad.abs().sum() > 0
    assert largest <= 2**19
