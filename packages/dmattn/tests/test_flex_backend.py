"""The flex backend beyond the attention suite: its block tables, kernels, and why it refuses."""

import importlib.util
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dmattn.backends.flex as flex
from dmattn import (
    KeySelection,
    explain,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    sliding_window,
)
from dmattn.backends import registry
from dmattn.backends.flex import limits, torch_flex
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
    """Packed sequences; the 2nd has no rows, the 3rd no keys, the 5th more rows than keys."""
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


def sliding(window: int, seqlen_q: int = 300) -> Problem:
    selection = sliding_window(420, window, seqlen_q)
    return problem(seqlen_q, is_causal=True).with_lists(selection.lists, window, True)


def same_documents(**fields: Any) -> Problem:
    """Packed sequences; rows and keys have the same boundaries."""
    given = documents(**fields)
    bounds, longest = given.packing.cu_seqlens_k, given.packing.max_seqlen_k
    q = torch.randn(given.k.shape[0], *given.q.shape[1:])
    return given.replace(q=q, packing=Packing(bounds, bounds, longest, longest))


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
    "sliding window": lambda: sliding(130),
    "sliding window of one key": lambda: sliding(1, 420),
    "sliding window of all keys": lambda: sliding(420, 420),
    "packed": lambda: documents(is_causal=True),
    "packed, same boundaries": lambda: same_documents(is_causal=True),
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
    """bool (.., row blocks, key blocks): the pairs of blocks that a table lists under `name`."""
    number, index = getattr(table, f"{name}_num"), getattr(table, f"{name}_idx")
    listed = torch.arange(index.shape[-1]) < number[..., None]
    return torch.zeros_like(listed).scatter(-1, index.long(), listed)


@pytest.mark.parametrize("name", PROBLEMS)
def test_blocks(name: str) -> None:
    """All kept pairs lie in blocks that are listed, once each; full blocks are kept entirely."""
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
    exact = ("causal", "whole blocks", "more rows than keys", "key mask", "row mask")
    if name in exact or name.startswith("sliding"):
        assert torch.equal((partial | full).expand(any_kept.shape), any_kept)
        assert torch.equal(full.expand(all_kept.shape), all_kept)


def test_no_blocks_where_all_keys_are_kept() -> None:
    assert block_table(arrange(problem())) is None


def test_wrong_boundaries_stay_in_bounds() -> None:
    """On a GPU cu_seqlens are not checked, but mask_mod and block tables use them as indices."""
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
    """Calls take the path of GPUs, with blocks and torch.compile; graphs are run as they are."""
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
    assert graphs.count == 2  # serves all further batches, lengths and blocks
    for shape in ((4, 451, 900), (2, 200, 300), (7, 130, 1031)):
        call(*shape)
    assert graphs.count == 2


def test_each_kind_of_call_has_a_kernel_of_its_own(graphs: Compilations) -> None:
    """If they shared a function, torch.compile would take the softcap for a variable, and fail."""
    given = problem(40, 50)
    for softcap in (2.0, 3.0, 4.0):
        flash_dmattn_func(given.q, given.k, given.v, softcap=softcap, backend="flex")
    assert graphs.count == 3


