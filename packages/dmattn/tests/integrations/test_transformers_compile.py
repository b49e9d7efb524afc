"""Models under torch.compile: whole graphs, few of them, and the numbers of eager attention."""

from typing import Any

import pytest
import torch
from hf_models import VOCABULARY, make_model, packed, relative_error, with_attention
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch_releases import COMPILES_WHOLE_MODELS

LENGTHS = (40, 131, 75, 140, 200)  # all longer than the window: shorter ones need other graphs


def padded_inputs(length: int) -> dict[str, Any]:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :7] = 0
    ids = torch.randint(1, VOCABULARY, (2, length))
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_few_whole_graphs(name: str) -> None:
    torch._dynamo.reset()
    model = make_model(name).eval()
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=COMPILES_WHOLE_MODELS, backend=counter)
    for length in LENGTHS:
        inputs = padded_inputs(length)
        real = inputs["attention_mask"].bool()
        with torch.no_grad():
            wanted = with_attention(model, "eager")(**inputs).logits[real]
            with_attention(model, "dmattn")
            torch.testing.assert_close(compiled(**inputs).logits[real], wanted, rtol=0, atol=1e-4)
    assert counter.frame_count <= 2 or not COMPILES_WHOLE_MODELS


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_packed_documents_by_boundaries(name: str) -> None:
    """With the cache that models create by default, in which case masks know of no documents."""
    torch._dynamo.reset()
    model = with_attention(make_model(name), "dmattn").eval()
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=COMPILES_WHOLE_MODELS, backend=counter)
    for lengths in ((40, 1, 9), (60, 30), (30,) * 4, (9, 50, 8, 70, 25)):
        ids = torch.randint(1, VOCABULARY, (1, sum(lengths)))
        with torch.no_grad():
            found = compiled(ids, **packed(*lengths)).logits
            alone = torch.cat([model(part).logits for part in ids.split(lengths, 1)], 1)
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2 or not COMPILES_WHOLE_MODELS


def test_generate_with_a_compiled_forward() -> None:
    """generate() makes masks for static caches itself, so that they come from outside the graph."""
    torch._dynamo.reset()
    model = with_attention(make_model("gemma3"), "dmattn").eval()
    inputs = padded_inputs(40) | {"use_cache": True, "cache_implementation": "static"}
    options = {"max_new_tokens": 3, "do_sample": False}
    wanted = model.generate(**inputs, **options)
    model.forward = torch.compile(model.forward, fullgraph=COMPILES_WHOLE_MODELS, backend="eager")
    assert torch.equal(model.generate(**inputs, **options), wanted)


def test_training_step() -> None:
    torch._dynamo.reset()
    model = make_model("mistral")
    model.model.layers = model.model.layers[:1]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=COMPILES_WHOLE_MODELS, backend=counter)
    for length in LENGTHS:
        inputs = padded_inputs(length)
        gradients = []
        for implementation, run in (("eager", model), ("dmattn", compiled)):
            with_attention(model, implementation)
            model.zero_grad()
            run(**inputs).logits[inputs["attention_mask"].bool()].square().mean().backward()
            gradients.append(gradients_of(model))
        assert relative_error(gradients[1], gradients[0]) < 1e-4
    assert counter.frame_count <= 2 or not COMPILES_WHOLE_MODELS


def test_training_step_of_an_encoder_and_a_decoder() -> None:
    """T5's softmax scale is 1, the default of the operators, and its bias has a gradient."""
    torch._dynamo.reset()
    model = make_model("t5")
    ids = torch.randint(1, VOCABULARY, (2, 40))
    inputs = {"input_ids": ids, "labels": ids.flip(1), "use_cache": False}
    compiled, gradients = torch.compile(model, backend="aot_eager"), []
    for implementation, run in (("eager", model), ("dmattn", compiled)):
        with_attention(model, implementation)
        model.zero_grad()
        run(**inputs).loss.backward()
        gradients.append(gradients_of(model))
    assert relative_error(gradients[1], gradients[0]) < 1e-4


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore")  # torch.jit warns that it is deprecated
def test_a_traced_model() -> None:
    """torch.jit.trace turns sizes into tensors, and so the results of comparisons with them."""
    model = with_attention(make_model("llama"), "dmattn").eval()

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            logits: Tensor = self.model(ids, attention_mask=mask, use_cache=False).logits
            return logits

    inputs = padded_inputs(40)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        traced = torch.jit.trace(Logits(), (ids, torch.ones_like(mask)))
        wanted = model(**inputs).logits
        torch.testing.assert_close(traced(ids, mask)[mask == 1], wanted[mask == 1])
