"""The command line, and the only module that knows both the generator and the runtime.

What a command does not need is not imported: `plan`, `generate` and `schema` run without torch and CUDA. Results go to
stdout, progress and errors to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from mlaforge import __version__

from .candidates import Sweep, Value, enumerate_candidates
from .cost import DecodeCost, DecodeEnergy, cache_sizes, decode_cost, decode_energy
from .emit import diff_folder, write_folder
from .errors import Problem as SpecProblem
from .errors import SpecError
from .plan import Plan, make_plan
from .render import render
from .resources import find_spec, spec_dir
from .schema import schema_text
from .spec import load_spec, parse_spec
from .target import TARGETS
from .write_back import WriteBackError, tuned_remarks, write_back
from .yaml_source import read_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from mlaforge.api import MLA
    from mlaforge.bench.cases import Case
    from mlaforge.bench.session import Options, Session
    from mlaforge.bench.tune import Candidate as TuneCandidate
    from mlaforge.bench.tune import Options as TuneOptions
    from mlaforge.compiler import CompiledKernel
    from mlaforge.manifest import Manifest
    from mlaforge.memory_verify import MemoryProblem, MemoryReport
    from mlaforge.prefill_verify import PrefillProblem
    from mlaforge.reference import AttentionDims
    from mlaforge.verify import Problem, Report

_EXIT_CODES = """
\b
Exit codes:
  0  all is well
  1  a check or a verification failed
  2  a spec or the command line is wrong
  3  a kernel does not compile, or the toolchain is incomplete
  4  there is no Hopper GPU to run on
