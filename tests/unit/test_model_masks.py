"""spechead.hf.model_masks: from what may be attended to, and positions, to the masks a model takes."""

from types import SimpleNamespace

import pytest
import torch

from spechead import hf

QUERIES, KEYS = torch.tensor([[5, 6, 6]]), torch.tensor([[0, 1, 2, 3, 4, 5, 6, 6]])
ALLOWED = torch.tensor([[[1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 0, 1]]]).bool()


def masks(form, dtype=torch.float32, **config):
    return hf.model_masks(SimpleNamespace(**config), form, ALLOWED, QUERIES, KEYS, dtype)


def seen(mask):
    return (mask == 0)[0, 0].int().tolist()


WINDOWED = [
    [0, 0, 0, 1, 1, 1, 0, 0],
    [0, 0, 0, 0, 1, 1, 1, 0],
    [0, 0, 0, 0, 1, 1, 0, 1],
]  # three positions, own included
CHUNKED = [[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 0, 1]]  # chunks of four


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_add_zero_or_the_smallest_number_and_never_minus_infinity(dtype):
    mask = masks("tensor", dtype)
    assert mask.shape == (1, 1, 3, 8)
    assert mask.dtype == dtype
    assert set(mask.flatten().tolist()) == {0.0, torch.finfo(dtype).min}
    assert seen(mask) == ALLOWED[0].int().tolist()


def test_windows_count_positions_and_not_slots():
    """The two siblings at position 6 see the same past, though they lie in slots 6 and 7."""
    assert seen(masks("tensor", sliding_window=3)) == WINDOWED


def test_one_mask_a_layer_type():
    got = masks("dict", sliding_window=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    assert set(got) == {"sliding_attention", "full_attention"}
    assert seen(got["sliding_attention"]) == WINDOWED
    assert seen(got["full_attention"]) == ALLOWED[0].int().tolist()
    got = masks("dict", attention_chunk_size=4, layer_types=["chunked_attention"])
    assert seen(got["chunked_attention"]) == CHUNKED


def test_a_single_tensor_is_for_the_layer_type_that_all_layers_have():
    full = masks("tensor", sliding_window=3, layer_types=["full_attention"] * 2)
    assert seen(full) == ALLOWED[0].int().tolist()  # a window in the config that no layer uses
    assert seen(masks("tensor", sliding_window=3, layer_types=["sliding_attention"])) == WINDOWED
    assert seen(masks("tensor", attention_chunk_size=4, layer_types=["chunked_attention"])) == CHUNKED


@pytest.mark.parametrize(
    ("config", "forms"),
    [
        ({}, ["tensor"]),
        ({"layer_types": None}, ["tensor"]),
        ({"layer_types": ["full_attention"] * 2}, ["dict", "tensor"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["dict"]),
    ],
)
def test_the_forms_that_are_tried(config, forms):
    assert hf.mask_forms(SimpleNamespace(**config)) == forms


def test_an_unknown_layer_type_has_no_mask():
    with pytest.raises(KeyError, match="lightning"):
        masks("dict", layer_types=["lightning"])
