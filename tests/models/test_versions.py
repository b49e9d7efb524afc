"""The tests of models need a transformers that dmattn knows."""

from __future__ import annotations

from dmattn.integrations.transformers.registration import check_transformers


def test_transformers() -> None:
    """Without one no model is tested, which is no reason to count the run as complete."""
    check_transformers()
