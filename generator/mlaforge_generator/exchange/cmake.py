"""A folder that a C++ project adds with CMake: kernels as cubins inside of a C library, and what their launches need.

The library holds no host code that launches: a call takes the driver's API, tensor maps included, as the README says.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from ..plan import DecodePlan, Plan
from ..render import render
from .c_header import write_header

_SWIZZLE_BYTES = 128
"""Of every tensor map."""


def write_cmake(plan: Plan) -> dict[str, str]:
    """Give the files of the folder, by their paths in it."""
    name = plan.spec.name
    return {
        "CMakeLists.txt": _cmake_lists(plan),
        "embed.cmake": _EMBED,
        f"include/mlaforge/{name}_constants.h": write_header(plan),
        f"include/mlaforge/{name}_launch.h": launch_header(plan),
        **{f"kernels/{file}": text for file, text in render(plan).items()},
    }


def _kernels(plan: Plan) -> list[str]:
    """Name the kernels as their files are named."""
    files = [*(each.file for each in plan.decodes), *(each.file for each in plan.kernels)]
    return [file.removesuffix(".cu") for file in files]


def launch_header(plan: Plan) -> str:
    """Write what the launches of a plan's kernels need as C, which is C++ as well."""
    name = plan.spec.name
    guard = f"MLAFORGE_{name.upper()}_LAUNCH_H"
    parts = [
        f"// Launches of the kernels of the spec {name}, by mlaforge. C and C++.\n#ifndef {guard}\n#define {guard}\n",
        _TYPES,
    ]
    for decode in plan.decodes:
        parts.append(_decode(name, decode))
    for kernel in plan.kernels:
        parts.append(
            _kernel(
                prefix=f"mlaforge_{name}_{kernel.name}",
                what=kernel.what,
                file=kernel.file,
                entry=kernel.entry,
                threads=kernel.threads,
                smem_bytes=kernel.smem_bytes,
                grid=kernel.grid,
                boxes=dict(kernel.boxes),
                parameters=[(each.ctype, each.name) for each in kernel.parameters],
                constants=dict(kernel.constants),
            )
        )
    names = ", ".join(f"&mlaforge_{name}_{each}" for each in _kernels(plan))
    all_names = textwrap.fill(f"{{{names}}}", 116, subsequent_indent="    ", break_long_words=False)
    parts.append(
        "// All of them.\n"
        f"MLAFORGE_CONSTANT const mlaforge_kernel* const mlaforge_{name}_kernels[] =\n    {all_names};\n"
    )
    externs = "\n".join(f"extern const unsigned char mlaforge_{name}_{each}_cubin[];" for each in _kernels(plan))
    parts.append(
        "// Cubins, for cuModuleLoadData or cuLibraryLoadData; the CMake target defines them.\n"
        f'#ifdef __cplusplus\nextern "C" {{\n#endif\n{externs}\n#ifdef __cplusplus\n}}\n#endif\n'
    )
    parts.append(f"#endif  // {guard}\n")
    return "\n".join(parts)


def _decode(name: str, decode: DecodePlan) -> str:
    stem = decode.file.removesuffix(".cu")
    return _kernel(
        prefix=f"mlaforge_{name}_{stem}",
        what=f"absorbed decode, {decode.tile.rows} rows a block; cooperative where grid.y > 1",
        file=decode.file,
        entry=decode.entry,
        threads=decode.launch.threads,
        smem_bytes=decode.smem.total,
        grid=decode.launch.grid,
        boxes={each.tensor: each.box for each in decode.tensor_maps},
        parameters=[(each.ctype, each.name) for each in decode.parameters],
        constants={
            "d_qk": decode.d_qk,
            "d_v": decode.d_v,
            "tile_rows": decode.tile.rows,
            "tile_tokens": decode.tile.tokens,
            "max_parts": decode.max_parts,
            "fixed_overhead_blocks": decode.schedule.fixed_overhead_blocks,
        },
    )


def _kernel(
    *,
    prefix: str,
    what: str,
    file: str,
    entry: str,
    threads: int,
    smem_bytes: int,
    grid: tuple[str, ...],
    boxes: dict[str, tuple[int, ...]],
    parameters: list[tuple[str, str]],
    constants: dict[str, int],
) -> str:
    blocks = ", ".join(f'"{each}"' for each in (*grid, "1", "1", "1")[:3])

    def array(kind: str, suffix: str, items: list[str]) -> Iterator[str]:
        if items:
            yield f"MLAFORGE_CONSTANT const {kind} {prefix}_{suffix}[] = {{"
            yield from (f"    {item}," for item in items)
            yield "};"

    maps = [f'{{"{tensor}", {len(box)}, {{{", ".join(map(str, box))}}}}}' for tensor, box in boxes.items()]
    tables = [
        ("mlaforge_tensor_map", "maps", maps),
        ("mlaforge_parameter", "parameters", [f'{{"{ctype}", "{name}"}}' for ctype, name in parameters]),
        ("mlaforge_number", "constants", [f'{{"{name}", {value}}}' for name, value in constants.items()]),
    ]
    lines = [f"// {what}"]
    for kind, suffix, items in tables:
        lines += array(kind, suffix, items)
    lines += [
        f"MLAFORGE_CONSTANT const mlaforge_kernel {prefix} = {{",
        f'    "{file}",',
        f'    "{entry}",',
        f"    {threads},",
        f"    {smem_bytes},",
        f"    {{{blocks}}},",
    ]
    for _, suffix, items in tables:
        lines.append(f"    {len(items)},")
        lines.append(f"    {f'{prefix}_{suffix}' if items else '0'},")
    lines.append("};")
    return "\n".join(lines) + "\n"


