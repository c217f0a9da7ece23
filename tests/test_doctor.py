"""`mlaforge doctor`: what it finds on this machine, and what it says of machines that lack something."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mlaforge import doctor, toolchain
from mlaforge.doctor import Check, Diagnosis, diagnose
from mlaforge_generator import cli


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli.cli, ["doctor", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("MLAFORGE_CACHE_DIR", str(directory))
    return directory


# ---- This machine ----------------------------------------------------------------------------------------------------


def test_this_machine() -> None:
    """The tests compile kernels, so this machine must be able to."""
    diagnosis = diagnose()
    found = {check.name: check for check in diagnosis.checks}
    assert diagnosis.compiles and found["compiling"].facts["seconds"] > 0
    for label, part in (("NVRTC", "nvrtc"), ("CUTLASS headers", "cutlass"), ("CCCL headers", "cccl")):
        assert found[label].state == "ok" and found[label].facts["version"] in found[label].found
        assert found[label].facts["version"] == toolchain.find_toolchain().versions[part]
    assert diagnosis.simulates == (found["host compiler"].state == "ok")
    assert all(check.fix for check in diagnosis.checks if check.state != "ok")
    assert not any(check.fix for check in diagnosis.checks if check.state == "ok")
    json.dumps([check.facts for check in diagnosis.checks])


# ---- The command -----------------------------------------------------------------------------------------------------

CHECKS = (Check("driver", "ok", "up to CUDA 13.0"), Check("GPU 0", "warning", "an A100" + "x" * 200, "needs 9.0"))


@pytest.mark.parametrize(
    ("compiles", "runs", "code"), [(True, True, 0), (False, False, 3), (True, False, 4)], ids=["all", "none", "no GPU"]
)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, compiles: bool, runs: bool, code: int) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: Diagnosis(CHECKS, compiles, runs, True))
    result = run()
    assert result.exit_code == code and bool(result.stderr) == (code != 0)
    lines = result.stdout.splitlines()
    # Whole, whatever the width of the terminal; without colours, for this is no terminal.
    assert lines[1] == f"warning  GPU 0   an A100{'x' * 200}" and "\x1b" not in result.stdout
    assert lines[2].strip() == "-> needs 9.0"
    assert ("can not run on a GPU" in lines[-1]) != runs
    parsed = run("--json")
    assert parsed.exit_code == code
    data = json.loads(parsed.stdout)
    assert (data["compiles"], data["runs"], data["simulates"]) == (compiles, runs, True)
    assert [check["state"] for check in data["checks"]] == ["ok", "warning"]


# ---- Other machines --------------------------------------------------------------------------------------------------


class FakeDriver:
    """The driver's bindings, with GPUs of given compute capabilities."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=0,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=1,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=2,
    )

    def __init__(self, *gpus: tuple[int, int], version: int = 13000, status: Any = 0) -> None:
        self.gpus, self.version, self.status = gpus, version, status

    def cuInit(self, flags: int) -> tuple[Any]:
        return (self.status,)

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, self.version

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, len(self.gpus)

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return 0, index

    def cuDeviceGetName(self, size: int, device: int) -> tuple[int, bytes]:
        return 0, b"NVIDIA Some".ljust(size, b"\0")

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]:
        return 0, (*self.gpus[device], 132)[attribute]


