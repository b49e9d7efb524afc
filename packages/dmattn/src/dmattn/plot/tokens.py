"""Scores of text as coloured tokens: a figure, and HTML for notebooks."""

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmattn.plot import axes
from dmattn.validation import check_int, check_shape, check_tensor, describe

# From little to much: white, light blue, the blue of kept keys.
_SCALE = ((255, 255, 255), (158, 202, 225), (8, 81, 156))
_SIGNS = {"\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\t": "\N{RIGHTWARDS ARROW}"}
_STYLE = (
    "font-family: monospace; line-height: 1.9; white-space: pre-wrap; background: #ffffff; "
    "color: #444444; padding: 0.6em; max-width: 60em; overflow-wrap: anywhere"
)


@dataclass(frozen=True)
class TokenScores:
    """Text with its scores as HTML; a notebook shows it as the last value of a cell.

    Attributes:
        html: one <div> with a <span> for each token, all text escaped.
    """

    html: str

    def _repr_html_(self) -> str:
        return self.html

    def save(self, path: str | Path) -> None:
        """Write the HTML to the file `path` as a complete page, to open in a browser."""
        head = '<!doctype html><meta charset="utf-8"><title>scores of tokens</title>'
        Path(path).write_text(f"{head}\n{self.html}\n", encoding="utf-8")


def token_scores_html(
    tokens: Sequence[str], scores: Tensor, kept: Tensor | None = None
) -> TokenScores:
    """Text in which the colour of each token says how high its score is; needs no matplotlib.

    Args:
        tokens: the text of each token, in order.
        scores: floating (len(tokens),), one head's, such as `layer.key_scores(x)[0, head]`. Colours
            go by rank, so that a few very high scores do not make all others look alike.
        kept: bool (len(tokens),): tokens to underline, such as those that the last query keeps,
            `selection.end[0, head] == len(tokens)`.

    Returns:
        The HTML; each token's score is shown when the mouse is over it.

    Raises:
        TypeError: scores is no floating tensor, kept no bool tensor, or tokens no strings.
        ValueError: scores or kept have another number of entries than there are tokens.
    """
    words, levels, marked = _checked(tokens, scores, kept)
    spans = []
    for word, score, level, is_kept in zip(words, scores.tolist(), levels, marked, strict=True):
        red, green, blue = _colour(level)
        style = f"background: rgb({red},{green},{blue}); color: {_ink(level)}"
        if is_kept:
            style += f"; border-bottom: 3px solid {axes.MARKED}"
        shown = word.replace("\n", _SIGNS["\n"] + "\n")
        title = f"{score:.4g}" + (", kept" if is_kept else "")
        spans.append(f'<span style="{style}" title="{title}">{html.escape(shown)}</span>')
    note = "darker: higher score" + ("" if kept is None else "; underlined: kept")
    note = f'<div style="font-family: sans-serif; font-size: 85%">{note}</div>'
    return TokenScores(f'<div style="{_STYLE}">{note}{"".join(spans)}</div>')


