"""The flex backend beyond what the attention suite looks at: its blocks, kernels and reasons."""

import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dmattn.backends.flex as flex
from dmattn import explain, flash_dmattn_func, flash_dmattn_varlen_func
from dmattn.backends import registry
from dmattn.backends.flex import attention, torch_flex
from dmattn.backends.flex.blocks import BLOCK, BlockTable, block_table
from dmattn.backends.flex.operands import arrange, keep, operands
from dmattn.dispatch import select
from dmattn.problem import Packing, Problem

torch.manual_seed(0)


def problem(seqlen_q: int = 300, seqlen_k: int = 420, batch: int = 2, **fields: Any) -> Problem:
    q, k, v = (
        torch.randn(batch, n, heads, 8)
        for n, heads in ((seqlen_q, 4), (seqlen_k, 2), (seqlen_k, 2))
    )
    return Problem(q, k, v, **fields)


def documents(**fields: Any) -> Problem:
    """Packed; the 2nd has no rows, the 3rd no keys, the 5th more rows than keys."""
    rows, keys = [70, 0, 9, 230, 200], [90, 40, 0, 300, 130]
    bounds = [
        torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32)
        for n in (rows, keys)
    ]
    dense = problem(sum(rows), sum(keys), 1)
    packed = {name: getattr(dense, name)[0] for name in ("q", "k", "v")}
    packing = Packing(bounds[0], bounds[1], max(rows), max(keys))
    return Problem(**packed, packing=packing, **fields)


def in_window(window: int, is_causal: bool = True) -> Problem:
    given = problem(is_causal=is_causal)
    lists = select(torch.randn(2, 2, 420), None, window, 300, is_causal)
    return given.replace(key_lists=lists)


PROBLEMS = {
    "causal": lambda: problem(is_causal=True),
    "more rows than keys": lambda: problem(420, 300, is_causal=True),
    "whole blocks": lambda: problem(256, 384, is_causal=True),
    "key mask": lambda: problem(mask=torch.arange(420)[None, None, None] >= 200),
    "expanded key mask": lambda: problem(mask=(torch.rand(420) < 0.01).expand(2, 4, 300, 420)),
    "row mask": lambda: problem(mask=(torch.arange(300) < 70)[None, None, :, None]),
    "dense mask": lambda: problem(mask=torch.rand(1, 2, 300, 420) < 1e-4, is_causal=True),
    "mask of one entry": lambda: problem(mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool)),
    "window": lambda: in_window(20),
    "window, not causal": lambda: in_window(20, False),
    "packed": lambda: documents(is_causal=True),
    "packed, not causal": documents,
    "packed, rows with masks": lambda: documents(mask=torch.rand(2, 509, 300) < 0.3),
}


def pairs(given: Problem) -> Tensor:
    """bool (B, H, Sq, Sk): the pairs that mask_mod keeps."""
    arranged = arrange(given)
    spec, tensors = operands(given, arranged, None, (False, False))
    sizes = (*arranged.q.shape[:3], arranged.k.shape[2])
    b, h, row, key = (
        torch.arange(n).view([-1 if i == dim else 1 for i in range(4)])
        for dim, n in enumerate(sizes)
    )
    return keep(spec, tensors, (b, h, row, key)).expand(sizes)


def blocks_of(table: BlockTable, name: str) -> Tensor:
    """bool (.., row blocks, key blocks): what a table lists."""
    number, index = getattr(table, f"{name}_num"), getattr(table, f"{name}_idx")
    listed = torch.arange(index.shape[-1]) < number[..., None]
    return torch.zeros_like(listed).scatter(-1, index.long(), listed)


