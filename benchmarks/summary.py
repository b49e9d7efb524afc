"""What the README says about speed: ratios of recorded times, put into words.

render.py writes it between the two markers of the README.
"""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.cases import DETERMINISTIC, FEW_KEYS, KEY_BIAS, OVER_LENGTH, TOKEN

BEGIN = (
    "<!-- SPEED: written by benchmarks/render.py from recorded results, up to the next mark. -->"
)
END = "<!-- END OF SPEED -->"
WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The time of one contender over that of another, for some cases of a group."""

    group: str
    cases: tuple[str, ...]  # (): all
    ours: str
    over: str
    digits: int = 2

    def of(self, results: dict[str, Any], phase: str) -> list[float]:
        """The ratios in the order of the cases; none for a phase that was not timed."""
        times = {
            (row["case"], row["contender"]): row["ms"]
            for row in results["rows"]
            if row["group"] == self.group and row["phase"] == phase and "ms" in row
        }
        cases = self.cases or tuple(dict.fromkeys(case for case, _ in times))
        pairs = [(times.get((c, self.ours)), times.get((c, self.over))) for c in cases]
        return [ours / over for ours, over in pairs if ours is not None and over is not None]

    def words(self, results: dict[str, Any], phase: str) -> str:
        """Such as "0.83 to 0.92", or of two cases "0.87 and 0.94"; "" where nothing was timed."""
        found = [f"{ratio:.{self.digits}f}" for ratio in self.of(results, phase)]
        if len(set(found)) <= 1:
            return "".join(found[:1])
        if len(found) == 2:
            return " and ".join(found)
        ranked = sorted(found, key=float)
        return f"{ranked[0]} to {ranked[-1]}"


_SIZES = ("H16 D128", "H32 D64", "H8 D256", "H16 D96", "H8 D192")
LONG = tuple(f"B1 S16384 {heads}" for heads in _SIZES)
GROUPED = ("B8 S2048 H32/8 D128", "B2 S8192 H32/8 D128")
DENSE, SHORT, BIAS = "dense causal", "short sequences", "dense bias"
PACKED = ("B16 S512..8192 H16 D128", "B16 S512..8192 H16/4 D128")
PADDED, SLIDING = "B64 S512 H8 D64", "B1 S16384 H16 D128 w1024"
WINDOWS = "B2048 S49 H4 D32, bias [1, H, S, S]"
TOKENS = ("B8 S2048 H32/8 D128", "B1 S2048 H32/8 D128")
STEPS = tuple(f"{batch} H32/8 D128, cache of 2048 keys" for batch in ("B8", "B1"))
DENSE_SUMS = tuple(f"dense causal {name}" for name in LONG[:3])
_TOP_SIZES = ("S16384 H16/4 D128 w1024", "S32768 H2/1 D64 w1024", "S16384 H8/2 D256 w1024")
TOP_SUMS = tuple(f"running top-w B1 {name}" for name in _TOP_SIZES)

TABLE = (
    (
        "dense causal, 16384 keys, 8 to 32 heads, head_dim 64 to 256, over cuDNN",
        Ratio(DENSE, LONG, "dmattn", "sdpa_cudnn"),
    ),
    ("the same over torch's flash backend", Ratio(DENSE, LONG, "dmattn", "sdpa_flash")),
    (
        "dense bias with its gradient, 8192 keys, 16 heads, over FlexAttention",
        Ratio(BIAS, ("B1 S8192 H16 D128",), "dmattn", "flex"),
    ),
    (
        "causal, 32 heads over 8, 8 x 2048 and 2 x 8192 keys, head_dim 128, over cuDNN",
        Ratio(DENSE, GROUPED, "dmattn", "sdpa_cudnn"),
    ),
    (
        "packed sequences of 512 to 8192 tokens, 16 heads over 16 and over 4, over `varlen_attn`",
        Ratio("packed sequences", PACKED, "dmattn_varlen", "torch_varlen"),
    ),
    (
        "64 padded texts of 512 tokens, 8 heads, with the gradient of a bias as T5 has it, over "
        "torch's memory-efficient backend",
        Ratio("bias beside padding", (PADDED,), "dmattn_masked", "sdpa_efficient"),
    ),
    (
        "a sliding window of 1024 of 16384 keys, 16 heads, over FlexAttention",
        Ratio("sliding window", (SLIDING,), "dmattn_sliding", "flex_sliding"),
    ),
    (
        "1024 sequences of 64 tokens, 12 heads, head_dim 64, over torch's memory-efficient backend",
        Ratio(SHORT, ("B1024 S64 H12 D64",), "dmattn", "sdpa_efficient"),
    ),
    (
        "2048 windows of 7 x 7 places, 4 heads, head_dim 32, with the gradient of their bias, over "
        "the same",
        Ratio(SHORT, (WINDOWS,), "dmattn", "sdpa_efficient"),
    ),
    (
        "256 sequences of 128 tokens, 12 heads, over cuDNN",
        Ratio(SHORT, ("B256 S128 H12 D64",), "dmattn", "sdpa_cudnn"),
    ),
    (
        "a mask that keeps half of its tiles, over no mask",
        Ratio("half of the tiles", (LONG[0],), "dmattn_masked", "dmattn_no_bias"),
    ),
    (
        "decoding over all of 2048 keys, 8 sequences and one, over cuDNN",
        Ratio("decode", TOKENS, "dmattn", "sdpa_cudnn"),
    ),
    (
        "a step with a cache of 2048 kept keys, 8 sequences and one, over torch: argmin and "
        "scatter replace the lowest key, and its flash backend attends",
        Ratio(TOKEN, STEPS, "dmattn_cache_step", "torch_cache_step"),
    ),
    (
        "deterministic gradients, dense, over gradients summed in any order",
        Ratio(DETERMINISTIC, DENSE_SUMS, "dmattn_masked_deterministic", "dmattn"),
    ),
)

# {0} and {1}: the ratios of the forward and of the backward.
NOT_AHEAD = (
    (
        "Running top-w takes {0} times (forward) and {1} times (backward) what cuDNN takes for w "
        "keys that lie together, without a bias and without choosing.",
        Ratio(FEW_KEYS, (), "dmattn_window", "sdpa_cudnn_few_keys", digits=1),
    ),
    (
        "A sequence of 4096 tokens (2 heads over 1, head_dim 64, 1024 kept keys) takes {0} times "
        "as long forward as torch's flash backend takes for all keys.",
        Ratio(OVER_LENGTH, ("S4096 H2/1 D64 w1024",), "dmattn_window", "sdpa_flash_all_keys"),
    ),
    (
        "A bias per key makes causal attention take {0} times as long forward (head_dim 128 and "
        "64), and {1} times backward, with its gradient.",
        Ratio(KEY_BIAS, LONG[:2], "dmattn", "dmattn_no_bias"),
    ),
    (
        "Deterministic gradients of running top-w take {1} times as long as others.",
        Ratio(DETERMINISTIC, TOP_SUMS, "dmattn_window_deterministic", "dmattn_window", digits=1),
    ),
)


def lines(results: dict[str, Any]) -> list[str]:
    """What stands between the markers."""
    found = ["", "", "| | forward | backward |", "|---|---|---|"]
    for what, ratio in TABLE:
        cells = (what, *(ratio.words(results, phase) for phase in ("forward", "backward")))
        found.append("|" + "".join(f" {cell} |" if cell else " |" for cell in cells))
    found += ["", "What is not ahead:", ""]
    for words, ratio in NOT_AHEAD:
        text = words.format(*(ratio.words(results, phase) for phase in ("forward", "backward")))
        found += textwrap.wrap(text, WIDTH, initial_indent="* ", subsequent_indent="  ")
    return [*found, ""]


def with_summary(page: str, results: dict[str, Any]) -> str:
    """The page, with the text between its markers written anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page: wanted {BEGIN} and {END} in it")
    return "".join((before, begin, "\n".join(lines(results)), "\n", end, after))


def write(results: dict[str, Any], path: Path) -> None:
    path.write_text(with_summary(path.read_text(), results))
