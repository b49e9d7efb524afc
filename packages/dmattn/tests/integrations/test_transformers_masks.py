"""The masks that models get: descriptions that agree with transformers' dense masks."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import WINDOW, make_model, with_attention
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import StaticCache, masking_utils

from dmattn.integrations.transformers import interval_mask
from dmattn.integrations.transformers.interval_mask import IntervalMask, VisibleKeys
from dmattn.integrations.transformers.masks import make_mask

SIZE = 150


def causal() -> Any:
    return masking_utils.causal_mask_function


def window() -> Any:
    return masking_utils.sliding_window_causal_mask_function(17)


def chunks() -> Any:
    return masking_utils.chunked_causal_mask_function(23, torch.tensor([0, 31]))


def documents(inner: Any = masking_utils.causal_mask_function) -> Any:
    lengths = ((50, 99, 1), (1, 9, 140))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    ids = masking_utils.find_packed_sequence_indices(positions)
    make = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if make is None:  # an older release
        packed = masking_utils.packed_sequence_mask_function(ids)
        return masking_utils.and_masks(inner, packed)
    return make(inner, positions, ids)


def documents_by_numbers(inner: Any = masking_utils.causal_mask_function) -> Any:
    """Documents given by their numbers, as in older releases of transformers."""
    ids = torch.tensor([[0] * 50 + [1] * 99 + [2], [0] + [1] * 149])
    packed = masking_utils.packed_sequence_mask_function(ids)
    return masking_utils.and_masks(inner, packed)


def documents_by_numbers_and_chunks() -> Any:
    """Chunks that are counted from the start of the sequence, and also end with a document."""
    return documents_by_numbers(chunks())


def documents_and_window() -> Any:
    return documents(window())


def documents_and_chunks() -> Any:
    return documents(masking_utils.chunked_causal_mask_function(23, torch.tensor([0, 0])))


def padding(*, seen: int = SIZE) -> Tensor:
    mask = torch.ones(2, seen, dtype=torch.bool)
    mask[1, :31] = False
    mask[0, 3] = False  # anywhere, not only at the ends
    return mask


def described(mask: Any, kv_length: int) -> Tensor:
    """The description of a mask, written out as a dense mask of all rows and keys."""
    visible = mask.visible
    row = torch.arange(visible.query_len)[:, None] + visible.key_len - visible.query_len
    keep = (torch.arange(visible.key_len) <= row).expand(2, 1, -1, -1)
    if visible.key_mask is not None:
        keep = keep & visible.key_mask
    if visible.selection is not None:
        keep = keep & visible.selection.to_mask()
    return torch.nn.functional.pad(keep, (0, kv_length - visible.key_len))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "pattern, lengths",
    [
        *((p, (SIZE, SIZE, 0, 0)) for p in (causal, window, chunks, documents)),
        (documents_and_window, (SIZE, SIZE, 0, 0)),
        (documents_and_chunks, (SIZE, SIZE, 0, 0)),
        (documents_by_numbers, (SIZE, SIZE, 0, 0)),
        (documents_by_numbers_and_chunks, (SIZE, SIZE, 0, 0)),
        # A second prompt: behind 110 cached keys; behind the last 16 of 125 cached keys; in a
        # static cache that has room for more.
        *((p, (40, SIZE, SIZE - 40, 0)) for p in (causal, window, chunks)),
        *((p, (25, 41, SIZE - 25, SIZE - 41)) for p in (window, chunks)),
        *((p, (40, 200, 60, 0)) for p in (causal, window, chunks)),
    ],
)
def test_description(pattern: Any, lengths: tuple[int, int, int, int], padded: bool) -> None:
    q_length, kv_length, q_offset, kv_offset = lengths
    arguments: dict[str, Any] = {
        "batch_size": 2,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": pattern(),
        "attention_mask": padding(seen=q_offset + q_length) if padded else None,
    }
    wanted = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    mask = make_mask(**arguments, allow_is_causal_skip=False)
    assert isinstance(mask, IntervalMask)
    assert tuple(mask.shape) == tuple(wanted.shape)
    assert torch.equal(described(mask, kv_length), wanted)
    assert torch.equal(mask | torch.zeros_like(wanted), wanted)  # for code that expects a tensor
    skipped = make_mask(**arguments)
    is_plain = pattern is causal and not padded and q_offset + q_length == kv_offset + kv_length
    assert (skipped is None) == is_plain


def text_at(first: int, last: int, size: int = 9) -> list[bool]:
    return [first <= i < last for i in range(size)]


@pytest.mark.parametrize(
    "rows, bounds",
    [
        ([text_at(2, 9), text_at(0, 9)], [0, 2, 9, 9, 9, 18, 18]),
        ([text_at(0, 5), text_at(3, 7)], [0, 0, 5, 9, 12, 16, 18]),
        ([text_at(4, 4), text_at(8, 9)], [0, 0, 0, 9, 17, 18, 18]),  # nothing but padding
        ([text_at(0, 9), [True, False] * 4 + [True]], None),  # padding within the text
    ],
)
def test_texts_between_padding(rows: list[list[bool]], bounds: list[int] | None) -> None:
    """Each sequence becomes three documents: padding before its text, the text, padding behind."""
    keep = torch.tensor(rows)
    visible = VisibleKeys(2, 9, 9, padding=keep)
    assert visible.texts is None
    visible.find_texts()
    texts = visible.texts
    if bounds is None:
        assert texts is None
        return
    assert texts is not None and texts.max_seqlen == 9
    assert texts.cu_seqlens.dtype == torch.int32 and texts.cu_seqlens.tolist() == bounds


@pytest.mark.parametrize("rows, keep", [(9, None), (5, torch.tensor([text_at(2, 9)]))])
def test_no_texts(rows: int, keep: Tensor | None) -> None:
    """None are found without padding, nor if there are more keys than rows (behind cached keys)."""
    visible = VisibleKeys(1, rows, 9, padding=keep)
    visible.find_texts()
    assert visible.texts is None


@pytest.mark.parametrize("name, has_texts", [("gemma2", True), ("llama", False)])
def test_models_with_softcap_know_their_texts(name: str, has_texts: bool) -> None:
    model = with_attention(make_model(name), "dmattn")
    keep = torch.ones(2, SIZE, dtype=torch.bool)
    keep[0, :31] = False
    mask = make_mask(2, SIZE, SIZE, attention_mask=keep, config=model.config)
    assert isinstance(mask, IntervalMask)
    assert (mask.visible.texts is not None) == has_texts
    assert (mask.to("meta").visible.texts is not None) == has_texts


def test_offset_as_tensor() -> None:
    """Static caches give a tensor from their first use on. It is read only for prompts."""
    offset = torch.tensor([60])
    mask = make_mask(2, 40, 200, q_offset=offset)
    assert isinstance(mask, IntervalMask)
    assert mask.visible.key_len == 100
    row = make_mask(2, 1, 200, q_offset=offset, mask_function=window())
    wanted = masking_utils.sdpa_mask(
        2, 1, 200, q_offset=offset, mask_function=window(), allow_is_causal_skip=False
    )
    assert type(row) is Tensor
    assert torch.equal(row, wanted)


def test_dense_after_the_offset_has_changed() -> None:
    """A static cache adds the new tokens to its tensor before a layer can read the mask."""
    offset = torch.tensor([60])
    mask = make_mask(2, 40, 200, q_offset=offset, mask_function=window())
    before = mask.clone()
    offset.add_(40)
    assert torch.equal(mask.clone(), before)
    assert not before[0, 0, 0, 61:].any()


def test_unknown_patterns_are_dense() -> None:
    odd = masking_utils.and_masks(causal(), lambda b, h, q, k: (q - k) % 2 == 0)
    future = masking_utils.or_masks(causal(), lambda b, h, q, k: k < 4)
    blocks = masking_utils.or_masks(
        causal(), masking_utils.blockwise_overlay(torch.tensor([[-1] * 9 + [0] * 7] * 2))
    )
    half = masking_utils.sliding_window_bidirectional_mask_function(3)
    overlay = masking_utils.sliding_window_overlay(5)
    for pattern in (odd, future, blocks, half, overlay):
        arguments: dict[str, Any] = {"mask_function": pattern, "allow_is_causal_skip": False}
        mask = make_mask(2, 16, 16, **arguments)
        assert type(mask) is Tensor
        assert torch.equal(mask, masking_utils.sdpa_mask(2, 16, 16, **arguments))
    assert type(make_mask(2, 16, 16, mask_function=causal(), use_vmap=True)) is Tensor


def test_bidirectional() -> None:
    pattern = masking_utils.bidirectional_mask_function
    arguments: dict[str, Any] = {"mask_function": pattern, "allow_is_causal_skip": False}
    assert make_mask(2, 40, SIZE, **arguments, allow_is_bidirectional_skip=True) is None
    full = make_mask(2, 40, SIZE, **arguments)
    assert full is not None and bool(full.all()) and tuple(full.shape) == (2, 1, 40, SIZE)
    mask = make_mask(2, 40, SIZE, attention_mask=padding(), **arguments)
    assert mask is not None and mask.stride(2) == 0
    wanted = masking_utils.sdpa_mask(2, 40, SIZE, attention_mask=padding(), **arguments)
    assert torch.equal(mask, wanted)


def test_masks_of_neither_two_nor_four_dimensions() -> None:
    model = with_attention(make_model("mistral"), "dmattn")
    for shape in ((2, 30, 30), (30,)):
        mask = torch.ones(shape, dtype=torch.bool)
        with pytest.raises(
            ValueError, match=r"attention_mask: got shape \(.*30.*\), wanted \(batch"
        ):
            model(torch.ones(2, 30).long(), attention_mask=mask)


def test_mask_as_a_tensor() -> None:
    mask = make_mask(2, SIZE, SIZE, mask_function=window())
    assert isinstance(mask, IntervalMask)
    dense = mask.to_dense_mask()
    # What generate() and checkpointing do to masks keeps the description.
    same_device = (mask.contiguous(), mask.detach(), mask.to("cpu"), mask.to(torch.bool))
    for same in (*same_device, copy.copy(mask), copy.deepcopy(mask)):
        assert isinstance(same, IntervalMask)
        assert same.visible is mask.visible
    assert torch.equal(mask[:, :, :5, 3:9], dense[:, :, :5, 3:9])
    assert torch.equal(mask.float(), dense.float())
    assert type(mask.clone()) is Tensor
    # An IntervalMask claims to be contiguous, so views are made by strides of a contiguous mask.
    whole = mask.contiguous()
    assert torch.equal(whole.flatten(), dense.flatten())
    assert torch.equal(whole.as_strided((2, SIZE), (SIZE * SIZE, 1)), dense[:, 0, 0])
    assert torch.equal(mask.reshape(-1), dense.reshape(-1))
    with pytest.raises(RuntimeError, match=r"attention_mask: got aten\.logical_not_"):
        mask.logical_not_()
    with pytest.raises(RuntimeError, match=r"attention_mask: got an assignment on a mask"):
        mask[:, :, :5, :5] = True
    assert mask.tolist() == dense.tolist() == mask.numpy().tolist()
    moved = mask.to("meta")
    assert isinstance(moved, IntervalMask) and moved.device.type == "meta"
    assert moved.visible is mask.to("meta").visible  # shared by all layers on that device


def test_mask_that_leaves_the_process() -> None:
    """Its values are sent, but neither its description nor the address of a storage."""
    mask = make_mask(2, SIZE, SIZE, mask_function=window())
    assert isinstance(mask, IntervalMask)
    dense = mask.to_dense_mask()
    for sent in (pickle.loads(pickle.dumps(mask)), torch.from_dlpack(mask)):
        assert type(sent) is Tensor and torch.equal(sent, dense)
    assert (np.from_dlpack(mask) == dense.numpy()).all()
    with pytest.raises(RuntimeError, match="attention_mask: got share_memory_ on a mask"):
        mask.share_memory_()


def test_layers_share_one_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counting(*arguments: Any, **options: Any) -> Any:
        made.append(arguments)
        return original(*arguments, **options)

    original = interval_mask.sliding_window
    monkeypatch.setattr(interval_mask, "sliding_window", counting)
    model = with_attention(make_model("mistral"), "dmattn")
    model(torch.ones(2, SIZE, dtype=torch.long)).logits.sum().backward()
    assert made == [(SIZE, WINDOW, SIZE)]


class LargestTensor(TorchDispatchMode):
    """Records the largest result of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for t in tree_flatten(found)[0]:
            if isinstance(t, Tensor) and not isinstance(t, IntervalMask):
                self.entries = max(self.entries, t.untyped_storage().nbytes() // t.element_size())
        return found


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss", "llama4"])
def test_nothing_of_the_length_squared(name: str) -> None:
    model = with_attention(make_model(name), "dmattn")
    length = 1024
    mask = torch.ones(1, length, dtype=torch.long)
    mask[0, :5] = 0
    half = torch.arange(length // 2).repeat(2)[None]
    cache = StaticCache(model.config, max_cache_len=length + 8)
    ids = torch.ones(1, length, dtype=torch.long)
    for inputs in (
        {"attention_mask": mask},
        {"position_ids": half, "use_cache": False},
        {"past_key_values": cache},
    ):
        with LargestTensor() as largest:
            out = model.model(ids, **inputs).last_hidden_state
            if "past_key_values" not in inputs:
                out.sum().backward()
        assert largest.entries < length * length / 4, inputs.keys()
