"""Rendered text to folders: written only where it differs, or compared for drift."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path


def write_folder(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Write the files of a folder and remove those that are no longer generated; give the paths that changed."""
    folder.mkdir(parents=True, exist_ok=True)
    changed = []
    for path in _stale(folder, files):
        path.unlink()
        changed.append(path)
    for name, text in files.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != text.encode():
            path.write_bytes(text.encode())
            changed.append(path)
    return changed


def diff_folder(folder: Path, files: Mapping[str, str]) -> str:
    """Give the unified diff from a folder to what it should hold; empty if they agree."""
    parts: list[str] = []
    for name, text in files.items():
        path = folder / name
        found = path.read_bytes() if path.is_file() else None
        if found != text.encode():
            # What is damaged need not be UTF-8.
            shown = (found or b"").decode(errors="replace")
            parts += difflib.unified_diff(
                shown.splitlines(keepends=True), text.splitlines(keepends=True), str(path), f"generated {name}"
            )
    parts += [f"{path}: no longer generated\n" for path in _stale(folder, files)]
    return "".join(parts)


def _stale(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Generated kinds of files that the folder holds and should not."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.suffix in {".cu", ".cuh", ".json"} and p.name not in files)
