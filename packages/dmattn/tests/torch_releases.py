"""What older releases of torch cannot do: conditions on which tests ask less, or are skipped.

The oldest release that dmattn allows is 2.6, and the next one that these tests are run with is 2.9.
So a condition says "before 2.9", whichever release in between brought what it is about.
docs/install.md says what follows from it for users.
"""

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
SINCE_2_9 = TORCH >= (2, 9)

# Whether torch can trace the minimum or maximum of two symbolic lengths. Older torch compiles for
# the length that happens to be the smaller while it traces, so other lengths need other graphs.
TRACES_EXTREMES = SINCE_2_9
# Whether an error that dmattn raises while torch compiles with fullgraph=True is in torch's error.
# In older torch that one says "Observed exception", and names the line alone.
TELLS_OF_ERRORS = SINCE_2_9
# Whether a model of transformers can be one graph. Older torch cannot trace the code around each
# forward (it reads co_varnames), whatever the attention is; without fullgraph, it leaves that out.
COMPILES_WHOLE_MODELS = SINCE_2_9

exports_any_length = pytest.mark.skipif(
    not TRACES_EXTREMES, reason=f"torch {torch.__version__} exports one range of lengths"
)


def needs_2_9(reason: str) -> pytest.MarkDecorator:
    """Skip a test with older torch, where `reason` holds: words that go on from "torch 2.6"."""
    return pytest.mark.skipif(not SINCE_2_9, reason=f"torch {torch.__version__} {reason}")
