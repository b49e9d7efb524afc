"""Head dimensions, head ratios and dtypes, each with features that take different code paths."""

from __future__ import annotations

import pytest

from attention.cases import Case, build, case_id
from attention.driver import check, run
from attention.targets import target

pytestmark = pytest.mark.each_family

FEATURES = {
    "plain": Case(),
    "causal_softcap": Case(causal=True, softcap=5.0, dlse=True),
    "dense_mask_bias": Case(mask="bhqk", bias="bhqk", causal=True),
    "key_mask_bias": Case(mask="bk1k", bias="bk1k", causal=True),
    "bias_f32": Case(bias="1hqk", bias_f32=True, softcap=20.0),
}


@pytest.mark.parametrize("dtype", target().dtypes)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 96, 128, 160, 192, 256, 5, 20, 80])
@pytest.mark.parametrize("feature", FEATURES)
def test_head_dim(feature: str, head_dim: int, dtype: str) -> None:
    """On CUDA 5 and 20 are padded before the kernels get them; the others they take directly."""
    check(FEATURES[feature].with_(seqlen_q=150, seqlen_k=197, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize(
    "nheads,nheads_k", [(1, 1), (3, 3), (4, 2), (8, 2), (24, 3), (16, 1), (32, 4)]
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("feature", FEATURES)
def test_head_ratio(feature: str, head_dim: int, nheads: int, nheads_k: int) -> None:
    case = FEATURES[feature].with_(seqlen_q=100, seqlen_k=133, head_dim=head_dim)
    check(case.with_(nheads=nheads, nheads_k=nheads_k))


@pytest.mark.parametrize(
    "seqlen_q,seqlen_k", [(1, 64), (64, 65), (200, 128), (500, 60), (40, 300), (700, 1030)]
)
@pytest.mark.parametrize("head_dim", [136, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_wide_heads(
    seqlen_q: int, seqlen_k: int, head_dim: int, causal: bool, softcap: float
) -> None:
    """On Hopper two thread blocks share 128 keys in the backward, 64 each."""
    case = Case(seqlen_q, seqlen_k, batch=2, nheads=8, nheads_k=4, softcap=softcap)
    check(case.with_(head_dim=head_dim, causal=causal, dlse=True))


@pytest.mark.parametrize("dtype", target().dtypes)
@pytest.mark.parametrize("head_dim,value_dim", [(192, 128), (64, 256), (40, 5), (8, 20), (72, 64)])
@pytest.mark.parametrize("feature", FEATURES)
def test_value_dim(feature: str, head_dim: int, value_dim: int, dtype: str) -> None:
    """Values of another head dimension than keys."""
    case = FEATURES[feature].with_(seqlen_q=70, seqlen_k=97, head_dim=head_dim, dtype=dtype)
    check(case.with_(value_dim=value_dim, layout="spaced"))


SCALES = [
    Case(200, 170, scale=scale, softcap=softcap, causal=True, bias="b11k", head_dim=head_dim)
    for scale in (1.0, 0.5, 0.0301, 0.0, -0.2)
    for softcap in (0.0, 0.5, 50.0)
    for head_dim in (64, 256)
]


@pytest.mark.parametrize("case", SCALES, ids=case_id)
def test_scale_and_softcap(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("softcap", [3e2, 1e4, 1e6, 1e8, 3e38])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("bias", ["", "b11k"])
def test_softcap_far_above_the_logits(bias: str, head_dim: int, softcap: float) -> None:
    """c * tanh(x / c) is x there, up to c times the error of the tanh."""
    case = Case(130, 150, softcap=softcap, causal=True, bias=bias, head_dim=head_dim)
    check(case)
    check(case.with_(seqlen_q=1, seqlen_k=300, causal=False, wants=""))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scale", [0.5, 0.0, -0.2])
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap_alone(softcap: float, scale: float, head_dim: int) -> None:
    """Without a bias, softcap has kernels of its own on Hopper."""
    for logits in (0.3, 40.0):
        case = Case(300, 270, scale=scale, softcap=softcap, head_dim=head_dim, logits=logits)
        check(case.with_(nheads=4, nheads_k=2, causal=True))


@pytest.mark.parametrize("key", [4, 5, 6, 7])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_softcap_of_nan_is_nan(head_dim: int, key: int) -> None:
    """Rows that see a key of NaN; on Hopper neighbouring scores get tanh by different formulas."""
    problem = build(Case(140, 140, softcap=5.0, causal=True, head_dim=head_dim, wants=""))
    problem.k[:, key] = float("nan")
    out = run(problem).out
    assert not out[:, :key].isnan().any() and out[:, key:].isnan().all()


@pytest.mark.parametrize("logits", [1e-4, 30.0, 300.0, 3000.0])
@pytest.mark.parametrize("dtype", target().dtypes)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_logit_size(logits: float, dtype: str, head_dim: int, causal: bool) -> None:
    """From a uniform softmax to one that picks a single key."""
    check(Case(130, 140, logits=logits, dtype=dtype, head_dim=head_dim, causal=causal))
