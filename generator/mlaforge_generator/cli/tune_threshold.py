"""`tune --threshold`: up to how many new tokens a layer should attend in the latent space."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..emit import write_folder
from ..plan import Plan
from ..render import render
from ..write_back import threshold_remarks, write_threshold
from .group import Failure, ToolchainFailure, UsageFailure
from .output import print_json, replace_text, status, steps, writing
from .tuned import Output, Source, abandon, as_text, choose_gpu, first_error, open_gpu

if TYPE_CHECKING:
    from mlaforge.api import MLA

_MOST_TOKENS, _MOST_CONTEXT = 1 << 16, 1 << 22


@dataclasses.dataclass(frozen=True)
class Grid:
    """What is measured; empty: what is usual."""

    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    repeats: int
    budget: float | None
    seed: int
    patience: float

    @classmethod
    def parse(
        cls,
        tokens: Sequence[str],
        contexts: Sequence[str],
        repeats: int,
        budget: float | None,
        seed: int,
        patience: float,
    ) -> Grid:
        """Read the options of the command line."""
        return cls(
            _numbers(tokens, 1, _MOST_TOKENS, "--tokens"),
            _numbers(contexts, 0, _MOST_CONTEXT, "--contexts"),
            repeats,
            budget,
            seed,
            patience,
        )


def _numbers(texts: Sequence[str], least: int, most: int, option: str) -> tuple[int, ...]:
    words = [word for text in texts for word in text.replace(",", " ").split()]
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) < 10 and least <= int(word) <= most):
            raise click.BadParameter(f"{word!r} is not a number from {least} to {most:,}", param_hint=option)
    return tuple(map(int, words))


def require_both_ways(source: Source, plan: Plan) -> None:
    """Fail if a spec has no prefill kernel, or if its text could not take a threshold."""
    if "prefill" not in {kernel.name for kernel in plan.kernels}:
        why = "there is no prefill kernel, so that no threshold has an effect; `mlaforge plan` says why"
        raise UsageFailure(f"{source.given}: {why}")
    source.edited(functools.partial(write_threshold, threshold=0))


def tune_threshold(source: Source, plan: Plan, grid: Grid, device_name: str, started: float, output: Output) -> None:
    """Time both ways at all points, show what came, and write the threshold into the spec."""
    from mlaforge.bench.session import BenchError
    from mlaforge.bench.threshold import CONTEXTS, TOKENS, Options, ThresholdTuning, make_points

    device = choose_gpu(device_name)
    with tempfile.TemporaryDirectory(prefix="mlaforge-") as scratch:
        mla = _load(plan, Path(scratch))
        gpu, about = open_gpu(device)
        points = make_points(grid.tokens or TOKENS, grid.contexts or CONTEXTS, plan.spec.heads_per_rank, gpu.sms)
        options = Options(points, grid.repeats, grid.budget, seed=grid.seed, patience=grid.patience)
        with writing(output.folder):
            output.folder.mkdir(parents=True, exist_ok=True)
        with steps() as (advance, total):
            total(len(points))
            tuning = ThresholdTuning(
                mla,
                gpu,
                options,
                about=about,
                started=started,
                report=output.tell,
                advance=advance,
                save=lambda result: replace_text(output.folder / "threshold.json", json.dumps(result, indent=1) + "\n"),
                abandon=lambda: abandon(lambda: _show(source, tuning.result, output), Path(scratch)),
            )
            # Both leave the reason in the result.
            with contextlib.suppress(BenchError, KeyboardInterrupt):
                tuning.run()
    _show(source, tuning.result, output)


def _load(plan: Plan, scratch: Path) -> MLA:
    import mlaforge
    from mlaforge.compiler import CompileError, compile_many
    from mlaforge.manifest import read_manifest
    from mlaforge.toolchain import ToolchainError

    folder = scratch / plan.spec.name
    write_folder(folder, render(plan))
    try:
        with status("compiling"):
            compile_many(read_manifest(folder).sources)
            return mlaforge.load(folder)
    except CompileError as error:
        raise ToolchainFailure(f"{plan.spec.name} does not compile: {first_error(error.log)}") from None
    except ToolchainError as error:
        raise ToolchainFailure(str(error)) from None


def _show(source: Source, result: dict[str, Any], output: Output) -> None:
    """Print and write the result, and fail if a point failed or the run was stopped."""
    from mlaforge.bench.threshold_plot import to_svg

    from ..threshold_tables import threshold_tables

    folder, found = output.folder, result["found"]
    text = as_text(threshold_tables(result))
    output.tell(text)
    files = {"threshold.txt": text}
    if (picture := to_svg(result)) is not None:
        files["threshold.svg"] = picture
    for name, content in files.items():
        replace_text(folder / name, content)
    output.tell(f"{folder}: {', '.join(sorted([*files, 'threshold.json']))}")
    failures = []
    if result["stopped"] is not None:
        failures.append(f"stopped: {result['stopped']}")
    if result["failed"]:
        failures.append(f"{len(result['failed'])} of {len(result['options']['points'])} points failed")
    if failures:
        # Of part of the grid another threshold might be the best.
        failures.append(f"what was measured is in {folder}, and no spec was written")
    else:
        output.tell(f"found: {found}: {result['why']}")
        edit = functools.partial(write_threshold, threshold=found, remarks=threshold_remarks(result))
        failures += output.write_spec(source, source.edited(edit))
    if output.as_json:
        print_json(result)
    if failures:
        raise Failure("\n".join(failures))
