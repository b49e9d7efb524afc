"""Models whose layers ask for attention in ways of their own, against eager attention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from hf_models import VOCABULARY, with_attention
from transformers.masking_utils import create_causal_mask
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLTextModel

import dmattn.integrations.transformers as dmt

dmt.register()

LENGTH = 50
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def _splinter() -> Any:
    return hf.SplinterModel(hf.SplinterConfig(**_SIZES))


def _pegasus_x() -> Any:
    sides = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 40))
    }
    ends = {"pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 1}
    return hf.PegasusXModel(
        hf.PegasusXConfig(
            vocab_size=VOCABULARY, d_model=32, num_global_tokens=4, block_size=8, **sides, **ends
        )
    )


def _deepseek_sparse() -> Any:
    """Layers that choose 8 keys a row."""
    heads = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "kv_lora_rank": 8}
    index = {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16}
    sizes = heads | index | {"q_lora_rank": 8, "first_k_dense_replace": 2}
    return hf.DeepseekV32ForCausalLM(
        hf.DeepseekV32Config(**_SIZES, **sizes, num_key_value_heads=4, attention_dropout=0.0)
    )


def _minimax_sparse() -> Any:
    """Layers that choose 3 blocks of 8 keys for a row and a key/value head."""
    index = {"index_topk_blocks": 3, "index_block_size": 8, "index_n_heads": 2}
    layers = {
        "layer_types": ["minimax_m3_sparse", "full_attention"],
        "mlp_layer_types": ["dense", "dense"],
    }
    sizes = index | layers | {"head_dim": 8, "num_key_value_heads": 2, "index_head_dim": 8}
    return MiniMaxM3VLTextModel(MiniMaxM3VLTextConfig(**_SIZES, **sizes))


def make_model(make: Callable[[], Any]) -> Any:
    torch.manual_seed(2)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model


def outputs(model: Any, implementation: str, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids.flip(1)
    with torch.no_grad():
        found: torch.Tensor = with_attention(model, implementation)(ids, **inputs)[0]
    return found


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(2, VOCABULARY, (2, LENGTH), generator=generator)


@pytest.mark.parametrize("make", [_splinter, _pegasus_x])
def test_layers_that_do_not_say_causality(make: Callable[[], Any]) -> None:
    """An encoder whose layers say nothing; a decoder whose layers say is_causal = False."""
    model = make_model(make)
    wanted = outputs(model, "eager", tokens())
    found = outputs(model, "dmattn", tokens())
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_layers_that_do_not_say_causality_while_compiling() -> None:
    config = hf.PegasusXConfig(attn_implementation="dmattn")

    def mask(embeddings: torch.Tensor, padding: torch.Tensor) -> Any:
        return create_causal_mask(config, embeddings, padding, past_key_values=None)

    torch._dynamo.reset()
    compiled = torch.compile(mask, backend="eager", fullgraph=True)
    found = compiled(torch.empty(2, 9, 4), torch.ones(2, 9).long())
    assert torch.equal(found, torch.ones(2, 1, 9, 9, dtype=torch.bool).tril())


@pytest.mark.parametrize("make", [_deepseek_sparse, _minimax_sparse])
def test_layers_that_choose_keys(make: Callable[[], Any]) -> None:
    model = make_model(make)
    padding = torch.ones(2, LENGTH).long()
    padding[0, :9] = 0
    for inputs in ({}, {"attention_mask": padding}):
        real = inputs.get("attention_mask", torch.ones(2, LENGTH)).bool()
        wanted = outputs(model, "eager", tokens(), **inputs)[real]
        found = outputs(model, "dmattn", tokens(), **inputs)[real]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
