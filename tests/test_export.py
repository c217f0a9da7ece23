"""Specs to the files of others: what comes back, and what a C++ project can build of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings

from mlaforge_generator import cli
from mlaforge_generator.exchange.c_header import write_header
from mlaforge_generator.exchange.cmake import launch_header, write_cmake
from mlaforge_generator.exchange.imports import import_file
from mlaforge_generator.exchange.plugin_json import write_plugin
from mlaforge_generator.plan import make_plan
from mlaforge_generator.render import render
from mlaforge_generator.resources import find_spec, spec_dir
from mlaforge_generator.spec import Spec, load_spec
from strategies import specs

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(path.stem for path in spec_dir().glob("*.yaml"))
WRITERS = {"x.json": write_plugin, "x.h": write_header}


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(cli.cli, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# ---- What comes back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", WRITERS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spec=specs())
def test_an_export_comes_back(tmp_path: Path, file: str, spec: Spec) -> None:
    (tmp_path / file).write_text(WRITERS[file](make_plan(spec)))
    result = import_file(tmp_path / file, {})
    assert result.spec == spec and result.notes == () and result.others == ()


@pytest.mark.parametrize("file", WRITERS)
def test_settings_of_every_kernel_come_back(tmp_path: Path, file: str) -> None:
    spec = load_spec(find_spec("deepseek_v3"))
    tree = spec.model_dump()
    tree["kernels"] = {
        "decode": {"schedule": "plain", "tile_rows": 64, "stages": 2},
        "prefill": {"tile_q": 128, "tile_kv": 128, "stages": 2},
    }
    tree["tensor_parallel"] = 8
    tree["dispatch"] = {"prefill_absorption_threshold": 96}
    spec = Spec.model_validate(tree)
    (tmp_path / file).write_text(WRITERS[file](make_plan(spec)))
    assert import_file(tmp_path / file, {}).spec == spec


@pytest.mark.parametrize("name", SHIPPED)
def test_the_fields_names(name: str) -> None:
    """Others' readers look for these."""
    spec = load_spec(find_spec(name))
    plan = make_plan(spec)
    plugin = json.loads(write_plugin(plan))["mla_plugin"]
    assert plugin == {
        "name": name,
        "num_heads": spec.model.num_attention_heads,
        "head_dim_content": spec.model.qk_nope_head_dim,
        "latent_kv_dim": spec.model.kv_lora_rank,
        "rope_dim": spec.model.qk_rope_head_dim,
        "tile_s": 64,
        "num_stages": plan.decode.tile.stages,
        "page_size": 64,
        "enable_matrix_absorption": True,
        "prefill_absorption_threshold": spec.dispatch.prefill_absorption_threshold,
        "rope_compute_dtype": "fp32",
        "kv_cache_dtype": spec.cache.dtype,
    }
    header = write_header(plan)
    constants = dict(re.findall(r"^static const int (\w+) = (\d+);", header, re.MULTILINE))
    assert constants["kNumHeads"] == str(spec.model.num_attention_heads)
    assert constants["kHeadDimC"] == str(spec.model.qk_nope_head_dim)
    assert constants["kLatentKV"] == str(spec.model.kv_lora_rank)
    assert constants["kRopeDim"] == str(spec.model.qk_rope_head_dim)
    assert constants["kTileS"] == "64" and constants["kNumStages"] == str(plan.decode.tile.stages)
    assert constants["kPrefillThresh"] == str(spec.dispatch.prefill_absorption_threshold)


def test_the_command(tmp_path: Path) -> None:
    for kind, file in (("trtllm-json", "minicpm3.json"), ("c-header", "minicpm3.h")):
        result = run("export", "minicpm3", "--format", kind, "-o", tmp_path)
        assert result.exit_code == 0 and result.stdout == f"{tmp_path / file}: written\n" and result.stderr == ""
        assert run("import", tmp_path / file, "-o", tmp_path / "back.yaml").exit_code == 0
        assert load_spec(tmp_path / "back.yaml") == load_spec(find_spec("minicpm3"))
    result = run("export", "minicpm3", "--format", "cmake", "-o", tmp_path)
    assert result.exit_code == 0 and (tmp_path / "minicpm3" / "CMakeLists.txt").is_file()
    assert run("export", "minicpm3", "--format", "xml", "-o", tmp_path).exit_code == 2
    assert run("export", "no_such", "--format", "cmake", "-o", tmp_path).exit_code == 2
    (tmp_path / "file").touch()
    assert run("export", "minicpm3", "--format", "c-header", "-o", tmp_path / "file" / "x").exit_code == 2