"""

# Shapes whose floors a plan shows: batch, context, s_q.
_SHAPES = ((1, 65_536, 1), (16, 8_192, 1), (128, 4_096, 1), (128, 8_192, 1), (128, 8_192, 2))


class _Failure(click.ClickException):
    """A check or a verification that failed. Its message is printed alone: the faults of a spec name their own file."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        """Print the message."""
        click.echo(self.message, file=file, err=file is None)


class _Usage(_Failure):
    """A spec or a file that is wrong."""

    exit_code = 2


class _Toolchain(_Failure):
    """A kernel that does not compile, or a toolchain that is not there."""

    exit_code = 3


class _NoDevice(_Failure):
    """No GPU that the kernels run on."""

    exit_code = 4


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EXIT_CODES,
)
@click.version_option(__version__)
def cli() -> None:
    """Make MLA attention kernels for Hopper GPUs from YAML specs.

    SPEC is a YAML file, or the name of a shipped spec such as deepseek_v3.
    """


def main() -> None:
    """Run the command line."""
    cli(prog_name="mlaforge")


# ---- plan, generate, schema: no torch, no CUDA -----------------------------------------------------------------------

_COUNT = click.IntRange(min=1)


@cli.command()
@click.argument("spec")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--batch", type=_COUNT, help="Requests.  [default: several shapes; 16 for cache sizes]")
@click.option("--context", type=_COUNT, help="Cached tokens of a request.  [default: several; 65536]")
@click.option("--s-q", type=_COUNT, default=None, help="Query tokens of a request.  [default: several]")
@click.option("--heads", type=_COUNT, help="Query heads of a rank.  [default: the spec's]")
@click.option("--layers", type=_COUNT, help="Layers, for cache sizes.  [default: the spec's, else 1]")
def plan(
    spec: str,
    as_json: bool,
    batch: int | None,
    context: int | None,
    s_q: int | None,
    heads: int | None,
    layers: int | None,
) -> None:
    """Print every number of a spec's kernels.

    The shared-memory map, barriers, tensor maps, warps, registers and launch; traffic, work and the floor of decode
    calls on the target, and the rate and energy when they go on for seconds; sizes of the key-value cache.
    """
    made = _plans([spec])[0]
    if batch is context is s_q is None:
        shapes: Sequence[tuple[int, int, int]] = _SHAPES
    else:
        shapes = [(batch or 16, context or 65_536, s_q or 1)]
    costs = [decode_cost(made, batch=b, context=s_k, s_q=q, heads=heads) for b, s_k, q in shapes]
    d_qk, d_v = made.decode.d_qk, made.decode.d_v
    tiles = [made.decode_for(cost.s_q * cost.heads).tile for cost in costs]
    energies = [
        decode_energy(
            made.target,
            d_qk=d_qk,
            d_v=d_v,
            tile_rows=tile.rows,
            tile_tokens=tile.tokens,
            batch=cost.batch,
            context=cost.context,
            rows=cost.s_q * cost.heads,
        )
        for cost, tile in zip(costs, tiles, strict=True)
    ]
    model = made.spec.model
    batch, context, layers = batch or 16, context or 65_536, layers or model.num_hidden_layers or 1
    sizes = cache_sizes(model, batch=batch, context=context, layers=layers)
    if as_json:
        derived = ("bytes", "intensity", "padded_intensity", "floor_us", "bound")
        _print_json(
            {
                **made.to_json(),
                "costs": [
                    {
                        **dataclasses.asdict(cost),
                        **{name: getattr(cost, name) for name in derived},
                        "sustained": _energy_json(energy),
                    }
                    for cost, energy in zip(costs, energies, strict=True)
                ],
                "cache_sizes": {
                    "batch": batch,
                    "context": context,
                    "layers": layers,
                    "kinds": [dataclasses.asdict(size) for size in sizes],
                },
            }
        )
        return
    from .tables import plan_tables

    _print(plan_tables(made, costs, sizes, f"{batch} x {context:,} tokens, {layers} layers"))
    _print([_energy_table(made, costs, energies)])


def _energy_json(energy: DecodeEnergy) -> dict[str, Any]:
    return {**dataclasses.asdict(energy), "nj_per_token": energy.nj_per_token}


def _energy_table(made: Plan, costs: Sequence[DecodeCost], energies: Sequence[DecodeEnergy]) -> Table:
    from .tables import table

    rows = [
        (
            f"{cost.batch:,}",
            f"{cost.context:,}",
            cost.s_q,
            cost.heads,
            f"{energy.memory_nj:.0f}",
            f"{energy.reread_nj:.0f}",
            f"{energy.matrix_nj:.0f}",
            f"{energy.static_nj:.0f}",
            f"{energy.nj_per_token:.0f}",
            f"{energy.watts:.0f}",
            f"{energy.us:.1f}",
            f"{energy.tflops:.0f}",
            f"{energy.gbps:,.0f}",
            energy.bound,
        )
        for cost, energy in zip(costs, energies, strict=True)
    ]
    model = made.target.energy
    columns = ("batch>", "context>", "s_q>", "heads>", "HBM>", "L2>", "MMA>", "static>", "nJ/token>", "W>", "us>")
    return table(
        f"Sustained on an {made.target.name}, predicted: energy of a cached token in nJ, and the rate that it allows",
        (*columns, "TFLOP/s>", "GB/s>", "bound by"),
        rows,
        caption=(
            f"{model.power_cap_watts:.0f} W cap, {model.static_watts:.0f} W static; constants measured by "
            "`mlaforge bench --energy`. L2: row tiles behind the first; softmax is left out"
        ),
    )


@cli.command()
@click.argument("specs", nargs=-1, metavar="[SPEC]...")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("generated"),
    show_default=True,
    help="Where the folders go, one a spec.",
)
@click.option("--check", is_flag=True, help="Write nothing; print what differs and fail if anything does.")
def generate(specs: tuple[str, ...], output: Path, check: bool) -> None:
    """Write the text of kernels.

    Without a SPEC, that of all shipped ones.
    """
    plans = _plans(specs or _shipped())
    if check:
        _check_generated(plans, output, complete=not specs)
        return
    for made in plans:
        _generate(made, output)


@cli.command()
@click.option("--check", is_flag=True, help="Compare with FILE and fail if it differs.")
@click.option(
    "-o",
    "--output",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write it to FILE, or compare it with FILE.  [default of --check: the one beside the shipped specs]",
)
def schema(check: bool, file: Path | None) -> None:
    """Print the JSON Schema of a spec, for editors."""
    if check:
        path = file or spec_dir() / "schema.json"
        found = path.read_bytes() if path.is_file() else None
        if found != schema_text().encode():
            state = "differs from the code's" if found is not None else "is missing"
            raise _Failure(f"{path}: the schema {state}; run: mlaforge schema -o {path}")
        click.echo(f"{path}: up to date")
    elif file is None:
        click.echo(schema_text(), nl=False)
    else:
        with _writing(file):
            file.write_text(schema_text(), encoding="utf-8")


def _shipped() -> list[str]:
    return sorted(path.stem for path in spec_dir().glob("*.yaml"))


def _plans(specs: Iterable[str]) -> list[Plan]:
    """Plan specs, or fail with all the faults of all of them."""
    plans: list[Plan] = []
    problems: list[SpecProblem] = []
    unknown: list[str] = []
    for name in specs:
        path = find_spec(name)
        if reason := _why_unknown(name, path):
            unknown.append(reason)
            continue
        try:
            plans.append(make_plan(load_spec(path)))
        except SpecError as error:
            problems += error.problems
    names = [made.spec.name for made in plans]
    unknown += [f"{name}: two specs have this name" for name in sorted({n for n in names if names.count(n) > 1})]
    if problems or unknown:
        raise _Usage("\n".join([*unknown, *map(str, problems)]))
    return plans


def _why_unknown(name: str, path: Path) -> str | None:
    """Say that a name is neither that of a file nor of a shipped spec, None if it is one."""
    if path.exists() or path.name != name or path.suffix:
        return None
    return f"{name}: neither a file nor a shipped spec; shipped are {', '.join(_shipped())}"


def _generate(made: Plan, output: Path) -> Path:
    folder = output / made.spec.name
    files = render(made)
    with _writing(folder):
        changed = write_folder(folder, files)
    click.echo(f"{folder}: {f'{len(changed)} of {len(files)} files written' if changed else 'up to date'}")
    return folder


def _check_generated(plans: Sequence[Plan], output: Path, complete: bool) -> None:
    drifted = []
    for made in plans:
        folder = output / made.spec.name
        if not folder.is_dir():
            click.echo(f"{folder}: missing")
            drifted.append(made.spec.name)
        elif diff := diff_folder(folder, render(made)):
            click.echo(diff, nl=False)
            drifted.append(made.spec.name)
    if complete:
        known = {made.spec.name for made in plans}
        left = sorted(path.parent for path in output.glob("*/manifest.json") if path.parent.name not in known)
        for folder in left:
            click.echo(f"{folder}: no shipped spec gives it")
            drifted.append(folder.name)
    if drifted:
        raise _Failure(f"{', '.join(drifted)}: not what the specs give; run: mlaforge generate -o {output}")
    click.echo(f"{output}: up to date, {len(plans)} specs")


# ---- compile ---------------------------------------------------------------------------------------------------------


@cli.command(name="compile")
@click.argument("specs", nargs=-1, required=True, metavar="SPEC|DIR...")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def compile_(specs: tuple[str, ...], as_json: bool) -> None:
    """Compile kernels and report on them.

    Takes specs and generated folders. Needs no GPU.
    """
    with tempfile.TemporaryDirectory(prefix="mlaforge-") as scratch:
        compiled = _compile(_folders(specs, Path(scratch)))
    if as_json:
        _print_json([_compile_json(manifest, kernel) for manifest, kernel in compiled])
    else:
        _print(_compile_tables(compiled))


def _folders(specs: Sequence[str], scratch: Path) -> list[Path]:
    """Give the folders of specs; those of YAML are rendered into `scratch`."""
    folders = {name: Path(name) for name in specs if Path(name).is_dir()}
    rest = [name for name in specs if name not in folders]
    for name, made in zip(rest, _plans(rest), strict=True):
        folders[name] = scratch / made.spec.name
        write_folder(folders[name], render(made))
    return [folders[name] for name in specs]


def _compile(folders: Sequence[Path]) -> list[tuple[Manifest, CompiledKernel]]:
    from mlaforge.compiler import CompileError, KernelWarning, compile_many
    from mlaforge.manifest import ManifestError, read_manifest
    from mlaforge.toolchain import ToolchainError

    try:
        manifests = [read_manifest(folder) for folder in folders]
    except ManifestError as error:
        raise _Usage(str(error)) from None
    sources = [(manifest, source) for manifest in manifests for source in manifest.sources]
    try:
        with _status(f"compiling {len(sources)} kernels"), warnings.catch_warnings():
            # The report says it.
            warnings.simplefilter("ignore", KernelWarning)
            kernels = compile_many([source for _, source in sources])
            return [(manifest, kernel.with_sass()) for (manifest, _), kernel in zip(sources, kernels, strict=True)]
    except (CompileError, ToolchainError) as error:
        raise _Toolchain(str(error)) from None
    except OSError as error:
        raise _Usage(f"{error.filename}: can't be read: {error.strerror}") from None


def _compile_json(manifest: Manifest, kernel: CompiledKernel) -> dict[str, Any]:
    return {
        "spec": manifest.name,
        "file": kernel.source.name,
        "key": kernel.key,
        "cubin_bytes": len(kernel.cubin),
        "cache_hit": kernel.cache_hit,
        "seconds": dict(kernel.seconds),
        "versions": dict(kernel.versions),
        "dynamic_smem": manifest.dynamic_smem[kernel.source],
        "smem_limit": TARGETS[manifest.target].smem_per_block,
        "kernels": [
            {**dataclasses.asdict(report), "serialized": report.serialized} for report in kernel.kernels.values()
        ],
    }


def _compile_tables(compiled: Sequence[tuple[Manifest, CompiledKernel]]) -> Iterator[Table]:
    from rich.text import Text

    from .tables import table

    def bad_unless_zero(count: int) -> Text:
        return Text(f"{count:,}", style="bold red" if count else "")

    rows = []
    times = []
    for manifest, kernel in compiled:
        for report in kernel.kernels.values():
            sass, seconds = report.sass or {}, kernel.seconds
            rows.append(
                (
                    manifest.name,
                    report.entry,
                    report.registers,
                    bad_unless_zero(report.spill_stores + report.spill_loads),
                    bad_unless_zero(report.stack_frame),
                    f"{report.static_smem:,}",
                    f"{manifest.dynamic_smem[kernel.source]:,}",
                    sass.get("HGMMA", 0),
                    sass.get("UTMALDG", 0),
                    Text("serialised", style="bold red")
                    if report.serialized
                    else "overlap"
                    if "HGMMA" in sass
                    else "-",
                )
            )
            phases = (f"{seconds[name]:.2f}" if name in seconds else "-" for name in _PHASES)
            times.append((manifest.name, report.entry, "hit" if kernel.cache_hit else "miss", *phases))
    limit = max(TARGETS[manifest.target].smem_per_block for manifest, _ in compiled)
    versions = ", ".join(f"{name} {version}" for name, version in compiled[0][1].versions.items())
    yield table(
        "Compiled kernels, shared memory and spills in bytes",
        ("spec", "kernel", "registers>", "spills>", "stack>", "static>", "dynamic>", "HGMMA>", "UTMALDG>", "WGMMA"),
        rows,
        caption=f"a block has {limit:,} B of shared memory",
    )
    yield table(
        "Seconds of the compile that made the cubin",
        ("spec", "kernel", "cache", *(f"{name}>" for name in _PHASES)),
        times,
        caption=f"nvrtc has front end, optimizer and ptxas in it; {versions}",
    )


_PHASES = ("header search", "import", "nvrtc", "front end", "optimizer", "ptxas")


# ---- verify ----------------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("spec", metavar="SPEC|DIR")
@click.option("--examples", type=_COUNT, help="Random problems of each kernel; 200 on a GPU, 12 under the simulator.")
@click.option("--seed", type=int, default=0, show_default=True, help="Which random problems.")
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    type=click.Choice(["decode", "gather", "append", "merge", "prefill"]),
    help="Only the problems of this kernel; may be repeated.  [default: all]",
)
@click.option(
    "--max-tokens",
    type=_COUNT,
    help="Tokens of one random problem; 262144 on a GPU, 1000 under the simulator; of prefill at most 16384, 400.",
)
@click.option("--matrix", is_flag=True, help="Run the problems of FlashMLA's own test of decode instead.")
@click.option("--problem", "text", metavar="TEXT", help="Run one problem instead, as a failure printed it.")
@click.option(
    "--device",
    default="cuda",
    show_default=True,
    help="A CUDA device, such as cuda:1; or sim, to run the same text on the CPU under a machine that finds races.",
)
@click.option(
    "--mode",
    type=click.Choice(["eager", "lazy", "random"]),
    default="random",
    show_default=True,
    help="With sim: when asynchronous operations land.",
)
@click.option("--schedule-seed", type=int, default=0, show_default=True, help="With sim: the order of everything.")
@click.option("-v", "--verbose", is_flag=True, help="Print each problem before it runs.")
def verify(
    spec: str,
    examples: int | None,
    seed: int,
    kernels: tuple[str, ...],
    max_tokens: int | None,
    matrix: bool,
    text: str | None,
    device: str,
    mode: str,
    schedule_seed: int,
    verbose: bool,
) -> None:
    """Compare kernels with float64, on a GPU or under the simulator.

    Decode and prefill by the acceptance criteria of FlashMLA's own tests, the others by what one rounding explains.
    What fails is made as small as it still fails, and printed as a command line that replays it.
    """
    if matrix and text is not None:
        raise click.UsageError("--matrix and --problem exclude each other")
    with tempfile.TemporaryDirectory(prefix="mlaforge-") as scratch:
        # A spec with faults is told before a missing GPU.
        (folder,) = _folders([spec], Path(scratch))
        problem = _parse_any_problem(text) if text is not None else None
        if device != "sim" and (reason := _why_no_hopper(device)):
            raise _NoDevice(f"{reason}; the kernels can't run here, but `--device sim` runs their text on the CPU")
        if problem is None:
            _check_absorption(_dims(folder))
        run = _Run(seed, examples, max_tokens, matrix, problem, device, mode, schedule_seed, verbose, kernels)
        _verify(spec, folder, run)


@dataclasses.dataclass(frozen=True)
class _Run:
    """What to verify, and how."""

    seed: int
    examples: int | None = None
    max_tokens: int | None = None
    matrix: bool = False
    problem: Problem | MemoryProblem | PrefillProblem | None = None
    device: str = "cuda"
    mode: str = "random"
    schedule_seed: int = 0
    verbose: bool = False
    kernels: tuple[str, ...] = ()
    """Only these; all if empty."""

    @property
    def simulated(self) -> bool:
        """Whether a CPU plays the GPU."""
        return self.device == "sim"

    @property
    def size(self) -> tuple[int, int]:
        """Random problems of each kernel, and the most tokens of one."""
        examples, tokens = (12, 1000) if self.simulated else (200, 1 << 18)
        return self.examples or examples, self.max_tokens or tokens

    @property
    def on(self) -> str:
        """The device of the tensors."""
        return "cpu" if self.simulated else self.device

    def draws(self, kernel: str) -> bool:
        """Whether random problems of a kernel are asked for."""
        return self.problem is None and not self.matrix and (not self.kernels or kernel in self.kernels)

    @property
    def schedule(self) -> str:
        """What a command line that replays a problem says of the simulator."""
        return f" --device sim --mode {self.mode} --schedule-seed {self.schedule_seed}" if self.simulated else ""


def _parse_problem(text: str) -> Problem:
    _require_torch()
    from mlaforge.verify import Problem

    try:
        return Problem.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--problem") from None


def _parse_any_problem(text: str) -> Problem | MemoryProblem | PrefillProblem:
    """Read a problem of any kernel; all but decode's begin with the kernel's name."""
    _require_torch()
    from mlaforge.memory_verify import is_memory_problem, parse_problem
    from mlaforge.prefill_verify import PrefillProblem

    prefill = text.split(" ", 1)[0] == PrefillProblem.kernel
    if not (prefill or is_memory_problem(text)):
        return _parse_problem(text)
    try:
        return PrefillProblem.parse(text) if prefill else parse_problem(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--problem") from None


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise _Toolchain(f"torch can't be imported: {error}") from None


def _why_no_hopper(device: str) -> str | None:
    """Say why kernels can't run, None if they can."""
    _require_torch()
    import torch

    try:
        kind = torch.device(device)
    except RuntimeError:
        kind = None
    if kind is None or kind.type != "cuda":
        raise click.BadParameter(f"{device!r} is not cuda or cuda:N", param_hint="--device")
    if not torch.cuda.is_available():
        return "no CUDA GPU found"
    if (kind.index or 0) >= torch.cuda.device_count():
        return f"no {device}: there are {torch.cuda.device_count()} CUDA GPUs"
    capability = torch.cuda.get_device_capability(kind)
    if capability != (9, 0):
        name = torch.cuda.get_device_name(kind)
        return f"{name} has compute capability {capability[0]}.{capability[1]}, not Hopper's 9.0"
    return None


