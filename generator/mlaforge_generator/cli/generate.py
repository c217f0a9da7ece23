"""`plan`, `generate` and `schema`: from a spec to text. No torch, no CUDA."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..cost import (
    DecodeCost,
    DecodeEnergy,
    PrefillCost,
    cache_sizes,
    context_that_fits,
    decode_cost,
    decode_energy,
    prefill_cost,
)
from ..emit import diff_folder
from ..plan import Plan
from ..prefill_plan import PrefillPlan
from ..render import render
from ..resources import shipped, spec_dir
from ..schema import schema_text
from .group import COUNT, Failure, cli
from .inputs import complete_spec, make_plans, write_generated
from .output import print_json, print_parts, reading, writing

if TYPE_CHECKING:
    from rich.table import Table

# Shapes whose floors a plan shows: batch, context, s_q.
_SHAPES = ((1, 65_536, 1), (16, 8_192, 1), (128, 4_096, 1), (128, 8_192, 1), (128, 8_192, 2))
# The same for prefill: sequences, tokens.
_PREFILL_SHAPES = ((16, 512), (4, 4_096), (1, 8_192), (1, 131_072))


@cli.command()
@click.argument("spec", shell_complete=complete_spec)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--batch", type=COUNT, help="Requests.  [default: several shapes; 16 for cache sizes]")
@click.option("--context", type=COUNT, help="Tokens of a request: cached, or of a prompt.  [default: several; 65536]")
@click.option("--s-q", type=COUNT, default=None, help="Query tokens of a request.  [default: several]")
@click.option("--heads", type=COUNT, help="Query heads of a rank.  [default: the spec's]")
@click.option("--layers", type=COUNT, help="Layers, for cache sizes.  [default: the spec's, else 1]")
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

    The shared-memory map, barriers, tensor maps, warps, registers and launch; traffic, work and the floor of calls of
    decode and prefill on the target, and the rate and energy when decode goes on for seconds; sizes of the key-value
    cache.
    """
    made = make_plans([spec])[0]
    if batch is context is s_q is None:
        shapes: Sequence[tuple[int, int, int]] = _SHAPES
    else:
        shapes = [(batch or 16, context or 65_536, s_q or 1)]
    costs = [decode_cost(made, batch=b, context=s_k, s_q=q, heads=heads) for b, s_k, q in shapes]
    tiles = [made.decode_for(cost.s_q * cost.heads).tile for cost in costs]
    energies = [
        decode_energy(
            made.target,
            d_qk=made.spec.d_qk,
            d_v=made.spec.d_v,
            row_bytes=made.spec.row_bytes,
            tile_rows=tile.rows,
            tile_tokens=tile.tokens,
            batch=cost.batch,
            context=cost.context,
            rows=cost.s_q * cost.heads,
        )
        for cost, tile in zip(costs, tiles, strict=True)
    ]
    prompts = _PREFILL_SHAPES if batch is context is None else [(batch or 16, context or 65_536)]
    prefill_costs = _prefill_costs(made, prompts, heads)
    layers = layers or made.spec.model.num_hidden_layers or 1
    batch, context = batch or 16, context or 65_536
    sizes = cache_sizes(made.spec, batch=batch, context=context, layers=layers)
    fits = context_that_fits(made.spec, made.target, layers)
    if as_json:
        derived = ("bytes", "intensity", "padded_intensity", "floor_us", "bound")
        of_prefill = ("intensity", "floor_us", "bound")
        print_json(
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
                "prefill_costs": [
                    {**dataclasses.asdict(cost), **{name: getattr(cost, name) for name in of_prefill}}
                    for cost in prefill_costs
                ],
                "cache_sizes": {
                    "batch": batch,
                    "context": context,
                    "layers": layers,
                    "row_bytes": made.spec.row_bytes,
                    "memory": made.target.memory,
                    "context_that_fits": fits,
                    "kinds": [dataclasses.asdict(size) for size in sizes],
                },
            }
        )
        return
    from ..tables import plan_tables

    workload = f"{batch} x {context:,} tokens, {layers} layers"
    print_parts(plan_tables(made, costs, prefill_costs, sizes, workload, fits))
    print_parts([_energy_table(made, costs, energies)])


def _prefill_costs(made: Plan, shapes: Iterable[tuple[int, int]], heads: int | None) -> list[PrefillCost]:
    """Count prefill calls over sequences of tokens; none if the plan has no such kernel."""
    heads = made.spec.heads_per_rank if heads is None else heads
    return [
        prefill_cost(kernel, made.target, batch=batch, tokens=tokens, heads=heads)
        for kernel in made.kernels
        if isinstance(kernel, PrefillPlan)
        for batch, tokens in shapes
    ]


