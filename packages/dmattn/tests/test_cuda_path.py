"""What the CUDA path hands to the kernels, in whose place a recorder stands, without a GPU.

The tensors are on the CPU; only `dmattn.backends.cuda` is called, which does not look at device
types.
"""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dmattn import DynamicMaskCache, select_keys, sliding_window
from dmattn.backends import registry, sinks
from dmattn.backends.cuda import CudaBackend, kernels
from dmattn.backends.cuda import attention as cuda
from dmattn.backends.cuda import cache as cuda_cache
from dmattn.backends.cuda import keys as cuda_keys
from dmattn.backends.cuda import selection as cuda_selection
from dmattn.cache_drafts import SPARE_ROWS, Rows
from dmattn.checks import check
from dmattn.key_lists import Selection
from dmattn.ops import cache, keys
from dmattn.ops import selection as ops_select
from dmattn.problem import Needs, Packing, Problem, Results, empty_results

FLOAT16, BFLOAT16, FLOAT32, BOOL, INT32, INT64 = 1, 2, 3, 4, 5, 6
WORKSPACE = 4096
# The arguments of the constructors, in their order.
SELECT_FIELDS = "device scores key_mask selection window seqlen_q is_causal cu_seqlens"
LISTS_FIELDS = "device selection seqlen_q reach needed"
APPEND_FIELDS = (
    "device k_new v_new score_new active k v score position seen evict q out softmax_scale softcap"
)
DRAFT_FIELDS = (
    "device q k_new v_new score_new k v score position seen draft out softmax_scale softcap"
)
COMMIT_FIELDS = "device draft count k v score position seen"


# The stub file of the compiled module, which has the names of its arguments.
KERNELS = Path(__file__).parents[2] / "dmattn-kernels"
BINDING = KERNELS / "src/dmattn_kernels/_core.pyi"


@functools.cache
def binding_arguments(struct: str) -> dict[str, bool]:
    """The arguments of a parameter struct's constructor, and whether each may be left out."""
    if not KERNELS.is_dir():
        pytest.skip("a source distribution comes without the sources of the kernels")
    tree = ast.parse(BINDING.read_text())
    (cls,) = (x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == struct)
    (init,) = (x for x in cls.body if isinstance(x, ast.FunctionDef) and x.name == "__init__")
    names = [argument.arg for argument in init.args.args[1:]]
    required = len(names) - len(init.args.defaults)
    return {name: i >= required for i, name in enumerate(names)}


class Recorder(ModuleType):
    """Stands in for dmattn_kernels._core: records all arguments, and writes to no tensor."""

    def __init__(self, abi: int = kernels.ABI_VERSION) -> None:
        super().__init__("dmattn_kernels._core")
        self.FLOAT16, self.BFLOAT16, self.FLOAT32, self.BOOL = FLOAT16, BFLOAT16, FLOAT32, BOOL
        self.INT32, self.INT64 = INT32, INT64
        self.abi = abi
        self.calls: list[dict[str, Any]] = []
        self.launches: list[tuple[int, int, int]] = []
        self.workspace = WORKSPACE

    def abi_version(self) -> int:
        return self.abi

    def FwdParams(self, *arguments: Any) -> "Recorder":
        return self._record_in_order("FwdParams", arguments)

    def BwdParams(self, *arguments: Any) -> "Recorder":
        return self._record_in_order("BwdParams", arguments)

    def SelectParams(self, *arguments: Any) -> "Recorder":
        return self._record(SELECT_FIELDS, arguments)

    def BuildKeyListsParams(self, *arguments: Any) -> "Recorder":
        return self._record(LISTS_FIELDS, arguments)

    def CacheAppendParams(self, *arguments: Any) -> "Recorder":
        return self._record(APPEND_FIELDS, arguments)

    def CacheDraftParams(self, *arguments: Any) -> "Recorder":
        return self._record(DRAFT_FIELDS, arguments)

    def CacheCommitParams(self, *arguments: Any) -> "Recorder":
        return self._record(COMMIT_FIELDS, arguments)

    def JoinKeysParams(self, *arguments: Any) -> "Recorder":
        return self._record_in_order("JoinKeysParams", arguments)

    def KeepKeysParams(self, *arguments: Any) -> "Recorder":
        return self._record_in_order("KeepKeysParams", arguments)

    def _record_in_order(self, struct: str, arguments: tuple[Any, ...]) -> "Recorder":
        """Record arguments that the compiled module takes by position, named as in its stub."""
        names = binding_arguments(struct)
        required = [name for name, optional in names.items() if not optional]
        assert len(required) <= len(arguments) <= len(names)
        self.calls.append({**dict.fromkeys(names), **dict(zip(names, arguments, strict=False))})
        return self

    def _record(self, names: str, arguments: tuple[Any, ...]) -> "Recorder":
        self.calls.append(dict(zip(names.split(), arguments, strict=True)))
        return self

    def enqueue(self, stream: int) -> int:
        if self.workspace == 0:
            self.launches.append((0, 0, stream))
        return self.workspace

    def launch(self, workspace: int, size: int, stream: int) -> None:
        self.launches.append((workspace, size, stream))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    core = Recorder()
    yield install(core, monkeypatch)
    kernels.load_kernels.cache_clear()


