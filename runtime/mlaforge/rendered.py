"""Rendered kernels' text, in folders of the cache directory that are named by their content.

A folder is published whole by a rename, and its text is compared before it is used; a damaged one is written anew. A
process that has got a folder holds a lock on it for as long as it lives, for it reads kernels when they are first
called: what is in use is not removed.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlaforge.cache import LEFTOVER_SECONDS, default_directory, is_trusted, same_file

_FOLDER = re.compile(r"(?P<name>[a-z][a-z0-9_]{0,63})-(?P<digest>[0-9a-f]{16})")
_LEFTOVER = re.compile(r"\.[a-z0-9_]{8}")
"""What mkdtemp makes for a folder that is being written or removed."""
_TRIES = 5
"""What is published may be removed at once, when a cache is cleared; hardly twice."""
_REMOVAL_SECONDS = 0.01

_held: dict[Path, int] = {}
"""Descriptors with a lock on the folders that this process uses."""
_temporary: dict[str, Path] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Rendered:
    """A folder of the cache."""

    name: str
    """Of the spec, or of what else was rendered."""
    key: str
    """The digest in the folder's name."""
    path: Path
    bytes: int
    written: float
    """Seconds since the epoch."""

    def is_whole(self) -> bool:
        """Read the files again, and tell whether they are those of the key."""
        try:
            texts = {path.name: path.read_bytes().decode() for path in self.path.iterdir()}
        except (OSError, ValueError):
            return False
        return _digest(texts) == self.key


def materialise(name: str, files: Mapping[str, str]) -> Path:
    """Put rendered files in a folder of the cache directory, named by their content; give the folder.

    Where the cache can't be used it is a folder elsewhere, which goes with this process.
    """
    cache, digest = default_directory(), _digest(files)
    if cache is not None:
        folder = _parent(cache) / f"{name}-{digest}"
        for _ in range(_TRIES):
            # What is in it is compiled and run: nobody else may change it between now and then.
            if not all(is_trusted(each) for each in (cache, folder.parent, folder)):
                break
            if _hold(folder) and _holds_all(folder, files):
                return folder
            # A directory that is read-only, or full, is no reason not to go on.
            try:
                _publish(folder, files)
            except OSError:
                break
    with _lock:
        if digest not in _temporary or not _holds_all(_temporary[digest], files):
            made = Path(tempfile.mkdtemp(prefix=f"mlaforge-{name}-"))
            atexit.register(_remove_temporary, made, os.getpid())
            _write(made, files)
            _temporary[digest] = made
        return _temporary[digest]


def stored(cache: Path | None) -> list[Rendered]:
    """List the folders of a cache directory, newest first. Whatever else is there is none of them.

    Raises:
        OSError: the directory can't be read; one that is not there yet is empty.
    """
    found = []
    for path, match in _folders(cache, _FOLDER):
        with contextlib.suppress(FileNotFoundError):
            status = [each.lstat() for each in path.iterdir()]
            size = sum(each.st_size for each in status)
            found.append(Rendered(match["name"], match["digest"], path, size, path.lstat().st_mtime))
    return sorted(found, key=lambda each: (-each.written, each.name, each.key))


def clear(cache: Path | None, before: float | None = None) -> tuple[list[Rendered], list[Rendered]]:
    """Remove folders, and what killed processes left behind; give those removed, and those that are in use and stay.

    Args:
        cache: the cache directory.
        before: only folders that were written before, in seconds since the epoch; all if None.

    Raises:
        OSError: a folder can't be removed.
    """
    removed: list[Rendered] = []
    in_use: list[Rendered] = []
    for each in stored(cache):
        if before is None or each.written < before:
            (removed if _remove(each.path) else in_use).append(each)
    deadline = time.time() - LEFTOVER_SECONDS
    for path, _ in _folders(cache, _LEFTOVER):
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_mtime < deadline:
                shutil.rmtree(path)
    return removed, in_use


def _parent(cache: Path) -> Path:
    return cache / "generated"


def _digest(files: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file}\0{len(files[file])}\0{files[file]}".encode())
    return digest.hexdigest()[:16]


def _folders(cache: Path | None, pattern: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    """Give the folders whose whole name is of a form; a link is none of ours."""
    if cache is None:
        return
    try:
        paths = list(_parent(cache).iterdir())
    except FileNotFoundError:
        return
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            if (match := pattern.fullmatch(path.name)) and stat.S_ISDIR(path.lstat().st_mode):
                yield path, match


def _open(folder: Path, operation: int) -> int | None:
    """Open a folder and lock it; None if it is not there, or if somebody has a lock that excludes this one."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        # A file system without locks: nobody can tell who uses what.
        pass
    if not same_file(descriptor, folder):
        os.close(descriptor)
        return None
    return descriptor


def _hold(folder: Path) -> bool:
    """Keep a folder from being removed for as long as this process lives. Tells whether it is there."""
    with _lock:
        if folder in _held:
            if same_file(_held[folder], folder):
                return True
            os.close(_held.pop(folder))
        descriptor = _open(folder, fcntl.LOCK_SH)
        if descriptor is not None:
            _held[folder] = descriptor
        return descriptor is not None


def _remove(folder: Path) -> bool:
    """Remove a folder that nobody uses; tells whether it is gone."""
    descriptor = _open(folder, fcntl.LOCK_EX)
    if descriptor is None:
        return not os.path.lexists(folder)
    try:
        # Aside first: who wants it meanwhile finds the whole of it or nothing.
        aside = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
        try:
            folder.rename(aside / folder.name)
        finally:
            shutil.rmtree(aside)
    finally:
        os.close(descriptor)
    return True


def _publish(folder: Path, files: Mapping[str, str]) -> None:
    """Write a folder aside and rename it: another process never sees half of it."""
    # One by one, for the mode is only that of the last: a cache that others can write to is none.
    for each in (folder.parent.parent, folder.parent):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        _write(aside, files)
        try:
            aside.rename(folder)
        except OSError:
            if not _hold(folder):
                # It is being removed: the next time it is not there.
                time.sleep(_REMOVAL_SECONDS)
                return
            # Somebody was faster, or the folder was damaged: its files are what they must be, or are made so.
            for file in files:
                os.replace(aside / file, folder / file)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")


def _holds_all(folder: Path, files: Mapping[str, str]) -> bool:
    try:
        return all((folder / file).read_bytes() == text.encode() for file, text in files.items())
    except OSError:
        return False


def _remove_temporary(folder: Path, process: int) -> None:
    # A child that was forked ends before its parent, which still needs it.
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
