"""enable_doge: Doge models that choose keys by running top-w, compared with eager attention."""

import copy
import functools
import io
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from doge_models import (
    VOCABULARY,
    WINDOW,
    check_parity,
    close,
    left_padding,
    make_doge,
    outcome,
    tokens,
    with_equal_scores,
)
from hf_models import make_model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DogeForCausalLM, DynamicCache, StaticCache
from transformers.masking_utils import create_causal_mask

import dmattn.integrations.transformers as dmt
from dmattn import top_window_mask
from dmattn.integrations.transformers import DogeCache, enable_doge
from dmattn.reference import reference_attention

LENGTH = 50
WINDOWS = {
    "window below the length": {"window": WINDOW},
    "window as long as the text": {"window": LENGTH},
    "window above the length": {"window": 2 * LENGTH},
    "sliding below the window": {"window": WINDOW, "sliding_window": WINDOW - 5},
    "sliding above the window": {"window": WINDOW, "sliding_window": WINDOW + 9},
    "sliding above the length": {"window": WINDOW, "sliding_window": 2 * LENGTH},
    "experts": {"window": WINDOW, "is_moe": True},
}
each_window = pytest.mark.parametrize("settings", WINDOWS.values(), ids=WINDOWS.keys())


def packed_positions() -> Tensor:
    """The positions of packed documents, whose lengths differ between the rows of the batch."""
    lengths = ((13, 30, 7), (1, 29, 20))
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


# ---------------------------------------------------------------------------------- against eager


@each_window
def test_logits_and_gradients(settings: dict[str, Any]) -> None:
    check_parity(make_doge(**settings), tokens())


@pytest.mark.parametrize("name", [n for n in WINDOWS if n != "experts"])
def test_packed_documents(name: str) -> None:
    positions = packed_positions()
    check_parity(make_doge(**WINDOWS[name]), tokens(), position_ids=positions, use_cache=False)


@pytest.mark.parametrize("name", [n for n in WINDOWS if n != "experts"])
def test_packed_documents_by_boundaries(name: str) -> None:
    """Given as cu_seq_lens, as collators for flash attention do, and without use_cache=False."""
    model, ids = enable_doge(make_doge(**WINDOWS[name])), tokens(1)
    lengths = (19, 1, LENGTH - 20)
    bounds = torch.tensor((0, *lengths)).cumsum(0)
    found = model(ids, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    assert found.past_key_values is None
    alone = torch.cat([model(part).logits for part in ids.split(lengths, 1)], 1)
    assert close(found.logits, alone)
    for error, words, inputs in (
        (ValueError, "boundaries beside a batch of 2", {"input_ids": tokens()}),
        (ValueError, "beside a cache", {"past_key_values": DynamicCache()}),
        (TypeError, "dtype torch.float32", {"cu_seq_lens_q": bounds.float()}),
        (ValueError, "wanted rising from 0 to 50", {"cu_seq_lens_q": torch.tensor([0, 40])}),
        (ValueError, "wanted rising from 0 to 50", {"cu_seq_lens_q": torch.tensor([0, 60])}),
        (ValueError, "wanted rising from 0 to 50", {"cu_seq_lens_q": torch.tensor([5, 20, 50])}),
        (ValueError, "wanted rising from", {"cu_seq_lens_q": torch.tensor([0, 40, 20, 50])}),
    ):
        with pytest.raises(error, match=f"cu_seq_lens_q: got .*{words}"):
            model(**{"input_ids": ids, "cu_seq_lens_q": bounds} | inputs)


def test_boundaries_have_no_effect_without_enable_doge() -> None:
    """As docs/doge.md says: the layers of transformers always make a dense mask."""
    dmt.register()
    model, ids, bounds = make_doge(), tokens(1), torch.tensor([0, 20, LENGTH])
    model.set_attn_implementation("dmattn")
    for inputs in ({}, {"use_cache": False}):
        assert torch.equal(
            model(ids, cu_seq_lens_q=bounds, **inputs).logits, model(ids, **inputs).logits
        )
    positions = torch.cat([torch.arange(20), torch.arange(LENGTH - 20)])[None]
    packed = model(ids, position_ids=positions, use_cache=False).logits
    assert close(packed[:, 20:], model(ids[:, 20:]).logits)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["window below the length", "sliding above the window"])
