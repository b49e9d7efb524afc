"""Registration of the attention implementation "dmattn" with transformers."""

import re
from importlib import metadata

# The name must not contain "flash": transformers takes such names for flash-attn.
NAME = "dmattn"

# Since this version mask functions get the position of the queries (q_length, q_offset), and
# transformers' own Doge is correct.
OLDEST_TRANSFORMERS = (5, 18)


def register() -> None:
    """Register "dmattn" among the attention and the mask functions of transformers.

    `attn_implementation="dmattn"` and `model.set_attn_implementation("dmattn")` work afterwards.
    Calling it again changes nothing.

    Raises:
        ImportError: transformers is missing, or older than 5.18.
    """
    check_transformers()
    # Here rather than above, so that dmattn can be imported without transformers.
    from transformers import AttentionInterface, AttentionMaskInterface

    from dmattn.integrations.transformers.attention import attention_forward
    from dmattn.integrations.transformers.masks import make_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)


def check_transformers() -> None:
    """Raise ImportError unless transformers is installed in a version that is new enough."""
    wanted = ".".join(map(str, OLDEST_TRANSFORMERS))
    way_out = f'install it with: pip install "transformers>={wanted}"'
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise ImportError(f"transformers: got none, wanted {wanted} or newer; {way_out}") from None
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST_TRANSFORMERS:
        raise ImportError(f"transformers: got {version}, wanted {wanted} or newer; {way_out}")
