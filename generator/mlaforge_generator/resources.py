"""Where the templates and the shipped specs are: in the wheel, or in the checkout beside the source roots."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _data(name: str) -> Path:
    packaged = _HERE / "_data" / name
    return packaged if packaged.is_dir() else _HERE.parents[1] / name


def template_dir() -> Path:
    """Folder of the templates."""
    return _data("templates")


def spec_dir() -> Path:
    """Folder of the shipped specs."""
    return _data("specs")


def find_spec(name: str) -> Path:
    """Path of a spec given as a file, or by the name of a shipped one. A name without a file stays as it is."""
    shipped = spec_dir() / f"{name}.yaml"
    return shipped if "/" not in name and not name.endswith((".yaml", ".yml")) and shipped.is_file() else Path(name)
