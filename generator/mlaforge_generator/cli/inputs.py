"""Specs and generated folders, as they are named on the command line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from ..emit import write_folder
from ..errors import Problem as SpecProblem
from ..errors import SpecError
from ..plan import Plan, make_plan
from ..render import render
from ..resources import find_spec, shipped, why_unknown
from ..spec import load_spec
from .group import UsageFailure
from .output import writing


def complete_spec(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a shipped spec, or else of a file."""
    names = [CompletionItem(name) for name in shipped() if name.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="file")]


def make_plans(specs: Iterable[str]) -> list[Plan]:
    """Plan specs, or fail with all the faults of all of them."""
    plans: list[Plan] = []
    problems: list[SpecProblem] = []
    unknown: list[str] = []
    for name in specs:
        path = find_spec(name)
        if reason := why_unknown(name, path):
            unknown.append(reason)
            continue
        try:
            plans.append(make_plan(load_spec(path)))
        except SpecError as error:
            problems += error.problems
    names = [made.spec.name for made in plans]
    unknown += [f"{name}: two specs have this name" for name in sorted({n for n in names if names.count(n) > 1})]
    if problems or unknown:
        raise UsageFailure("\n".join([*unknown, *map(str, problems)]))
    return plans


@dataclass(frozen=True)
class Generated:
    """A folder of kernels that was brought up to date."""

    folder: Path
    files: int
    written: tuple[str, ...]
    """Names of the files that changed."""

    def __str__(self) -> str:
        done = f"{len(self.written)} of {self.files} files written" if self.written else "up to date"
        return f"{self.folder}: {done}"

    def to_json(self) -> dict[str, Any]:
        """Give it as plain data."""
        return {"folder": str(self.folder), "files": self.files, "written": list(self.written)}


def write_generated(made: Plan, output: Path) -> Generated:
    """Write a plan's kernels into a folder of its name under `output`."""
    folder = output / made.spec.name
    files = render(made)
    with writing(folder):
        changed = write_folder(folder, files)
    return Generated(folder, len(files), tuple(path.name for path in changed))


def make_folders(specs: Sequence[str], scratch: Path) -> list[Path]:
    """Give the folders of specs, each with its manifest and files; those of YAML are rendered into `scratch`."""
    folders = {name: Path(name) for name in specs if os.path.isdir(name)}
    if folders:
        _check_folders(folders.values())
    rest = [name for name in specs if name not in folders]
    for name, made in zip(rest, make_plans(rest), strict=True):
        folders[name] = scratch / made.spec.name
        write_folder(folders[name], render(made))
    return [folders[name] for name in specs]


def _check_folders(folders: Iterable[Path]) -> None:
    """Fail with all that is wrong with folders that are said to be generated ones."""
    from mlaforge.manifest import ManifestError, read_manifest

    wrong: list[str] = []
    for folder in folders:
        try:
            manifest = read_manifest(folder)
        except ManifestError as error:
            wrong.append(str(error))
        else:
            missing = [source for source in manifest.sources if not os.path.isfile(source)]
            wrong += [f"{source}: missing; generate the folder again" for source in missing]
    if wrong:
        raise UsageFailure("\n".join(wrong))
