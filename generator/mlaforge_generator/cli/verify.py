"""`verify`: the kernels against float64."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click

from . import devices
from .group import COUNT, DeviceFailure, Failure, ToolchainFailure, UsageFailure, cli
from .inputs import complete_spec, make_folders
from .output import print_json, print_parts, progress, status

if TYPE_CHECKING:
    from rich.table import Table

    from mlaforge.api import MLA
    from mlaforge.memory_verify import MemoryFailure, MemoryProblem, MemoryReport, Outcome
    from mlaforge.prefill_verify import PrefillProblem
    from mlaforge.reference import AttentionDims
    from mlaforge.verify import Errors, Problem, Report
    from mlaforge.verify import Failure as VerifyFailure

AnyFailure: TypeAlias = "MemoryFailure | VerifyFailure[Problem] | VerifyFailure[PrefillProblem]"
AnyProblem: TypeAlias = "Problem | MemoryProblem | PrefillProblem"
AnyReport: TypeAlias = "Report[Problem] | Report[PrefillProblem] | MemoryReport"


@cli.command()
@click.argument("spec", metavar="SPEC|DIR", shell_complete=complete_spec)
@click.option("--examples", type=COUNT, help="Random problems of each kernel; 200 on a GPU, 12 under the simulator.")
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
    type=COUNT,
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
@click.option("--json", "as_json", is_flag=True, help="Print what came of it as JSON.")
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
    as_json: bool,
) -> None:
    """Compare kernels with float64, on a GPU or under the simulator.

    Decode and prefill by the acceptance criteria of FlashMLA's own tests, the others by what one rounding explains.
    What fails is made as small as it still fails, and printed as a command line that replays it.
    """
    if matrix and text is not None:
        raise click.UsageError("--matrix and --problem exclude each other")
    with tempfile.TemporaryDirectory(prefix="mlaforge-") as scratch:
        # A spec with faults is told before a missing GPU.
        (folder,) = make_folders([spec], Path(scratch))
        problem = _parse_any_problem(text) if text is not None else None
        devices.require_torch()
        if device != "sim" and (reason := devices.why_no_hopper(device)):
            raise DeviceFailure(f"{reason}; the kernels can't run here, but `--device sim` runs their text on the CPU")
        results: list[dict[str, Any]] | None = [] if as_json else None
        run = Run(seed, examples, max_tokens, matrix, problem, device, mode, schedule_seed, verbose, kernels, results)
        try:
            if problem is None:
                check_absorption_of(_dims(folder), results)
            verify_folder(spec, folder, run)
        finally:
            if results is not None:
                print_json(results)


@dataclasses.dataclass(frozen=True)
class Run:
    """What to verify, and how."""

    seed: int
    examples: int | None = None
    max_tokens: int | None = None
    matrix: bool = False
    problem: AnyProblem | None = None
    device: str = "cuda"
    mode: str = "random"
    schedule_seed: int = 0
    verbose: bool = False
    kernels: tuple[str, ...] = ()
    """Only these; all if empty."""
    results: list[dict[str, Any]] | None = None
    """Where results go, as plain data; None to print them as tables."""

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


def parse_decode_problem(text: str) -> Problem:
    """Read a problem of decode; a usage error if it is none."""
    devices.require_torch()
    from mlaforge.verify import Problem

    try:
        return Problem.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--problem") from None


def _parse_any_problem(text: str) -> AnyProblem:
    """Read a problem of any kernel; all but decode's begin with the kernel's name."""
    devices.require_torch()
    from mlaforge.memory_verify import is_memory_problem, parse_problem
    from mlaforge.prefill_verify import PrefillProblem

    prefill = text.split(" ", 1)[0] == PrefillProblem.kernel
    if not (prefill or is_memory_problem(text)):
        return parse_decode_problem(text)
    try:
        return PrefillProblem.parse(text) if prefill else parse_problem(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--problem") from None


def _dims(folder: Path) -> AttentionDims:
    from mlaforge.manifest import read_manifest

    dims: AttentionDims = SimpleNamespace(**read_manifest(folder).model)
    return dims


def check_absorption_of(dims: AttentionDims, results: list[dict[str, Any]] | None = None) -> None:
    """Compare absorbed scores with naive ones, and tell the difference; `Failure` if it is too large.

    Args:
        dims: of the attention.
        results: takes the differences as plain data; None to print them.
    """
    from mlaforge.reference import COSINE_BF16, COSINE_FLOAT32, check_absorption

    with status("comparing naive and absorbed scores"):
        check = check_absorption(dims)
    if results is not None:
        cosines = {"float32": check.float32, "bf16": check.bf16}
        results.append({"kernels": ["absorption"], "ok": check.ok, "cosines": cosines})
    else:
        click.echo(
            f"absorption: naive and absorbed scores, 1 - cosine {1 - check.float32:.1e} in float32 (below "
            f"{1 - COSINE_FLOAT32:.0e}), {1 - check.bf16:.1e} with bf16 intermediates (below {1 - COSINE_BF16:.0e})"
        )
    if not check.ok:
        raise Failure("absorption: naive and absorbed scores do not agree")


def verify_folder(spec: str, folder: Path, run: Run) -> None:
    """Run the problems and print what came of them; `Failure` if one is not accepted."""
    import mlaforge
    from mlaforge.compiler import CompileError
    from mlaforge.simulator import CompilerMissingError, SimulatorOptions
    from mlaforge.toolchain import ToolchainError

    options = SimulatorOptions(seed=run.schedule_seed, mode=run.mode)
    try:
        with status("compiling for the simulator") if run.simulated else contextlib.nullcontext():
            mla = mlaforge.load(folder, device="sim" if run.simulated else "cuda", simulator=options)
    except (CompilerMissingError, CompileError, ToolchainError) as error:
        raise ToolchainFailure(str(error)) from None
    _verify_decode(spec, mla, run)
    _verify_memory(spec, mla, run)
    _verify_prefill(spec, mla, run)


def _verify_decode(spec: str, mla: MLA, run: Run) -> None:
    """Run the problems of decode; `Failure` if one is not accepted."""
    from mlaforge.verify import Problem, flashmla_matrix, random_problems, verify_problems

    problems: list[Problem] = []
    if isinstance(run.problem, Problem):
        problems = [run.problem]
    elif run.matrix and (not run.kernels or "decode" in run.kernels):
        problems = list(flashmla_matrix())
    elif run.draws("decode"):
        examples, tokens = run.size
        problems = random_problems(mla.manifest, examples, run.seed, tokens)
    _judge(
        spec,
        run,
        problems,
        lambda before: verify_problems(mla, problems, before, device=run.on),
        functools.partial(_verify_table, "decode"),
    )


def _verify_memory(spec: str, mla: MLA, run: Run) -> None:
    """Run the problems of the memory-bound kernels; `Failure` if one is not accepted."""
    from mlaforge.memory_verify import MemoryProblem, random_problems, verify_problems

    problems: list[MemoryProblem] = []
    if isinstance(run.problem, MemoryProblem):
        problems = [run.problem]
    elif run.problem is None:
        examples, tokens = run.size
        drawn = random_problems(mla.manifest, examples, run.seed, tokens)
        problems = [problem for problem in drawn if run.draws(problem.kernel)]
    _judge(
        spec,
        run,
        problems,
        lambda before: verify_problems(mla, problems, before, device=run.on),
        _memory_table,
    )


def _verify_prefill(spec: str, mla: MLA, run: Run) -> None:
    """Run the problems of prefill; `Failure` if one is not accepted, `UsageFailure` if the spec has no such kernel."""
    from mlaforge.prefill_verify import PrefillProblem, random_problems, verify_problems

    problems = [run.problem] if isinstance(run.problem, PrefillProblem) else []
    if PrefillProblem.kernel not in mla.manifest.kernels:
        if problems or PrefillProblem.kernel in run.kernels:
            raise UsageFailure(f"{spec}: there is no prefill kernel; `mlaforge plan` says why")
        return
    if run.draws(PrefillProblem.kernel):
        examples, tokens = run.size
        # Work is the square of it.
        tokens = min(tokens, 400 if run.simulated else 1 << 14)
        problems = random_problems(mla.manifest, examples, run.seed, tokens)
    _judge(
        spec,
        run,
        problems,
        lambda before: verify_problems(mla, problems, before, device=run.on),
        functools.partial(_verify_table, "prefill"),
    )


_R = TypeVar("_R", bound=AnyReport)


def _judge(
    spec: str,
    run: Run,
    problems: Sequence[AnyProblem],
    verify_all: Callable[[Callable[[object], None]], _R],
    table: Callable[[_R, float], Table],
) -> None:
    """Run problems, if there are any, and print what came of them; `Failure` if one is not accepted.

    `verify_all` is given what is to be called with each problem before it runs; `table` takes its report and seconds.
    """
    if not problems:
        return
    start = time.perf_counter()
    with _verifying(problems, run) as before:
        report = verify_all(before)
    seconds = time.perf_counter() - start
    kernels = list(filter(None, dict.fromkeys(map(_kernel, problems))))
    if run.results is None:
        print_parts([table(report, seconds)])
    else:
        run.results.append({"kernels": kernels or ["decode"], **_report_json(spec, run, report), "seconds": seconds})
    if (failure := report.failure) is not None:
        if run.results is None:
            _show_failure(spec, run, _errors(failure).failures, failure.found, failure.problem)
        of = f", of {name}," if (name := _kernel(failure.problem)) else ""
        raise Failure(f"{spec}: problem {report.problems} of {len(problems)}{of} failed")
    if run.results is None:
        names = ", ".join(kernels)
        click.echo(f"{names}{': ' if names else ''}all {report.problems} problems accepted")


def _errors(failure: AnyFailure) -> Outcome | Errors:
    from mlaforge.memory_verify import MemoryFailure

    return failure.outcome if isinstance(failure, MemoryFailure) else failure.errors


def _report_json(spec: str, run: Run, report: AnyReport) -> dict[str, Any]:
    """Give a report as plain data."""
    from mlaforge.memory_verify import MemoryReport

    failure = report.failure
    worst: Mapping[str, Any] = (
        {name: {"used": used} for name, used in report.used.items()}
        if isinstance(report, MemoryReport)
        else {kind: dataclasses.asdict(errors) for kind, errors in report.worst.items()}
    )
    return {
        "ok": failure is None,
        "problems": report.problems,
        "counts": dict(report.counts),
        "worst": dict(worst),
        "failure": failure
        and {
            "failures": list(_errors(failure).failures),
            "found": str(failure.found),
            "problem": str(failure.problem),
            "reproduce": f"{failure.problem.to_repro(spec)}{run.schedule}",
        },
    }


def _kernel(problem: AnyProblem) -> str:
    """Name the kernel of a problem as its text begins: that of decode has no name."""
    from mlaforge.verify import Problem

    return "" if isinstance(problem, Problem) else problem.kernel


@contextlib.contextmanager
def _verifying(problems: Sequence[object], run: Run) -> Iterator[Callable[[object], None]]:
    """Show progress; give what is called with each problem before it runs."""
    with progress("verifying", len(problems)) as advance:

        def before(problem: object) -> None:
            if run.verbose:
                click.echo(problem, err=True)
            advance()

        yield before


def _show_failure(
    spec: str,
    run: Run,
    failures: Iterable[str],
    found: AnyProblem,
    small: AnyProblem,
) -> None:
    for line in failures:
        click.echo(f"failed: {line}")
    if found != small:
        click.echo(f"found as: {found}")
    click.echo(f"reproduce: {small.to_repro(spec)}{run.schedule}")


def _memory_table(report: MemoryReport, seconds: float) -> Table:
    from ..tables import table

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

    from ..tables import table

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
            f"{OUT_COSINE_TOLERANCE:.0e}; lse within {LSE_ABS_TOLERANCE:.0e} or relative {LSE_REL_TOLERANCE:.1e}. "
            "Absolute ones and the cosine's are larger where scores or latents are"
            + (", and where rounds are merged" if kernel == "prefill" else "")
        ),
    )
