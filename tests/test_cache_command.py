"""`mlaforge cache`: what it lists, what it finds damaged, and what it removes and what not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mlaforge.cache import Entry, KernelCache
from mlaforge.rendered import _held, materialise
from mlaforge_generator import cli

CUBIN = Entry({"kernels": [{"entry": "mla_decode"}], "seconds": {}}, b"cubin" * 100)
LIBRARY = Entry({"source": "gather.cu"}, b"library" * 100)
DAY = 86_400.0


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    """Fill a cache: a new cubin, a library of two days, a damaged file of ten days, and files of others."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("MLAFORGE_CACHE_DIR", str(directory))
    cache = KernelCache(directory)
    for digit, entry, age in (("a", CUBIN, 0.0), ("b", LIBRARY, 2 * DAY), ("c", CUBIN, 10 * DAY)):
        assert cache.store(digit * 64, entry)
        written = time.time() - age
        os.utime(directory / f"{digit * 64}.cubin", (written, written))
    damaged = directory / f"{'c' * 64}.cubin"
    status = damaged.stat()
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    os.utime(damaged, (status.st_mtime, status.st_mtime))
    for name in OTHERS:
        (directory / name).write_text("mine")
    (directory / f"{'e' * 64}.cubin").symlink_to(tmp_path / "elsewhere")
    (directory / f"{'f' * 64}.cubin").mkdir()
    return cache


OTHERS = ("notes.txt", "abc.cubin", f"{'a' * 64}.cubin.bak", f"{'A' * 64}.cubin")


def run(*arguments: str, **options: str) -> Result:
    result = CliRunner().invoke(cli.cli, ["cache", *arguments], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def keys(cache: KernelCache) -> str:
    return "".join(each.key[0] for each in cache.stored())


def test_list(kept: KernelCache) -> None:
    result = run("list")
    assert result.exit_code == 0 and result.stderr == "" and "\x1b" not in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.split()[:1] and line.split()[0][0] in "abc"]
    assert [row[:3] for row in rows[:2]] == [["a" * 12, "cubin", "mla_decode"], ["b" * 12, "simulator", "gather.cu"]]
    assert rows[2][:2] == ["c" * 12, "damaged"] and rows[1][-2:] == ["2", "d"] and rows[2][-2:] == ["10", "d"]
    assert result.stdout.splitlines()[-1] == f"{kept.directory}: 3 entries, 0.0 MiB"


def test_list_as_json(kept: KernelCache) -> None:
    data = json.loads(run("list", "--json").stdout)
    assert data["directory"] == str(kept.directory)
    assert [entry["kind"] for entry in data["entries"]] == ["cubin", "simulator", "damaged"]
    assert data["bytes"] == sum(entry["bytes"] for entry in data["entries"])
    for entry in data["entries"]:
        assert Path(entry["path"]).stat().st_size == entry["bytes"]
    assert [round(entry["age_seconds"] / DAY) for entry in data["entries"]] == [0, 2, 10]


def test_verify_finds_what_is_damaged(kept: KernelCache) -> None:
    result = run("verify")
    assert result.exit_code == 1 and f"{'c' * 64}.cubin: damaged" in result.stdout
    assert "1 of 3 entries are damaged" in result.stderr
    data = run("verify", "--json")
    assert data.exit_code == 1
    assert [entry["key"] for entry in json.loads(data.stdout)["damaged"]] == ["c" * 64]
    (kept.directory / f"{'c' * 64}.cubin").unlink()
    good = run("verify")
    assert good.exit_code == 0 and "2 entries, 0.0 MiB, none damaged" in good.stdout


