"""NVRTC, its reports, its errors and the keys of the cache, with small kernels and without a GPU."""

import dataclasses
import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from types import MappingProxyType

import pytest

import mlaforge
from mlaforge import compiler, toolchain
from mlaforge.cache import KernelCache
from mlaforge.compiler import (
    CompileError,
    CompileOptions,
    KernelWarning,
    cache_key,
    compile_kernel,
    compile_many,
    source_closure,
)
from mlaforge.toolchain import ToolchainError, find_toolchain

RUNTIME = Path(mlaforge.__file__).parents[1]

SCALE = """
#include "scale.cuh"
extern "C" __global__ void scale(float* x) {
  __shared__ float copy[32];
  copy[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = scaled(copy[31 - threadIdx.x]);
}
"""
SCALE_HEADER = '#include "parts/factor.cuh"\n__device__ inline float scaled(float x) { return FACTOR * x; }\n'

# Reads an accumulator between two products without waiting for the first (early) or after waiting for it (late).
PRODUCT = """
#include "cute/arch/mma_sm90_gmma.hpp"
using namespace cute::SM90::GMMA;
extern "C" __global__ void __launch_bounds__(128) product(float* out, uint64_t a, uint64_t b, int n) {
  float d[4] = {};
  for (int i = 0; i < n; ++i) {
    cute::warpgroup_arrive();
    MMA_64x8x16_F32BF16BF16_SS<Major::K, Major::K>::fma(a, b, d[0], d[1], d[2], d[3]);
    cute::warpgroup_commit_batch();
    BETWEEN
  }
  cute::warpgroup_wait<0>();
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = d[i];
}
"""
EARLY = "d[0] += 2 * d[1];"
LATE = "cute::warpgroup_wait<0>();"

# Holds more values than 24 registers can.
CROWDED = """
extern "C" __global__ void crowded(float* x) {
  float v[64];
  #pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = x[i * 256 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 64; ++i) x[i * 256 + threadIdx.x] = v[i] - v[(i * 7 + 3) % 64];
}
"""


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "cache")


@pytest.fixture
def scale(tmp_path: Path) -> Path:
    return write_scale(tmp_path / "kernels")


