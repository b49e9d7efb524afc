"""The table of what is timed: each case names its contenders, which are in peers.py."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

WINDOWS_A_SIDE = 8  # of the images that windows are cut from


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of one group. `contenders` are names of functions in peers.py."""

    group: str
    name: str
    contenders: tuple[str, ...]
    batch: int = 1
    seqlen_q: int = 16384
    seqlen_k: int = 16384
    nheads: int = 16
    nheads_k: int = 16
    head_dim: int = 128
    causal: bool = False
    kept: int | None = None  # keys that the key mask or the window keeps
    running: bool = False  # each row keeps the `kept` best keys up to its own
    bias: str = ""  # "key": (B, HK, 1, Sk); "key of heads": (B, H, 1, Sk); "dense": (B, H, Sq, Sk)
    shared: str = ""  # what shares a dense bias: "batch", "heads" or both
    bias_is_float32: bool = False
    softcap: float = 0.0
    tiles: float | None = None  # the share of mask tiles of 128 x 128 that are kept whole
    mask: str = ""  # "padding": (B, 1, 1, Sk), of `kept` keys on average; "windows": (B, 1, Sq, Sk)
    backward: bool = True
    graphed: bool = False  # time replays of a CUDA graph: what a decoding loop runs
    quick: bool = False  # part of --quick
    budget_s: float | None = None  # seconds of timing, if not what --budget says
    memory: bool = False  # also measure the memory that the forward takes
    attends: bool = True  # False: no matrix products to count
    steps_cache: bool = False  # a token goes into a cache of `kept` keys and attends to it
    lengths: tuple[int, ...] = ()  # of the sequences packed one after the other, batch 1

    @property
    def pairs(self) -> int:
        """Query-key pairs that count as work, per batch and query head."""
        if self.lengths:
            return sum(n * (n + 1) // 2 if self.causal else n * n for n in self.lengths)
        if self.tiles is not None:
            return round(self.seqlen_q * self.seqlen_k * self.tiles)
        if self.mask == "windows":  # along one side the last window is cut in two
            side, half = math.isqrt(self.seqlen_q), math.isqrt(self.seqlen_q) // 2
            whole = (WINDOWS_A_SIDE - 1) * side**2
            return ((whole + half**2 + (side - half) ** 2) // WINDOWS_A_SIDE) ** 2
        if self.kept is not None:
            rows, window = self.seqlen_q, self.kept
            if self.running:
                full = max(rows - window, 0)
                return full * window + min(rows, window) * (min(rows, window) + 1) // 2
            pairs = rows * window
            return pairs // 2 if self.causal else pairs
        if self.causal:
            return self.seqlen_q * (self.seqlen_q + 1) // 2
        return self.seqlen_q * self.seqlen_k

    @property
    def flops(self) -> float:
        """Of the forward's two matrix products; the backward's five count as 2.5 times that."""
        return 4.0 * self.batch * self.nheads * self.head_dim * self.pairs * self.attends


def _dense_causal() -> list[Case]:
    shapes = (
        ("B1 S16384 H16 D128", 1, 16384, 16, 16, 128),
        ("B4 S4096 H16 D128", 4, 4096, 16, 16, 128),
        ("B1 S16384 H32 D64", 1, 16384, 32, 32, 64),
        ("B1 S16384 H8 D256", 1, 16384, 8, 8, 256),
        ("B1 S16384 H16/1 D128", 1, 16384, 16, 1, 128),
        ("B1 S16384 H16 D96", 1, 16384, 16, 16, 96),
        ("B1 S16384 H8 D192", 1, 16384, 8, 8, 192),
        ("B32 S512 H16 D64", 32, 512, 16, 16, 64),
        ("B2 S8192 H32/8 D128", 2, 8192, 32, 8, 128),
        ("B8 S2048 H32/8 D128", 8, 2048, 32, 8, 128),
    )
    return [
        Case(
            "dense causal",
            name,
            ("dmattn", "sdpa_flash", "sdpa_cudnn"),
            batch,
            seqlen,
            seqlen,
            nheads,
            nheads_k,
            head_dim,
            causal=True,
            quick=head_dim == 128 and nheads == nheads_k,
        )
        for name, batch, seqlen, nheads, nheads_k, head_dim in shapes
    ]


def _key_masks() -> list[Case]:
    cases = []
    for causal in (False, True):
        for kept in (1024, 2048, 4096, 8192, 16384):
            peers = ["dmattn_masked"]
            if not causal:
                peers.append("gather_sdpa_flash")
            if kept == 1024:
                peers.append("sdpa_efficient_key_mask")
            cases.append(
                Case(
                    "key mask" + (", causal" if causal else ""),
                    f"S16384 H16/4 D128 w{kept}",
                    tuple(peers),
                    nheads_k=4,
                    causal=causal,
                    kept=kept,
                    bias="key",
                    quick=kept in (1024, 16384) and not causal,
                )
            )
    return cases


# A bias [1, 1, S, S].
_SHARED_BY_ALL: dict[str, Any] = {"shared": "batch and heads", "bias_is_float32": True}


def _dense_bias() -> list[Case]:
    peers = ("dmattn", "sdpa_efficient", "sdpa_cudnn_no_dbias", "flex")
    shapes = ((1, 8192, 16, 128), (2, 4096, 16, 64), (1, 4096, 8, 256))
    own = [
        Case(
            "dense bias",
            f"B{batch} S{seqlen} H{nheads} D{head_dim}",
            peers,
            batch,
            seqlen,
            seqlen,
            nheads,
            nheads,
            head_dim,
            bias="dense",
            quick=seqlen == 8192,
        )
        for batch, seqlen, nheads, head_dim in shapes
    ]
    shared = dataclasses.replace(own[1], contenders=("dmattn", "flex"), quick=False)
    named = f"{shared.name}, bias"
    both = dataclasses.replace(
        shared,
        name="B2 S4096 H16 D128, bias [1, 1, S, S] in float32",
        head_dim=128,
        **_SHARED_BY_ALL,
    )
    return [
        *own,
        dataclasses.replace(shared, name=f"{named} [1, H, S, S]", shared="batch"),
        dataclasses.replace(shared, name=f"{named} [B, 1, S, S]", shared="heads"),
        both,
    ]


_S8192_H8_D256: dict[str, Any] = {"seqlen_q": 8192, "seqlen_k": 8192, "head_dim": 256}
_S8192_H8_D256 |= {"nheads": 8, "nheads_k": 8}


def _features() -> list[Case]:
    """What masks and biases cost, or save, beside the same call without them."""
    plain = Case("", "", (), head_dim=128)
    key = dataclasses.replace(
        plain, group=KEY_BIAS, contenders=("dmattn", "dmattn_no_bias"), causal=True, bias="key"
    )
    contenders = ("dmattn_masked", "dmattn_no_bias", "flex_tiles")
    tiles = dataclasses.replace(plain, group=TILES, contenders=contenders, tiles=0.5)
    name = "B1 S16384 H{} D{}"
    return [
        dataclasses.replace(key, name=name.format(h, d), nheads=h, nheads_k=h, head_dim=d)
        for h, d in ((16, 128), (32, 64), (16, 96), (8, 192), (8, 256))
    ] + [
        dataclasses.replace(tiles, name="B1 S16384 H16 D128"),
        dataclasses.replace(tiles, name="B1 S8192 H8 D256", **_S8192_H8_D256),
        dataclasses.replace(
            plain,
            group=SLIDING,
            name="B1 S16384 H16 D128 w1024",
            contenders=("dmattn_sliding", "flex_sliding"),
            causal=True,
            kept=1024,
            running=True,
        ),
    ]


def _deterministic() -> list[Case]:
    dense = Case(DETERMINISTIC, "", ("dmattn_masked_deterministic", "dmattn"), causal=True)
    windows = ("dmattn_window_deterministic", "dmattn_window")
    wide = dataclasses.replace(dense, name="dense causal B1 S16384 H16 D128")
    narrow = dataclasses.replace(
        dense, name="dense causal B1 S16384 H32 D64", nheads=32, nheads_k=32, head_dim=64
    )
    widest = dataclasses.replace(
        dense, name="dense causal B1 S16384 H8 D256", nheads=8, nheads_k=8, head_dim=256
    )
    tiles = dataclasses.replace(
        dense,
        name="half of the tiles B1 S16384 H16 D128",
        contenders=("dmattn_masked_deterministic", "dmattn_masked", "flex_tiles"),
        causal=False,
        tiles=0.5,
    )
    wide_tiles = dataclasses.replace(
        tiles,
        name="half of the tiles B1 S8192 H8 D256",
        **_S8192_H8_D256,
    )
    sliding = dataclasses.replace(
        dense,
        name="sliding window B1 S16384 H16 D128 w1024",
        contenders=("dmattn_sliding_deterministic", "dmattn_sliding", "flex_sliding"),
        kept=1024,
        running=True,
    )
    biased = dataclasses.replace(
        dense,
        name="bias with gradient B1 S4096 H16 D128",
        seqlen_q=4096,
        seqlen_k=4096,
        causal=False,
        bias="dense",
    )
    shared = dataclasses.replace(
        biased,
        name="float32 bias [1, 1, S, S] with gradient B2 S4096 H16 D128",
        batch=2,
        **_SHARED_BY_ALL,
    )
    return [
        wide,
        narrow,
        widest,
        tiles,
        wide_tiles,
        sliding,
        biased,
        shared,
        _top(DETERMINISTIC, "running top-w B1 S16384 H16/4 D128 w1024", windows, 16384, 1024),
        _top(DETERMINISTIC, "running top-w B1 S32768 H2/1 D64 w1024", windows, 32768, 1024, True),
        _wide_top(DETERMINISTIC, "running top-w B1 S16384 H8/2 D256 w1024", windows),
    ]


def _beside_few_keys() -> list[Case]:
    """Running top-w beside attention to w neighbouring keys, which is less than half the job."""
    peers = ("dmattn_window", "sdpa_cudnn_few_keys")
    cases = []
    for batch, seqlen, nheads, nheads_k, head_dim, kept in (
        (1, 16384, 16, 4, 64, 512),
        (1, 16384, 16, 4, 64, 1024),
        (1, 16384, 16, 4, 128, 512),
        (1, 16384, 16, 4, 128, 1024),
        (1, 16384, 16, 4, 128, 2048),
        (1, 16384, 8, 2, 256, 1024),
        # As many key heads as query heads: the bytes of keys and of their gradients weigh most.
        (1, 16384, 16, 16, 128, 1024),
        (4, 8192, 16, 16, 64, 512),
        (10, 5953, 16, 16, 96, 512),
        (12, 4760, 24, 24, 64, 2048),
        (2, 8192, 16, 16, 128, 512),
        # As many sequences as a training step may have.
        (8, 4096, 32, 8, 128, 1024),
        # Few rows: the selection takes a good part of the time.
        (1, 4096, 8, 8, 64, 1024),
        (1, 8192, 12, 12, 64, 768),
    ):
        name = f"B{batch} S{seqlen} H{nheads}/{nheads_k} D{head_dim} w{kept}"
        case = _top(FEW_KEYS, name, peers, seqlen, kept)
        case = dataclasses.replace(case, nheads=nheads, nheads_k=nheads_k, head_dim=head_dim)
        cases.append(dataclasses.replace(case, batch=batch))
    return cases


def _odd_lengths() -> list[Case]:
    cases = []
    for bias in ("", "dense"):
        for seqlen_k in (4096, 4095):
            cases.append(
                Case(
                    "odd length" + (", dense bias" if bias else ""),
                    f"B2 Sq4096 Sk{seqlen_k} H16 D128",
                    ("dmattn", "sdpa_efficient" if bias else "sdpa_flash"),
                    2,
                    4096,
                    seqlen_k,
                    bias=bias,
                )
            )
    return cases


def _few_tokens() -> list[Case]:
    """Short texts and windows of images, many to a batch, and few keys for many rows."""
    own, masked = ("dmattn",), ("dmattn_masked",)
    beside = ("sdpa_efficient", "sdpa_cudnn_no_dbias")
    plain = (*own, "sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
    text = Case(FEW_TOKENS, "B256 S128 H12 D64", plain, 256, 128, 128, 12, 12, 64)
    swin = Case(FEW_TOKENS, "B2048 S49 H4 D32, bias [1, H, S, S]", (), 2048, 49, 49, 4, 4, 32)
    swin = dataclasses.replace(swin, bias="dense", shared="batch")

    def padded(batch: int, tokens: int) -> Case:
        return dataclasses.replace(
            text,
            name=f"B{batch} S{tokens} H12 D64, mask [B, 1, 1, S]",
            contenders=(*masked, "sdpa_cudnn", "sdpa_efficient"),
            batch=batch,
            seqlen_q=tokens,
            seqlen_k=tokens,
            mask="padding",
            kept=tokens * 3 // 4,
        )

    return [
        text,
        padded(256, 128),
        Case(FEW_TOKENS, "B1024 S64 H12 D64", plain, 1024, 64, 64, 12, 12, 64),
        padded(1024, 64),
        Case(FEW_TOKENS, "B2048 S32 H8 D64", plain, 2048, 32, 32, 8, 8, 64),
        dataclasses.replace(swin, contenders=(*own, *beside)),
        dataclasses.replace(
            swin,
            name=f"{swin.name}, mask [B, 1, S, S]",
            contenders=(*masked, *beside),
            mask="windows",
        ),
        Case(FEW_TOKENS, "B256 S197 H12 D64", plain, 256, 197, 197, 12, 12, 64),
        padded(32, 512),
        Case(FEW_TOKENS, "B8 Sq4096 Sk77 H10 D64", plain, 8, 4096, 77, 10, 10, 64),
        Case(FEW_TOKENS, "B2 Sq1024 Sk77 H20 D64", plain, 2, 1024, 77, 20, 20, 64),
    ]


def _few_rows() -> list[Case]:
    """Rows of a few hundred tokens over a long cache, as in a prompt that is read in chunks."""
    plain = Case(FEW_ROWS, "", (), 1, 512, 32768, 8, 8, backward=False)
    biased = dataclasses.replace(plain, bias="dense", shared="heads")
    with_bias = ("dmattn", "sdpa_efficient", "sdpa_cudnn_no_dbias", "flex")
    name = "B1 Sq512 Sk32768 H8 D128"
    return [
        dataclasses.replace(plain, name=name, contenders=("dmattn", "sdpa_flash", "sdpa_cudnn")),
        dataclasses.replace(
            plain, name=f"{name}, softcap", contenders=("dmattn", "flex_softcap"), softcap=30.0
        ),
        dataclasses.replace(biased, name=f"{name}, bias [1, 1, Sq, Sk]", contenders=with_bias),
        dataclasses.replace(
            biased,
            name=f"{name}, float32 bias [1, 1, Sq, Sk]",
            contenders=("dmattn", "flex"),
            bias_is_float32=True,
        ),
        dataclasses.replace(
            plain,
            name=f"{name}, mask of tiles",
            contenders=("dmattn_masked", "flex_tiles"),
            tiles=0.5,
        ),
    ]


PADDED_BIAS = "bias beside padding"


def _padded_bias() -> list[Case]:
    """Texts as for T5, and triangle attention over a pair representation."""
    beside = ("sdpa_efficient", "sdpa_cudnn_no_dbias")
    shape = (64, 512, 512, 8, 8, 64)
    text = Case(PADDED_BIAS, "B64 S512 H8 D64", ("dmattn_masked", *beside), *shape)
    text = dataclasses.replace(text, bias="dense", shared="batch", mask="padding", kept=384)
    odd = dataclasses.replace(text, seqlen_q=509, seqlen_k=509, kept=381)
    pairs = dataclasses.replace(text, batch=256, seqlen_q=256, seqlen_k=256, nheads=4, nheads_k=4)
    return [
        text,
        dataclasses.replace(text, name=f"{text.name}, float32 bias", bias_is_float32=True),
        dataclasses.replace(odd, name="B64 S509 H8 D64"),
        dataclasses.replace(pairs, name="B256 S256 H4 D32", head_dim=32, kept=192),
    ]


PACKED = "packed sequences"


def _drawn(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Lengths, each equally likely; the same in each run, so that runs can be compared."""
    generator = random.Random(1)
    return tuple(generator.randint(shortest, longest) for _ in range(count))


LONG, SHORT = _drawn(16, 512, 8192), _drawn(256, 64, 512)


def _packed() -> list[Case]:
    plain = [
        Case(
            PACKED,
            name,
            ("dmattn_varlen", "dmattn_padded_batch", "torch_varlen"),
            seqlen_q=sum(lengths),
            seqlen_k=sum(lengths),
            nheads=nheads,
            nheads_k=nheads_k,
            head_dim=head_dim,
            causal=True,
            quick=lengths is LONG,
            lengths=lengths,
        )
        for name, lengths, nheads, nheads_k, head_dim in (
            ("B16 S512..8192 H16 D128", LONG, 16, 16, 128),
            ("B16 S512..8192 H16/4 D128", LONG, 16, 4, 128),
            ("B16 S512..8192 H8 D256", LONG, 8, 8, 256),
            ("B256 S64..512 H16 D128", SHORT, 16, 16, 128),
        )
    ]
    biased = dataclasses.replace(
        plain[1],
        name=f"{plain[1].name}, bias for each key",
        contenders=("dmattn_varlen", "flex_packed"),
        bias="key",
    )
    return [*plain, biased]


def _decode() -> list[Case]:
    step = Case("decode", "", (), seqlen_q=1, backward=False, graphed=True, quick=True)
    dense = ("dmattn", "sdpa_flash", "sdpa_cudnn")
    large = dataclasses.replace(step, batch=8, seqlen_k=32768, nheads=32, nheads_k=8)
    long = dataclasses.replace(step, seqlen_k=524288, nheads=2, nheads_k=1)
    small = dataclasses.replace(large, seqlen_k=2048)
    tokens = dataclasses.replace(large, seqlen_q=8, contenders=dense)
    return [
        dataclasses.replace(large, name="B8 S32768 H32/8 D128", contenders=dense),
        dataclasses.replace(long, name="B1 S524288 H2/1 D128", contenders=dense),
        dataclasses.replace(small, name="B8 S2048 H32/8 D128", contenders=dense),
        dataclasses.replace(small, name="B1 S2048 H32/8 D128", contenders=dense, batch=1),
        dataclasses.replace(tokens, name="B8 S32768 H32/8 D128, 8 tokens"),
        dataclasses.replace(tokens, name="B1 S32768 H32/8 D128, 8 tokens", batch=1),
        dataclasses.replace(tokens, name="B8 S2048 H32/8 D128, 8 tokens", seqlen_k=2048),
        dataclasses.replace(tokens, name="B1 S32768 H32/8 D128, 32 tokens", batch=1, seqlen_q=32),
        dataclasses.replace(
            tokens, name="B8 S8192 H32/8 D128, 32 tokens", seqlen_q=32, seqlen_k=8192
        ),
    ]


TOP = "running top-w"
KEY_BIAS, TILES, SLIDING = "key bias, causal", "half of the tiles", "sliding window"
DETERMINISTIC, FEW_KEYS = "deterministic gradients", f"{TOP}, beside w keys alone"
FEW_TOKENS = "short sequences"
FEW_ROWS = "few rows over many keys"
SELECTION = f"{TOP}, selection alone"
TOKEN = f"{TOP}, decoding"
STRETCHES = f"{TOP}, stretches"
CHUNK = 8192  # tokens of a prompt that goes in by chunks
OVER_LENGTH, OVER_WINDOW = f"{TOP}, time against S", f"{TOP}, time against w"
OVER_HEAD_DIM = "dense causal, time against D"
SWEEPS = (OVER_LENGTH, OVER_WINDOW, OVER_HEAD_DIM)


def _top(
    group: str,
    name: str,
    contenders: tuple[str, ...],
    seqlen: int,
    kept: int,
    small: bool = False,
) -> Case:
    """Running top-w over `seqlen` rows and keys: H16/4 D128, or H2/1 D64 when small."""
    shape = Case(group, name, contenders, seqlen_q=seqlen, seqlen_k=seqlen, nheads_k=4)
    if small:
        shape = dataclasses.replace(shape, nheads=2, nheads_k=1, head_dim=64)
    return dataclasses.replace(shape, causal=True, kept=kept, running=True, bias="key")


def _wide_top(group: str, name: str, contenders: tuple[str, ...]) -> Case:
    """Running top-w with wide heads: 16384 rows and keys, H8/2 D256, w 1024."""
    case = _top(group, name, contenders, 16384, 1024)
    return dataclasses.replace(case, nheads=8, nheads_k=2, head_dim=256)


def _running_top() -> list[Case]:
    ours, peer, flex = "dmattn_window", "sdpa_efficient_window", "flex_window"
    main = _top(
        TOP, "B1 S16384 H16/4 D128 w1024", (ours, "dmattn_given_mask", peer, flex), 16384, 1024
    )
    of_heads = dataclasses.replace(
        main,
        name=f"{main.name}, scores of each query head",
        contenders=(ours, flex),
        bias="key of heads",
    )
    beside_all = (ours, "sdpa_flash_all_keys")
    longest = _top(TOP, "B1 S1048576 H8/2 D128 w2048", (ours,), 1 << 20, 2048)
    many = _top(TOP, "B8 S4096 H16/16 D64 w256", (ours, flex), 4096, 256)
    return [
        dataclasses.replace(main, quick=True),
        of_heads,
        _top(TOP, "B1 S32768 H2/1 D64 w1024", (ours, peer), 32768, 1024, small=True),
        dataclasses.replace(many, batch=8, nheads_k=16, head_dim=64),
        _top(TOP, "B1 S131072 H16/4 D128 w2048", (ours, peer), 131072, 2048),
        _top(TOP, "B1 S131072 H16/4 D128 w2048, beside all keys", beside_all, 131072, 2048),
        dataclasses.replace(longest, nheads=8, nheads_k=2, backward=False, memory=True),
    ]


def _selection() -> list[Case]:
    both, ours = ("dmattn_select", "torch_top_mask"), ("dmattn_select",)
    cases = []
    for seqlen, kept, heads, contenders in (
        (16384, 1024, 4, both),
        (131072, 2048, 4, ours),
        (1 << 20, 2048, 2, ours),
    ):
        case = _top(SELECTION, f"B1 S{seqlen} HK{heads} w{kept}", contenders, seqlen, kept)
        case = dataclasses.replace(case, nheads=heads, nheads_k=heads, head_dim=8)
        cases.append(dataclasses.replace(case, backward=False, attends=False))
    lists = dataclasses.replace(cases[0], name="B8 S4096 HK16 w256", contenders=ours, batch=8)
    lists = dataclasses.replace(lists, seqlen_q=4096, seqlen_k=4096, nheads=16, nheads_k=16)
    return [*cases, dataclasses.replace(lists, kept=256)]


def _head_dims() -> list[Case]:
    """The fewer head dimensions are computed as larger ones, the smoother the curve."""
    shape = Case(OVER_HEAD_DIM, "", ("dmattn", "sdpa_flash", "sdpa_cudnn"), causal=True)
    shape = dataclasses.replace(shape, seqlen_q=8192, seqlen_k=8192, budget_s=0.4)
    return [
        dataclasses.replace(shape, name=f"S8192 H16 D{head_dim}", head_dim=head_dim)
        for head_dim in (32, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256)
    ]


def _sweeps() -> list[Case]:
    """Time should grow with S and with w, not with S * S."""
    cases = []
    for power in range(12, 21):
        # Attention over all keys soon takes longer than all the rest of the run.
        names = ("dmattn_window", "sdpa_flash_all_keys")[: 2 if power <= 18 else 1]
        name = f"S{1 << power} H2/1 D64 w1024"
        cases.append(_top(OVER_LENGTH, name, names, 1 << power, 1024, small=True))
    for power in range(8, 14):
        name = f"S32768 H2/1 D64 w{1 << power}"
        cases.append(_top(OVER_WINDOW, name, ("dmattn_window",), 32768, 1 << power, small=True))
    return [dataclasses.replace(case, budget_s=0.4) for case in cases]


def _one_token() -> list[Case]:
    step = Case(TOKEN, "", (), seqlen_q=1, backward=False, graphed=True, quick=True, bias="key")
    cache = dataclasses.replace(step, batch=8, seqlen_k=2048, nheads=32, nheads_k=8, kept=2048)
    full = dataclasses.replace(step, seqlen_k=524288, nheads=2, nheads_k=1, kept=1024)
    many = dataclasses.replace(cache, seqlen_k=32768)
    peers = ("dmattn_window", "topk_gather_sdpa", "sdpa_flash_all_keys")
    return [
        dataclasses.replace(
            cache,
            name="B8 H32/8 D128, cache of 2048 keys",
            contenders=("dmattn_cache_step", "torch_cache_step"),
            steps_cache=True,
        ),
        dataclasses.replace(
            cache,
            name="B1 H32/8 D128, cache of 2048 keys",
            contenders=("dmattn_cache_step", "torch_cache_step"),
            batch=1,
            steps_cache=True,
        ),
        dataclasses.replace(full, name="B1 S524288 H2/1 D128, top 1024", contenders=peers),
        dataclasses.replace(many, name="B8 S32768 H32/8 D128, top 2048", contenders=peers),
    ]


def _stretches() -> list[Case]:
    """Stretches of a text behind the keys kept of it, beside the whole text, or one token."""
    full = Case(STRETCHES, "", (), backward=False, graphed=True, quick=True, bias="key")
    full = dataclasses.replace(full, seqlen_k=2048, nheads=32, nheads_k=8, kept=2048)
    full = dataclasses.replace(full, steps_cache=True)
    # From how many tokens on a cache is faster with all at once than with one after the other.
    turns = [
        dataclasses.replace(
            full,
            name=f"B{batch} H32/8 D128 w2048, append of {tokens}",
            contenders=("dmattn_in_turn", "dmattn_at_once"),
            batch=batch,
            seqlen_q=tokens,
            quick=False,
        )
        for batch in (1, 8)
        for tokens in (4, 8, 16)
    ]
    chunks = ("dmattn_chunks_handed_on", "dmattn_chunks", "dmattn_window")
    prompt = _top(STRETCHES, "", chunks, 131072, 2048)
    prompt = dataclasses.replace(prompt, backward=False, memory=True)
    return [
        dataclasses.replace(
            full,
            name="B1 H32/8 D128 w2048, append of 1024",
            contenders=("dmattn_at_once",),
            seqlen_q=1024,
        ),
        *turns,
        dataclasses.replace(
            full,
            name="B8 H32/8 D128 w2048, draft of 8",
            contenders=("dmattn_draft", "dmattn_one_token"),
            batch=8,
            seqlen_q=8,
        ),
        dataclasses.replace(prompt, name=f"B1 S131072 H16/4 D128 w2048, chunks of {CHUNK}"),
    ]


CASES: tuple[Case, ...] = (
    *_running_top(),
    *_beside_few_keys(),
    *_selection(),
    *_one_token(),
    *_stretches(),
    *_sweeps(),
    *_dense_causal(),
    *_head_dims(),
    *_key_masks(),
    *_dense_bias(),
    *_features(),
    *_deterministic(),
    *_odd_lengths(),
    *_few_tokens(),
    *_few_rows(),
    *_padded_bias(),
    *_packed(),
    *_decode(),
)
NOTES = {
    TOP: "Each query keeps the w keys with the highest score so far. The forward includes the "
    "selection; the backward gives dq, dk, dv and dbias. Attention over all keys holds the GPU at "
    "its limit of power, which lowers the clocks for whatever takes turns with it, so that S131072 "
    "is also timed without it. FlexAttention, where it is timed, gets the rows that keep each key, "
    "and its table of blocks, none of which is empty.",
    SELECTION: "Interval ends and lists of keys from scores; the peer makes the boolean mask "
    "(B, HK, S, S).",
    TOKEN: "One step of decoding, replayed from a CUDA graph. A cache of w keys takes the token in "
    "the place of its lowest entry and attends to the rest; over a full cache the step selects its "
    "keys first.",
    STRETCHES: "Tokens behind a full cache of w keys, replayed from a CUDA graph: one after the "
    "other, or at once. A draft: peek at 8 tokens and commit 4 of them, beside a step of one. "
    "And a prompt in chunks, each behind the state of those before it, beside one call; the "
    "outputs of the chunks are written into one tensor (`out=`), unless they are said to be "
    "handed on.",
    FEW_KEYS: "The peer attends to w keys that lie together, without a bias, a choice of keys or "
    "causality.",
    KEY_BIAS: "One score per key, added to the logits of all rows, beside the same without it.",
    TILES: "Half of the 128 x 128 tiles of the mask are kept, chosen at random, beside the same "
    "call without the mask. dmattn finds the tiles in the mask; FlexAttention, where it is timed, "
    "gets its table of blocks.",
    SLIDING: "Each row sees the last w keys. FlexAttention, where it is timed, gets its table of "
    "blocks.",
    "key mask": "A mask keeps the same w keys for all rows. Each key has a bias.",
    "key mask, causal": "The same with causality.",
    "dense bias": "A bias for each row and key, of the shape [B, H, S, S] unless another is named, "
    "with its gradient.",
    "odd length": "Not causal. 4095 keys beside 4096.",
    "odd length, dense bias": "The same with a bias for each row and key, and its gradient.",
    FEW_TOKENS: "Not causal. 128 tokens as in BERT, 49 as in the windows of Swin with the gradient "
    "of their bias, 197 as in ViT, and 77 of a text for the places of an image. A mask of the form "
    "[B, 1, 1, S] hides a quarter of the keys, as padding does, one of [B, 1, S, S] what shifted "
    "windows do not share: SDPA takes it and the bias as one operand, which is made inside.",
    FEW_ROWS: "The forward of a chunk of a prompt, not causal. The mask keeps half of the tiles of "
    "128 x 128.",
    PADDED_BIAS: "A bias [1, H, S, S] with its gradient, as in T5 and in triangle attention, and a "
    "mask [B, 1, 1, S] that hides a quarter of the keys. SDPA takes both as one operand of 16 "
    "bits, which is made inside.",
    "decode": "One query row a head over all keys, without a choice among them, or the rows of 8 "
    "or 32 tokens, as where drafted tokens are looked at (not causal here).",
    DETERMINISTIC: "The same bits in every run, beside gradients whose parts are added in any "
    "order.",
    OVER_HEAD_DIM: "The work grows with D. Head dimensions without tiles of their own are computed "
    "as the next larger one that has some.",
    OVER_LENGTH: "The work of running top-w grows with S * w; that of all keys with S * S.",
    PACKED: f"Causal, sequences of unequal lengths drawn once: {sum(LONG)} rows in {len(LONG)} "
    f"sequences, the longest {max(LONG)}, and {sum(SHORT)} in {len(SHORT)}, the longest "
    f"{max(SHORT)}. Packed ones lie one behind the other. The padded batch is made before the "
    "timing, gradients stay padded; the mask of its keys is made inside. FlexAttention, where "
    "it is timed, gets its table of blocks.",
}