_TYPES = f"""\
#ifndef MLAFORGE_LAUNCH_TYPES
#define MLAFORGE_LAUNCH_TYPES

#ifdef __cplusplus
#define MLAFORGE_CONSTANT constexpr
#else
#define MLAFORGE_CONSTANT static
#endif

// A CUtensorMap: elements of 2 bytes, innermost dimension first, element strides of 1, no interleave,
// CU_TENSOR_MAP_SWIZZLE_{_SWIZZLE_BYTES}B, zeros outside of the tensor.
typedef struct {{
  const char* tensor;
  unsigned rank;
  unsigned box[5];
}} mlaforge_tensor_map;

typedef struct {{
  const char* type;
  const char* name;
}} mlaforge_parameter;

typedef struct {{
  const char* name;
  int value;
}} mlaforge_number;

typedef struct {{
  const char* file;  // its text
  const char* entry;  // the symbol in its cubin
  unsigned threads;  // of a block
  // Dynamic shared memory of a block, which CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES must allow.
  unsigned smem_bytes;
  const char* grid[3];  // blocks, as a formula
  unsigned num_maps;  // tensor maps lead the parameters, in this order, each as a __grid_constant__ of 128 bytes
  const mlaforge_tensor_map* maps;
  unsigned num_parameters;  // the parameters behind the tensor maps
  const mlaforge_parameter* parameters;
  unsigned num_constants;  // numbers of the kernel's text that the grid and the arguments need
  const mlaforge_number* constants;
}} mlaforge_kernel;

#endif  // MLAFORGE_LAUNCH_TYPES
"""

_EMBED = """\
# Writes the bytes of INPUT as a C array SYMBOL to OUTPUT.
file(READ "${INPUT}" bytes HEX)
string(REGEX REPLACE "(................................)" "\\\\1\\n" bytes "${bytes}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\\\1," bytes "${bytes}")
file(WRITE "${OUTPUT}" "_Alignas(16) const unsigned char ${SYMBOL}[] = {\\n${bytes}\\n};\\n")
"""


def _cmake_lists(plan: Plan) -> str:
    name = plan.spec.name
    target = f"mlaforge_{name}"
    upper = name.upper()
    kernels = " ".join(_kernels(plan))
    return f"""\
# The kernels of the spec {name}, by mlaforge, as the library mlaforge::{name}:
#
#   set(MLAFORGE_CUTLASS_INCLUDE_DIR /path/to/cutlass/include)
#   add_subdirectory({name})
#   target_link_libraries(app PRIVATE mlaforge::{name} CUDA::cuda_driver)
cmake_minimum_required(VERSION 3.20)
project({target} LANGUAGES C)

set(MLAFORGE_CUTLASS_INCLUDE_DIR "" CACHE PATH "Where cute/arch/mma_sm90_gmma.hpp of CUTLASS 4.2 is")
set(MLAFORGE_NVCC_FLAGS "" CACHE STRING "Further flags of nvcc")
set(MLAFORGE_{upper}_KERNELS "{kernels}" CACHE STRING "Kernels to build")
find_program(MLAFORGE_NVCC nvcc HINTS "$ENV{{CUDA_HOME}}/bin" "$ENV{{CUDA_PATH}}/bin" /usr/local/cuda/bin REQUIRED)
if(NOT EXISTS "${{MLAFORGE_CUTLASS_INCLUDE_DIR}}/cute/arch/mma_sm90_gmma.hpp")
  message(FATAL_ERROR "MLAFORGE_CUTLASS_INCLUDE_DIR must be the include directory of CUTLASS 4.2")
endif()

set(sources)
file(GLOB headers "${{CMAKE_CURRENT_SOURCE_DIR}}/kernels/*.cuh")
separate_arguments(kernels UNIX_COMMAND "${{MLAFORGE_{upper}_KERNELS}}")
separate_arguments(flags UNIX_COMMAND "${{MLAFORGE_NVCC_FLAGS}}")
foreach(kernel IN LISTS kernels)
  set(source "${{CMAKE_CURRENT_SOURCE_DIR}}/kernels/${{kernel}}.cu")
  set(cubin "${{CMAKE_CURRENT_BINARY_DIR}}/${{kernel}}.cubin")
  set(embedded "${{CMAKE_CURRENT_BINARY_DIR}}/${{kernel}}_cubin.c")
  add_custom_command(
    OUTPUT "${{cubin}}"
    COMMAND "${{MLAFORGE_NVCC}}" -cubin -gencode arch=compute_90a,code=sm_90a -std=c++17
            -I "${{MLAFORGE_CUTLASS_INCLUDE_DIR}}" ${{flags}} -o "${{cubin}}" "${{source}}"
    DEPENDS "${{source}}" ${{headers}}
    VERBATIM)
  add_custom_command(
    OUTPUT "${{embedded}}"
    COMMAND "${{CMAKE_COMMAND}}" "-DINPUT=${{cubin}}" "-DOUTPUT=${{embedded}}"
            "-DSYMBOL={target}_${{kernel}}_cubin" -P "${{CMAKE_CURRENT_SOURCE_DIR}}/embed.cmake"
    DEPENDS "${{cubin}}" "${{CMAKE_CURRENT_SOURCE_DIR}}/embed.cmake"
    VERBATIM)
  list(APPEND sources "${{embedded}}")
endforeach()

add_library({target} STATIC ${{sources}})
add_library(mlaforge::{name} ALIAS {target})
target_include_directories({target} PUBLIC "${{CMAKE_CURRENT_SOURCE_DIR}}/include")
set_target_properties({target} PROPERTIES C_STANDARD 11 POSITION_INDEPENDENT_CODE ON)
"""