def _dims(folder: Path) -> AttentionDims:
    from mlaforge.manifest import read_manifest

    dims: AttentionDims = SimpleNamespace(**read_manifest(folder).model)
    return dims


def _check_absorption(dims: AttentionDims) -> None:
    from mlaforge.reference import COSINE_BF16, COSINE_FLOAT32, check_absorption

    check = check_absorption(dims)
    click.echo(
        f"absorption: naive and absorbed scores, 1 - cosine {1 - check.float32:.1e} in float32 "
        f"(below {1 - COSINE_FLOAT32:.0e}), {1 - check.bf16:.1e} with bf16 intermediates (below {1 - COSINE_BF16:.0e})"
    )
    if not check.ok:
        raise _Failure("absorption: naive and absorbed scores do not agree")


def _verify(spec: str, folder: Path, run: _Run) -> None:
    """Run the problems and print what came of them; `_Failure` if one is not accepted."""
    import mlaforge
    from mlaforge.compiler import CompileError
    from mlaforge.simulator import CompilerMissingError, SimulatorOptions
    from mlaforge.toolchain import ToolchainError

    options = SimulatorOptions(seed=run.schedule_seed, mode=run.mode)
    try:
        with _status("compiling for the simulator") if run.simulated else contextlib.nullcontext():
            mla = mlaforge.load(folder, device="sim" if run.simulated else "cuda", simulator=options)
    except CompilerMissingError as error:
        raise _Toolchain(str(error)) from None
    except (CompileError, ToolchainError) as error:
        raise _Toolchain(str(error)) from None
    _verify_decode(spec, mla, run)
    _verify_memory(spec, mla, run)
    _verify_prefill(spec, mla, run)