def install(core: Recorder, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    package = ModuleType("dmattn_kernels")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "dmattn_kernels", package)
    monkeypatch.setitem(sys.modules, "dmattn_kernels._core", core)
    monkeypatch.setattr(kernels, "checked_devices", {-1})  # the number torch gives to the CPU
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    kernels.load_kernels.cache_clear()
    return core


NOTHING, ALL = Needs(False, False, False, False), Needs(True, True, True, True)


def half(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def view(t: Tensor) -> tuple[int, int, torch.Size, tuple[int, ...]]:
    codes = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32, torch.bool: BOOL}
    codes |= {torch.int32: INT32, torch.int64: INT64}
    return t.data_ptr(), codes[t.dtype], t.shape, t.stride()


def test_views_are_passed_by_stride(recorder: Recorder) -> None:
    """Transposed, sliced and expanded inputs: the pointers and strides of the caller's tensors."""
    q = half(2, 4, 5, 64).transpose(1, 2)
    k = half(2, 7, 1, 64).expand(2, 7, 2, 64)
    v = half(2, 7, 4, 64)[:, :, ::2]
    mask = torch.ones(1, 1, 1, 7, dtype=torch.bool).expand(2, 4, 5, 7)
    bias = torch.randn(7, 4).t()[None, :, None, :]
    out, lse, _ = cuda.forward(Problem(q, k, v, mask, bias, None, 0.25, True, 3.0))
    (call,) = recorder.calls
    for name, t in (("q", q), ("k", k), ("v", v), ("mask", mask), ("bias", bias)):
        assert call[name] == view(t), name
    assert call["out"] == view(out) and out.is_contiguous() and out.shape == q.shape
    assert call["lse"] == view(lse) and lse.is_contiguous() and lse.shape == (2, 4, 5)
    settings = (call["device"], call["softmax_scale"], call["softcap"], call["is_causal"])
    assert settings == (-1, 0.25, 3.0, True)
    ((workspace, size, stream),) = recorder.launches
    assert workspace != 0 and (size, stream) == (WORKSPACE, 77)


