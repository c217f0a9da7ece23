"""The cache and the loader under fire: real processes that are killed, hostile directories, disks that are full."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import json
import os
import random
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import mlaforge
from mlaforge import cache as cache_module
from mlaforge import compiler, doctor, rendered
from mlaforge.api import generate_yaml
from mlaforge.cache import CacheWarning, Entry, KernelCache
from mlaforge.compiler import cache_key
from mlaforge.decode import DecodeRunner, DecodeTensors
from mlaforge.manifest import Parameter, read_manifest
from mlaforge.rendered import materialise
from mlaforge.simulator import Simulator
from mlaforge_generator import cli

ROOT = Path(__file__).parents[1]
GENERATED = ROOT / "generated"
SOURCES = [str(Path(mlaforge.__file__).parents[1]), str(Path(cli.__file__).parents[2])]
KEY = "0123abcd" * 8
ENTRY = Entry({"kernels": [], "seconds": {}}, bytes(range(256)) * 40)
OTHER = Entry({"kernels": [], "seconds": {}}, b"somebody else's" * 700)

TOY = """
#include "half.cuh"
extern "C" __global__ void toy(float* x) { x[threadIdx.x] = half_of(x[threadIdx.x]); }
"""
HALF = "__device__ float half_of(float x) { return x * 0.5f; }\n"


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_warned", set())


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "half.cuh").write_text(HALF)
    (folder / "toy.cu").write_text(TOY)
    return folder / "toy.cu"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def start(
    script: str,
    *arguments: object,
    first: Sequence[object] = (),
    prefix: Sequence[str] = (),
    drop_root: bool = False,
    bare: bool = False,
    cwd: Path | None = None,
    stdin: int | None = None,
    **environment: str,
) -> subprocess.Popen[str]:
    """Start Python on a script, behind a prefix, with source roots of its own first."""
    inherited = {"PATH": os.environ["PATH"]} if bare else dict(os.environ)
    search = os.pathsep.join(map(str, [*first, *SOURCES]))
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", script, *map(str, arguments)],
        env={**inherited, **environment, "PYTHONPATH": search, "PYTHONWARNINGS": "always"},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        preexec_fn=_obey_modes if drop_root else None,
    )


def _obey_modes() -> None:
    """Have the modes of files bind root, too: take CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH from what comes next."""
    pr_capbset_drop = 24
    for capability in (1, 2):
        ctypes.CDLL(None).prctl(pr_capbset_drop, capability, 0, 0, 0)


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip(), err


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


COMPILE = """
import hashlib, sys
from pathlib import Path
from mlaforge.compiler import compile_kernel
for source in sys.argv[1:]:
    kernel = compile_kernel(Path(source))
    print("hit" if kernel.cache_hit else "built", hashlib.sha256(kernel.cubin).hexdigest())
"""

# Several children of one process, which has paid for the imports: all reach the same line before one goes on.
TOGETHER = """
import os, sys
from pathlib import Path
from mlaforge.cache import KernelCache
WORK
count = int(sys.argv[1])
ready, go = os.pipe(), os.pipe()
children = []
for i in range(count):
    child = os.fork()
    if not child:
        code = 1
        try:
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            work(i)
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    children.append(child)
for _ in children:
    os.read(ready[0], 1)
os.write(go[1], b"x" * count)
assert all(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children)
"""


def together(work: str, *arguments: object, count: int = 16, **environment: str) -> tuple[str, str]:
    return finish(start(TOGETHER.replace("WORK", work), count, *arguments, **environment))


# ---- Many at once, and some of them killed ---------------------------------------------------------------------------


def test_sixteen_processes_render_one_folder(directory: Path) -> None:
    """`mlaforge.load` of YAML puts a folder into the cache: no process sees half of it, and none is left over."""
    work = """
from mlaforge.api import generate_yaml
def work(i):
    folder = generate_yaml("minicpm3")
    assert {path.name for path in folder.iterdir()} == set(os.listdir(sys.argv[2]))
    os.write(1, f"{folder}\\n".encode())
