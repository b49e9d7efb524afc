"""The limits that the project set itself, as ratios of timings of benchmarks/cases.py."""

from __future__ import annotations

import dataclasses

from benchmarks.cases import (
    CASES,
    CHUNK,
    DETERMINISTIC,
    FEW_KEYS,
    KEY_BIAS,
    SELECTION,
    SLIDING,
    STRETCHES,
    TILES,
    TOKEN,
    TOP,
    Case,
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


def _of_group(group: str) -> list[Case]:
    return [case for case in CASES if case.group == group]


def _dense_targets() -> list[Target]:
    found = []
    for name, forward, backward in (
        ("B1 S16384 H16 D128", 1.08, 0.95),
        ("B4 S4096 H16 D128", 1.0, 1.0),
        ("B1 S16384 H32 D64", 1.05, 0.95),
        ("B1 S16384 H8 D256", 0.97, 1.05),
        ("B1 S16384 H16 D96", 1.0, 0.95),
        ("B1 S16384 H8 D192", 1.0, 0.95),
        ("B32 S512 H16 D64", 1.0, 1.0),
    ):
        case = ("dense causal", name)
        for phase, at_least in (("forward", forward), ("backward", backward)):  # times as fast
            words = f"dense causal, {name}: time over SDPA cuDNN"
            against = (*case, "sdpa_cudnn")
            found.append(Target(words, 1 / at_least, case, "dmattn", phase, against))
    for name, forward, backward in (
        ("B1 S8192 H16 D128", 1.10, 3.4),
        ("B2 S4096 H16 D64, bias [1, H, S, S]", 0.42, 1.2),
        ("B2 S4096 H16 D64, bias [B, 1, S, S]", 0.42, 1.2),
        ("B2 S4096 H16 D128, bias [1, 1, S, S] in float32", 0.55, 1.6),
    ):
        case = ("dense bias", name)
        for phase, limit in (("forward", forward), ("backward", backward)):
            found.append(Target(f"dense bias, {name}, ms", limit, case, "dmattn", phase, 1.0))
    for suffix, limit in (("", 1.15), (", dense bias", 1.5)):
        odd = (f"odd length{suffix}", "B2 Sq4096 Sk4095 H16 D128")
        even = (f"odd length{suffix}", "B2 Sq4096 Sk4096 H16 D128", "dmattn")
        for phase in ("forward", "backward"):
            found.append(Target(f"4095 keys over 4096{suffix}", limit, odd, "dmattn", phase, even))
    return found


def _feature_targets() -> list[Target]:
    found = []
    for row in _of_group(KEY_BIAS):
        words, key = f"causal with a key bias over without, {row.name}", (KEY_BIAS, row.name)
        for phase in ("forward", "backward"):
            found.append(Target(words, 1.08, key, "dmattn", phase, (*key, "dmattn_no_bias")))
    for phase, window in (("forward", 0.30), ("backward", 0.95)):
        tiles, sliding = (TILES, "B1 S16384 H16 D128"), (SLIDING, "B1 S16384 H16 D128 w1024")
        words, whole = f"{TILES} over no mask, {tiles[1]}", (*tiles, "dmattn_no_bias")
        found.append(Target(words, 0.58, tiles, "dmattn_masked", phase, whole))
        words = f"{SLIDING}, {sliding[1]}, ms"
        found.append(Target(words, window, sliding, "dmattn_sliding", phase, 1.0))
        for causal in ("", ", causal"):
            few = (f"key mask{causal}", "S16384 H16/4 D128 w1024")
            all_keys = (f"key mask{causal}", "S16384 H16/4 D128 w16384", "dmattn_masked")
            words = f"key mask{causal}: w1024 over w16384"
            found.append(Target(words, 1 / 8, few, "dmattn_masked", phase, all_keys))
    for row in _of_group(DETERMINISTIC):
        ours, other = row.contenders[:2]
        words, place = f"deterministic, {row.name}", (row.group, row.name)
        found.append(Target(words, 1.3, place, ours, "backward", (*place, other)))
    return found


def _top_targets() -> list[Target]:
    ours = "dmattn_window"
    first, long = "B1 S16384 H16/4 D128 w1024", "B1 S131072 H16/4 D128 w2048"
    found = []
    for name, forward, backward in (
        (first, 0.42, 1.2),
        ("B1 S32768 H2/1 D64 w1024", 0.14, 0.26),
        ("B8 S4096 H16/16 D64 w256", 0.25, 0.9),
        (long, 4.8, 13.0),
    ):
        for phase, limit in (("forward", forward), ("backward", backward)):
            found.append(Target(f"{TOP}, {name}, ms", limit, (TOP, name), ours, phase, 1.0))
    for case in _of_group(FEW_KEYS):
        few, alone = (FEW_KEYS, case.name), (FEW_KEYS, case.name, "sdpa_cudnn_few_keys")
        for phase, limit in (("forward", 1.9), ("backward", 1.6)):
            words = f"{TOP}, {case.name}: time over cuDNN with w keys"
            found.append(Target(words, limit, few, ours, phase, alone))
    for group, name, contender, limit in (
        (SELECTION, "B1 S16384 HK4 w1024", "dmattn_select", 0.045),
        (SELECTION, "B8 S4096 HK16 w256", "dmattn_select", 0.06),
        (SELECTION, "B1 S1048576 HK2 w2048", "dmattn_select", 0.7),
        (TOKEN, "B8 H32/8 D128, cache of 2048 keys", "dmattn_cache_step", 0.032),
        (TOKEN, "B1 H32/8 D128, cache of 2048 keys", "dmattn_cache_step", 0.012),
        (TOKEN, "B1 S524288 H2/1 D128, top 1024", ours, 0.040),
        ("decode", "B8 S32768 H32/8 D128", "dmattn", 0.258),
        ("decode", "B8 S2048 H32/8 D128", "dmattn", 0.028),
    ):
        words = f"{group.removeprefix(f'{TOP}, ')}, {name}, ms"
        found.append(Target(words, limit, (group, name), contender, "forward", 1.0))
    append = (STRETCHES, "B1 H32/8 D128 w2048, append of 1024")
    words = f"stretches, {append[1]}, ms"
    found.append(Target(words, 0.35, append, "dmattn_at_once", "forward", 1.0))
    draft, prompt = (
        "B8 H32/8 D128 w2048, draft of 8",
        f"B1 S131072 H16/4 D128 w2048, chunks of {CHUNK}",
    )
    for name, beside, contender, peer, limit in (
        (draft, ": time over one token", "dmattn_draft", "dmattn_one_token", 1.6),
        (prompt, ", handed on: time over one call", "dmattn_chunks_handed_on", ours, 1.25),
        (prompt, ", put together: time over one call", "dmattn_chunks", ours, 1.25),
    ):
        place = (STRETCHES, name)
        words = f"stretches, {name}{beside}"
        found.append(Target(words, limit, place, contender, "forward", (*place, peer)))
    return found


TARGETS = (*_top_targets(), *_dense_targets(), *_feature_targets())
HOST_TIME_TARGET_US = 25.0
# Memory beside inputs, outputs and gradients, over the size of the tensors that `over` names.
PEAK_MEMORY_TARGETS = {"q + k + v": 1.5, "k + v": 1.0}