def test_a_module_that_reads_tensors_gets_them(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "reads", lambda kind: kind is Tensor, raising=False)
    q, bias = half(2, 5, 4, 64), torch.randn(2, 2, 1, 5)
    lists = select_keys(bias, 3).lists
    problem = Problem(q, q, q, bias=bias, is_causal=True, key_lists=lists)
    results = cuda.forward(problem)
    grads = cuda.backward(problem, results, q, None, Needs(True, False, True, True))
    forward, backward = recorder.calls
    for call in recorder.calls:
        assert call["q"] is q and call["bias"] is bias and call["mask"] is None
        assert call["out"] is results.out and call["lse_rest"] is results.lse_rest
        assert all(a is b for a, b in zip(call["selection"], lists, strict=True))
    assert forward["cu_seqlens_q"] is None and backward["dk"] is None
    assert backward["dq"] is grads.q and backward["dbias"] is grads.bias


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("lists", [None, "chosen", "sliding"])
@pytest.mark.parametrize("needs", [Needs(True, True, True, True), Needs(False, True, False, False)])
def test_a_prepared_call_hands_on_what_the_first_one_did(
    recorder: Recorder, has_bias: bool, lists: str | None, needs: Needs
) -> None:
    q, k, v = half(2, 4, 5, 64).transpose(1, 2), half(2, 7, 2, 64), half(2, 7, 4, 64)[:, :, ::2]
    mask = torch.ones(1, 1, 1, 7, dtype=torch.bool)
    bias = torch.randn(2, 2, 1, 7) if has_bias else None
    problem = Problem(q, k, v, mask, bias, None, 0.25, True, 3.0, True)
    if lists == "chosen":
        problem = problem.with_lists(select_keys(torch.randn(2, 2, 1, 7), 3, query_len=5).lists)
    elif lists == "sliding":  # a window that reaches further than there are keys
        problem = problem.with_lists(sliding_window(7, 9, 5).lists, 9, True)
    operands = (*problem[:5], problem.key_lists)
    dout, dlse = half(2, 5, 4, 1).expand(2, 5, 4, 64), torch.randn(2, 5, 4).mT
    results = cuda.forward(problem)
    grads = cuda.backward(problem, results, dout, dlse, needs)
    call = CudaBackend().prepare(problem)
    assert call is not None
    again = call.forward(operands, True)
    few = call.backward(operands, again, dout, dlse, needs[:4])
    for wanted, found in zip((*results, *grads[:3]), (*again, *few[:3]), strict=True):
        if found is not None:
            assert wanted is not None and wanted.shape == found.shape
            assert wanted.stride() == found.stride() and wanted.dtype == found.dtype
    wanted_needs = (*needs[:3], needs.bias and has_bias)
    assert tuple(grad is not None for grad in few) == wanted_needs
    made = {"out", "lse", "lse_rest", "dout", "dlse", "dq", "dk", "dv", "dbias"}
    for first, second in zip(recorder.calls[:2], recorder.calls[2:], strict=True):
        assert first.keys() == second.keys()
        for name, value in first.items():  # new memory: all but the address
            start = 1 if name in made and value is not None else 0
            assert (value[1:] if start else value) == (second[name][1:] if start else second[name])
    assert {x["window"] for x in recorder.calls} == {7 if lists == "sliding" else 0}
    assert call.forward(operands, False)[2] is None


def test_calls_that_need_more_are_not_prepared(recorder: Recorder) -> None:
    problem = Problem(half(2, 5, 4, 64), half(2, 7, 2, 64), half(2, 7, 2, 64))
    packing = Packing(torch.tensor([0, 5]).int(), torch.tensor([0, 7]).int(), 5, 7)
    # Lists as they are made under torch.compile: more of them than there are row blocks.
    end, *lists = select_keys(torch.randn(2, 2, 1, 7), 3, query_len=5).lists
    spare = Selection(end, *ops_select._as_many(tuple(lists), 2))
    others = (
        problem._replace(sinks=torch.ones(4)),
        problem._replace(packing=packing),
        problem.replace(is_causal=True, key_lists=spare),
        problem._replace(q=half(2, 5, 4, 20), k=half(2, 7, 2, 20), v=half(2, 7, 2, 20)),
        problem._replace(q=half(2, 0, 4, 64)),
        problem._replace(k=half(2, 0, 2, 64), v=half(2, 0, 2, 64)),
    )
    assert CudaBackend().prepare(problem) is not None
    assert [CudaBackend().prepare(x) for x in others] == [None] * 6


@pytest.mark.parametrize("shape", [(1, 64, 4, 64), (64, 1, 4, 64), (4, 64, 64, 1), (2, 64, 4, 64)])
def test_results_of_prepared_calls_have_the_strides_of_others(
    recorder: Recorder, shape: tuple[int, ...]
) -> None:
    """For operands of any strides, which may have any value in dimensions of size 1."""
    q = half(*shape)
    for way in (q, q.transpose(0, 1), q.transpose(1, 3), q[::2][:1], q[:1].expand(2, *shape[1:])):
        if way.stride(-1) != 1 or way.shape[-1] % 8 != 0:
            continue
        problem = Problem(way, way, way)
        call = CudaBackend().prepare(problem)
        assert call is not None
        operands = (way, way, way, None, None, None)
        results = cuda.forward(problem)
        again = call.forward(operands, True)
        needs = Needs(True, True, True, False)
        grads = cuda.backward(problem, results, results.out, None, needs)
        few = call.backward(operands, again, again[0], None, needs[:4])
        for wanted, found in zip((*results[:2], *grads[:3]), (*again[:2], *few[:3]), strict=True):
            assert found is not None and found.stride() == wanted.stride()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("window", [3, 400])