"""
    out, _ = together(work, GENERATED / "minicpm3", MLAFORGE_CACHE_DIR=str(directory))
    (folder,) = set(out.split())
    assert len(out.split()) == 16 and names(directory / "generated") == [Path(folder).name]
    for path in (GENERATED / "minicpm3").iterdir():
        assert (Path(folder) / path.name).read_bytes() == path.read_bytes()


def test_sixteen_processes_and_a_kernel_that_does_not_compile(toy: Path, directory: Path) -> None:
    toy.write_text(TOY.replace("half_of(", "broken_name("))
    work = """
from mlaforge.compiler import CompileError, compile_kernel
def work(i):
    try:
        compile_kernel(Path(sys.argv[2]))
    except CompileError as error:
        assert "toy.cu" in error.log and "broken_name" in error.log
        os.write(1, b"log\\n")
"""
    out, _ = together(work, toy, MLAFORGE_CACHE_DIR=str(directory))
    assert out.split() == ["log"] * 16 and names(directory) == []


def test_the_holder_is_killed_while_it_compiles(directory: Path) -> None:
    source = GENERATED / "deepseek_v3" / "decode.cu"
    lock = directory / f"{cache_key(source)}.lock"
    holder = start(COMPILE, source, MLAFORGE_CACHE_DIR=str(directory))
    waiters = []
    try:
        wait_for(lock.exists)
        waiters = [start(COMPILE, source, MLAFORGE_CACHE_DIR=str(directory)) for _ in range(2)]
        # NVRTC takes seconds for it.
        time.sleep(0.5)
        assert holder.poll() is None and names(directory) == [lock.name]
        holder.send_signal(signal.SIGKILL)
        assert holder.wait() == -signal.SIGKILL
        results = [finish(waiter)[0].split() for waiter in waiters]
    finally:
        for process in (holder, *waiters):
            process.kill()
            process.communicate()
    assert sorted(how for how, _ in results) == ["built", "hit"]
    assert len({digest for _, digest in results}) == 1
    assert names(directory) == [f"{cache_key(source)}.cubin"]


def test_processes_killed_at_any_moment(directory: Path) -> None:
    """Whatever a process was doing when it was killed: each entry is whole, and all can be had again."""
    write = """
import hashlib, os, sys
from pathlib import Path
from mlaforge.cache import Entry, KernelCache
cache = KernelCache(Path(sys.argv[1]))
def build(key): return Entry({"key": key}, key.encode() * 4000)
def victim():
    while True:
        for i in range(4):
            key = hashlib.sha256(str(i).encode()).hexdigest()
            entry, _ = cache.get(key, lambda: build(key))
            assert entry == build(key)
            os.unlink(cache.path(key))
