"""Small launches that between them run every kernel of the library, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python sanitizer_cases.py [--shard I/N] [--poison]

Results are compared with a float64 computation in numpy, so that a launch which did nothing is
noticed too.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import dmattn_kernels as kernels

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import sanitizer_packed
from gpu.device import family
from gpu.raw_cuda import Array, Buffer, Gpu, from_bits, to_bits
from gpu.sanitizer_cache import Append, run_append
from gpu.sanitizer_decode import DECODING, counts_blocks
from gpu.sanitizer_draft import DRAFTS, Draft, run_draft
from gpu.sanitizer_hopper_launches import hopper_launches
from gpu.sanitizer_keys import MOVES, Moves, run_moves
from gpu.sanitizer_launch import Launch
from gpu.sanitizer_listed import MANY_GRADIENTS
from gpu.sanitizer_packed_launches import PACKED
from gpu.sanitizer_selection import (
    Lists,
    Selecting,
    check_selection,
    draw_scores,
    keep_mask,
    run_lists,
    select,
    wanted_end,
)
from gpu.sanitizer_short import short_launches

Float = npt.NDArray[np.float64]


LAUNCHES = (
    Launch("plain"),
    Launch("causal", 133, 133, causal=True, dlse=True),
    Launch("causal, rows without keys", 150, 40, causal=True, softcap=3.0),
    Launch("deterministic", 140, 200, deterministic=True, bias="1hqk", causal=True),
    Launch("element loads", skip=1, bias="bhqk", mask="bhqk"),
    Launch("element loads, gathered", skip=1, bias="bk1k", mask="bk1k"),
    Launch("dense mask and bias", 130, 140, 2, 4, 2, mask="bhqk", bias="bhqk", causal=True),
    Launch(
        "shared dense mask and bias",
        130,
        140,
        2,
        4,
        2,
        mask="11qk",
        bias="11qk",
        deterministic=True,
    ),
    Launch("shared dense mask and bias, atomics", 65, 140, 2, 4, 2, mask="1kqk", bias="1kqk"),
    Launch("fp32 bias", bias="bhqk", bias_f32=True, softcap=4.0),
    Launch("fp32 bias, shared", batch=2, bias="1hqk", bias_f32=True),
    Launch("key bias", 130, 200, 2, 4, 2, bias="bk1k", causal=True, dlse=True),
    Launch("key bias, fp32, shared", batch=2, bias="111k", bias_f32=True, deterministic=True),
    Launch("row bias", batch=2, bias="b1q1", dlse=True),
    Launch("scalar bias", bias="1111"),
    Launch("row mask", mask="bhq1"),
    Launch("key mask", 130, 300, 2, 4, 2, mask="bk1k", bias="bk1k", causal=True),
    Launch(
        "key mask, deterministic", 70, 300, 1, 4, 2, mask="bk1k", bias="bk1k", deterministic=True
    ),
    Launch("key mask of query heads", 70, 200, 1, 4, 2, mask="bh1k", bias="bh1k"),
    Launch(
        "key mask of query heads, deterministic", 70, 200, 1, 4, 2, mask="bh1k", deterministic=True
    ),
    Launch("key mask, no bias", 130, 200, 1, 4, 2, mask="bk1k", causal=True),
    Launch("key mask, dense bias", 70, 200, mask="b11k", bias="bhqk"),
    Launch("key mask, row bias", 70, 200, mask="b11k", bias="bhq1"),
    Launch("key mask, fp32 bias, deterministic", 70, 200, mask="b11k", bias="1hqk", bias_f32=True),
    Launch("key mask that keeps nothing", mask="b11k", kept=0.0, bias="bk1k"),
    Launch("dense mask that keeps nothing", mask="b1qk", kept=0.0, bias="bhqk"),
    *DECODING,
    Launch("three queries in parts", 3, 700, 2, 2, 1, splits=3, mask="bhqk", bias="bhqk"),
    Launch("element loads in parts", 3, 700, 2, 2, 1, splits=3, skip=1, mask="bhqk", wants=""),
    Launch("no keys", 20, 0, bias="bk1k", mask="b11k"),
    Launch("no queries", 0, 20, bias="bk1k"),
    Launch("only dq", wants="q", bias="bk1k"),
    Launch("only dk", wants="k", bias="bk1k", mask="bk1k"),
    Launch("only dv", wants="v", causal=True),
    Launch("only dbias", wants="b", bias="bk1k"),
    Launch("only a dense dbias", wants="b", bias="11qk"),
    Launch("only a dense dbias, no whole number of vectors", 65, 140, wants="b", bias="11qk"),
    Launch("only dbias, gathered", wants="b", bias="bk1k", mask="bk1k"),
)
# Keys chosen by score inside the library: running top-w (causal), or one list for all rows.
SELECTED = (
    Launch("running top-w", 300, 300, 2, 4, 2, bias="bk1k", causal=True, select=Selecting(100)),
    Launch(
        "running top-w, offset, ties, deterministic",
        *(140, 333, 1, 4, 2),
        bias="bk1k",
        causal=True,
        deterministic=True,
        dlse=True,
        select=Selecting(60, fill="ties", own_dtype=True),
    ),
    Launch(
        "running top-w, key mask, no bias",
        *(200, 260, 2, 4, 2),
        mask="b11k",
        causal=True,
        select=Selecting(70, fill="odd"),
    ),
    Launch(
        "running top-w of query heads, deterministic",
        *(130, 200, 1, 4, 2),
        bias="bh1k",
        causal=True,
        deterministic=True,
        select=Selecting(40, "bh"),
    ),
    Launch(
        "running top-w for all heads",
        *(130, 200, 2, 4, 2),
        bias="1k1k",
        bias_f32=True,
        causal=True,
        softcap=3.0,
        select=Selecting(1, "11"),
    ),
    Launch(
        "running top-w, element loads",
        *(129, 257),
        skip=1,
        bias="bk1k",
        causal=True,
        select=Selecting(64),
    ),
    Launch("window beyond the keys", 150, 150, bias="bk1k", causal=True, select=Selecting(500)),
    Launch("running top-w, only dk", 130, 200, causal=True, wants="k", select=Selecting(50)),
    Launch(
        "running top-w within documents",
        *(300, 300, 2, 4, 2),
        bias="bk1k",
        causal=True,
        select=Selecting(50, bounds=(0, 3, 3, 130, 256, 300)),
    ),
    Launch(
        "running top-w within documents, key mask, deterministic",
        *(259, 259, 1, 4, 2),
        mask="b11k",
        causal=True,
        deterministic=True,
        select=Selecting(200, fill="odd", own_dtype=True, bounds=(0, 258, 259)),
    ),
    Launch(
        "top-w of all keys",
        *(90, 300, 2, 4, 2),
        bias="bk1k",
        select=Selecting(100, own_dtype=True),
    ),
    Launch(
        "top-w of all keys, deterministic",
        *(90, 300, 1, 4, 2),
        mask="bk1k",
        deterministic=True,
        select=Selecting(100, "11", "ties", own_dtype=True),
    ),
    Launch(
        "one query, top-w",
        *(1, 700, 1, 4, 2),
        bias="bk1k",
        causal=True,
        wants="",
        select=Selecting(64),
    ),
    Launch(
        "one query in parts, top-w",
        *(1, 700, 1, 4, 2),
        bias="bk1k",
        wants="",
        splits=3,
        select=Selecting(400),
    ),
)


def _selection(name: str, shape: tuple[int, ...], select: Selecting, mask: str = "") -> Launch:
    """Running top-w without the attention. `shape`: a `Launch`'s fields from seqlen_q on."""
    return Launch(name, *shape, mask=mask, causal=True, attend=False, select=select)


