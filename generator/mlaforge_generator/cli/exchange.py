"""`import` and `export`: specs from and to the files of others. No torch, no CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from ..errors import SpecError
from ..exchange.c_header import write_header
from ..exchange.cmake import write_cmake
from ..exchange.draft import ForeignFileError, parse_setting
from ..exchange.imports import import_file
from ..exchange.plugin_json import write_plugin
from ..plan import Plan, make_plan
from .group import COUNT, UsageFailure, cli
from .inputs import complete_spec, make_plans
from .output import print_json, replace_text, writing


@cli.command(name="import")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="SPEC.yaml",
    help="Where the spec goes.  [default: standard output]",
)
@click.option("--name", help="Name of the spec.  [default: the one in FILE, if a spec may have it]")
@click.option("--tensor-parallel", type=COUNT, metavar="N", help="Ranks that the heads are split over.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="A dotted field of the spec, such as model.v_head_dim=128, in place of what FILE says; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the spec, and what is not in it, as JSON.")
def import_(
    file: Path,
    output: Path | None,
    name: str | None,
    tensor_parallel: int | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make a spec from a model's config.json, a plugin's JSON or a C header.

    FILE is the config.json of a Hugging Face model, a JSON with an mla_plugin in the manner of TensorRT-LLM, or a C
    header of constants such as kNumHeads. What it says beyond a spec is listed on stderr and in a comment of the spec.
    """
    try:
        imported = import_file(file, _settings(settings, name, tensor_parallel))
    except ForeignFileError as error:
        raise UsageFailure(str(error)) from None
    problems: list[str] = []
    try:
        make_plan(imported.spec)
    except SpecError as error:
        problems = [f"{problem.field}: {problem.message}" for problem in error.problems]
    if not as_json:
        for note in imported.notes:
            click.echo(f"not in the spec: {note}", err=True)
        if imported.others:
            click.echo(f"no part of a spec: {', '.join(imported.others)}", err=True)
        for problem in problems:
            click.echo(f"no kernels can be planned of it yet: {problem}", err=True)
    if output is not None:
        with writing(output):
            output.parent.mkdir(parents=True, exist_ok=True)
        replace_text(output, imported.text)
    if as_json:
        print_json(
            {
                "file": None if output is None else str(output),
                "spec": imported.spec.model_dump(),
                "text": imported.text,
                "not_in_the_spec": list(imported.notes),
                "no_part_of_a_spec": list(imported.others),
                "not_planned": problems,
            }
        )
    elif output is None:
        click.echo(imported.text, nl=False)
    else:
        click.echo(f"{output}: written")


def _settings(settings: tuple[str, ...], name: str | None, tensor_parallel: int | None) -> Mapping[str, object]:
    given: dict[str, object] = {}
    for setting in settings:
        target, equals, text = setting.partition("=")
        if not (target and equals):
            raise click.UsageError(f"--set {setting}: must be FIELD=VALUE")
        given[target] = parse_setting(target, text)
    if name is not None:
        given["name"] = name
    if tensor_parallel is not None:
        given["tensor_parallel"] = tensor_parallel
    return given


@cli.command()
@click.argument("spec", shell_complete=complete_spec)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["trtllm-json", "c-header", "cmake"]),
    required=True,
    help="NAME.json, an mla_plugin in the manner of TensorRT-LLM; NAME.h, constants; or NAME, a folder for CMake.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    required=True,
    help="Where the file or the folder goes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the paths of the files as JSON.")
def export(spec: str, kind: str, output: Path, as_json: bool) -> None:
    """Write a spec for programs that are not mlaforge.

    As the JSON of a plugin or as a C header, from which `mlaforge import` makes the same spec again; or as a folder
    that a C++ project adds with CMake: the kernels as cubins in a library, and their launches as a C header.
    """
    (made,) = make_plans([spec])
    files = _export(made, kind)
    for name, text in files.items():
        path = output / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="")
    if as_json:
        print_json({"spec": made.spec.name, "format": kind, "files": [str(output / name) for name in files]})
        return
    first = next(iter(files))
    where = output / made.spec.name if kind == "cmake" else output / first
    click.echo(f"{where}: {len(files)} files written" if kind == "cmake" else f"{where}: written")


def _export(made: Plan, kind: str) -> Mapping[str, str]:
    """Give the files of an export, by their paths."""
    name = made.spec.name
    if kind == "cmake":
        return {f"{name}/{path}": text for path, text in write_cmake(made).items()}
    if kind == "trtllm-json":
        return {f"{name}.json": write_plugin(made)}
    return {f"{name}.h": write_header(made)}
