"""Pictures of masks, selections, attention and scores, for looking at what a layer chose.

    from dmattn import plot

    plot.mask(selection)                       # which keys each query keeps, at any length
    plot.lifetimes(selection)                  # how long each key stays in the window
    plot.attention(q, k, selection=selection)  # the probabilities over the kept keys
    plot.token_scores(tokens, scores)          # scores as coloured text
    plot.token_scores_html(tokens, scores)     # the same for notebooks, without matplotlib

The module imports without matplotlib; every function but `token_scores_html` needs it and raises
ImportError where it is missing. Nothing of size Sq x Sk is formed: a pixel of a long selection
stands for a block of rows and keys and shows the share of them that is kept. The colours stay apart
for people who see no difference between red and green.
"""

from dmattn.plot.intervals import lifetimes
from dmattn.plot.masks import mask
from dmattn.plot.probabilities import attention
from dmattn.plot.tokens import TokenScores, token_scores, token_scores_html

__all__ = [
    "TokenScores",
    "attention",
    "lifetimes",
    "mask",
    "token_scores",
    "token_scores_html",
]
