"""The forward kernel: a block of rows of one query head walks the keys that it may keep."""

import triton.language as tl

from dmattn.backends.triton.kernels.shared import (
    any_of,
    kept,
    kernel,
    keys_at,
    listed_range,
    load_rows,
    logits,
    operand_of,
    place_of,
    product,
    program_of_rows,
    rounded,
    seen_by,
    sequence,
    store_rows,
)


@kernel
def forward(
    q, k, v, q_b, q_m, q_h, q_d, k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d,
    mask, mask_b, mask_h, mask_heads, mask_m, mask_n, mask_k0,
    bias, bias_b, bias_h, bias_heads, bias_m, bias_n, bias_k0,
    keys, rank, end, list_b, list_h, list_heads, width, rank_width,
    cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, total_q, total_k,
    nheads, group, scale, softcap,
    out, out_b, out_m, out_h, lse, lse_rest, lse_b, lse_h, m_blocks,
    D: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, LISTS: tl.constexpr,
    LIST_ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out and lse of BM rows of one query head."""
    m_block, h, b = program_of_rows(m_blocks, nheads)
    q_start, rows = sequence(cu_seqlens_q, b, seqlen_q, total_q)
    k_start, nkeys = sequence(cu_seqlens_k, b, seqlen_k, total_k)
    if m_block * BM >= rows:
        return
    m = m_block * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    offset = nkeys - rows
    seen = seen_by(m_block, rows, nkeys, CAUSAL, BM)
    number_of_list = b * list_b + h // list_heads * list_h
    begin, lo, hi = listed_range(
        rank, number_of_list, k_start, seen, width, rank_width, m_block * BM // LIST_ROWS,
        LISTS,
    )  # fmt: skip
    q_rows = place_of(q, b, q_b, h, q_h, q_start, q_m)
    hk = h // group
    k_rows = place_of(k, b, k_b, hk, k_h, k_start, k_n)
    v_rows = place_of(v, b, v_b, hk, v_h, k_start, v_n)
    mask = operand_of(mask, b, h, q_start, k_start, mask_b, mask_h, mask_heads, mask_m, mask_k0)
    bias = operand_of(bias, b, h, q_start, k_start, bias_b, bias_h, bias_heads, bias_m, bias_k0)
    if LISTS == 2:
        end = end + number_of_list.to(tl.int64) * seqlen_k

    rows_q = load_rows(q_rows, m, q_m, m < rows, d, q_d, D)
    acc = tl.zeros([BM, BD], tl.float32)
    highest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    for i in range(lo, hi, BN):
        n, exists = keys_at(keys, begin, i, hi, k_start, nkeys, LISTS, BN)
        keep = kept(
            m[:, None], n[None, :], exists[None, :], rows, offset, mask, mask_m, mask_n, end,
            CAUSAL, LISTS,
        )  # fmt: skip
        if any_of(keep):
            keys_k = load_rows(k_rows, n, k_n, exists, d, k_d, D)
            x = product(rows_q, tl.trans(keys_k)) * scale
            s, _ = logits(x, m[:, None], n[None, :], keep, bias, bias_m, bias_n, softcap, SOFTCAP)
            higher = tl.maximum(highest, tl.max(s, 1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp(s - shift[:, None])
            shrink = tl.exp(highest - shift)
            total = total * shrink + tl.sum(p, 1)
            keys_v = load_rows(v_rows, n, v_n, exists, d, v_d, D)
            acc = acc * shrink[:, None] + product(rounded(p, v.dtype.element_ty), keys_v)
            highest = higher

    empty = highest == float("-inf")
    divisor = tl.where(empty, 1.0, total)
    out_rows = place_of(out, b, out_b, h, out_h, q_start, out_m)
    store_rows(out_rows, m, out_m, m < rows, d, 1, acc / divisor[:, None], D)
    top = tl.where(empty, 0.0, highest)
    row_lse = top + tl.log(divisor)
    at = b.to(tl.int64) * lse_b + h.to(tl.int64) * lse_h + q_start + m
    tl.store(lse + at, tl.where(empty, float("-inf"), row_lse), mask=m < rows)
    if lse_rest is not None:
        tl.store(lse_rest + at, (top - row_lse) + tl.log(divisor), mask=m < rows)
