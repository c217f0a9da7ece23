"""The disk cache: what it keeps, what it refuses, and what it survives. Kernels are stood in for by bytes."""

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mlaforge
from mlaforge import cache as cache_module
from mlaforge.cache import CacheWarning, Entry, KernelCache, default_directory

RUNTIME = Path(mlaforge.__file__).parents[1]
KEY = "0123abcd" * 8
ENTRY = Entry({"kernels": ["decode"], "seconds": 1.5}, bytes(range(256)) * 8)

# A process that asks for KEY. Each build leaves a line in `builds` and takes as long as it is told.
ASK = """
import os, sys, time
from pathlib import Path
from mlaforge.cache import Entry, KernelCache
directory, scratch, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
def build():
    descriptor = os.open(scratch / "builds", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{os.getpid()}\\n".encode())
    time.sleep(seconds)
    return Entry({"made": True}, b"cubin" * 1000)
entry, hit = KernelCache(directory).get(sys.argv[4], build)
assert entry.cubin == b"cubin" * 1000 and entry.meta == {"made": True}
print("hit" if hit else "built")
"""


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_warned", set())


def ask(directory: Path, scratch: Path, seconds: float = 0.0) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", ASK, str(directory), str(scratch), str(seconds), KEY]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(RUNTIME)}, stdout=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]", timeout: float = 30.0) -> str:
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0
    return output.strip()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def process(directory: Path, scratch: Path, seconds: float) -> "Iterator[subprocess.Popen[str]]":
    child = ask(directory, scratch, seconds)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def builds(scratch: Path) -> int:
    path = scratch / "builds"
    return len(path.read_text().split()) if path.exists() else 0


def file_of(cache: KernelCache) -> Path:
    path = cache.path(KEY)
    assert path is not None
    return path


def never() -> Entry:
    raise AssertionError("built although the entry was there")


def test_round_trip(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "deep/cache")
    assert cache.load(KEY) is None
    assert cache.get(KEY, lambda: ENTRY) == (ENTRY, False)
    assert KernelCache(tmp_path / "deep/cache").get(KEY, never) == (ENTRY, True)
    assert [path.name for path in (tmp_path / "deep/cache").iterdir()] == [f"{KEY}.cubin"]


def test_directory_is_private(tmp_path: Path) -> None:
    KernelCache(tmp_path / "cache").store(KEY, ENTRY)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


WHOLE = ENTRY.to_bytes(KEY)


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\n",
        b"junk" * 1000,
        *(WHOLE[:size] for size in (1, 16, 17, 40, 49, 60, 65, 100, len(WHOLE) // 2, len(WHOLE) - 1)),
        WHOLE + b"\0",
        WHOLE[:17] + WHOLE[18:],
    ],
    ids=lambda data: f"{len(data)}B",
)
def test_damaged_entry_is_made_anew(tmp_path: Path, damaged: bytes) -> None:
    cache = KernelCache(tmp_path)
    file_of(cache).write_bytes(damaged)
    assert cache.load(KEY) is None
    assert cache.get(KEY, lambda: ENTRY) == (ENTRY, False)
    assert file_of(cache).read_bytes() == WHOLE
    assert cache.get(KEY, never) == (ENTRY, True)


def test_any_flipped_bit_is_noticed() -> None:
    assert Entry.from_bytes(KEY, WHOLE) == ENTRY
    for position in range(len(WHOLE)):
        flipped = bytearray(WHOLE)
        flipped[position] ^= 1 << position % 8
        assert Entry.from_bytes(KEY, bytes(flipped)) is None, position


def test_any_truncation_is_noticed() -> None:
    assert all(Entry.from_bytes(KEY, WHOLE[:size]) is None for size in range(len(WHOLE)))


def test_entry_under_another_name_is_refused(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    cache.store(KEY, ENTRY)
    other = KEY[::-1]
    shutil.copy(file_of(cache), tmp_path / f"{other}.cubin")
    assert cache.load(other) is None


def test_failure_is_not_kept(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)

    def fail() -> Entry:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            cache.get(KEY, fail)
        assert list(tmp_path.iterdir()) == []
    assert cache.get(KEY, lambda: ENTRY) == (ENTRY, False)


def test_sixteen_processes_build_once(tmp_path: Path) -> None:
    children = [ask(tmp_path / "cache", tmp_path, 0.3) for _ in range(16)]
    assert sorted(finish(child, 60) for child in children) == ["built"] + ["hit"] * 15
    assert builds(tmp_path) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"{KEY}.cubin"]


