"""Context parallel attention over processes of one machine (gloo), against a single process.

    python parallel_cases.py FOLDER WORLD...

Runs every case with each number of processes and writes FOLDER/WORLD.RANK.json: for each case the
error on that rank, or "". `test_context_parallel.py` runs it as a separate process, so that the
ranks are forked from a process that has imported everything and computed nothing.
"""

import functools
import json
import os
import random
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ranks
import torch
import torch.distributed as dist
from parallel_whole import both_ways, check, operands, part
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from dmattn import DynamicMaskAttention, KeyState, flash_dmattn_func
from dmattn.distributed import context_parallel_attention, exchange
from dmattn.distributed import groups as groups_of_ranks
from dmattn.distributed.beside import Beside

CASES: dict[str, Callable[[int, int], None]] = {}


def case(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CASES[function.__name__] = function
    return function


# --- cases ----------------------------------------------------------------------------------------


@case
def whole_sequence(rank: int, world: int) -> None:
    lengths = [60] * world
    for window in (1, 37, 61, 1000):
        both_ways(lambda window=window: check(rank, lengths, operands(lengths), window))


@case
def heads_of_scores(rank: int, world: int) -> None:
    lengths = [30] * world
    for heads in ((4, 2, 4), (4, 2, 1), (3, 1, 1), (2, 2, 2)):
        check(rank, lengths, operands(lengths, heads), 19)
    whole = operands(lengths)
    mine = [part(t, lengths, rank) for t in whole]
    shared = mine[3][:1].clone().requires_grad_()
    one_by_one = [
        context_parallel_attention(*(t[i : i + 1] for t in mine[:3]), shared, window_size=9)
        for i in range(2)
    ]
    together = context_parallel_attention(*mine[:3], shared, window_size=9)
    torch.testing.assert_close(together, torch.cat(one_by_one))
    both = [torch.autograd.grad(t.square().sum(), shared)[0] for t in (together, *one_by_one)]
    torch.testing.assert_close(both[0], both[1] + both[2])


@case
def settings(rank: int, world: int) -> None:
    lengths = [40] * world
    check(rank, lengths, operands(lengths), 25, softcap=2.0, softmax_scale=0.3)
    check(rank, lengths, operands(lengths), 25, deterministic=True)


@case
def frozen_operands(rank: int, world: int) -> None:
    lengths = [40] * world
    for learned in ((0, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 1), (0, 0, 0, 0)):
        flags = tuple(map(bool, learned))
        both_ways(lambda f=flags: check(rank, lengths, operands(lengths), 25, learned=f))


@case
def padding(rank: int, world: int) -> None:
    lengths = [50] * world
    whole = operands(lengths)
    mask = torch.rand(2, 50 * world) < 0.7
    mask[0, :60] = False  # all of rank 0, and more
    mask[1, -45:] = False
    both_ways(lambda: check(rank, lengths, whole, 33, mask))
    check(rank, lengths, whole, 33, mask.long())
    by_head = torch.rand(2, 2, 1, 50 * world) < 0.5
    keys = by_head[:, :, 0]
    chosen = whole[3].masked_fill(~keys, -torch.inf)
    want = flash_dmattn_func(*whole[:3], attn_bias=chosen, window_size=33, is_causal=True)
    own = [part(t, lengths, rank) for t in whole]
    own_mask = part(keys, lengths, rank)[:, :, None]
    got = context_parallel_attention(*own, window_size=33, attn_mask=own_mask)
    torch.testing.assert_close(got, part(want, lengths, rank))


@case
def scores_that_select_nothing(rank: int, world: int) -> None:
    """Ties between keys of two ranks: the later key is kept. Scores NaN and -inf are never kept."""
    lengths = [40] * world
    whole = operands(lengths)
    whole[3] = torch.zeros_like(whole[3])
    both_ways(lambda: check(rank, lengths, whole, 33))
    whole = operands(lengths)
    whole[3][:, :, ::3] = -torch.inf
    whole[3][:, :, 1::4] = torch.nan
    whole[3][0, 0, :47] = torch.nan
    both_ways(lambda: check(rank, lengths, whole, 33, learned=(True, True, True, False)))


@case
def packed_documents(rank: int, world: int) -> None:
    """Documents that lie on several ranks, and stretches of unequal lengths."""
    choose = random.Random(7 * world)
    for trial in range(12):
        torch.manual_seed(trial)  # masks are the same on all ranks, whatever ran before
        lengths = [choose.choice((0, 1, 30, 64, 130)) for _ in range(world)]
        lengths[choose.randrange(world)] += 1
        total = sum(lengths)
        cuts = sorted(choose.choices(range(total + 1), k=choose.choice((0, 1, 3, 9))))
        documents = [0, *cuts, total]
        mask = None if trial % 3 else torch.rand(2, total) < 0.8
        whole, window = operands(lengths, seed=trial), choose.choice((5, 40, 200))
        whole[3] = whole[3].round() if trial % 2 else whole[3]
        run = lambda: check(rank, lengths, whole, window, mask, documents)  # noqa: E731, B023
        both_ways(run)


@case
def window_of_more_keys_than_there_are(rank: int, world: int) -> None:
    """Ranks send no more keys than the longest stretch has, also with documents."""
    lengths, sent = [20 + i for i in range(world)], []
    start_gather = exchange.start_gather

    def record(place: exchange.Place, own: Tensor, beside: Beside) -> exchange.Sending:
        sent.append(own.shape[2])
        return start_gather(place, own, beside)

    with patch.object(exchange, "start_gather", record):
        total = sum(lengths)
        check(rank, lengths, operands(lengths), 1000, documents=[0, 13, total])
    assert sent == ([lengths[-1]] * 2 if world > 1 else [])  # scores, then keys and values


@case
def boundaries_as_tensors(rank: int, world: int) -> None:
    lengths = [40] * world
    whole, documents = operands(lengths), [0, 13, 13, 47 * world // 2, 40 * world]
    own = [part(t, lengths, rank) for t in whole]
    found = [
        context_parallel_attention(*own, window_size=9, cu_seqlens=bounds)
        for bounds in (documents, torch.tensor(documents), torch.tensor(documents).int())
    ]
    assert found[0].equal(found[1]) and found[0].equal(found[2])


@case
def default_device(rank: int, world: int) -> None:
    """The default device, on which torch makes tensors that name no device, plays no part."""
    lengths = [40] * world
    whole, documents = operands(lengths), [0, 13, 40 * world]
    own = [part(t, lengths, rank) for t in whole]
    want = context_parallel_attention(*own, window_size=9, cu_seqlens=documents)
    with torch.device("meta"):
        got = context_parallel_attention(*own, window_size=9, cu_seqlens=documents)
    assert got.equal(want)


@case
def groups(rank: int, world: int) -> None:
    """`group` as a mesh of one dimension, a dimension of a mesh, or a process group."""
    lengths = [40] * world
    check(rank, lengths, operands(lengths), 25, group=init_device_mesh("cpu", (world,)))
    check(rank, lengths, operands(lengths), 25, group=dist.group.WORLD)
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
        row, place = mesh.get_coordinate()
        for group in ((mesh, "context"), mesh["context"], (mesh, 1), mesh.get_group("context")):
            check(place, [40, 40], operands([40, 40], seed=row), 25, group=group)
        expect(ValueError, "DeviceMesh of 2 dimensions", lambda: attend(40, group=mesh))
        for dim in ("cp", 2):
            words = f"group: got a DeviceMesh and {dim!r}"
            expect(ValueError, words, lambda dim=dim: attend(40, group=(mesh, dim)))
        for dim in (1.0, None):
            words = f"group: got a DeviceMesh and {dim!r}"
            expect(TypeError, words, lambda dim=dim: attend(40, group=(mesh, dim)))
    expect(TypeError, "group: got 'cp'", lambda: attend(40, group="cp"))


@case
def groups_without_the_cpu(rank: int, world: int) -> None:
    """If groups carry no CPU tensors, as with nccl alone, ranks agree through a group of gloo.

    That works for ranks that are in unequal numbers of groups, too.
    """
    if world < 3:
        return
    dist.new_group([0, 1])
    everybody = dist.new_group(list(range(world)))
    lengths = [40] * world
    with patch.object(groups_of_ranks, "_carries_cpu", lambda group: False):
        for group in (everybody, dist.group.WORLD):
            check(rank, lengths, operands(lengths), 25, group=group)
        expect(ValueError, "window_size", lambda: attend(20, window_size=9 + (rank == 1)))


def attend(
    seqlen: int,
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    learned: bool = False,
    **named: Any,
) -> Tensor:
    q, k, v = (torch.randn(batch, seqlen, heads, 8, dtype=dtype) for heads in (4, 2, 2))
    scores = torch.randn(batch, 2, seqlen).requires_grad_(learned)
    return context_parallel_attention(q, k, v, scores, **({"window_size": 9} | named))


def expect(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        call()


@case
def wrong_arguments(rank: int, world: int) -> None:
    """The same error on every rank, and afterwards the ranks still work together."""
    last = rank == world - 1
    dense = torch.ones(2, 1, 20, 20, dtype=torch.bool)
    ring = "torch.distributed.tensor.experimental.context_parallel"
    expect(ValueError, ring, lambda: attend(20, attn_mask=dense if last else None))
    expect(ValueError, ring, lambda: attend(20, attn_mask=dense[0, 0]))
    expect(TypeError, "window_size", lambda: attend(20, window_size=2.5 if last else 2))
    expect(TypeError, "return_lse", lambda: attend(20, return_lse="yes" if last else True))
    expect(ValueError, "cu_seqlens: got", lambda: attend(20, cu_seqlens=[0, 30, 20 * world + 1]))
    expect(ValueError, "cu_seqlens: got", lambda: attend(20, cu_seqlens=[0, 30, 20]))
    unreadable = torch.empty(
        2, dtype=torch.int32, device="meta"
    )  # torch raises an error of its own
    bounds = unreadable if last else [0, 20 * world]
    expect(RuntimeError, "meta tensor", lambda: attend(20, cu_seqlens=bounds))
    if world > 1:
        facts = {"some": 1} if last else {"some": 1, "more": 2}
        differ = "more: got 2 on rank 0"
        expect(ValueError, differ, lambda: groups_of_ranks.agree(dist.group.WORLD, facts))
        odd = 21 if last else 20
        words = "tokens of a rank, without cu_seqlens: got 20 on rank 0"
        expect(ValueError, words, lambda: attend(odd))
        expect(ValueError, "window_size: got 9 on rank 0", lambda: attend(20, window_size=9 + last))
        expect(ValueError, "key: got [2, ", lambda: attend(20, batch=2 + last))
        by_query_head = torch.ones(2, 4, 1, 20, dtype=torch.bool) if last else None
        words = "heads that attn_bias and attn_mask tell apart: got 2 on rank 0"
        expect(ValueError, words, lambda: attend(20, attn_mask=by_query_head))
        wide = torch.float64 if last else torch.float32
        expect(ValueError, "key: got", lambda: attend(20, wide))
        expect(ValueError, "requires_grad", lambda: attend(20, learned=last))
        bounds = [0, 20 * world] if last else None
        expect(ValueError, "cu_seqlens: got None on rank 0", lambda: attend(20, cu_seqlens=bounds))
        shifted = [0, 5 + last, 20 * world]
        words = "cu_seqlens (checksum): got "
        expect(ValueError, words, lambda: attend(20, cu_seqlens=shifted))
    attend(20)


@case
def split_tensors(rank: int, world: int) -> None:
    """DTensors, which know themselves what each rank holds, are refused on all ranks."""
    mesh = init_device_mesh("cpu", (world,))
    lengths = [20] * world
    whole = operands(lengths)
    mine: list[Any] = [part(t, lengths, rank) for t in whole]
    split = [DTensor.from_local(t, mesh, [Shard(1 if t.dim() == 4 else 2)]) for t in mine]
    for name, place in (("query", 0), ("key", 1), ("value", 2), ("attn_bias", 3)):
        given = list(mine)
        if rank == world - 1:
            given[place] = split[place]
        call = functools.partial(context_parallel_attention, *given, window_size=9)
        expect(TypeError, f"{name}: got a DTensor, wanted a plain tensor", call)
    # They are also refused if a state is to be returned, and as the keys of a state.
    attend = functools.partial(flash_dmattn_func, *split[:3], attn_bias=split[3], window_size=9)
    words = "query: got a DTensor, wanted a plain tensor with state, return_state or cu_seqlens"
    expect(TypeError, words, functools.partial(attend, is_causal=True, return_state=True))
    words = "key: got a DTensor, wanted a plain tensor for a state"
    expect(TypeError, words, functools.partial(KeyState.of, *split[1:], 9))
    check(rank, lengths, whole, 9)


@case
def transforms(rank: int, world: int) -> None:
    """Transforms of torch.func, on one rank or on all, are refused on all ranks."""
    lengths = [20] * world
    mine = [part(t, lengths, rank) for t in operands(lengths)]

    def run(x: Tensor) -> Tensor:
        return context_parallel_attention(mine[0] * x, *mine[1:], window_size=9).sum()

    words = "context parallel attention: got a call within a transform of torch.func"
    one = torch.ones(())
    for there in (True, rank == world - 1):
        for transform, x in ((torch.func.grad, one), (torch.func.vmap, one.expand(2))):
            call, given = (transform(run), x) if there else (run, one)
            expect(RuntimeError, words, functools.partial(call, given))
    run(one)


@case
def gradients_are_the_callers(rank: int, world: int) -> None:
    """Overwriting returned outputs and gradients changes no inputs, and no later gradients."""
    lengths = [40] * world
    mine = [part(t, lengths, rank).clone().requires_grad_() for t in operands(lengths)]
    before = [t.detach().clone() for t in mine]

    def run() -> None:
        for t in mine:
            t.grad = None
        with torch.no_grad():
            out = context_parallel_attention(*mine, window_size=33)
            out.fill_(torch.nan)
        out = context_parallel_attention(*mine, window_size=33)
        dout = torch.ones_like(out)
        first = torch.autograd.grad(out, mine, dout, retain_graph=True)
        want = [t.clone() for t in first]
        for t in first:
            t.fill_(torch.nan)
        second = torch.autograd.grad(out, mine, dout, retain_graph=True)
        torch.testing.assert_close(list(second), want)

        seen: list[Tensor] = []
        hooks = [t.register_hook(seen.append) for t in mine]
        out.backward(dout, retain_graph=True)
        torch.testing.assert_close([t.grad for t in mine], want)
        out.backward(dout)
        torch.testing.assert_close([t.grad for t in mine], [2 * t for t in want])
        for hook in hooks:
            hook.remove()
        assert len(seen) == 2 * len(mine)
        for t in mine:
            t.grad.fill_(torch.nan)
        for kept, expected in zip(second, want, strict=True):
            torch.testing.assert_close(kept, expected)
            same = [t for t in seen if t.shape == expected.shape and torch.allclose(t, expected)]
            assert len(same) == 2
        assert dout.eq(1).all()
        assert all(t.equal(given) for t, given in zip(mine, before, strict=True))

    both_ways(run)


@case
def exchange_owns_what_it_adds_to(rank: int, world: int) -> None:
    """Gradients that reach the exchange, which adds to them in place, share memory with nothing."""
    lengths = [40] * world
    whole = operands(lengths)
    whole[2] = torch.randn_like(whole[1])  # all of one head_dim: attention is the last node
    mine = [part(t, lengths, rank).clone().requires_grad_() for t in whole]
    out, lse = context_parallel_attention(*mine, window_size=33, return_lse=True)
    assert out.grad_fn is not None
    arrived: list[Tensor] = []

    def record(grads: tuple[Tensor | None, ...], _: tuple[Tensor, ...]) -> None:
        arrived[:] = [t for t in grads if t is not None]

    out.grad_fn.register_hook(record)
    douts = [torch.randn_like(out), torch.randn_like(lse)]
    for chosen in ((0,), (1,), (0, 1)):
        given = [(out, lse)[i] for i in chosen], mine, [douts[i] for i in chosen]
        torch.autograd.grad(*given, retain_graph=True)
        assert len(arrived) == 4
        memory = [t.untyped_storage().data_ptr() for t in (*arrived, *mine, out, lse, *douts)]
        assert len(set(memory)) == len(memory)
        assert all(0 not in t.stride() for t in arrived)


@case
def key_used_more_than_once(rank: int, world: int) -> None:
    """The key is also the value of its call, is used in another call, and elsewhere in the loss."""
    lengths = [40] * world
    whole = operands(lengths)
    weight = torch.randn_like(whole[1])

    def loss(call: Callable[..., Tensor], given: list[Tensor], its_weight: Tensor) -> Tensor:
        q, k, v, scores = given
        twice = call(q, k, k, scores).sum() + call(q, k * 1, v, scores).square().sum()
        return twice + (k * its_weight).sum()

    def plain(q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> Tensor:
        return flash_dmattn_func(q, k, v, attn_bias=scores, window_size=33, is_causal=True)

    def parallel(*given: Tensor) -> Tensor:
        return context_parallel_attention(*given, window_size=33)

    leaves = [t.clone().requires_grad_() for t in whole]
    want = torch.autograd.grad(loss(plain, leaves, weight), leaves)

    def run() -> None:
        mine = [part(t, lengths, rank).clone().requires_grad_() for t in whole]
        found = torch.autograd.grad(loss(parallel, mine, part(weight, lengths, rank)), mine)
        for grad, expected in zip(found, want, strict=True):
            torch.testing.assert_close(grad, part(expected, lengths, rank))

    both_ways(run)


@case
def key_changed_before_the_backward(rank: int, world: int) -> None:
    """The first rank attends to its keys without a copy, and raises what plain attention raises."""
    lengths = [40] * world
    mine = [part(t, lengths, rank).clone().requires_grad_() for t in operands(lengths)]
    out = context_parallel_attention(*mine, window_size=33)
    with torch.no_grad():
        mine[1].zero_()
    if rank == 0:  # before it sends anything
        words = "modified by an inplace operation"
        expect(RuntimeError, words, lambda: torch.autograd.grad(out.sum(), mine))


@case
def second_derivatives(rank: int, world: int) -> None:
    """They are refused, also if the loss depends on the operands in other ways, too."""
    lengths = [40] * world
    mine = [part(t, lengths, rank).clone().requires_grad_() for t in operands(lengths)]
    out = context_parallel_attention(*mine, window_size=33)
    grads = torch.autograd.grad(out.sum(), mine, create_graph=True)
    for t in grads:
        loss = sum((leaf.sum() for leaf in mine), t.square().sum())
        for allow_unused in (False, True):
            with pytest.raises(RuntimeError, match="first derivatives only"):
                torch.autograd.grad(loss, mine, retain_graph=True, allow_unused=allow_unused)


@case
def batches_of_gradients(rank: int, world: int) -> None:
    """Batched gradients, as torch.autograd.functional.jacobian(vectorize=True) asks for them."""
    lengths = [40] * world
    mine = [part(t, lengths, rank).clone().requires_grad_() for t in operands(lengths)]

    def run() -> None:
        out = context_parallel_attention(*mine, window_size=33)
        douts = torch.randn(3, *out.shape, dtype=out.dtype)
        found = torch.autograd.grad(out, mine, douts, retain_graph=True, is_grads_batched=True)
        single = [torch.autograd.grad(out, mine, dout, retain_graph=True) for dout in douts]
        for grad, expected in zip(found, zip(*single, strict=True), strict=True):
            torch.testing.assert_close(grad, torch.stack(expected))

    both_ways(run)


# --- a layer --------------------------------------------------------------------------------------


def make_layer() -> DynamicMaskAttention:
    torch.manual_seed(3)
    layer = DynamicMaskAttention(32, 4, 2, window_size=21, dtype=torch.float64)
    nn.init.normal_(layer.A)
    return layer


def layer_case(rank: int, world: int) -> tuple[DynamicMaskAttention, Tensor, Tensor, Tensor]:
    """The plain layer with its gradients; a rank's input, expected output and loss weights."""
    plain = make_layer()
    x, weight = torch.randn(2, 2, 30 * world, 32, dtype=torch.float64)
    want = plain(x)
    (want * weight).sum().backward()
    lengths = [30] * world
    return plain, *(part(t[..., None], lengths, rank)[..., 0] for t in (x, want.detach(), weight))


@case
def layer(rank: int, world: int) -> None:
    """Positions continue from rank to rank; gradients of parameters are summed over the ranks."""
    plain, x, want, weight = layer_case(rank, world)
    own = make_layer()
    out = own(x, group=dist.group.WORLD)
    torch.testing.assert_close(out, want)
    (out * weight).sum().backward()
    for parameter, expected in zip(own.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, expected.grad)
    mask = torch.ones(2, 30 * world, dtype=torch.bool)
    mask[:, :17] = False
    torch.manual_seed(4)
    whole = torch.randn(2, 30 * world, 32, dtype=torch.float64)
    padded = plain(whole, attention_mask=mask)
    mine = slice(30 * rank, 30 * rank + 30)
    found = own(whole[:, mine], attention_mask=mask[:, mine], group=dist.group.WORLD)
    torch.testing.assert_close(found, padded[:, mine])
    own.dense_mask = True
    expect(ValueError, "dense_mask: got True", lambda: own(x, group=dist.group.WORLD))


@case
def wrong_arguments_of_a_layer(rank: int, world: int) -> None:
    """If the layer of one rank refuses a call, all ranks raise, and work together afterwards."""
    layer, wrong = make_layer(), rank == world - 1
    x, table = torch.randn(2, 20, 32, dtype=torch.float64), torch.randn(20, 4)
    attend = functools.partial(layer, group=dist.group.WORLD)
    expect(ValueError, "hidden_states: got shape", lambda: attend(x[..., : 31 if wrong else 32]))
    mask = torch.ones(2, 21 if wrong else 20, dtype=torch.bool)
    expect(ValueError, "attention_mask: got shape", lambda: attend(x, attention_mask=mask))
    tables = (table[:, :3] if wrong else table, table)
    expect(ValueError, "cos: got shape", lambda: attend(x, position_embeddings=tables))
    attend(x, position_embeddings=(table, table))


@case
def sharded_and_checkpointed(rank: int, world: int) -> None:
    """Parameters are sharded by FSDP2, and activations are computed again in the backward."""
    plain, x, want, weight = layer_case(rank, world)
    layers = nn.ModuleList([make_layer(), make_layer()])
    # FSDP2 of the oldest torch does not run on a CPU: there the ranks add up gradients themselves.
    shards = hasattr(torch.cpu.Stream, "record_event")
    for one in layers if shards else ():
        fully_shard(one, mesh=init_device_mesh("cpu", (world,)))
    for one, reentrant in zip(layers, (False, True), strict=True):
        given = x.clone().requires_grad_()  # else a reentrant checkpoint has no gradients

        def run(given: Tensor, one: nn.Module = one) -> Tensor:
            return one(given, group=dist.group.WORLD)

        out = checkpoint(run, given, use_reentrant=reentrant)
        torch.testing.assert_close(out, want)
        (out * weight).sum().backward()
        for parameter, expected in zip(one.parameters(), plain.parameters(), strict=True):
            if shards:
                assert isinstance(parameter.grad, DTensor)
                total = parameter.grad.full_tensor() * world  # FSDP takes the mean over the ranks
            else:
                total = parameter.grad
                dist.all_reduce(total)
            torch.testing.assert_close(total, expected.grad)


@case
def compiled(rank: int, world: int) -> None:
    """One graph without breaks, forward and backward; on two ranks only, since it takes seconds."""
    if world != 2:
        return
    _, x, want, weight = layer_case(rank, world)
    own, copied = make_layer(), make_layer()
    step = torch.compile(own, backend="aot_eager", fullgraph=True, dynamic=False)
    out = step(x, group=dist.group.WORLD)
    torch.testing.assert_close(out, want)
    (out * weight).sum().backward()
    (copied(x, group=dist.group.WORLD) * weight).sum().backward()
    for parameter, expected in zip(own.parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)

    def packed(q: Tensor, k: Tensor, v: Tensor, s: Tensor, bounds: Tensor) -> Tensor:
        return context_parallel_attention(q, k, v, s, window_size=9, cu_seqlens=bounds)

    lengths = [90] * world
    operand = [part(t, lengths, rank) for t in operands(lengths)]
    bounds = torch.tensor([0, 13, 60 * world, 90 * world])
    graph = torch.compile(packed, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(graph(*operand, bounds), packed(*operand, bounds))


@case
def repeatable(rank: int, world: int) -> None:
    """deterministic=True gives the same bits twice, in bfloat16."""
    found = []
    for _ in range(2):
        torch.manual_seed(rank)
        given = [torch.randn(1, 90, h, 16).bfloat16().requires_grad_() for h in (4, 2, 2)]
        scores = torch.randn(1, 2, 90, requires_grad=True)
        out = context_parallel_attention(*given, scores, window_size=40, deterministic=True)
        found.append([out, *torch.autograd.grad(out.square().sum(), [*given, scores])])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


@case
def example_trains(rank: int, world: int) -> None:
    """Ranks of the training example get the losses of one process."""
    examples = Path(__file__).parents[3] / "examples"
    if world != 2 or not examples.is_dir():
        return
    sys.path.insert(0, str(examples))
    from bytes_lm.config import Config
    from bytes_lm.parallel import Ranks
    from bytes_lm.text import Text
    from bytes_lm.training import make_model, train

    torch.manual_seed(0)
    text = Text(*torch.randint(0, 256, (2, 2000), dtype=torch.uint8), 1, 1)
    config = Config(layers=1, width=16, heads=2, kv_heads=1, length=48, window=9, batch=2, steps=6)
    found = [
        train(make_model(config, "window", cpu).double(), text, config, cpu, False, "", ranks)
        for cpu in (torch.device("cpu"),)
        for ranks in (None, Ranks(dist.group.WORLD))
    ]
    torch.testing.assert_close(torch.tensor(found[1].train), torch.tensor(found[0].train))
    assert abs(found[1].heldout[-1][1] - found[0].heldout[-1][1]) < 1e-6


# --- processes ------------------------------------------------------------------------------------


def work(rank: int, world: int, folder: Path) -> None:
    ranks.join(rank, world, folder)
    found = {}
    for name, run in CASES.items():
        try:
            run(rank, world)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        (folder / f"{world}.{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def lose_a_rank(rank: int, world: int, folder: Path) -> None:
    """The last rank dies between forward and backward; the others write down what they raise."""
    ranks.join(rank, world, folder)
    out = attend(20, learned=True)
    if rank == world - 1:
        os._exit(9)
    try:
        out.sum().backward()
        attend(20)
        found = ""
    except RuntimeError as error:
        found = str(error)
    (folder / f"dead.{rank}.json").write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    import torch._inductor.compile_fx  # once, for all ranks

    place = Path(sys.argv[1])
    for number in map(int, sys.argv[2:]):
        ranks.start(work, number, place)
    (place / "lost").mkdir()
    ranks.start(lose_a_rank, 3, place / "lost")
