"""The code blocks of the documents, and how each is run.

A document's blocks are run in their order, in a folder of their own, as a reader would:

- `python` is executed; the blocks of a document share their names.
- `sh` is run by bash. A `text` block behind it is what it prints: each line must be there, in this order, however many
  blanks are between its words; `...` stands for lines that are left out.
- `yaml` is a spec, and must be one of which kernels can be planned. If its first line is a comment with a file's name,
  it is written to that file.
- `cuda` and `jinja` are parts of a file, which the comment in the first line names: each line must be there, in order.
- `diff` is carried out in a copy of the checkout.

A comment `<!-- not run here: why -->` in the line before a block leaves it out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlaforge_generator.plan import make_plan
from mlaforge_generator.spec import parse_spec

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    document: str
    line: int
    language: str
    text: str
    not_run: str | None = None

    @property
    def head(self) -> str:
        """The first line."""
        return self.text.partition("\n")[0]

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.head}"


def read_blocks(path: Path) -> list[Block]:
    """Read the blocks of a document."""
    found: list[Block] = []
    language: str | None = None
    before, start, lines = "", 0, []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if language is None and line.startswith("```"):
            language, start, lines = line[3:].strip(), number, []
        elif language is not None and line == "```":
            reason = re.fullmatch(r"<!-- not run here: (.+) -->", before)
            text = "".join(f"{each}\n" for each in lines)
            found.append(Block(path.relative_to(ROOT).as_posix(), start, language, text, reason[1] if reason else None))
            language = None
        elif language is not None:
            lines.append(line)
        if language is None or number == start:
            before = before if number == start else line
    assert language is None, f"{path}: the block of line {start} has no end"
    return found


def in_order(wanted: str, found: str) -> str | None:
    """Give the first line of `wanted` that `found` does not have behind those before it; None if all are there."""
    left = iter([" ".join(line.split()) for line in found.splitlines()])
    for line in wanted.splitlines():
        words = " ".join(line.split())
        if words and words != "..." and not any(words in each for each in left):
            return line
    return None


@dataclass
class Reader:
    """Runs the blocks of a document."""

    folder: Path
    names: dict[str, Any] = field(default_factory=dict)
    printed: str = ""
    """What the last `sh` block printed."""
    checkout: Path = ROOT
    """Where the sources are: a copy, if the document changes them."""

    def environment(self) -> dict[str, str]:
        """Give the environment of a shell in which mlaforge is installed."""
        scripts = self.folder / ".bin"
        if not scripts.is_dir():
            scripts.mkdir()
            script = scripts / "mlaforge"
            program = "from mlaforge_generator.cli import main; main()"
            script.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{program}' \"$@\"\n")
            script.chmod(0o755)
            (scripts / "python").symlink_to(sys.executable)
        paths = [str(self.checkout / name) for name in ("generator", "runtime")]
        return {
            **os.environ,
            "PATH": f"{scripts}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
            # No GPU: what a document shows is what a reader without one sees.
            "CUDA_VISIBLE_DEVICES": "",
        }

    def copy_checkout(self) -> None:
        """Let the document change the sources: its folder becomes a checkout."""
        for name in ("generator", "runtime", "templates", "specs"):
            shutil.copytree(ROOT / name, self.folder / name, ignore=shutil.ignore_patterns("__pycache__", "_data"))
        self.checkout = self.folder

    def run(self, block: Block) -> None:
        """Run a block, or fail."""
        handler = getattr(self, f"_{block.language}", None)
        assert handler is not None, (
            f"{block}: nobody runs a block of {block.language or 'no language'}; say why it is not run"
        )
        handler(block)

    def _python(self, block: Block) -> None:
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            exec(compile(block.text, str(block), "exec"), self.names)
        finally:
            os.chdir(before)

    def _sh(self, block: Block) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        self.printed = done.stdout

    def _text(self, block: Block) -> None:
        missing = in_order(block.text, self.printed)
        assert missing is None, f"{block}: not printed: {missing}\n{self.printed}"

    def _yaml(self, block: Block) -> None:
        # Where the document changes the sources, ours know nothing of that: a command has to read the file.
        if self.checkout == ROOT:
            make_plan(parse_spec(block.text, str(block)))
        if name := re.fullmatch(r"# ([\w.]+\.yaml)", block.head):
            (self.folder / name[1]).write_text(block.text)

    def _excerpt(self, block: Block) -> None:
        name = re.search(r"[\w./]+\.(?:cuh?|j2|cu\.j2)\b", block.head)
        assert name is not None, f"{block}: the first line names no file"
        paths = [path for path in (self.folder / name[0], ROOT / name[0]) if path.is_file()]
        assert paths, f"{block}: there is no {name[0]}"
        missing = in_order(block.text.partition("\n")[2], paths[0].read_text())
        assert missing is None, f"{block}: not in {name[0]}: {missing}"

    _cuda = _jinja = _excerpt

    def _diff(self, block: Block) -> None:
        """Replace the lines of a hunk: those without + are there, those without - shall be."""
        assert self.checkout != ROOT, f"{block}: the document has no checkout of its own"
        path = self.checkout / block.head.removeprefix("--- ")
        old, new = [], []
        for line in block.text.splitlines()[1:]:
            if not line.startswith("+"):
                old.append(line[1:])
            if not line.startswith("-"):
                new.append(line[1:])
        text = path.read_text()
        assert text.count("\n".join(old)) == 1, f"{block}: the lines are not there once"
        path.write_text(text.replace("\n".join(old), "\n".join(new)))
