"""Sessions for a GPU find the torch of the machine: tested in stub environments, without a GPU.

The environments are real ones, made by venv; the torch in them is a folder with a version.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SITE_PACKAGES = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


def load_host_torch() -> ModuleType:
    spec = importlib.util.spec_from_file_location("host_torch", ROOT / "tools/host_torch.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where the annotations of its named tuples are looked up
    spec.loader.exec_module(module)
    return module


host_torch = load_host_torch()


def make_environment(place: Path, torch: str = "", cuda: str | None = None) -> Path:
    """Make an environment at `place`, and return its interpreter.

    It has a stub of torch, of version `torch`, unless that is empty.
    """
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", str(place)], check=True)
    if torch:
        package = place / SITE_PACKAGES / "torch"
        package.mkdir()
        (package / "__init__.py").write_text("from torch.version import __version__\n")
        (package / "version.py").write_text(f"__version__ = {torch!r}\ncuda = {cuda!r}\n")
    return place / "bin" / "python"


def described(**changes: object) -> object:
    """An environment whose torch is suitable, except for the changes."""
    facts = {
        "python": "/env/bin/python",
        "version": (3, 12),
        "prefix": "/env",
        "base_prefix": "/usr",
        "packages": ("/env/site-packages",),
        "torch": "2.9.1+cu128",
        "cuda": "12.8",
        "folder": "/env/site-packages/torch",
    }
    return host_torch.Environment(**{**facts, **changes})


def run(python: Path, code: str) -> str:
    return subprocess.check_output([python, "-c", code], text=True).strip()


def test_what_an_environment_says(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env", "2.9.1+cu128", "12.8")
    found = host_torch.examine(str(python))
    assert (found.torch, found.cuda) == ("2.9.1+cu128", "12.8")
    assert Path(found.folder) == tmp_path / "env" / SITE_PACKAGES / "torch"
    assert Path(found.packages[0]) == tmp_path / "env" / SITE_PACKAGES
    assert Path(found.prefix) == tmp_path / "env"
    assert found.base_prefix == sys.base_prefix
    assert found.version == sys.version_info[:2]


def test_no_torch_and_no_interpreter(tmp_path: Path) -> None:
    empty = host_torch.examine(str(make_environment(tmp_path / "env")))
    assert host_torch.why_not(empty) == "no torch"
    assert host_torch.examine(str(tmp_path / "nothing")) is None
    assert host_torch.examine("/bin/false") is None
    assert host_torch.why_not(None) == "it cannot be run"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"torch": "2.6.0a0+git1234"}, None),
        ({"torch": "2.13.0+cpu", "cuda": ""}, "torch 2.13.0+cpu is made without CUDA"),
        ({"torch": "2.5.1"}, "torch 2.5.1 is older than 2.6"),
        ({"version": (3, 10)}, "Python 3.10 is older than 3.11"),
    ],
)
def test_which_torch_will_do(changes: dict[str, object], reason: str | None) -> None:
    assert host_torch.why_not(described(**changes)) == reason


def make_interpreter(folder: Path) -> str:
    folder.mkdir(parents=True)
    (folder / "python").touch()
    return str(folder / "python")


def test_where_it_looks(tmp_path: Path) -> None:
    named, active, conda, base, other = (
        make_interpreter(tmp_path / name / "bin")
        for name in ("named", "active", "conda", "base", "other")
    )
    environ = {
        "PYTHON": named,
        "VIRTUAL_ENV": str(tmp_path / "active"),
        "CONDA_PREFIX": str(tmp_path / "conda"),
    }
    on_path = {"python3": other, "python": active}
    assert host_torch.candidates(environ, base, on_path.get) == [
        ("PYTHON", named),
        ("VIRTUAL_ENV", active),
        ("CONDA_PREFIX", conda),
        ("the Python that nox runs on", base),
        ("the PATH", other),
    ]
    assert host_torch.candidates({}, base, lambda _: None) == [
        ("the Python that nox runs on", base)
    ]
    # A name instead of a path, an environment that was deleted, empty variables.
    environ = {"PYTHON": "python3", "VIRTUAL_ENV": str(tmp_path / "gone"), "CONDA_PREFIX": ""}
    assert host_torch.candidates(environ, base, on_path.get) == [
        ("PYTHON", other),
        ("the Python that nox runs on", base),
        ("the PATH", active),
    ]


def test_first_that_will_do(tmp_path: Path) -> None:
    places = [(name, f"/{name}/bin/python") for name in ("active", "nox", "PATH")]
    answers = {
        "/active/bin/python": described(torch="2.13.0+cpu", cuda=""),
        "/nox/bin/python": described(prefix="/usr"),
        "/PATH/bin/python": described(),
    }
    found, passed_over = host_torch.find_torch(places, answers.get)
    assert found == (answers["/nox/bin/python"], "nox")
    assert passed_over == ["/active/bin/python (active): torch 2.13.0+cpu is made without CUDA"]
    found, passed_over = host_torch.find_torch(places, lambda _: None)
    assert found is None
    assert len(passed_over) == 3


def test_the_active_environment_comes_first(tmp_path: Path) -> None:
    """It also comes before a torch of the Python that nox runs on, since it was activated to be
    used."""
    active = make_environment(tmp_path / "active", "2.9.1+cu128", "12.8")
    base = make_environment(tmp_path / "base", "2.8.0", "12.6")
    environ = {"VIRTUAL_ENV": str(tmp_path / "active"), "PATH": ""}
    found, _ = host_torch.find_torch(host_torch.candidates(environ, str(base)))
    assert found.environment.python == str(active)
    assert found.origin == "VIRTUAL_ENV"
    found, _ = host_torch.find_torch(host_torch.candidates({}, str(base)))
    assert found.environment.torch == "2.8.0"


def test_interpreter_of_the_sessions() -> None:
    """It is that of nox, unless the environment was made from another installation of Python."""
    assert host_torch.interpreter_for(None, "/usr") is None
    found = host_torch.Found(described(), "VIRTUAL_ENV")
    assert host_torch.interpreter_for(found, "/usr") is None
    assert host_torch.interpreter_for(found, "/opt/python") == "/env/bin/python"


def test_session_sees_the_torch_of_the_environment(tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "env", "2.9.1+cu128", "12.8")
    session = make_environment(tmp_path / "session")
    packages = tmp_path / "session" / SITE_PACKAGES
    found = host_torch.Found(host_torch.examine(str(environment)), "VIRTUAL_ENV")
    host_torch.show_packages(found, packages)
    assert run(session, "import torch; print(torch.__version__)") == "2.9.1+cu128"
    # What the session has installed itself comes first.
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text("__version__ = 'its own'\n")
    assert run(session, "import torch; print(torch.__version__)") == "its own"


def test_session_sees_editable_installations(tmp_path: Path) -> None:
    """torch built from a checkout is on the path by a .pth file of the environment."""
    environment = make_environment(tmp_path / "env")
    checkout = make_environment(tmp_path / "checkout", "2.10.0a0+git12", "13.0").parents[1]
    pth = tmp_path / "env" / SITE_PACKAGES / "editable.pth"
    pth.write_text(f"{checkout / SITE_PACKAGES}\n")
    session = make_environment(tmp_path / "session")
    found = host_torch.Found(host_torch.examine(str(environment)), "VIRTUAL_ENV")
    host_torch.show_packages(found, tmp_path / "session" / SITE_PACKAGES)
    assert run(session, "import torch; print(torch.__version__)") == "2.10.0a0+git12"


def test_session_forgets_an_environment_that_is_no_longer_active(tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "env", "2.9.1+cu128", "12.8")
    session = make_environment(tmp_path / "session")
    packages = tmp_path / "session" / SITE_PACKAGES
    found = host_torch.Found(host_torch.examine(str(environment)), "VIRTUAL_ENV")
    looks = "import importlib.util; print(importlib.util.find_spec('torch') is not None)"
    for now, seen in ((found, "True"), (None, "False"), (None, "False")):
        host_torch.show_packages(now, packages)
        assert run(session, looks) == seen


def test_an_installation_is_seen_without_help(tmp_path: Path) -> None:
    """--system-site-packages shows the packages of the installation: nothing is written."""
    found = host_torch.Found(described(prefix="/usr"), "the Python that nox runs on")
    host_torch.show_packages(found, tmp_path)
    assert not list(tmp_path.iterdir())


# The repository's noxfile, on a machine whose driver reports the compute capability of an H200, and
# one more session for a GPU.
NOXFILE = """
import ctypes