BY_OWN_SCORES = Launch(
    "top-w of many keys, 16-bit scores",
    *(1, 40000),
    bias="bk1k",
    wants="",
    select=Selecting(300, own_dtype=True),
)
# Launches for a single dtype and head_dim: long rows, for which several thread blocks select
# together, rare layouts, and so many heads that the backward takes several rounds.
ONCE = (
    Launch("rounds of kv heads", batch=2, nheads=300, nheads_k=3, bias="bk1k", causal=True),
    Launch("rounds of one group", nheads=600, bias="1k1k", causal=True),
    Launch("rounds of one group, no bias", nheads=600, causal=True),
    Launch("rounds of one group, no bias, deterministic", nheads=600, deterministic=True),
    Launch("parts of rows", 1100, 300, causal=True),
    Launch("parts of rows, deterministic", 1100, 300, softcap=4.0, deterministic=True),
    Launch("rounds of one group, key mask", nheads=600, mask="1k1k", bias="1k1k"),
    Launch("rounds of one group, deterministic", nheads=600, mask="1h1k", deterministic=True),
    Launch("dense mask by rows", 130, 140, mask="bhqk", mask_by_rows=True, causal=True),
    Launch("top-w of many keys", 1, 40000, bias="bk1k", wants="", select=Selecting(300)),
    BY_OWN_SCORES,
    _selection("running top-w behind many keys", (200, 40000, 1, 2, 2), Selecting(200)),
    _selection(
        "running top-w of many keys", (33000, 33000), Selecting(40, fill="ties", own_dtype=True)
    ),
    _selection("running top-w of many keys, wide window", (33000, 33000, 1, 1, 1), Selecting(8300)),
    # Enough keys for large thread blocks, which read the scores without ordering them first.
    _selection(
        "running top-w of some thousand keys", (4500, 4500, 1, 1, 1), Selecting(300, fill="odd")
    ),
    _selection(
        "running top-w of some thousand keys, 16-bit scores",
        (4500, 4500, 1, 1, 1),
        Selecting(300, fill="ties", own_dtype=True),
    ),
    # More heads than SMs: a thread block has several blocks of rows, and an SM has several thread
    # blocks.
    _selection("running top-w of many heads", (300, 300, 1, 300, 300), Selecting(60)),
    _selection(
        "running top-w of many heads, 16-bit scores",
        (300, 300, 1, 300, 300),
        Selecting(60, fill="ties", own_dtype=True),
    ),
    _selection(
        "running top-w of many heads behind many keys",
        (140, 5000, 1, 160, 160),
        Selecting(80, fill="ties", own_dtype=True),
    ),
    # The same with a mask, beside which scores are ordered first.
    _selection(
        "running top-w of many heads, key mask", (300, 300, 1, 300, 300), Selecting(60), mask="b11k"
    ),
    _selection(
        "running top-w of many heads behind many keys, key mask",
        (140, 5000, 1, 160, 160),
        Selecting(80, fill="ties", own_dtype=True),
        mask="b11k",
    ),
    _selection(
        "running top-w within long documents",
        (33000, 33000),
        Selecting(40, bounds=(0, 8192, 8195, 24577, 32999, 33000)),
    ),
)
LISTS = (
    Lists("lists of intervals", 300, 333),
    Lists("lists within reach", 300, 300, 40, 256),
    Lists("lists that do not fit", 500, 500, 0, 128),
    Lists("lengths of lists", 200, 300, 0, 0),
    Lists("lists of long intervals", 4200, 4300, capacity=512, batch=1),
)
APPENDS = (
    ("f16", 64, Append("cache append", "f16")),
    ("bf16", 128, Append("cache append", "bf16")),
    ("bf16", 72, Append("cache append, fp32 scores", "f32", capacity=300, held=290)),
    ("bf16", 64, Append("cache that keeps all", "f32", evict=False)),
    *(
        (dtype, d, Append("cache step", kind, queries=4, tokens=4, capacity=200, held=198))
        for dtype in ("bf16", "f16")
        for kind in (dtype, "f32")
        for d in (64, 128, 256)
    ),
    # There are separate kernels for tiles that head_dim does not fill, and others for softcap.
    *(
        (dtype, d, Append("cache step", kind, queries=4, tokens=6, capacity=200, held=190))
        for dtype, kind in (("bf16", "f32"), ("f16", "f16"))
        for d in (40, 72, 136)
    ),
    *(
        (dtype, d, Append("cache step, softcap", "f32", queries=4, tokens=3, softcap=3.0))
        for dtype in ("bf16", "f16")
        for d in (64, 128, 256)
    ),
    ("f16", 128, Append("cache step, many heads", "f32", queries=20, tokens=3, capacity=9)),
    ("f16", 64, Append("cache step, one head", "f32", queries=1, tokens=15, held=0)),
)
# Each kernel is compiled for two dtypes, three head-dim tiles and up to four levels of generality,
# tiled and gathered (tiles.h). With MAIN all launches run, with OTHERS only OTHER_LAUNCHES, which
# are enough to run every kernel of the other dtype.
MAIN = (("bf16", 64), ("bf16", 128), ("bf16", 256))
OTHERS = (("f16", 64), ("f16", 128), ("f16", 256))
OTHER_LAUNCHES = (
    "causal",
    "deterministic",
    "element loads",
    "element loads in parts",
    "dense mask and bias",
    "fp32 bias",
    "key mask",
    "key mask, no bias",
    "key mask, dense bias",
    "key mask, row bias",
    "key bias",
    "one query",
    "one query in parts",
    "one query, element loads",
    "one query, listed, element loads",
    "few queries",
    "few queries, element loads",
    "few queries, listed",
    "few queries, listed, element loads",
    "queries of a group",
    "key mask of query heads",
    "shared dense mask and bias, atomics",
    "running top-w",
    "running top-w, key mask, no bias",
    "running top-w for all heads",
    "top-w of all keys",
    "packed",
    "packed, key mask",
)
# Head dimensions between the tiles only change how the end of a row is handled.
BETWEEN = (("f16", 40), ("bf16", 72), ("f16", 136))
BETWEEN_LAUNCHES = (
    "causal",
    "deterministic",
    "dense mask and bias",
    "key mask",
    "one query in parts",
    "running top-w",
)
# But decoding has separate kernels for them, up to a head_dim of 128.
BETWEEN_DECODING = [(dtype, head_dim) for dtype in ("bf16", "f16") for head_dim in (40, 72)]
BETWEEN_DECODING_LAUNCHES = (
    "one query",
    "one query in parts",
    "few queries",
    "few queries, listed",
)


