"""Importing and registering, and the errors where transformers is missing or too old."""

import subprocess
import sys
from importlib import metadata

import pytest
import transformers

import dmattn.integrations.transformers as dmt


def test_imports_are_free_of_transformers() -> None:
    code = (
        "import sys, dmattn, dmattn.integrations.transformers\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_imports_transformers_is_listed() -> None:
    assert {*dmt.__all__} <= {*dir(dmt)}
    assert all(hasattr(dmt, name) for name in dmt.__all__)


def test_register() -> None:
    dmt.register()
    first = transformers.AttentionInterface()["dmattn"]
    dmt.register()
    assert transformers.AttentionInterface()["dmattn"] is first
    assert "dmattn" in transformers.AttentionMaskInterface().valid_keys()


@pytest.mark.parametrize("version", [None, "4.57.1", "5.17.2"])
def test_refused(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    got = "none" if version is None else version
    with pytest.raises(ImportError, match=rf"transformers: got {got}, wanted 5\.18.*pip install"):
        dmt.register()
