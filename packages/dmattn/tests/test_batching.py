"""torch.func.vmap over dmattn: one call of each operator, with the results of a loop."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from dmattn import (
    DynamicMaskAttention,
    KeySelection,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    packed_documents,
    select_keys,
    sliding_window,
)
from dmattn.backends import sinks

ENTRIES = 3
NAMES = ("q", "k", "v", "mask", "bias", "sinks")
BOUNDS = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
OTHER_BOUNDS = torch.tensor([[0, 4, 4, 9], [0, 1, 5, 9], [0, 9, 9, 9]], dtype=torch.int32)
Function = Callable[..., tuple[Tensor, ...]]
Shapes = dict[str, tuple[int, ...] | None]


class _Counting(TorchDispatchMode):
    """Counts the calls of dmattn's operators that are left below all transforms of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "dmattn":
            self.calls[function.__name__.split(".")[0]] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def one_call(*names: str, each: int = 1) -> Iterator[None]:
    """Within it the named operators are called `each` times, none more often, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with _Counting() as counting:
            yield
    assert {name: counting.calls[name] for name in names} == dict.fromkeys(names, each)
    assert max(counting.calls.values()) == each


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def attend(*operands: Any, **options: Any) -> tuple[Tensor, ...]:
    q, k, v, mask, bias, sinks = operands
    out, lse = flash_dmattn_func(q, k, v, mask, bias, sinks=sinks, return_lse=True, **options)
    return out, lse.masked_fill(lse == -torch.inf, 0.0)


def attend_packed(*operands: Any, **options: Any) -> tuple[Tensor, ...]:
    q, k, v, mask, bias, sinks = operands
    out, lse = flash_dmattn_varlen_func(
        *(q, k, v, BOUNDS, None, 5, 5, mask, bias), sinks=sinks, return_lse=True, **options
    )
    return out, lse.masked_fill(lse == -torch.inf, 0.0)


def entry(operands: Sequence[Any], dims: Sequence[int | None], i: int) -> list[Any]:
    return [t if d is None else t.select(d, i) for t, d in zip(operands, dims, strict=True)]


def operands_of(shapes: Shapes, mapped: str, dim: int) -> tuple[Any, Any]:
    """Operands of these shapes, and their in_dims; mapped ones have their entries in `dim`."""
    torch.manual_seed(0)
    operands: list[Any] = []
    dims: list[int | None] = []
    for name in NAMES:
        shape = shapes.get(name)
        is_mapped = name in mapped.split() and shape is not None
        if shape is not None and is_mapped:
            at = len(shape) + 1 + dim if dim < 0 else dim
            shape = (*shape[:at], ENTRIES, *shape[at:])
        if shape is not None and name == "mask":
            operands.append(torch.rand(shape) < 0.8)
        else:
            operands.append(None if shape is None else normal(*shape))
        dims.append(dim if is_mapped else None)
    return operands, tuple(dims)


def check(function: Function, shapes: Shapes, mapped: str, dim: int = 0, **options: Any) -> None:
    """Values, gradients of each entry, and gradients summed over entries, against a loop."""
    operands, dims = operands_of(shapes, mapped, dim)
    learned = tuple(i for i, t in enumerate(operands) if t is not None and t.is_floating_point())

    def loss(*given: Any) -> Tensor:
        out, lse = function(*given, **options)
        return (out * out.detach().cos()).sum() + lse.square().sum()

    with one_call("fwd"):
        together = vmap(lambda *x: function(*x, **options), dims)(*operands)
    with one_call("fwd", "bwd"):
        grads = vmap(grad(loss, learned), dims)(*operands)

    leaves = [t.clone().requires_grad_() if i in learned else t for i, t in enumerate(operands)]
    with one_call("fwd", "bwd"):
        whole = vmap(loss, dims)(*leaves).sum()
        sums = torch.autograd.grad(whole, [leaves[i] for i in learned])
    looped = torch.stack([loss(*entry(leaves, dims, i)) for i in range(ENTRIES)]).sum()
    wanted = torch.autograd.grad(looped, [leaves[i] for i in learned])
    torch.testing.assert_close(sums, wanted, rtol=0, atol=1e-11)

    for i in range(ENTRIES):
        one = entry(operands, dims, i)
        alone = function(*one, **options)
        torch.testing.assert_close(tuple(t[i] for t in together), alone, rtol=0, atol=1e-12)
        one = [t.clone().requires_grad_() if j in learned else t for j, t in enumerate(one)]
        wanted = torch.autograd.grad(loss(*one), [one[j] for j in learned])
        torch.testing.assert_close(tuple(t[i] for t in grads), wanted, rtol=0, atol=1e-12)


DENSE = {"q": (2, 9, 4, 8), "k": (2, 9, 2, 8), "v": (2, 9, 2, 8)}
ALONE = {name: (1, *shape[1:]) for name, shape in DENSE.items()}
PACKED = {name: shape[1:] for name, shape in DENSE.items()}
MAPPED = ["q", "q k v", "k mask", "bias", "sinks", "mask sinks", "q k v mask bias sinks"]
mapped = pytest.mark.parametrize("mapped", MAPPED)


def mapped_among(*kinds: tuple[Any, Any, Any]) -> pytest.MarkDecorator:
    """Each (bias, mask, sinks) with each choice of mapped operands that names one of the call's."""
    cases = []
    for kind in kinds:
        given = {name for name, t in zip(("bias", "mask", "sinks"), kind, strict=True) if t}
        cases += [(*kind, m) for m in MAPPED if {"q", "k", "v", *given} & {*m.split()}]
    return pytest.mark.parametrize(("bias", "mask", "sinks", "mapped"), cases)