def _verify_decode(spec: str, mla: MLA, run: _Run) -> None:
    """Run the problems of decode; `_Failure` if one is not accepted."""
    from mlaforge.verify import Problem, flashmla_matrix, random_problems, verify_problems

    problems: list[Problem] = []
    if isinstance(run.problem, Problem):
        problems = [run.problem]
    elif run.matrix and (not run.kernels or "decode" in run.kernels):
        problems = list(flashmla_matrix())
    elif run.draws("decode"):
        examples, tokens = run.size
        problems = random_problems(mla.manifest, examples, run.seed, tokens)
    if not problems:
        return
    start = time.perf_counter()
    with _verifying(problems, run) as before:
        report = verify_problems(mla, problems, before, device=run.on)
    _print([_verify_table("decode", report, time.perf_counter() - start)])
    if report.failure is not None:
        failure = report.failure
        _show_failure(spec, run, failure.errors.failures, failure.found, failure.problem)
        raise _Failure(f"{spec}: problem {report.problems} of {len(problems)} failed")
    click.echo(f"all {report.problems} problems accepted")


def _verify_memory(spec: str, mla: MLA, run: _Run) -> None:
    """Run the problems of the memory-bound kernels; `_Failure` if one is not accepted."""
    from mlaforge.memory_verify import MemoryProblem, random_problems, verify_problems

    problems: list[MemoryProblem] = []
    if isinstance(run.problem, MemoryProblem):
        problems = [run.problem]
    elif run.problem is None:
        examples, tokens = run.size
        drawn = random_problems(mla.manifest, examples, run.seed, tokens)
        problems = [problem for problem in drawn if run.draws(problem.kernel)]
    if not problems:
        return
    start = time.perf_counter()
    with _verifying(problems, run) as before:
        report = verify_problems(mla, problems, before, device=run.on)
    _print([_memory_table(report, time.perf_counter() - start)])
    if report.failure is not None:
        failure = report.failure
        _show_failure(spec, run, failure.outcome.failures, failure.found, failure.problem)
        raise _Failure(f"{spec}: problem {report.problems} of {len(problems)}, of {failure.problem.kernel}, failed")
    click.echo(f"{', '.join(report.counts)}: all {report.problems} problems accepted")


def _verify_prefill(spec: str, mla: MLA, run: _Run) -> None:
    """Run the problems of prefill; `_Failure` if one is not accepted, `_Usage` if they are of no kernel of the spec."""
    from mlaforge.prefill_verify import PrefillProblem, random_problems, verify_problems

    problem = run.problem if isinstance(run.problem, PrefillProblem) else None
    if PrefillProblem.kernel not in mla.manifest.kernels:
        if problem is not None or PrefillProblem.kernel in run.kernels:
            raise _Usage(f"{spec}: there is no prefill kernel; `mlaforge plan` says why")
        return
    if problem is not None:
        problems = [problem]
    elif run.draws(PrefillProblem.kernel):
        examples, tokens = run.size
        # Work is the square of it.
        tokens = min(tokens, 400 if run.simulated else 1 << 14)
        problems = random_problems(mla.manifest, examples, run.seed, tokens)
    else:
        return
    start = time.perf_counter()
    with _verifying(problems, run) as before:
        report = verify_problems(mla, problems, before, device=run.on)
    _print([_verify_table("prefill", report, time.perf_counter() - start)])
    if report.failure is not None:
        failure = report.failure
        _show_failure(spec, run, failure.errors.failures, failure.found, failure.problem)
        raise _Failure(f"{spec}: problem {report.problems} of {len(problems)}, of prefill, failed")
    click.echo(f"prefill: all {report.problems} problems accepted")


@contextlib.contextmanager
def _verifying(problems: Sequence[object], run: _Run) -> Iterator[Callable[[object], None]]:
    """Show progress; give what is called with each problem before it runs."""
    with _progress("verifying", len(problems)) as advance:

        def before(problem: object) -> None:
            if run.verbose:
                click.echo(problem, err=True)
            advance()

        yield before