def test_compiled_packed_call(graphs: Compilations) -> None:
    """With a mask and a bias for each row, which are indexed by the boundaries of the packing."""
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
        """The attributes of a CUDA tensor that are looked at."""

        is_cuda, device, shape = True, torch.device("cuda:0"), (2, 300, 4, 48)

        def __init__(self, dtype: torch.dtype) -> None:
            self.dtype = dtype

        def numel(self) -> int:
            return 0

    def reasons(dtype: torch.dtype) -> list[Exception]:
        return backend.unsupported(problem()._replace(q=OnCuda(dtype)))

    monkeypatch.setattr(limits, "_shared_bytes", lambda device: H200_BYTES)
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
    # If no backend serves a call, the user is told the dtype, who would serve it, and the way out.
    q: Any = OnCuda(torch.float32)
    q.stride = lambda dim: 1
    monkeypatch.setattr(registry, "BACKENDS", [registry.named("cuda"), backend])
    with pytest.raises(TypeError) as error:
        registry.choose(problem()._replace(q=q))
    for part in ("got dtype torch.float32", "torch.autocast", "backend 'flex'", "pip install"):
        assert part in str(error.value)
    flex._has_triton.cache_clear()
    notes = backend.slow_paths(in_window(5)._replace(q=q, bias=torch.zeros(1, 1, 1, 420)))
    for part in ("compile", "forward once more", "padded to 64", "whole blocks of 128", "atomics"):
        assert any(part in note for note in notes), part


H200_BYTES = 232448  # shared memory that a block may have


