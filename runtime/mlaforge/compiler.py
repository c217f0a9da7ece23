"""Kernel source to cubin, by NVRTC, with a disk cache and a report.

Needs no GPU, no driver, no nvcc and no CUDA_HOME. NVRTC is loaded only when the cache has no entry, nvdisasm is run
only when a report asks for machine code.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlaforge.cache import CacheWarning, Entry, KernelCache
from mlaforge.toolchain import Toolchain, ToolchainError, find_nvdisasm, find_toolchain

_KEY_FORMAT = 1

# Each compile leaves memory behind in its process, up to 1.8 GB after four large ones, so workers are replaced.
_COMPILES_PER_WORKER = 4


class CompileError(RuntimeError):
    """A kernel does not compile. The message holds the compiler's whole log, whose lines name the file and the line."""

    def __init__(self, source: Path, log: str) -> None:
        """Tell that `source` failed, and the compiler's `log`."""
        super().__init__(source, log)
        self.source = source
        self.log = log

    def __str__(self) -> str:
        return f"{self.source} does not compile:\n{self.log}"


class KernelWarning(UserWarning):
    """The compiler gave up on something that a kernel's speed hangs on, such as WGMMA instructions that overlap."""


@dataclass(frozen=True)
class CompileOptions:
    """What may be chosen for a compile.

    Holds no path: options are part of the cache key, which must be the same everywhere.
    """

    std: str = "c++17"
    defines: tuple[tuple[str, str], ...] = ()
    max_registers: int | None = None
    lineinfo: bool = False
    """Keep source lines for profilers and compute-sanitizer."""


@dataclass(frozen=True)
class KernelReport:
    """What the assembler says of one entry point of a cubin."""

    entry: str
    registers: int
    """Registers of a thread."""
    barriers: int
    """Named barriers used."""
    static_smem: int
    """Bytes of shared memory beside the dynamic ones of the launch."""
    stack_frame: int
    """Bytes of local memory of a thread, functions called included."""
    spill_stores: int
    """Bytes, functions called included."""
    spill_loads: int
    """Bytes, functions called included."""
    warnings: tuple[str, ...] = ()
    """The assembler's remarks on this entry point, e.g. C7510 and its like: WGMMA instructions serialised."""
    sass: Mapping[str, int] | None = None
    """Machine instructions by opcode without its suffixes (HGMMA, UTMALDG, LDL, STL, ...); None until `with_sass`."""

    @property
    def serialized(self) -> bool:
        """Whether the assembler gave up overlapping WGMMA instructions."""
        return any(_SERIALIZED.search(warning) for warning in self.warnings)


@dataclass(frozen=True)
class CompiledKernel:
    """A cubin and what is known of it."""

    source: Path
    arch: str
    key: str
    """Its name in the cache: a digest of all that decides the cubin."""
    cubin: bytes = field(repr=False)
    kernels: Mapping[str, KernelReport]
    """The report on each entry point, by its name."""
    log: str = field(repr=False)
    """All that NVRTC and the assembler printed."""
    versions: Mapping[str, str]
    """The toolchain."""
    seconds: Mapping[str, float]
    """Seconds by phase.

    Of this call: `header search`, `key` and `cache`. Of the compile that made the cubin, now or in the past: `import`,
    `nvrtc` and, as parts of the latter, `front end`, `optimizer` and `ptxas`. After `with_sass`: `disassembly`.
    """
    cache_hit: bool

    @property
    def entries(self) -> tuple[str, ...]:
        """Names of the entry points."""
        return tuple(self.kernels)

    @property
    def warnings(self) -> tuple[str, ...]:
        """All warnings and performance remarks in the log, of the front end and of the assembler."""
        return tuple(line.strip() for line in self.log.splitlines() if _WARNING.search(line))

    def with_sass(self) -> "CompiledKernel":
        """Return a copy whose reports count the machine instructions.

        Raises:
            ToolchainError: nvdisasm is missing or does not read the cubin.
        """
        start = time.perf_counter()
        counts = _count_instructions(self.cubin)
        kernels = {
            name: dataclasses.replace(report, sass=counts.get(name, {})) for name, report in self.kernels.items()
        }
        seconds = {**self.seconds, "disassembly": time.perf_counter() - start}
        return dataclasses.replace(self, kernels=kernels, seconds=seconds)


