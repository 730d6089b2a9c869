"""Running batches without `generate`: contexts whose rows join, leave and are stepped by hand."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from spechead.context import Context
from spechead.decoding import prefill
from spechead.row import Row
from spechead.sampling import Sampler
from spechead.target import Target


def start(
    target: Target,
    proposer: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 20,
    processors: Sequence[Any] = (),
    generators: Sequence[torch.Generator] | None = None,
    do_sample: bool = False,
    criteria: Sequence[Any] = (),
    kind: type[Context] = Context,
    **settings: Any,
) -> Context:
    """Left-pad the prompts, feed them and start the proposer; `settings` go to the context."""
    width = max(len(prompt) for prompt in prompts)
    pads = torch.tensor([width - len(prompt) for prompt in prompts])
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    shared, stops = LogitsProcessorList(processors), StoppingCriteriaList(criteria)
    rows = [
        Row(
            Sampler(shared, row, do_sample, generators[row] if generators else None),
            stops,
            width,
            width,
            width + max_new_tokens,
        )
        for row in range(len(prompts))
    ]
    cache = target.new_cache(len(prompts), width + max_new_tokens + 16)
    context = kind(target, proposer, ids, pads, rows, cache, **settings)
    mask = (torch.arange(width)[None, :] >= pads[:, None]).long()
    prefill(context, mask if bool((pads > 0).any()) else None)
    return context


def new_tokens(context: Context, row: int) -> list[int]:
    """What a row has emitted."""
    return context.ids[row, context.rows[row].prompt_width : context.rows[row].end].tolist()


def plain_greedy(model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """What the library's own greedy search emits for one prompt."""
    ids = torch.tensor([list(prompt)])
    mask = torch.ones_like(ids)
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


class ForwardCount:
    """Counts a model's forwards and the ids fed to it while it is entered."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.forwards, self.fed, self.shapes = model, 0, 0, []

    def __enter__(self) -> "ForwardCount":
        def count(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids: Tensor = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            self.forwards += 1
            self.fed += ids.numel()
            self.shapes.append(tuple(ids.shape))

        self.handle = self.model.register_forward_pre_hook(count, with_kwargs=True)
        return self

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()
