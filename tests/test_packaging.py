"""Workflows, noxfile and packages agree on what is built, for what, and under which names."""

import importlib.util
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "packages/dmattn", ROOT / "packages/dmattn-kernels")
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def jobs(workflow: Path) -> dict[str, Any]:
    found = yaml.safe_load(workflow.read_text())["jobs"]
    assert isinstance(found, dict)
    return found


def combinations(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The combinations of a job's matrix; one empty combination without a matrix."""
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    listed = matrix.pop("include", [{}])
    products = itertools.product(*matrix.values())
    return [
        {**dict(zip(matrix, values, strict=True)), **row} for values in products for row in listed
    ]


def filled(text: str, combination: dict[str, Any]) -> str:
    """The text with ${{ matrix.name }} and ${{ matrix.name.part }} replaced."""

    def value(match: re.Match[str]) -> str:
        found: Any = combination
        for part in match[1].split("."):
            found = found[part]
        return str(found)

    return re.sub(r"\$\{\{ matrix\.([\w.]+) \}\}", value, text)


def project(package: Path) -> dict[str, Any]:
    found = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert isinstance(found, dict)
    return found


WHEELS = jobs(ROOT / ".github/workflows/wheels.yml")


@pytest.fixture(scope="module")
def sessions() -> set[str]:
    pytest.importorskip("nox")
    command = [sys.executable, "-m", "nox", "--list", "--noxfile", str(ROOT / "noxfile.py")]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^[-*] (\S+?)(?:-/\S+)?(?:\s|$)", listing, re.MULTILINE))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_sessions_that_exist(workflow: Path, sessions: set[str]) -> None:
    wanted = {
        session
        for job in jobs(workflow).values()
        for combination in combinations(job)
        for step in job["steps"]
        for session in re.findall(r"\./dev ([\w.-]+)", filled(step.get("run", ""), combination))
    }
    assert wanted and wanted <= sessions


def test_every_other_torch_is_tested(sessions: set[str]) -> None:
    ci = jobs(ROOT / ".github/workflows/ci.yml")
    tested = {f"tests-torch-{combination['torch']}" for combination in combinations(ci["torch"])}
    assert tested == {name for name in sessions if name.startswith("tests-torch-")}


def named_pythons(package: Path) -> list[str]:
    """The versions of Python that a package is classified for, such as "3.12"."""
    words = project(package)["classifiers"]
    return [w.rpartition(" ")[2] for w in words if re.search(r"Python :: 3\.\d+$", w)]


def test_dev_looks_for_every_python_that_is_named() -> None:
    (looked_for,) = re.findall(r"for python in .*; do", (ROOT / "dev").read_text())
    assert set(re.findall(r"python(3\.\d+)", looked_for)) == set(named_pythons(PACKAGES[0]))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_wheels_are_built_for_every_python_that_is_named(package: Path) -> None:
    named = named_pythons(package)
    tags = [f"cp{version.replace('.', '')}" for version in named]
    matrix = WHEELS["kernels"]["strategy"]["matrix"]
    assert matrix["python"] == [f"{tag}-{tag}" for tag in tags]
    assert project(package)["requires-python"] == f">={named[0]}"


def test_dmattn_wants_the_kernels_where_there_are_wheels() -> None:
    (kernels,) = [d for d in project(PACKAGES[0])["dependencies"] if d.startswith("dmattn-kernels")]
    wanted = set(re.findall(r"platform_machine == '(\w+)'", kernels))
    matrix = WHEELS["kernels"]["strategy"]["matrix"]
    assert wanted == {platform["machine"] for platform in matrix["platform"]}
    assert "platform_system == 'Linux'" in kernels


def test_what_is_published_is_built() -> None:
    built = {
        filled(step["with"]["name"], combination)
        for job in (WHEELS["dmattn"], WHEELS["kernels"])
        for combination in combinations(job)
        for step in job["steps"]
        if "upload-artifact" in step.get("uses", "")
    }
    downloads = [step["with"] for step in WHEELS["publish"]["steps"] if "path" in step["with"]]
    chosen = [Path(w.get("pattern") or w["name"]) for w in downloads]
    taken = [name for name in built if any(Path(name).match(str(pattern)) for pattern in chosen)]
    matrix = WHEELS["kernels"]["strategy"]["matrix"]
    # One wheel of the kernels for each Python and platform, and the artifact of dmattn.
    assert len(taken) == len(matrix["python"]) * len(matrix["platform"]) + 1
    (pattern,) = [w["pattern"] for w in downloads if "pattern" in w]
    text = (ROOT / "noxfile.py").read_text()
    assert (
        f'DEFAULT_CUDA = "{pattern.removeprefix("dmattn-kernels-cuda").removesuffix("-*")}"' in text
    )


def test_both_packages_have_one_version() -> None:
    """Each package has it in one place."""
    version = project(PACKAGES[1])["version"]
    assert "version" in project(PACKAGES[0])["dynamic"]
    init = (PACKAGES[0] / "src/dmattn/__init__.py").read_text()
    assert f'\n__version__ = "{version}"\n' in init
    (kernels,) = [d for d in project(PACKAGES[0])["dependencies"] if d.startswith("dmattn-kernels")]
    assert kernels.startswith(f"dmattn-kernels=={version.rpartition('.')[0]}.*;")
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text()


def test_hooks_have_the_pinned_versions() -> None:
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    named = re.findall(r"[\w-]+==[\w.]+", hooks)
    assert named and set(named) <= set(pinned)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_each_package_carries_the_license(package: Path) -> None:
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_kernels_name_what_is_compiled_into_them() -> None:
    package = PACKAGES[1]
    assert "NOTICE" in project(package)["license-files"]
    notice = (package / "NOTICE").read_text()
    assert "CUTLASS" in notice and "pybind11" in notice and notice.count("Copyright (c)") == 2


def test_hopper_gets_its_own_kernels() -> None:
    """By sessions that compile for the GPU of the machine, as in releases."""
    spec = importlib.util.spec_from_file_location("the_noxfile", ROOT / "noxfile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.code_names((9, 0)) == ["sm_90", "sm_90a"]
    assert [module.code_names(x) for x in ((8, 0), (8, 9))] == [["sm_80"], ["sm_89"]]
