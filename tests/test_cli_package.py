"""The command line as a whole: what starting it costs, completion, and data for programs."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import mlaforge_generator
from documents import ROOT, read_blocks
from mlaforge.compiler import CompiledKernel
from mlaforge.manifest import Manifest, read_manifest
from mlaforge_generator import cli
from mlaforge_generator.cli import group
from mlaforge_generator.cli.output import print_json
from test_cli import Decoders
from test_cli import on_cpu as on_cpu
from test_verify import one_thread as one_thread

GENERATOR = Path(mlaforge_generator.__file__).parent


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli.cli, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def process(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [entry for entry in sys.path if entry]
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{program}", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def commands(group: click.Group, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [before]
    for name, command in group.commands.items():
        path = (*before, name)
        found += commands(command, path) if isinstance(command, click.Group) else [path]
    return found


# ---- Starting it -----------------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy() -> None:
    """Help of every command, in one process, without torch, CUDA, rich or the runtime's other modules."""
    calls = [[*path, "--help"] for path in commands(cli.cli)]
    done = process(
        "from mlaforge_generator.cli import cli\n"
        f"for call in {calls!r}:\n"
        "    try: cli(call)\n"
        "    except SystemExit as stop: assert not stop.code\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "wrong = roots & {'torch', 'cuda', 'numpy', 'rich', 'transformers', 'openai'}\n"
        "wrong |= {name for name in sys.modules if name.startswith('mlaforge.')}\n"
        "sys.exit(str(wrong) if wrong else 0)"
    )
    assert done.returncode == 0, done.stderr
    assert {("import",), ("export",), ("doctor",), ("cache", "list"), ("cache", "clear"), ("cache", "verify")} <= {
        tuple(call[:-1]) for call in calls
    }


def test_only_the_command_line_knows_the_runtime() -> None:
    for path in GENERATOR.rglob("*.py"):
        if path.is_relative_to(GENERATOR / "cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not {name.partition(".")[0] for name in names} & {"mlaforge", "torch", "cuda"}, path


def test_run_as_a_module() -> None:
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-m", "mlaforge_generator.cli", "--version"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("mlaforge, version ")


# ---- Completion ------------------------------------------------------------------------------------------------------


def complete(**environment: str) -> str:
    return CliRunner().invoke(cli.cli, prog_name="mlaforge", env=environment).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    """The README's lines; click asks bash for its version, and prints the script whatever it is."""
    script = complete(_MLAFORGE_COMPLETE=f"{shell}_source")
    assert f"_MLAFORGE_COMPLETE={shell}_complete" in script and "_mlaforge_completion" in script


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("mlaforge ca", {"cache"}),
        ("mlaforge cache ", {"list", "verify", "clear"}),
        ("mlaforge plan deepseek_v2", {"deepseek_v2", "deepseek_v2_lite"}),
        ("mlaforge compile minicpm3 glm_5_3", {"glm_5_3_flash"}),
        ("mlaforge export minicpm3 --format c", {"c-header", "cmake"}),
        ("mlaforge make no_such/sp", {"no_such/sp"}),
    ],
)
def test_completion(words: str, wanted: set[str]) -> None:
    count = len(shlex.split(words)) - (not words.endswith(" "))
    text = complete(_MLAFORGE_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(count))
    kinds = {"file"} if "/" in words else {"plain"}
    assert {tuple(line.split(",", 1)) for line in text.splitlines()} == {
        (kind, each) for kind in kinds for each in wanted
    }


# ---- For programs ----------------------------------------------------------------------------------------------------


def test_json_has_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("inf"), 1.5], "b": (float("nan"),)})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": [None]}


def test_every_command_has_json() -> None:
    for path in commands(cli.cli):
        command: click.Command = cli.cli
        for name in path:
            assert isinstance(command, click.Group)
            command = command.commands[name]
        if isinstance(command, click.Group):
            continue
        (option,) = [each for each in command.params if "--json" in each.opts]
        assert isinstance(option, click.Option) and option.is_flag and option.help, path


def as_json(*arguments: str | Path, exit_code: int = 0) -> Any:
    result = run(*map(str, arguments), "--json")
    assert result.exit_code == exit_code, result.stderr
    return json.loads(result.stdout)


def test_generate_as_json(tmp_path: Path) -> None:
    (made,) = as_json("generate", "minicpm3", "-o", tmp_path)
    assert made["folder"] == str(tmp_path / "minicpm3") and len(made["written"]) == made["files"] > 10
    assert as_json("generate", "minicpm3", "-o", tmp_path)[0]["written"] == []
    checked = as_json("generate", "minicpm3", "-o", tmp_path, "--check")
    assert checked == {"output": str(tmp_path), "specs": 1, "drifted": {}}
    (tmp_path / "minicpm3" / "decode.cu").write_text("")
    drifted = as_json("generate", "minicpm3", "-o", tmp_path, "--check", exit_code=1)["drifted"]
    assert set(drifted) == {"minicpm3"} and "+constexpr int kStages" in drifted["minicpm3"]