def test_padding(name: str, side: str) -> None:
    """Models with experts are left out: experts mix the tokens of a batch, padding included."""
    ids = tokens(3)
    real = left_padding(ids, 0, 23, 46)
    real = real if side == "left" else real.flip(1)
    check_parity(make_doge(**WINDOWS[name]), ids, real, attention_mask=real)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_of_four_dimensions(kind: str) -> None:
    ids, keep = tokens(), torch.eye(LENGTH, dtype=torch.bool)
    mask = keep | (torch.rand(2, 1, LENGTH, LENGTH) < 0.6).tril()
    if kind == "additive":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    check_parity(make_doge(), ids, attention_mask=mask)


def test_rows_that_see_later_keys() -> None:
    check_parity(make_doge(), tokens(), is_causal=False, use_cache=False)


def test_layers_called_by_something_else() -> None:
    """Pipelines call layers with the mask that transformers makes, and no model around them."""
    model = make_doge()
    hidden = torch.randn(2, LENGTH, 32)
    angles = model.model.rotary_emb(hidden, torch.arange(LENGTH)[None])
    real = left_padding(tokens(), 0, 9)

    def run() -> Tensor:
        mask = create_causal_mask(model.config, hidden, real, None, allow_is_causal_skip=False)
        out: Tensor = model.model.layers[0](hidden, attention_mask=mask, position_embeddings=angles)
        return out[real == 1]

    eager = run()
    enable_doge(model)
    assert close(run(), eager)


# --------------------------------------------------------------- what eager attention does not do


def test_scores_of_equal_keys_keep_the_later() -> None:
    """Against the definition: the plain softmax over the keys that `top_window_mask` keeps."""
    model = enable_doge(with_equal_scores(make_doge(layers=1)))
    found: dict[str, Tensor] = {}
    layer = model.model.layers[0].self_attn
    for name in ("q_norm", "k_norm", "v_proj"):
        getattr(layer, name).register_forward_hook(
            lambda module, inputs, out, name=name: found.update({name: out})
        )
    layer.o_proj.register_forward_pre_hook(lambda module, inputs: found.update(out=inputs[0]))
    # No rotation, so that what the hooks saw is what attention got.
    flat = torch.ones(1, LENGTH, 8), torch.zeros(1, LENGTH, 8)
    layer(torch.randn(2, LENGTH, 32), flat)
    value = found["v_proj"].view(2, LENGTH, 2, 8)
    score = torch.ones(2, 2, LENGTH)
    keep = top_window_mask(score, WINDOW)
    assert torch.equal(
        keep[0, 0], torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(1 - WINDOW)
    )
    exact = reference_attention(
        found["q_norm"], found["k_norm"], value, keep, score[:, :, None], 8**-0.5, True, 0.0
    )
    assert close(found["out"].view(2, LENGTH, 4, 8), exact.out.float())


def dtypes_of_projections(model: Any) -> list[torch.dtype]:
    """A list to which every later call of a dt_proj appends the dtype of its result."""
    found: list[torch.dtype] = []
    for layer in model.model.layers:
        layer.self_attn.dt_proj.register_forward_hook(
            lambda module, inputs, out: found.append(out.dtype)
        )
    return found


def test_half_precision_is_nearer_to_float32_than_eager() -> None:
    """Scores are float32 in a bfloat16 model as well, so that ties do not decide what is kept."""
    model = make_doge()
    ids = tokens(2, 200)
    half = copy.deepcopy(model).to(torch.bfloat16)
    dtypes = dtypes_of_projections(half)
    eager = half(ids).logits.float()
    ours = enable_doge(half)(ids).logits.float()
    exact = enable_doge(model)(ids).logits
    assert (ours - exact).abs().mean() < (eager - exact).abs().mean()
    assert dtypes == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert half.model.layers[0].self_attn.dt_proj.weight.dtype == torch.bfloat16


def test_autocast() -> None:
    model, ids = make_doge(), tokens()
    exact = enable_doge(copy.deepcopy(model))(ids).logits
    dtypes = dtypes_of_projections(model)
    with torch.autocast("cpu", torch.bfloat16):
        eager = model(ids).logits.float()
        ours = outcome(enable_doge(model), ids)["logits"].float()
    assert (ours - exact).abs().mean() <= 2 * (eager - exact).abs().mean()
    assert dtypes == [torch.bfloat16] * 2 + [torch.float32] * 2