class Driver:
    def cuInit(self, flags): return 0
    def cuDeviceGet(self, device, ordinal): return 0
    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = {75: 9, 76: 0}[attribute]

load = ctypes.CDLL
ctypes.CDLL = lambda name, *a, **k: Driver() if name == "libcuda.so.1" else load(name, *a, **k)
__file__ = REAL_NOXFILE
exec(compile(open(REAL_NOXFILE).read(), REAL_NOXFILE, "exec"))

@gpu_session
def look(session):
    assert use_gpu_torch(session)
"""


def test_a_session_takes_the_torch_of_the_active_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nox")
    make_environment(tmp_path / "env", "2.9.1+cu128", "12.8")
    package = tmp_path / "env" / SITE_PACKAGES / "torch"
    stub = "class cuda:\n    is_available = staticmethod(lambda: True)\n"
    (package / "__init__.py").write_text(f"from torch.version import __version__\n{stub}")
    noxfile = tmp_path / "noxfile.py"
    noxfile.write_text(f"REAL_NOXFILE = {str(ROOT / 'noxfile.py')!r}\n{NOXFILE}")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "env"))
    monkeypatch.delenv("PYTHON", raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = [sys.executable, "-m", "nox", "--noxfile", str(noxfile), "--session", "look"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    assert f"using torch 2.9.1+cu128 in {package} (from VIRTUAL_ENV: {tmp_path / 'env'})" in said
