"""Backends that are not the device's own go through the attention suite, unchanged."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parent / "attention"


def run_suite(target: str, **environment: str) -> str:
    """What pytest prints when some cases of every test pass that names the backend of a target.

    `environment`: further variables; see targets.py.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", str(SUITE)],
        env={**os.environ, "DMATTN_TEST_TARGET": target, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout


def test_a_backend_in_one_file_passes_the_attention_suite() -> None:
    assert "refuses" not in run_suite("plain"), "it serves every problem, so none may be skipped"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_backend_passes_the_attention_suite_in_the_interpreter() -> None:
    found = run_suite("triton-cpu", TRITON_INTERPRET="1")
    assert "refuses" not in found, "it serves every problem of these dtypes, so none may be skipped"