def test_a_prepared_selection_is_handed_on_as_the_first_one(
    recorder: Recorder, causal: bool, heads: int, window: int
) -> None:
    scores = torch.randn(2, 2, 300)
    mask = None if heads == 1 else torch.ones(2, heads, 300, dtype=torch.bool)
    settings = (window, 260, causal)
    if heads == 4:
        scores = scores.repeat_interleave(2, 1)
    first = ops_select._select_cuda(scores, mask, *settings, cleared=False)
    prepared = cuda_selection.PreparedSelection(first, *settings)
    again = prepared(scores, mask)
    for wanted, found in zip(first, again, strict=True):
        assert wanted.shape == found.shape and wanted.stride() == found.stride()
        assert wanted.dtype == found.dtype == torch.int32
    calls = [dict(call) for call in recorder.calls]
    lists = [call.pop("selection") for call in calls]
    assert calls[0] == calls[1] and len(calls) == 2
    assert lists[0][3] is None or causal
    for t, found in zip(again, lists[1], strict=True):
        assert found == (view(t) if t.dim() == 3 or t.dim() == 4 else None)


@pytest.mark.parametrize("missing", [0, WORKSPACE])
def test_a_module_that_does_all_at_once_is_called_once(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    """Unless it finds no memory: then torch allocates, whose errors say how much there is."""
    given: list[tuple[Any, ...]] = []

    def at_once(*arguments: Any) -> int:
        given.append(arguments)
        return missing

    monkeypatch.setattr(recorder, "reads", lambda kind: kind is Tensor, raising=False)
    for name in ("enqueue_fwd", "enqueue_bwd", "enqueue_select"):
        monkeypatch.setattr(recorder, name, at_once, raising=False)
    q, bias = half(2, 5, 4, 64), torch.randn(2, 2, 1, 5)
    lists = select_keys(bias, 3).lists
    problem = Problem(q, q, q, bias=bias, is_causal=True, key_lists=lists)
    cuda_selection.select(bias[:, :, 0], None, 3, 5, True, lists)
    results = cuda.forward(problem)
    cuda.backward(problem, results, q, None, ALL)
    structs = ("FwdParams", "BwdParams")
    for struct, arguments in zip(structs, given[1:], strict=True):
        assert len(arguments) == len(binding_arguments(struct)) + 1 and arguments[-1] == 77
    assert len(given[0]) == len(SELECT_FIELDS.split()) + 1
    assert len(recorder.calls) == len(recorder.launches) == (3 if missing else 0)


def test_without_a_workspace_one_call_is_enough(recorder: Recorder) -> None:
    recorder.workspace = 0
    q = half(2, 5, 4, 64)
    cuda.forward(Problem(q, q, q))
    assert recorder.launches == [(0, 0, 77)]


def backward(
    needs: Needs, dout: Tensor | None = None, dlse: Tensor | None = None, **operands: Any
) -> tuple[Tensor, ...]:
    q, k, v = half(2, 5, 4, 64), half(2, 7, 2, 64), half(2, 7, 2, 64)
    problem = Problem(**{"q": q, "k": k, "v": v, "deterministic": True, **operands})
    results = empty_results(problem)
    return cuda.backward(problem, results, half(*q.shape) if dout is None else dout, dlse, needs)


@pytest.mark.parametrize(
    "needs", [ALL, Needs(False, True, False, True), Needs(True, False, True, False), NOTHING]
)
def test_gradients_are_allocated_as_needed(recorder: Recorder, needs: Needs) -> None:
    base = torch.randn(4, 7)
    bias = base.expand(2, 5, 4, 7).transpose(1, 2)
    grads = backward(needs, bias=bias)
    (call,) = recorder.calls
    assert call["bias"] == view(bias)
    shapes = [(2, 5, 4, 64), (2, 7, 2, 64), (2, 7, 2, 64), (2, 4, 5, 7)]
    for name, grad, need, shape in zip(
        ("dq", "dk", "dv", "dbias"), grads, needs, shapes, strict=False
    ):
        assert call[name] == (view(grad) if need else None)
        assert tuple(grad.shape) == (shape if need else (0,)) and grad.is_contiguous()
    assert grads[3].dtype == torch.float32
    assert call["deterministic"] is True


def test_no_dbias_without_a_bias(recorder: Recorder) -> None:
    grads = backward(ALL)
    assert recorder.calls[0]["dbias"] is None and grads[3].shape == (0,)


def test_gradient_of_a_sum_is_made_readable(recorder: Recorder) -> None:
    """It is expanded, with a last stride of 0, but the kernels read vectors along head_dim."""
    dout = torch.ones((), dtype=torch.bfloat16).expand(2, 5, 4, 64)
    dlse = torch.ones(()).expand(2, 4, 5)
    backward(ALL, dout=dout, dlse=dlse)
    assert recorder.calls[0]["dout"][3] == (1280, 256, 64, 1)
    assert recorder.calls[0]["dlse"][3] == (20, 5, 1)


def test_other_head_dims_are_padded(recorder: Recorder) -> None:
    q, k, v = half(2, 5, 4, 20), half(2, 7, 2, 20), half(20, 2, 2, 7).permute(1, 3, 2, 0)
    problem = Problem(q, k, v)
    results = cuda.forward(problem)
    out = results.out
    assert out.shape == q.shape and out.is_contiguous()
    call = recorder.calls[0]
    assert call["q"][2:] == ((2, 5, 4, 24), (480, 96, 24, 1))
    assert call["v"][2:] == ((2, 7, 2, 24), (336, 48, 24, 1))
    needs = Needs(True, True, False, False)
    grads = cuda.backward(problem, results, half(2, 5, 4, 20), None, needs)
    call = recorder.calls[1]
    for name in ("q", "k", "v", "out", "dout", "dq", "dk"):
        assert call[name][2][3] == 24, name
    assert [tuple(g.shape) for g in grads[:4]] == [(2, 5, 4, 20), (2, 7, 2, 20), (0,), (0,)]
    assert grads[0].is_contiguous()


def test_nothing_to_do_launches_nothing(recorder: Recorder) -> None:
    out, lse, _ = cuda.forward(Problem(half(2, 5, 4, 20), *[half(2, 0, 2, 20)] * 2))
    assert not out.any() and out.shape == (2, 5, 4, 20) and (lse == -torch.inf).all()
    bias = torch.randn(1, 1, 1, 7)
    problem = Problem(half(2, 0, 4, 64), *[half(2, 7, 2, 64)] * 2, bias=bias)
    out, lse, _ = results = cuda.forward(problem)
    assert out.shape == (2, 0, 4, 64) and lse.shape == (2, 4, 0)
    grads = cuda.backward(problem, results, out, None, Needs(True, True, False, True))
    assert [tuple(g.shape) for g in grads[:4]] == [(2, 0, 4, 64), (2, 7, 2, 64), (0,), (1, 1, 1, 7)]
    assert not any(g.any() for g in grads[:4])
    assert not recorder.calls and not recorder.launches


@pytest.mark.parametrize("abi", [kernels.ABI_VERSION - 1, kernels.ABI_VERSION + 1])
def test_kernels_of_another_abi_are_refused(abi: int, monkeypatch: pytest.MonkeyPatch) -> None:
    core = install(Recorder(abi), monkeypatch)
    words = (
        f"dmattn-kernels: got ABI version {abi}, wanted {kernels.ABI_VERSION}; "
        "install dmattn and dmattn-kernels of one release"
    )
    with pytest.raises(RuntimeError, match=words):
        cuda.forward(Problem(*[half(1, 2, 1, 8)] * 3))
    assert not core.calls
    # The list of backends says the same, and lets the other backends work.
    monkeypatch.setattr(kernels, "checked_devices", set())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert re.search(words, CudaBackend().unavailable() or "")


def test_missing_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.load_kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "dmattn_kernels", None)
    with pytest.raises(RuntimeError, match="install it beside dmattn"):
        kernels.check_device(0)