Job = Launch | Lists | Append | Draft | Moves


def all_launches() -> list[tuple[str, int, Job]]:
    every = (*LAUNCHES, *SELECTED, *PACKED)
    # At the largest head dimension, where launches take longest, most selections and packed
    # sequences are left out, as they are much alike.
    main = [
        (kind, launch)
        for launch in every
        for kind in MAIN
        if kind[1] < 256 or not (launch.select or launch.packed) or launch.name in OTHER_LAUNCHES
    ]
    main += [(kind, x) for x in every if x.name in OTHER_LAUNCHES for kind in OTHERS]
    main += [(kind, x) for x in every if x.name in BETWEEN_LAUNCHES for kind in BETWEEN]
    names = BETWEEN_DECODING_LAUNCHES
    main += [(kind, x) for x in every if x.name in names for kind in BETWEEN_DECODING]
    if family() == "sm90":
        main += hopper_launches()
        main += [(MAIN[1], MANY_GRADIENTS)]
    if family() == "sm80":
        main += short_launches()
    main += [(MAIN[0], launch) for launch in ONCE]
    main += [(OTHERS[0], BY_OWN_SCORES)]
    lists = [(*MAIN[0], launch) for launch in LISTS]
    single = (*APPENDS, *DRAFTS, *MOVES)
    return [*((*kind, launch) for kind, launch in main), *lists, *single]


