"""Modules: dynamic mask attention as a layer, and the rotary embedding that it uses."""

from dmattn.modules.dynamic_mask_attention import DynamicMaskAttention
from dmattn.modules.rotary import apply_rotary, rotary_embedding

__all__ = ["DynamicMaskAttention", "apply_rotary", "rotary_embedding"]
