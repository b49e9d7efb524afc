"""Tiny models of transformers with random weights, and how far two of their runs may differ."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor

import dmattn.integrations.transformers as dmt

dmt.register()

VOCABULARY = 61
WINDOW = 20
EPSILON = torch.finfo(torch.float32).eps
PAD = 0

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
    "attention_dropout": 0.0,
}
_LOCAL_AND_FULL = ["sliding_attention", "full_attention"]


def _decoder(config: Any, model: Any, **settings: Any) -> Callable[..., Any]:
    return lambda **sizes: model(config(**_SIZES | settings | sizes))


def _llama4(**sizes: Any) -> Any:
    layers = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 40, "moe_layers": []}
    settings = {"attention_chunk_size": WINDOW, **layers, **experts}
    return hf.Llama4ForCausalLM(hf.Llama4TextConfig(**_SIZES | settings | sizes))


def _t5(head_dim: int = 8) -> Any:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=head_dim,
            d_ff=40,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            pad_token_id=PAD,
            decoder_start_token_id=1,
            eos_token_id=None,
        )
    )


def _bert(**sizes: Any) -> Any:
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertForMaskedLM(hf.BertConfig(**_SIZES | no_dropout | sizes))


def _modernbert(**sizes: Any) -> Any:
    layers = {"layer_types": _LOCAL_AND_FULL, "local_attention": WINDOW}
    return hf.ModernBertForMaskedLM(hf.ModernBertConfig(**_SIZES | layers | sizes))


_WINDOWS = {"sliding_window": WINDOW, "layer_types": _LOCAL_AND_FULL}
DECODERS: dict[str, Callable[..., Any]] = {
    "llama": _decoder(hf.LlamaConfig, hf.LlamaForCausalLM),
    "qwen3": _decoder(hf.Qwen3Config, hf.Qwen3ForCausalLM),
    "mistral": _decoder(hf.MistralConfig, hf.MistralForCausalLM, sliding_window=WINDOW),
    "gemma2": _decoder(
        hf.Gemma2Config,
        hf.Gemma2ForCausalLM,
        # A cap low enough to affect the small logits of tiny weights, and a softmax scale that is
        # not the default.
        **_WINDOWS | {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 3},
    ),
    "gemma3": _decoder(hf.Gemma3TextConfig, hf.Gemma3ForCausalLM, **_WINDOWS),
    "gpt_oss": _decoder(
        hf.GptOssConfig,
        hf.GptOssForCausalLM,
        **_WINDOWS | {"num_local_experts": 3, "num_experts_per_tok": 2},
    ),
    "llama4": _llama4,
}
OTHERS: dict[str, Callable[..., Any]] = {"t5": _t5, "bert": _bert, "modernbert": _modernbert}


def make_model(name: str, **sizes: Any) -> Any:
    """A model for training, float32, with weights large enough for attention to matter."""
    torch.manual_seed(len(name))
    model = (DECODERS | OTHERS)[name](**sizes).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def with_attention(model: Any, implementation: str) -> Any:
    model.set_attn_implementation(implementation)
    return model


def packed(*lengths: int) -> dict[str, Any]:
    """The inputs by which collators for flash attention describe packed documents."""
    bounds = torch.tensor((0, *lengths)).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    longest = {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "position_ids": positions, **longest}


def with_rounded_weights(model: Any) -> Any:
    """A copy whose weights differ by up to one rounding of float32 each."""
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.mul_(1 + EPSILON * (2 * torch.rand_like(parameter) - 1))
    return rounded


def relative_error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest error of any tensor, relative to the largest entry of that tensor.

    Tensors that are tiny compared with the others, such as the gradient of a bias that cancels in
    the softmax, are measured relative to a thousandth of the largest entry of all tensors.
    """
    assert found.keys() == exact.keys()
    largest = max(float(t.abs().max()) for t in exact.values())
    errors = [
        float((found[name] - t).abs().max()) / max(float(t.abs().max()), largest / 1000)
        for name, t in exact.items()
    ]
    return max(errors)