def test_threads_build_once(tmp_path: Path) -> None:
    cache, made, results = KernelCache(tmp_path), [], []

    def build() -> Entry:
        made.append(1)
        time.sleep(0.1)
        return ENTRY

    threads = [threading.Thread(target=lambda: results.append(cache.get(KEY, build)[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert results == [ENTRY] * 8


def test_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    with process(tmp_path / "cache", tmp_path, 600) as holder:
        wait_for(lambda: builds(tmp_path) == 1)
        with process(tmp_path / "cache", tmp_path, 0) as waiter:
            time.sleep(0.5)
            assert waiter.poll() is None, "did not wait for the holder"
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            assert finish(waiter, 10) == "built"
    assert finish(ask(tmp_path / "cache", tmp_path)) == "hit"


def test_lock_file_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    with process(tmp_path, tmp_path, 600) as holder:
        wait_for(lambda: builds(tmp_path) == 1)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert (tmp_path / f"{KEY}.lock").exists()
    assert finish(ask(tmp_path, tmp_path), 10) == "built"
    assert not (tmp_path / f"{KEY}.lock").exists()


def test_lock_on_a_removed_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    real = fcntl.flock

    def lock_too_late(descriptor: int, operation: int) -> None:
        """As if the holder let go, and removed the file, between our opening it and our locking it."""
        path.unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_too_late)
    assert cache_module._try_lock(path) is None
    monkeypatch.undo()
    descriptor = cache_module._try_lock(path)
    assert descriptor is not None
    assert cache_module._try_lock(path) is None
    os.close(descriptor)


def test_lock_is_not_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_LOCK_TIMEOUT_SECONDS", 0.2)
    with process(tmp_path, tmp_path, 600):
        wait_for(lambda: builds(tmp_path) == 1)
        assert KernelCache(tmp_path).get(KEY, lambda: ENTRY) == (ENTRY, False)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MLAFORGE_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/mlaforge"),
        ({"MLAFORGE_CACHE_DIR": "", "XDG_CACHE_HOME": "relative", "HOME": "/c"}, "/c/.cache/mlaforge"),
        ({"HOME": "/c"}, "/c/.cache/mlaforge"),
        ({"HOME": ""}, None),
        ({}, None),
    ],
)
def test_directory_from_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str | None
) -> None:
    for name in ("MLAFORGE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_directory() == (None if expected is None else Path(expected))


def assert_works_uncached_and_warns_once(make: Callable[[], KernelCache], match: str) -> None:
    with pytest.warns(CacheWarning, match=match) as caught:
        assert make().get(KEY, lambda: ENTRY) == (ENTRY, False)
        assert make().get(KEY, lambda: ENTRY) == (ENTRY, False)
    assert len(caught) == 1


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLAFORGE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert_works_uncached_and_warns_once(KernelCache.default, "HOME")


def test_directory_that_cannot_be_made() -> None:
    assert_works_uncached_and_warns_once(lambda: KernelCache(Path("/proc/mlaforge")), "/proc/mlaforge")


def test_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    assert_works_uncached_and_warns_once(lambda: KernelCache(tmp_path / "cache"), "cannot write")
    assert (tmp_path / "cache").read_text() == "in the way"


def test_read_only_directory_still_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KernelCache(tmp_path)
    cache.store(KEY, ENTRY)

    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(30, "Read-only file system")

    # The modes of a directory do not bind root, so the calls that write are made to fail as on a read-only mount.
    real_open = os.open
    monkeypatch.setattr(
        os,
        "open",
        lambda path, flags, *rest, **named: refuse() if flags & os.O_CREAT else real_open(path, flags, *rest, **named),
    )
    monkeypatch.setattr(os, "replace", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get(KEY, never) == (ENTRY, True)
    with pytest.warns(CacheWarning, match="Read-only file system"):
        assert cache.get(KEY[::-1], lambda: ENTRY) == (ENTRY, False)


def test_full_directory(tmp_path: Path) -> None:
    # A limit on the size of files makes the write fail half-way, as on a full disk.
    script = f"""
import resource, warnings
from pathlib import Path
from mlaforge.cache import Entry, KernelCache
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
entry = Entry({{}}, b"x" * 100_000)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        assert KernelCache(Path({str(tmp_path)!r})).get({KEY!r}, lambda: entry) == (entry, False)
print(*[str(warning.message) for warning in caught], sep="\\n")
"""
    environment = {**os.environ, "PYTHONPATH": str(RUNTIME)}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.count("cannot write") == 1
    assert "File too large" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_no_directory_keeps_nothing_and_says_nothing() -> None:
    cache = KernelCache(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get(KEY, lambda: ENTRY) == (ENTRY, False)
        assert cache.get(KEY, lambda: ENTRY) == (ENTRY, False)