def _show_failure(
    spec: str,
    run: _Run,
    failures: Iterable[str],
    found: Problem | MemoryProblem | PrefillProblem,
    small: Problem | MemoryProblem | PrefillProblem,
) -> None:
    for line in failures:
        click.echo(f"failed: {line}")
    if found != small:
        click.echo(f"found as: {found}")
    click.echo(f"reproduce: {small.to_repro(spec)}{run.schedule}")


def _memory_table(report: MemoryReport, seconds: float) -> Table:
    from .tables import table

    failed = report.failure.problem.kernel if report.failure is not None else ""
    rows = []
    for name, count in report.counts.items():
        used = report.used[name]
        accepted = "float64, rounded once" if used else "the same bits"
        rows.append((name, count, f"{used:.1%}" if used else "-", accepted, "failed" if name == failed else "ok"))
    columns = ("kernel", "count>", "of tolerance>", "accepted is", "")
    return table(f"Memory-bound kernels, {seconds:.1f} s", columns, rows)


def _verify_table(kernel: str, report: Report[Problem] | Report[PrefillProblem], seconds: float) -> Table:
    from mlaforge.verify import (
        LSE_ABS_TOLERANCE,
        LSE_REL_TOLERANCE,
        OUT_ABS_TOLERANCE,
        OUT_COSINE_TOLERANCE,
        OUT_REL_TOLERANCE,
    )

    from .tables import table

    rows = [
        (
            kind,
            report.counts[kind],
            f"{worst.out_abs:.1e}",
            f"{worst.out_used:.0%}",
            f"{worst.cosine:.1e}",
            f"{worst.lse_abs:.1e}",
            f"{worst.lse_used:.1%}",
            "failed" if worst.failures else "ok",
        )
        for kind, worst in sorted(report.worst.items())
    ]
    columns = ("problems", "count>", "|out - ref|>", "of tolerance>", "1 - cos>", "|lse - ref|>", "of tolerance>", "")
    return table(
        f"Worst errors of {kernel} against float64, {seconds:.1f} s",
        columns,
        rows,
        caption=(
            f"accepted: out within {OUT_ABS_TOLERANCE:.0e} or relative {OUT_REL_TOLERANCE:.4f}, 1 - cos below "
            f"{OUT_COSINE_TOLERANCE:.0e}; lse within {LSE_ABS_TOLERANCE:.0e} or relative {LSE_REL_TOLERANCE:.1e}"
        ),
    )


# ---- trace -----------------------------------------------------------------------------------------------------------


class _Block(click.ParamType[tuple[int, int, int]]):
    """Three numbers with commas between."""

    name = "X,Y,Z"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int, int]:
        """Read the numbers."""
        if isinstance(value, tuple):
            return value
        try:
            x, y, z = map(int, value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not three numbers, as in 0,1,0", param, ctx)
        return x, y, z


@cli.command()
@click.argument("spec", metavar="SPEC|DIR")
@click.option(
    "-o",
    "--output",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where the picture goes, an SVG.  [default: the spec's name + .trace.svg]",
)
@click.option(
    "--perfetto",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write a trace for ui.perfetto.dev or chrome://tracing, as JSON.",
)
@click.option(
    "--problem", "text", metavar="TEXT", help="The problem, as in --problem of verify.  [default: two short requests]"
)
@click.option(
    "--mode",
    type=click.Choice(["eager", "lazy", "random"]),
    default="random",
    show_default=True,
    help="When asynchronous operations land.",
)
@click.option("--schedule-seed", type=int, default=0, show_default=True, help="The order of everything.")
@click.option("--block", type=_Block(), default="0,0,0", show_default=True, help="The block to draw.")
@click.option(
    "--sms", type=_COUNT, default=1, show_default=True, help="Multiprocessors that the requests are cut over."
)
def trace(
    spec: str,
    file: Path | None,
    perfetto: Path | None,
    text: str | None,
    mode: str,
    schedule_seed: int,
    block: tuple[int, int, int],
    sms: int,
) -> None:
    """Draw the timeline of one block of the decode kernel.

    Runs a small problem under the simulator and draws who issues, waits and computes, and the life of the buffers.
    Steps of the simulator are no cycles: the picture shows an order, not a speed.
    """
    with tempfile.TemporaryDirectory(prefix="mlaforge-") as scratch:
        (folder,) = _folders([spec], Path(scratch))
        problem = _parse_problem(text) if text is not None else None
        _require_torch()
        from mlaforge.simulator import CompilerMissingError, SimulatorOptions
        from mlaforge.trace import to_perfetto, to_svg, trace_decode

        options = SimulatorOptions(seed=schedule_seed, mode=mode, sms=sms, trace_block=block)
        try:
            with _status("running under the simulator"):
                timeline = trace_decode(folder, problem, options)
        except CompilerMissingError as error:
            raise _Toolchain(str(error)) from None
        except ValueError as error:
            raise _Usage(str(error)) from None
    pictures = [(file or Path(f"{folder.resolve().name}.trace.svg"), to_svg(timeline))]
    if perfetto is not None:
        pictures.append((perfetto, to_perfetto(timeline)))
    for path, content in pictures:
        with _writing(path):
            path.write_text(content, encoding="utf-8")
        click.echo(f"{path}: {timeline.title}; {timeline.steps:,} steps")
    if timeline.fault is not None:
        raise _Failure(f"{spec}: {timeline.fault}")


# ---- make ------------------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("spec")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("generated"),
    show_default=True,
    help="Where the folder goes.",
)
@click.option("--examples", type=_COUNT, help="Random problems to verify; 200 on a GPU, 12 under the simulator.")
@click.option("--seed", type=int, default=0, show_default=True, help="Which random problems.")
def make(spec: str, output: Path, examples: int | None, seed: int) -> None:
    """Do the whole job, from spec to verified kernel.

    Plans, generates, compiles and reports; then verifies, on a Hopper GPU or else under the simulator.
    """
    from .tables import summary

    (made,) = _plans([spec])
    click.echo(summary(made))
    folder = _generate(made, output)
    _print(_compile_tables(_compile([folder])))
    _require_torch()
    _check_absorption(made.spec.model)
    device = "cuda"
    if reason := _why_no_hopper("cuda"):
        click.echo(f"{reason}: the kernels were compiled for it, and their text now runs on the CPU, simulated")
        device = "sim"
        _compile_for_the_simulator(folder)
    _verify(spec, folder, _Run(seed, examples, device=device))


def _compile_for_the_simulator(folder: Path) -> None:
    """Compile a folder's kernels for the CPU, side by side: one after the other takes longer than to run them."""
    from mlaforge.manifest import read_manifest
    from mlaforge.simulator import compile_library

    manifest = read_manifest(folder)
    kernels = [(each.source, each.entry) for each in manifest.decodes]
    kernels += [(each.source, each.entry) for each in manifest.kernels.values()]
    with _progress("compiling for the simulator", len(kernels)) as advance, ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda kernel: compile_library(*kernel), kernels):
            advance()


