"""The table of what is timed. Every row is a question; peers.py holds those who answer it."""

from __future__ import annotations

import dataclasses


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
    bias: str = ""  # "key": (B, HK, 1, Sk); "dense": (B, H, Sq, Sk)
    backward: bool = True
    graphed: bool = False  # time replays of a CUDA graph: what a decoding loop runs
    quick: bool = False  # part of --quick

    @property
    def pairs(self) -> int:
        """Query-key pairs that count as work, per batch and query head."""
        if self.kept is not None:
            rows, window = self.seqlen_q, self.kept
            if self.group == "running top-w":
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
        return 4.0 * self.batch * self.nheads * self.head_dim * self.pairs


def _dense_causal() -> list[Case]:
    shapes = ((1, 16384, 16, 128), (4, 4096, 16, 128), (1, 16384, 32, 64), (1, 16384, 8, 256))
    return [
        Case(
            "dense causal",
            f"B{batch} S{seqlen} H{nheads} D{head_dim}",
            ("dmattn", "sdpa_flash", "sdpa_cudnn"),
            batch,
            seqlen,
            seqlen,
            nheads,
            nheads,
            head_dim,
            causal=True,
            quick=head_dim == 128,
        )
        for batch, seqlen, nheads, head_dim in shapes
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


def _dense_bias() -> list[Case]:
    peers = ("dmattn", "sdpa_efficient", "sdpa_cudnn_no_dbias", "flex")
    shapes = ((1, 8192, 16, 128), (2, 4096, 16, 64))
    return [
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


def _running_top() -> list[Case]:
    peers = ("dmattn_window", "dmattn_given_mask", "sdpa_efficient_window")
    shape = Case("running top-w", "S16384 H16/4 D128 w1024", peers, nheads_k=4, bias="key")
    return [dataclasses.replace(shape, causal=True, kept=1024)]


def _decode() -> list[Case]:
    step = Case("decode", "", (), seqlen_q=1, backward=False, graphed=True, quick=True)
    dense = ("dmattn", "sdpa_flash", "sdpa_cudnn")
    window = ("dmattn_top_keys", "topk_gather_sdpa")
    large = dataclasses.replace(step, batch=8, seqlen_k=32768, nheads=32, nheads_k=8)
    long = dataclasses.replace(step, seqlen_k=524288, nheads=2, nheads_k=1)
    small = dataclasses.replace(large, seqlen_k=2048)
    return [
        dataclasses.replace(large, name="B8 S32768 H32/8 D128, all keys", contenders=dense),
        dataclasses.replace(
            large, name="B8 S32768 H32/8 D128, top 2048", contenders=window, kept=2048, bias="key"
        ),
        dataclasses.replace(long, name="B1 S524288 H2/1 D128, all keys", contenders=dense),
        dataclasses.replace(
            long, name="B1 S524288 H2/1 D128, top 1024", contenders=window, kept=1024, bias="key"
        ),
        dataclasses.replace(small, name="B8 S2048 H32/8 D128, a w-key cache", contenders=dense),
    ]


CASES: tuple[Case, ...] = (
    *_dense_causal(),
    *_key_masks(),
    *_dense_bias(),
    *_odd_lengths(),
    *_decode(),
    *_running_top(),
)


@dataclasses.dataclass(frozen=True)
class Target:
    """A ratio of two timings and the limit that the project set itself."""

    name: str
    wanted: float
    case: tuple[str, str]  # group, name
    contender: str
    phase: str  # "forward" or "backward"
    against: tuple[str, str, str] | float  # group, name, contender; or milliseconds

    @property
    def unit(self) -> str:
        return "ms" if isinstance(self.against, float) else "x"


def _targets() -> list[Target]:
    found = []
    for phase in ("forward", "backward"):
        for name in ("B1 S16384 H16 D128", "B1 S16384 H32 D64"):
            case = ("dense causal", name)
            peer = (*case, "sdpa_flash")
            found.append(Target(f"{name}: time over SDPA flash", 1.0, case, "dmattn", phase, peer))
        limit = {"forward": 2.5, "backward": 7.0}[phase]
        bias = ("dense bias", "B1 S8192 H16 D128")
        found.append(Target("dense bias with dbias, ms", limit, bias, "dmattn", phase, 1.0))
        for causal in ("", ", causal"):
            few = (f"key mask{causal}", "S16384 H16/4 D128 w1024")
            all_keys = (f"key mask{causal}", "S16384 H16/4 D128 w16384", "dmattn_masked")
            words = f"key mask{causal}: w1024 over w16384"
            found.append(Target(words, 1 / 8, few, "dmattn_masked", phase, all_keys))
        for suffix, limit in (("", 1.15), (", dense bias", 1.5)):
            odd = (f"odd length{suffix}", "B2 Sq4096 Sk4095 H16 D128")
            even = (f"odd length{suffix}", "B2 Sq4096 Sk4096 H16 D128", "dmattn")
            found.append(Target(f"4095 over 4096{suffix}", limit, odd, "dmattn", phase, even))
    return found


TARGETS = tuple(_targets())
HOST_TIME_TARGET_US = 25.0
PEAK_MEMORY_TARGET = 1.5  # times the size of q + k + v