# ---- For C++ ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export two specs for one project: their names must not meet."""
    folder = tmp_path_factory.mktemp("cmake")
    for name in ("minicpm3", "glm_5_3_flash"):
        assert run("export", name, "--format", "cmake", "-o", folder).exit_code == 0
    return folder


@pytest.mark.parametrize("name", ["minicpm3", "glm_5_3_flash"])
def test_the_folder_has_the_kernels(exported: Path, name: str) -> None:
    for file, text in render(make_plan(load_spec(find_spec(name)))).items():
        assert (exported / name / "kernels" / file).read_text() == text


PRINT = """
#include <stdio.h>
#include <mlaforge/minicpm3_constants.h>
#include <mlaforge/minicpm3_launch.h>
#include <mlaforge/glm_5_3_flash_launch.h>
int main(void) {
  for (unsigned k = 0; k < sizeof(mlaforge_minicpm3_kernels) / sizeof(mlaforge_minicpm3_kernels[0]); ++k) {
    const mlaforge_kernel* kernel = mlaforge_minicpm3_kernels[k];
    printf("kernel|%s|%s|%u|%u|%s|%s|%s", kernel->file, kernel->entry, kernel->threads, kernel->smem_bytes,
           kernel->grid[0], kernel->grid[1], kernel->grid[2]);
    for (unsigned i = 0; i < kernel->num_maps; ++i) {
      printf("|%s", kernel->maps[i].tensor);
      for (unsigned d = 0; d < kernel->maps[i].rank; ++d) printf(",%u", kernel->maps[i].box[d]);
    }
    for (unsigned i = 0; i < kernel->num_parameters; ++i)
      printf("|%s %s", kernel->parameters[i].type, kernel->parameters[i].name);
    for (unsigned i = 0; i < kernel->num_constants; ++i)
      printf("|%s=%d", kernel->constants[i].name, kernel->constants[i].value);
    printf("\\n");
  }
  printf("scale %.17g heads %d\\n", kSoftmaxScale, kNumHeads);
  return mlaforge_glm_5_3_flash_kernels[0]->threads > 0 ? 0 : 1;
}
"""


