"""dmattn as the attention of models from Hugging Face transformers, version 5.18 or newer.

    import dmattn.integrations.transformers as dmt

    dmt.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="dmattn")

Importing this package changes nothing in transformers.
"""

from typing import TYPE_CHECKING, Any

from dmattn.integrations.transformers.registration import check_transformers, register

if TYPE_CHECKING:
    from dmattn.integrations.transformers.doge import enable_doge
    from dmattn.integrations.transformers.doge_cache import DogeCache

__all__ = ["DogeCache", "enable_doge", "register"]


def __getattr__(name: str) -> Any:
    """Import the names that need transformers when they are first used."""
    if name not in ("DogeCache", "enable_doge"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_transformers()
    from dmattn.integrations.transformers import doge

    return getattr(doge, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