def write_scale(directory: Path) -> Path:
    (directory / "parts").mkdir(parents=True)
    (directory / "scale.cuh").write_text(SCALE_HEADER)
    (directory / "parts/factor.cuh").write_text("#define FACTOR 2\n")
    return write(directory / "scale.cu", SCALE)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def run_python(script: str, *arguments: object, timeout: float | None = None, **environment: str) -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    search = {"PYTHONPATH": os.pathsep.join([*environment.pop("FIRST", "").split(), str(RUNTIME)])}
    result = subprocess.run(
        command, env={**os.environ, **environment, **search}, capture_output=True, text=True, timeout=timeout
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# ---- reports ---------------------------------------------------------------------------------------------------------


def test_report(scale: Path, cache: KernelCache) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = compile_kernel(scale, cache=cache)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.entries == ("scale",)
    report = compiled.kernels["scale"]
    assert 4 <= report.registers <= 32
    assert (report.barriers, report.static_smem) == (1, 128)
    assert (report.stack_frame, report.spill_stores, report.spill_loads) == (0, 0, 0)
    assert (report.warnings, report.serialized, report.sass) == ((), False, None)
    assert compiled.versions == find_toolchain().versions
    phases = {"header search", "key", "cache", "import", "nvrtc", "front end", "optimizer", "ptxas"}
    assert set(compiled.seconds) == phases
    assert compiled.seconds["nvrtc"] >= compiled.seconds["front end"] > 0


def test_machine_code_is_counted(tmp_path: Path, cache: KernelCache) -> None:
    source = write(tmp_path / "product.cu", PRODUCT.replace("BETWEEN", LATE))
    compiled = compile_kernel(source, cache=cache).with_sass()
    sass = compiled.kernels["product"].sass
    assert sass is not None
    assert sass["HGMMA"] >= 1
    assert sass["STG"] == 4
    assert sass["EXIT"] >= 1
    assert not {"LDL", "STL", "NOP"} & set(sass)
    assert compiled.seconds["disassembly"] > 0
    assert compile_kernel(source, cache=cache).with_sass().kernels == compiled.kernels


def test_serialized_products_are_not_overlooked(tmp_path: Path, cache: KernelCache) -> None:
    early = write(tmp_path / "early.cu", PRODUCT.replace("BETWEEN", EARLY))
    for hit in (False, True):
        with pytest.warns(KernelWarning, match=r"early.cu: .*instructions are serialized") as caught:
            compiled = compile_kernel(early, cache=cache)
        assert compiled.cache_hit == hit
        assert compiled.kernels["product"].serialized
        assert Path(caught[0].filename) == Path(__file__)
    late = write(tmp_path / "late.cu", PRODUCT.replace("BETWEEN", LATE))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not compile_kernel(late, cache=cache).kernels["product"].serialized


def test_spills_are_reported(tmp_path: Path, cache: KernelCache) -> None:
    source = write(tmp_path / "crowded.cu", CROWDED)
    roomy = compile_kernel(source, cache=cache).with_sass().kernels["crowded"]
    tight = compile_kernel(source, cache=cache, options=CompileOptions(max_registers=24)).with_sass()
    report = tight.kernels["crowded"]
    assert roomy.registers > 64
    assert (roomy.spill_stores, roomy.spill_loads, roomy.stack_frame) == (0, 0, 0)
    assert report.registers == 24
    assert min(report.spill_stores, report.spill_loads, report.stack_frame) > 0
    assert report.sass is not None
    assert min(report.sass["STL"], report.sass["LDL"]) > 0


def test_spills_of_a_called_function_count(tmp_path: Path, cache: KernelCache) -> None:
    body = CROWDED.replace('extern "C" __global__ void crowded', "__device__ __noinline__ void called")
    text = body + 'extern "C" __global__ void calls(float* x) { called(x); }\nextern "C" __global__ void idle() {}\n'
    source = write(tmp_path / "calls.cu", text)
    compiled = compile_kernel(source, cache=cache, options=CompileOptions(max_registers=24))
    calls, idle = compiled.kernels["calls"], compiled.kernels["idle"]
    assert min(calls.spill_stores, calls.spill_loads, calls.stack_frame) > 0
    assert (idle.spill_stores, idle.spill_loads, idle.stack_frame) == (0, 0, 0)


def test_spills_of_a_kernel_and_of_what_it_calls_add_up(tmp_path: Path, cache: KernelCache) -> None:
    called = CROWDED.replace('extern "C" __global__ void crowded', "__device__ __noinline__ void called")
    both = CROWDED.replace("__syncthreads();", "called(x);")
    calls = 'extern "C" __global__ void calls(float* x) { called(x); }\n'
    source = write(tmp_path / "both.cu", called + both + calls)
    kernels = compile_kernel(source, cache=cache, options=CompileOptions(max_registers=24)).kernels
    assert kernels["crowded"].spill_stores > 1.5 * kernels["calls"].spill_stores > 0
    assert kernels["crowded"].spill_loads > 1.5 * kernels["calls"].spill_loads > 0


def test_two_kernels_of_one_file(tmp_path: Path, cache: KernelCache) -> None:
    text = """
    __device__ __noinline__ float helper(float x) { return x * x; }
    extern "C" __global__ void first(float* x) { x[0] = helper(x[1]); }
    extern "C" __global__ void second(float* x) {
      __shared__ float s[8];
      s[x[0] > 0] = 1;
      __syncthreads();
      x[0] = s[0];
    }
    """
    compiled = compile_kernel(write(tmp_path / "two.cu", text), cache=cache).with_sass()
    assert set(compiled.entries) == {"first", "second"}
    assert compiled.kernels["first"].static_smem == 0
    assert compiled.kernels["second"].static_smem == 32
    assert all(report.sass and report.sass["STG"] == 1 for report in compiled.kernels.values())


def test_front_end_warning_is_kept(tmp_path: Path, cache: KernelCache) -> None:
    text = 'extern "C" __global__ void k(int* x) {\n  int idle;\n  x[0] = 1;\n}\n'
    compiled = compile_kernel(write(tmp_path / "idle.cu", text), cache=cache)
    assert [warning.split(": ")[0] for warning in compiled.warnings] == ["idle.cu(2)"]


# ---- errors ----------------------------------------------------------------------------------------------------------


def cubins(cache: KernelCache) -> list[Path]:
    assert cache.directory is not None
    return sorted(cache.directory.glob("*")) if cache.directory.exists() else []


def test_error_names_file_and_line_and_is_not_cached(scale: Path, cache: KernelCache) -> None:
    good = scale.read_text()
    scale.write_text(good.replace("= scaled(", "= unscaled("))
    for _ in range(2):
        with pytest.raises(CompileError, match=r'scale\.cu\(7\): error: identifier "unscaled" is undefined') as raised:
            compile_kernel(scale, cache=cache)
        assert "1 error detected" in raised.value.log
        assert raised.value.source == scale
        assert cubins(cache) == []
    scale.write_text(good)
    assert not compile_kernel(scale, cache=cache).cache_hit


def test_error_in_an_own_header(scale: Path, cache: KernelCache) -> None:
    write(scale.parent / "scale.cuh", "\n__device__ inline float scaled(float x) { return y; }\n")
    with pytest.raises(CompileError, match=r"scale\.cuh\(2\): error"):
        compile_kernel(scale, cache=cache)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('extern "C" __global__ void k() { asm("frobnicate;"); }', "frobnicate"),
        ('extern "C" __global__ void k(int* x) { __shared__ int s[60000]; s[*x] = 1; *x = s[1]; }', "too much shared"),
        ("__device__ int lonely() { return 1; }", "no __global__ function"),
        ('#include "nowhere.cuh"', r"bad\.cu\(1\): .*nowhere\.cuh"),
        ('\n#define HEADER "x.cuh"\n#include HEADER\n', r"bad\.cu\(3\): error: #include HEADER"),
    ],
    ids=["assembler", "shared memory", "no kernel", "no header", "macro include"],
)
def test_other_errors(tmp_path: Path, cache: KernelCache, text: str, match: str) -> None:
    with pytest.raises(CompileError, match=match):
        compile_kernel(write(tmp_path / "bad.cu", text), cache=cache)
    assert cubins(cache) == []


