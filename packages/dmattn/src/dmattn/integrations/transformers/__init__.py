"""dmattn as the attention of models from Hugging Face transformers, version 5.18 or newer.

    import dmattn.integrations.transformers as dmt

    dmt.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="dmattn")

Importing this package changes nothing in transformers.
"""

from dmattn.integrations.transformers.registration import register

__all__ = ["register"]