# ---- bench -----------------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("spec", metavar="SPEC|DIR")
@click.option(
    "--suite",
    "suites",
    multiple=True,
    metavar="NAME",
    help="burst, small or sustained; may be repeated.  [default: burst, or none with --energy]",
)
@click.option(
    "--peers",
    "peer_names",
    metavar="NAME,...",
    help="Peers to compare with, or none.  [default: all that can be imported]",
)
@click.option(
    "--shapes", multiple=True, metavar="BxS,...", help="Batch x cached tokens, as in 128x4096, instead of the suites'."
)
@click.option("--heads", multiple=True, metavar="N,...", help="Query heads, instead of the suites'.")
@click.option("--s-q", multiple=True, metavar="N,...", help="Query tokens, instead of the suites'.")
@click.option("--repeats", type=_COUNT, default=30, show_default=True, help="Timed calls of each kernel and shape.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    help="Of each sustained measurement, after 0.6 s of heating.",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=1.0),
    metavar="SECONDS",
    help="Of the whole run: lowers repeats and seconds to keep it, and drops no case.",
)
@click.option("--energy", is_flag=True, help="Measure the constants of the energy model again.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where bench.json, bench.txt and the plots go.  [default: bench-NAME]",
)
def bench(
    spec: str,
    suites: tuple[str, ...],
    peer_names: str | None,
    shapes: tuple[str, ...],
    heads: tuple[str, ...],
    s_q: tuple[str, ...],
    repeats: int,
    seconds: float,
    budget: float | None,
    energy: bool,
    output: Path | None,
) -> None:
    """Time decode on a GPU, beside other kernels and the machine's ceilings.

    Ours and each peer that can be imported run on the same tensors in turn. burst and small: medians of separate calls,
    each a replayed graph on a cold L2. sustained: seconds of calls back to back, with watts, clock and energy.
    The peers: flashmla, flashmla_vllm, fa3_vllm, flashinfer, triton_vllm, triton_sglang, torch.
    """
    from mlaforge.bench.cases import choose_suites, parse_counts, parse_shapes

    try:
        wanted = [name for text in suites for name in text.split(",")] or ([] if energy else ["burst"])
        chosen = choose_suites(wanted, parse_shapes(shapes), parse_counts(heads), parse_counts(s_q))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    with tempfile.TemporaryDirectory(prefix="mlaforge-") as scratch:
        (folder,) = _folders([spec], Path(scratch))
        _require_torch()
        from mlaforge.bench.peers import PEERS
        from mlaforge.bench.session import Options

        names = tuple(PEERS) if peer_names is None else tuple(name for name in peer_names.split(",") if name != "none")
        if unknown := [name for name in names if name not in PEERS]:
            raise click.UsageError(f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
        if reason := _why_no_hopper("cuda"):
            raise _NoDevice(f"{reason}; a bench needs one")
        options = Options(chosen, names, repeats, seconds, budget=budget, energy=energy)
        _bench(folder, options, output or Path(f"bench-{folder.resolve().name}"))


def _bench(folder: Path, options: Options, output: Path) -> None:
    import torch

    import mlaforge
    from mlaforge.bench.machine import Machine, energy_source
    from mlaforge.bench.power import Nvml, NvmlError
    from mlaforge.bench.session import BenchError, Session
    from mlaforge.bench.timing import Gpu
    from mlaforge.compiler import CompileError
    from mlaforge.launch import Cuda
    from mlaforge.toolchain import ToolchainError

    device = torch.device("cuda", torch.cuda.current_device())
    try:
        with _status("compiling"):
            mla = mlaforge.load(folder)
            manifest = mla.manifest
            gpu = Gpu(device)
            machine = Machine(Cuda(), device, gpu.sms, folder, manifest.d_qk)
    except (CompileError, ToolchainError) as error:
        raise _Toolchain(str(error)) from None
    about: dict[str, Any] = {
        "kernel": _first_line(manifest.decode.source),
        "gpu": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
        "sms": gpu.sms,
        "l2_bytes": gpu.l2_bytes,
    }
    meter = None
    try:
        meter = Nvml(device)
        about |= meter.describe()
    except NvmlError as error:
        click.echo(f"no power readings: {error}", err=True)
        if options.energy:
            raise _NoDevice(f"--energy needs power readings: {error}") from None
    with _writing(output):
        output.mkdir(parents=True, exist_ok=True)
    with _steps() as (advance, total):
        session = Session(
            mla,
            gpu,
            options,
            machine=machine,
            meter=meter,
            about=about,
            predict=lambda case: _predict(manifest, case),
            report=click.echo,
            advance=advance,
            save=lambda result: _replace(output / "bench.json", json.dumps(result, indent=1) + "\n"),
        )
        total(session.steps)
        try:
            session.run()
        except BenchError as error:
            stopped: BenchError | None = error
        else:
            stopped = None
    _show_bench(session, output)
    if session.energy is not None:
        cap = about.get("power_limit_watts", TARGETS[manifest.target].energy.power_cap_watts)
        click.echo(f"for the planner's table of this GPU:\n{energy_source(session.energy, cap)}")
    if stopped is not None:
        raise _Failure(f"stopped: {stopped}; what was measured before is in {output}")


def _first_line(source: Path) -> str:
    """Give what a generated kernel says that it was made from."""
    return source.read_text(encoding="utf-8").partition("\n")[0].removeprefix("// ").partition(". Do not edit")[0]


def _predict(manifest: Manifest, case: Case) -> dict[str, Any]:
    """Say what the planner expects of our kernel."""
    decode = manifest.decode_for(case.rows)
    energy = decode_energy(
        TARGETS[manifest.target],
        d_qk=manifest.d_qk,
        d_v=manifest.d_v,
        tile_rows=decode.tile_rows,
        tile_tokens=decode.tile_tokens,
        batch=case.b,
        context=case.s_k,
        rows=case.rows,
    )
    return {
        "floor_us": energy.floor_us,
        "us": energy.us,
        "TFLOPs": energy.tflops,
        "GBps": energy.gbps,
        "watts": energy.watts,
        "nJ_per_token": energy.nj_per_token,
        "bound": energy.bound,
    }


def _show_bench(session: Session, output: Path) -> None:
    """Print the tables, and write them and the plots beside the data."""
    import io

    from rich.console import Console

    from mlaforge.bench.roofline import to_svg
    from mlaforge.bench.session import OURS

    from .bench_tables import bench_tables

    result = session.result
    text = io.StringIO()
    console = Console(file=text, highlight=False, width=_BENCH_WIDTH)
    for part in bench_tables(result, OURS):
        console.print(part)
    click.echo(text.getvalue())
    _replace(output / "bench.txt", text.getvalue())
    for mode in ("burst", "sustained"):
        if (picture := to_svg(result, mode)) is not None:
            _replace(output / f"roofline_{mode}.svg", picture)
    click.echo(f"{output}: {', '.join(sorted(path.name for path in output.iterdir()))}")


_BENCH_WIDTH = 150


def _replace(path: Path, text: str) -> None:
    """Write a file aside and rename it: whoever is killed leaves a whole one."""
    with _writing(path):
        aside = path.with_name(f".{path.name}.new")
        aside.write_text(text, encoding="utf-8", newline="")
        if path.exists():
            shutil.copymode(path, aside)
        aside.replace(path)


@contextlib.contextmanager
def _steps() -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    """Show a bar on a terminal; yields what is called as a step of some name begins, and what takes their number."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = _console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield (
            lambda what: bar.update(task, advance=1, description=what),
            lambda total: bar.update(task, total=total),
        )


# ---- tune ------------------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("spec")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where the tuned spec goes.  [default: NAME.yaml in the folder of --data]",
)
@click.option("--write", is_flag=True, help="Write the tuned spec over SPEC, which must be a file of yours.")
@click.option("--sweep", metavar="FIELD,...", help="Fields of kernels.decode to sweep.  [default: those that are auto]")
@click.option(
    "--suite",
    "suites",
    multiple=True,
    metavar="NAME",
    help="burst or small; may be repeated.  [default: both; with --shapes neither]",
)
@click.option("--shapes", multiple=True, metavar="BxS,...", help="Batch x cached tokens, as in 128x4096.")
@click.option("--heads", multiple=True, metavar="N,...", help="Query heads.  [default: those of a rank of the spec]")
@click.option("--s-q", multiple=True, metavar="N,...", help="Query tokens.  [default: 1]")
@click.option("--repeats", type=_COUNT, default=30, show_default=True, help="Timed calls of each candidate and shape.")
@click.option(
    "--budget",
    type=click.FloatRange(min=1.0),
    metavar="SECONDS",
    help="Of the whole run: lowers repeats to keep it, and drops neither shape nor candidate.",
)
@click.option(
    "--examples",
    type=_COUNT,
    default=24,
    show_default=True,
    help="Small random problems that a candidate must solve before it is timed.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Which random problems.")
@click.option("--device", default="cuda", show_default=True, help="A CUDA device, such as cuda:1.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, the progress to stderr.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where tune.json, tune.txt and tune.svg go.  [default: tune-NAME]",
)
def tune(
    spec: str,
    output: Path | None,
    write: bool,
    sweep: str | None,
    suites: tuple[str, ...],
    shapes: tuple[str, ...],
    heads: tuple[str, ...],
    s_q: tuple[str, ...],
    repeats: int,
    budget: float | None,
    examples: int,
    seed: int,
    device: str,
    as_json: bool,
    data: Path | None,
) -> None:
    """Find the fastest of what a spec leaves to the planner, on this GPU.

    Builds every setting of the open fields of kernels.decode, compares each one's results with float64, on small
    problems and on the shapes, and times all of them in turn, each call a replayed graph on a cold L2. The one whose
    medians have the least geometric mean is written into a copy of the spec, with its measurements as a comment, unless
    the planner's own choice is within 1% of it.

    A candidate whose results are wrong is named and excluded, and the exit code is 1. What can't be planned or compiled
    is listed with the reason. Ctrl-C keeps what was measured, but writes no spec.
    """
    started = time.perf_counter()
    if write and output is not None:
        raise click.UsageError("--write and --output exclude each other")
    if device == "sim":
        raise click.UsageError("--device sim: the simulator counts no time, and only a Hopper GPU can be tuned for")
    path = find_spec(spec)
    if reason := _why_unknown(spec, path):
        raise _Usage(reason)
    if path.is_dir():
        raise _Usage(f"{spec}: is a folder; only a spec can be tuned")
    if write and path != Path(spec):
        raise click.UsageError(f"--write would change the shipped {path.name}; give the path of a file, or -o FILE")
    try:
        text = read_bytes(path)
        parsed = parse_spec(text, str(path))
    except SpecError as error:
        raise _Usage(str(error)) from None
    folder = data or Path(f"tune-{parsed.name}")
    target = path.resolve() if write else output or folder / f"{parsed.name}.yaml"
    if not write and target.resolve() == path.resolve():
        raise click.UsageError(f"{target} is the spec itself; say --write to change it")
    cases = _tune_cases(suites, shapes, heads or (str(parsed.heads_per_rank),), s_q or ("1",))
    try:
        swept = enumerate_candidates(parsed, [name for name in (sweep or "").split(",") if name])
    except ValueError as error:
        raise _Usage(f"{spec}: {error}") from None
    if not swept.buildable:
        reasons = dict.fromkeys(str(each.reason) for each in swept.candidates)
        raise _Usage("\n".join(f"{spec}: nothing can be built: {reason}" for reason in reasons))
    source = _Source(spec, path, parsed.name, text)
    # Better now than when all is measured.
    _edited(source, swept.candidates[-1].settings)
    _require_torch()
    if reason := _why_no_hopper(device):
        raise _NoDevice(f"{reason}; tuning needs a Hopper GPU to time on, and the simulator counts no time")
    from mlaforge.bench.tune import Options

    options = Options(tuple(cases), repeats, budget, examples=examples, seed=seed)
    _tune(source, swept, options, device, started, _TuneOutput(folder, target, as_json, over=write))


def _tune_cases(suites: Sequence[str], shapes: Sequence[str], heads: Sequence[str], s_q: Sequence[str]) -> list[Case]:
    from mlaforge.bench.cases import choose_suites, parse_counts, parse_shapes

    try:
        wanted = [name for text in suites for name in text.split(",")] or (["burst"] if shapes else ["burst", "small"])
        chosen = choose_suites(wanted, parse_shapes(shapes), parse_counts(heads), parse_counts(s_q))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if sustained := [suite.name for suite in chosen if suite.mode != "burst"]:
        raise click.UsageError(
            f"{', '.join(sustained)}: candidates are timed call by call, in turn; use burst or small"
        )
    return list(dict.fromkeys(case for suite in chosen for case in suite.cases))


@dataclasses.dataclass(frozen=True)
class _Source:
    """What is tuned."""

    given: str
    """As on the command line."""
    path: Path
    name: str
    data: bytes


@dataclasses.dataclass(frozen=True)
class _TuneOutput:
    """Where results go."""

    folder: Path
    spec: Path
    as_json: bool
    over: bool
    """Whether `spec` is the one that is tuned."""

    def tell(self, line: str) -> None:
        """Print progress."""
        click.echo(line, err=self.as_json)


def _tune(
    source: _Source, swept: Sweep, options: TuneOptions, device_name: str, started: float, output: _TuneOutput
) -> None:
    import torch

    from mlaforge.bench.power import Nvml, NvmlError
    from mlaforge.bench.session import BenchError
    from mlaforge.bench.timing import Gpu
    from mlaforge.bench.tune import Tuning

    index = torch.device(device_name).index
    if index is not None:
        torch.cuda.set_device(index)
    device = torch.device("cuda", torch.cuda.current_device())
    with tempfile.TemporaryDirectory(prefix="mlaforge-") as scratch:
        candidates = _build(swept, Path(scratch), output.tell)
    if all(each.mla is None for each in candidates):
        reasons = dict.fromkeys(f"{each.label}: {each.reason}" for each in candidates)
        raise _Toolchain("\n".join(reasons))
    gpu = Gpu(device)
    about: dict[str, Any] = {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "sms": gpu.sms}
    # Of use, but not needed: power is not measured here.
    with contextlib.suppress(NvmlError):
        about |= Nvml(device).describe()
    with _writing(output.folder):
        output.folder.mkdir(parents=True, exist_ok=True)
    with _steps() as (advance, total):
        tuning = Tuning(
            source.name,
            candidates,
            gpu,
            options,
            about=about,
            started=started,
            report=output.tell,
            advance=advance,
            save=lambda result: _replace(output.folder / "tune.json", json.dumps(result, indent=1) + "\n"),
        )
        total(tuning.steps)
        # Both leave the reason in the result.
        with contextlib.suppress(BenchError, KeyboardInterrupt):
            tuning.run()
    _show_tune(source, tuning.result, output)


def _build(swept: Sweep, scratch: Path, tell: Callable[[str], None]) -> list[TuneCandidate]:
    """Compile all candidates at once and load them; one that does not compile has the reason instead of kernels."""
    import mlaforge
    from mlaforge.bench.tune import Candidate
    from mlaforge.compiler import CompileError, KernelWarning, compile_kernel, compile_many
    from mlaforge.manifest import read_manifest
    from mlaforge.toolchain import ToolchainError

    folders: dict[str, Path] = {}
    for number, each in enumerate(swept.candidates):
        if each.files is not None:
            folders[each.label] = scratch / str(number)
            write_folder(folders[each.label], each.files)
    tell(f"{len(folders)} of {len(swept.candidates)} candidates can be planned")
    made = []
    with _status(f"compiling {len(folders)} candidates"), warnings.catch_warnings():
        # The table says it.
        warnings.simplefilter("ignore", KernelWarning)
        try:
            # Raised is the first that fails; the others are in the cache then, and what fails shows again below.
            with contextlib.suppress(CompileError):
                compile_many([source for folder in folders.values() for source in read_manifest(folder).sources])
            for each in swept.candidates:
                mla, reason, reports = None, each.reason, {}
                if (folder := folders.get(each.label)) is not None:
                    try:
                        mla = mlaforge.load(folder)
                        for source in mla.manifest.sources:
                            for entry, report in compile_kernel(source).kernels.items():
                                reports[entry] = {
                                    "registers": report.registers,
                                    "spills": report.spill_stores + report.spill_loads,
                                    "serialized": report.serialized,
                                }
                    except CompileError as error:
                        mla, reason = None, f"does not compile: {_first_error(error.log)}"
                made.append(Candidate(each.label, each.settings, mla, reason, each.planner, reports, each.same))
        except ToolchainError as error:
            raise _Toolchain(str(error)) from None
    return made


def _first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no log")


def _show_tune(source: _Source, result: dict[str, Any], output: _TuneOutput) -> None:
    """Print and write the result, and fail if a candidate was wrong or the run was stopped."""
    import io

    from rich.console import Console

    from mlaforge.bench.tune_plot import to_svg
    from mlaforge.verify import Problem

    from .tune_tables import tune_tables

    folder = output.folder
    buffer = io.StringIO()
    console = Console(file=buffer, highlight=False, width=_BENCH_WIDTH)
    for part in tune_tables(result):
        console.print(part)
    output.tell(buffer.getvalue())
    files = {"tune.txt": buffer.getvalue()}
    if (picture := to_svg(result)) is not None:
        files["tune.svg"] = picture
    failures = []
    for each in result["candidates"]:
        if each["state"] == "wrong":
            # A spec of just these settings, for the line that replays it.
            name = f"wrong_{re.sub(r'[^a-z0-9]+', '_', each['label'])}.yaml"
            files[name] = _edited(source, each["settings"])
            output.tell(f"reproduce: {Problem.parse(each['problem']).to_repro(str(folder / name))}")
            failures.append(f"{each['label']}: wrong results")
    for name, text in files.items():
        _replace(folder / name, text)
    output.tell(f"{folder}: {', '.join(sorted([*files, 'tune.json']))}")
    stopped, winner = result["stopped"], result["winner"]
    if stopped is not None:
        failures.append(f"stopped: {stopped}; what was measured before is in {folder}, and no spec was written")
    elif winner is None:
        failures.append("no candidate is right; no spec was written")
    else:
        output.tell(f"winner: {winner}: {result['why']}")
        settings = next(each["settings"] for each in result["candidates"] if each["label"] == winner)
        tuned = _edited(source, settings, tuned_remarks(result))
        target = output.spec
        if output.over and source.path.read_bytes() != source.data:
            target = folder / f"{source.name}.yaml"
            failures.append(f"{source.given}: changed while it was tuned; the tuned spec is {target}")
        with _writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        _replace(target, tuned)
        output.tell(f"{target}: written")
    if output.as_json:
        _print_json(result)
    if failures:
        raise _Failure("\n".join(failures))


def _edited(source: _Source, settings: Mapping[str, Value], remarks: Sequence[str] = ()) -> str:
    try:
        return write_back(source.data.decode("utf-8"), settings, remarks)
    except WriteBackError as error:
        raise _Usage(f"{source.given}: {error}") from None


# ---- Output ----------------------------------------------------------------------------------------------------------


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def _print(parts: Iterable[RenderableType]) -> None:
    """Print to stdout."""
    from rich.console import Console

    console = _console()
    # Better a line that a narrow terminal wraps than a number cut short.
    if console.width < _WIDTH:
        console = Console(highlight=False, width=_WIDTH)
    for part in parts:
        console.print(part)


_WIDTH = 120


def _print_json(data: object) -> None:
    click.echo(json.dumps(data, indent=2))


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _Usage(f"{error.filename or path}: can't be written: {error.strerror or error}") from None


@contextlib.contextmanager
def _status(what: str) -> Iterator[None]:
    console = _console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal; yields what is called as each step begins."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = _console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


if __name__ == "__main__":
    main()