def token_scores(
    tokens: Sequence[str],
    scores: Tensor,
    kept: Tensor | None = None,
    *,
    columns: int = 80,
    path: str | Path | None = None,
    ax: Any = None,
) -> Any:
    """Draw text in which the colour of each token says how high its score is.

    Suits some hundred tokens; of a longer text, pass a part.

    Args:
        tokens, scores, kept: as for `token_scores_html`.
        columns: characters in a line.
        path: where to save the picture, by the suffix of its name; None to save nothing.
        ax: the matplotlib axes to draw on; those of a new figure when None.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError, ValueError: as `token_scores_html`, and for columns below 1.
    """
    columns = check_int("columns", columns, 1)
    words, levels, marked = _checked(tokens, scores, kept)
    places = list(_places(words, columns))
    lines = 1 + max((line for line, *_ in places), default=0)
    ax = axes.axes_or_new(ax, max(5.0, 0.095 * columns + 0.4), 0.25 * lines + 0.7)
    patches = axes.matplotlib_module("patches")
    for line, column, text, token in places:
        colour = tuple(part / 255 for part in _colour(levels[token]))
        box = (column, line + 0.08), len(text), 0.84
        ax.add_patch(patches.Rectangle(*box, facecolor=colour, lw=0))
        if marked[token]:
            ax.plot(
                [column + 0.1, column + len(text) - 0.1],
                [line + 0.94] * 2,
                color=axes.MARKED,
                lw=2,
                solid_capstyle="butt",
            )
        for place, sign in enumerate(text):
            ax.text(
                column + place + 0.5,
                line + 0.54,
                sign,
                family="monospace",
                fontsize=9,
                ha="center",
                va="center",
                color=_ink(levels[token]),
            )
    ax.set(xlim=(0, columns), ylim=(lines, 0))
    ax.axis("off")
    note = "darker: higher score" + ("" if kept is None else "; underlined: kept")
    count = "1 token" if len(words) == 1 else f"{len(words)} tokens"
    ax.set_title(f"Scores of {count} ({note})", loc="left", fontsize="medium")
    axes.save(ax, path)
    return ax


def _checked(
    tokens: Sequence[str], scores: Tensor, kept: Tensor | None
) -> tuple[list[str], list[float], list[bool]]:
    """The tokens, how high each score ranks (0 to 1), and whether each is to be marked."""
    if not isinstance(tokens, Iterable):
        raise TypeError(f"tokens: got {describe(tokens)}, wanted strings")
    words = list(tokens)
    for word in words:
        if not isinstance(word, str):
            raise TypeError(f"tokens: got {describe(word)} among them, wanted strings")
    if not check_tensor("scores", scores).is_floating_point():
        raise TypeError(f"scores: got dtype {scores.dtype}, wanted a floating one")
    check_shape("scores", scores, (len(words),))
    if kept is None:
        marked = [False] * len(words)
    else:
        if check_tensor("kept", kept).dtype != torch.bool:
            raise TypeError(f"kept: got dtype {kept.dtype}, wanted torch.bool")
        check_shape("kept", kept, (len(words),))
        marked = kept.tolist()
    return words, _ranks(scores.detach().cpu()).tolist(), marked


def _ranks(scores: Tensor) -> Tensor:
    """(S,): the share of the other scores that are lower; equal scores get equal ranks."""
    if len(scores) == 0:
        return scores
    distinct, place = torch.unique(scores.nan_to_num(nan=-torch.inf), return_inverse=True)
    lower = torch.bincount(place, minlength=len(distinct)).cumsum(0).roll(1)
    lower[0] = 0
    return lower[place] / max(1, len(scores) - 1)


def _colour(level: float) -> tuple[int, int, int]:
    """The colour of a level between 0 and 1."""
    position = min(max(level, 0.0), 1.0) * (len(_SCALE) - 1)
    first = min(int(position), len(_SCALE) - 2)
    part = position - first
    low, high = _SCALE[first], _SCALE[first + 1]
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return red, green, blue


def _ink(level: float) -> str:
    """A colour of text that can be read on a level's colour."""
    return "#ffffff" if level > 0.7 else "#222222"


def _places(words: Sequence[str], columns: int) -> Iterator[tuple[int, int, str, int]]:
    """Line, column, text and token number of each piece; tokens are cut where lines end."""
    line, column = 0, 0
    for token, word in enumerate(words):
        piece, start = "", column
        for sign in word:
            if column == columns:
                if piece:
                    yield line, start, piece, token
                line, column, piece, start = line + 1, 0, "", 0
            piece, column = piece + _SIGNS.get(sign, sign), column + 1
            if sign == "\n":
                yield line, start, piece, token
                line, column, piece, start = line + 1, 0, "", 0
        if piece:
            yield line, start, piece, token
