"""Context parallel attention over the GPUs of a machine (NCCL), against one of them.

    torchrun --nproc-per-node 2 packages/dmattn/tests/parallel_gpus.py

For machines with several GPUs, which the suites do not need. Prints a line for each case: how far
output and gradients are from those of one GPU, relative to their norm, and in parentheses the same
for a second run on one GPU, whose sums are added in another order. Fails if a difference is larger
than rounding to bfloat16 explains.
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from dmattn import DynamicMaskAttention, flash_dmattn_func, select_keys
from dmattn.distributed import context_parallel, context_parallel_attention

SEQLEN, WINDOW = 12288, 700
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias")
LARGEST = 6e-3  # bfloat16 has 8 bits: two roundings make an error of up to 2 ** -8, 0.0039
failed: list[str] = []


def part(t: Tensor, lengths: list[int]) -> Tensor:
    """This rank's tokens of (B, S, heads, D) or (B, heads, S)."""
    rank, dim = dist.get_rank(), 2 if t.dim() == 3 else 1
    return t.narrow(dim, sum(lengths[:rank]), lengths[rank])


def operands(device: torch.device, heads_of_scores: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, SEQLEN, heads, 64) for heads in (8, 4, 4)]
    found = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
    found.append(torch.randn(2, heads_of_scores, SEQLEN, device=device))
    return [t.requires_grad_() for t in found]


def report(case: str, found: list[Tensor], wanted: list[Tensor], again: list[Tensor]) -> None:
    """Print the differences rank by rank, so that lines do not mix; every rank has to call it."""
    words = []
    for name, got, want, twice in zip(NAMES, found, wanted, again, strict=False):
        a, b, c = (torch.nan_to_num(t.detach().double(), neginf=0.0) for t in (got, want, twice))
        gap, noise = ((x - b).norm() / b.norm().clamp(min=1e-30) for x in (a, c))
        words.append(f"{name} {gap:.1e} ({noise:.1e}{', same bits' if got.equal(want) else ''})")
        if not gap <= LARGEST:
            failed.append(f"{case}: {name} {gap:.1e}")
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            print(f"{case}, rank {rank}: {', '.join(words)}", flush=True)


def compare(
    case: str,
    device: torch.device,
    lengths: list[int],
    whole: list[Tensor],
    mask: Tensor | None = None,
    documents: Tensor | None = None,
    attend: Callable[..., Any] = context_parallel_attention,
    **settings: Any,
) -> None:
    def alone() -> list[Tensor]:
        chosen = select_keys(whole[3], WINDOW, attn_mask=mask, cu_seqlens=documents)
        named = {"attn_bias": whole[3], "selection": chosen, "is_causal": True, "return_lse": True}
        results = flash_dmattn_func(*whole[:3], **named, **settings)
        torch.manual_seed(1)
        douts = [torch.randn_like(results[0]), torch.randn_like(results[1]) / 10]
        douts[1] = douts[1].where(results[1] > -torch.inf, 0.0)
        alone.douts = douts  # type: ignore[attr-defined]
        return [*results, *torch.autograd.grad(results, whole, douts)]

    wanted, again = alone(), alone()
    own = [part(t, lengths).detach().clone().requires_grad_() for t in whole]
    own_mask = None if mask is None else part(mask[:, None], lengths)[:, 0]
    results = attend(
        *own,
        window_size=WINDOW,
        attn_mask=own_mask,
        cu_seqlens=documents,
        return_lse=True,
        **settings,
    )
    douts = [part(t, lengths) for t in alone.douts]  # type: ignore[attr-defined]
    found = [*results, *torch.autograd.grad(results, own, douts)]
    report(case, found, *([part(t, lengths) for t in results] for results in (wanted, again)))