_SERIALIZED = re.compile(r"wgmma\.mma_async instructions are serialized")
_WARNING = re.compile(r"\bwarning\b[^:]*:|^\s*ptxas info\s*: \(C\d+\)")
_COMPILING = re.compile(r"^ptxas info\s*: Compiling entry function '(?P<entry>[^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"^ptxas info\s*: Used (?P<registers>\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_SMEM = re.compile(r"(\d+) bytes smem")
_STACK = re.compile(r"(\d+) bytes cumulative stack size")
_INCLUDE = re.compile(
    r"""^[ \t]*\#[ \t]*include[ \t]*(?:"(?P<quoted>[^"\n]+)"|<(?P<angled>[^>\n]+)>|(?P<macro>[^\s"<].*))""",
    re.MULTILINE,
)
_SECTION = re.compile(r"^\s*\.section\s+\.text\.(?P<entry>[^,\s]+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_]*)")


def compile_kernel(
    source: Path,
    *,
    arch: str = "sm_90a",
    options: CompileOptions | None = None,
    cache: KernelCache | None = None,
) -> CompiledKernel:
    """Compile one .cu file, or take its cubin from the cache.

    The file may include headers of CUTLASS, CuTe, CCCL and the CUDA runtime, and its own headers that lie beside it.
    Its kernels must be `extern "C"`.

    Args:
        source: the .cu file.
        arch: the architecture whose machine code is made.
        options: what may be chosen; the defaults if None.
        cache: where to look and to keep the result; the user's cache if None; `KernelCache(None)` for none at all.

    Raises:
        CompileError: the source does not compile. Never cached.
        ToolchainError: NVRTC or a header is missing.
        OSError: the source cannot be read.

    Warns:
        KernelWarning: the assembler serialised WGMMA instructions.
    """
    compiled = _compile(source, arch, options or CompileOptions(), cache or KernelCache.default())
    _surface(compiled)
    return compiled


def compile_many(
    sources: Sequence[Path],
    *,
    workers: int | None = None,
    arch: str = "sm_90a",
    options: CompileOptions | None = None,
    cache: KernelCache | None = None,
    advance: Callable[[], None] = lambda: None,
) -> list[CompiledKernel]:
    """Compile several .cu files at once and return them in the order given.

    Works in processes, for NVRTC's compiles wait for each other inside one. They are spawned: a script that calls this
    guards its main part with `if __name__ == "__main__":`. Files that the cache has, and a single one that it has not,
    are handled in this process.

    Args:
        sources: the .cu files.
        workers: the most processes at a time; as many as there are cores if None.
        arch: as for `compile_kernel`.
        options: as for `compile_kernel`.
        cache: as for `compile_kernel`.
        advance: called once for each file, when it is done; from any thread.

    Raises:
        CompileError: of the first file, in the order given, that does not compile. The others are compiled and cached
            all the same.
        ToolchainError: NVRTC or a header is missing.
        OSError: a source cannot be read.
    """
    options = options or CompileOptions()
    cache = cache or KernelCache.default()
    jobs = {source: _Job.of(source, arch, options) for source in sources}
    done = {source: hit for source, job in jobs.items() if (hit := job.load(cache)) is not None}
    misses = [source for source in jobs if source not in done]
    for _ in done:
        advance()
    if len(misses) == 1:
        done[misses[0]] = jobs[misses[0]].run(cache)
        advance()
    elif misses:
        done |= _compile_in_processes(misses, workers, arch, options, cache, advance)
    for kernel in done.values():
        _surface(kernel)
    return [done[source] for source in sources]


def _compile_in_processes(
    sources: Sequence[Path],
    workers: int | None,
    arch: str,
    options: CompileOptions,
    cache: KernelCache,
    advance: Callable[[], None],
) -> dict[Path, CompiledKernel]:
    import concurrent.futures
    import multiprocessing

    count = min(len(sources), workers or len(os.sched_getaffinity(0)))
    context = multiprocessing.get_context("spawn")
    # Workers are replaced by taking a new pool for each batch: max_tasks_per_child can hang before Python 3.13.
    batch = count * _COMPILES_PER_WORKER
    futures = {}
    for start in range(0, len(sources), batch):
        with concurrent.futures.ProcessPoolExecutor(count, context) as pool:
            for source in sources[start : start + batch]:
                futures[source] = pool.submit(_compile, source, arch, options, cache)
                futures[source].add_done_callback(lambda _: advance())
    return {source: future.result() for source, future in futures.items()}


def source_closure(source: Path) -> dict[str, bytes]:
    """Return the contents of a .cu file and of all its own headers, by path relative to its directory.

    Followed are the include directives, in either form, that lead to a file beside the one that includes it or beside
    the .cu. Conditions of the preprocessor are not looked at: a header too many costs a compile, one too few a stale
    kernel.

    Raises:
        CompileError: an include directive whose file name is a macro, which cannot be followed.
        OSError: a file cannot be read.
    """
    directory = source.parent
    contents: dict[str, bytes] = {}
    pending = [source]
    while pending:
        path = pending.pop()
        name = os.path.relpath(path, directory)
        if name in contents:
            continue
        contents[name] = path.read_bytes()
        text = contents[name].decode(errors="replace").replace("\\\r\n", "").replace("\\\n", "")
        for match in _INCLUDE.finditer(text):
            if match["macro"]:
                line = text.count("\n", 0, match.start()) + 1
                reason = f"#include {match['macro'].strip()}: an own header must be included by its name"
                raise CompileError(source, f"{name}({line}): error: {reason}")
            include = match["quoted"] or match["angled"]
            beside = (parent / include for parent in (path.parent, directory))
            pending.extend(candidate for candidate in beside if candidate.is_file())
    return contents


def cache_key(source: Path, *, arch: str = "sm_90a", options: CompileOptions | None = None) -> str:
    """Return the name of a compile in the cache: a digest of all that decides the cubin, in which no path takes part.

    Raises:
        CompileError: an include directive of the source cannot be followed.
        ToolchainError: NVRTC or a header is missing.
        OSError: a file cannot be read.
    """
    return _Job.of(source, arch, options or CompileOptions()).key


@dataclass(frozen=True)
class _Job:
    """One compile, of exactly the bytes that its key was worked out from."""

    source: Path
    arch: str
    program_options: Mapping[str, Any]
    closure: Mapping[str, bytes]
    toolchain: Toolchain
    key: str
    seconds: Mapping[str, float]

    @classmethod
    def of(cls, source: Path, arch: str, options: CompileOptions) -> "_Job":
        start = time.perf_counter()
        toolchain = find_toolchain()
        found = time.perf_counter()
        closure = source_closure(source)
        program_options = _program_options(source, arch, options)
        content = {
            "format": _KEY_FORMAT,
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in closure.items()},
            "options": program_options,
            "versions": dict(toolchain.versions),
        }
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        seconds = {"header search": found - start, "key": time.perf_counter() - found}
        return cls(source, arch, program_options, closure, toolchain, key, seconds)

    def load(self, cache: KernelCache) -> CompiledKernel | None:
        start = time.perf_counter()
        entry = cache.load(self.key)
        if entry is None:
            return None
        return self._compiled(entry, time.perf_counter() - start, hit=True)

    def run(self, cache: KernelCache) -> CompiledKernel:
        start = time.perf_counter()
        building = 0.0

        def build() -> Entry:
            nonlocal building
            begun = time.perf_counter()
            entry = self._build()
            building = time.perf_counter() - begun
            return entry

        try:
            entry, hit = cache.get(self.key, build)
        except _OtherCompilerError as error:
            warnings.warn(str(error), CacheWarning, stacklevel=2)
            entry, hit = error.entry, False
        return self._compiled(entry, time.perf_counter() - start - building, hit=hit)

    def _build(self) -> Entry:
        start = time.perf_counter()
        try:
            from cuda.core import Program, ProgramOptions
        except ImportError as error:
            raise ToolchainError(f"cuda.core: {error}; run: pip install -U cuda-core cuda-bindings") from error
        imported = time.perf_counter()
        include_path = [str(path) for path in (self.source.parent.absolute(), *self.toolchain.include_dirs)]
        code = self.closure[self.source.name].decode(errors="replace")
        log = io.StringIO()
        with _memory_file() as times:
            options = ProgramOptions(**self.program_options, include_path=include_path, time=times)
            try:
                cubin = bytes(Program(code, "c++", options).compile("cubin", logs=log).code)
            except Exception as error:
                # The exception types of cuda.core are private, but all that come from NVRTC carry its status.
                if "NVRTC_ERROR" not in str(error):
                    raise
                raise CompileError(self.source, _log_in(str(error))) from None
            compiled = time.perf_counter()
            phases = _phases(Path(times).read_text())
        text = log.getvalue().replace("\0", "").strip()
        kernels = _parse_log(text)
        if not kernels:
            raise CompileError(self.source, f"{self.source.name}: error: no __global__ function in it\n{text}")
        if source_closure(self.source) != self.closure:
            raise CompileError(self.source, f"{self.source.name}: error: changed while it was being compiled")
        seconds = {"import": imported - start, "nvrtc": compiled - imported, **phases}
        reports = [dataclasses.asdict(kernel) for kernel in kernels]
        entry = Entry({"kernels": reports, "log": text, "seconds": seconds}, cubin)
        named, loaded = self.toolchain.versions["nvrtc"], _loaded_nvrtc()
        if named.removeprefix("toolkit-").split(".")[:2] != loaded.split("."):
            raise _OtherCompilerError(entry, named, loaded)
        return entry

    def _compiled(self, entry: Entry, cache_seconds: float, *, hit: bool) -> CompiledKernel:
        reports = [
            KernelReport(**{**report, "warnings": tuple(report["warnings"])}) for report in entry.meta["kernels"]
        ]
        return CompiledKernel(
            source=self.source,
            arch=self.arch,
            key=self.key,
            cubin=entry.cubin,
            kernels={report.entry: report for report in reports},
            log=entry.meta["log"],
            versions=dict(self.toolchain.versions),
            seconds={**self.seconds, "cache": cache_seconds, **entry.meta["seconds"]},
            cache_hit=hit,
        )


class _OtherCompilerError(Exception):
    """The NVRTC that compiled is not the one that the key names: the entry is of use here, and to nobody else."""

    def __init__(self, entry: Entry, named: str, loaded: str) -> None:
        super().__init__(
            f"a kernel is compiled without the disk cache: NVRTC {named} is installed, but {loaded} is loaded; look "
            "for another libnvrtc in LD_LIBRARY_PATH, or in a package that was imported before"
        )
        self.entry = entry


def _loaded_nvrtc() -> str:
    from cuda.bindings import nvrtc

    _status, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def _compile(source: Path, arch: str, options: CompileOptions, cache: KernelCache) -> CompiledKernel:
    """Do one compile; a function of the module, so that a worker process can be told to call it."""
    return _Job.of(source, arch, options).run(cache)


def _program_options(source: Path, arch: str, options: CompileOptions) -> dict[str, Any]:
    """Give all options of NVRTC that decide the cubin, by cuda.core's names; the include path is not among them."""
    return {
        # Appears in the cubin and in the log, so it must not depend on where the file lies.
        "name": source.name,
        "arch": arch,
        "std": options.std,
        "define_macro": list(options.defines) or None,
        "max_register_count": options.max_registers,
        "lineinfo": options.lineinfo,
        "device_as_default_execution_space": True,
        # With a relative name, the "directory of the source" is the working directory, whose headers would go before
        # those beside the source.
        "no_source_include": True,
        "ptxas_options": ["-v"],
    }


def _log_in(message: str) -> str:
    return message.partition("compilation log:")[2].replace("\0", "").strip() or message


@contextlib.contextmanager
def _memory_file(data: bytes = b"") -> Iterator[str]:
    """Give the path of a file in memory, which lasts as long as the context: no disk need take writes to compile."""
    with open(os.memfd_create("mlaforge"), "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _phases(table: str) -> dict[str, float]:
    """Read the table of NVRTC's --time, whose lines are: file, phase, number, ms."""
    names = {"CUDA C++ Frontend": "front end", "NVVM Optimizer": "optimizer", "PTX Translation": "ptxas"}
    phases: dict[str, float] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[1] in names and cells[3] == "ms":
            phases[names[cells[1]]] = float(cells[2]) / 1000
    return phases


def _parse_log(log: str) -> list[KernelReport]:
    """Read the assembler's -v report, where each entry point is followed by the functions that it calls."""
    kernels: dict[str, dict[str, Any]] = {}
    numbers: dict[str, Any] = {}
    for line in log.splitlines():
        if match := _COMPILING.search(line):
            numbers = {"entry": match["entry"], "stack_frame": 0, "spill_stores": 0, "spill_loads": 0}
            kernels[match["entry"]] = numbers
        elif (match := _FRAME.search(line)) and numbers:
            frame, stores, loads = map(int, match.groups())
            numbers["stack_frame"] = max(numbers["stack_frame"], frame)
            numbers["spill_stores"] += stores
            numbers["spill_loads"] += loads
        elif (match := _USED.search(line)) and numbers:
            barriers, smem, stack = _BARRIERS.search(line), _SMEM.search(line), _STACK.search(line)
            numbers["registers"] = int(match["registers"])
            numbers["barriers"] = int(barriers[1]) if barriers else 0
            numbers["static_smem"] = int(smem[1]) if smem else 0
            numbers["stack_frame"] = max(numbers["stack_frame"], int(stack[1]) if stack else 0)
    remarks = [line.strip() for line in log.splitlines() if line.startswith("ptxas") and _WARNING.search(line)]
    return [
        KernelReport(**values, warnings=tuple(remark for remark in remarks if f"'{name}'" in remark))
        for name, values in kernels.items()
    ]


def _count_instructions(cubin: bytes) -> dict[str, dict[str, int]]:
    """Count the machine instructions of each entry point by opcode."""
    with _memory_file(cubin) as path:
        result = subprocess.run([find_nvdisasm(), "-c", path], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ToolchainError(f"nvdisasm does not read the cubin: {result.stderr.strip()}")
    counts: dict[str, Counter[str]] = {}
    entry = ""
    for line in result.stdout.splitlines():
        if match := _SECTION.search(line):
            entry = match["entry"]
        elif match := _INSTRUCTION.search(line):
            counts.setdefault(entry, Counter())[match["opcode"]] += 1
    for counter in counts.values():
        # Padding after the last instruction.
        del counter["NOP"]
    return {name: dict(sorted(counter.items())) for name, counter in counts.items()}


def _surface(compiled: CompiledKernel) -> None:
    """Turn what nobody may overlook into Python warnings, attributed to the caller of the public function."""
    for remark in compiled.warnings:
        if _SERIALIZED.search(remark):
            warnings.warn(f"{compiled.source.name}: {remark}", KernelWarning, stacklevel=3)