def test_old_gpu_is_refused(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an older GPU")
    with pytest.raises(
        RuntimeError, match=r"cuda:3 \(an older GPU, sm_75\), wanted a GPU of sm_80"
    ):
        kernels.check_device(3)


class Filled(CudaBackend):
    """As if the kernels had found lse = 20000 + 3e-4, which float32 cannot hold, and out = 1."""

    def forward(self, problem: Problem, for_backward: bool = True) -> Results:
        results = super().forward(problem, for_backward)
        assert results.lse_rest is not None
        results.lse_rest.fill_(3e-4)
        return results._replace(out=results.out.fill_(1), lse=results.lse.fill_(2e4))


def test_sinks_change_what_the_kernels_return(recorder: Recorder) -> None:
    """Sinks are added in float64, since the kernels also return what rounding dropped from lse."""
    backend, q, bias = Filled(), half(2, 5, 4, 64), torch.randn(1, 1, 1, 7)
    sink = torch.tensor([20000.5, -9.0, 3e4, -torch.inf])
    problem = Problem(q, *[half(2, 7, 2, 64)] * 2, None, bias, sink)
    out, lse, rest = results = sinks.forward(backend, problem)
    assert rest is not None
    exact = torch.log1p(torch.exp(sink.double() - (2e4 + 3e-4))) + (2e4 + 3e-4)
    exact[2] = 3e4  # where exp overflows, and the keys weigh nothing
    found = (lse.double() + rest)[0, :, 0]
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-8)
    share = torch.sigmoid(2e4 + 3e-4 - sink.double()).bfloat16()
    assert torch.equal(out[1, 2, :, 3], share)
    grads = sinks.backward(backend, problem, results, half(2, 5, 4, 64), None, Needs(*[True] * 5))
    assert grads.sinks is not None and grads.sinks.shape == (4,)
    forward, backward = recorder.calls
    assert backward["lse"] == view(lse) and backward["lse_rest"] == view(rest)
    assert forward["out"] == backward["out"] == view(out)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 7])