@mapped_among(
    (None, None, None),
    ((1, 1, 1, 9), (2, 1, 1, 9), None),
    ((1, 1, 1, 9), (1, 1, 9, 9), (4,)),
    ((2, 1, 1, 9), (1, 1, 9, 9), (4,)),
    ((1, 2, 9, 9), (1, 4, 1, 9), None),
    ((1, 1, 9, 1), None, (4,)),
    ((2, 4, 9, 9), (2, 2, 9, 1), None),
)
def test_masks_and_biases_of_every_shape(bias: Any, mask: Any, sinks: Any, mapped: str) -> None:
    """Also if all entries share a bias or sinks, whose gradient then is asked for by each entry."""
    shapes = {**DENSE, "bias": bias, "mask": mask, "sinks": sinks}
    check(attend, shapes, mapped, is_causal=True)
    check(attend, shapes, mapped, softcap=2.0, deterministic=True)


@mapped
def test_entries_that_are_no_batch_of_their_own(mapped: str) -> None:
    """Batches of 1, as for gradients of each sample; then with one head and unequal lengths."""
    shapes = {**ALONE, "mask": (1, 1, 9, 9), "bias": (1, 1, 1, 9), "sinks": (4,)}
    check(attend, shapes, mapped, is_causal=True)
    one_head = {"q": (1, 5, 1, 8), "k": (1, 9, 1, 8), "v": (1, 9, 1, 3)}
    shapes = {**one_head, "mask": (1, 1, 5, 9), "bias": (1, 1, 1, 9), "sinks": (1,)}
    check(attend, shapes, mapped, is_causal=True)


@mapped
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("bias", "mask"), [((1, 1, 1, 9), (2, 9)), ((2, 2, 1, 9), (1, 4, 1, 9)), ((1, 2, 9, 9), (2, 9))]
)
def test_windows(
    bias: tuple[int, ...], mask: tuple[int, ...], is_causal: bool, mapped: str
) -> None:
    shapes = {**DENSE, "bias": bias, "mask": mask, "sinks": (4,)}
    check(attend, shapes, mapped, is_causal=is_causal, window_size=4)
    check(attend, shapes, mapped, is_causal=is_causal, window_size=20)