@pytest.mark.parametrize("name", PROBLEMS)
def test_blocks(name: str) -> None:
    """What rows keep lies in the blocks that are listed, once, and full ones are kept entirely."""
    given = PROBLEMS[name]()
    kept = pairs(given)
    table = block_table(arrange(given))
    assert table is not None
    extra = (-kept.shape[3] % BLOCK, -kept.shape[2] % BLOCK)
    by_block = torch.nn.functional.pad(kept, (0, extra[0], 0, extra[1]))
    by_block = by_block.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    any_kept, all_kept = by_block.any(5).any(3), by_block.all(5).all(3)
    partial, full = blocks_of(table, "partial"), blocks_of(table, "full")
    assert not (partial & full).any()
    assert not (any_kept & ~(partial | full)).any(), "a block that is not listed has kept pairs"
    assert not (full & ~all_kept).any(), "a full block has pairs that are not kept"
    # Where only the positions of rows and keys matter, no block is listed for nothing.
    if name in ("causal", "whole blocks", "more rows than keys", "key mask", "row mask"):
        assert torch.equal((partial | full).expand(any_kept.shape), any_kept)
        assert torch.equal(full.expand(all_kept.shape), all_kept)


def test_no_blocks_where_all_keys_are_kept() -> None:
    assert block_table(arrange(problem())) is None


def test_wrong_boundaries_stay_in_bounds() -> None:
    """On a GPU nobody checks cu_seqlens: mask_mod and the tables index by what they say."""
    given = documents(mask=torch.rand(2, 509, 300) < 0.3, is_causal=True)
    assert given.packing is not None
    for wrong in ([0, -7, 900, 2**31 - 1, -(2**31), 5], [560] * 6, [0] * 6):
        bounds = torch.tensor(wrong, dtype=torch.int32)
        packing = given.packing._replace(cu_seqlens_q=bounds, cu_seqlens_k=bounds.flip(0))
        broken = given.replace(packing=packing)
        pairs(broken)
        table = block_table(arrange(broken))
        assert table is not None
        for index in (table.partial_idx, table.full_idx):
            assert int(index.min()) >= 0 and int(index.max()) < index.shape[-1]


class Compilations:
    """A compiler for torch.compile that counts its graphs and runs them as they are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilations]:
    """Calls take the path of GPUs: blocks and torch.compile. Only what it compiles to differs."""
    counted = Compilations()
    monkeypatch.setattr(torch_flex, "COMPILER", counted)
    monkeypatch.setattr(torch_flex, "runs_compiled", lambda q: True)
    yield counted
    torch_flex._kernel_of.cache_clear()


def test_new_values_and_lengths_do_not_compile_again(graphs: Compilations) -> None:
    def call(batch: int, seqlen_q: int, seqlen_k: int, scores: Tensor | None = None) -> None:
        given = problem(seqlen_q, seqlen_k, batch)
        bias = torch.randn(batch, 2, 1, seqlen_k)
        arguments = (given.q, given.k, given.v, None, bias)
        options = {"is_causal": True, "softcap": 7.0, "window_size": 50}
        found = flash_dmattn_func(*arguments, **options, backend="flex")
        wanted = flash_dmattn_func(*arguments, **options, backend="cpu")
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)

    call(2, 300, 420)
    assert graphs.count == 1
    call(2, 300, 420)  # other numbers
    assert graphs.count == 1
    call(3, 450, 600)
    assert graphs.count == 2  # for all batches, lengths and numbers of blocks to come
    for shape in ((4, 451, 900), (2, 200, 300), (7, 130, 1031)):
        call(*shape)
    assert graphs.count == 2


def test_each_kind_of_call_has_a_kernel_of_its_own(graphs: Compilations) -> None:
    """In one function torch.compile would take the soft cap for a variable, and then fail."""
    given = problem(40, 50)
    for softcap in (2.0, 3.0, 4.0):
        flash_dmattn_func(given.q, given.k, given.v, softcap=softcap, backend="flex")
    assert graphs.count == 3


def test_compiled_packed_call(graphs: Compilations) -> None:
    """Masks and biases of each row's own, which are indexed by what packing says."""
    given = documents()
    assert given.packing is not None
    total_q, longest = given.q.shape[0], given.packing.max_seqlen_k
    arguments = (given.q, given.k, given.v, *given.packing)
    mask, bias = torch.rand(total_q, 4, longest) < 0.5, torch.randn(total_q, 2, longest)
    found, wanted = (
        flash_dmattn_varlen_func(
            *arguments, mask, bias, is_causal=True, return_lse=True, backend=name
        )
        for name in ("flex", "cpu")
    )
    assert graphs.count == 1
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = registry.named("flex")
    assert backend.unavailable() is None
    biased = problem(bias=torch.zeros(1, 1, 1, 420), deterministic=True)
    with pytest.raises(ValueError, match="deterministic: got True beside attn_bias"):
        flash_dmattn_func(*biased[:3], None, biased.bias, deterministic=True, backend="flex")
    assert registry.choose(biased).name == "cpu"

    class OnCuda:
        """As much of a CUDA tensor as is looked at."""

        is_cuda, device, shape = True, torch.device("cuda:0"), (2, 300, 4, 48)

        def __init__(self, dtype: torch.dtype) -> None:
            self.dtype = dtype

    def reasons(dtype: torch.dtype) -> list[Exception]:
        return backend.unsupported(problem()._replace(q=OnCuda(dtype)))

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    flex._has_triton.cache_clear()
    assert reasons(torch.float32) == []
    (wide,) = reasons(torch.float64)
    assert isinstance(wide, TypeError) and "got dtype torch.float64" in str(wide)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    flex._has_triton.cache_clear()
    (lack,) = reasons(torch.float32)
    for part in ("torch.float32", "backend 'flex'", "pip install triton"):
        assert part in str(lack)
    # What a user is told whom no backend serves: the dtype, who would serve it, and the way out.
    q: Any = OnCuda(torch.float32)
    q.stride = lambda dim: 1
    monkeypatch.setattr(registry, "BACKENDS", [registry.named("cuda"), backend])
    with pytest.raises(TypeError) as error:
        registry.choose(problem()._replace(q=q))
    for part in ("got dtype torch.float32", "torch.autocast", "backend 'flex'", "pip install"):
        assert part in str(error.value)
    flex._has_triton.cache_clear()
    notes = backend.slow_paths(in_window(5)._replace(q=q, bias=torch.zeros(1, 1, 1, 420)))
    for part in ("compile", "padded to 64", "whole blocks of 128", "atomics"):
        assert any(part in note for note in notes), part