def test_dbias_of_rows_beside_sinks(recorder: Recorder, heads: int, rows: int) -> None:
    """The kernels would return dlse as this gradient, which leaves out the share of the sinks."""
    q, dout = torch.randn(2, 7, 4, 8), torch.randn(2, 7, 4, 8)
    k, v = torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    sink = torch.tensor([0.5, -torch.inf, 3.0, 0.0])
    bias, dlse = torch.randn(1, heads, rows, 1), torch.randn(2, 4, 7)
    # Seven rows over five keys: the first two keep none.
    problem = Problem(q, k, v, None, bias, sink, softmax_scale=0.5, is_causal=True)
    results = sinks.forward(registry.named("cpu"), problem)
    needs = Needs(True, False, False, True)
    expected = sinks.backward(registry.named("cpu"), problem, results, dout, dlse, needs).bias
    found = cuda.backward(problem, results, dout, dlse, needs).bias
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    (call,) = recorder.calls
    assert call["dbias"] is None and call["dq"] is not None


@pytest.mark.parametrize("causal", [False, True])
def test_a_selection_travels_with_its_lists(recorder: Recorder, causal: bool) -> None:
    q, k, v, bias = half(2, 5, 4, 64), half(2, 7, 2, 64), half(2, 7, 2, 64), torch.randn(2, 2, 1, 7)
    lists = select_keys(bias, 3, causal, query_len=5).lists
    want = (*(view(t) for t in lists[:3]), view(lists.full) if causal else None)
    cuda_selection.select(bias[:, :, 0], None, 3, 5, causal, lists)
    problem = Problem(q, k, v, None, bias, is_causal=causal, key_lists=lists)
    results = cuda.forward(problem)
    cuda.backward(problem, results, half(2, 5, 4, 64), None, ALL)
    for call in recorder.calls:
        assert call["selection"] == want
    assert recorder.calls[0]["scores"] == view(bias[:, :, 0])
    assert [call["lse_rest"] for call in recorder.calls[1:]] == [view(results.lse_rest)] * 2
    beside = problem._replace(mask=torch.ones(1, 1, 1, 7).bool())
    with pytest.raises(ValueError, match="attn_mask: got a mask beside a selection"):
        check(beside)