def use_driver(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    bindings = sys.modules.get("cuda.bindings") or __import__("cuda.bindings").bindings
    monkeypatch.setattr(bindings, "driver", driver, raising=False)


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(monkeypatch, FakeDriver((9, 0), (8, 0)))
    assert doctor._check_driver() == Check("driver", "ok", "up to CUDA 13.0", facts={"cuda": "13.0"})
    hopper, ampere = doctor._check_gpus()
    assert hopper.state == "ok" and hopper.found == "NVIDIA Some, compute capability 9.0, 132 SMs"
    assert ampere.state == "warning" and "9.0" in ampere.fix and ampere.facts["compute_capability"] == [8, 0]


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(monkeypatch, FakeDriver())
    (check,) = doctor._check_gpus()
    assert check.state == "missing" and "CUDA_VISIBLE_DEVICES" in check.fix


def test_an_old_driver_and_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(monkeypatch, FakeDriver((9, 0), version=12080))
    check = doctor._check_driver()
    assert check.state == "missing" and "12.8" in check.found and "580" in check.fix
    use_driver(monkeypatch, FakeDriver((9, 0), status=SimpleNamespace(name="CUDA_ERROR_NO_DEVICE")))
    assert doctor._check_driver().found == "cuInit: CUDA_ERROR_NO_DEVICE"
    (gpu,) = doctor._check_gpus()
    assert gpu.state == "missing"


@pytest.mark.parametrize(
    ("cuda", "available", "state", "words"),
    [("13.0", True, "ok", ""), ("13.0", False, "warning", "driver"), (None, False, "warning", "torch for CUDA")],
)
def test_torch(monkeypatch: pytest.MonkeyPatch, cuda: str | None, available: bool, state: str, words: str) -> None:
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("torch.cuda.is_available", lambda: available)
    check = doctor._check_torch()
    assert check.state == state and words in check.fix


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    check = doctor._check_torch()
    assert check.state == "missing" and check.fix.startswith("pip install ") and "torch" in check.fix


def test_a_missing_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.distribution

    def distribution(name: str) -> importlib.metadata.Distribution:
        if name == "nvidia-cutlass":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    parts = list(doctor._check_parts())
    (missing,) = [part for part in parts if part.state != "ok"]
    assert missing.name == "CUTLASS headers" and missing.state == "missing" and "nvidia-cutlass" in missing.fix
    assert doctor._check_compile(parts).state == "missing"


def test_nvrtc_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    monkeypatch.delattr("cuda.bindings.nvrtc", raising=False)
    first = next(doctor._check_parts())
    assert first.name == "NVRTC" and first.state == "missing" and "nvidia-cuda-nvrtc" in first.fix


def test_headers_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_KERNEL", '#include "no_such_header.h"\n' + doctor._KERNEL)
    check = doctor._check_compile([])
    assert check.state == "missing" and "no_such_header.h" in check.found and check.fix


def test_the_cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = doctor._check_cache()
    assert check.state == "ok" and check.found == f"{own_cache}, not made yet"
    own_cache.mkdir(mode=0o700)
    (own_cache / f"{'0' * 64}.cubin").write_bytes(b"x" * (1 << 20))
    check = doctor._check_cache()
    assert check.state == "ok" and check.found == f"{own_cache}, mode 0700, 1 entries, 1.0 MiB"
    assert (check.facts["entries"], check.facts["bytes"], check.facts["mode"]) == (1, 1 << 20, "0700")
    own_cache.chmod(0o777)
    check = doctor._check_cache()
    assert check.state == "warning" and check.fix == f"chmod go-w {own_cache}"
    own_cache.chmod(0o700)
    monkeypatch.setattr(doctor.os, "getuid", lambda: own_cache.stat().st_uid + 1)
    if own_cache.stat().st_uid:
        assert "belongs to user" in doctor._check_cache().found
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    if not own_cache.stat().st_uid:
        assert "1 MiB are free" in doctor._check_cache().found


def test_a_cache_that_can_not_be_used(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache.touch()
    assert "is no directory" in doctor._check_cache().found
    own_cache.unlink()
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert "can't be made" in doctor._check_cache().found
    own_cache.mkdir()
    assert "is not writable" in doctor._check_cache().found
    for name in ("MLAFORGE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    check = doctor._check_cache()
    assert check.state == "warning" and "MLAFORGE_CACHE_DIR" in check.fix


def test_host_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++"):
        assert doctor._check_host_compiler().state == "ok"
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && echo old 4.8 && exit 0\necho error: no C++20 >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    check = doctor._check_host_compiler()
    assert check.state == "warning" and check.found == f"old 4.8, {broken}: error: no C++20"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    check = doctor._check_host_compiler()
    assert check.state == "warning" and "g++" in check.fix


def test_torch_that_fails_in_a_way_of_its_own(tmp_path: Path) -> None:
    """The other checks go on."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('no such operator')\n")
    program = (
        f"import sys; sys.path[:0] = {[str(tmp_path), *filter(None, sys.path)]!r}\n"
        "from mlaforge_generator.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program, "doctor", "--json"], capture_output=True, text=True)
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    torch = found["torch"]
    assert torch["state"] == "missing" and "no such operator" in torch["found"] and "--force-reinstall" in torch["fix"]
    assert found["compiling"]["state"] == "ok" and found["host compiler"]["state"] == "warning"
    assert done.returncode == 4 and done.stderr.splitlines() == [
        "kernels can be compiled here, and run nowhere here: there is no Hopper GPU that torch can use"
    ]


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "Permission denied"), OSError(errno.EIO, "I/O error")])
def test_a_cache_that_can_not_be_looked_at(own_cache: Path, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    own_cache.mkdir()
    monkeypatch.setenv("MLAFORGE_CACHE_DIR", str(own_cache / ("x" * 300)))
    check = doctor._check_cache()
    assert check.state == "warning" and "File name too long" in check.found and "MLAFORGE_CACHE_DIR" in check.fix

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(doctor.Path, "exists", fail)
    assert f"can't be looked at: {error.strerror}" in doctor._check_cache().found
