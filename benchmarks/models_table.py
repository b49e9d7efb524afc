"""Limits for the timed models of transformers, and what was measured, as text and for the page."""

from __future__ import annotations

import dataclasses
from typing import Any

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Limit:
    """A ratio of two rows, and the most that the project allows it to be.

    Attributes:
        what: in words.
        most: the ratio; None where it is enough that ours ran.
        case, shape, quantity, contender: of our row.
        against: contenders, of which the best counts.
        other_shape: the shape of the rows of `against`, if it is not that of our row.
    """

    what: str
    most: float | None
    case: str
    shape: str
    quantity: str
    contender: str = "dmattn"
    against: tuple[str, ...] = ()
    other_shape: str | None = None


def limits(results: Row) -> list[Limit]:
    """All limits, for the sizes of a run."""
    n = results["sizes"]
    training, generation = "Doge training step", "Doge generate"
    prompt, shortest, longest = (
        f"B{n['batch']} prompt {p}"
        for p in (n["peer_prompt"], min(n["prompts"]), max(n["prompts"]))
    )
    own, step, long = ("sdpa", "eager"), f"S{n['training']}", f"S{n['long_training']}"
    words = "over the better of transformers' eager and sdpa"
    found = [
        Limit(f"{training}, {step}: time {words}", 1 / 9, training, step, "step", against=own),
        Limit(f"{training}, {step}: memory {words}", 1 / 8, training, step, "memory", against=own),
        Limit(f"{training}, {long}", None, training, long, "step"),
    ]
    words = f"{generation}, {prompt}"
    peer, either = ("sdpa",), ("sdpa", "sdpa, cuDNN off")
    found += [
        Limit(
            f"{words}: time per token over sdpa, with or without cuDNN",
            *(0.4, generation, prompt, "token"),
            against=either,
        ),
        Limit(
            f"{words}: cache over the default cache",
            *(1 / 8, generation, prompt, "cache"),
            against=either[1:],  # as many tokens were put into it as into ours
        ),
        Limit(
            f"{generation}: time per token, longest over shortest prompt",
            *(1.1, generation, longest, "token"),
            against=("dmattn",),
            other_shape=shortest,
        ),
    ]
    shapes = dict.fromkeys((row["case"], row["shape"]) for row in results["rows"])
    for case, shape in shapes:
        if case == "Llama training step":
            words = f"{case}, {shape}: time over sdpa"
            found.append(Limit(words, 1.02, case, shape, "step", against=peer))
        for name, most, against in (
            ("triton backend", 2.5, "dmattn"),
            ("flex backend", 1.05, "by hand"),
        ):
            if case == name:
                contender = name.partition(" ")[0]
                other = {"dmattn": "cuda", "by hand": "by hand, making its block mask"}[against]
                words = f"{case} over {other}, {shape}"
                found += [
                    Limit(f"{words}, {phase}", most, case, shape, phase, contender, (against,))
                    for phase in ("forward", "backward")
                ]
    return found


def _value(results: Row, limit: Limit, shape: str, contender: str) -> float | None:
    wanted = (limit.case, shape, limit.quantity, contender)
    for row in results["rows"]:
        if (row["case"], row["shape"], row.get("quantity"), row["contender"]) == wanted:
            return float(row["ms"] if "ms" in row else row["bytes"])
    return None


def judged(results: Row) -> list[tuple[Limit, float | None, bool]]:
    """(limit, the value measured, whether it is within the limit) for each; None: not measured.

    Limits of cases that the run was not asked for are left out.
    """
    found, cases = [], {row["case"] for row in results["rows"]}
    for limit in limits(results):
        if limit.case not in cases:
            continue
        got = _value(results, limit, limit.shape, limit.contender)
        if limit.against:
            shape = limit.shape if limit.other_shape is None else limit.other_shape
            others = [_value(results, limit, shape, name) for name in limit.against]
            least = min((x for x in others if x is not None), default=None)
            got = None if got is None or least is None else got / least
        met = got is not None and (limit.most is None or got <= limit.most)
        found.append((limit, got, met))
    return found


def lines_of(rows: list[Row]) -> str:
    """For the terminal while the run goes on."""
    return "\n".join(
        f"{row['case']}: {row['shape']:26} {row['contender']:26} {row.get('quantity', ''):9}"
        f"{measured(row)}"
        for row in rows
    )


def measured(row: Row) -> str:
    if "ms" in row:
        return f"{row['ms']:.3f} ms"
    return f"{row['bytes'] / 2**30:.3f} GiB" if "bytes" in row else row["error"]


def _cells(limit: Limit, got: float | None, met: bool) -> tuple[str, str, str]:
    if limit.most is None:
        return "runs" if met else "did not run", "", "met" if met else "missed"
    if got is None:
        return "not measured", f"{limit.most:.3g}", ""
    return f"{got:.3f}", f"{limit.most:.3g}", "met" if met else "missed"


def text(results: Row) -> str:
    lines = [f"{'':80}{'got':>14}{'at most':>9}"]
    for limit, value, met in judged(results):
        got, most, verdict = _cells(limit, value, met)
        lines.append(f"{limit.what:80}{got:>14}{most:>9}  {verdict.replace('missed', 'MISSED')}")
    return "\n".join(lines)


def section(results: Row) -> list[str]:
    """Lines of Markdown."""
    lines = [
        "## Models of transformers",
        "",
        f"Measured on one {results['gpu']} on {results['date']}: torch {results['torch']}, "
        f"transformers {results['transformers']}, dmattn {results['dmattn']}, {results['dtype']}. "
        + " ".join(results["notes"])
        + " Reproduce: `./dev bench_models`.",
        "",
        "| what | got | at most | |",
        "|---|---:|---:|---|",
    ]
    for limit, value, met in judged(results):
        got, most, verdict = _cells(limit, value, met)
        verdict = verdict.replace("missed", "**missed**")
        lines.append(f"| {limit.what} | {got} | {most} | {verdict} |")
    lines += ["", "| what | shape | contender | | measured |", "|---|---|---|---|---:|"]
    for row in results["rows"]:
        contender = row["contender"]
        if contender.startswith(("dmattn", "triton", "flex")):
            contender = f"**{contender}**"
        shown = measured(row).partition(". ")[0]  # of an error the first sentence
        cells = (row["case"], row["shape"], contender, row.get("quantity", ""), shown)
        lines.append("| " + " | ".join(cells) + " |")
    return lines
