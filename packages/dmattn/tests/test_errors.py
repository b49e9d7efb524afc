"""Bad input raises an error that names the argument, what it got and what was wanted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dmattn import flash_dmattn_func, sliding_window


def inputs(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "query": torch.randn(2, 5, 4, 8),
        "key": torch.randn(2, 6, 2, 8),
        "value": torch.randn(2, 6, 2, 8),
    }
    return {**good, **changes}


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": [1.0]}, TypeError, "query: got .*list.*, wanted a torch.Tensor"),
    ({"value": None}, TypeError, "value: got None, wanted a torch.Tensor"),
    ({"attn_mask": True}, TypeError, "attn_mask: got True .bool., wanted a torch.Tensor or None"),
    ({"query": zeros()}, ValueError, r"query: got shape \(\), wanted 4 dimensions"),
    ({"query": zeros(5, 4, 8)}, ValueError, r"query: got shape \(5, 4, 8\), wanted 4 dimensions"),
    ({"key": zeros(2, 6, 8)}, ValueError, r"key: got shape \(2, 6, 8\), wanted 4 dimensions"),
    ({"query": zeros(2, 5, 4, 0)}, ValueError, "query: got head_dim 0, wanted 1 to 256"),
    ({"query": zeros(2, 5, 4, 257)}, ValueError, "query: got head_dim 257, wanted 1 to 256"),
    ({"query": zeros(2, 5, 0, 8)}, ValueError, "query: got 0 heads, wanted at least 1"),
    ({"key": zeros(3, 6, 2, 8)}, ValueError, r"key: got shape .*, wanted \(2, seqlen_k, "),
    ({"key": zeros(2, 6, 2, 9)}, ValueError, r"key: got shape .*, wanted \(2, seqlen_k, .*, 8\)"),
    ({"value": zeros(2, 7, 2, 8)}, ValueError, r"value: got shape .*, wanted \(2, 6, 2, head_dim"),
    ({"value": zeros(2, 6, 2, 0)}, ValueError, "value: got head_dim 0, wanted 1 to 256"),
    ({"value": zeros(2, 6, 2, 257)}, ValueError, "value: got head_dim 257, wanted 1 to 256"),
    ({"sinks": 1.0}, TypeError, "sinks: got 1.0 .float., wanted a torch.Tensor or None"),
    (
        {"sinks": zeros(4, dtype=torch.int64)},
        TypeError,
        "sinks: got dtype torch.int64, wanted a floating dtype",
    ),
    ({"sinks": zeros(4).to(torch.float8_e4m3fn)}, TypeError, "sinks: got dtype torch.float8_e4m3"),
    ({"sinks": zeros(2)}, ValueError, r"sinks: got shape \(2,\), wanted \(4,\), one for each head"),
    ({"sinks": zeros(4, 1)}, ValueError, r"sinks: got shape \(4, 1\), wanted \(4,\)"),
    (
        {"sinks": torch.empty(4, device="meta")},
        ValueError,
        "sinks: got device meta, wanted cpu as query",
    ),
    ({"query": zeros(2, 5, 3, 8)}, ValueError, "key: got 2 heads, wanted a divisor of the 3"),
    (
        {"key": zeros(2, 6, 0, 8), "value": zeros(2, 6, 0, 8)},
        ValueError,
        "key: got 0 heads, wanted a divisor",
    ),
    (
        {"query": zeros(2, 5, 4, 8, dtype=torch.int32)},
        TypeError,
        "query: got dtype torch.int32, wanted torch.float16, torch.bfloat16, ",
    ),
    (
        {"key": zeros(2, 6, 2, 8, dtype=torch.float64)},
        TypeError,
        "key: got dtype torch.float64, wanted torch.float32 as query",
    ),
    (
        {"attn_mask": zeros(2, 4, 5, 6)},
        TypeError,
        "attn_mask: got dtype torch.float32, wanted torch.bool .*attn_bias",
    ),
    (
        {"attn_mask": zeros(2, 1, 1, 6, dtype=torch.int64)},
        TypeError,
        r"attn_mask: got dtype torch.int64, wanted torch.bool .*pass mask.bool\(\)",
    ),
    (
        {"attn_bias": zeros(2, 1, 1, 6, dtype=torch.bool)},
        TypeError,
        "attn_bias: got dtype torch.bool, wanted torch.float32; a boolean mask is an attn_mask",
    ),
    (
        {"attn_mask": zeros(2, 5, 6, dtype=torch.bool)},
        ValueError,
        r"attn_mask: got shape \(2, 5, 6\), wanted \(2\|1, 4\|2\|1, 5\|1, 6\|1\)",
    ),
    (
        {"attn_mask": zeros(2, 3, 5, 6, dtype=torch.bool)},
        ValueError,
        r"attn_mask: got shape \(2, 3, 5, 6\), wanted",
    ),
    ({"attn_bias": zeros(2, 4, 5, 7)}, ValueError, r"attn_bias: got shape \(2, 4, 5, 7\), wanted"),
    ({"attn_bias": zeros(2, 4, 6)}, ValueError, r"attn_bias: got shape \(2, 4, 6\), wanted"),
    (
        {"attn_bias": zeros(2, 4, 5, 6, dtype=torch.bfloat16)},
        TypeError,
        "attn_bias: got dtype torch.bfloat16, wanted torch.float32",
    ),
    (
        {"attn_bias": zeros(2, 4, 5, 6, dtype=torch.bool)},
        TypeError,
        "attn_bias: got dtype torch.bool, wanted torch.float32",
    ),
    (
        {"key": torch.empty(2, 6, 2, 8, device="meta")},
        ValueError,
        "key: got device meta, wanted cpu as query",
    ),
    (
        {"attn_mask": torch.empty(1, 1, 1, 6, dtype=torch.bool, device="meta")},
        ValueError,
        "attn_mask: got device meta, wanted cpu as query",
    ),
    ({"softmax_scale": "1"}, TypeError, "softmax_scale: got '1' .str., wanted a finite number"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale: got nan, wanted a finite"),
    ({"softcap": float("inf")}, ValueError, "softcap: got inf, wanted a finite"),
    ({"softcap": None}, TypeError, "softcap: got None, wanted a finite number"),
    ({"query": None, "backend": "cpu"}, TypeError, "query: got None, wanted a torch.Tensor"),
    (
        {"attn_bias": [1.0], "window_size": 2},
        TypeError,
        "attn_bias: got .1.0. .list., wanted a torch.Tensor or None",
    ),
    ({"backend": "tpu"}, ValueError, "backend: got 'tpu', wanted one of 'cuda', .*'cpu'"),
    ({"backend": "cuda"}, ValueError, "query: got device cpu, wanted cuda for backend 'cuda'"),
    ({"window_size": 2}, ValueError, "attn_bias: got None, wanted one score per key"),
]


@pytest.mark.parametrize(
    "changes, error, message", BAD, ids=[f"{i}-{'-'.join(c)}" for i, (c, _, _) in enumerate(BAD)]
)
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
def test_bad_input(
    changes: dict[str, Any], error: type[Exception], message: str, grad: bool
) -> None:
    given = inputs(**changes)
    if grad and isinstance(given["query"], Tensor) and given["query"].is_floating_point():
        given["query"].requires_grad_()
    with pytest.raises(error, match=message):
        flash_dmattn_func(**given)


MORE_BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"is_causal": "no"}, TypeError, r"is_causal: got 'no' \(str\), wanted True or False"),
    ({"is_causal": 1.0}, TypeError, "is_causal: got 1.0"),
    ({"deterministic": []}, TypeError, "deterministic: got"),
    ({"softcap": -30.0}, ValueError, "softcap: got -30.0, wanted a finite number of at least 0"),
    ({"softcap": 1e300}, ValueError, "softcap: got 1e.300, wanted 0 or a number of 1.18e-38 to"),
    ({"softcap": 1e-300}, ValueError, "softcap: got 1e-300, wanted 0 or .* as float32 holds them"),
    ({"softmax_scale": -1e39}, ValueError, "softmax_scale: got -1e.39, wanted 0 or a number of"),
    ({"softmax_scale": 10**400}, ValueError, "softmax_scale: got 1000.*, wanted a finite number"),
    ({"query": torch.randn(5, 8).to_sparse()}, ValueError, "query: got .*sparse.*dense"),
    ({"attn_mask": zeros(2, 3, dtype=torch.bool)}, ValueError, r"attn_mask: got shape \(2, 3\)"),
    ({"attn_mask": zeros(5, 6, dtype=torch.int64)}, TypeError, "attn_mask: got dtype torch.int64"),
    (
        {"window_size": (256, 0)},
        TypeError,
        r"window_size: got \(256, 0\) \(tuple\), wanted an int .*sliding_window",
    ),
    ({"window_size": -1}, ValueError, "window_size: got -1, wanted an int .*sliding_window"),
    ({"window_size": 4}, ValueError, "attn_bias: got None, wanted one score.*sliding_window"),
    ({"selection": 3}, TypeError, "selection: got int, wanted a dmattn.KeySelection"),
    ({"selection": sliding_window(6, 2, 5)}, ValueError, "selection: got one with is_causal=True"),
    (
        {"selection": sliding_window(6, 2, 4), "is_causal": True},
        ValueError,
        "selection: got one for 4 query rows, wanted 5",
    ),
]


@pytest.mark.parametrize("changes, error, message", MORE_BAD)
def test_more_bad_input(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_dmattn_func(**inputs(**changes))


BAD_WINDOWS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"window_size": 0}, ValueError, "window_size: got 0, wanted an int of at least 1"),
    ({"window_size": 2.0}, TypeError, r"window_size: got 2.0 \(float\), wanted an int"),
    ({"window_size": True}, TypeError, r"window_size: got True \(bool\), wanted an int"),
    (
        {"window_size": 2, "attn_bias": zeros(1, 4, 1, 1)},
        ValueError,
        r"attn_bias: got shape \(1, 4, 1, 1\), wanted .*seqlen_q\|1, 6\) .* with window_size",
    ),
    ({"window_size": 2, "attn_bias": zeros(1, 4, 4, 6)}, ValueError, "attn_bias: got shape"),
    ({"window_size": 2, "attn_bias": zeros(2, 3, 6)}, ValueError, "attn_bias: got shape"),
    (
        {"window_size": 2, "attn_bias": zeros(1, 1, 1, 6, dtype=torch.int64)},
        TypeError,
        "attn_bias: got dtype torch.int64, wanted",
    ),
]


@pytest.mark.parametrize("changes, error, message", BAD_WINDOWS)
def test_bad_window(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_dmattn_func(**inputs(**{"attn_bias": zeros(1, 4, 1, 6), **changes}))


def test_double_accepts_a_float_bias_and_names_both() -> None:
    given = {name: t.double() for name, t in inputs().items()}
    flash_dmattn_func(**given, attn_bias=zeros(1, 1, 1, 6))
    with pytest.raises(TypeError, match=r"wanted torch.float64 or torch.float32"):
        flash_dmattn_func(**given, attn_bias=zeros(1, 1, 1, 6, dtype=torch.float16))


def _backward_arguments() -> list[Any]:
    operands = list(inputs().values())
    results = torch.ops.dmattn.fwd(*operands)
    return [*(torch.zeros_like(t) for t in results[:2]), *results, [True] * 5, *operands]


@pytest.mark.parametrize(
    "position, change, error, message",
    [
        (0, lambda t: t.half(), TypeError, "dout: got dtype torch.float16, wanted torch.float32"),
        (0, lambda t: t[:, 1:], ValueError, r"dout: got shape \(2, 4, 4, 8\), wanted"),
        (1, lambda t: t.double(), TypeError, "dlse: got dtype torch.float64"),
        (2, lambda t: t[..., 1:], ValueError, "out: got shape"),
        (3, lambda t: t.mT, ValueError, r"lse: got shape \(2, 5, 4\), wanted \(2, 4, 5\)"),
    ],
)
def test_bad_backward_input(
    position: int, change: Callable[[Tensor], Tensor], error: type[Exception], message: str
) -> None:
    arguments = _backward_arguments()
    arguments[position] = change(arguments[position])
    with pytest.raises(error, match=message):
        torch.ops.dmattn.bwd(*arguments)


def test_fakes_refuse_the_same() -> None:
    """The meta device runs the fake implementations, which check the same with the same words."""
    given = {name: t.to("meta") for name, t in inputs(query=zeros(2, 5, 3, 8)).items()}
    with pytest.raises(ValueError, match="key: got 2 heads, wanted a divisor of the 3"):
        flash_dmattn_func(**given)


@pytest.mark.parametrize("softcap", [1.2e-38, 3e38])
def test_softcaps_that_float32_just_holds(softcap: float) -> None:
    """Dot products of 0 stay 0, so that all keys count alike."""
    given = inputs(query=torch.zeros_like(inputs()["query"]))
    out = flash_dmattn_func(**given, softcap=softcap)
    torch.testing.assert_close(out, flash_dmattn_func(**given))
