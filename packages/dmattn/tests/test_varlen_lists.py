"""Packed sequences with a mask or a bias, which some backends compute faster over lists of keys.

No backend of the CPU does; here they are made to claim it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_releases import TRACES_EXTREMES, exports_any_length

from dmattn import explain_varlen, flash_dmattn_varlen_func, varlen
from dmattn.backends import registry
from dmattn.backends.cuda import kernels
from dmattn.problem import Problem

# Empty sequences, single rows, and lengths around multiples of 128 rows.
LENGTHS = (0, 1, 127, 128, 129, 600, 0, 255, 257, 900, 1, 64)
TOTAL, LONGEST = sum(LENGTHS), max(LENGTHS)
CU_SEQLENS = torch.tensor((0, *LENGTHS)).cumsum(0, dtype=torch.int32)


@pytest.fixture
def prefers_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every backend claim to prefer lists, however small the call."""
    monkeypatch.setattr(registry, "prefers_lists", lambda *_: True)
    monkeypatch.setattr(varlen, "_FEWEST_ENTRIES", 0)


@pytest.fixture
def listed(prefers_lists: None, monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """The problems that reach a backend that prefers lists."""
    seen: list[Problem] = []
    attend = varlen.attend

    def record(problem: Problem, *others: Any) -> tuple[Tensor, Tensor]:
        seen.append(problem)
        return attend(problem, *others)

    monkeypatch.setattr(varlen, "attend", record)
    return seen


def _operands(heads_of_bias: int | None, heads_of_mask: int | None) -> dict[str, Tensor | None]:
    draw = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).requires_grad_()

    mask = None
    if heads_of_mask is not None:
        mask = torch.rand((TOTAL, heads_of_mask), generator=draw) < 0.7
        mask[:200] = False  # rows without keys
    bias = None if heads_of_bias is None else normal(TOTAL, heads_of_bias)
    operands = [normal(TOTAL, heads, 64) for heads in (4, 2, 2)]
    return dict(zip(("query", "key", "value"), operands, strict=True)) | {
        "attn_mask": mask,
        "attn_bias": bias,
    }


def _results(given: dict[str, Tensor | None], **options: Any) -> dict[str, Tensor]:
    """out, lse, and the gradients of a weighted sum of out plus a function of lse."""
    bounds = {"cu_seqlens_q": CU_SEQLENS, "cu_seqlens_k": CU_SEQLENS}
    longest = {"max_seqlen_q": LONGEST, "max_seqlen_k": LONGEST}
    arguments: dict[str, Any] = given | bounds | longest | {"is_causal": True} | options
    out, lse = flash_dmattn_varlen_func(**arguments, return_lse=True)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    seen = lse.masked_fill(lse == -torch.inf, 0)
    leaves = {name: t for name, t in arguments.items() if isinstance(t, Tensor) and t.requires_grad}
    grads = torch.autograd.grad((out * weights).sum() + seen.cos().sum(), list(leaves.values()))
    return {"out": out, "lse": lse} | dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize(
    "heads_of_bias, heads_of_mask",
    [(1, None), (2, None), (4, None), (None, 1), (None, 4), (2, 2), (4, 1), (2, 4)],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gives_the_same(
    listed: list[Problem],
    monkeypatch: pytest.MonkeyPatch,
    heads_of_bias: int | None,
    heads_of_mask: int | None,
    deterministic: bool,
) -> None:
    given = _operands(heads_of_bias, heads_of_mask)
    found = _results(given, deterministic=deterministic)
    assert listed[-1].packing is None and listed[-1].key_lists is not None
    monkeypatch.undo()
    wanted = _results(given, deterministic=deterministic)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4, msg=name)