@pytest.mark.parametrize("command", ["list", "verify"])
def test_a_bar_shows_how_far_reading_is(kept: KernelCache, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    steps: list[str] = []

    @contextlib.contextmanager
    def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
        steps.append(f"{what}, {total}")
        yield lambda: steps.append("one")

    monkeypatch.setattr("mlaforge_generator.cli.cache.progress", progress)
    run(command)
    assert steps == ["reading entries, 3", "one", "one", "one"]


@pytest.mark.parametrize("place", ["first", "last"])
def test_verify_reads_every_byte(kept: KernelCache, place: str) -> None:
    path = kept.directory / f"{'a' * 64}.cubin"
    data = bytearray(path.read_bytes())
    data[0 if place == "first" else -1] ^= 1
    path.write_bytes(data)
    assert len(json.loads(run("verify", "--json").stdout)["damaged"]) == 2


def test_an_entry_under_the_key_of_another_is_damaged(kept: KernelCache) -> None:
    (kept.directory / f"{'a' * 64}.cubin").rename(kept.directory / f"{'d' * 64}.cubin")
    assert [entry["key"][0] for entry in json.loads(run("verify", "--json").stdout)["damaged"]] == ["d", "c"]


def test_clear_asks(kept: KernelCache) -> None:
    refused = run("clear", input="n\n")
    assert refused.exit_code == 1 and "Remove 3 entries" in refused.stderr and keys(kept) == "abc"
    # Nobody there to ask.
    assert run("clear", input="").exit_code == 1 and keys(kept) == "abc"
    agreed = run("clear", input="y\n")
    assert agreed.exit_code == 0 and agreed.stdout == f"{kept.directory}: 3 entries, 0.0 MiB removed\n"
    assert keys(kept) == ""


def test_clear_leaves_what_is_not_the_caches(kept: KernelCache, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("mine")
    before = {path.name for path in kept.directory.iterdir()}
    assert run("clear", "--yes").exit_code == 0
    assert before - {path.name for path in kept.directory.iterdir()} == {f"{digit * 64}.cubin" for digit in "abc"}
    assert all((kept.directory / name).read_text() == "mine" for name in OTHERS)
    assert (tmp_path / "elsewhere").read_text() == "mine" and (kept.directory / f"{'f' * 64}.cubin").is_dir()


@pytest.mark.parametrize(
    ("age", "left"), [("1d", "a"), ("36h", "a"), ("3d", "ab"), ("1w", "ab"), ("30d", "abc"), ("0s", ""), ("0.5d", "a")]
)
def test_clear_by_age(kept: KernelCache, age: str, left: str) -> None:
    result = run("clear", "--yes", "--older-than", age, "--json")
    assert result.exit_code == 0 and keys(kept) == left
    assert {entry["key"][0] for entry in json.loads(result.stdout)["removed"]} == set("abc") - set(left)


@pytest.mark.parametrize("age", ["", "3", "d", "-1d", "1y", "1e3d", "nan", "1 d", "٣d"])
def test_what_is_no_age(kept: KernelCache, age: str) -> None:
    result = run("clear", "--yes", "--older-than", age)
    assert result.exit_code == 2 and "is no age" in result.stderr and keys(kept) == "abc"


def test_what_killed_processes_left_behind(kept: KernelCache) -> None:
    names = [f"{'9' * 64}.lock", ".mla123.tmp"]
    for old in (False, True):
        for name in names:
            (kept.directory / name).touch()
            if old:
                os.utime(kept.directory / name, (time.time() - DAY, time.time() - DAY))
        run("clear", "--yes", "--older-than", "30d")
        assert [(kept.directory / name).exists() for name in names] == [not old, not old]


@pytest.fixture
def rendered(kept: KernelCache) -> Path:
    """Add two folders of text, of which one is damaged, and what is none of ours beside them."""
    assert kept.directory is not None
    parent = kept.directory / "generated"
    for name, age in (("whole", 1.5 * DAY), ("damaged", 0.5 * DAY)):
        folder = materialise(name, {"decode.cu": f"int {name};\n", "manifest.json": "{}"})
        if name == "damaged":
            (folder / "decode.cu").write_bytes(b"int damaged;\r\n")
        written = time.time() - age
        os.utime(folder, (written, written))
    (parent / "mine").mkdir()
    (parent / "mine" / "file").touch()
    (parent / f"linked-{'0' * 16}").symlink_to(parent / "mine")
    (parent / f"file-{'0' * 16}").touch()
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()
    return parent


def test_rendered_text_is_listed_and_verified(kept: KernelCache, rendered: Path) -> None:
    data = json.loads(run("list", "--json").stdout)
    assert [(entry["kind"], entry["holds"]) for entry in data["entries"]] == [
        ("cubin", "mla_decode"),
        ("damaged", "damaged"),
        ("text", "whole"),
        ("simulator", "gather.cu"),
        ("damaged", ""),
    ]
    assert data["entries"][2]["bytes"] == len("int whole;\n{}")
    assert data["bytes"] == sum(entry["bytes"] for entry in data["entries"])
    assert run("list").stdout.splitlines()[-1] == f"{kept.directory}: 5 entries, 0.0 MiB"
    result = run("verify", "--json")
    assert result.exit_code == 1 and len(json.loads(result.stdout)["damaged"]) == 2
    (folder,) = rendered.glob("damaged-*")
    assert f"{folder}: damaged" in run("verify").stdout
    (folder / "decode.cu").write_text("int damaged;\n")
    assert len(json.loads(run("verify", "--json").stdout)["damaged"]) == 1
    (folder / "more.cuh").touch()
    assert len(json.loads(run("verify", "--json").stdout)["damaged"]) == 2


def test_rendered_text_is_cleared(kept: KernelCache, rendered: Path) -> None:
    result = run("clear", "--yes", "--older-than", "1d", "--json")
    assert [Path(each["path"]).name.partition("-")[0] for each in json.loads(result.stdout)["removed"]][-1] == "whole"
    assert [path.name.partition("-")[0] for path in sorted(rendered.iterdir())] == ["damaged", "file", "linked", "mine"]
    agreed = run("clear", input="y\n")
    assert "Remove 2 entries" in agreed.stderr and agreed.stdout.startswith(f"{kept.directory}: 2 entries")
    assert [path.name.partition("-")[0] for path in sorted(rendered.iterdir())] == ["file", "linked", "mine"]
    assert (rendered / "mine" / "file").exists() and (rendered / f"linked-{'0' * 16}").is_symlink()


def test_text_in_use_stays(kept: KernelCache, rendered: Path) -> None:
    folder = materialise("used", {"a.cu": "text"})
    data = json.loads(run("clear", "--yes", "--json").stdout)
    assert [each["path"] for each in data["in_use"]] == [str(folder)] and len(data["removed"]) == 5
    assert run("clear", "--yes").stdout == f"{kept.directory}: 0 entries, 0.0 MiB removed; 1 entry, 0.0 MiB in use\n"
    # Removed all the same, by hand: it is written anew.
    shutil.rmtree(folder)
    assert materialise("used", {"a.cu": "text"}) == folder and (folder / "a.cu").read_text() == "text"
    assert json.loads(run("clear", "--yes", "--json").stdout)["in_use"][0]["path"] == str(folder)


def test_a_cleared_entry_is_built_anew(kept: KernelCache) -> None:
    run("clear", "--yes")
    entry, hit = kept.get("a" * 64, lambda: CUBIN)
    assert entry == CUBIN and not hit
    assert kept.get("a" * 64, lambda: LIBRARY) == (CUBIN, True)


def test_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAFORGE_CACHE_DIR", str(tmp_path / "none"))
    for command in (["list"], ["verify"], ["clear"]):
        result = run(*command)
        assert result.exit_code == 0 and "0 entries, 0.0 MiB" in result.stdout
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLAFORGE_CACHE_DIR", str(tmp_path / "file"))
    result = run("list")
    assert result.exit_code == 2 and "can't be read" in result.stderr
    for name in ("MLAFORGE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert run("list").exit_code == 2


def test_a_cache_that_others_can_write_to(kept: KernelCache) -> None:
    assert kept.directory is not None
    kept.directory.chmod(0o777)
    for command in ("list", "verify"):
        result = run(command, "--json")
        assert result.exit_code == 2 and f"not used; chmod go-w {kept.directory}" in result.stderr
    assert run("clear", "--yes").exit_code == 0 and keys(kept) == ""


def test_torch_is_not_imported(kept: KernelCache) -> None:
    program = (
        f"import sys; sys.path[:0] = {[entry for entry in sys.path if entry]!r}\n"
        "from mlaforge_generator.cli import cli\n"
        "try: cli(['cache', 'list'])\n"
        "except SystemExit: pass\n"
        "wrong = [name for name in sys.modules if name.partition('.')[0] in ('torch', 'cuda', 'numpy')]\n"
        "sys.exit(str(wrong) if wrong else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