def test_unknown_architecture(scale: Path, cache: KernelCache) -> None:
    with pytest.raises(CompileError, match="invalid value for --gpu-architecture"):
        compile_kernel(scale, arch="sm_12345", cache=cache)


def test_missing_source(tmp_path: Path, cache: KernelCache) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.cu"):
        compile_kernel(tmp_path / "absent.cu", cache=cache)


def test_error_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(CompileError(Path("a.cu"), "a.cu(1): error: x")))
    assert (error.source, error.log, str(error)) == (
        Path("a.cu"),
        "a.cu(1): error: x",
        "a.cu does not compile:\na.cu(1): error: x",
    )


def test_header_changed_during_the_compile(scale: Path, cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    real = compiler._phases

    def change(table: str) -> dict[str, float]:
        write(scale.parent / "parts/factor.cuh", "#define FACTOR 3\n")
        return real(table)

    monkeypatch.setattr(compiler, "_phases", change)
    with pytest.raises(CompileError, match="changed while"):
        compile_kernel(scale, cache=cache)
    assert cubins(cache) == []


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_closure(scale: Path) -> None:
    assert set(source_closure(scale)) == {"scale.cu", "scale.cuh", "parts/factor.cuh"}


def test_closure_follows_every_spelling(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    names = ["plain.cuh", "angled.cuh", "spaced.cuh", "spliced.cuh", "sub/inner.cuh", "sub/beside.cuh", "root.cuh"]
    for name in names:
        write(tmp_path / name, "")
    write(tmp_path / "sub/inner.cuh", '#include "beside.cuh"\n#include "root.cuh"\n#include "inner.cuh"\n')
    text = """#include "plain.cuh"
#include <angled.cuh>
  #  include"spaced.cuh"
#include \\
  "spliced.cuh"
#include "sub/inner.cuh"
#include <cuda_bf16.h>
// the next is no directive: #include "absent.cuh"
"""
    assert set(source_closure(write(tmp_path / "all.cu", text))) == {"all.cu", *names}


def test_edited_header_with_its_old_time_misses(scale: Path, cache: KernelCache) -> None:
    first = compile_kernel(scale, cache=cache)
    header = scale.parent / "parts/factor.cuh"
    before = header.stat()
    header.write_text("#define FACTOR 3\n")
    os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (header.stat().st_mtime_ns, header.stat().st_size) == (before.st_mtime_ns, before.st_size)
    second = compile_kernel(scale, cache=cache)
    assert not second.cache_hit
    assert second.cubin != first.cubin
    header.write_text("#define FACTOR 2\n")
    third = compile_kernel(scale, cache=cache)
    assert third.cache_hit
    assert third.cubin == first.cubin


def test_key_and_cubin_do_not_depend_on_the_place(tmp_path: Path) -> None:
    first = compile_kernel(write_scale(tmp_path / "here"), cache=KernelCache(None))
    second = compile_kernel(write_scale(tmp_path / "some/where/else"), cache=KernelCache(None))
    assert first.key == second.key
    assert first.cubin == second.cubin


def test_key_is_shared_by_virtual_environments(scale: Path, tmp_path: Path) -> None:
    """Another environment with the same versions: the packages lie elsewhere, the key is the same."""
    elsewhere = tmp_path / "site-packages"
    elsewhere.mkdir()
    for wheel in ("nvidia-cutlass", "nvidia-cuda-cccl", "nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-nvrtc"):
        files = importlib.metadata.files(wheel) or []
        for top in {file.parts[0] for file in files if not file.parts[0].startswith(".")}:
            target = Path(str(importlib.metadata.distribution(wheel).locate_file(top)))
            if not (elsewhere / top).exists():
                (elsewhere / top).symlink_to(target)
    script = """
import json, sys
from pathlib import Path
from mlaforge.compiler import cache_key
from mlaforge.toolchain import find_toolchain
print(json.dumps([cache_key(Path(sys.argv[1])), [str(path) for path in find_toolchain().include_dirs]]))
"""
    key, include_dirs = json.loads(run_python(script, scale, FIRST=str(elsewhere)))
    assert all(path.startswith(str(elsewhere)) for path in include_dirs)
    assert {str(path) for path in find_toolchain().include_dirs}.isdisjoint(include_dirs)
    assert key == cache_key(scale)


def test_all_that_decides_the_cubin_is_in_the_key(scale: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [cache_key(scale)]
    keys.append(cache_key(scale, arch="sm_90"))
    for change in (
        {"std": "c++20"},
        {"defines": (("A", "1"),)},
        {"defines": (("A", "2"),)},
        {"max_registers": 64},
        {"lineinfo": True},
    ):
        keys.append(cache_key(scale, options=dataclasses.replace(CompileOptions(), **change)))
    found = find_toolchain()
    for name in ("nvrtc", "cutlass", "cccl", "cudart", "crt"):
        changed = dataclasses.replace(found, versions=MappingProxyType({**found.versions, name: "99"}))
        monkeypatch.setattr(compiler, "find_toolchain", lambda changed=changed: changed)
        keys.append(cache_key(scale))
    monkeypatch.undo()
    renamed = scale.rename(scale.with_name("renamed.cu"))
    keys.append(cache_key(renamed))
    assert len(set(keys)) == len(keys) == 13


def test_working_directory_does_not_lend_headers(scale: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rogue").mkdir()
    write(tmp_path / "rogue/scale.cuh", "#error from the working directory\n")
    monkeypatch.chdir(tmp_path / "rogue")
    compile_kernel(scale, cache=KernelCache(None))


def test_relative_source(scale: Path, cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_kernel(scale, cache=cache)
    monkeypatch.chdir(scale.parent)
    assert compile_kernel(Path("scale.cu"), cache=cache).cache_hit


def test_options_reach_the_compiler(tmp_path: Path) -> None:
    text = 'extern "C" __global__ void k(int* x) { x[threadIdx.x] = VALUE; }'
    source = write(tmp_path / "k.cu", text)
    plain, lined = (
        compile_kernel(
            source, options=CompileOptions(defines=(("VALUE", "7"),), lineinfo=lineinfo), cache=KernelCache(None)
        )
        for lineinfo in (False, True)
    )
    assert b".debug_line" in lined.cubin
    assert b".debug_line" not in plain.cubin


# ---- cache and processes ---------------------------------------------------------------------------------------------


def test_damaged_entry_is_compiled_anew(scale: Path, cache: KernelCache) -> None:
    cubin = compile_kernel(scale, cache=cache).cubin
    (path,) = cubins(cache)
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:-100] + bytes([whole[-100] ^ 4]) + whole[-99:]):
        path.write_bytes(damaged)
        compiled = compile_kernel(scale, cache=cache)
        assert not compiled.cache_hit
        assert compiled.cubin == cubin
        assert compile_kernel(scale, cache=cache).cache_hit


def test_sixteen_processes_on_a_cold_cache(scale: Path, tmp_path: Path) -> None:
    script = """
import hashlib, sys
from pathlib import Path
from mlaforge import KernelCache, compile_kernel
compiled = compile_kernel(Path(sys.argv[1]), cache=KernelCache(Path(sys.argv[2])))
print(compiled.cache_hit, hashlib.sha256(compiled.cubin).hexdigest())
"""
    command = [sys.executable, "-c", script, str(scale), str(tmp_path / "cache")]
    environment = {**os.environ, "PYTHONPATH": str(RUNTIME)}
    children = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(16)]
    results = [child.communicate(timeout=120)[0].split() for child in children]
    assert all(child.returncode == 0 for child in children)
    assert sorted(hit for hit, _ in results) == ["False"] + ["True"] * 15
    assert len({digest for _, digest in results}) == 1


def test_warm_load_in_a_new_process(scale: Path, cache: KernelCache) -> None:
    compile_kernel(scale, cache=cache)
    script = """
import sys, time
from pathlib import Path
from mlaforge import KernelCache, compile_kernel
start = time.perf_counter()
compiled = compile_kernel(Path(sys.argv[1]), cache=KernelCache(Path(sys.argv[2])))
seconds = time.perf_counter() - start
assert compiled.cache_hit
print(seconds)
print(*[name for name in sys.modules if name.split(".")[0] in ("cuda", "torch", "numpy", "jinja2", "yaml")])
"""
    seconds, _, heavy = run_python(script, scale, cache.directory).partition("\n")
    assert heavy == ""
    assert float(seconds) < 0.05


def test_without_gpu_nvcc_or_toolkit(scale: Path, tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from mlaforge import KernelCache, compile_kernel
print(*compile_kernel(Path(sys.argv[1]), cache=KernelCache(None)).with_sass().entries)
"""
    nothing = {name: "" for name in ("CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH", "HOME")}
    nowhere = str(tmp_path / "nowhere")
    assert run_python(script, scale, **nothing, PATH=nowhere, TMPDIR=nowhere, CUDA_VISIBLE_DEVICES="") == "scale"


def test_compile_many(tmp_path: Path, cache: KernelCache) -> None:
    sources = [
        write(tmp_path / f"k{i}.cu", f'extern "C" __global__ void k{i}(int* x) {{ *x = {i}; }}') for i in range(4)
    ]
    compile_kernel(sources[2], cache=cache)
    compiled = compile_many([*sources, sources[0]], workers=2, cache=cache)
    assert [kernel.entries for kernel in compiled] == [("k0",), ("k1",), ("k2",), ("k3",), ("k0",)]
    assert [kernel.cache_hit for kernel in compiled] == [False, False, True, False, False]
    assert all(kernel.cache_hit for kernel in compile_many(sources, cache=cache))
    assert compile_many([], cache=cache) == []


def test_compile_many_outlives_its_workers(tmp_path: Path) -> None:
    """More files than one set of workers takes. In a process of its own, since what may go wrong is a hang."""
    count = 2 * compiler._COMPILES_PER_WORKER + 3
    for i in range(count):
        write(tmp_path / f"k{i}.cu", f'extern "C" __global__ void k(int* x) {{ *x = {i}; }}')
    script = """
import sys
from pathlib import Path
from mlaforge import KernelCache, compile_many
print(len(compile_many(sorted(Path(sys.argv[1]).glob("*.cu")), workers=2, cache=KernelCache(None))))
"""
    assert run_python(script, tmp_path, timeout=120) == str(count)


def test_compile_many_with_an_error(tmp_path: Path, cache: KernelCache) -> None:
    sources = [
        write(tmp_path / f"k{i}.cu", f'extern "C" __global__ void k(int* x) {{ *x = {value}; }}')
        for i, value in enumerate(("1", "oops", "2", "ouch"))
    ]
    with pytest.raises(CompileError, match=r"k1\.cu\(1\).*oops"):
        compile_many(sources, workers=2, cache=cache)
    assert [compile_kernel(source, cache=cache).cache_hit for source in sources[::2]] == [True, True]


def test_compile_many_warns_in_the_calling_process(tmp_path: Path, cache: KernelCache) -> None:
    sources = [write(tmp_path / f"{name}.cu", PRODUCT.replace("BETWEEN", EARLY)) for name in "ab"]
    with pytest.warns(KernelWarning, match="serialized") as caught:
        compile_many(sources, workers=2, cache=cache)
    assert len({str(warning.message) for warning in caught}) == 2


# ---- toolchain -------------------------------------------------------------------------------------------------------


@pytest.fixture
def without_wheels(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of wheels that are made to look uninstalled."""
    hidden: set[str] = set()
    real = importlib.metadata.distribution

    def distribution(name: str) -> importlib.metadata.Distribution:
        if name in hidden:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(toolchain, "find_toolchain", find_toolchain.__wrapped__)
    return hidden


def test_toolchain_of_wheels() -> None:
    found = find_toolchain()
    for header in (
        "cute/arch/mma_sm90_gmma.hpp",
        "cuda/std/type_traits",
        "cuda_runtime_api.h",
        "crt/host_defines.h",
        "cuda_bf16.h",
    ):
        assert any((directory / header).is_file() for directory in found.include_dirs), header
    assert found.versions["cutlass"] == "4.2.0.0"
    assert found.versions["nvrtc"] == importlib.metadata.version("nvidia-cuda-nvrtc")


def test_toolkit_stands_in_for_a_missing_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_wheels: set[str]
) -> None:
    version = tmp_path / "include/cccl/cuda/std/__cccl/version.h"
    version.parent.mkdir(parents=True)
    version.write_text("#define CCCL_VERSION 3000001\n")
    without_wheels.add("nvidia-cuda-cccl")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = toolchain.find_toolchain()
    assert tmp_path / "include/cccl" in found.include_dirs
    assert found.versions["cccl"] == "toolkit-3000001"


def test_toolkit_with_a_target_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_wheels: set[str]
) -> None:
    header = tmp_path / "targets/x86_64-linux/include/crt/host_defines.h"
    header.parent.mkdir(parents=True)
    header.write_text("")
    write(header.parents[1] / "cuda_runtime_api.h", "#define CUDART_VERSION  13020\n")
    without_wheels.add("nvidia-cuda-crt")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    assert toolchain.find_toolchain().versions["crt"] == "toolkit-13020"


def test_missing_parts_are_named(monkeypatch: pytest.MonkeyPatch, without_wheels: set[str]) -> None:
    monkeypatch.setattr(toolchain, "_toolkit_roots", list)
    without_wheels.update({"nvidia-cuda-cccl", "nvidia-cutlass"})
    with pytest.raises(
        ToolchainError, match=r"CUTLASS headers, CCCL headers not found; run: pip install .*nvidia-cutlass"
    ):
        toolchain.find_toolchain()


def test_no_disassembler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_wheels: set[str]) -> None:
    monkeypatch.setattr(toolchain, "_toolkit_roots", list)
    monkeypatch.setenv("PATH", str(tmp_path))
    without_wheels.add("nvidia-cuda-nvdisasm")
    with pytest.raises(ToolchainError, match="pip install nvidia-cuda-nvdisasm"):
        toolchain.find_nvdisasm()
    write(tmp_path / "nvdisasm", "").chmod(0o755)
    assert toolchain.find_nvdisasm() == tmp_path / "nvdisasm"
