"""Device functions that the kernels share: sequences, lists of keys, masks, logits and products.

Letters: BM rows and BN keys of a tile, BD the head dimension D rounded up to a power of two.
Arguments such as q_b, q_m, q_h and q_d are the strides of a tensor along batch (b), rows (m) or
keys (n), heads (h) and head_dim (d), in elements. FULL: a loop over tiles in which all rows keep
all keys, so that no pair has to be tested.

Programs are numbered along one axis of the grid, since the other axes take at most 65535 programs.
Offsets of rows and keys are 64-bit: an operand may have more than 2^31 elements.
"""

import triton
import triton.language as tl

from dmattn.backends.triton.tiles import is_interpreted

# The interpreter represents bfloat16 by integers: it would multiply those in a product, and it
# truncates where a GPU rounds.
INTERPRETED = tl.constexpr(is_interpreted())

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Triton specialises a kernel on integer arguments that are 1 or divisible by 16, and compiles it
# anew for others. That helps for strides, but not for these arguments.
kernel = triton.jit(
    do_not_specialize=(
        *("seqlen_q", "seqlen_k", "total_q", "total_k", "nheads", "group", "m_blocks", "n_blocks"),
        *("mask_heads", "bias_heads", "list_b", "list_h", "list_heads", "width", "rank_width"),
        *("list_blocks", "first_list_block", "first_head", "head_step", "heads_together"),
        *("sum_heads", "sum_batch"),
    )
)


def device_function(function):
    """The decorator of functions that kernels call: `triton.jit`, or nothing when interpreted.

    The interpreter patches triton.language in each call of a `triton.jit` function, which takes
    most of its time. Within a kernel it is patched already.
    """
    return function if INTERPRETED.value else triton.jit(function)


@device_function
def rounded(x, dtype: tl.constexpr):
    """float32 x in `dtype`, rounded to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        near = bits + 0x7FFF + ((bits >> 16) & 1)
        near = tl.where(x == x, near, bits | 0x400000)  # NaN stays NaN
        y = ((near >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y


@device_function
def product(a, b):
    """a @ b, accumulated in float32; float32 operands are not rounded to tf32."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        c = tl.dot(a, b, input_precision="ieee")
    return c


@device_function
def tanh(x):
    """tanh with float32 accuracy, from operations that every device has."""
    square = x * x
    small = 62.0 / 2835.0 * square - 17.0 / 315.0
    small = x + x * square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * small))
    large = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.25, small, tl.where(x < 0.0, -large, large))


@device_function
def sequence(cu_seqlens, b, length, total):
    """The first token and the number of tokens of packed sequence b, or else of a batch entry.

    Without cu_seqlens that is 0 and `length`. Wrong boundaries are clamped, so that nothing outside
    the `total` tokens is accessed.
    """
    if cu_seqlens is not None:
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens + b), 0), total)
        stop = tl.minimum(tl.maximum(tl.load(cu_seqlens + b + 1), start), total)
        count = tl.minimum(stop - start, length)
    else:
        start = 0 * b
        count = start + length
    return start, count


@device_function
def program_of_rows(m_blocks, nheads, CAUSAL: tl.constexpr):
    """The block of rows, query head and batch entry that this program works on.

    Under causality the last rows have the most keys. Their programs come first, so that no long
    program is left running at the end.
    """
    number = tl.program_id(0)
    m_block = number % m_blocks
    if CAUSAL:
        m_block = m_blocks - 1 - m_block
    return m_block, number // m_blocks % nheads, number // m_blocks // nheads


@device_function
def seen_by(m_block, rows, nkeys, CAUSAL: tl.constexpr, BM: tl.constexpr):
    """How many keys the first and the last row of a block may see by causality alone."""
    by_first = nkeys
    by_last = nkeys
    if CAUSAL:
        first_row = m_block * BM
        last_row = tl.minimum(first_row + BM, rows) - 1
        by_first = tl.minimum(tl.maximum(first_row + nkeys - rows + 1, 0), nkeys)
        by_last = tl.minimum(tl.maximum(last_row + nkeys - rows + 1, 0), nkeys)
    return by_first, by_last


