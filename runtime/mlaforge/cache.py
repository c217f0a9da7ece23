"""Content-addressed disk cache of compiled kernels.

A key is a digest of everything that decides a cubin and of nothing else: no path, time or user name, so that two
virtual environments and two machines share keys. An entry is one file, published whole by a rename and verified by its
own digest when it is read; a damaged one counts as absent and is written anew. The cache never decides whether a kernel
can be compiled: where it cannot be used, the kernel is compiled without it and one warning says why.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import struct
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAGIC = b"mlaforge-cubin-1\n"
_LENGTHS = struct.Struct("<QQ")
_DIGEST_SIZE = hashlib.sha256().digest_size
_FILE = re.compile(r"([0-9a-f]{64})\.cubin")
_LEFTOVER = re.compile(r"\..*\.tmp|[0-9a-f]{64}\.lock")
_LEFTOVER_SECONDS = 3600.0
"""No compile takes as long: what is older was left behind by a process that was killed."""
_POLL_SECONDS = 0.02
_LOCK_TIMEOUT_SECONDS = 120.0

_warned: set[str] = set()


class CacheWarning(UserWarning):
    """The compile cache cannot be used; kernels are compiled again in each process."""


@dataclass(frozen=True)
class Entry:
    """What the cache keeps of one compile: the cubin and a JSON object that describes it."""

    meta: Mapping[str, Any]
    cubin: bytes

    def to_bytes(self, key: str) -> bytes:
        """Lay the entry out as the file that holds it, with its key: a file under another's name is found out."""
        meta = json.dumps({"key": key, "meta": self.meta}, sort_keys=True).encode()
        body = _LENGTHS.pack(len(meta), len(self.cubin)) + meta + self.cubin
        return _MAGIC + hashlib.sha256(body).digest() + body

    @classmethod
    def from_bytes(cls, key: str, data: bytes) -> "Entry | None":
        """Read a file's bytes back; None if they are not, to the last bit, what was written under this key."""
        start = len(_MAGIC) + _DIGEST_SIZE
        digest, body = data[len(_MAGIC) : start], data[start:]
        if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != digest:
            return None
        meta_size, cubin_size = _LENGTHS.unpack_from(body)
        meta_end = _LENGTHS.size + meta_size
        header = json.loads(body[_LENGTHS.size : meta_end])
        if header["key"] != key:
            return None
        return cls(header["meta"], body[meta_end : meta_end + cubin_size])


@dataclass(frozen=True)
class Stored:
    """A file of the cache."""

    key: str
    path: Path
    bytes: int
    written: float
    """Seconds since the epoch."""

    def read(self) -> Entry | None:
        """Read the entry; None if it is damaged, or gone."""
        try:
            return Entry.from_bytes(self.key, self.path.read_bytes())
        except OSError:
            return None


def default_directory() -> Path | None:
    """Return the directory named by the environment.

    That is $MLAFORGE_CACHE_DIR, else $XDG_CACHE_HOME/mlaforge, else ~/.cache/mlaforge. Returns None if none of them is
    set. The XDG specification has a relative XDG_CACHE_HOME ignored. The home directory is taken from HOME alone: where
    somebody has cleared it, writing to the one in the password file would be a surprise.
    """
    own = os.environ.get("MLAFORGE_CACHE_DIR", "")
    if own:
        return Path(own).absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):
        return Path(xdg) / "mlaforge"
    home = os.environ.get("HOME", "")
    return Path(home) / ".cache" / "mlaforge" if os.path.isabs(home) else None