def test_schema_as_json(tmp_path: Path) -> None:
    assert as_json("schema", "--check")["up_to_date"] is True
    assert as_json("schema", "--check", "-o", tmp_path / "none", exit_code=1)["up_to_date"] is False


def test_import_and_export_as_json(tmp_path: Path) -> None:
    exported = as_json("export", "minicpm3", "--format", "trtllm-json", "-o", tmp_path)
    assert exported == {"spec": "minicpm3", "format": "trtllm-json", "files": [str(tmp_path / "minicpm3.json")]}
    assert len(as_json("export", "minicpm3", "--format", "cmake", "-o", tmp_path)["files"]) > 10
    spec = tmp_path / "again.yaml"
    imported = as_json("import", tmp_path / "minicpm3.json", "-o", spec)
    assert imported["file"] == str(spec) and imported["text"] == spec.read_text()
    assert imported["spec"]["model"]["kv_lora_rank"] == 256 and imported["not_planned"] == []
    config = {"num_attention_heads": 8, "kv_lora_rank": 100, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps({**config, "v_head_dim": 64, "model_type": "deepseek_v3"}))
    odd = as_json("import", tmp_path / "config.json", "--name", "odd")
    assert odd["file"] is None and odd["text"].endswith("\n") and "model.kv_lora_rank" in odd["not_planned"][0]


def test_trace_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlaforge.trace import Lane, Timeline

    lanes = (Lane("warp 0", "scores", 5, ()),), (Lane("tile 0", "shared memory", 5, ()),)
    timeline = Timeline("a run", 5, *lanes, fault="a race")
    monkeypatch.setattr("mlaforge.trace.trace_decode", lambda *_: timeline)
    picture = tmp_path / "a.svg"
    found = as_json("trace", "minicpm3", "-o", picture, exit_code=1)
    assert found["files"] == [str(picture)] and found["steps"] == 5 and found["fault"] == "a race"
    assert found["warps"] == [{"name": "warp 0", "group": "scores"}] and found["buffers"][0]["name"] == "tile 0"


def compile_nothing(folders: list[Path]) -> list[tuple[Manifest, CompiledKernel]]:
    manifest = read_manifest(folders[0])
    return [(manifest, CompiledKernel(manifest.decode.source, "sm_90a", "", b"", {}, "", {}, {}, True))]