def test_documents_travel_with_the_scores(recorder: Recorder) -> None:
    scores, bounds = torch.randn(2, 2, 7), torch.tensor([9, 0, 9, 3, 9, 7, 9]).int()[1::2]
    ops_select._select_cuda(scores, None, 3, 7, True, bounds)
    (call,) = recorder.calls
    dtype, shape, strides = call["cu_seqlens"][1:]
    assert (dtype, shape, strides) == (INT32, (3,), (1,))
    assert call["scores"] == view(scores) and call["seqlen_q"] == 7


@pytest.mark.parametrize("reach, capacity", [(0, 0), (0, 256), (60, 128)])
def test_lists_of_intervals_are_built_in_place(
    recorder: Recorder, reach: int, capacity: int
) -> None:
    end = torch.arange(1, 301, dtype=torch.int32).repeat(2, 3, 1)
    idx, count, full, needed = ops_select._build_cuda(end.mT.contiguous().mT, 290, capacity, reach)
    (call,) = recorder.calls
    assert call["selection"][1:] == (view(idx), view(count), view(full))
    assert call["selection"][0][1:] == view(end)[1:]
    assert call["needed"] == view(needed) and (call["seqlen_q"], call["reach"]) == (290, reach)
    assert idx.shape == (2, 3, 3, capacity) and not idx.any()
    assert count.shape == full.shape == needed.shape == (2, 3, 3)


def test_spare_lists_of_a_compiled_graph_stay_behind(recorder: Recorder) -> None:
    q, k, v, bias = half(2, 5, 4, 64), half(2, 9, 2, 64), half(2, 9, 2, 64), half(2, 2, 1, 9)
    lists = select_keys(bias, 3, query_len=5).lists
    spare = Selection(*torch.ops.dmattn.select_keys(bias[:, :, 0], None, 3, 5, True, None, 2))
    assert spare.idx.shape[2] == 2
    problem = Problem(q, k, v, None, bias, is_causal=True, key_lists=spare)
    results = cuda.forward(problem)
    cuda.backward(problem, results, torch.zeros_like(results.out), None, ALL)
    for call in recorder.calls:
        assert [t[1:] for t in call["selection"]] == [view(t)[1:] for t in lists]


def test_no_lists_launch_nothing(recorder: Recorder) -> None:
    lists = ops_select._build_cuda(torch.zeros(2, 3, 50, dtype=torch.int32), 0, 128, 0)
    assert lists[0].shape == (2, 3, 0, 128) and not recorder.launches


def test_a_decoding_step_appends_then_attends(recorder: Recorder) -> None:
    """One call for all tokens, reading the caller's tensors and the cache in place."""
    q, k, v, score = half(2, 3, 4, 64), half(2, 3, 2, 64), half(2, 3, 2, 64), torch.randn(2, 2, 3)
    held = DynamicMaskCache(2, 6, 2, 64, torch.bfloat16, "cpu")
    state = (held.k, held.v, held.score, held.position, held.seen)
    out = cache._attend(cuda_cache, q, k, v, score, None, *state, 0.25, 0.0)
    (call,) = recorder.calls
    given = dict(zip(["q", "k_new", "v_new", "score_new"], (q, k, v, score), strict=True))
    given |= dict(zip(["k", "v", "score", "position", "seen"], state, strict=True))
    for name, t in given.items():
        assert call[name] == view(t)
    assert call["out"] == view(out) and out.shape == q.shape
    assert call["active"] is None and call["evict"] and call["softmax_scale"] == 0.25