def test_a_torch_without_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = (("torch.nn.attention.flex_attention", "not_there"),)
    monkeypatch.setattr(torch_flex, "_USED", gone)
    torch_flex.missing.cache_clear()
    wanted = f"torch {torch.__version__} has no torch.nn.attention.flex_attention.not_there"
    try:
        assert registry.named("flex").unavailable() == wanted
        given = problem()
        with pytest.raises(RuntimeError, match="which cannot run here: torch"):
            flash_dmattn_func(given.q, given.k, given.v, backend="flex")
    finally:
        torch_flex.missing.cache_clear()


def test_explain_names_the_formula() -> None:
    given = problem()
    text = explain(given.q, given.k, given.v, backend="flex")
    assert text.startswith("backend: flex\n  slow: FlexAttention has no kernel for the CPU")


@pytest.mark.parametrize("head_dim,size", [(1, 16), (16, 16), (17, 32), (80, 128), (256, 256)])
def test_kernel_head_dim(head_dim: int, size: int) -> None:
    assert attention.kernel_head_dim(head_dim) == size


def test_lse_of_the_largest_logits() -> None:
    """Computed once more with the scores shifted: in base 2 they would overflow or be rounded."""
    q, v = torch.zeros(1, 3, 1, 8), torch.randn(1, 200, 1, 8)
    for constant in (1e4, -1e8, torch.finfo(torch.float32).max, torch.finfo(torch.float32).min):
        bias = torch.full((1, 1, 3, 200), constant)
        out, lse = flash_dmattn_func(
            q, torch.zeros_like(v), v, None, bias, return_lse=True, backend="flex"
        )
        wanted = torch.tensor(constant, dtype=torch.float64) + math.log(200)
        torch.testing.assert_close(lse.double(), wanted.expand(1, 1, 3), rtol=6e-8, atol=0)
        torch.testing.assert_close(out, v.mean(1, keepdim=True).expand(out.shape))