@pytest.mark.parametrize(
    ("compiler", "file", "standard"),
    [("gcc", "a.c", "c99"), ("gcc", "a.c", "c17"), ("g++", "a.cpp", "c++11"), ("g++", "a.cpp", "c++20")],
)
def test_the_headers_are_c_and_cpp(exported: Path, tmp_path: Path, compiler: str, file: str, standard: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    (tmp_path / file).write_text(PRINT)
    includes = [f"-I{exported / name / 'include'}" for name in ("minicpm3", "glm_5_3_flash")]
    warnings = [f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    subprocess.run([compiler, *warnings, *includes, tmp_path / file, "-o", tmp_path / "a"], check=True)
    *kernels, scale = subprocess.check_output([tmp_path / "a"], text=True).splitlines()
    plan = make_plan(load_spec(find_spec("minicpm3")))
    assert scale == f"scale {plan.softmax_scale:.17g} heads 40"
    found = {line.split("|")[1]: line.split("|")[2:] for line in kernels}
    manifest = json.loads((exported / "minicpm3" / "kernels" / "manifest.json").read_text())
    wanted = [manifest["decode"], *manifest["narrow_decodes"], *manifest["kernels"].values()]
    assert len(wanted) == len(found) == len(kernels)
    for each in wanted:
        fields = found[each["file"]]
        assert fields[:3] == [each["entry"], str(each["threads"]), str(each["smem_bytes"])]
        assert all(fields[3:6])
        maps = [f"{tensor},{','.join(map(str, box))}" for tensor, box in each["boxes"].items()]
        parameters = [f"{p['ctype']} {p['name']}" for p in each["parameters"]]
        assert fields[6 : 6 + len(maps) + len(parameters)] == maps + parameters
        constants = dict(pair.split("=") for pair in fields[6 + len(maps) + len(parameters) :])
        known = {name: each[name] for name in ("tile_rows", "tile_tokens", "max_parts") if name in each}
        for name, value in {**each.get("constants", {}), **known}.items():
            assert constants[name] == str(value)


def test_the_text_is_the_same_everywhere() -> None:
    plan = make_plan(load_spec(find_spec("minicpm3")))
    assert write_cmake(plan) == write_cmake(plan)
    text = "\n".join((launch_header(plan), write_cmake(plan)["CMakeLists.txt"]))
    assert text.isascii() and str(Path.home()) not in text and str(spec_dir()) not in text


def test_nvcc_and_cmake_build_a_project(exported: Path, tmp_path: Path) -> None:
    """Two folders in one program, which looks into the cubins that are inside of it."""
    for tool in ("nvcc", "cmake", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")
    cutlass = pytest.importorskip("cutlass_library")
    include = Path(cutlass.__file__).parent / "source" / "include"
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(app LANGUAGES C CXX)\n"
        f"add_subdirectory({exported / 'minicpm3'} minicpm3)\n"
        f"add_subdirectory({exported / 'glm_5_3_flash'} glm_5_3_flash)\n"
        "add_executable(app main.cpp)\n"
        "target_link_libraries(app PRIVATE mlaforge::minicpm3 mlaforge::glm_5_3_flash)\n"
    )
    (tmp_path / "main.cpp").write_text(
        "#include <cstdio>\n#include <mlaforge/minicpm3_launch.h>\n#include <mlaforge/glm_5_3_flash_launch.h>\n"
        "int main() {\n"
        '  std::printf("%.3s %.3s\\n", reinterpret_cast<const char*>(mlaforge_minicpm3_decode_cubin) + 1,\n'
        "              reinterpret_cast<const char*>(mlaforge_glm_5_3_flash_merge_cubin) + 1);\n"
        "  return reinterpret_cast<unsigned long long>(mlaforge_minicpm3_decode_cubin) % 16;\n}\n"
    )
    # All of them take minutes.
    few = ["-DMLAFORGE_MINICPM3_KERNELS=decode", "-DMLAFORGE_GLM_5_3_FLASH_KERNELS=merge"]
    build = tmp_path / "build"
    configure = ["cmake", "-S", tmp_path, "-B", build, f"-DMLAFORGE_CUTLASS_INCLUDE_DIR={include}", *few]
    for command in (configure, ["cmake", "--build", build, "-j", "2"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert subprocess.check_output([build / "app"], text=True) == "ELF ELF\n"
    cubin = (build / "minicpm3" / "decode.cubin").read_bytes()
    assert b"mla_decode" in cubin
    embedded = (build / "minicpm3" / "decode_cubin.c").read_text()
    assert bytes(int(byte, 16) for byte in re.findall(r"0x(..),", embedded)) == cubin


@pytest.mark.parametrize(
    "file",
    [
        "deepseek_v3/prefill.cu",
        "deepseek_v3/append.cu",
        "deepseek_v3/decode_32.cu",
        "deepseek_v3_nvfp4/gather.cu",
        "deepseek_v3_nvfp4/append.cu",
        "deepseek_v3_nvfp4/decode.cu",
        "deepseek_v3_fp8_ds_mla/decode_16.cu",
    ],
)
def test_plain_nvcc_takes_every_kind_of_kernel(file: str, tmp_path: Path) -> None:
    """With no option but the target's: NVRTC is told that all functions are the device's, nvcc is not."""
    if shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc")
    cutlass = pytest.importorskip("cutlass_library")
    include = Path(cutlass.__file__).parent / "source" / "include"
    cubin = tmp_path / "a.cubin"
    command = ["nvcc", "-gencode", "arch=compute_90a,code=sm_90a", "-cubin", f"-I{include}", "-o", cubin]
    done = subprocess.run([*command, ROOT / "generated" / file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"mla_" in cubin.read_bytes()


def test_cmake_says_what_is_missing(exported: Path, tmp_path: Path) -> None:
    for tool in ("nvcc", "cmake"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")
    command = ["cmake", "-S", exported / "minicpm3", "-B", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "MLAFORGE_CUTLASS_INCLUDE_DIR must be" in done.stderr
