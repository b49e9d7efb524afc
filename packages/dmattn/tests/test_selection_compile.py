"""Selections and masks under torch.compile and torch.export, on the CPU.

That one graph serves all lengths is tested on every device, in tests/attention/test_one_graph.py.
"""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch_releases import exports_any_length

from dmattn import (
    KeySelection,
    create_mask,
    dynamic_mask,
    flash_dmattn_func,
    packed_documents,
    select_keys,
    sliding_window,
    top_window_mask,
)


def test_masks_of_fixed_size_in_buffers() -> None:
    """Masks have a fixed size, beside a dynamic length that happens to be equal to it."""

    class Masks(nn.Module):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.rand(2, 12) < 0.7)

        def forward(self, bias: Tensor) -> tuple[Tensor, ...]:
            key_len = bias.shape[-1]
            return (
                create_mask(bias, self.mask, 2, key_len, key_len, 3),
                dynamic_mask(bias, self.mask[:, None, None], 3),
                top_window_mask(bias, 3, attention_mask=self.mask),
                select_keys(bias, 3, attn_mask=self.mask).end,
                sliding_window(key_len, 3, attn_mask=self.mask).end,
            )

    torch._dynamo.reset()
    module, bias = Masks(), torch.randn(2, 2, 1, 12)
    compiled = torch.compile(module, dynamic=True, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(bias), module(bias), strict=True):
        assert torch.equal(a, b)


def test_compiled_functions_refuse_wrong_boundaries_on_the_cpu() -> None:
    torch._dynamo.reset()
    select = torch.compile(
        lambda b, c: select_keys(b, 3, cu_seqlens=c).end, fullgraph=True, backend="aot_eager"
    )
    pack = torch.compile(
        lambda c: packed_documents(c, key_len=9).end, fullgraph=True, backend="aot_eager"
    )
    assert select(torch.randn(1, 1, 9), torch.tensor([0, 4, 9])).shape == (1, 1, 9)
    for wrong in ([0, 4, 8], [0, 10, 9], [1, 4, 9], [0, 4, 2**40]):
        bounds = torch.tensor(wrong)
        with pytest.raises(ValueError, match=r"cu_seqlens: got .*, wanted rising from 0 to 9"):
            select(torch.randn(1, 1, 9), bounds)
        with pytest.raises(ValueError, match=r"cu_seqlens: got .*, wanted rising from 0 to 9"):
            pack(bounds)


def test_packed_documents_say_what_a_compiler_needs() -> None:
    torch._dynamo.reset()
    pack = torch.compile(lambda c: packed_documents(c).end, fullgraph=True, backend="eager")
    # Older torch says no more than that there was an exception.
    words = "key_len: got None, wanted the number of keys|Observed exception"
    with pytest.raises(Exception, match=words):
        pack(torch.tensor([0, 4, 9]))


class Attention(nn.Module):
    """Attention over a selection that it makes itself, or over a given one."""

    def forward(self, x: Tensor, bias: Tensor, selection: KeySelection | None = None) -> Tensor:
        if selection is None:
            selection = select_keys(bias, 40)
        out: Tensor = flash_dmattn_func(
            x, x, x, attn_bias=bias, is_causal=True, selection=selection
        )
        return out


class Lengths(nn.Module):
    """Functions that take a length as a number."""

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        length = x.shape[1]
        ends = sliding_window(length, 16).end, select_keys(bias, 16, query_len=length).end
        return *ends, create_mask(bias, None, 1, length, length, 16)


@exports_any_length
def test_lengths_are_exported_without_an_upper_bound() -> None:
    def inputs(length: int) -> tuple[Tensor, Tensor]:
        return torch.randn(1, length, 2, 8), torch.randn(1, 2, 1, length)

    length = Dim("length", min=17)
    program = torch.export.export(
        Lengths(), inputs(40), dynamic_shapes=({1: length}, {3: length})
    ).module()
    for n in (17, 128, 300):
        given = inputs(n)
        for found, wanted in zip(program(*given), Lengths()(*given), strict=True):
            assert torch.equal(found, wanted)


@exports_any_length
@pytest.mark.parametrize("traced", [20, 300])
def test_export_for_all_lengths(traced: int) -> None:
    def inputs(length: int) -> tuple[Tensor, Tensor]:
        return torch.randn(1, length, 2, 8), torch.randn(1, 2, 1, length)

    length = Dim("length", min=6)
    shapes = ({1: length}, {3: length}, None)
    program = torch.export.export(
        Attention(), (*inputs(traced), None), dynamic_shapes=shapes
    ).module()
    for n in (6, 128, 129, 300):
        given = inputs(n)
        torch.testing.assert_close(program(*given, None), Attention()(*given))


def test_a_selection_is_an_input_of_exported_programs() -> None:
    def inputs(length: int) -> tuple[Any, ...]:
        bias = torch.randn(1, 2, 1, length)
        return torch.randn(1, length, 2, 8), bias, select_keys(bias, 40)

    given = inputs(300)
    fixed = torch.export.export(Attention(), given).module()
    torch.testing.assert_close(fixed(*given), Attention()(*given))
    with pytest.raises(Exception, match="exported input tree spec"):
        fixed(*given[:2], select_keys(given[1], 41))
    auto = Dim.AUTO
    shapes = ({1: auto}, {3: auto}, [{2: auto}, {2: auto, 3: auto}, {2: auto}, {2: auto}])
    program = torch.export.export(Attention(), given, dynamic_shapes=shapes).module()
    for n in (300, 200, 513):
        given = inputs(n)
        torch.testing.assert_close(program(*given), Attention()(*given))


def test_a_saved_program_takes_selections() -> None:
    """What is no tensor in a selection is the same after it has been saved as JSON."""

    class Attention(nn.Module):
        def forward(self, q: Tensor, selection: KeySelection) -> Tensor:
            return flash_dmattn_func(q, q, q, is_causal=True, selection=selection)

    q = torch.randn(1, 6, 2, 8)
    for selection in (sliding_window(6, 3), select_keys(q[:, :, :, 0].mT, 2)):
        saved = io.BytesIO()
        torch.export.save(torch.export.export(Attention(), (q, selection)), saved)
        saved.seek(0)
        found = torch.export.load(saved).module()(q, selection)
        torch.testing.assert_close(found, Attention()(q, selection))


@pytest.mark.parametrize("options", [{}, {"window_size": 3}, {"max_seqlen": 4}])
def test_documents_given_as_a_list_are_compiled(options: dict[str, int]) -> None:
    def attention(q: Tensor) -> Tensor:
        documents = packed_documents([0, 2, 6], **options)
        return flash_dmattn_func(q, q, q, is_causal=True, selection=documents)

    q = torch.randn(1, 6, 2, 8)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), attention(q))
