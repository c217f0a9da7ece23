"""The committed folders are, to the byte, what the shipped specs give."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlaforge_generator.emit import diff_folder
from mlaforge_generator.plan import make_plan
from mlaforge_generator.render import render
from mlaforge_generator.spec import load_spec

ROOT = Path(__file__).resolve().parents[1]
SPECS = sorted((ROOT / "specs").glob("*.yaml"))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_folder_is_what_its_spec_gives(path: Path) -> None:
    plan = make_plan(load_spec(path))
    folder = ROOT / "generated" / plan.spec.name
    files = render(plan)
    assert diff_folder(folder, files) == "", "run: mlaforge generate"
    assert {name: (folder / name).read_bytes() for name in files} == {
        name: text.encode() for name, text in files.items()
    }
    assert {entry.name for entry in folder.iterdir()} == set(files)


def test_a_folder_for_each_spec_and_no_other() -> None:
    names = {load_spec(path).name for path in SPECS}
    assert names == {path.stem for path in SPECS}, "a shipped spec is called by its file's name"
    assert {entry.name for entry in (ROOT / "generated").iterdir()} == names