class KernelCache:
    """A directory of compiled kernels, safe to share among threads and processes."""

    def __init__(self, directory: Path | None) -> None:
        """Use `directory`, which is made at the first write; None keeps nothing."""
        self.directory = directory

    @classmethod
    def default(cls) -> "KernelCache":
        """Return the cache that the environment asks for; if it names no place, one that keeps nothing, and warn."""
        directory = default_directory()
        if directory is None:
            _warn_once("none of MLAFORGE_CACHE_DIR, XDG_CACHE_HOME and HOME names a directory")
        return cls(directory)

    def path(self, key: str) -> Path | None:
        """Return the file that holds the entry of a key, whether or not it is there."""
        return None if self.directory is None else self.directory / f"{key}.cubin"

    def load(self, key: str) -> Entry | None:
        """Return the entry of a key; None if there is none or if it is damaged."""
        path = self.path(key)
        if path is None:
            return None
        try:
            data = path.read_bytes()
        except OSError:
            return None
        return Entry.from_bytes(key, data)

    def store(self, key: str, entry: Entry) -> bool:
        """Publish an entry under a key. Returns False, and warns once, if the directory does not take it."""
        path = self.path(key)
        if path is None:
            return False
        temporary: str | None = None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # mkstemp in the same directory: a rename is atomic only within one file system.
            descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
            with open(descriptor, "wb") as file:
                file.write(entry.to_bytes(key))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            _warn_once(f"cannot write to {path.parent}: {error.strerror or error}")
            return False
        return True

    def stored(self) -> list[Stored]:
        """List the files of entries, newest first, whether or not they are damaged. Other files are none of them.

        Raises:
            OSError: the directory can't be read; one that is not there yet is empty.
        """
        found = []
        for path, status in self._files(_FILE):
            found.append(Stored(path.stem, path, status.st_size, status.st_mtime))
        return sorted(found, key=lambda each: (-each.written, each.key))

    def clear(self, before: float | None = None) -> list[Stored]:
        """Remove entries, and what killed processes left behind; give the entries that were removed.

        Processes that use the cache meanwhile compile anew what they miss. Files that are not of the cache stay.

        Args:
            before: only entries that were written before, in seconds since the epoch; all if None.

        Raises:
            OSError: a file can't be removed.
        """
        removed = []
        for each in self.stored():
            if before is None or each.written < before:
                each.path.unlink(missing_ok=True)
                removed.append(each)
        deadline = time.time() - _LEFTOVER_SECONDS
        for path, status in self._files(_LEFTOVER):
            if status.st_mtime < deadline:
                path.unlink(missing_ok=True)
        return removed

    def _files(self, pattern: re.Pattern[str]) -> Iterator[tuple[Path, os.stat_result]]:
        """Give the plain files of the directory whose whole name is of a form; a link is none of ours."""
        if self.directory is None:
            return
        try:
            paths = list(self.directory.iterdir())
        except FileNotFoundError:
            return
        for path in paths:
            if pattern.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode):
                        yield path, status

    def get(self, key: str, build: Callable[[], Entry]) -> tuple[Entry, bool]:
        """Return the entry of a key, building and publishing it if it is absent, and whether it was there.

        Of several processes that want the same absent entry one builds and the others wait for it. What `build` raises
        goes to the caller, and nothing is kept.
        """
        entry = self.load(key)
        if entry is not None:
            return entry, True
        with self._lock(key):
            entry = self.load(key)
            if entry is not None:
                return entry, True
            entry = build()
            self.store(key, entry)
            return entry, False

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        """Hold the right to build an entry.

        The lock is advice, it saves compiles; publishing is safe without it. So a directory that can't hold it is no
        error, and a holder that has it for longer than any compile takes (a forked child keeps its dead parent's lock)
        is not waited for.
        """
        path = self.path(key)
        descriptor = None if path is None else self._acquire(path.with_suffix(".lock"))
        try:
            yield
        finally:
            if path is not None and descriptor is not None:
                with contextlib.suppress(OSError):
                    os.unlink(path.with_suffix(".lock"))
                os.close(descriptor)

    def _acquire(self, path: Path) -> int | None:
        deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            while (descriptor := _try_lock(path)) is None and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            return descriptor
        except OSError:
            # The directory is missing, read-only, full, or on a file system without locks. store() will say so.
            return None


def _try_lock(path: Path) -> int | None:
    """Take the lock that a file stands for, making the file if need be. Returns None if somebody else has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    locked = False
    try:
        # The operating system frees a flock when its holder dies, however it dies: no lock can go stale.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The holder before us removed the file before it let go. A lock on a removed file keeps nobody out.
        locked = _same_file(descriptor, path)
    except BlockingIOError:
        pass
    finally:
        if not locked:
            os.close(descriptor)
    return descriptor if locked else None


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        on_disk = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), on_disk)


def _warn_once(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        message = (
            f"kernels are compiled without the disk cache: {reason}; set MLAFORGE_CACHE_DIR to a writable directory"
        )
        warnings.warn(message, CacheWarning, stacklevel=3)
