"""A backend that dmattn does not know goes through the attention suite, unchanged."""

import os
import subprocess
import sys
from pathlib import Path

SUITE = Path(__file__).parent / "attention"


def test_a_backend_in_one_file_passes_the_attention_suite() -> None:
    """Some cases of every test that names the backend of its target; see targets.py."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", str(SUITE)],
        env={**os.environ, "DMATTN_TEST_TARGET": "plain"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "refuses" not in done.stdout, "it serves every problem, so none may be skipped"