@pytest.mark.parametrize("name", [n for n in WINDOWS if n != "experts"])
def test_no_row_feels_later_tokens(name: str) -> None:
    """Models with experts are left out: experts of transformers' Doge mix the tokens of a batch."""
    model, ids = enable_doge(make_doge(**WINDOWS[name])), tokens()
    before = model(ids).logits
    ids[:, 30:] = ids[:, 30:].flip(1)
    after = model(ids).logits
    assert torch.equal(after[:, :30], before[:, :30])
    assert not torch.equal(after[:, 30:], before[:, 30:])


class Largest(TorchDispatchMode):
    """Records the size, in entries, of the largest memory behind any operation's results."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [
            t.untyped_storage().nbytes() // t.element_size()
            for t in tree_leaves(result)
            if isinstance(t, Tensor)
        ]
        self.entries = max([self.entries, *sizes])
        return result


CASES = ("plain", "padding", "packed", "static cache", "kept keys")
SETTINGS: tuple[dict[str, int], ...] = ({}, {"sliding_window": 10}, {"window": 10000})


@pytest.mark.parametrize(
    "case, settings",
    # A model with a sliding window has no DogeCache.
    [(c, s) for c in CASES for s in SETTINGS if not (c == "kept keys" and "sliding_window" in s)],
)
def test_nothing_is_quadratic(case: str, settings: dict[str, Any]) -> None:
    length = 1024
    model = enable_doge(make_doge(layers=1, **settings))
    ids = torch.randint(1, VOCABULARY, (1, length))
    positions = torch.cat([torch.arange(700), torch.arange(length - 700)])[None]
    inputs: dict[str, Any] = {
        "padding": {"attention_mask": left_padding(ids, 9)},
        "packed": {"position_ids": positions, "use_cache": False},
    }.get(case, {})
    with Largest() as largest:
        if case == "static cache":
            with torch.no_grad():
                model(ids, past_key_values=StaticCache(model.config, max_cache_len=length + 7))
        elif case == "kept keys":
            with torch.no_grad():
                model(ids, past_key_values=DogeCache(model.config))
        else:
            model(ids, labels=ids, **inputs).loss.backward()
    assert largest.entries <= length * VOCABULARY < length * length / 3  # logits are the largest


# --------------------------------------------------------------- the model stays the user's object


def test_switching_off_and_on() -> None:
    model, ids = make_doge(), tokens()
    eager = outcome(model, ids)
    assert enable_doge(model) is model
    ours = outcome(model, ids)
    model.set_attn_implementation("eager")
    assert all(torch.equal(t, eager[name]) for name, t in outcome(model, ids).items())
    model.set_attn_implementation("dmattn")
    enable_doge(model)  # again
    assert all(torch.equal(t, ours[name]) for name, t in outcome(model, ids).items())


def test_what_is_saved_does_not_know(tmp_path: Path) -> None:
    model = make_doge()
    classes = [type(m) for m in model.modules()]
    state, config = model.state_dict(), model.config.to_dict()
    enable_doge(model, use_dynamic_mask_cache=True)
    assert [type(m) for m in model.modules()] == classes
    assert list(model.state_dict()) == list(state)
    assert model.config.to_dict() == config
    model.save_pretrained(tmp_path)
    assert "dmattn" not in (tmp_path / "config.json").read_text()
    loaded = DogeForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    again = enable_doge(copy.deepcopy(loaded))
    ids = tokens()
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)
    assert not torch.equal(loaded(ids).logits, again(ids).logits)


def test_copies_are_enabled_too() -> None:
    model, ids = enable_doge(make_doge()), tokens()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        before = twin(ids).logits
        assert torch.equal(before, model(ids).logits)
        with torch.no_grad():
            twin.model.layers[0].self_attn.dt_proj.weight.mul_(3)
        assert not torch.equal(twin(ids).logits, before)  # its own parameters, not the model's
        assert torch.equal(model(ids).logits, before)


def test_loaded_where_nothing_is_registered(tmp_path: Path) -> None:
    """A whole model can be switched off and on in a process that has not called register()."""
    torch.save(enable_doge(make_doge()), tmp_path / "model")
    code = (
        f"import torch; model = torch.load({str(tmp_path / 'model')!r}, weights_only=False);"
        "model.set_attn_implementation('eager'); model.set_attn_implementation('dmattn');"
        "print(model(torch.arange(3, 23)[None]).logits.shape[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["20"]


def test_hooks_of_accelerate() -> None:
    """Such hooks keep the forward that a module had before, and call that one."""
    model, ids = make_doge(), tokens()
    plain = enable_doge(copy.deepcopy(model))(ids).logits
    calls = []

    def hooked(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(type(module).__name__)
        return module._old_forward(*args, **kwargs)

    for module in model.modules():
        module._old_forward = module.forward
        module.forward = functools.partial(hooked, module)
    assert torch.equal(enable_doge(model)(ids).logits, plain)
    assert {"DogeModel", "DogeAttention", "Linear"} <= set(calls)


class Adapter(torch.nn.Module):
    """A low-rank adapter around a linear layer, as PEFT makes them."""

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = torch.nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x.to(self.down.weight.dtype)))


@pytest.mark.parametrize("enabled_first", [True, False])
def test_adapters_around_dt_proj(enabled_first: bool) -> None:
    model, ids = make_doge(), tokens()
    if enabled_first:
        enable_doge(model)
    for layer in model.model.layers:
        layer.self_attn.dt_proj = Adapter(layer.self_attn.dt_proj)
    model.set_attn_implementation("eager")
    check_parity(model, ids)
    assert model.model.layers[0].self_attn.dt_proj.up.weight.grad.abs().sum() > 0
    half = enable_doge(model.to(torch.bfloat16))  # its adapter is called with float32, and casts
    assert half(ids).logits.isfinite().all()


def test_quantized_dt_proj_gets_what_it_takes() -> None:
    class OwnKind(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            assert input.dtype == torch.bfloat16
            return super().forward(input)

    model = make_doge().to(torch.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.dt_proj = OwnKind(16, 2, bias=False, dtype=torch.bfloat16)
    assert enable_doge(model)(tokens()).logits.isfinite().all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model, ids = enable_doge(make_doge()), tokens()
    plain = outcome(model, ids)
    # The second name is deprecated, but older releases have no other.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert all(torch.equal(t, plain[name]) for name, t in outcome(model, ids).items())


# ------------------------------------------------------------------------------------- bad inputs


def test_models_without_doge() -> None:
    model = make_model("llama")
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"model: got a LlamaForCausalLM .*register"):
        enable_doge(model)
    assert model.config._attn_implementation == before
    with pytest.raises(TypeError, match="model: got str"):
        enable_doge("model")
    with pytest.raises(TypeError, match="use_dynamic_mask_cache"):
        enable_doge(make_doge(), use_dynamic_mask_cache="yes")


@pytest.mark.parametrize("name", ["enable_doge", "DogeCache"])
def test_transformers_too_old_or_absent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: "5.17.2")
    with pytest.raises(ImportError, match=r"transformers: got 5.17.2, wanted 5.18 .*pip install"):
        getattr(dmt, name)

    def no_version(package: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", no_version)
    with pytest.raises(ImportError, match=r"transformers: got none, wanted 5.18 .*pip install"):
        getattr(dmt, name)


def test_dropout_of_attention(tmp_path: Path) -> None:
    """Refused in training, with advice that works."""
    model, ids = enable_doge(make_doge(attention_dropout=0.1)), tokens()
    model.config.attention_dropout = 0.0  # no effect: the layers have copied it
    with pytest.raises(ValueError, match=r"attention_dropout: got 0.1, wanted 0") as error:
        model(ids)
    assert "from_pretrained(..., attention_dropout=0.0)" in str(error.value)
    assert "config.attention_dropout" not in str(error.value)
    model.save_pretrained(tmp_path)
    loaded = DogeForCausalLM.from_pretrained(tmp_path, attention_dropout=0.0).train()
    assert enable_doge(loaded)(ids).logits.isfinite().all()
    assert "model.eval()" in str(error.value)
    assert model.eval()(ids).logits.isfinite().all()
    assert 'the implementation "eager"' in str(error.value)
    model.train().set_attn_implementation("eager")
    assert model(ids).logits.isfinite().all()


@pytest.mark.parametrize("shape", [(2, 7), (3, LENGTH), (2, 1, LENGTH)])
def test_masks_of_wrong_shapes(shape: tuple[int, ...]) -> None:
    model = enable_doge(make_doge())
    with pytest.raises(ValueError, match="attention_mask: got shape"):
        model(tokens(), attention_mask=torch.ones(shape))


def test_masks_of_more_keys_than_there_are() -> None:
    """They are accepted beside a cache, which may have room for more keys; eager does the same."""
    model = enable_doge(make_doge())
    longer = torch.ones(2, LENGTH + 3)
    longer[0, :8] = longer[1, -2:] = 0
    with pytest.raises(ValueError, match="attention_mask: got shape"):
        model(tokens(), attention_mask=longer, use_cache=False)
    for each in (model.eval(), make_doge().eval()):
        with torch.no_grad():
            found = each(tokens(), attention_mask=longer).logits
            assert torch.equal(found, each(tokens(), attention_mask=longer[:, :LENGTH]).logits)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_masks_that_leave_out_what_the_cache_holds(kind: Any) -> None:
    """transformers would take such a mask for one of the first tokens, and hide the new ones."""
    model, ids = enable_doge(make_doge()).eval(), tokens()
    cache = kind(config=model.config, **({"max_cache_len": 60} if kind is StaticCache else {}))
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        with pytest.raises(
            ValueError, match=r"attention_mask: got shape \(2, 10\), wanted \(2, 50\)"
        ):
            model(ids[:, 40:], past_key_values=cache, attention_mask=torch.ones(2, 10))


@pytest.mark.parametrize("shape", [(3, 1, 4, 24), (2, 3, 4, 24), (2, 1, 3, 24), (2, 1, 4, 4)])
def test_masks_of_four_dimensions_that_do_not_fit(shape: tuple[int, ...]) -> None:
    """Refused before the cache takes the new tokens."""
    model, ids = enable_doge(make_doge()).eval(), tokens()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        mask = torch.ones(shape, dtype=torch.bool)
        with pytest.raises(ValueError, match="attention_mask: got shape"):
            model(ids[:, 20:24], attention_mask=mask, past_key_values=cache)
    assert [layer.get_seq_length() for layer in cache.layers] == [20, 20]


def test_masks_of_integers_in_four_dimensions() -> None:
    """If an integer mask were added to the logits, as in eager, it would mean the opposite."""
    model = enable_doge(make_doge()).eval()
    mask = torch.ones(2, 1, 50, 50, dtype=torch.int64).tril()
    with pytest.raises(
        TypeError, match=r"attention_mask: got dtype torch\.int64 .* wanted torch\.bool"
    ):
        model(tokens(), attention_mask=mask)


def test_another_batch_is_refused_before_a_cache_takes_tokens() -> None:
    model, ids = enable_doge(make_doge()).eval(), tokens()
    cache = StaticCache(config=model.config, max_cache_len=60)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        with pytest.raises(ValueError, match="past_key_values: got a StaticCache of 2 sequences"):
            model(ids[:1, 20:], past_key_values=cache)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [20, 20]


def test_norms_are_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """In enabled models of any dtype, but not if dtypes are mixed, as they are under autocast."""
    calls = []

    def rms_norm(*arguments: Any) -> Tensor:
        calls.append(arguments)
        return plain(*arguments)

    plain = torch.nn.functional.rms_norm
    monkeypatch.setattr(torch.nn.functional, "rms_norm", rms_norm)
    model, ids = enable_doge(make_doge(layers=2)).eval(), tokens(1, 20)
    per_forward = 2 * 4 + 1
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        model(ids)
        assert len(calls) == per_forward
        calls.clear()
    with torch.no_grad():
        found = model.model.norm(torch.ones(1, 32))
    assert not calls and found.dtype == torch.float32
    model.set_attn_implementation("eager")
    model(ids)
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_norms_keep_the_dtype_under_autocast(dtype: torch.dtype) -> None:
    """The output has the dtype of the input, as in eager, though CUDA autocast widens rms_norm."""
    model = enable_doge(make_doge())
    norm, enabled = model.model.norm, torch.is_autocast_enabled("cuda")
    with FakeTensorMode():
        weight = torch.ones(32, dtype=dtype, device="cuda")
        norm.weight = torch.nn.Parameter(weight, requires_grad=False)
        x = torch.ones(4, 32, dtype=dtype, device="cuda")
        torch.set_autocast_enabled("cuda", True)
        try:
            found, wanted = norm(x), type(norm).forward(norm, x)
        finally:
            torch.set_autocast_enabled("cuda", enabled)
    assert found.dtype == wanted.dtype == dtype