import random, signal, time
draw = random.Random(int(sys.argv[2]))
for _ in range(60):
    child = os.fork()
    if not child:
        try: victim()
        except FileNotFoundError: pass
        finally: os._exit(1)
    time.sleep(draw.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    for stored in cache.stored():
        assert stored.read() == build(stored.key), stored
for i in range(4):
    key = hashlib.sha256(str(i).encode()).hexdigest()
    assert cache.get(key, lambda: build(key))[0] == build(key)
    assert cache.get(key, lambda: 1 / 0) == (build(key), True)
"""
    finish(start(write, directory, random.randrange(1 << 30)))
    assert all(re.fullmatch(r"[0-9a-f]{64}\.(cubin|lock)|\..*\.tmp", name) for name in names(directory))


def test_a_folder_in_use_is_not_cleared(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as soon as the process has ended, also when it was killed."""
    script = """
import sys
from mlaforge.api import generate_yaml
print(generate_yaml("minicpm3"), flush=True)
sys.stdin.read()
"""
    monkeypatch.setenv("MLAFORGE_CACHE_DIR", str(directory))
    holder = start(script, stdin=subprocess.PIPE)
    assert holder.stdout is not None
    folder = Path(holder.stdout.readline().strip())
    result = CliRunner().invoke(cli.cli, ["cache", "clear", "--yes"])
    assert result.exit_code == 0 and "0 entries, 0.0 MiB removed; 1 entry, 0." in result.stdout
    assert (folder / "decode.cu").is_file()
    # Others may use it at the same time.
    assert finish(start("from mlaforge.api import generate_yaml; print(generate_yaml('minicpm3'))"))[0] == str(folder)
    holder.kill()
    holder.communicate()
    result = CliRunner().invoke(cli.cli, ["cache", "clear", "--yes"])
    assert result.exit_code == 0 and result.stdout.startswith(f"{directory}: 1 entry, 0.")
    assert names(directory / "generated") == []


def test_killed_while_a_folder_is_published(directory: Path) -> None:
    """What is left nobody reads, and `clear` takes it away after an hour."""
    script = """
import os, signal
from pathlib import Path
from mlaforge.api import generate_yaml
Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
generate_yaml("minicpm3")
"""
    process = start(script, MLAFORGE_CACHE_DIR=str(directory))
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    (left,) = names(directory / "generated")
    assert rendered.stored(directory) == [] and rendered.clear(directory) == ([], [])
    assert names(directory / "generated") == [left]
    os.utime(directory / "generated" / left, (time.time() - 7200,) * 2)
    rendered.clear(directory)
    assert names(directory / "generated") == []


def test_rendered_while_the_cache_is_cleared(directory: Path) -> None:
    """Whoever is given a folder finds all files in it, for as long as it wants."""
    work = """
import time
from mlaforge import rendered
FILES = {f"{i}.cu": str(i) * 1000 for i in range(20)}
def work(i):
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        if i < 2:
            rendered.clear(Path(os.environ["MLAFORGE_CACHE_DIR"]))
            continue
        child = os.fork()
        if not child:
            folder = rendered.materialise("text", FILES)
            right = all((folder / name).read_text() == text for name, text in FILES.items())
            os.write(1, b"cached\\n" if "generated" in folder.parts else b"apart\\n")
            if "generated" not in folder.parts:
                rendered._remove_temporary(folder, os.getpid())
            os._exit(not right)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    out, _ = together(work, count=6, MLAFORGE_CACHE_DIR=str(directory))
    assert out.count("cached") > 5
    assert all(not name.startswith(".") for name in names(directory / "generated"))


def test_killed_between_writing_and_publishing(directory: Path) -> None:
    """What is left is a file of another name, which nobody reads and which `clear` takes away after an hour."""
    script = f"""
import os, signal, sys
from pathlib import Path
from mlaforge.cache import Entry, KernelCache
os.replace = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
KernelCache(Path(sys.argv[1])).get({KEY!r}, lambda: Entry({{}}, b"x" * 10000))
"""
    process = start(script, directory)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    lock, left = sorted(names(directory), key=lambda name: name.startswith("."))
    assert lock == f"{KEY}.lock" and left.startswith(".") and left.endswith(".tmp")
    cache = KernelCache(directory)
    assert cache.stored() == [] and cache.get(KEY, lambda: ENTRY) == (ENTRY, False)
    assert names(directory) == sorted([left, f"{KEY}.cubin"])
    assert len(cache.clear()) == 1 and names(directory) == [left]
    os.utime(directory / left, (time.time() - 7200,) * 2)
    cache.clear()
    assert names(directory) == []


# ---- Entries that are damaged, or forged -----------------------------------------------------------------------------


def test_damaged_entries_in_other_processes(toy: Path, directory: Path) -> None:
    """What one process left damaged, `cache verify` finds, and the next process compiles anew."""
    environment = {"MLAFORGE_CACHE_DIR": str(directory)}
    how, digest = finish(start(COMPILE, toy, **environment))[0].split()
    assert how == "built"
    (path,) = directory.glob("*.cubin")
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 0x10]) + whole[middle + 1 :]
    runner = CliRunner()
    for damaged in (b"", whole[:middle], flipped):
        path.write_bytes(damaged)
        verified = runner.invoke(cli.cli, ["cache", "verify"], env=environment)
        assert verified.exit_code == 1 and f"{path}: damaged" in verified.stdout
        assert finish(start(COMPILE, toy, toy, **environment))[0].split() == ["built", digest, "hit", digest]
        assert runner.invoke(cli.cli, ["cache", "verify"], env=environment).exit_code == 0


def sealed(body: bytes) -> bytes:
    """Give a body the digest that makes it an entry's."""
    return ENTRY.to_bytes(KEY)[:17] + hashlib.sha256(body).digest() + body


def body(meta: bytes, cubin: bytes = b"c", *, meta_size: int | None = None, cubin_size: int | None = None) -> bytes:
    sizes = (len(meta) if meta_size is None else meta_size, len(cubin) if cubin_size is None else cubin_size)
    return struct.pack("<QQ", *sizes) + meta + cubin


GOOD_META = json.dumps({"key": KEY, "meta": {}}).encode()


@pytest.mark.parametrize(
    "forged",
    [
        b"",
        b"\0" * 15,
        body(b""),
        body(b"{"),
        body(b"null"),
        body(b"[]"),
        body(b"{}"),
        body(b"[" * 100_000),
        body(b"\xff\xfe"),
        body(json.dumps({"key": KEY}).encode()),
        body(json.dumps({"key": KEY, "meta": []}).encode()),
        body(json.dumps({"key": [KEY], "meta": {}}).encode()),
        body(GOOD_META, meta_size=1 << 63),
        body(GOOD_META, cubin_size=1 << 62),
        body(GOOD_META, cubin_size=0),
        body(GOOD_META, meta_size=0),
        body(GOOD_META) + b"more",
    ],
    ids=lambda data: f"{len(data)}B-{data[16:28]!r}",
)
def test_an_entry_that_is_none_in_spite_of_its_digest(directory: Path, forged: bytes) -> None:
    assert Entry.from_bytes(KEY, sealed(body(GOOD_META))) == Entry({}, b"c")
    assert Entry.from_bytes(KEY, sealed(forged)) is None
    cache = KernelCache(directory)
    cache.store(KEY, ENTRY)
    (directory / f"{KEY}.cubin").write_bytes(sealed(forged))
    assert cache.get(KEY, lambda: ENTRY) == (ENTRY, False) and cache.load(KEY) == ENTRY


# ---- Directories that take nothing -----------------------------------------------------------------------------------

CACHE_WARNINGS = "kernels are compiled without the disk cache"


# One folder, which is there as long as the process that made it, whatever children of it do.
ELSEWHERE = """
import os, sys
from mlaforge.api import generate_yaml
folder = generate_yaml("minicpm3")
if not os.fork():
    sys.exit()
os.wait()
assert (folder / "decode.cu").is_file() and generate_yaml("minicpm3") == folder
(folder / "decode.cu").unlink()
other = generate_yaml("minicpm3")
assert other != folder and (other / "decode.cu").is_file()
print(folder)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
def test_a_read_only_directory(toy: Path, directory: Path, tmp_path: Path) -> None:
    other = toy.with_name("other.cu")
    other.write_text(TOY.replace("toy", "other"))
    environment = {"MLAFORGE_CACHE_DIR": str(directory)}
    digest = finish(start(COMPILE, toy, **environment))[0].split()[1]
    before = names(directory)
    directory.chmod(0o555)
    try:
        asked = start("import os, sys; print(os.access(sys.argv[1], os.W_OK))", directory, drop_root=True)
        if finish(asked)[0] == "True":
            pytest.skip("root can't be made to obey modes here")
        out, err = finish(start(COMPILE, toy, drop_root=True, **environment))
        assert out.split() == ["hit", digest] and CACHE_WARNINGS not in err
        out, err = finish(start(COMPILE, other, other, drop_root=True, **environment))
        assert out.split()[::2] == ["built", "built"]
        assert err.count(CACHE_WARNINGS) == 1 and "Permission denied" in err and "MLAFORGE_CACHE_DIR" in err
        assert names(directory) == before
        # Rendered folders go elsewhere.
        out, err = finish(start(ELSEWHERE, drop_root=True, TMPDIR=str(tmp_path), **environment))
        assert Path(out).parent == tmp_path and not list(tmp_path.glob("mlaforge-*"))
    finally:
        directory.chmod(0o755)


def on_a_small_disk(options: str, directory: Path) -> list[str]:
    """Give a command's prefix under which $MLAFORGE_CACHE_DIR is a file system of its own, gone with the process."""
    mount = f'mount -t tmpfs -o {options},mode=700 tmpfs "$MLAFORGE_CACHE_DIR"'
    for flags in ("-m", "-rm"):
        prefix = ["unshare", flags, "sh", "-c", f'{mount} && exec "$@"', "sh"]
        with_directory = {**os.environ, "MLAFORGE_CACHE_DIR": str(directory)}
        try:
            done = subprocess.run([*prefix, "true"], env=with_directory, capture_output=True, timeout=30, check=False)
        except (OSError, subprocess.SubprocessError):
            break
        if done.returncode == 0:
            return prefix
    pytest.skip("no file system can be mounted here")


ON_A_SMALL_DISK = """
import os, sys
from pathlib import Path
directory = Path(os.environ["MLAFORGE_CACHE_DIR"])
assert os.statvfs(directory).f_blocks * os.statvfs(directory).f_frsize <= 1 << 17
filler = directory / "filler"
"""


def test_a_full_disk(toy: Path, directory: Path, tmp_path: Path) -> None:
    directory.mkdir()
    prefix = on_a_small_disk("size=64k", directory)
    script = f"""{ON_A_SMALL_DISK}
from mlaforge.compiler import compile_kernel
from mlaforge.api import generate_yaml
with open(filler, "wb", buffering=0) as file:
    try:
        while True: file.write(b"x" * 512)
    except OSError: pass
for _ in range(2):
    assert not compile_kernel(Path(sys.argv[1])).cache_hit
assert sorted(os.listdir(directory)) == ["filler"]
folder = generate_yaml("minicpm3")
assert directory not in folder.parents and (folder / "decode.cu").read_text()
assert not (directory / "generated").exists() or os.listdir(directory / "generated") == []
# There is room again.
filler.unlink()
assert not compile_kernel(Path(sys.argv[1])).cache_hit
assert compile_kernel(Path(sys.argv[1])).cache_hit
"""
    environment = {"MLAFORGE_CACHE_DIR": str(directory), "TMPDIR": str(tmp_path)}
    _, err = finish(start(script, toy, prefix=prefix, **environment))
    assert err.count(CACHE_WARNINGS) == 1 and "No space left on device" in err


def test_a_disk_without_inodes(toy: Path, directory: Path) -> None:
    """Not even the lock can be made."""
    directory.mkdir()
    prefix = on_a_small_disk("size=64k,nr_inodes=2", directory)
    script = f"""{ON_A_SMALL_DISK}
from mlaforge.compiler import compile_kernel
filler.touch()
for _ in range(2):
    assert not compile_kernel(Path(sys.argv[1])).cache_hit
assert os.listdir(directory) == ["filler"]
"""
    _, err = finish(start(script, toy, prefix=prefix, MLAFORGE_CACHE_DIR=str(directory)))
    assert err.count(CACHE_WARNINGS) == 1 and "No space left on device" in err


@pytest.mark.parametrize("home", [None, "", "relative", "/dev/null"])
def test_no_home(toy: Path, tmp_path: Path, home: str | None) -> None:
    """Nothing but PATH is set: it works, says once what it lacks, and writes nowhere."""
    environment = {} if home is None else {"HOME": home}
    before = names(tmp_path)
    out, err = finish(start(COMPILE, toy, toy, bare=True, cwd=tmp_path, **environment))
    assert out.split()[::2] == ["built", "built"]
    assert err.count(CACHE_WARNINGS) == 1 and ("HOME" in err or "/dev/null" in err) and "MLAFORGE_CACHE_DIR" in err
    assert names(tmp_path) == before


# ---- Directories and entries of somebody else ------------------------------------------------------------------------


def planted(directory: Path, entry: Entry = OTHER) -> KernelCache:
    """Put an entry that is whole into a directory, as somebody would who can write there."""
    directory.mkdir(mode=0o700, parents=True)
    (directory / f"{KEY}.cubin").write_bytes(entry.to_bytes(KEY))
    (directory / f"{KEY}.cubin").chmod(0o600)
    return KernelCache(directory)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722, 0o702, 0o720, 0o1777, 0o2775])
