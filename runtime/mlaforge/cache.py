"""Content-addressed disk cache of compiled kernels.

A key is a digest of everything that decides a cubin and of nothing else: no path, time or user name, so that two
virtual environments and two machines share keys. An entry is one file, published whole by a rename and verified by its
own digest when it is read; a damaged one counts as absent and is written anew. The cache never decides whether a kernel
can be compiled: where it cannot be used, the kernel is compiled without it and one warning says why.

What is in the cache is run, so nothing is taken from where somebody else could have put it: not from a directory or a
file that others may write or that belongs to another user than this one or root, and not through a link in place of an
entry. Who may write to the directory above can put another in its place, which is then theirs, and refused.
"""

import contextlib
import errno
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
LEFTOVER_SECONDS = 3600.0
"""No compile takes as long: what is older was left behind by a process that was killed."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
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
        if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != digest or len(body) < _LENGTHS.size:
            return None
        meta_size, cubin_size = _LENGTHS.unpack_from(body)
        meta_end = _LENGTHS.size + meta_size
        if meta_end + cubin_size != len(body):
            return None
        try:
            header = json.loads(body[_LENGTHS.size : meta_end])
        except (ValueError, RecursionError):
            return None
        if not isinstance(header, dict) or header.get("key") != key or not isinstance(header.get("meta"), dict):
            return None
        return cls(header["meta"], body[meta_end:])


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
            return Entry.from_bytes(self.key, _read_own(self.path))
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


def why_distrusted(directory: Path, status: os.stat_result) -> tuple[str, str] | None:
    """Say why nothing may be taken from a directory, and what mends that; None if it is this user's or root's alone."""
    if status.st_mode & _OTHERS_WRITE:
        return f"others can write to {directory}", f"chmod go-w {directory}"
    if status.st_uid not in (os.getuid(), 0):
        return f"{directory} belongs to user {status.st_uid}", "set MLAFORGE_CACHE_DIR to a directory of yours"
    return None


def require_trusted(directory: Path) -> None:
    """Refuse a directory of which nothing may be run; one that is not there, or can't be read, is none.

    Raises:
        DistrustedError: somebody else can write to it.
    """
    try:
        with _opened(directory):
            pass
    except DistrustedError:
        raise
    except OSError:
        pass


def is_trusted(directory: Path) -> bool:
    """Tell the same, and warn once."""
    try:
        require_trusted(directory)
    except DistrustedError as error:
        _warn_once(error.reason, error.fix)
        return False
    return True


class DistrustedError(OSError):
    """A directory that somebody else can write to."""

    def __init__(self, reason: str, fix: str) -> None:
        """Tell why it is not trusted, and what mends that."""
        super().__init__(f"{reason}; {fix}")
        self.reason = reason
        self.fix = fix


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """Give a descriptor of a directory, for what is asked of a path may be true of another directory a moment later.

    Raises:
        DistrustedError: somebody else can write to it.
        OSError: it can't be opened.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if distrust := why_distrusted(directory, os.fstat(descriptor)):
            raise DistrustedError(*distrust)
        yield descriptor
    finally:
        os.close(descriptor)


def _read_own(path: Path) -> bytes:
    """Read a file of a directory whose files are run.

    Raises:
        DistrustedError: somebody else can write to the directory.
        OSError: it can't be read, is no plain file, or somebody else can write to it.
    """
    with _opened(path.parent) as folder:
        # A pipe would be waited for without O_NONBLOCK.
        descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or why_distrusted(path, status):
            raise OSError(errno.EPERM, "no plain file of this user alone", str(path))
        return file.read()


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
            data = _read_own(path)
        except DistrustedError as error:
            _warn_once(error.reason, error.fix)
            return None
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
            if not is_trusted(path.parent):
                return False
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
        deadline = time.time() - LEFTOVER_SECONDS
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
            if not is_trusted(path.parent):
                return None
            while (descriptor := _try_lock(path)) is None and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            return descriptor
        except OSError:
            # The directory is missing, read-only, full, or on a file system without locks. store() will say so.
            return None


def _try_lock(path: Path) -> int | None:
    """Take the lock that a file stands for, making the file if need be. Returns None if somebody else has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    locked = False
    try:
        # The operating system frees a flock when its holder dies, however it dies: no lock can go stale.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The holder before us removed the file before it let go. A lock on a removed file keeps nobody out.
        locked = same_file(descriptor, path)
    except BlockingIOError:
        pass
    finally:
        if not locked:
            os.close(descriptor)
    return descriptor if locked else None


def same_file(descriptor: int, path: Path) -> bool:
    """Tell whether a path still leads to what was opened."""
    try:
        on_disk = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), on_disk)


def _warn_once(reason: str, fix: str = "set MLAFORGE_CACHE_DIR to a writable directory") -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"kernels are compiled without the disk cache: {reason}; {fix}", CacheWarning, stacklevel=3)
