"""A wheel built from the repository works outside of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and install it, without its dependencies, into a folder of its own."""
    dist = tmp_path_factory.mktemp("dist")
    target = tmp_path_factory.mktemp("site")
    build = "import sys\nfrom hatchling.build import build_wheel\nprint(build_wheel(sys.argv[1]))"
    name = subprocess.check_output([sys.executable, "-c", build, str(dist)], cwd=ROOT, text=True).split()[-1]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", target, dist / name],
        check=True,
    )
    return target


def run(site: Path, cwd: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(site), "MLAFORGE_CACHE_DIR": str(cwd / "cache")}
    code = f"import mlaforge_generator, sys; assert mlaforge_generator.__file__.startswith({str(site)!r})\n"
    code += "from mlaforge_generator.cli import main\nmain()"
    return subprocess.check_output([sys.executable, "-c", code, *arguments], cwd=cwd, env=environment, text=True)


def test_generates_what_the_repository_holds(site: Path, tmp_path: Path) -> None:
    run(site, tmp_path, "generate", "minicpm3", "-o", "made")
    for path in sorted((ROOT / "generated" / "minicpm3").iterdir()):
        assert (tmp_path / "made" / "minicpm3" / path.name).read_bytes() == path.read_bytes()


def test_plans_and_compiles(site: Path, tmp_path: Path) -> None:
    plan = json.loads(run(site, tmp_path, "plan", "minicpm3", "--json"))
    assert plan["decode"]["d_qk"] == 288
    assert "mla_decode" in run(site, tmp_path, "compile", "minicpm3")


def test_the_template_of_reports_travels_along(site: Path) -> None:
    for path in (ROOT / "templates" / "report").iterdir():
        assert (site / "mlaforge_generator" / "_data" / "templates" / "report" / path.name).read_bytes() == (
            path.read_bytes()
        )


def test_simulator_travels_along(site: Path, tmp_path: Path) -> None:
    out = run(site, tmp_path, "verify", "minicpm3", "--device", "sim", "--problem", "lengths=70 h_q=16")
    assert "all 1 problems accepted" in out


def test_the_kernels_of_the_bench_travel_along(site: Path, tmp_path: Path) -> None:
    for path in (ROOT / "runtime" / "mlaforge" / "bench" / "kernels").iterdir():
        assert (site / "mlaforge" / "bench" / "kernels" / path.name).read_bytes() == path.read_bytes()
    assert "--suite" in run(site, tmp_path, "bench", "--help")