@device_function
def place_of(base, b, stride_b, h, stride_h, start, stride):
    """The address of row or key `start` of batch entry b and head h."""
    place = base + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    return place + start.to(tl.int64) * stride


@device_function
def load_rows(base, row, stride_row, usable, d, stride_d, D: tl.constexpr):
    """Load rows of a matrix as (rows, BD), with zeros in rows that are not usable, and past D.

    usable: a bool per row; None if all rows are usable.
    """
    at = base + row.to(tl.int64)[:, None] * stride_row + d[None, :] * stride_d
    if usable is not None:
        inside = usable[:, None]
        if d.shape[0] > D:
            inside = inside & (d < D)[None, :]
        x = tl.load(at, mask=inside, other=0.0)
    elif d.shape[0] > D:
        x = tl.load(at, mask=(d < D)[None, :], other=0.0)
    else:
        x = tl.load(at)
    return x


@device_function
def store_rows(base, row, stride_row, usable, d, stride_d, x, D: tl.constexpr):
    """Write float32 (rows, BD) to a matrix, rounded to its dtype."""
    at = base + row.to(tl.int64)[:, None] * stride_row + d[None, :] * stride_d
    value = rounded(x, base.dtype.element_ty)
    tl.store(at, value, mask=usable[:, None] & (d < D)[None, :])