def test_make_as_json(on_cpu: Decoders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    of_make = cli.make.Run

    def small(seed: int, examples: int | None, device: str, results: list[dict[str, Any]] | None) -> Any:
        return of_make(seed, examples, 100, device="cpu", kernels=("decode",), results=results)

    monkeypatch.setattr(cli.make, "Run", small)
    monkeypatch.setattr(cli.make, "compile_folders", compile_nothing)
    made = as_json("make", "minicpm3", "-o", tmp_path, "--examples", "3")
    assert made["plan"]["spec"]["name"] == "minicpm3" and made["generated"]["folder"] == str(tmp_path / "minicpm3")
    assert made["kernels"][0]["cubin_bytes"] == 0 and made["simulated"] is None
    assert [each["kernels"] for each in made["verification"]] == [["absorption"], ["decode"]]
    on_cpu.fault = "base-2 lse"
    failed = as_json("make", "minicpm3", "-o", tmp_path, "--examples", "20", exit_code=1)
    assert failed["verification"][-1]["failure"]["reproduce"].startswith("mlaforge verify minicpm3")


# ---- Terminals -------------------------------------------------------------------------------------------------------


def test_exit_codes_are_the_same_everywhere() -> None:
    """In the help, in the README, and in the classes that carry them."""
    codes = {0, *(each.exit_code for each in (group.Failure, *group.Failure.__subclasses__()))}
    assert codes == {0, 1, 2, 3, 4}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for text, form in ((run("--help").stdout, r"^ +(\d)  \w"), (readme, r"^\| (\d) \| \w")):
        assert {int(code) for code in re.findall(form, text, re.MULTILINE)} == codes


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", ["plan minicpm3", "plan minicpm3 --json", "schema", "generate --check"])
def test_output_that_can_not_be_written(arguments: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "mlaforge_generator.cli", *arguments.split()]
        paths = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    assert (done.returncode, done.stderr) == (2, "No space left on device\n")


def test_no_place_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    result = run("verify", "minicpm3")
    assert result.exit_code == 2 and result.stderr.startswith("/no/such/folder/mlaforge-")
    assert result.stderr.endswith(": No such file or directory\n")


def test_a_reader_that_has_seen_enough() -> None:
    """As in `mlaforge plan SPEC | head -1`."""
    for arguments in ("plan minicpm3", "schema"):
        done = process(
            "import os, sys\nfrom mlaforge_generator.cli import cli\n"
            "reader, writer = os.pipe()\nos.close(reader)\nos.dup2(writer, 1)\ncli(sys.argv[1:])",
            *arguments.split(),
        )
        assert done.returncode == 1 and done.stderr == ""


def test_a_command_that_is_interrupted() -> None:
    done = process(
        "import os, signal\nfrom mlaforge_generator.cli import cli, generate\n"
        # Who runs this may have told it to ignore the signal.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "generate.make_plans = lambda specs: os.kill(os.getpid(), signal.SIGINT)\ncli(['plan', 'minicpm3'])",
    )
    assert done.returncode == 1 and done.stderr.strip() == "Aborted!" and done.stdout == ""


def on_a_terminal(*arguments: str) -> tuple[int, str, str]:
    """Run a command whose stderr is a terminal and whose stdout is a pipe; give exit code, stdout and stderr."""
    main, terminal = os.openpty()
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    command = [sys.executable, "-m", "mlaforge_generator.cli", *arguments]
    environment |= {"PYTHONPATH": paths, "TERM": "xterm-256color"}
    started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=terminal, text=True)
    os.close(terminal)
    shown = b""
    # A terminal that nobody holds any more is an error to read from.
    with contextlib.suppress(OSError):
        while part := os.read(main, 65_536):
            shown += part
    os.close(main)
    assert started.stdout is not None
    printed = started.stdout.read()
    return started.wait(), printed, shown.decode(errors="replace")


def test_progress_on_a_terminal_and_no_colours_in_a_pipe(tmp_path: Path) -> None:
    spec = tmp_path / "tour.yaml"
    spec.write_text(next(block.text for block in read_blocks(ROOT / "docs" / "tour.md") if block.language == "yaml"))
    code, printed, shown = on_a_terminal("compile", str(spec))
    assert code == 0 and "compiling" in shown and "\x1b[" in shown
    assert "mla_decode" in printed and "\x1b" not in printed


@pytest.mark.parametrize("what", ["status", "progress", "steps"])
def test_bars_are_for_terminals(what: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from mlaforge_generator.cli import output

    def show() -> str:
        if what == "status":
            with output.status("waiting"):
                pass
        elif what == "progress":
            with output.progress("waiting", 2) as advance:
                advance()
        else:
            with output.steps() as (advance_to, total):
                total(2)
                advance_to("waiting")
        captured = capfd.readouterr()
        assert captured.out == ""
        return captured.err

    assert show() == ""
    monkeypatch.setattr(
        output, "make_console", lambda stderr=False: Console(stderr=stderr, force_terminal=True, width=80)
    )
    assert "waiting" in show()


def test_verify_as_json(on_cpu: Decoders) -> None:
    arguments = ("verify", "minicpm3", "--device", "cpu", "--kernel", "decode", "--max-tokens", "300", "--json")
    result = run(*arguments, "--examples", "5")
    assert result.exit_code == 0 and result.stderr == ""
    absorption, decode = json.loads(result.stdout)
    assert absorption["kernels"] == ["absorption"] and absorption["ok"] and absorption["cosines"]["bf16"] > 0.99
    assert decode["kernels"] == ["decode"] and decode["ok"] and decode["problems"] == 5 and decode["failure"] is None
    assert sum(decode["counts"].values()) == 5 and set(decode["counts"]) == set(decode["worst"])


def test_a_failed_verify_as_json(on_cpu: Decoders) -> None:
    arguments = ("verify", "minicpm3", "--device", "cpu", "--kernel", "decode", "--max-tokens", "300", "--json")
    on_cpu.fault = "base-2 lse"
    result = run(*arguments, "--examples", "20")
    assert result.exit_code == 1 and "failed" in result.stderr
    decode: dict[str, Any] = json.loads(result.stdout)[-1]
    assert not decode["ok"] and any("lse" in line for line in decode["failure"]["failures"])
    words = shlex.split(decode["failure"]["reproduce"])
    assert words[-1] == decode["failure"]["problem"]
    again = run(*words[1:], "--device", "cpu")
    assert again.exit_code == 1 and f"reproduce: {decode['failure']['reproduce']}" in again.stdout
