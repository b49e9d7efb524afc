"""The forward kernel: a block of rows of one query head walks the keys that it may keep."""

import triton.language as tl

from dmattn.backends.triton.kernels.shared import (
    LN_2,
    any_of,
    ends_of,
    kept,
    kernel,
    keys_at,
    keys_of_rows,
    load_rows,
    operand_of,
    place_of,
    product,
    program_of_rows,
    rounded,
    sequence,
    softmax_step,
    store_rows,
)


@kernel
def forward(
    q, k, v, q_b, q_m, q_h, q_d, k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d,
    mask, mask_b, mask_h, mask_heads, mask_m, mask_n, mask_k0,
    bias, bias_b, bias_h, bias_heads, bias_m, bias_n, bias_k0,
    keys, rank, full, end, list_b, list_h, list_heads, width, rank_width,
    cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, total_q, total_k,
    nheads, group, scale, softcap,
    out, out_b, out_m, out_h, lse, lse_rest, lse_b, lse_h, m_blocks,
    D: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, LISTS: tl.constexpr,
    LIST_ROWS: tl.constexpr, BASE_2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute out, lse and lse_rest of BM rows of one query head.

    See `shared` for strides (q_b, q_m and so on) and for arguments that describe lists.
    """
    m_block, h, b = program_of_rows(m_blocks, nheads, CAUSAL)
    q_start, rows = sequence(cu_seqlens_q, b, seqlen_q, total_q)
    k_start, nkeys = sequence(cu_seqlens_k, b, seqlen_k, total_k)
    if m_block * BM >= rows:
        return
    m = m_block * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    offset = nkeys - rows
    number_of_list, begin, lo, middle, hi = keys_of_rows(
        rank, full, mask, b, h, list_b, list_h, list_heads, width, rank_width,
        m_block, rows, k_start, nkeys, CAUSAL, LISTS, LIST_ROWS, BM, BN,
    )  # fmt: skip
    q_rows = place_of(q, b, q_b, h, q_h, q_start, q_m)
    k_rows = place_of(k, b, k_b, h // group, k_h, k_start, k_n)
    v_rows = place_of(v, b, v_b, h // group, v_h, k_start, v_n)
    mask = operand_of(mask, b, h, q_start, k_start, mask_b, mask_h, mask_heads, mask_m, mask_k0)
    bias = operand_of(bias, b, h, q_start, k_start, bias_b, bias_h, bias_heads, bias_m, bias_k0)
    end = ends_of(end, number_of_list, seqlen_k)

    rows_q = load_rows(q_rows, m, q_m, m < rows, d, q_d, D)
    acc = tl.zeros([BM, BD], tl.float32)
    highest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    # First the keys that all rows keep, then the others. The inner loop is compiled once for each,
    # so that the former, which are most, need no test for single pairs. Without a mask there is no
    # branch in it that would keep the compiler from prefetching.
    for FULL in tl.static_range(1, -1, -1):
        if FULL == 0 or mask is None:
            first = lo if FULL else middle
            last = middle if FULL else hi
            for i in range(first, last, BN):
                n, exists = keys_at(keys, begin, i, hi, k_start, nkeys, LISTS, BN)
                usable = None if FULL else exists
                keep = kept(
                    m[:, None], n[None, :], exists[None, :], rows, offset, mask, mask_m, mask_n,
                    end, CAUSAL, LISTS, FULL,
                )  # fmt: skip
                if mask is None or any_of(keep):
                    keys_k = load_rows(k_rows, n, k_n, usable, d, k_d, D)
                    p, shrink, highest = softmax_step(
                        product(rows_q, tl.trans(keys_k)), highest,
                        m[:, None], n[None, :], exists[None, :], keep, rows,
                        bias, bias_m, bias_n, scale, softcap, SOFTCAP, BASE_2, FULL,
                    )  # fmt: skip
                    total = total * shrink + tl.sum(p, 1)
                    keys_v = load_rows(v_rows, n, v_n, usable, d, v_d, D)
                    acc = acc * shrink[:, None] + product(rounded(p, v.dtype.element_ty), keys_v)

    empty = highest == float("-inf")
    divisor = tl.where(empty, 1.0, total)
    out_rows = place_of(out, b, out_b, h, out_h, q_start, out_m)
    store_rows(out_rows, m, out_m, m < rows, d, 1, acc / divisor[:, None], D)
    top = tl.where(empty, 0.0, highest)
    if BASE_2:
        top *= LN_2
    row_lse = top + tl.log(divisor)
    at = b.to(tl.int64) * lse_b + h.to(tl.int64) * lse_h + q_start + m
    tl.store(lse + at, tl.where(empty, float("-inf"), row_lse), mask=m < rows)
    if lse_rest is not None:
        tl.store(lse_rest + at, (top - row_lse) + tl.log(divisor), mask=m < rows)