@device_function
def operand_of(base, b, h, q_start, k_start, stride_b, stride_h, heads, stride_m, stride_k0):
    """The address of the first entry of a mask or bias for batch entry b and query head h.

    heads: the number of query heads that share one of its heads.
    stride_m: None if it is the same for all rows.
    stride_k0: its stride along keys if it has an entry for each of all packed keys; 0 if its
        columns count from the first key of each sequence.
    """
    place = base
    if base is not None:
        place = base + b.to(tl.int64) * stride_b + (h // heads).to(tl.int64) * stride_h
        place += k_start.to(tl.int64) * stride_k0
        if stride_m is not None:
            place += q_start.to(tl.int64) * stride_m
    return place


@device_function
def listed_range(
    rank, full, number, k_start, by_first, by_last, width, rank_width, list_block,
    LISTS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The range of keys, or of the entries of a list, that a block of rows walks.

    Returns begin, lo, middle, hi: the range is lo .. hi - 1, counted from entry `begin` of the
    lists. Every row of the block keeps the entries lo .. middle - 1, unless there is a mask in
    addition to the list; middle - lo is a multiple of BN.

    Args:
        full: with LISTS = 2: how many leading entries of each list every row keeps.
        number: the number of the set of lists, for a batch entry and a head.
        by_first, by_last: how many keys the first and the last of the rows see by causality alone.
        width: number of entries from one list to the next.
        rank_width: number of entries of `rank` from one set of lists to the next.
        list_block: which list of the set, if there is more than one.
        LISTS: 0: no list, the keys are 0 .. by_last - 1. 1: one ascending list for all rows, where
            rank[j] is the number of entries before key j. 2: a list for every block of rows, where
            `rank` holds the length of each.
    """
    begin = number.to(tl.int64) * width
    lo = 0 * k_start
    middle = by_first
    hi = by_last
    if LISTS == 1:
        at = rank + number.to(tl.int64) * rank_width + k_start
        lo = tl.load(at)
        middle = tl.load(at + by_first)
        hi = tl.load(at + by_last)
    if LISTS == 2:
        which = number.to(tl.int64) * rank_width + list_block
        begin = which * width
        middle = tl.load(full + which)
        hi = tl.minimum(tl.load(rank + which), width)
    middle = lo + tl.maximum(tl.minimum(middle, hi) - lo, 0) // BN * BN
    return begin, lo, middle, hi


@device_function
def ends_of(end, number, seqlen_k):
    """The address of the interval ends for one set of lists; None if there are none."""
    place = end
    if end is not None:
        place = end + number.to(tl.int64) * seqlen_k
    return place


@device_function
def keys_of_rows(
    rank, full, mask, b, h, list_b, list_h, list_heads, width, rank_width,
    m_block, rows, k_start, nkeys,
    CAUSAL: tl.constexpr, LISTS: tl.constexpr, LIST_ROWS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The number of the set of lists of query head h, and the range that a block of rows walks.

    The range is that of `listed_range`, except that with a mask no entry counts as one that every
    row keeps.
    """
    by_first, by_last = seen_by(m_block, rows, nkeys, CAUSAL, BM)
    number = b * list_b + h // list_heads * list_h
    begin, lo, middle, hi = listed_range(
        rank, full, number, k_start, by_first, by_last, width, rank_width,
        m_block * BM // LIST_ROWS, LISTS, BN,
    )  # fmt: skip
    if mask is not None:
        middle = lo
    return number, begin, lo, middle, hi


@device_function
def keys_at(keys, begin, i, hi, k_start, nkeys, LISTS: tl.constexpr, BN: tl.constexpr):
    """Entries i .. i + BN - 1 of a range as keys, counted from the first of the sequence.

    Also returns which of them exist, that is, are before `hi`.
    """
    entry = i + tl.arange(0, BN)
    exists = entry < hi
    n = entry
    if LISTS > 0:
        n = tl.load(keys + begin + entry, mask=exists, other=0)
        if LISTS == 1:
            n -= k_start
        n = tl.minimum(tl.maximum(n, 0), nkeys - 1)  # a wrong entry becomes some other key
    return n, exists


@device_function
def kept(
    m, n, exists, rows, offset, mask, mask_m, mask_n, end,
    CAUSAL: tl.constexpr, LISTS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Which keys the rows keep: a bool tile, or `exists` if all rows keep all of them (FULL).

    Rows m lie along one dimension of the tile, keys n and `exists` along the other: (BM, 1) and
    (1, BN), or (1, BM) and (BN, 1). The same holds in the functions below.
    """
    keep = exists
    if not FULL:
        keep = keep & (m < rows)
        if CAUSAL:
            keep = keep & (n <= m + offset)
        if LISTS == 2:
            keep = keep & (m + offset < tl.load(end + n, mask=exists, other=0))
    if mask is not None:
        at = mask + n.to(tl.int64) * mask_n
        if mask_m is None:
            keep = keep & (tl.load(at, mask=exists, other=0) != 0)
        else:
            at = at + m.to(tl.int64) * mask_m
            keep = keep & (tl.load(at, mask=keep, other=0) != 0)
    return keep


@device_function
def logits(
    x, m, n, exists, keep, rows, bias, bias_m, bias_n, softcap,
    SOFTCAP: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Logits of scaled products x, -inf where not kept; and the tanh of the soft cap, or x.

    FULL: every row keeps every key, and `keep` is not read.
    """
    capped = x
    s = x
    if SOFTCAP:
        capped = tanh(x / softcap)
        s = capped * softcap
    if bias is not None:
        at = bias + n.to(tl.int64) * bias_n
        if bias_m is None:
            s += tl.load(at, mask=exists, other=0.0).to(tl.float32)
        else:
            at = at + m.to(tl.int64) * bias_m
            s += tl.load(at, mask=(m < rows) & exists, other=0.0).to(tl.float32)
    if not FULL:
        s = tl.where(keep, s, float("-inf"))
    return s, capped


@device_function
def softmax_step(
    x, highest, m, n, exists, keep, rows, bias, bias_m, bias_n, scale, softcap,
    SOFTCAP: tl.constexpr, BASE_2: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One step of a running softmax over tiles of keys.

    Returns p = exp(logits - the new highest), the factor by which earlier sums have to be
    multiplied, and the new highest.

    Args:
        x: dot products, not scaled.
        highest: the highest logit of each row so far, (BM,). If BASE_2, this and the new highest
            are multiplied by log2(e).
    """
    if BASE_2:
        scale_2 = scale * LOG2_E
        if FULL:
            higher = tl.maximum(highest, tl.max(x, 1) * scale_2)
            shift = higher
            p = tl.exp2(x * scale_2 - shift[:, None])
        else:
            s = tl.where(keep, x * scale_2, float("-inf"))
            higher = tl.maximum(highest, tl.max(s, 1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(s - shift[:, None])
        shrink = tl.exp2(highest - shift)
    else:
        s, _ = logits(
            x * scale, m, n, exists, keep, rows, bias, bias_m, bias_n, softcap, SOFTCAP, FULL
        )
        higher = tl.maximum(highest, tl.max(s, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(s - shift[:, None])
        shrink = tl.exp(highest - shift)
    return p, shrink, higher


@device_function
def rows_of_keys(
    n, exists, first, middle, rows, offset, list_block, mask,
    CAUSAL: tl.constexpr, LISTS: tl.constexpr, LIST_ROWS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The rows that may keep some of the keys n: m_lo .. m_hi - 1; those from m_middle on keep all.

    Rows past the last of the sequence may be included: they contribute nothing, since their lse is
    taken as +inf.

    Args:
        first: the index of the first of these keys in its list.
        middle: the index in the list up to which all rows keep the entries.
        list_block: with LISTS = 2, the block of rows that the list belongs to.
    """
    m_lo = 0 * list_block
    m_middle = m_lo
    m_hi = rows
    if LISTS == 2:
        m_lo = list_block * LIST_ROWS
        m_hi = tl.minimum(rows, m_lo + LIST_ROWS)
        m_middle = tl.where(first + BN <= middle, m_lo, m_hi)
    elif CAUSAL:
        first_key = tl.min(tl.where(exists, n, n + rows - offset), 0)
        last_key = tl.max(tl.where(exists, n, 0), 0)
        m_lo = tl.maximum(first_key - offset, 0) // BM * BM
        m_middle = (tl.maximum(last_key - offset, 0) + BM - 1) // BM * BM
        m_middle = tl.maximum(tl.minimum(m_middle, rows), m_lo)
    if mask is not None:
        m_middle = m_hi
    return m_lo, m_middle, m_hi


@device_function
def any_of(keep):
    """Whether any entry of a tile is True."""
    return tl.max(tl.max(keep.to(tl.int32), axis=1), axis=0) > 0


@device_function
def gradient_of_logits(
    x, m, n, exists, keep, rows, bias, bias_m, bias_n, scale, softcap, dp, lse, rest, delta,
    SOFTCAP: tl.constexpr, BASE_2: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Three tiles: probabilities, dlogits, and the gradient of the scaled dot products.

    Args:
        x: dot products, not scaled.
        dp: the gradient of the probabilities, dout @ v transposed.
        lse: +inf for rows that keep nothing; multiplied by log2(e) if BASE_2.
        rest: what rounding dropped from lse.
        delta: dout . out - dlse of each row.
    """
    if BASE_2:
        p = tl.exp2(x * (scale * LOG2_E) - lse)
        ds = p * (dp - delta)
        if not FULL:  # in rows that keep nothing dp may be anything
            p = tl.where(keep, p, 0.0)
            ds = tl.where(keep, ds, 0.0)
        dx = ds
    else:
        s, capped = logits(
            x * scale, m, n, exists, keep, rows, bias, bias_m, bias_n, softcap, SOFTCAP, FULL
        )
        p = tl.exp((s - lse) - rest)
        ds = tl.where(s == float("-inf"), 0.0, p * (dp - delta))
        dx = ds
        if SOFTCAP:
            dx = ds * (1.0 - capped * capped)
    return p, ds, dx


@device_function
def backward_rows(lse, rest, delta, at, m, rows, BASE_2: tl.constexpr):
    """lse, its rest and delta of rows m for `gradient_of_logits`, and which rows keep any key."""
    usable = m < rows
    row_lse = tl.load(lse + at + m, mask=usable, other=float("-inf"))
    row_delta = tl.load(delta + at + m, mask=usable, other=0.0)
    row_rest = tl.zeros_like(row_delta)
    if rest is not None:
        row_rest = tl.load(rest + at + m, mask=usable, other=0.0)
    keeps = row_lse > float("-inf")
    row_lse = tl.where(keeps, row_lse, float("inf"))
    if BASE_2:
        row_lse *= LOG2_E
    return row_lse, row_rest, row_delta, keeps