def test_a_directory_that_others_can_write_to(directory: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    cache = planted(directory)
    assert cache.get(KEY, lambda: ENTRY) == (OTHER, True)
    directory.chmod(mode)
    before = {path: path.stat() for path in (directory, *directory.iterdir())}
    with pytest.warns(CacheWarning, match=f"chmod go-w {directory}") as caught:
        for _ in range(2):
            assert cache.get(KEY, lambda: ENTRY) == (ENTRY, False)
        assert not cache.store(KEY, ENTRY)
    assert len(caught) == 1
    # Not even a lock is put there, in which somebody could lie in wait.
    assert {path: path.stat() for path in (directory, *directory.iterdir())} == before
    monkeypatch.setenv("MLAFORGE_CACHE_DIR", str(directory))
    check = doctor._check_cache()
    assert check.state == "warning" and "not used" in check.found and check.fix == f"chmod go-w {directory}"
    # As the advice says.
    directory.chmod(0o755)
    assert cache.get(KEY, lambda: ENTRY) == (OTHER, True)


def test_a_directory_that_others_can_write_to_in_a_process(toy: Path, directory: Path) -> None:
    planted(directory)
    directory.chmod(0o777)
    out, err = finish(start(COMPILE, toy, toy, MLAFORGE_CACHE_DIR=str(directory)))
    assert out.split()[::2] == ["built", "built"]
    assert err.count(CACHE_WARNINGS) == 1 and "others can write" in err
    assert names(directory) == [f"{KEY}.cubin"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_directory_of_another_user(directory: Path) -> None:
    cache = planted(directory)
    os.chown(directory, 12345, -1)
    with pytest.warns(CacheWarning, match="belongs to user 12345"):
        assert cache.get(KEY, lambda: ENTRY) == (ENTRY, False)
    assert names(directory) == [f"{KEY}.cubin"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_an_entry_of_another_user(directory: Path) -> None:
    """Left from a time when others could write there: it counts as absent, and is replaced."""
    cache = planted(directory)
    os.chown(directory / f"{KEY}.cubin", 12345, -1)
    assert cache.get(KEY, lambda: ENTRY) == (ENTRY, False)
    assert cache.get(KEY, lambda: OTHER) == (ENTRY, True)
    assert (directory / f"{KEY}.cubin").stat().st_uid == 0


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_an_entry_that_others_can_write_to(directory: Path, mode: int) -> None:
    cache = planted(directory)
    (directory / f"{KEY}.cubin").chmod(mode)
    assert [each.read() for each in cache.stored()] == [None]
    assert cache.get(KEY, lambda: ENTRY) == (ENTRY, False)
    assert stat.S_IMODE((directory / f"{KEY}.cubin").stat().st_mode) == 0o600


def test_a_link_in_place_of_an_entry(directory: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.cubin"
    elsewhere.write_bytes(OTHER.to_bytes(KEY))
    cache = KernelCache(directory)
    directory.mkdir(mode=0o700)
    (directory / f"{KEY}.cubin").symlink_to(elsewhere)
    assert cache.load(KEY) is None
    assert cache.get(KEY, lambda: ENTRY) == (ENTRY, False)
    assert not (directory / f"{KEY}.cubin").is_symlink() and cache.load(KEY) == ENTRY
    assert elsewhere.read_bytes() == OTHER.to_bytes(KEY)


def test_a_link_in_place_of_a_lock(directory: Path, tmp_path: Path) -> None:
    directory.mkdir(mode=0o700)
    (directory / f"{KEY}.lock").symlink_to(tmp_path / "made")
    assert KernelCache(directory).get(KEY, lambda: ENTRY) == (ENTRY, False)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("kind", ["pipe", "directory", "loop", "dangling"])
def test_something_else_in_place_of_an_entry(directory: Path, kind: str) -> None:
    directory.mkdir(mode=0o700)
    path = directory / f"{KEY}.cubin"
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(path if kind == "loop" else directory / "nothing")
    cache = KernelCache(directory)
    with warnings.catch_warnings():
        if kind == "directory":
            warnings.simplefilter("ignore", CacheWarning)
        else:
            warnings.simplefilter("error")
        assert cache.get(KEY, lambda: ENTRY) == (ENTRY, False)
    assert cache.load(KEY) == (None if kind == "directory" else ENTRY)
    if kind == "pipe":
        os.unlink(path)
        os.mkfifo(path, 0o600)
        assert cache.load(KEY) is None and cache.stored() == []


def test_a_link_in_place_of_the_directory(directory: Path, tmp_path: Path) -> None:
    """Homes are moved to other disks by links; what counts is where it leads."""
    planted(tmp_path / "disk")
    directory.symlink_to(tmp_path / "disk")
    cache = KernelCache(directory)
    assert cache.get(KEY, lambda: ENTRY) == (OTHER, True)
    (tmp_path / "disk").chmod(0o777)
    with pytest.warns(CacheWarning, match="others can write"):
        assert cache.get(KEY, lambda: ENTRY) == (ENTRY, False)


@pytest.mark.parametrize("which", ["cache", "generated", "folder"])
def test_a_rendered_folder_that_others_can_write_to(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """Its text is compared before it is used, but somebody could change it right after that."""
    monkeypatch.setenv("MLAFORGE_CACHE_DIR", str(directory))
    monkeypatch.setattr(rendered.tempfile, "tempdir", str(tmp_path))
    directory.mkdir(mode=0o700)
    files = {"a.cu": "text", "manifest.json": "{}"}
    folder = materialise("name", files)
    assert folder.parent == directory / "generated" and materialise("name", files) == folder
    {"cache": directory, "generated": folder.parent, "folder": folder}[which].chmod(0o777)
    with pytest.warns(CacheWarning, match="others can write"):
        other = materialise("name", files)
    assert directory not in other.parents and stat.S_IMODE(other.stat().st_mode) == 0o700
    assert {path.name: path.read_text() for path in other.iterdir()} == files


def test_a_rendered_folder_is_private(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAFORGE_CACHE_DIR", str(directory))
    old = os.umask(0)
    try:
        folder = generate_yaml("minicpm3")
        KernelCache(directory).store(KEY, ENTRY)
    finally:
        os.umask(old)
    for path in (directory, folder.parent, folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    assert stat.S_IMODE((directory / f"{KEY}.cubin").stat().st_mode) == 0o600


# ---- Keys ------------------------------------------------------------------------------------------------------------

WHEELS = {
    "nvrtc": "nvidia-cuda-nvrtc",
    "cutlass": "nvidia-cutlass",
    "cccl": "nvidia-cuda-cccl",
    "cudart": "nvidia-cuda-runtime",
    "crt": "nvidia-cuda-crt",
}


def environment_with(folder: Path, wheel: str, version: str) -> Path:
    """Make a folder of packages with the installed ones, one of them under another version."""
    folder.mkdir()
    found = importlib.metadata.distribution(wheel)
    for top in {file.parts[0] for file in found.files or [] if not file.parts[0].startswith(".")}:
        if not top.endswith(".dist-info"):
            (folder / top).symlink_to(Path(str(found.locate_file(top))))
    about = folder / f"{wheel.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {wheel}\nVersion: {version}\n")
    return folder


def test_two_toolkits_side_by_side(toy: Path, directory: Path, tmp_path: Path) -> None:
    """Each has its own entry in one directory, and finds it again."""
    environment = {"MLAFORGE_CACHE_DIR": str(directory)}
    first = [()] + [(environment_with(tmp_path / name, WHEELS[name], "13.9.1"),) for name in ("cudart", "cccl", "crt")]
    for round_ in ("built", "hit"):
        for paths in first:
            out, err = finish(start(COMPILE, toy, first=paths, **environment))
            assert out.split()[0] == round_ and CACHE_WARNINGS not in err
    assert len(list(directory.glob("*.cubin"))) == len(first)


def test_another_compiler_than_the_one_installed(toy: Path, directory: Path, tmp_path: Path) -> None:
    """The key names the NVRTC that is installed. If another is loaded, its cubin is not kept under that name."""
    other = environment_with(tmp_path / "nvrtc", WHEELS["nvrtc"], "13.9.1")
    out, err = finish(start(COMPILE, toy, toy, first=[other], MLAFORGE_CACHE_DIR=str(directory)))
    assert out.split()[::2] == ["built", "built"] and "NVRTC 13.9.1 is installed, but 13." in err
    assert names(directory) == []
    script = """
import sys
from pathlib import Path
from mlaforge.compiler import cache_key
print(cache_key(Path(sys.argv[1])))
"""
    assert finish(start(script, toy, first=[other]))[0] != cache_key(toy)


@pytest.mark.parametrize("file", ["decode.cu", "decode_16.cu", "prefill.cu", "append.cu"])
def test_every_baked_number_is_in_the_key(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "kernels"
    shutil.copytree(GENERATED / "deepseek_v3", folder)
    source = folder / file
    text = source.read_text()
    keys = {cache_key(source)}
    numbers = list(re.finditer(r"\b[0-9]+\b", re.sub("//.*", lambda comment: " " * len(comment[0]), text)))
    assert len(numbers) > 20
    for match in numbers:
        changed = text[: match.start()] + str(int(match[0]) + 1) + text[match.end() :]
        source.write_text(changed)
        keys.add(cache_key(source))
    source.write_text(text)
    for header in sorted(folder.glob("*.cuh")):
        before = header.read_text()
        header.write_text(before + "\n")
        if header.name in compiler.source_closure(source):
            keys.add(cache_key(source))
            numbers.append(match)
        header.write_text(before)
    assert len(keys) == len(numbers) + 1


class CountedKernel:
    def __init__(self) -> None:
        self.launches = 0

    def launch(self, *arguments: object, **options: object) -> None:
        self.launches += 1


class CountingBackend(Simulator):
    """Compiles and launches nothing, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: dict[str, list[CountedKernel]] = {}

    def kernel(  # type: ignore[override]
        self, source: Path, arch: str, entry: str, tensor_maps: int, parameters: Sequence[Parameter], dynamic_smem: int
    ) -> CountedKernel:
        self.compiled.setdefault(source.name, []).append(CountedKernel())
        return self.compiled[source.name][-1]


def test_two_hundred_shapes_compile_once() -> None:
    manifest = read_manifest(GENERATED / "minicpm3")
    backend = CountingBackend()
    runner = DecodeRunner(manifest, backend)
    draw = random.Random(random.randrange(1 << 30))
    cache = torch.zeros(4, manifest.cache.page_size, manifest.d_qk, dtype=torch.bfloat16)
    shapes: set[tuple[int, int, int, int]] = set()
    while len(shapes) < 200:
        shapes.add((draw.randint(1, 9), draw.randint(1, 4), draw.randint(1, 40), draw.randint(1, 5)))
    for b, s_q, h_q, width in shapes:
        q = torch.zeros(b, s_q, h_q, manifest.d_qk, dtype=torch.bfloat16)
        out = torch.empty(b, s_q, h_q, manifest.d_v, dtype=torch.bfloat16)
        lse = torch.empty(b, h_q, s_q)
        table = torch.zeros(b, width, dtype=torch.int32)
        lengths = torch.full((b,), draw.randint(0, width * manifest.cache.page_size), dtype=torch.int32)
        runner.run(DecodeTensors(q, cache, table, lengths, out, lse), True, 0.1)
    assert set(backend.compiled) == {each.source.name for each in manifest.decodes}
    assert all(len(kernels) == 1 for kernels in backend.compiled.values())
    assert sum(kernel.launches for (kernel,) in backend.compiled.values()) == 200


def test_import_and_generate_with_nothing_around(tmp_path: Path) -> None:
    """No nvcc, no compiler, no CUDA_HOME, no GPU, no home: the package is imported and renders a shipped spec."""
    script = """
import shutil, sys
import mlaforge, torch
from mlaforge_generator.cli import cli
assert not torch.cuda.is_available() and shutil.which("nvcc") is None and shutil.which("sh") is None
cli(["generate", "minicpm3", "-o", sys.argv[1]])
"""
    nothing = {name: "" for name in ("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")}
    finish(start(script, tmp_path, bare=True, **nothing, PATH="/nowhere"))
    assert sorted(names(tmp_path / "minicpm3")) == sorted(names(GENERATED / "minicpm3"))
    source = tmp_path / "minicpm3" / "decode.cu"
    assert cache_key(source) == cache_key(GENERATED / "minicpm3" / "decode.cu")
