"""Small benches of prefill and of the kernels that move data on a Hopper GPU. Run with `pytest -m gpu`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import mlaforge
from mlaforge.bench.cases import memory_cases
from mlaforge.bench.memory import memory_call
from mlaforge.bench.session import COPY, OURS
from mlaforge.bench.timing import Gpu
from mlaforge_generator import cli

pytestmark = pytest.mark.gpu


def test_a_small_bench(tmp_path: Path) -> None:
    arguments = ["--suite", "prefill,memory", "--shapes", "2x1024,1x3000", "--heads", "16", "--repeats", "10"]
    result = CliRunner().invoke(cli.cli, ["bench", "deepseek_v3", *arguments, "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    made = json.loads((tmp_path / "bench.json").read_text())
    assert made["burst"] == made["sustained"] == [] and 100 < made["ceilings"]["gemm"]["TFLOPs"] < 1000
    assert [(each["b"], each["s"], each["h"]) for each in made["prefill"]] == [(2, 1024, 16), (1, 3000, 16)]
    for entry in made["prefill"]:
        kernels = entry["kernels"]
        # Torch is there wherever we are, and no other function.
        assert kernels["torch"]["check"]["cosine"] < 1e-4 and entry["ratio"] > 0 and 0 < entry["of_gemm"] < 1
        assert kernels[OURS]["launch"] == "graph" and kernels[OURS]["us"]["count"] == 10
    assert len(made["memory"]) == 5
    for entry in made["memory"]:
        assert 0.5 < entry["of_copy"] < 2 and 1_000 < entry["kernels"][COPY]["GBps"] < 10_000


def test_calls_of_the_kernels_that_move_data_are_captured_and_right() -> None:
    mla, gpu = mlaforge.load("deepseek_v3"), Gpu(torch.device("cuda"))
    for case in memory_cases(1 << 12):
        call = memory_call(mla, case, gpu.device, 0)
        timed = gpu.prepare(call.run)
        assert timed.launch == "graph", timed.why
        assert call.check(gpu.result(timed)) is None, case
