"""Models whose layers call attention in unusual ways, compared with eager attention."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from doge_models import make_doge
from hf_models import VOCABULARY, with_attention
from torch_releases import COMPILES_WHOLE_MODELS, needs_2_9
from transformers import StaticCache
from transformers.masking_utils import create_causal_mask
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLTextModel
from transformers.models.phi4_multimodal.configuration_phi4_multimodal import (
    Phi4MultimodalVisionConfig,
)
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import Phi4MultimodalVisionModel

import dmattn.integrations.transformers as dmt
from dmattn.integrations.transformers import masks
from dmattn.integrations.transformers.attention import attention_forward

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
    """Layers that choose 8 keys for each row."""
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


def _bloom() -> Any:
    """Layers that compute their attention themselves, and add the mask."""
    sizes = {"n_layer": 2, "n_head": 4, "hidden_size": 32, "vocab_size": VOCABULARY}
    return hf.BloomModel(hf.BloomConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0))


def _bigbird_pegasus() -> Any:
    """An encoder that computes its attention itself, and a decoder that calls a function for it."""
    sides = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 40))
    }
    config = hf.BigBirdPegasusConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        attention_type="original_full",
        decoder_start_token_id=1,
        **sides,
    )
    return hf.BigBirdPegasusModel(config)


def _deepseek_compressed() -> Any:
    """Layers that append compressed keys, and append to the mask which of those each row sees."""
    heads = {"head_dim": 8, "num_key_value_heads": 1, "qk_rope_head_dim": 8, "q_lora_rank": 16}
    index = {"index_topk": 16, "index_n_heads": 2, "index_head_dim": 16, "sliding_window": 20}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    layers = [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ]
    sizes = heads | index | experts | {"layer_types": layers, "num_hidden_layers": len(layers)}
    return hf.DeepseekV4Model(hf.DeepseekV4Config(**_SIZES | sizes, attention_dropout=0.0))


def _gemma_for_images() -> Any:
    """The Gemma model within PaliGemma: causal masks for layers that say is_causal = False."""
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "use_bidirectional_attention": True}
    return hf.GemmaModel(hf.GemmaConfig(**_SIZES, **sizes))


def _aimv2_text() -> Any:
    """Causal masks, if an attention_mask is given, for layers that say is_causal = False."""
    return hf.Aimv2TextModel(hf.Aimv2TextConfig(**_SIZES | {"eos_token_id": 2}))


def _videoprism_text() -> Any:
    config = hf.VideoPrismTextConfig(**_SIZES, attention_probs_dropout_prob=0.0)
    return hf.VideoPrismTextModel(config)


def _phi4_images() -> Any:
    """Bidirectional masks for layers that say is_causal = True."""
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    config = Phi4MultimodalVisionConfig(
        **sizes, num_attention_heads=4, image_size=32, patch_size=8, attention_dropout=0.0
    )
    return Phi4MultimodalVisionModel(config)


_SHARED = {"num_key_value_heads": 2, "head_dim": 8, "attention_dropout": 0.0}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _gemma4() -> Any:
    """Layers that share keys, with masks that are cut to the rows whose logits are wanted."""
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    sizes = {"sliding_window": 20, "global_head_dim": 8, "vocab_size_per_layer_input": VOCABULARY}
    sharing = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
    config = hf.Gemma4TextConfig(**_SIZES | _SHARED | sizes | sharing | layers)
    return hf.Gemma4ForCausalLM(config)


def _pix2struct_text() -> Any:
    """Layers that slice masks to the number of their keys."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2}
    config = hf.Pix2StructTextConfig(**sizes, num_heads=4, dropout_rate=0.0, is_decoder=True)
    config.initializer_range = 1.0
    return hf.Pix2StructTextModel(config)


def _qwen2_moe() -> Any:
    """Layers that do not pass their sliding window to the attention function."""
    experts = {"num_experts": 3, "shared_expert_intermediate_size": 24, **_EXPERTS}
    window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}
    return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**_SIZES | _SHARED | experts | window))


def _phimoe() -> Any:
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 20}
    return hf.PhimoeForCausalLM(hf.PhimoeConfig(**_SIZES | _SHARED | experts))


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


