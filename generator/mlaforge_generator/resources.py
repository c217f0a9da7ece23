"""Where the templates and the shipped specs are: in the wheel, or in the checkout beside the source roots."""

from __future__ import annotations

import os
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
    # os.path: a name that is too long is that of no file, and no error.
    is_name = "/" not in name and not name.endswith((".yaml", ".yml"))
    return shipped if is_name and os.path.isfile(shipped) else Path(name)


def shipped() -> list[str]:
    """Give the names of the shipped specs, sorted."""
    return sorted(path.stem for path in spec_dir().glob("*.yaml"))


def why_unknown(name: str, path: Path) -> str | None:
    """Say that a name, of which `find_spec` made a path, is neither a file's nor a shipped spec's; None if it is."""
    if os.path.exists(path) or path.name != name or path.suffix:
        return None
    return f"{name}: neither a file nor a shipped spec; shipped are {', '.join(shipped())}"
