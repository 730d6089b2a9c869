"""The laws in every loss are those that decoding works with: `head.logits`, and the target's own logits.

Each kind of head, with the target's LM head or its own, on targets that scale their logits, cap them or add a bias.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from spechead.heads.config import Eagle3Config, EagleConfig, MedusaConfig
from spechead.heads.eagle import EagleHead
from spechead.heads.eagle3 import Eagle3Head
from spechead.heads.medusa import MedusaHeads
from spechead.training.batch import chains, collate
from spechead.training.dataset import OnlineFeatures
from spechead.training.eagle import FEATURE_WEIGHT, LAW_WEIGHT, Eagle3Objective, EagleObjective, gather_entries, unroll
from spechead.training.ends import TargetEnds
from spechead.training.medusa import MedusaObjective

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
DEPTHS = 3


def scaled():
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=0.25, tie_word_embeddings=False))


def biased():
    target = PhiForCausalLM(PhiConfig(**SIZES))
    torch.nn.init.normal_(target.lm_head.bias)
    return target


def capped():
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=3.0))


KINDS = {
    "eagle": lambda target, **more: EagleHead(EagleConfig.for_target(target.config, **more)),
    "eagle3": lambda target, **more: Eagle3Head(Eagle3Config.for_target(target.config, **more)),
    "medusa": lambda target, **more: MedusaHeads(MedusaConfig.for_target(target.config, num_heads=DEPTHS, **more)),
}


def objective_of(kind, head, ends):
    if kind == "eagle":
        return EagleObjective(head, ends, noise=0.0)
    return Eagle3Objective(head, ends, DEPTHS) if kind == "eagle3" else MedusaObjective(head, ends)


def decoded(head, batch, supervised):
    """Logits [B, A, J, D] that decoding would take at the gathered entries, and those entries."""
    gathered = gather_entries(chains(supervised, DEPTHS if not isinstance(head, EagleHead) else 1))
    states = batch["states"]
    if isinstance(head, MedusaHeads):
        index = [(gathered.entries - depth).clamp(min=0) for depth in range(DEPTHS)]
        logits = head(states[:, :, -1])  # [K, B, L, V]
        rows = torch.arange(len(states))[:, None]
        return torch.stack([logits[depth][rows, index[depth]] for depth in range(DEPTHS)], dim=2), gathered
    features = states[:, :-2, -1] if isinstance(head, EagleHead) else states[:, :-2, :-1].flatten(2)
    outputs = unroll(head, batch["input_ids"][:, 1:-1], features, gathered)
    return head.logits(outputs.flatten(1, 2)).view(*outputs.shape[:3], -1), gathered


def plain_loss(target, head, batch, decay):
    """The loss from `head.logits` and the target's own logits, with every [B, A, J, V] tensor written out."""
    own, gathered = decoded(head, batch, batch["supervised"])
    with torch.no_grad():
        laws = torch.softmax(target(input_ids=batch["input_ids"]).logits.float(), -1)
    p = gathered.take(laws[:, 1:-1])
    if isinstance(head, Eagle3Head):
        p = p[..., head.draft_to_target]
    share = p.sum(-1, keepdim=True)
    p = (p / share)[:, :, None]
    divergence = (p * (p.log() - F.log_softmax(own, -1))).sum(-1) * share  # [B, A, J]
    depths = own.shape[2]
    reached = gathered.depths[..., :depths] & gathered.real[:, :, None]
    return (divergence * reached * decay ** torch.arange(depths)).sum(), gathered


@pytest.mark.parametrize("make", [scaled, biased, capped])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_its_gradients_are_those_of_the_logits_in_decoding(make, shared, kind, rows):
    torch.manual_seed(0)
    target = make().eval()
    more = {} if shared else {"logit_scale": 0.5}
    if kind == "eagle3" and not shared:
        more |= {"draft_vocab_size": 24}
    head = KINDS[kind](target, share_lm_head=shared, **more).bind(target, match_dtype=False)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    ends = TargetEnds.of(target)
    objective = objective_of(kind, head, ends)
    batch = collate(rows)
    batch.pop("numbers")
    batch = OnlineFeatures(target, ends)(batch, objective.taps)
    expected, gathered = plain_loss(target, head, batch, 0.8 if kind != "eagle" else 1.0)
    if kind == "eagle":
        output = unroll(head, batch["input_ids"][:, 1:-1], batch["states"][:, :-2, -1], gathered)[:, :, 0]
        wanted = gathered.take(batch["states"][:, 1:-1, -1])
        feature = F.smooth_l1_loss(output, wanted, reduction="none").mean(-1)[gathered.real].sum()
        expected = FEATURE_WEIGHT * feature + LAW_WEIGHT * expected
    parameters = dict(head.named_parameters())
    wanted = torch.autograd.grad(expected, list(parameters.values()))
    loss = objective(**batch)["loss"]
    found = torch.autograd.grad(loss, list(parameters.values()))
    torch.testing.assert_close(loss, expected, atol=1e-3, rtol=1e-4)
    for name, own, other in zip(parameters, found, wanted, strict=True):
        assert other.any(), f"nothing teaches {name}"
        torch.testing.assert_close(own, other, atol=1e-3, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_sampled_softmax_over_all_rows_is_the_whole_one(shared, kind, rows):
    torch.manual_seed(0)
    target = biased().eval()
    head = KINDS[kind](target, share_lm_head=shared, logit_scale=0.5).bind(target, match_dtype=False)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    ends = TargetEnds.of(target)
    objective = Eagle3Objective if kind == "eagle3" else MedusaObjective
    whole, sampled = objective(head, ends), objective(head, ends, kept=range(64))
    batch = collate(rows)
    batch.pop("numbers")
    batch = OnlineFeatures(target, ends)(batch, whole.taps)
    parameters = list(head.parameters())
    first, second = (torch.autograd.grad(which(**batch)["loss"], parameters) for which in (whole, sampled))
    for own, other in zip(first, second, strict=True):
        assert own.any()
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)
