"""The backward kernels: delta, then dq by blocks of rows, dk and dv by blocks of keys.

All of them but the first compute the logits again. See `shared` for strides (q_b, q_m and so on)
and for arguments that describe lists.
"""

import triton.language as tl

from dmattn.backends.triton.kernels.shared import (
    any_of,
    backward_rows,
    device_function,
    ends_of,
    gradient_of_logits,
    kept,
    kernel,
    keys_at,
    keys_of_rows,
    listed_range,
    load_rows,
    operand_of,
    place_of,
    product,
    program_of_rows,
    rounded,
    rows_of_keys,
    sequence,
    store_rows,
)


@kernel
def row_delta(
    out, out_b, out_m, out_h, dout, dout_b, dout_m, dout_h, dout_d, lse, dlse, delta, lse_b, lse_h,
    cu_seqlens_q, seqlen_q, total_q, nheads, m_blocks,
    D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """delta = dout . out - dlse of each row; 0 for rows that keep nothing.

    Then dlogits = p * (dp - delta), as the derivative of lse by a logit is its probability p.
    """
    m_block, h, b = program_of_rows(m_blocks, nheads, False)
    q_start, rows = sequence(cu_seqlens_q, b, seqlen_q, total_q)
    m = m_block * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    at = b.to(tl.int64) * lse_b + h.to(tl.int64) * lse_h + q_start + m
    keeps = tl.load(lse + at, mask=m < rows, other=float("-inf")) > float("-inf")
    out_rows = place_of(out, b, out_b, h, out_h, q_start, out_m)
    dout_rows = place_of(dout, b, dout_b, h, dout_h, q_start, dout_m)
    o = load_rows(out_rows, m, out_m, keeps, d, 1, D)
    do = load_rows(dout_rows, m, dout_m, keeps, d, dout_d, D)
    found = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if dlse is not None:
        found -= tl.load(dlse + at, mask=keeps, other=0.0)
    tl.store(delta + at, found, mask=m < rows)


@kernel
def row_gradients(
    q, k, v, q_b, q_m, q_h, q_d, k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d,
    mask, mask_b, mask_h, mask_heads, mask_m, mask_n, mask_k0,
    bias, bias_b, bias_h, bias_heads, bias_m, bias_n, bias_k0,
    keys, rank, full, end, list_b, list_h, list_heads, width, rank_width,
    cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, total_q, total_k,
    nheads, group, scale, softcap,
    dout, dout_b, dout_m, dout_h, dout_d, lse, lse_rest, delta, lse_b, lse_h,
    dq, dq_b, dq_m, dq_h, dbias, m_blocks,
    D: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, LISTS: tl.constexpr,
    LIST_ROWS: tl.constexpr, BASE_2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute dq of BM rows of one query head, and the sums of their dlogits.

    Args:
        dq: None if not needed.
        dbias: float32, shaped as lse: the sum of the dlogits of each row; None if not needed.
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
    dout_rows = place_of(dout, b, dout_b, h, dout_h, q_start, dout_m)
    mask = operand_of(mask, b, h, q_start, k_start, mask_b, mask_h, mask_heads, mask_m, mask_k0)
    bias = operand_of(bias, b, h, q_start, k_start, bias_b, bias_h, bias_heads, bias_m, bias_k0)
    end = ends_of(end, number_of_list, seqlen_k)
    at = b.to(tl.int64) * lse_b + h.to(tl.int64) * lse_h + q_start

    row_lse, row_rest, delta_m, keeps = backward_rows(lse, lse_rest, delta, at, m, rows, BASE_2)
    rows_q = load_rows(q_rows, m, q_m, m < rows, d, q_d, D)
    do = load_rows(dout_rows, m, dout_m, keeps, d, dout_d, D)
    acc = tl.zeros([BM, BD], tl.float32)
    sums = tl.zeros([BM], tl.float32)
    for FULL in tl.static_range(1, -1, -1):  # as in the forward
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
                    keys_v = load_rows(v_rows, n, v_n, usable, d, v_d, D)
                    x = product(rows_q, tl.trans(keys_k))
                    dp = product(do, tl.trans(keys_v))
                    _, ds, dx = gradient_of_logits(
                        x, m[:, None], n[None, :], exists[None, :], keep, rows,
                        bias, bias_m, bias_n, scale, softcap,
                        dp, row_lse[:, None], row_rest[:, None], delta_m[:, None],
                        SOFTCAP, BASE_2, FULL,
                    )  # fmt: skip
                    if dq is not None:
                        acc += product(rounded(dx, k.dtype.element_ty), keys_k)
                    if dbias is not None:
                        sums += tl.sum(ds, 1)
    if dq is not None:
        dq_rows = place_of(dq, b, dq_b, h, dq_h, q_start, dq_m)
        store_rows(dq_rows, m, dq_m, m < rows, d, 1, acc * scale, D)
    if dbias is not None:
        tl.store(dbias + at + m, sums, mask=m < rows)


@kernel
def key_gradients(
    q, k, v, q_b, q_m, q_h, q_d, k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d,
    mask, mask_b, mask_h, mask_heads, mask_m, mask_n, mask_k0,
    bias, bias_b, bias_h, bias_heads, bias_m, bias_n, bias_k0,
    keys, rank, full, end, list_b, list_h, list_heads, width, rank_width,
    cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, total_q, total_k,
    nheads, group, scale, softcap,
    dout, dout_b, dout_m, dout_h, dout_d, lse, lse_rest, delta, lse_b, lse_h,
    dk, dv, dk_b, dk_n, dk_h, dbias, dbias_b, dbias_h,
    n_blocks, list_blocks, first_list_block, first_head, head_step, heads_together,
    D: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, LISTS: tl.constexpr,
    LIST_ROWS: tl.constexpr, BASE_2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    DBIAS_BY_HEAD: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of BN keys, and the sums of their dlogits, for query heads that share them.

    Without lists, or with one list for all rows, each key belongs to one program, which stores its
    gradients. With a list for every block of rows (LISTS = 2) a program adds the part from one list
    block to float32 gradients by atomics. In a launch for a single list block and one query head
    per key head, each key is added to once, which is repeatable; in one launch for all, the order
    of additions varies.

    Tiles are (BN, BM) here: the keys, which stay in the loop, are then divided among the warps.

    Args:
        dk, dv: None if not needed.
        dbias: float32 (batch, heads, keys): the sum of the dlogits of each key; None if not needed.
            Its heads are query heads if DBIAS_BY_HEAD, else those of k.
        list_blocks, first_list_block: how many list blocks this launch works on, and the first one.
        first_head, head_step, heads_together: the program with head number x works on
            `heads_together` query heads from first_head + x * head_step on, all of one key head.
    """
    number = tl.program_id(0)
    n_block = number % n_blocks
    list_block = first_list_block + number // n_blocks % list_blocks
    programs_h = nheads // head_step
    h0 = first_head + number // n_blocks // list_blocks % programs_h * head_step
    b = number // n_blocks // list_blocks // programs_h
    q_start, rows = sequence(cu_seqlens_q, b, seqlen_q, total_q)
    k_start, nkeys = sequence(cu_seqlens_k, b, seqlen_k, total_k)
    d = tl.arange(0, BD)
    offset = nkeys - rows
    number_of_list = b * list_b + h0 // list_heads * list_h
    begin, lo, middle, hi = listed_range(
        rank, full, number_of_list, k_start, nkeys, nkeys, width, rank_width, list_block, LISTS, BN
    )
    first = lo + n_block * BN
    if first >= hi:
        return
    n, exists = keys_at(keys, begin, first, hi, k_start, nkeys, LISTS, BN)
    end = ends_of(end, number_of_list, seqlen_k)
    m_lo, m_middle, m_hi = rows_of_keys(
        n, exists, first, middle, rows, offset, list_block, mask, CAUSAL, LISTS, LIST_ROWS, BM, BN
    )
    hk = h0 // group
    k_rows = place_of(k, b, k_b, hk, k_h, k_start, k_n)
    v_rows = place_of(v, b, v_b, hk, v_h, k_start, v_n)
    keys_k = load_rows(k_rows, n, k_n, exists, d, k_d, D)
    keys_v = load_rows(v_rows, n, v_n, exists, d, v_d, D)

    acc_k = tl.zeros([BN, BD], tl.float32)
    acc_v = tl.zeros([BN, BD], tl.float32)
    sums = tl.zeros([BN], tl.float32)
    # One loop over the steps of all heads, so that prefetching goes on from one head to the next;
    # but one loop per head if each has sums of its own.
    loops = heads_together if DBIAS_BY_HEAD else 1
    heads_of_loop = 1 if DBIAS_BY_HEAD else heads_together
    for loop in range(loops):
        for FULL in tl.static_range(2):
            if FULL == 0 or mask is None:
                m_first, steps = steps_of(m_lo, m_middle, m_hi, BM, FULL)
                for step in range(heads_of_loop * steps):
                    h = h0 + loop + step // steps
                    m = m_first + step % steps * BM + tl.arange(0, BM)
                    own_mask = operand_of(
                        mask, b, h, q_start, k_start, mask_b, mask_h, mask_heads, mask_m, mask_k0
                    )
                    keep = kept(
                        m[None, :], n[:, None], exists[:, None], rows, offset, own_mask, mask_m,
                        mask_n, end, CAUSAL, LISTS, FULL,
                    )  # fmt: skip
                    if mask is None or any_of(keep):
                        own_bias = operand_of(
                            bias, b, h, q_start, k_start, bias_b, bias_h, bias_heads, bias_m,
                            bias_k0,
                        )  # fmt: skip
                        at = b.to(tl.int64) * lse_b + h.to(tl.int64) * lse_h + q_start
                        q_rows = place_of(q, b, q_b, h, q_h, q_start, q_m)
                        dout_rows = place_of(dout, b, dout_b, h, dout_h, q_start, dout_m)
                        row_lse, row_rest, delta_m, keeps = backward_rows(
                            lse, lse_rest, delta, at, m, rows, BASE_2
                        )
                        rows_q = load_rows(q_rows, m, q_m, m < rows, d, q_d, D)
                        do = load_rows(dout_rows, m, dout_m, keeps, d, dout_d, D)
                        x = product(keys_k, tl.trans(rows_q))
                        dp = product(keys_v, tl.trans(do))
                        p, ds, dx = gradient_of_logits(
                            x, m[None, :], n[:, None], exists[:, None], keep, rows,
                            own_bias, bias_m, bias_n, scale, softcap,
                            dp, row_lse[None, :], row_rest[None, :], delta_m[None, :],
                            SOFTCAP, BASE_2, FULL,
                        )  # fmt: skip
                        if dv is not None:
                            acc_v += product(rounded(p, v.dtype.element_ty), do)
                        if dk is not None:
                            acc_k += product(rounded(dx, q.dtype.element_ty), rows_q)
                        if dbias is not None:
                            sums += tl.sum(ds, 1)
        if DBIAS_BY_HEAD:
            add_sums(dbias, b, h0 + loop, dbias_b, dbias_h, k_start + n, exists, sums, LISTS)
            sums = tl.zeros([BN], tl.float32)
    if not DBIAS_BY_HEAD:
        add_sums(dbias, b, hk, dbias_b, dbias_h, k_start + n, exists, sums, LISTS)
    add_rows(dk, b, dk_b, hk, dk_h, k_start, n, dk_n, exists, d, acc_k * scale, LISTS, D)
    add_rows(dv, b, dk_b, hk, dk_h, k_start, n, dk_n, exists, d, acc_v, LISTS, D)


@device_function
def steps_of(m_lo, m_middle, m_hi, BM: tl.constexpr, FULL: tl.constexpr):
    """The first row, and the number of steps of BM rows, of the rows that keep all keys (FULL).

    Not FULL: of those that may keep only some of them.
    """
    first = m_middle if FULL else m_lo
    last = m_hi if FULL else m_middle
    return first, (tl.maximum(last - first, 0) + BM - 1) // BM


@device_function
def add_sums(dbias, b, h, stride_b, stride_h, n, exists, sums, LISTS: tl.constexpr):
    """Store the sum of dlogits of each key, or add to it if several programs do (LISTS = 2)."""
    if dbias is not None:
        place = dbias + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + n
        if LISTS == 2:
            tl.atomic_add(place, sums, mask=exists, sem="relaxed")
        else:
            tl.store(place, sums, mask=exists)


@device_function
def add_rows(
    base, b, stride_b, h, stride_h, start, n, stride, exists, d, x,
    LISTS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store the gradient of keys, or add to it if several programs do (LISTS = 2)."""
    if base is not None:
        place = place_of(base, b, stride_b, h, stride_h, start, stride)
        if LISTS == 2:
            at = place + n.to(tl.int64)[:, None] * stride + d[None, :]
            tl.atomic_add(at, x, mask=exists[:, None] & (d < D)[None, :], sem="relaxed")
        else:
            store_rows(place, n, stride, exists, d, 1, x, D)


@kernel
def bias_gradient(
    q, k, v, q_b, q_m, q_h, q_d, k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d,
    mask, mask_b, mask_h, mask_heads, mask_m, mask_n, mask_k0,
    bias, bias_b, bias_h, bias_heads, bias_m, bias_n, bias_k0,
    cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, total_q, total_k,
    nheads, group, scale, softcap,
    dout, dout_b, dout_m, dout_h, dout_d, lse, lse_rest, delta, lse_b, lse_h,
    dbias, dbias_b, dbias_h, dbias_m, m_blocks, n_blocks, sum_heads, sum_batch,
    D: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, BASE_2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the gradient of a bias with rows and keys.

    Args:
        sum_heads: number of query heads that share a head of the bias, over which it is summed.
        sum_batch: number of batch entries that share one of the bias, over which it is summed.
    """
    number = tl.program_id(0)
    n_block = number % n_blocks
    m_block = number // n_blocks % m_blocks
    bias_head = number // n_blocks // m_blocks % (nheads // sum_heads)
    bias_batch = number // n_blocks // m_blocks // (nheads // sum_heads)
    q_start, rows = sequence(cu_seqlens_q, bias_batch, seqlen_q, total_q)
    k_start, nkeys = sequence(cu_seqlens_k, bias_batch, seqlen_k, total_k)
    m = m_block * BM + tl.arange(0, BM)
    n = n_block * BN + tl.arange(0, BN)
    d = tl.arange(0, BD)
    offset = nkeys - rows
    exists = n < nkeys
    total = tl.zeros([BM, BN], tl.float32)
    for i in range(sum_heads * sum_batch):
        b = bias_batch + i // sum_heads
        h = bias_head * sum_heads + i % sum_heads
        own_mask = operand_of(
            mask, b, h, q_start, k_start, mask_b, mask_h, mask_heads, mask_m, mask_k0
        )
        keep = kept(
            m[:, None], n[None, :], exists[None, :], rows, offset, own_mask, mask_m, mask_n, None,
            CAUSAL, 0, False,
        )  # fmt: skip
        if any_of(keep):
            own_bias = operand_of(
                bias, b, h, q_start, k_start, bias_b, bias_h, bias_heads, bias_m, bias_k0
            )
            hk = h // group
            q_rows = place_of(q, b, q_b, h, q_h, q_start, q_m)
            k_rows = place_of(k, b, k_b, hk, k_h, k_start, k_n)
            v_rows = place_of(v, b, v_b, hk, v_h, k_start, v_n)
            dout_rows = place_of(dout, b, dout_b, h, dout_h, q_start, dout_m)
            at = b.to(tl.int64) * lse_b + h.to(tl.int64) * lse_h + q_start
            row_lse, row_rest, delta_m, keeps = backward_rows(
                lse, lse_rest, delta, at, m, rows, BASE_2
            )
            rows_q = load_rows(q_rows, m, q_m, m < rows, d, q_d, D)
            keys_k = load_rows(k_rows, n, k_n, exists, d, k_d, D)
            x = product(rows_q, tl.trans(keys_k))
            do = load_rows(dout_rows, m, dout_m, keeps, d, dout_d, D)
            keys_v = load_rows(v_rows, n, v_n, exists, d, v_d, D)
            dp = product(do, tl.trans(keys_v))
            _, ds, _ = gradient_of_logits(
                x, m[:, None], n[None, :], exists[None, :], keep, rows,
                own_bias, bias_m, bias_n, scale, softcap,
                dp, row_lse[:, None], row_rest[:, None], delta_m[:, None],
                SOFTCAP, BASE_2, False,
            )  # fmt: skip
            total += ds
    place = dbias + bias_batch.to(tl.int64) * dbias_b + bias_head.to(tl.int64) * dbias_h
    row = q_start.to(tl.int64) + m
    tl.store(
        place + row[:, None] * dbias_m + n[None, :],
        rounded(total, dbias.dtype.element_ty),
        mask=(m < rows)[:, None] & exists[None, :],
    )
