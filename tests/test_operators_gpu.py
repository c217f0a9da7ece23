"""What torch does with the operators on a Hopper GPU: opcheck, torch.compile, torch.export, streams, a second device.

All of them alike. CUDA graphs with other lengths and tables are among each kernel's own tests. Run with
`pytest -m gpu`.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mlaforge
from mlaforge.api import MLA
from operators import NAMES, Call, Layer, calls, equal

pytestmark = pytest.mark.gpu


@functools.cache
def loaded() -> MLA:
    return mlaforge.load("deepseek_v3")


def call(name: str, device: str = "cuda") -> Call:
    return calls(loaded(), device)[name]


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    made = call(name)
    torch.library.opcheck(made.operator, made.arguments)
    if made.into:
        torch.library.opcheck(getattr(torch.ops.mlaforge, f"{name}_out"), made.out_arguments())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_compile(name: str, dynamic: bool) -> None:
    made = call(name)
    torch._dynamo.reset()
    compiled = torch.compile(made.layer, fullgraph=True, dynamic=dynamic)
    for smaller in (False, True):
        assert equal(compiled(*made.copies(smaller)), made.layer(*made.copies(smaller)))


@pytest.mark.parametrize("name", NAMES)
def test_compile_with_graphs_of_its_own(name: str) -> None:
    """torch captures what it compiled, and replays it."""
    made = call(name)
    want = made.layer(*made.copies())
    torch._dynamo.reset()
    compiled = torch.compile(made.layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert equal(tuple(each.clone() for each in compiled(*made.copies())), want)


@pytest.mark.parametrize("name", NAMES)
def test_export_to_another_process(name: str, tmp_path: Path) -> None:
    """A kernel's key in a program is the same wherever the same spec is loaded."""
    made = call(name)
    file = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(Layer(made), made.copies()), file)
    torch.save((made.copies(), made.layer(*made.copies())), tmp_path / "tensors.pt")
    code = (
        "import sys, torch, mlaforge\n"
        "mlaforge.load('deepseek_v3')\n"
        "given, want = torch.load(sys.argv[2])\n"
        "got = torch.export.load(sys.argv[1]).module()(*given)\n"
        "assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))\n"
    )
    command = [sys.executable, "-c", code, str(file), str(tmp_path / "tensors.pt")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


@pytest.mark.parametrize("name", NAMES)
def test_stream_that_is_not_the_default(name: str) -> None:
    """What is computed there late is waited for, and only there."""
    made = call(name)
    want = made.layer(*made.copies())
    late = tuple(torch.zeros_like(each) for each in made.tensors)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        for into, each in zip(late, made.tensors, strict=True):
            into.copy_(each)
        got = made.layer(*late)
    side.synchronize()
    assert equal(got, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("of_tensors, current", [(0, 1), (1, 0), (1, 1)])
def test_second_device(name: str, of_tensors: int, current: int) -> None:
    """Results are those of the tensors' device, whichever is the current one, and leave it so; streams, too."""
    want = tuple(each.cpu() for each in call(name, "cuda:0").layer(*call(name, "cuda:0").copies()))
    made = call(name, f"cuda:{of_tensors}")
    with torch.cuda.device(current):
        got = made.layer(*made.copies())
        assert torch.cuda.current_device() == current
        assert all(each.device.index == of_tensors for each in got)
        assert equal(tuple(each.cpu() for each in got), want)
        side = torch.cuda.Stream(of_tensors)
        late = tuple(torch.zeros_like(each) for each in made.tensors)
        torch.cuda.synchronize(of_tensors)
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            for into, each in zip(late, made.tensors, strict=True):
                into.copy_(each)
            # A stream brings its device along.
            with torch.cuda.device(current):
                got = made.layer(*late)
        side.synchronize()
        assert equal(tuple(each.cpu() for each in got), want)