def test_with_sinks_and_a_window_longer_than_all(
    listed: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window longer than every sequence hides no key, which leaves a call with a bias alone."""
    given = _operands(2, None) | {"sinks": torch.randn(4).requires_grad_()}
    found = _results(given, window_size=1000)
    assert listed[-1].key_lists is not None
    monkeypatch.undo()
    for name, value in _results(given, window_size=1000).items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4, msg=name)


def test_writes_into_out(listed: list[Problem]) -> None:
    given = {name: None if t is None else t.detach() for name, t in _operands(2, None).items()}
    bounds = CU_SEQLENS, CU_SEQLENS, LONGEST, LONGEST
    q, k, v = (given[name] for name in ("query", "key", "value"))
    out = torch.empty(TOTAL, 4, 64)
    found = flash_dmattn_varlen_func(
        q, k, v, *bounds, attn_bias=given["attn_bias"], is_causal=True, out=out
    )
    assert found is out and listed[-1].key_lists is not None
    again = flash_dmattn_varlen_func(q, k, v, *bounds, attn_bias=given["attn_bias"], is_causal=True)
    assert torch.equal(out, again)


@pytest.mark.parametrize(
    "change",
    [
        {"attn_bias": None},
        {"is_causal": False},
        {"softcap": 20.0},
        {"cu_seqlens_k": CU_SEQLENS + torch.tensor([0] * len(LENGTHS) + [-1], dtype=torch.int32)},
        {"attn_bias": torch.zeros(TOTAL, 4, LONGEST)},
        # Lists of so many keys would take half as much memory as operands of this head_dim.
        {"head_dim": 8, "max_seqlen_k": TOTAL},
    ],
    ids=["neither", "not causal", "softcap", "other keys", "bias with rows", "long lists"],
)
def test_stays_packed(listed: list[Problem], change: dict[str, Any]) -> None:
    given: dict[str, Any] = _operands(2, None)
    if "head_dim" in change:
        short = {name: given[name][..., : change["head_dim"]] for name in ("query", "key", "value")}
        change = {"max_seqlen_k": change["max_seqlen_k"]} | short
    if "cu_seqlens_k" in change:  # one key fewer
        change = change | {name: given[name][:-1] for name in ("key", "value", "attn_bias")}
    given |= {"cu_seqlens_q": CU_SEQLENS, "cu_seqlens_k": CU_SEQLENS, "is_causal": True}
    given |= {"max_seqlen_q": LONGEST, "max_seqlen_k": LONGEST} | change
    flash_dmattn_varlen_func(**given)
    assert listed[-1].packing is not None


@pytest.mark.parametrize("architecture, wanted", [("sm90", True), ("sm80", False)])
def test_the_kernels_for_hopper_ask_for_it(
    monkeypatch: pytest.MonkeyPatch, architecture: str, wanted: bool
) -> None:
    core = SimpleNamespace(device_architecture=lambda device: architecture)
    monkeypatch.setattr(kernels, "load_kernels", lambda: SimpleNamespace(core=core))
    kernels.has_kernels_of_hopper.cache_clear()
    cuda, device = registry.named("cuda"), torch.device("cuda:0")
    assert cuda.prefers_lists(device, torch.bfloat16) == wanted
    assert not cuda.prefers_lists(device, torch.float32)
    kernels.has_kernels_of_hopper.cache_clear()


def test_no_backend_of_the_cpu_asks_for_it() -> None:
    for wanted in (None, "cpu", "triton", "cuda"):
        assert not registry.prefers_lists(torch.device("cpu"), torch.float32, wanted)


def test_explain_says_so(listed: list[Problem]) -> None:
    given = {name: t for name, t in _operands(2, None).items() if name != "attn_mask"}
    bounds = CU_SEQLENS, CU_SEQLENS, LONGEST, LONGEST
    q, k, v = given["query"], given["key"], given["value"]
    said = explain_varlen(q, k, v, *bounds, attn_bias=given["attn_bias"], is_causal=True)
    assert "lists of each sequence's keys are made" in said
    assert "lists of each" not in explain_varlen(q, k, v, *bounds, is_causal=True)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, cu_seqlens: Tensor) -> Tensor:
    return flash_dmattn_varlen_func(
        *(q, k, v, cu_seqlens, None, LONGEST, LONGEST), attn_bias=bias, is_causal=True
    )


def _first(tokens: int) -> list[Tensor]:
    """The first tokens of the operands, in sequences of 100 tokens, and the boundaries."""
    given = _operands(2, None)
    operands = [given[name][:tokens].detach() for name in ("query", "key", "value", "attn_bias")]
    cu_seqlens = torch.arange(0, tokens + 100, 100, dtype=torch.int32).clamp(max=tokens)
    return [*operands, cu_seqlens]


@pytest.mark.usefixtures("prefers_lists")
def test_compiles_once_for_all_lengths() -> None:
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(_attend, fullgraph=True, dynamic=True, backend=keep)
    for tokens in (2000, 1000, 1500, 300, 2400, 170):
        operands = _first(tokens)
        torch.testing.assert_close(compiled(*operands), _attend(*operands))
    assert len(graphs) <= (1 if TRACES_EXTREMES else 4)
    assert all("select_keys" in graph for graph in graphs)


@exports_any_length
@pytest.mark.usefixtures("prefers_lists")
def test_exports_with_any_length() -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, bounds: Tensor) -> Tensor:
            return _attend(q, k, v, bias, bounds)

    tokens, bounds = torch.export.Dim("tokens", min=2), torch.export.Dim("bounds", min=2)
    shapes = (*[{0: tokens}] * 4, {0: bounds})
    program = torch.export.export(Attend(), tuple(_first(2000)), dynamic_shapes=shapes)
    assert any("select_keys" in str(node.target) for node in program.graph.nodes)
    for length in (2300, 101):
        operands = _first(length)
        torch.testing.assert_close(program.module()(*operands), _attend(*operands))