@pytest.mark.parametrize("make", [_splinter, _pegasus_x, _gemma_for_images])
def test_layers_that_do_not_say_causality(make: Callable[[], Any]) -> None:
    """An encoder whose layers have no is_causal; decoders whose layers say is_causal = False."""
    model = make_model(make)
    wanted = outputs(model, "eager", tokens())
    found = outputs(model, "dmattn", tokens())
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [_aimv2_text, _videoprism_text])
def test_causal_masks_for_layers_that_deny_causality(make: Callable[[], Any]) -> None:
    """These models make a mask only if an attention_mask is given, even if it is all ones."""
    model = make_model(make)
    inputs = {"attention_mask": torch.ones(2, LENGTH).long()}
    wanted = outputs(model, "eager", tokens(), **inputs)
    found = outputs(model, "dmattn", tokens(), **inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_layers_that_claim_causality() -> None:
    """An image encoder, which transformers' own sdpa attention would make causal."""
    model = make_model(_phi4_images)
    image = torch.randn(2, 3, 32, 32)
    wanted, found = (outputs(model, name, image) for name in ("eager", "dmattn"))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (_aimv2_text, {}),
        pytest.param(
            _gemma4,
            {"logits_to_keep": 3},
            marks=needs_2_9("cannot compile Gemma 4 of transformers, with dmattn or without"),
        ),
        (_pix2struct_text, {"use_cache": False}),
        (_qwen2_moe, {}),
        (_phimoe, {}),
    ],
)
def test_masks_of_other_layers_while_compiling(
    make: Callable[[], Any], settings: dict[str, Any]
) -> None:
    """Compiled models get the padding alone as a mask where that suffices; here it does not."""
    torch._dynamo.reset()
    model = make_model(make)
    padding = torch.ones(2, LENGTH).long()
    padding[0, :9] = 0
    kept = settings.get("logits_to_keep", LENGTH)
    real = padding[:, -kept:].bool()
    inputs = {"attention_mask": padding, **settings}
    wanted = outputs(model, "eager", tokens(), **inputs)[real]
    compiled = torch.compile(with_attention(model, "dmattn"), backend="eager")
    with torch.no_grad():
        found = compiled(tokens(), **inputs)[0][real]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_layers_that_do_not_say_causality_while_compiling() -> None:
    config = hf.PegasusXModel.config_class(attn_implementation="dmattn")  # imports the model

    def mask(embeddings: torch.Tensor, padding: torch.Tensor) -> Any:
        return create_causal_mask(config, embeddings, padding, past_key_values=None)

    torch._dynamo.reset()
    compiled = torch.compile(mask, backend="eager", fullgraph=COMPILES_WHOLE_MODELS)
    found = compiled(torch.empty(2, 9, 4), torch.ones(2, 9).long())
    assert torch.equal(found, torch.ones(2, 1, 9, 9, dtype=torch.bool).tril())


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", [_bloom, _bigbird_pegasus, _deepseek_compressed])
def test_models_for_eager_attention_alone(make: Callable[[], Any], padded: bool) -> None:
    """When they are made, transformers accepts any implementation, and then asks it for masks."""
    model = make_model(make)
    config = type(model.config)(**model.config.to_diff_dict())
    other = type(model)._from_config(config, attn_implementation="dmattn").eval()
    other.load_state_dict(model.state_dict())
    ids, real = tokens(), torch.ones(2, LENGTH).long()
    if padded:
        real[0, :9] = 0
    inputs = {"attention_mask": real} if padded else {}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids.flip(1)
        real = torch.ones_like(real)
    with torch.no_grad():
        wanted, found = (m(ids, **inputs)[0][real.bool()] for m in (model, other))
    assert other.config._attn_implementation == "dmattn"
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_models_that_do_not_ask_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(masks.logger, "warning", said.append)
    masks._known_support.clear()
    for make in (_bloom, _bigbird_pegasus, _deepseek_compressed):
        config = make().config
        config._attn_implementation = "dmattn"
        for _ in range(2):
            create_causal_mask(config, torch.empty(1, 5, 0), None, past_key_values=None)
    assert len(said) == 1
    assert "BloomConfig" in said[0]


def test_masks_before_there_are_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer given before a config's models are imported is not reused after the import."""
    config_class = type("LateConfig", (hf.LlamaConfig,), {"__module__": "late.configuration_late"})
    config = config_class(attn_implementation="dmattn")

    def mask() -> Any:
        return create_causal_mask(config, torch.empty(1, 5, 0), None, past_key_values=None)

    assert mask() is None
    late = types.ModuleType("late.modeling_late")
    contents = {"__module__": late.__name__, "config_class": config_class}
    late.LateModel = type("LateModel", (hf.PreTrainedModel,), contents)  # supports eager only
    monkeypatch.setitem(sys.modules, late.__name__, late)
    assert mask().is_floating_point()


@pytest.mark.parametrize("documents", [False, True])
def test_sinks_of_each_row(documents: bool) -> None:
    """As in layers of Inkling 2: a logit for every row, which takes part in the row's softmax."""
    query, key, value = (torch.randn(2, h, 9, 8, requires_grad=True) for h in (4, 2, 2))
    sinks = torch.randn(2, 4, 9, 1, requires_grad=True)
    config = hf.LlamaConfig(attn_implementation="dmattn")
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(2, -1)
    mask = create_causal_mask(
        config,
        torch.empty(2, 9, 0),
        None,
        past_key_values=None,
        position_ids=positions if documents else None,
    )
    out, _ = attention_forward(torch.nn.Module(), query, key, value, mask, sinks=sinks)
    assert out.is_contiguous()

    sees = torch.ones(9, 9).bool().tril()
    if documents:
        sees[4:, :4] = False
    logits = query @ key.repeat_interleave(2, 1).mT * 8**-0.5
    logits = torch.cat([logits.masked_fill(~sees, -torch.inf), sinks], -1)
    wanted = logits.softmax(-1)[..., :-1] @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(out.transpose(1, 2), wanted)
    weights = torch.randn_like(wanted)
    operands = (query, key, value, sinks)
    found = torch.autograd.grad((out.transpose(1, 2) * weights).sum(), operands)
    torch.testing.assert_close(found, torch.autograd.grad((wanted * weights).sum(), operands))


def _doge() -> Any:
    """Without `enable_doge`: its layers read the mask."""
    return make_doge(window=8)


@pytest.mark.parametrize("make", [_doge, _deepseek_sparse])
def test_masks_that_layers_read_behind_a_static_cache(make: Callable[[], Any]) -> None:
    """A prompt in two parts, and another one into the same cache after reset()."""
    model = make_model(make)
    found = {}
    for implementation in ("eager", "dmattn"):
        cache = StaticCache(config=model.config, max_cache_len=LENGTH + 5)
        parts = [tokens()[:, :17], tokens()[:, 17:], tokens()]
        logits = []
        for part in parts:
            if part.shape[1] == LENGTH:
                cache.reset()
            logits.append(outputs(model, implementation, part, past_key_values=cache))
        found[implementation] = logits
    torch.testing.assert_close(found["dmattn"], found["eager"], rtol=1e-4, atol=1e-4)


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