def test_a_draft_is_two_calls(recorder: Recorder) -> None:
    q, k, v, score = half(2, 3, 4, 64), half(2, 3, 2, 64), half(2, 3, 2, 64), torch.randn(2, 2, 3)
    held = DynamicMaskCache(2, 6, 2, 64, torch.bfloat16, "cpu")
    rows = Rows.find(held._tensors(), None)
    state = (rows.k, rows.v, held.score, held.position, held.seen)
    out, draft = cache._draft(cuda_cache, q, k, v, score, *state, 0.25, 2.0)
    n = torch.tensor([1, 3])
    cache._commit(cuda_cache, draft, n, *state)
    looked, committed = recorder.calls
    assert (out.shape, draft.shape, draft.dtype) == (q.shape, (2, 2, 3, 4), torch.int32)
    names = ["q", "k_new", "v_new", "score_new", "draft", "out"]
    for name, t in zip(names, (q, k, v, score, draft, out), strict=True):
        assert looked[name] == view(t)
    for call in (looked, committed):
        for name, t in zip(["k", "v", "score", "position", "seen"], state, strict=True):
            assert call[name] == view(t)
    assert looked["k"][2] == (2, 6 + SPARE_ROWS, 2, 64)
    assert (looked["softmax_scale"], looked["softcap"]) == (0.25, 2.0)
    assert committed["draft"] == view(draft) and committed["count"] == view(n)


def test_a_cache_that_keeps_all_is_only_appended_to(recorder: Recorder) -> None:
    k, v, score = half(2, 1, 2, 64), half(2, 1, 2, 64), torch.randn(2, 2, 1)
    held = DynamicMaskCache(2, 6, 2, 64, torch.bfloat16, "cpu", evict=False, capacity=9)
    state = (held.k, held.v, held.score, held.position, held.seen)
    active = torch.tensor([[True], [False]])
    cache._append(cuda_cache, k, v, score, active, *state, False)
    (call,) = recorder.calls
    assert call["active"] == view(active) and not call["evict"]
    assert call["q"] is None and call["out"] is None


def test_keys_are_joined_as_they_lie(recorder: Recorder) -> None:
    """Views with contiguous rows are read in place, and so are an expanded score and a mask."""
    first = half(2, 5, 4, 64), half(2, 5, 4, 32), torch.randn(2, 4, 5)
    new = half(2, 9, 2, 64)[:, 2:], half(2, 7, 32, 2).mT, half(1, 7, 4).mT.expand(2, 4, 7)
    mask = torch.ones(2, 1, 7, dtype=torch.bool)
    joined = keys._join(cuda_keys, *first, *new, mask, 8)
    (call,) = recorder.calls
    given = {"k_first": first[0], "v_first": first[1], "score_first": first[2], "mask_new": mask}
    given |= {"k_new": new[0], "score_new": new[2]}
    given |= dict(zip(("k", "v", "score"), joined, strict=True))
    for name, t in given.items():
        assert call[name] == view(t), name
    assert call["v_new"][2:] == (new[1].shape, new[1].contiguous().stride())
    shapes = [t.shape for t in joined]
    assert shapes == [(2, 15, 4, 64), (2, 15, 4, 32), (2, 4, 15)]


def test_keys_are_kept_as_they_lie(recorder: Recorder) -> None:
    k, v, score = half(2, 9, 2, 64), half(2, 9, 2, 32), torch.randn(2, 4, 9)
    end, seen = torch.zeros(1, 4, 9, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    position = torch.zeros(2, 4, 3, dtype=torch.int32)
    kept = keys._keep(cuda_keys, 8, end, None, k, v, score, position, seen, 6)
    (call,) = recorder.calls
    given = {"end": end, "k": k, "v": v, "score": score, "position": position, "seen": seen}
    given |= {f"{name}_kept": t for name, t in kept._asdict().items()}
    for name, t in given.items():
        assert call[name] == view(t), name
    assert call["place"] is None and call["row"] == 8
    shapes = [t.shape for t in kept]
    assert shapes == [(2, 6, 4, 64), (2, 6, 4, 32), (2, 4, 6), (2, 4, 6), (2,)]


def test_no_heads_move_no_keys(recorder: Recorder) -> None:
    k, score = half(2, 9, 0, 64), torch.randn(2, 0, 9)
    end, seen = torch.zeros(2, 0, 9, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    keys._join(cuda_keys, k, k, score, k, k, score, None, 9)
    kept = keys._keep(cuda_keys, 8, end, None, k, k, score, None, seen, 6)
    assert not recorder.calls and kept.seen.tolist() == [10, 10]
