"""Backends that are not the default of any device pass the attention suite, unchanged."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attention.targets import TARGETS

SUITE = Path(__file__).parent / "attention"

NAMED = [name for name, row in TARGETS.items() if row.device == "cpu" and row.backend is not None]
# The beginnings of errors by which a target may refuse cases of the suite; others may refuse none.
REFUSALS = {"flex-cpu": ("deterministic: got True beside attn_bias",)}


@pytest.mark.parametrize("target", NAMED)
def test_a_backend_passes_the_attention_suite(target: str) -> None:
    """Some cases of every test run with the backend of the target; see targets.py."""
    if target == "triton-cpu" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", str(SUITE)],
        env={**os.environ, "DMATTN_TEST_TARGET": target, **TARGETS[target].env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    refused = set(re.findall(r"refuses: (.*)", done.stdout))
    wrong = {reason for reason in refused if not reason.startswith(REFUSALS.get(target, ()))}
    assert not wrong, "it serves such problems, so none may be skipped"