@mapped
@pytest.mark.parametrize("dim", [1, -1])
def test_entries_in_any_dimension(dim: int, mapped: str) -> None:
    shapes = {**DENSE, "bias": (2, 4, 9, 9), "mask": (2, 2, 1, 9), "sinks": (4,)}
    check(attend, shapes, mapped, dim, is_causal=True)


@mapped_among(
    (None, None, None),
    ((9, 1), (9, 4), None),
    ((9, 2), None, (4,)),
    ((9, 1, 5), (9, 2), (4,)),
    ((9, 4, 5), (9, 1, 5), None),
)
def test_packed_sequences(bias: Any, mask: Any, sinks: Any, mapped: str) -> None:
    shapes = {**PACKED, "bias": bias, "mask": mask, "sinks": sinks}
    check(attend_packed, shapes, mapped, is_causal=True)
    check(attend_packed, shapes, mapped)
    if bias and len(bias) == 2:
        check(attend_packed, shapes, mapped, is_causal=True, window_size=2)
        check(attend_packed, shapes, mapped, window_size=2)


@pytest.mark.parametrize("options", [{}, {"window_size": 2}])
def test_packed_sequences_of_other_boundaries_are_a_loop(options: dict[str, Any]) -> None:
    def one(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, bounds: Tensor) -> Tensor:
        return flash_dmattn_varlen_func(
            *(q, k, v, bounds, None, 9, 9), attn_bias=bias, is_causal=True, **options
        )

    def loss(*given: Tensor) -> Tensor:
        return one(*given).square().sum()

    torch.manual_seed(0)
    q, k, v, bias = normal(3, 9, 4, 8), normal(3, 9, 2, 8), normal(9, 2, 8), normal(9, 2)
    dims, learned = (0, 0, None, None, 0), (0, 1, 2, 3)
    with _Counting() as counting:
        together = vmap(one, dims)(q, k, v, bias, OTHER_BOUNDS)
    # A window turns the boundaries into key lists, over which all are one call.
    assert counting.calls == ({"select_keys": 3, "fwd": 1} if options else {"fwd": 3})
    grads = vmap(grad(loss, learned), dims)(q, k, v, bias, OTHER_BOUNDS)
    for i in range(ENTRIES):
        given = entry((q, k, v, bias, OTHER_BOUNDS), dims, i)
        torch.testing.assert_close(together[i], one(*given))
        leaves = [t.clone().requires_grad_() for t in given[:4]]
        wanted = torch.autograd.grad(loss(*leaves, given[4]), leaves)
        torch.testing.assert_close(tuple(g[i] for g in grads), wanted)


def test_wrong_boundaries_of_an_entry_are_refused() -> None:
    wrong = OTHER_BOUNDS.clone()
    wrong[1, 2] = 10
    one = vmap(lambda q, bounds: flash_dmattn_varlen_func(q, q, q, bounds, None, 9, 9))
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        one(normal(3, 9, 4, 8), wrong)
    with pytest.raises(ValueError, match="cu_seqlens"):
        vmap(lambda s, bounds: select_keys(s, 4, cu_seqlens=bounds).end)(normal(3, 1, 1, 9), wrong)