def on_gpu(head_dim: int = 64, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Problem:
    """A problem of given sizes on the meta device, without memory."""
    sizes = {"batch": 1, "seqlen_q": 200, "seqlen_k": 300, "heads": 4} | {
        name: fields.pop(name)
        for name in ("batch", "seqlen_q", "seqlen_k", "heads") & fields.keys()
    }
    q, k, v = (
        torch.empty(sizes["batch"], sizes[n], sizes["heads"], head_dim, dtype=dtype, device="meta")
        for n in ("seqlen_q", "seqlen_k", "seqlen_k")
    )
    return Problem(q, k, v, **fields)


@pytest.mark.parametrize("fields,name", [
    ({"heads": 70_000, "seqlen_q": 1, "seqlen_k": 3}, "query: got 70000 pairs"),
    ({"batch": 9000, "heads": 8, "seqlen_q": 1, "seqlen_k": 3}, "query: got 72000 pairs"),
    ({"head_dim": 128, "heads": 1, "seqlen_k": 2**24 + 1000}, "key: got .* value: got "),
    ({"head_dim": 72, "heads": 1, "seqlen_k": 2**24 + 1000}, "key: got .* value: got "),
    ({"bias": torch.empty(1, 1, 2**16, 2**15, device="meta")}, "attn_bias: got "),
    ({"mask": torch.empty(1, 1, 2**16, 2**15, device="meta")}, "attn_mask: got "),
])  # fmt: skip
def test_what_exceeds_the_kernels(
    fields: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets have 32 bits and grids 65535 places; larger calls are refused before any launch."""
    monkeypatch.setattr(limits, "_shared_bytes", lambda device: H200_BYTES)
    reasons = limits.refusals(on_gpu(**fields))
    assert all(isinstance(reason, ValueError) for reason in reasons)
    assert re.search(name, " ".join(map(str, reasons)))


def test_what_the_kernels_still_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_shared_bytes", lambda device: H200_BYTES)
    expanded = torch.empty(1, 1, 1, 2**15, device="meta").expand(1, 4, 2**16, -1)
    for given in (
        on_gpu(128, heads=1, seqlen_k=2**24 - 1),
        on_gpu(heads=65535, seqlen_q=1, seqlen_k=3),
        on_gpu(mask=expanded),
    ):
        assert limits.refusals(given) == []
    far = on_gpu()
    wide = torch.empty(1, 200, 4, 2**22, dtype=torch.bfloat16, device="meta")[..., :64]
    (reason,) = limits.refusals(far._replace(q=wide))
    assert str(reason).startswith("query: got a tensor that takes ")


def test_blocks_fit_the_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own blocks of 128 x 128 did not fit on an H200 with a bias in float32."""
    bias, mask = (torch.empty(1, 1, 200, 300, device="meta", dtype=t) for t in (None, torch.bool))
    assert limits.blocks_for(on_gpu(is_causal=True), H200_BYTES) == limits.Blocks()
    for given in (on_gpu(bias=bias), on_gpu(bias=bias, mask=mask), on_gpu(128, bias=bias)):
        blocks = limits.blocks_for(given, H200_BYTES)
        assert blocks is not None
        sizes = dict(blocks.options)
        row, read = given.q.shape[-1] * 2, 4 + (given.mask is not None)
        rows, keys = sizes["BLOCK_M"], sizes["BLOCK_N"]
        assert rows * row + 3 * (2 * keys * row + rows * keys * read) < H200_BYTES
        assert BLOCK % rows == BLOCK % keys == 0
        assert sizes["BLOCK_N1"] % sizes["BLOCK_M1"] == sizes["BLOCK_M2"] % sizes["BLOCK_N2"] == 0
    # If no blocks fit on a GPU, an error says so before anything is compiled.
    monkeypatch.setattr(limits, "_shared_bytes", lambda device: 64 * 1024)
    (reason,) = limits.refusals(on_gpu(256, torch.float32))
    assert "got head_dim 256 and dtype torch.float32" in str(reason)
    assert limits.refusals(on_gpu(64)) == []


def test_causal_blocks_are_kept(graphs: Compilations, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block table of a call serves the next, unless anything but causality hides keys."""
    made = []
    monkeypatch.setattr(
        torch_flex, "block_table", lambda given: made.append(given) or block_table(given)
    )
    given = problem(200, 301)
    mask = torch.rand(1, 1, 1, 301) < 0.5
    for expected, options in (
        (1, {}),
        (1, {"softcap": 3.0}),
        (2, {"attn_mask": mask}),
        (3, {"attn_mask": mask}),
    ):
        found, wanted = (
            flash_dmattn_func(given.q, given.k, given.v, is_causal=True, **options, backend=backend)
            for backend in ("flex", "cpu")
        )
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert len(made) == expected


def test_blocks_of_a_selection_are_kept(
    graphs: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block table is kept as long as the selection is the same object, and unchanged."""
    made: list[None] = []
    monkeypatch.setattr(
        torch_flex, "block_table", lambda given: made.append(None) or block_table(given)
    )
    given = problem(300, 300)

    def check(selection: KeySelection, expected: int) -> None:
        found, wanted = (
            flash_dmattn_func(*given[:3], is_causal=True, selection=selection, backend=backend)
            for backend in ("flex", "cpu")
        )
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert len(made) == expected

    ends = torch.arange(300, dtype=torch.int32)[None, None] + 20
    selection = KeySelection.from_intervals(ends, reach=300)
    check(selection, 1)
    check(selection, 1)
    selection.end.fill_(300)
    selection.lists.count.zero_()  # lists of other kernels: only `end` counts here
    found = flash_dmattn_func(*given[:3], is_causal=True, selection=selection, backend="flex")
    wanted = flash_dmattn_func(*given[:3], is_causal=True, backend="cpu")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert len(made) == 2
    for number in range(3, 20):  # new ones, perhaps at the addresses of others
        ends = torch.arange(300, dtype=torch.int32)[None, None] + number
        check(KeySelection.from_intervals(ends, reach=300), number)
    assert len(torch_flex._TABLES) < 8  # tables of selections that are gone are not held


def test_what_is_known_of_a_selection_is_not_read() -> None:
    """A sliding window is read as a number, not as intervals; of packed rows only `first` is read.

    `first` has the first key of each row's sequence. The last is the row's own index here.
    """
    given = problem(420, 420)
    window = sliding_window(420, 130)
    seen: list[Problem] = []

    class Watched(flex.FlexBackend):
        def forward(self, problem: Problem, for_backward: bool = True) -> Any:
            seen.append(problem)
            return super().forward(problem, for_backward)

    def call(attend: Any) -> tuple[Problem, Any]:
        found, wanted = (attend(backend) for backend in ("flex", "cpu"))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        arranged = arrange(seen[-1])
        return seen[-1], operands(seen[-1], arranged, None, (False, False))[1]

    padding = (torch.arange(420) >= 7)[None, None, None]
    options = {"is_causal": True, "selection": window}
    with pytest.MonkeyPatch.context() as patch:
        names = [b if b.name != "flex" else Watched() for b in registry.BACKENDS]
        patch.setattr(registry, "BACKENDS", names)
        known, read = call(lambda b: flash_dmattn_func(*given[:3], **options, backend=b))
        assert (known.sliding, known.keeps_own, list(read)) == (130, True, [None] * len(read))
        # If keys are hidden as well, the window is read as intervals again.
        known, read = call(lambda b: flash_dmattn_func(*given[:3], padding, **options, backend=b))
        assert (known.sliding, known.keeps_own) == (0, False) and read.end is not None
        packed = same_documents()
        _, read = call(
            lambda b: flash_dmattn_varlen_func(
                *packed[:3], *packed.packing, is_causal=True, backend=b
            )
        )
        assert read.first is not None and read.last is None


def test_packed_intervals_are_kept(graphs: Compilations, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block table of unchanged boundaries is kept.

    It is not kept in operators, where boundaries may be changed without a new version.
    """
    made: list[None] = []
    monkeypatch.setattr(
        torch_flex, "block_table", lambda given: made.append(None) or block_table(given)
    )
    given = same_documents()
    bounds, _, *longest = given.packing
    q = given.q.clone().requires_grad_()

    def check(expected: int) -> None:
        found, wanted = (
            flash_dmattn_varlen_func(
                q, *given[1:3], bounds, bounds, *longest, is_causal=True, backend=backend
            )
            for backend in ("flex", "cpu")
        )
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert len(made) == expected

    check(1)
    check(1)
    bounds[1] += 30
    check(2)

    def within(bounds: Tensor) -> Tensor:
        packing = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        longest = {"max_seqlen_q": 300, "max_seqlen_k": 300}
        options = {"is_causal": True, "backend": "flex", **packing, **longest}
        return torch.ops.dmattn.fwd(given.q, *given[1:3], **options)[0]

    first = within(bounds)
    with torch.autograd._unsafe_preserve_version_counter(bounds):  # as inductor's kernels do
        bounds[1] += 30
    assert not torch.equal(within(bounds), first)
    assert len(made) == 4


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
    assert limits.kernel_head_dim(head_dim) == size


def test_lse_of_the_largest_logits() -> None:
    """The forward runs again with shifted scores: in base 2 lse would overflow or be rounded."""
    q, v = torch.zeros(1, 3, 1, 8), torch.randn(1, 200, 1, 8)
    for constant in (1e4, -1e8, torch.finfo(torch.float32).max, torch.finfo(torch.float32).min):
        bias = torch.full((1, 1, 3, 200), constant)
        out, lse = flash_dmattn_func(
            q, torch.zeros_like(v), v, None, bias, return_lse=True, backend="flex"
        )
        wanted = torch.tensor(constant, dtype=torch.float64) + math.log(200)
        torch.testing.assert_close(lse.double(), wanted.expand(1, 1, 3), rtol=6e-8, atol=0)
        torch.testing.assert_close(out, v.mean(1, keepdim=True).expand(out.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("low", [torch.finfo(torch.bfloat16).min, -1.7e10, -300.0])
def test_sinks_of_rows_with_nothing_else(low: float, dtype: torch.dtype) -> None:
    """Rows that a mask of very negative numbers hides, beside others that see some keys."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 3, 2, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    bias = torch.full((1, 1, 3, 3), low, dtype=dtype)
    bias[..., 1, :2] = torch.randn(2)
    sinks = torch.randn(2, dtype=dtype, requires_grad=True)
    inputs = (q, k, v, bias.requires_grad_(), sinks)
    found, wanted = (
        torch.autograd.grad(
            flash_dmattn_func(q, k, v, attn_bias=bias, sinks=sinks, backend=name).square().sum(),
            inputs,
        )
        for name in ("flex", "cpu")
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
