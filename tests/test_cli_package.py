"""The command line as a whole: what starting it costs, completion, and data for programs."""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import mlaforge_generator
from mlaforge_generator import cli
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
        ("mlaforge plan deepseek_", {"deepseek_v2", "deepseek_v2_lite", "deepseek_v3"}),
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