def test_vmap_in_vmap() -> None:
    """The two map other operands, and put entries in other dimensions of the results."""

    def one(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        return flash_dmattn_func(
            q, k, v, attn_bias=bias, is_causal=True, sinks=sinks, window_size=4
        )

    def both(function: Callable[..., Any], *out_dims: int) -> Callable[..., Any]:
        inner = vmap(function, (0, 0, None, 0, None), out_dims[0])
        return vmap(inner, (0, None, 0, None, 0), out_dims[1])

    torch.manual_seed(0)
    q, k, v = normal(3, 5, 2, 9, 4, 8), normal(5, 2, 9, 2, 8), normal(3, 2, 9, 2, 8)
    bias, sinks = normal(5, 1, 2, 1, 9), normal(3, 4)
    with one_call("fwd"):
        together = both(one, 1, -1)(q, k, v, bias, sinks)
    with one_call("fwd", "bwd"):
        grads = both(grad(lambda *x: one(*x).square().sum(), (0, 1, 2, 3, 4)), 0, 0)(
            *(q, k, v, bias, sinks)
        )
    for i in range(3):
        for j in range(5):
            leaves = [t.clone().requires_grad_() for t in (q[i, j], k[j], v[i], bias[j], sinks[i])]
            out = one(*leaves)
            torch.testing.assert_close(together[:, j, ..., i], out)
            wanted = torch.autograd.grad(out.square().sum(), leaves)
            torch.testing.assert_close(tuple(g[i, j] for g in grads), wanted)


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_jacobians(chunk_size: int | None) -> None:
    torch.manual_seed(0)
    shapes = {**DENSE, "bias": (1, 1, 1, 9), "sinks": (4,)}
    given = [t for t in operands_of(shapes, "", 0)[0] if t is not None]

    def row(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        return attend(q, k, v, None, bias, sinks, is_causal=True)[0][1, 5]

    leaves = [t.clone().requires_grad_() for t in given]
    out = row(*leaves)
    one = jacrev(row, argnums=tuple(range(5)), chunk_size=chunk_size)
    if chunk_size is None:
        with one_call("fwd", "bwd"):
            jacobians = one(*given)
    else:
        jacobians = one(*given)
    for h in range(4):
        for d in range(8):
            wanted = torch.autograd.grad(out[h, d], leaves, retain_graph=True)
            torch.testing.assert_close(tuple(j[h, d] for j in jacobians), wanted)


@pytest.mark.parametrize("window_size", [None, 5])
def test_gradients_of_each_sample_of_a_layer(window_size: int | None) -> None:
    torch.manual_seed(0)
    layer, x = DynamicMaskAttention(16, 4, 2, window_size=window_size), torch.randn(5, 20, 16)
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(layer, parameters, (x[None],))
        return out.square().sum()

    with one_call("fwd", "bwd"):
        found = vmap(grad(loss), (None, 0))(parameters, x)
    for i in range(5):
        layer.zero_grad()
        layer(x[i : i + 1]).square().sum().backward()
        for name, parameter in parameters.items():
            torch.testing.assert_close(found[name][i], parameter.grad)


def test_a_bias_in_half_precision_is_rounded_once() -> None:
    """Also where one head of the bias serves all heads, and has to be expanded for the call."""
    torch.manual_seed(0)
    shapes = {"q": (2, 9, 8, 8), "k": (2, 40, 8, 8), "v": (2, 40, 8, 8), "bias": (1, 1, 1, 40)}
    operands, dims = operands_of(shapes, "q bias", 0)
    low = [None if t is None else t.bfloat16() for t in operands]

    def loss(*given: Any) -> Tensor:
        return attend(*given)[0].double().pow(3).sum()

    found = vmap(grad(loss, 4), dims)(*low)
    wanted = torch.stack([grad(loss, 4)(*entry(low, dims, i)) for i in range(ENTRIES)])
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)
    # The heads are added in float32, in another order, which rarely changes the rounded result.
    assert (found != wanted).sum() <= 2


@pytest.mark.parametrize(("is_causal", "bounds"), [(False, None), (True, None), (True, [0, 4, 9])])
def test_selections(is_causal: bool, bounds: list[int] | None) -> None:
    torch.manual_seed(0)
    scores, mask = normal(3, 2, 2, 1, 9), torch.rand(3, 2, 9) < 0.8

    def choose(scores: Tensor, mask: Tensor) -> KeySelection:
        return select_keys(scores, 4, is_causal, mask, cu_seqlens=bounds)

    q, k, v = normal(3, 2, 9, 4, 8), normal(2, 9, 2, 8), normal(2, 9, 2, 8)

    def use(q: Tensor, selection: KeySelection) -> Tensor:
        return flash_dmattn_func(q, k, v, is_causal=is_causal, selection=selection)

    for dims in ((0, 0), (0, None), (None, 0)):
        given = [t if d == 0 else t[0] for t, d in zip((scores, mask), dims, strict=True)]
        with one_call("select_keys"):
            chosen = vmap(choose, dims)(*given)
        with one_call("fwd"):
            out = vmap(use)(q, chosen)
        for i in range(ENTRIES):
            alone = choose(*entry(given, dims, i))
            assert all(torch.equal(a[i], b) for a, b in zip(chosen.lists, alone.lists, strict=True))
            torch.testing.assert_close(out[i], use(q[i], alone), rtol=0, atol=1e-13)
    shared = choose(scores[0], mask[0])
    with one_call("fwd"):
        out = vmap(use, (0, None))(q, shared)
    torch.testing.assert_close(out[1], use(q[1], shared), rtol=0, atol=1e-13)


def test_selections_of_given_intervals_and_documents() -> None:
    torch.manual_seed(0)
    end = torch.randint(0, 10, (3, 1, 2, 9))
    with one_call("build_key_lists"):
        made = vmap(lambda end: KeySelection.from_intervals(end, reach=9).idx)(end)
    assert torch.equal(made[1], KeySelection.from_intervals(end[1], reach=9).idx)
    with one_call("build_key_lists"):
        made = vmap(lambda ids: packed_documents(document_ids=ids, window_size=4).end)(end[:, 0])
    assert torch.equal(made[1], packed_documents(document_ids=end[1, 0], window_size=4).end)
    made = vmap(lambda bounds: packed_documents(bounds, 4, key_len=9).end)(OTHER_BOUNDS)
    assert torch.equal(made[1], packed_documents(OTHER_BOUNDS[1], 4, key_len=9).end)
    scores = normal(3, 1, 1, 9)
    made = vmap(lambda s, bounds: select_keys(s, 4, cu_seqlens=bounds).end)(scores, OTHER_BOUNDS)
    assert torch.equal(made[1], select_keys(scores[1], 4, cu_seqlens=OTHER_BOUNDS[1]).end)


def test_stretches() -> None:
    """States pass through vmap like any tensors."""

    def both(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        parts = []
        state = None
        for part in (slice(0, 5), slice(5, 9)):
            given = (q[:, part], k[:, part], v[:, part], None, bias[..., part])
            options = {"is_causal": True, "window_size": 3, "return_state": True, "state": state}
            out, state = flash_dmattn_func(*given, **options)
            parts.append(out)
        return torch.cat(parts, 1)

    torch.manual_seed(0)
    shapes = ((3, 2, 9, 4, 8), (3, 2, 9, 2, 8), (3, 2, 9, 2, 8), (3, 2, 2, 1, 9))
    given = [normal(*shape) for shape in shapes]
    loss = grad(lambda *x: both(*x).square().sum(), (0, 1, 2, 3))
    with one_call("fwd", each=2):
        together = vmap(both)(*given)
    grads = vmap(loss)(*given)
    for i in range(ENTRIES):
        one = [t[i] for t in given]
        torch.testing.assert_close(together[i], both(*one))
        torch.testing.assert_close(tuple(g[i] for g in grads), loss(*one))


def test_operators_by_name() -> None:
    torch.manual_seed(0)
    q, k, v = normal(3, 2, 9, 4, 8), normal(2, 9, 2, 8), normal(2, 9, 2, 8)
    with one_call("fwd"):
        out, lse, rest = vmap(torch.ops.dmattn.fwd, (0, None, None))(q, k, v)
    alone = torch.ops.dmattn.fwd(q[1], k, v)
    torch.testing.assert_close((out[1], lse[1]), alone[:2], rtol=0, atol=1e-13)
    assert rest.shape == (3, 0)
    needs = [True, False, True, False, False]

    def back(q: Tensor, out: Tensor, lse: Tensor) -> Any:
        return torch.ops.dmattn.bwd(out, None, out, lse, None, needs, q, k, v)

    with one_call("bwd"):
        found = vmap(back)(q, out, lse)
    torch.testing.assert_close(
        tuple(g[1] for g in found), back(q[1], out[1], lse[1]), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vmap within a graph that serves any number of entries; gradients are taken outside of it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    k, bias = normal(2, 9, 2, 8), normal(1, 2, 1, 9)

    def each(q: Tensor, v: Tensor) -> Tensor:
        def one(q: Tensor, v: Tensor) -> Tensor:
            return flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, window_size=4)

        out: Tensor = vmap(one)(q, v)
        return out

    compiled = torch.compile(each, fullgraph=True, dynamic=True, backend=backend)
    for n in (3, 5):
        leaves = [normal(n, 2, 9, h, 8).requires_grad_() for h in (4, 2)]
        out = compiled(*leaves)
        torch.testing.assert_close(out, each(*leaves))
        found = torch.autograd.grad(out.square().sum(), leaves)
        wanted = torch.autograd.grad(each(*leaves).square().sum(), leaves)
        torch.testing.assert_close(found, wanted)
    calls = Mock(side_effect=sinks.forward)  # modes do not see calls within a graph
    monkeypatch.setattr(sinks, "forward", calls)
    compiled(*leaves)
    assert calls.call_count == 1


def test_no_entries() -> None:
    q, k = normal(0, 2, 9, 4, 8), normal(2, 9, 2, 8)
    bias = normal(2, 2, 1, 9)

    def loss(q: Tensor, bias: Tensor) -> Tensor:
        return flash_dmattn_func(q, k, k, attn_bias=bias, is_causal=True, window_size=4).sum()

    found = vmap(grad(loss, (0, 1)), (0, None))(q, bias)
    assert [g.shape for g in found] == [q.shape, (0, *bias.shape)]
    with pytest.raises(ValueError, match="vmap: got a dimension of 0 entries"):
        vmap(lambda q, s: flash_dmattn_func(q, k, k, sinks=s))(q, normal(0, 4))
    with pytest.raises(ValueError, match="vmap: got a dimension of 0 entries"):
        vmap(lambda b: packed_documents(b, 4, key_len=9).end)(OTHER_BOUNDS[:0])


def test_sinks_of_one_head_beside_packed_sequences() -> None:
    """The heads of all entries are put side by side, and sinks then have a number for each."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, ENTRIES, 9, 1, 8)
    one = torch.randn(1)
    for given, dim in ((one, None), (one.expand(ENTRIES, 1), 0)):

        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
            return flash_dmattn_varlen_func(q, k, v, BOUNDS, BOUNDS, 5, 5, sinks=sinks)

        found = vmap(attend, in_dims=(0, 0, 0, dim))(q, k, v, given)
        wanted = torch.stack([attend(*x, one) for x in zip(q, k, v, strict=True)])
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)


def test_a_bias_with_rows_beside_a_selection_learns_from_outside_of_vmap() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, ENTRIES, 1, 7, 2, 8)
    bias = torch.randn(ENTRIES, 1, 1, 7, 7, requires_grad=True)
    selection = sliding_window(7, 3)

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return flash_dmattn_func(q, k, v, attn_bias=bias, selection=selection, is_causal=True)

    weights = torch.randn(ENTRIES, 1, 7, 2, 8)
    (found,) = torch.autograd.grad((vmap(attend)(q, k, v, bias) * weights).sum(), bias)
    each = [attend(*x) for x in zip(q, k, v, bias, strict=True)]
    (wanted,) = torch.autograd.grad((torch.stack(each) * weights).sum(), bias)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("of_bias, of_mask", [(1, 0), (0, 1), (1, 1), (0, 0)])
def test_a_window_of_an_empty_batch(of_bias: int, of_mask: int) -> None:
    q, k, v = torch.randn(3, ENTRIES, 0, 9, 2, 8)
    bias = torch.randn(ENTRIES, of_bias, 2, 1, 9)
    mask = torch.rand(ENTRIES, of_mask, 1, 1, 9) < 0.5

    def attend(*given: Tensor) -> Tensor:
        return flash_dmattn_func(*given, is_causal=True, window_size=3)

    assert vmap(attend)(q, k, v, mask, bias).shape == (ENTRIES, 0, 9, 2, 8)
