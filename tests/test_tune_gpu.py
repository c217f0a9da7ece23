"""Small tunes on a Hopper GPU, from spec to tuned spec. Run with `pytest -m gpu`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlaforge.bench.threshold import MOST_DIFFERENCE
from mlaforge_generator import cli
from mlaforge_generator.candidates import enumerate_candidates
from mlaforge_generator.spec import load_spec

pytestmark = pytest.mark.gpu

SPEC = """\
# A small one.
name: tiny
model: {num_attention_heads: 16, kv_lora_rank: 256, qk_nope_head_dim: 64, qk_rope_head_dim: 32, v_head_dim: 64}
"""


def test_a_small_tune(tmp_path: Path) -> None:
    spec, out, data = tmp_path / "tiny.yaml", tmp_path / "tuned.yaml", tmp_path / "data"
    spec.write_text(SPEC)
    arguments = ["--shapes", "1x4096,16x1024", "--s-q", "1,2", "--repeats", "10", "--examples", "8"]
    result = CliRunner().invoke(cli.cli, ["tune", str(spec), *arguments, "-o", str(out), "--data", str(data)])
    assert result.exit_code == 0, result.output
    made = json.loads((data / "tune.json").read_text())
    swept = enumerate_candidates(load_spec(spec))
    states = {each["label"]: each["state"] for each in made["candidates"]}
    assert states == {each.label: "right" if each in swept.buildable else "not built" for each in swept.candidates}
    assert len(made["cases"]) == 4 and made["stopped"] is None
    for case in made["cases"]:
        assert set(case["kernels"]) == {each.label for each in swept.buildable} and case["repeats"] == 10
        for each in case["kernels"].values():
            assert 1 < each["us"]["least"] <= each["us"]["q1"] <= each["us"]["median"] <= each["us"]["q3"] < 10_000
    tuned = load_spec(out)
    (winner,) = [each for each in swept.candidates if each.label == made["winner"]]
    assert tuned == winner.spec and out.read_text().startswith(SPEC) and "Tuned by mlaforge" in out.read_text()
    assert (data / "tune.svg").is_file() and made["winner"] in result.output


def test_a_small_threshold(tmp_path: Path) -> None:
    spec, data = tmp_path / "tiny.yaml", tmp_path / "data"
    spec.write_text(SPEC)
    arguments = ["--tokens", "1,16,128,512", "--contexts", "0,1000,20000", "--repeats", "10", "--data", str(data)]
    result = CliRunner().invoke(cli.cli, ["tune", str(spec), "--threshold", *arguments])
    assert result.exit_code == 0, result.output
    made = json.loads((data / "threshold.json").read_text())
    assert len(made["points"]) == 12 and made["failed"] == [] and made["stopped"] is None
    for point in made["points"]:
        assert point["repeats"] == 10 and 0 <= point["difference"] <= MOST_DIFFERENCE
        for us in point["us"].values():
            assert 1 < us["least"] <= us["q1"] <= us["median"] <= us["q3"] < 100_000
    # Of one token and a long context all keys and values would be made for a single query.
    (far,) = [point for point in made["points"] if (point["tokens"], point["context"]) == (1, 20_000)]
    assert far["us"]["absorbed"]["median"] < far["us"]["decompressed"]["median"]
    losses = {each["threshold"]: each["mean"] for each in made["thresholds"]}
    assert {128, 256, 512, made["found"]} <= set(losses) and min(losses.values()) == losses[made["found"]]
    text = (data / "tiny.yaml").read_text()
    assert load_spec(data / "tiny.yaml").dispatch.prefill_absorption_threshold == made["found"]
    assert text.startswith(SPEC) and "Threshold measured by mlaforge" in text and (data / "threshold.svg").is_file()