def function(device: torch.device, ranks: int) -> None:
    lengths = [SEQLEN // ranks] * ranks
    whole = operands(device)
    compare("whole sequence", device, lengths, whole)
    compare("softcap, deterministic", device, lengths, whole, softcap=5.0, deterministic=True)
    compare("scores per query head", device, lengths, operands(device, 8))
    mask = torch.rand(2, SEQLEN, device=device) < 0.6
    mask[0, : SEQLEN // ranks + 100] = False
    dist.broadcast(mask, 0)
    compare("padding", device, lengths, whole, mask)
    odd = [300 * (rank + 1) - 13 for rank in range(ranks - 1)]
    odd.append(SEQLEN - sum(odd))
    cuts = [0, 5, 100, 287, 5000, 5001, 11000, SEQLEN]
    bounds = torch.tensor(cuts, dtype=torch.int32, device=device)
    compare("documents, unequal stretches", device, odd, whole, mask, bounds)
    usual, context_parallel.GATHER_BYTES = context_parallel.GATHER_BYTES, 0
    compare("scan", device, lengths, whole)
    compare("scan, documents", device, odd, whole, mask, bounds)
    context_parallel.GATHER_BYTES = usual
    graph = torch.compile(context_parallel_attention, backend="aot_eager", fullgraph=True)
    compare("compiled", device, lengths, whole, attend=graph)
    compare("saved on the host", device, lengths, whole, attend=_saving_on_host)


def _saving_on_host(*arguments: Any, **named: Any) -> Any:
    """Attention whose saved tensors are on the host until the backward.

    They are copied back only after the event for which the exchange of gradients waits.
    """
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return context_parallel_attention(*arguments, **named)


def layer(device: torch.device, ranks: int) -> None:
    """FSDP2 and activation checkpointing, in bfloat16 by autocast."""

    def make() -> DynamicMaskAttention:
        torch.manual_seed(2)
        made = DynamicMaskAttention(256, 8, 4, window_size=WINDOW, device=device)
        nn.init.normal_(made.A)
        # Make scores differ more. By default softplus(dt) is 0.69 for all tokens, to within a
        # twentieth. The gradients of a row's scores add up to 0, so the gradient of A is a small
        # remainder of large sums, and rounding the output to bfloat16 changes it by 5 %, on one
        # GPU as well.
        nn.init.normal_(made.dt_proj.weight)
        return made

    plain, sharded = make(), make()
    fully_shard(sharded, mesh=init_device_mesh("cuda", (ranks,)))
    x, weight = torch.randn(2, 2, SEQLEN, 256, device=device)
    dist.broadcast(x, 0)
    dist.broadcast(weight, 0)
    lengths = [SEQLEN // ranks] * ranks
    runs = []
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            out = plain(x)
        (out * weight).sum().backward()
        runs.append([part(out[..., None], lengths)[..., 0], *[p.grad for p in plain.parameters()]])
        plain.zero_grad()
    mine, own_weight = (part(t[..., None], lengths)[..., 0] for t in (x, weight))
    with torch.autocast("cuda", torch.bfloat16):
        out = checkpoint(lambda t: sharded(t, group=dist.group.WORLD), mine, use_reentrant=False)
    (out * own_weight).sum().backward()
    grads = [p.grad.full_tensor() * ranks for p in sharded.parameters()]
    worst = [max(range(len(grads)), key=lambda i: _gap(grads[i], runs[0][1 + i]))]
    chosen = [out, *[grads[i] for i in worst]]
    wanted, again = ([run[0], *[run[1 + i] for i in worst]] for run in runs)
    names = [name for name, _ in plain.named_parameters()]
    report(f"layer, FSDP2, checkpoint (lse: worst, {names[worst[0]]})", chosen, wanted, again)


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def main() -> int:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # Without gloo, so that the ranks make a group of gloo for their agreements.
    dist.init_process_group("nccl", timeout=timedelta(seconds=60), device_id=device)
    ranks = dist.get_world_size()
    function(device, ranks)
    layer(device, ranks)
    print(f"rank {dist.get_rank()}: {'FAILED ' + '; '.join(failed) if failed else 'passed'}")
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
