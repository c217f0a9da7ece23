"""`tune`: the fastest of what a spec leaves open, or the threshold between a layer's two ways."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..candidates import Sweep, Value, enumerate_candidates
from ..emit import write_folder
from ..errors import SpecError
from ..plan import make_plan
from ..resources import find_spec, why_unknown
from ..spec import parse_spec
from ..write_back import tuned_remarks, write_back
from ..yaml_source import read_bytes
from . import devices
from .group import COUNT, DeviceFailure, Failure, ToolchainFailure, UsageFailure, cli
from .inputs import complete_spec
from .output import print_json, replace_text, status, steps, writing
from .tune_threshold import Grid, require_both_ways, tune_threshold
from .tuned import Output, Source, abandon, as_text, choose_gpu, first_error, open_gpu

if TYPE_CHECKING:
    from mlaforge.bench.cases import Case
    from mlaforge.bench.tune import Candidate as TuneCandidate
    from mlaforge.bench.tune import Options as TuneOptions

_OF_DECODE = {
    "sweep": "--sweep",
    "suites": "--suite",
    "shapes": "--shapes",
    "heads": "--heads",
    "s_q": "--s-q",
    "examples": "--examples",
}
_OF_THRESHOLD = {"tokens": "--tokens", "contexts": "--contexts"}


@cli.command()
@click.argument("spec", shell_complete=complete_spec)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where the tuned spec goes.  [default: NAME.yaml in the folder of --data]",
)
@click.option("--write", is_flag=True, help="Write the tuned spec over SPEC, which must be a file of yours.")
@click.option(
    "--threshold",
    is_flag=True,
    help="Find dispatch.prefill_absorption_threshold instead, by --tokens and --contexts.",
)
@click.option(
    "--tokens",
    multiple=True,
    metavar="N,...",
    help="With --threshold: new tokens of a request.  [default: 1 to 2048, 15 numbers]",
)
@click.option(
    "--contexts",
    multiple=True,
    metavar="N,...",
    help="With --threshold: tokens cached before.  [default: 0,1024,4096,16384,65536]",
)
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
@click.option("--repeats", type=COUNT, default=30, show_default=True, help="Timed calls of each candidate and shape.")
@click.option(
    "--budget",
    type=click.FloatRange(min=1.0),
    metavar="SECONDS",
    help="Of the whole run: lowers repeats to keep it, and drops neither shape nor candidate.",
)
@click.option(
    "--examples",
    type=COUNT,
    default=24,
    show_default=True,
    help="Small random problems that a candidate must solve before it is timed.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Which random problems.")
@click.option(
    "--patience",
    type=click.FloatRange(min=1.0),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="What does not end within this time hangs: it is named, and the tuner ends.",
)
@click.option("--device", default="cuda", show_default=True, help="A CUDA device, such as cuda:1.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, the progress to stderr.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where tune.json, tune.txt and tune.svg go, or threshold.*.  [default: tune-NAME, threshold-NAME]",
)
@click.pass_context
def tune(
    context: click.Context,
    spec: str,
    output: Path | None,
    write: bool,
    threshold: bool,
    tokens: tuple[str, ...],
    contexts: tuple[str, ...],
    sweep: str | None,
    suites: tuple[str, ...],
    shapes: tuple[str, ...],
    heads: tuple[str, ...],
    s_q: tuple[str, ...],
    repeats: int,
    budget: float | None,
    examples: int,
    seed: int,
    patience: float,
    device: str,
    as_json: bool,
    data: Path | None,
) -> None:
    """Find the fastest of what a spec leaves to the planner, on this GPU.

    Builds every setting of the open fields of kernels.decode, compares each one's results with float64, on small
    problems and on the shapes, and times all of them in turn, each call a replayed graph on a cold L2. The one whose
    medians have the least geometric mean is written into a copy of the spec, with its measurements as a comment, unless
    the planner's own choice is within 1% of it.

    A candidate whose results are wrong is named and excluded, and the exit code is 1. One that hangs is named and ends
    the run. What can't be planned or compiled is listed with the reason. Ctrl-C keeps what was measured, but writes no
    spec.

    With --threshold the two ways of an attention layer are timed instead, over new tokens of a request and contexts:
    absorbed, by the decode kernel, and decompressed, by the prefill kernel, each with its products with W_UK and W_UV.
    The threshold with the least mean loss against the faster way at each point goes into the spec, and is shown beside
    128, 256 and 512.
    """
    started = time.perf_counter()
    if write and output is not None:
        raise click.UsageError("--write and --output exclude each other")
    if device == "sim":
        raise click.UsageError("--device sim: the simulator counts no time, and only a Hopper GPU can be tuned for")
    for name, option in (_OF_DECODE if threshold else _OF_THRESHOLD).items():
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"{option} {'has no effect with' if threshold else 'needs'} --threshold")
    path = find_spec(spec)
    if reason := why_unknown(spec, path):
        raise UsageFailure(reason)
    if os.path.isdir(path):
        raise UsageFailure(f"{spec}: is a folder; only a spec can be tuned")
    if write and path != Path(spec):
        raise click.UsageError(f"--write would change the shipped {path.name}; give the path of a file, or -o FILE")
    try:
        text = read_bytes(path)
        parsed = parse_spec(text, str(path))
    except SpecError as error:
        raise UsageFailure(str(error)) from None
    folder = data or Path(f"{'threshold' if threshold else 'tune'}-{parsed.name}")
    target = path.resolve() if write else output or folder / f"{parsed.name}.yaml"
    if not write and target.resolve() == path.resolve():
        raise click.UsageError(f"{target} is the spec itself; say --write to change it")
    source = Source(spec, path, parsed.name, text)
    if threshold:
        grid = Grid.parse(tokens, contexts, repeats, budget, seed, patience)
        try:
            plan = make_plan(parsed)
        except SpecError as error:
            raise UsageFailure(str(error)) from None
        require_both_ways(source, plan)
        _require_gpu(device)
        tune_threshold(source, plan, grid, device, started, Output(folder, target, as_json, over=write))
        return
    cases = _tune_cases(suites, shapes, heads or (str(parsed.heads_per_rank),), s_q or ("1",))
    try:
        swept = enumerate_candidates(parsed, [name for name in (sweep or "").split(",") if name])
    except ValueError as error:
        raise UsageFailure(f"{spec}: {error}") from None
    if not swept.buildable:
        reasons = dict.fromkeys(str(each.reason) for each in swept.candidates)
        raise UsageFailure("\n".join(f"{spec}: nothing can be built: {reason}" for reason in reasons))
    # Better now than when all is measured.
    _edited(source, swept.candidates[-1].settings)
    _require_gpu(device)
    from mlaforge.bench.tune import Options

    options = Options(tuple(cases), repeats, budget, examples=examples, seed=seed, patience=patience)
    _tune(source, swept, options, device, started, Output(folder, target, as_json, over=write))


def _require_gpu(device: str) -> None:
    devices.require_torch()
    if reason := devices.why_no_hopper(device):
        raise DeviceFailure(f"{reason}; tuning needs a Hopper GPU to time on, and the simulator counts no time")


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


def _tune(source: Source, swept: Sweep, options: TuneOptions, device_name: str, started: float, output: Output) -> None:
    from mlaforge.bench.session import BenchError
    from mlaforge.bench.tune import Tuning

    device = choose_gpu(device_name)
    with tempfile.TemporaryDirectory(prefix="mlaforge-") as scratch:
        # Kernels are read when they are first called, so the folders stay until the end.
        candidates = _build(swept, Path(scratch), output.tell)
        if all(each.mla is None for each in candidates):
            reasons = dict.fromkeys(f"{each.label}: {each.reason}" for each in candidates)
            raise ToolchainFailure("\n".join(reasons))
        gpu, about = open_gpu(device)
        with writing(output.folder):
            output.folder.mkdir(parents=True, exist_ok=True)
        with steps() as (advance, total):
            tuning = Tuning(
                source.name,
                candidates,
                gpu,
                options,
                about=about,
                started=started,
                report=output.tell,
                advance=advance,
                save=lambda result: replace_text(output.folder / "tune.json", json.dumps(result, indent=1) + "\n"),
                abandon=lambda: abandon(lambda: _show_tune(source, tuning.result, output), Path(scratch)),
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
    with status(f"compiling {len(folders)} candidates"), warnings.catch_warnings():
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
                        mla, reason = None, f"does not compile: {first_error(error.log)}"
                made.append(Candidate(each.label, each.settings, mla, reason, each.planner, reports, each.same))
        except ToolchainError as error:
            raise ToolchainFailure(str(error)) from None
    return made


def _show_tune(source: Source, result: dict[str, Any], output: Output) -> None:
    """Print and write the result, and fail if a candidate was wrong or the run was stopped."""
    from mlaforge.bench.tune_plot import to_svg
    from mlaforge.verify import Problem

    from ..tune_tables import tune_tables

    folder = output.folder
    text = as_text(tune_tables(result))
    output.tell(text)
    files = {"tune.txt": text}
    if (picture := to_svg(result)) is not None:
        files["tune.svg"] = picture
    failures = []
    for each in result["candidates"]:
        if each["state"] in ("wrong", "hangs"):
            # A spec of just these settings, for the line that replays it.
            name = f"wrong_{re.sub(r'[^a-z0-9]+', '_', each['label'])}.yaml"
            files[name] = _edited(source, each["settings"])
            output.tell(f"reproduce: {Problem.parse(each['problem']).to_repro(str(folder / name))}")
            if each["state"] == "wrong":
                failures.append(f"{each['label']}: wrong results")
    for name, content in files.items():
        replace_text(folder / name, content)
    output.tell(f"{folder}: {', '.join(sorted([*files, 'tune.json']))}")
    stopped, winner = result["stopped"], result["winner"]
    if stopped is not None:
        failures.append(f"stopped: {stopped}; what was measured before is in {folder}, and no spec was written")
    elif winner is None:
        failures.append("no candidate is right; no spec was written")
    else:
        output.tell(f"winner: {winner}: {result['why']}")
        settings = next(each["settings"] for each in result["candidates"] if each["label"] == winner)
        failures += output.write_spec(source, _edited(source, settings, tuned_remarks(result)))
    if output.as_json:
        print_json(result)
    if failures:
        raise Failure("\n".join(failures))


def _edited(source: Source, settings: Mapping[str, Value], remarks: Sequence[str] = ()) -> str:
    return source.edited(lambda text: write_back(text, settings, remarks))
