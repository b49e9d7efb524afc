"""cmake/compile_times.py: seconds of each unit, from ninja's log."""

from __future__ import annotations

from pathlib import Path

import pytest

import compile_times

UNITS = "CMakeFiles/dmattn.dir/units"
LOG = f"""# ninja log v7
0\t500\t1\t{UNITS}/bwd_sm90_bf16_d64_tiled.cu.o\tabc
2000\t63000\t1\t{UNITS}/bwd_sm90_bf16_d64_tiled.cu.o\tabc
3000\t53000\t1\t{UNITS}/bwd_sm90_f16_d64_tiled.cu.o\tabc
53000\t153000\t1\t{UNITS}/bwd_sm90_bf16_d128_tiled.cu.o\tabc
63000\t73000\t1\t{UNITS}/short_fwd_sm80_f16_d64_tiled.cu.o\tabc
73000\t77000\t1\tCMakeFiles/dmattn.dir/src/api/fwd.cpp.o\tabc
153000\t154000\t1\tdmattn_kernels/libdmattn.so\tabc
"""


def test_table() -> None:
    lines = compile_times.table(compile_times.read_seconds(LOG)).splitlines()
    assert lines == [
        "| unit | up to 64 | up to 128 |",
        "|---|---|---|",
        "| bwd, sm90, tiled | 61, 50 | 100 |",
        "| short_fwd, sm80, tiled | 10 |  |",
        "",
        "All other files: 4 s. In all 225 s of compilers, 151 s from the first to the last.",
    ]


def test_a_folder_without_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["compile_times.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        compile_times.main()
    assert f"{tmp_path / '.ninja_log'} does not exist" in capsys.readouterr().err
