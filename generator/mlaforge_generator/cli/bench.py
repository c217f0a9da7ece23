"""`bench`: the kernels, timed beside others."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..cost import decode_energy
from ..emit import write_folder
from ..errors import SpecError
from ..plan import make_plan
from ..render import render
from ..spec import Spec
from ..target import TARGETS
from . import devices
from .group import COUNT, DeviceFailure, Failure, ToolchainFailure, cli
from .inputs import complete_spec, make_folders
from .output import WIDE, print_json, replace_text, status, steps, writing

if TYPE_CHECKING:
    from mlaforge.bench.cases import Case, PrefillCase
    from mlaforge.bench.session import Options, Session
    from mlaforge.manifest import Manifest


@cli.command()
@click.argument("spec", metavar="SPEC|DIR", shell_complete=complete_spec)
@click.option(
    "--suite",
    "suites",
    multiple=True,
    metavar="NAME",
    help="burst, small or sustained of decode; prefill; memory. May be repeated.  "
    "[default: burst, or none with --energy]",
)
@click.option(
    "--peers",
    "peer_names",
    metavar="NAME,...",
    help="Peers to compare with, or none.  [default: all that can be imported]",
)
@click.option(
    "--shapes",
    multiple=True,
    metavar="BxS,...",
    help="Batch x tokens, cached in decode, as in 128x4096; not the suites'.",
)
@click.option("--heads", multiple=True, metavar="N,...", help="Heads, instead of the suites'.")
@click.option("--s-q", multiple=True, metavar="N,...", help="Query tokens of decode, instead of the suites'.")
@click.option("--repeats", type=COUNT, default=30, show_default=True, help="Timed calls of each kernel and shape.")
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
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, all else to stderr.")
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
    as_json: bool,
    output: Path | None,
) -> None:
    """Time the kernels on a GPU, beside other kernels and the machine's ceilings.

    Ours and each peer that can be imported run on the same tensors in turn. burst and small: decode, medians of
    separate calls, each a replayed graph on a cold L2; prefill, and memory (gather, append and merge beside a copy of
    as many bytes by a kernel of torch): the same. sustained: decode, seconds of calls back to back, with watts, clock
    and energy.
    The peers of decode: flashmla, flashmla_vllm, fa3_vllm, flashinfer, triton_vllm, triton_sglang, torch; with a cache
    of fp8_e4m3: flashmla_fp8, flashmla_vllm_fp8, flashinfer_fp8kv; of prefill: fa3, fa3_vllm, fa3_fwd, flashinfer,
    torch.
    Decode of a quantised cache is also timed beside our own of the same tokens in a bf16 one.
    """
    from mlaforge.bench.cases import (
        MEMORY,
        PREFILL,
        choose_suites,
        memory_cases,
        parse_counts,
        parse_shapes,
        prefill_cases,
    )

    try:
        wanted = [name for text in suites for name in text.split(",")] or ([] if energy else ["burst"])
        own_shapes, own_heads = parse_shapes(shapes), parse_counts(heads)
        chosen = choose_suites(wanted, own_shapes, own_heads, parse_counts(s_q))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    with tempfile.TemporaryDirectory(prefix="mlaforge-") as scratch:
        (folder,) = make_folders([spec], Path(scratch))
        devices.require_torch()
        from mlaforge.bench.session import Options
        from mlaforge.manifest import read_manifest

        peers = Options().peers
        names = peers if peer_names is None else tuple(name for name in peer_names.split(",") if name != "none")
        if unknown := [name for name in names if name not in peers]:
            raise click.UsageError(f"no such peer: {', '.join(unknown)}; there are {', '.join(peers)}")
        prefill: tuple[PrefillCase, ...] = ()
        manifest = read_manifest(folder)
        if PREFILL in wanted:
            if "prefill" not in manifest.kernels:
                raise click.UsageError(f"{manifest.name} has no prefill kernel: `mlaforge plan` says why")
            heads_here = int(manifest.model["num_attention_heads"]) // manifest.tensor_parallel
            prefill = prefill_cases(heads_here, own_shapes, own_heads)
        if reason := devices.why_no_hopper("cuda"):
            raise DeviceFailure(f"{reason}; a bench needs one")
        options = Options(
            chosen,
            names,
            repeats,
            seconds,
            budget=budget,
            energy=energy,
            prefill=prefill,
            memory=memory_cases() if MEMORY in wanted else (),
        )
        bf16 = _bf16_folder(manifest, Path(scratch)) if chosen and manifest.cache.quantised else None
        _bench(folder, bf16, options, output or Path(f"bench-{folder.resolve().name}"), as_json)


def _bf16_folder(manifest: Manifest, scratch: Path) -> Path | None:
    """Render the kernels of the same model and pages with a bf16 cache; None, and says why, if there are none."""
    spec = Spec.model_validate(
        {
            "name": manifest.name,
            "model": dict(manifest.model),
            "tensor_parallel": manifest.tensor_parallel,
            "cache": {"dtype": "bf16", "page_size": manifest.cache.page_size},
        }
    )
    try:
        files = render(make_plan(spec))
    except SpecError as error:
        click.echo(f"no decode of a bf16 cache beside: {error.problems[0].message}", err=True)
        return None
    folder = scratch / "bf16" / manifest.name
    write_folder(folder, files)
    return folder


def _bench(folder: Path, bf16: Path | None, options: Options, output: Path, as_json: bool) -> None:
    import torch

    import mlaforge
    from mlaforge.bench.machine import Machine, energy_source
    from mlaforge.bench.power import Nvml, NvmlError
    from mlaforge.bench.session import BenchError, Session
    from mlaforge.bench.timing import Gpu
    from mlaforge.compiler import CompileError
    from mlaforge.launch import Cuda
    from mlaforge.toolchain import ToolchainError

    tell = functools.partial(click.echo, err=as_json)
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        with status("compiling"):
            mla = mlaforge.load(folder)
            beside = None if bf16 is None else mlaforge.load(bf16)
            manifest = mla.manifest
            gpu = Gpu(device)
            machine = Machine(Cuda(), device, gpu.sms, folder, manifest.d_qk)
    except (CompileError, ToolchainError) as error:
        raise ToolchainFailure(str(error)) from None
    about: dict[str, Any] = {
        "kernel": _first_line(manifest.sources[0]),
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
            raise DeviceFailure(f"--energy needs power readings: {error}") from None
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    with steps() as (advance, total):
        session = Session(
            mla,
            gpu,
            options,
            machine=machine,
            meter=meter,
            about=about,
            predict=lambda case: _predict(manifest, case),
            report=tell,
            advance=advance,
            save=lambda result: replace_text(output / "bench.json", json.dumps(result, indent=1) + "\n"),
            bf16=beside,
        )
        total(session.steps)
        try:
            session.run()
        except BenchError as error:
            stopped: BenchError | None = error
        else:
            stopped = None
    _show_bench(session, output, tell)
    if session.energy is not None:
        cap = about.get("power_limit_watts", TARGETS[manifest.target].energy.power_cap_watts)
        tell(f"for the planner's table of this GPU:\n{energy_source(session.energy, cap)}")
    if as_json:
        print_json(session.result)
    if stopped is not None:
        raise Failure(f"stopped: {stopped}; what was measured before is in {output}")


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
        row_bytes=manifest.cache.row_bytes,
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


def _show_bench(session: Session, output: Path, tell: Callable[[str], None]) -> None:
    """Print the tables, and write them and the plots beside the data."""
    import io

    from rich.console import Console

    from mlaforge.bench.roofline import to_svg
    from mlaforge.bench.session import OURS

    from ..bench_tables import bench_tables

    result = session.result
    text = io.StringIO()
    console = Console(file=text, highlight=False, width=WIDE)
    for part in bench_tables(result, OURS):
        console.print(part)
    tell(text.getvalue())
    replace_text(output / "bench.txt", text.getvalue())
    for mode in ("burst", "sustained"):
        if (picture := to_svg(result, mode)) is not None:
            replace_text(output / f"roofline_{mode}.svg", picture)
    tell(f"{output}: {', '.join(sorted(path.name for path in output.iterdir()))}")
