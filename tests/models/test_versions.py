"""The tests of models need a transformers that dmattn knows."""

from __future__ import annotations

from dmattn.integrations.transformers.registration import check_transformers


def test_transformers() -> None:
    """Without such a version no model is tested, and the run must not count as complete."""
    check_transformers()