def operand_shape(launch: Launch, letters: str) -> tuple[int, ...]:
    heads = {"h": launch.nheads, "k": launch.nheads_k, "1": 1}[letters[1]]
    return (
        launch.batch if letters[0] == "b" else 1,
        heads,
        launch.seqlen_q if letters[2] == "q" else 1,
        launch.seqlen_k if letters[3] == "k" else 1,
    )


def reference(values: dict[str, Float], launch: Launch, scale: float) -> dict[str, Float]:
    """out, lse and the gradients, computed as the definition says."""
    ratio = launch.nheads // launch.nheads_k
    # As (batch, head, row or key, column), for matrix products: einsum would take minutes in all.
    q, dout = (values[x].transpose(0, 2, 1, 3) for x in ("q", "dout"))
    k, v = (np.repeat(values[x], ratio, axis=2).transpose(0, 2, 1, 3) for x in "kv")
    raw = scale * (q @ k.swapaxes(2, 3))
    tanh = np.tanh(raw / launch.softcap) if launch.softcap else None
    logits = raw if tanh is None else launch.softcap * tanh

    def heads(x: Float) -> Float:
        return x if x.shape[1] in (1, launch.nheads) else np.repeat(x, ratio, axis=1)

    if launch.bias:
        logits = logits + heads(values["bias"])
    if "keep" in values:
        logits = np.where(heads(values["keep"]) != 0, logits, -np.inf)
    if launch.causal:
        rows, cols = np.arange(launch.seqlen_q)[:, None], np.arange(launch.seqlen_k)[None, :]
        logits = np.where(cols > rows + launch.seqlen_k - launch.seqlen_q, -np.inf, logits)
    top = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(logits - np.where(np.isinf(top), 0.0, top))
    total = weights.sum(-1, keepdims=True)
    probs = weights / np.where(total == 0, 1.0, total)
    with np.errstate(divide="ignore"):
        lse = (np.where(np.isinf(top), 0.0, top) + np.log(total))[..., 0]
    dprobs = dout @ v.swapaxes(2, 3)
    dlogits = probs * (dprobs - (probs * dprobs).sum(-1, keepdims=True))
    if launch.dlse:
        dlogits += probs * values["dlse"][..., None]
    draw = scale * (dlogits if tanh is None else dlogits * (1 - tanh**2))

    def of_group(x: Float) -> Float:
        return x.reshape(x.shape[0], launch.nheads_k, ratio, *x.shape[2:]).sum(2)

    found = {
        "out": (probs @ v).transpose(0, 2, 1, 3),
        "lse": lse,
        "dq": (draw @ k).transpose(0, 2, 1, 3),
        "dk": of_group(draw.swapaxes(2, 3) @ q).transpose(0, 2, 1, 3),
        "dv": of_group(probs.swapaxes(2, 3) @ dout).transpose(0, 2, 1, 3),
    }
    if launch.bias:
        shape = values["bias"].shape
        heads_of_bias = (shape[1], launch.nheads // shape[1])
        by_head = dlogits.reshape(launch.batch, *heads_of_bias, *dlogits.shape[2:]).sum(2)
        summed = tuple(axis for axis in range(4) if shape[axis] == 1 and by_head.shape[axis] != 1)
        found["dbias"] = by_head.sum(axis=summed, keepdims=True)
    return found


def draw_inputs(
    launch: Launch, dtype: str, head_dim: int, draw: np.random.Generator
) -> dict[str, tuple[Array, str]]:
    """Values and element types of the inputs of a launch."""
    q_shape = (launch.batch, launch.seqlen_q, launch.nheads, head_dim)
    k_shape = (launch.batch, launch.seqlen_k, launch.nheads_k, head_dim)
    found: dict[str, tuple[Array, str]] = {
        "q": (draw.standard_normal(q_shape), dtype),
        "k": (draw.standard_normal(k_shape), dtype),
        "v": (draw.standard_normal(k_shape), dtype),
        "dout": (draw.standard_normal(q_shape), dtype),
    }
    if not launch.attend:
        found.clear()
    if launch.mask:
        found["mask"] = (draw.random(operand_shape(launch, launch.mask)) < launch.kept, "bool")
    if launch.bias:
        kind = "f32" if launch.bias_f32 else dtype
        found["bias"] = (draw.standard_normal(operand_shape(launch, launch.bias)), kind)
    if launch.select:
        batch, heads, _, keys = operand_shape(launch, launch.select.heads + "1k")
        kind = dtype if launch.select.own_dtype else "f32"
        found["scores"] = (draw_scores(launch.select, (batch, heads, keys), draw), kind)
        if launch.mask:  # the selection's key mask has no rows
            found["mask"] = (found["mask"][0][:, :, 0], "bool")
    if launch.dlse:
        found["dlse"] = (draw.standard_normal((*q_shape[:1], launch.nheads, q_shape[1])), "f32")
    return found


def run_launch(gpu: Gpu, dtype: str, head_dim: int, launch: Job, fill: int | None) -> list[str]:
    """Run a launch, and return what is wrong with its results, if anything."""
    if isinstance(launch, Lists):
        return run_lists(gpu, launch, fill)
    if isinstance(launch, Moves):
        return run_moves(gpu, dtype, head_dim, launch, fill)
    if isinstance(launch, Append):
        problems, found, wanted = run_append(gpu, dtype, head_dim, launch, fill)
        if launch.queries:
            skipped = (wanted == 0).all(-1, keepdims=True)
            problem = compare("out", np.where(skipped, 0, found), wanted)
            problems += [problem] if problem else []
        return problems
    if isinstance(launch, Draft):
        problems, found, wanted = run_draft(gpu, dtype, head_dim, launch, fill)
        problem = compare("out", found, wanted)
        return [*problems, problem] if problem else problems
    draw = np.random.default_rng(len(launch.name) + head_dim)
    if launch.packed:
        return run_packed(gpu, dtype, head_dim, launch, draw, fill)
    raw = draw_inputs(launch, dtype, head_dim, draw)
    inputs = {
        name: gpu.upload(x, kind, 0 if name == "dlse" else launch.skip)
        for name, (x, kind) in raw.items()
    }
    if launch.mask_by_rows:
        inputs["mask"] = gpu.upload(np.swapaxes(raw["mask"][0], 2, 3), "bool").swapped()
    values = {name: from_bits(to_bits(x, kind), kind) for name, (x, kind) in raw.items()}
    if "mask" in values:
        values["keep"] = values["mask"]
    call: dict[str, Any] = {}
    problems: list[str] = []
    if launch.select:
        call["selection"], values["keep"], problems = run_selection(
            gpu, launch, launch.select, inputs, values, fill
        )
        call["window"] = launch.select.known_window
        inputs.pop("mask", None)
    if launch.attend:
        problems += attend(gpu, launch, inputs, values, call, fill)
    return problems


def run_packed(
    gpu: Gpu,
    dtype: str,
    head_dim: int,
    launch: Launch,
    draw: np.random.Generator,
    fill: int | None,
) -> list[str]:
    """Run one call for all sequences, and return what differs from the references of each."""
    alone = [dataclasses.replace(launch, batch=1, seqlen_q=m, seqlen_k=n) for m, n in launch.packed]
    raw = [draw_inputs(part, dtype, head_dim, draw) for part in alone]
    joined = sanitizer_packed.join(raw)
    inputs = {
        name: gpu.upload(x, kind, 0 if name == "dlse" else launch.skip)
        for name, (x, kind) in joined.items()
    }
    row_shape = (launch.nheads, joined["q"][0].shape[0])
    call = sanitizer_packed.arguments(gpu, launch.packed)
    outputs = enqueue_both(gpu, launch, inputs, row_shape, call, fill)
    found = {name: gpu.download(buffer) for name, buffer in outputs.items()}
    problems = []
    for b, part in enumerate(sanitizer_packed.split(found, launch.packed)):
        values = {name: from_bits(to_bits(x, kind), kind) for name, (x, kind) in raw[b].items()}
        if "mask" in values:
            values["keep"] = values["mask"]
        wanted = reference(values, alone[b], head_dim**-0.5)
        for name, value in part.items():
            if problem := compare(name, value, wanted[name]):
                problems.append(f"sequence {b}: {problem}")
    return problems


def run_selection(
    gpu: Gpu,
    launch: Launch,
    how: Selecting,
    inputs: dict[str, Buffer],
    values: dict[str, Float],
    fill: int | None,
) -> tuple[Any, Float, list[str]]:
    """The selection as the kernels take it, its mask (for launches that attend), and problems."""
    rows, causal = launch.seqlen_q, launch.causal
    scores_and_mask = inputs["scores"], inputs.get("mask")
    selection = select(gpu, *scores_and_mask, how.window, rows, causal, fill, how.bounds)
    allowed = values["mask"] != 0 if "mask" in values else np.bool_(True)
    scores = np.where(allowed, values["scores"], -np.inf)
    end = np.stack([wanted_end(entry, how.window, rows, causal, how.bounds) for entry in scores])
    keep = keep_mask(end, rows, causal) if launch.attend else np.zeros(0)
    return (
        selection.views,
        keep.astype(np.float64),
        check_selection(gpu, selection, end, rows, causal),
    )


def attend(
    gpu: Gpu,
    launch: Launch,
    inputs: dict[str, Buffer],
    values: dict[str, Float],
    call: dict[str, Any],
    fill: int | None,
) -> list[str]:
    """Run forward and backward, and return what differs from the reference."""
    row_shape = (launch.batch, launch.nheads, launch.seqlen_q)
    outputs = enqueue_both(gpu, launch, inputs, row_shape, call, fill)
    wanted = reference(values, launch, inputs["q"].shape[3] ** -0.5)
    wanted["lse_rest"] = np.zeros(row_shape)
    return [
        problem
        for name, buffer in outputs.items()
        if (problem := compare(name, gpu.download(buffer), wanted[name]))
    ]


def has_rest(launch: Launch) -> bool:
    """Whether the rest of the log-sum-exp is written and read.

    Hopper's backward with a bias needs it; without it, the sm80 code runs. The backward over few
    keys may be given it.
    """
    named = launch.name.startswith(
        ("dense rows", "listed rows", "wide heads", "few keys", "no keys")
    )
    return bool(launch.bias) and (launch.select is not None or named)


def enqueue_both(
    gpu: Gpu,
    launch: Launch,
    inputs: dict[str, Buffer],
    row_shape: tuple[int, ...],
    call: dict[str, Any],
    fill: int | None,
) -> dict[str, Buffer]:
    """Launch the forward and, if it is wanted, the backward; returns the buffers they write."""
    q = inputs["q"]
    scale = q.shape[-1] ** -0.5
    outputs = {
        "out": gpu.output(q.shape, q.dtype, fill),
        "lse": gpu.output(row_shape, "f32", fill),
    }

    def views(*names: str) -> dict[str, Any]:
        buffers = {name: inputs.get(name) or outputs.get(name) for name in names}
        return {name: None if x is None else x.view for name, x in buffers.items()}

    call |= views("q", "k", "v", "mask", "bias", "out", "lse")
    call |= {"softmax_scale": scale, "softcap": launch.softcap, "is_causal": launch.causal}
    if has_rest(launch):
        rest = gpu.output(row_shape, "f32", fill)
        call["lse_rest"] = rest.view
        if launch.seqlen_k == 0:  # the rest is 0 then, in each row
            outputs["lse_rest"] = rest
    arrivals = q.shape[0] * q.shape[2] if counts_blocks(launch) else 0
    enqueue(gpu, kernels.FwdParams(0, **call, num_splits=launch.splits), fill, arrivals)
    if launch.wants:
        for letter, gradient in (("q", "dq"), ("k", "dk"), ("v", "dv"), ("b", "dbias")):
            source = {"b": "bias"}.get(letter, letter)
            if letter in launch.wants and source in inputs:
                like = inputs[source]
                outputs[gradient] = gpu.output(like.shape, like.dtype, fill)
        call |= views("dout", "dlse", "dq", "dk", "dv", "dbias")
        enqueue(gpu, kernels.BwdParams(0, **call, deterministic=launch.deterministic), fill)
    return outputs


def enqueue(
    gpu: Gpu,
    params: kernels.FwdParams | kernels.BwdParams,
    fill: int | None,
    arrivals: int = 0,
) -> None:
    size = params.workspace_size()
    params.launch(gpu.workspace(size, fill, arrivals), size, 0)


def compare(name: str, found: Float, wanted: Float) -> str | None:
    """A coarse comparison; the attention suite has a finer one."""
    same = found == wanted
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(found - wanted))
    finite = np.abs(wanted[np.isfinite(wanted)])
    limit = 0.03 * float(finite.max(initial=1.0))
    if found.size == 0 or bool((error <= limit).all()):
        return None
    return f"{name}: error {float(np.nan_to_num(error, nan=np.inf).max()):.3g}, allowed {limit:.3g}"


def is_named(name: str, only: str) -> bool:
    """Launches whose names contain one of these texts, separated by commas; all if it is empty."""
    return any(part in name for part in only.split(","))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shard", default="0/1", help="run the I-th of N parts")
    parser.add_argument(
        "--poison", action="store_true", help="fill outputs and workspaces with 0xFF first"
    )
    parser.add_argument("--only", default="", help=is_named.__doc__)
    arguments = parser.parse_args()
    index, count = map(int, arguments.shard.split("/"))
    named = [launch for launch in all_launches() if is_named(launch[2].name, arguments.only)]
    gpu, failures, chosen = Gpu(), 0, named[index::count]
    print("architecture", kernels.device_architecture(0), flush=True)
    for dtype, head_dim, launch in chosen:
        start = time.perf_counter()
        problems = run_launch(gpu, dtype, head_dim, launch, 0xFF if arguments.poison else None)
        gpu.release()
        failures += bool(problems)
        seconds = time.perf_counter() - start
        print(
            f"{dtype} {head_dim} {launch.name}: {'; '.join(problems) or 'ok'} ({seconds:.2f} s)",
            flush=True,
        )
    print(f"finished {len(chosen)} launches, {failures} wrong", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