def _energy_json(energy: DecodeEnergy) -> dict[str, Any]:
    return {**dataclasses.asdict(energy), "nj_per_token": energy.nj_per_token}


def _energy_table(made: Plan, costs: Sequence[DecodeCost], energies: Sequence[DecodeEnergy]) -> Table:
    from ..tables import table

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
    # What decode from codes does beside its products is no small part of its time.
    left_out = "softmax is" if made.spec.layout is None else "softmax and the widening of codes are"
    columns = ("batch>", "context>", "s_q>", "heads>", "HBM>", "L2>", "MMA>", "static>", "nJ/token>", "W>", "us>")
    return table(
        f"Sustained on an {made.target.name}, predicted: energy of a cached token in nJ, and the rate that it allows",
        (*columns, "TFLOP/s>", "GB/s>", "bound by"),
        rows,
        caption=(
            f"{model.power_cap_watts:.0f} W cap, {model.static_watts:.0f} W static; constants measured by "
            f"`mlaforge bench --energy`. L2: row tiles behind the first; {left_out} left out"
        ),
    )


@cli.command()
@click.argument("specs", nargs=-1, metavar="[SPEC]...", shell_complete=complete_spec)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("generated"),
    show_default=True,
    help="Where the folders go, one a spec.",
)
@click.option("--check", is_flag=True, help="Write nothing; print what differs and fail if anything does.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written, or what differs, as JSON.")
def generate(specs: tuple[str, ...], output: Path, check: bool, as_json: bool) -> None:
    """Write the text of kernels.

    Without a SPEC, that of all shipped ones.
    """
    plans = make_plans(specs or shipped())
    if check:
        _check_generated(plans, output, complete=not specs, as_json=as_json)
        return
    done = []
    for made in plans:
        done.append(write_generated(made, output))
        if not as_json:
            click.echo(str(done[-1]))
    if as_json:
        print_json([each.to_json() for each in done])


@cli.command()
@click.option(
    "--format",
    "kind",
    type=click.Choice(["json", "markdown"]),
    default="json",
    show_default=True,
    help="A JSON Schema for editors; or markdown, the reference for people that docs/spec.md is.",
)
@click.option("--check", is_flag=True, help="Compare with FILE and fail if it differs.")
@click.option(
    "-o",
    "--output",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write it to FILE, or compare it with FILE.  [default of --check: the schema beside the shipped specs]",
)
@click.option("--json", "as_json", is_flag=True, help="With --check: print what came of it as JSON.")
def schema(kind: str, check: bool, file: Path | None, as_json: bool) -> None:
    """Print the schema of a spec, for editors or for people."""
    from ..spec_reference import reference_text

    text = schema_text() if kind == "json" else reference_text()
    if check:
        if file is None and kind != "json":
            raise click.UsageError("--check of the reference needs -o FILE")
        path = file or spec_dir() / "schema.json"
        with reading(path):
            found = path.read_bytes() if os.path.isfile(path) else None
        in_step = found == text.encode()
        if as_json:
            print_json({"file": str(path), "up_to_date": in_step})
        if not in_step:
            state = "differs from the code's" if found is not None else "is missing"
            option = "" if kind == "json" else f" --format {kind}"
            raise Failure(f"{path}: the schema {state}; run: mlaforge schema{option} -o {path}")
        if not as_json:
            click.echo(f"{path}: up to date")
    elif file is None:
        click.echo(text, nl=False)
    else:
        with writing(file):
            file.write_text(text, encoding="utf-8", newline="")


def _check_generated(plans: Sequence[Plan], output: Path, *, complete: bool, as_json: bool) -> None:
    drifted: dict[str, str] = {}
    for made in plans:
        folder = output / made.spec.name
        if not os.path.isdir(folder):
            drifted[made.spec.name] = f"{folder}: missing\n"
            continue
        with reading(folder):
            diff = diff_folder(folder, render(made))
        if diff:
            drifted[made.spec.name] = diff
    if complete:
        known = {made.spec.name for made in plans}
        for folder in sorted(path.parent for path in output.glob("*/manifest.json") if path.parent.name not in known):
            drifted[folder.name] = f"{folder}: no shipped spec gives it\n"
    if as_json:
        print_json({"output": str(output), "specs": len(plans), "drifted": drifted})
    else:
        for diff in drifted.values():
            click.echo(diff, nl=False)
    if drifted:
        raise Failure(f"{', '.join(drifted)}: not what the specs give; run: mlaforge generate -o {output}")
    if not as_json:
        click.echo(f"{output}: up to date, {len(plans)} specs")
