"""Tuning without a GPU: what is swept, what is chosen, what is written back, and what is told when something is wrong.

Decoders in torch take the kernels' place, and a device that gives prescribed times the GPU's.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import shlex
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field
from rich.console import Console

import mlaforge
from mlaforge.bench import power, timing, tune
from mlaforge.bench.cases import Case, affordable_repeats
from mlaforge.bench.peers import Run
from mlaforge.bench.session import BenchError
from mlaforge.bench.timing import Launch, Timed
from mlaforge.bench.tune import Candidate, Options, Tuning, choose, rank
from mlaforge.bench.tune_plot import to_svg
from mlaforge.compiler import CompileError
from mlaforge.manifest import read_manifest
from mlaforge.toolchain import ToolchainError
from mlaforge.verify import Problem
from mlaforge_generator import candidates as candidates_module
from mlaforge_generator import cli
from mlaforge_generator.candidates import (
    Sweep,
    Value,
    enumerate_candidates,
    field_values,
    open_fields,
    with_settings,
)
from mlaforge_generator.errors import SpecError
from mlaforge_generator.plan import Plan, make_plan
from mlaforge_generator.render import render
from mlaforge_generator.resources import find_spec, spec_dir
from mlaforge_generator.spec import Decode, Spec, dump_spec, load_spec, parse_spec
from mlaforge_generator.tune_tables import tune_tables
from mlaforge_generator.write_back import WriteBackError, tuned_remarks, write_back
from strategies import specs
from test_bench import FakeDevice
from test_verify import Cache, Manifest, TorchDecoder
from test_verify import one_thread as one_thread

SHIPPED = sorted(path.stem for path in spec_dir().glob("*.yaml"))
MODEL = (
    "model: {num_attention_heads: 8, kv_lora_rank: 256, qk_nope_head_dim: 64, qk_rope_head_dim: 32, v_head_dim: 64}\n"
)
MINIMAL = "name: tiny\n" + MODEL
TUNED: dict[str, Value] = {"schedule": "skewed", "tile_rows": 64, "stages": 3}


# ---- What is swept ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_every_combination_that_the_fields_offer_is_there_once(name: str) -> None:
    spec = load_spec(find_spec(name))
    swept = enumerate_candidates(spec)
    assert tuple(swept.fields) == open_fields(spec)
    # The planner can build what it says it can, and says why of the rest.
    for each in swept.candidates:
        try:
            text = render(make_plan(with_settings(spec, each.settings)))
        except SpecError:
            assert each.files is None and each.reason
        else:
            assert each.files == text and each.reason is None
    settings = [each for candidate in swept.candidates for each in (candidate.settings, *candidate.same)]
    filled = [each for each in settings if each]
    every = math.prod(len(values) for values in swept.fields.values())
    assert len(filled) == every == len({tuple(each.items()) for each in filled})
    labels = [each.label for each in swept.candidates]
    assert len(set(labels)) == len(labels) and len(swept.buildable) >= 2
    (own,) = [each for each in swept.candidates if each.planner]
    assert own.files == render(make_plan(spec))


def test_values_are_those_of_the_declaration() -> None:
    swept = enumerate_candidates(parse_spec(MINIMAL), ["stages", "schedule"])
    schedules = set(Decode.model_json_schema()["properties"]["schedule"]["enum"]) - {"auto"}
    assert set(swept.fields["schedule"]) == schedules and swept.fields["stages"] == tuple(range(1, 9))
    labels = {f"stages {n}, {name}" for name in schedules for n in range(1, 9)}
    assert {each.label for each in swept.candidates if each.settings} == labels


def test_what_is_fixed_stays() -> None:
    spec = parse_spec(MINIMAL + "kernels: {decode: {schedule: plain, tile_rows: 64}}\n")
    assert "stages" in open_fields(spec) and not {"schedule", "tile_rows"} & set(open_fields(spec))
    swept = enumerate_candidates(spec)
    assert all(each.spec.kernels.decode.schedule == "plain" for each in swept.candidates)
    assert {each.settings["stages"] for each in swept.candidates} == set(range(1, 9))


@pytest.mark.parametrize(
    ("name", "rows"), [("minicpm3", {8, 16, 24, 32, 40, 48, 56, 64}), ("deepseek_v3", {8, 16, 24, 32, 64})]
)
def test_rows_that_only_a_spec_can_ask_for_are_swept(name: str, rows: set[int]) -> None:
    swept = enumerate_candidates(load_spec(find_spec(name)), ["tile_rows"])
    assert {each.settings["tile_rows"] for each in swept.buildable if each.settings} == rows
    refused = [each for each in swept.candidates if each.files is None]
    assert all("need" in str(each.reason) and "registers" in str(each.reason) for each in refused)


def first_settings(spec: Spec) -> Mapping[str, Value]:
    # What the planner makes of open fields is several kernels, and no setting gives them.
    return next(each.settings for each in enumerate_candidates(spec).buildable if each.settings)


def test_named_fields_are_swept_though_they_are_fixed() -> None:
    spec = parse_spec(MINIMAL)
    fixed = with_settings(spec, first_settings(spec))
    with pytest.raises(ValueError, match=r"nothing open: none of schedule, .*stages.* is auto"):
        enumerate_candidates(fixed)
    swept = enumerate_candidates(fixed, ["schedule"])
    assert [dict(each.settings) for each in swept.candidates] == [{"schedule": n} for n in swept.fields["schedule"]]
    (own,) = [each for each in swept.candidates if each.planner]
    assert own.label == make_plan(with_settings(fixed, {"schedule": "auto"})).decode.schedule_name
    with pytest.raises(ValueError, match="no field stagees, x; its fields are schedule, "):
        enumerate_candidates(fixed, ["stagees", "schedule", "x"])


def test_settings_of_the_same_text_are_one_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates_module, "render", lambda plan: {"decode.cu": plan.decode.schedule_name})
    spec = parse_spec(MINIMAL + "kernels: {decode: {schedule: plain}}\n")
    (only,) = enumerate_candidates(spec, ["stages"]).buildable
    assert dict(only.settings) == {"stages": 2} and only.planner
    assert [each["stages"] for each in only.same] == [3, 4]


def test_what_no_setting_gives_is_a_candidate_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the planner, left alone, took one of two kernels at run time."""

    def both(plan: Plan) -> dict[str, str]:
        left = plan.spec.kernels.decode.schedule == "auto"
        return {"decode.cu": "both" if left else f"{plan.decode.schedule_name} {plan.decode.tile.stages}"}

    monkeypatch.setattr(candidates_module, "render", both)
    first, *others = enumerate_candidates(parse_spec(MINIMAL)).candidates
    assert first.label == "auto" and first.settings == {} and first.planner and first.files == {"decode.cu": "both"}
    assert others and not any(each.planner for each in others)


class LaterDecode(Decode):
    """Decode as it may become."""

    min_part_cost: Literal["auto"] | Annotated[int, Field(ge=2, le=40)] = "auto"
    multicast: Literal["auto"] | bool = "auto"
    only: Literal["auto", 7] = "auto"
    weight: float = 1.0


def test_a_new_field_is_swept_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates_module, "Decode", LaterDecode)
    spec = parse_spec(MINIMAL)
    decode = LaterDecode(schedule="skewed", tile_rows=64, stages=2)
    spec = spec.model_copy(update={"kernels": spec.kernels.model_copy(update={"decode": decode})})
    monkeypatch.setattr(candidates_module, "render", lambda plan: {"decode.cu": str(plan.spec.kernels.decode)})
    assert {"min_part_cost", "multicast", "only"} <= set(open_fields(spec))
    swept = enumerate_candidates(spec, ["min_part_cost", "multicast", "only"])
    assert dict(swept.fields) == {
        "min_part_cost": (2, 3, 4, 6, 8, 12, 16, 24, 32, 40),
        "multicast": (False, True),
        "only": (7,),
    }
    # What all candidates share is no part of their names, unless there is nothing else.
    assert swept.candidates[0].label == "auto" and swept.candidates[1].label == "min_part_cost 2, multicast false"
    assert len(swept.candidates) == 21 and swept.candidates[1].settings["only"] == 7
    assert [each.label for each in enumerate_candidates(spec, ["only"]).candidates] == ["auto", "only 7"]
    with pytest.raises(ValueError, match="can't be listed"):
        enumerate_candidates(spec, ["weight"])


@pytest.mark.parametrize(
    ("declaration", "values"),
    [
        ({"enum": ["auto", 64, 128]}, (64, 128)),
        ({"const": 64}, (64,)),
        ({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 3, "maximum": 5}]}, (3, 4, 5)),
        ({"type": "integer", "minimum": 0, "maximum": 100}, (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100)),
        ({"type": "boolean"}, (False, True)),
    ],
)
def test_values_of_a_declaration(declaration: dict[str, Any], values: tuple[Value, ...]) -> None:
    assert field_values(declaration) == values


@settings(max_examples=15)
@given(specs())
def test_the_planners_choice_is_always_among_them(spec: Spec) -> None:
    swept = enumerate_candidates(spec)
    texts = [json.dumps(each.files) for each in swept.buildable]
    assert len(set(texts)) == len(texts)
    (own,) = [each for each in swept.candidates if each.planner]
    assert own.files == render(make_plan(spec))


# ---- What is written back --------------------------------------------------------------------------------------------

REMARKS = ["Tuned by mlaforge 1.0 on a day.", "1 x 64 tokens: 3.0 (2.9 to 3.1)"]
FILLED = "{schedule: skewed, tile_rows: 64, stages: 3}"
COMMENT = "# Tuned by mlaforge 1.0 on a day.\n#   1 x 64 tokens: 3.0 (2.9 to 3.1)\n"
INDENTED = COMMENT.replace("#", "  #", 1).replace("\n#", "\n  #")

# Each: a spec's text, and what it becomes.
LAYOUTS = {
    "no kernels": (MINIMAL, f"{MINIMAL}\nkernels:\n{INDENTED}  decode: {FILLED}\n"),
    "no newline at the end": (MINIMAL.rstrip(), f"{MINIMAL}\nkernels:\n{INDENTED}  decode: {FILLED}\n"),
    "comment at the end": (
        MINIMAL + "# that's all\n",
        f"{MINIMAL}# that's all\n\nkernels:\n{INDENTED}  decode: {FILLED}\n",
    ),
    "ends with dots": (f"---\n{MINIMAL}...\n", f"---\n{MINIMAL}\nkernels:\n{INDENTED}  decode: {FILLED}\n...\n"),
    "empty kernels": (
        MINIMAL + "kernels: {}  # none\n",
        f"{MINIMAL}{COMMENT}kernels: {{decode: {FILLED}}}  # none\n",
    ),
    "empty decode": (
        MINIMAL + "kernels: {decode: {}}\n",
        f"{MINIMAL}{COMMENT}kernels: {{decode: {FILLED}}}\n",
    ),
    "braces": (
        MINIMAL + "kernels:\n  # ours\n  decode: {tile_tokens: 64, stages: auto, schedule: auto}  # choose\n",
        f"{MINIMAL}kernels:\n  # ours\n{INDENTED}"
        "  decode: {tile_tokens: 64, stages: 3, schedule: skewed, tile_rows: 64}  # choose\n",
    ),
    "braces over lines, with comments and a comma": (
        MINIMAL + "kernels:\n  decode: {\n    schedule: 'auto', # fast\n    stages: auto, # deep\n  }\n",
        f"{MINIMAL}kernels:\n{INDENTED}"
        "  decode: {\n    schedule: skewed, # fast\n    stages: 3, tile_rows: 64, # deep\n  }\n",
    ),
    "block": (
        "kernels:\n    decode:\n        # why\n        schedule: auto   # fast\n\n# the model\n" + MINIMAL,
        "kernels:\n" + re.sub("^", "    ", COMMENT, flags=re.MULTILINE).rstrip(" ") + "    decode:\n        # why\n"
        "        schedule: skewed   # fast\n        tile_rows: 64\n        stages: 3\n\n# the model\n" + MINIMAL,
    ),
    "JSON": (
        '{"name": "tiny",\n "kernels": {"decode": {"stages": "auto"}},\n ' + '"model": ' + MODEL[7:].rstrip() + "}",
        '{"name": "tiny",\n' + re.sub("^", " ", COMMENT, flags=re.MULTILINE).rstrip(" ") + ' "kernels": {"decode": '
        '{"stages": 3, schedule: skewed, tile_rows: 64}},\n "model": ' + MODEL[7:].rstrip() + "}",
    ),
    "all on one line": (
        "{name: tiny, " + MODEL.rstrip() + "}\n",
        f"{COMMENT}{{name: tiny, {MODEL.rstrip()}, kernels: {{decode: {FILLED}}}}}\n",
    ),
    "all of it indented": (
        f"  name: tiny\n  {MODEL}",
        f"  name: tiny\n  {MODEL}\n  kernels:\n"
        + re.sub("^", "    ", COMMENT, flags=re.MULTILINE).rstrip(" ")
        + f"    decode: {FILLED}\n",
    ),
    "folded text": (
        f"{MODEL}name: >-\n  tiny\n",
        f"{MODEL}name: >-\n  tiny\n\nkernels:\n{INDENTED}  decode: {FILLED}\n",
    ),
    "tuned before": (
        MINIMAL + "kernels:\n  # ours\n  # Tuned by mlaforge 0.9 long ago.\n  #   1 x 64: 9\n  #   and more\n"
        "  # theirs\n  decode: {schedule: plain, tile_rows: 64, stages: 1}\n",
        f"{MINIMAL}kernels:\n  # ours\n  # theirs\n{INDENTED}  decode: {FILLED}\n",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_layouts(name: str, newline: str) -> None:
    text, want = (each.replace("\n", newline) for each in LAYOUTS[name])
    if newline not in text:
        pytest.skip("one line")
    assert write_back(text, TUNED, REMARKS) == want
    assert write_back("\ufeff" + text, TUNED, REMARKS) == "\ufeff" + want
    # Tuned again, nothing is left of the first time.
    assert write_back(want, TUNED, REMARKS) == want


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_specs_keep_their_comments(name: str) -> None:
    text = find_spec(name).read_text()
    new = write_back(text, TUNED, REMARKS)
    assert parse_spec(new) == with_settings(parse_spec(text), TUNED)
    rest = iter(new.splitlines())
    # Line by line what was there, in its order, but for the one with the choices.
    assert all(line in rest for line in text.splitlines() if "decode: " not in line)


@given(specs(), st.sampled_from(["schedule", "tile_rows", "stages"]), st.booleans(), st.booleans())
def test_any_spec_reads_back_with_its_settings(spec: Spec, dropped: str, flow: bool, commented: bool) -> None:
    tree = yaml.safe_load(dump_spec(spec))
    del tree["kernels"]["decode"][dropped]
    text = yaml.safe_dump(tree, sort_keys=False, default_flow_style=flow, width=60)
    if commented and not flow:
        text = "".join(f"{line}  # {i}\n" for i, line in enumerate(text.splitlines()))
    new = write_back(text, TUNED, REMARKS)
    assert parse_spec(new) == with_settings(spec, TUNED)
    assert (
        not commented
        or flow
        or re.findall(r"  # (\d+)$", new, re.MULTILINE) == [str(i) for i in range(text.count("\n"))]
    )


def test_without_remarks_there_is_no_comment_and_an_old_one_stays() -> None:
    assert write_back(MINIMAL + "kernels: {decode: {stages: auto}}\n", {"stages": 2}) == (
        MINIMAL + "kernels: {decode: {stages: 2}}\n"
    )
    assert "long ago" in write_back(LAYOUTS["tuned before"][0], {"stages": 2})


def test_nothing_to_set_leaves_the_fields_open() -> None:
    text = MINIMAL + "kernels:\n  decode: {stages: auto}\n"
    assert write_back(text, {}, REMARKS) == f"{MINIMAL}kernels:\n{INDENTED}  decode: {{stages: auto}}\n"


def test_remarks_are_one_comment_whatever_is_in_them() -> None:
    remarks = ["Tuned by mlaforge: a GPU\nname: b\u2028name: c\x00", "word " * 60]
    new = write_back(MINIMAL, TUNED, remarks)
    assert parse_spec(new).name == "tiny"
    assert all(len(line) <= 120 and not line.endswith(" ") for line in new.splitlines()[3:])


FOLDED = "kernels:\n  decode:\n    stages: >-\n      auto\n" + MINIMAL


def test_a_layout_that_can_t_be_edited_is_told_with_what_to_write() -> None:
    with pytest.raises(WriteBackError, match=r"write it yourself: kernels: \{decode: \{schedule: skewed, tile_rows: "):
        write_back(FOLDED, TUNED, REMARKS)


def test_measurements_are_no_part_of_what_is_generated() -> None:
    text = find_spec("minicpm3").read_text()
    swept = enumerate_candidates(parse_spec(text))
    for each in swept.buildable:
        one, other = (write_back(text, each.settings, [f"Tuned by mlaforge {i}", str(i)]) for i in (1, 2))
        assert one != other
        assert render(make_plan(parse_spec(one))) == render(make_plan(parse_spec(other))) == each.files


# ---- Which is chosen -------------------------------------------------------------------------------------------------


def timed(**times: float) -> dict[str, Any]:
    return {"kernels": {name: {"us": {"median": value}} for name, value in times.items()}}


def test_the_least_geometric_mean_comes_first() -> None:
    cases = [timed(a=10, b=20, c=100), timed(a=40, b=10, c=100)]
    first, second, third = rank(cases, ["a", "b", "c"], "c")
    assert (first["label"], second["label"], third["label"]) == ("b", "a", "c")
    assert first["us"] == pytest.approx(math.sqrt(200)) and first["ratio"] == pytest.approx(math.sqrt(0.02))
    assert [each["fastest"] for each in (first, second, third)] == [1, 1, 0] and third["ratio"] == 1


def test_only_what_is_right_and_was_timed_everywhere_has_a_place() -> None:
    cases = [timed(a=10, b=20, c=1), timed(a=40, c=1)]
    assert [each["label"] for each in rank(cases, ["a", "b"], "b")] == ["a"]
    assert rank(cases, ["a", "b"], "b")[0]["ratio"] is None and rank(cases, ["a"], None)[0]["fastest"] == 2
    assert rank([], ["a"], "a") == [] and rank(cases, [], None) == []


@pytest.mark.parametrize(
    ("times", "planner", "winner", "why"),
    [
        ({"a": 90.0, "b": 100.0}, "b", "a", "the fastest, 10.0% less time than the planner's own choice"),
        ({"a": 99.5, "b": 100.0}, "b", "b", "the planner's own choice, level with the fastest (a, 0.5% less time)"),
        ({"a": 90.0, "b": 100.0}, "a", "a", "the fastest, and the planner's own choice"),
        ({"a": 90.0, "b": 100.0}, None, "a", "the fastest"),
        ({}, "a", None, None),
    ],
)
def test_the_planners_choice_stays_where_the_lead_is_small(
    times: dict[str, float], planner: str | None, winner: str | None, why: str | None
) -> None:
    cases = [timed(**times)]
    assert choose(rank(cases, list(times), planner), planner) == (winner, why)


def test_a_budget_is_shared_by_the_cases() -> None:
    share = functools.partial(affordable_repeats, 30, round_seconds=0.125, overhead=1.0, rest=0.25)
    # Of six seconds the second case takes one before its calls are timed, which leaves two and a half for each.
    assert share(6.0, 2) == 18 and share(10.0, 2) == 30 and share(3.0, 1) == 22
    assert share(-5.0, 3) == 5


# ---- A run -----------------------------------------------------------------------------------------------------------


class Clock(FakeDevice):
    """A device on which a call takes as long as its name says, in rounds that differ a little."""

    def __init__(self, times: Mapping[str, float]) -> None:
        super().__init__()
        self.times, self.cleared = times, 0

    def time(self, calls: Mapping[str, Timed], repeats: int) -> dict[str, list[float]]:
        self.rounds.append((list(calls), repeats))
        for call in calls.values():
            call.run()
        return {name: [self.times[name] + i / 100 for i in range(repeats)] for name in calls}

    def clear(self) -> None:
        self.cleared += 1


@dataclasses.dataclass(frozen=True)
class Faulty(TorchDecoder):
    """A decoder that goes wrong under a condition on the call."""

    when: Callable[[torch.Tensor, torch.Tensor], bool] = lambda q, lengths: True
    then: Callable[[], object] = lambda: None

    def decode(self, q: Any, kv_cache: Any, block_table: Any, cache_seqlens: Any, **rest: Any) -> Any:
        made = super().decode(q, kv_cache, block_table, cache_seqlens, **rest)
        if self.when(q, cache_seqlens):
            self.then()
            made[0].mul_(1.25)
        return made


def raising(error: BaseException) -> Callable[[], object]:
    def raises() -> None:
        raise error

    return raises


CASES = (Case(2, 70, 4, 1), Case(2, 70, 4, 2), Case(1, 200, 4, 1))
LARGE = 200
SMALL = {"examples": 4, "max_tokens": 120, "rest": 0.0, "repeats": 6}


def made(label: str, mla: Any = None, **changes: Any) -> Candidate:
    settings = {"stages": int(label[-1])} if label[-1].isdigit() else {}
    kernels = {"mla_decode": {"registers": 168, "spills": 0, "serialized": False}}
    return Candidate(label, settings, mla or TorchDecoder(), kernels=kernels, **changes)


def tuning(
    candidates: list[Candidate], times: Mapping[str, float], cases: tuple[Case, ...] = CASES, **changes: Any
) -> tuple[Tuning, list[dict[str, Any]], list[str]]:
    saved: list[dict[str, Any]] = []
    lines: list[str] = []
    options = Options(cases, **{**SMALL, **changes})
    run = Tuning(
        "tiny",
        candidates,
        Clock(times),
        options,
        about={"gpu": "a CPU & no GPU", "driver": "1.2", "cuda": "13.0"},
        report=lines.append,
        save=lambda result: saved.append(json.loads(json.dumps(result, allow_nan=False))),
    )
    return run, saved, lines


def entry(result: Mapping[str, Any], label: str) -> dict[str, Any]:
    (found,) = [each for each in result["candidates"] if each["label"] == label]
    return dict(found)


def text_of(result: Mapping[str, Any]) -> str:
    console = Console(record=True, width=150, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in tune_tables(result):
        console.print(part)
    return console.export_text()


def test_a_run_from_checks_to_tables() -> None:
    candidates = [
        made("stages 1", planner=True),
        made("stages 2"),
        made("stages 3"),
        Candidate("stages 4", {"stages": 4}, None, "does not compile: error: no"),
    ]
    steps: list[str] = []
    run, saved, lines = tuning(candidates, {"stages 1": 20, "stages 2": 10, "stages 3": 40})
    run._advance = steps.append
    result = run.run()
    # Saved after the checks, and after each case.
    assert [len(each["cases"]) for each in saved] == [0, 1, 2, 3] and saved[-1] == json.loads(json.dumps(result))
    assert len(steps) == run.steps == 6 and steps[0] == "checking stages 1"
    device = run.device
    assert isinstance(device, Clock) and device.cleared == 2
    labels = ["stages 1", "stages 2", "stages 3"]
    assert device.rounds == [(labels, 1), (labels, 1), (labels, 6)] * 3
    assert result["winner"] == "stages 2" and "49.9% less time" in result["why"]
    assert [each["label"] for each in result["ranking"]] == ["stages 2", "stages 1", "stages 3"]
    case = result["cases"][1]
    assert (case["b"], case["s_k"], case["h"], case["s_q"], case["repeats"]) == (2, 70, 4, 2, 6)
    us = case["kernels"]["stages 2"]["us"]
    assert us["median"] == pytest.approx(10.025) and us["q1"] == pytest.approx(10.0125) and us["count"] == 6
    assert case["kernels"]["stages 2"]["TFLOPs"] == pytest.approx(CASES[1].flops(96, 64) / 10.025 / 1e6)
    first = entry(result, "stages 1")
    assert first["state"] == "right" and first["planner"] and 0 < first["checks"]["out_used"] < 1
    assert entry(result, "stages 4")["state"] == "not built"
    assert any("2 x 70 tokens, 4 heads, s_q 2" in line for line in lines) and any("0.501 x" in line for line in lines)

    text = text_of(result)
    for words in ("stages 2", "winner", "planner's own choice", "10.0 (10.0..10.0)", "2 x 70, h 4, s_q 2", "3 of 3"):
        assert words in text, words
    assert "does not compile: error: no" in text and "Not built" in text and "Wrong" not in text

    picture = to_svg(result)
    assert picture is not None and "a CPU &amp; no GPU" in picture and "stages 1 (planner&#x27;s)" in picture
    root = ElementTree.fromstring(picture)
    # Three candidates in three cases, and three in the legend; the filled ones are the winner's.
    circles = root.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 12 and sum(each.get("fill") != "none" for each in circles) == 4
    # Twice the planner's time is beyond the picture, with its number.
    assert picture.count(">2.00<") == 3

    told = tuned_remarks(result)
    assert told[0].startswith("Tuned by mlaforge ") and "a CPU & no GPU, driver 1.2, CUDA 13.0" in told[0]
    assert "Timed in turn with 2 others: 6 graph replays" in told[1] and "planner's own choice (stages 1)" in told[1]
    assert told[2] == "2 x 70 tokens, 4 heads, s_q 1: 10.0 (10.0 to 10.0); 20.0 (20.0 to 20.0)" and len(told) == 5


WRONG = {
    "on small problems": (TorchDecoder("base-2 lse"), "lse: ", 0),
    "on a shape alone": (Faulty(when=lambda q, lengths: int(lengths.max()) == LARGE), "1 x 200 tokens", 2),
    "by raising on a shape": (
        Faulty(when=lambda q, lengths: int(lengths.max()) == LARGE, then=raising(ValueError("too\nlong"))),
        "1 x 200 tokens, 4 heads, s_q 1: ValueError: too | long",
        2,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_candidate_is_named_and_excluded(name: str) -> None:
    decoder, reason, cases = WRONG[name]
    run, _, lines = tuning([made("a", planner=True), made("b", decoder)], {"a": 20, "b": 1})
    result = run.run()
    wrong = entry(result, "b")
    assert wrong["state"] == "wrong" and reason in wrong["reason"]
    assert Problem.parse(wrong["problem"]).tokens <= LARGE
    assert any(line.startswith("b: wrong, excluded: ") for line in lines)
    # The fastest of all, and yet it has no place.
    assert result["winner"] == "a" and [each["label"] for each in result["ranking"]] == ["a"]
    assert [("b" in case["kernels"]) for case in result["cases"]] == [i < cases for i in range(3)]
    assert "Wrong" in text_of(result) and reason in " ".join(text_of(result).split())


def test_results_are_judged_again_after_the_timing() -> None:
    calls = 0

    def late(q: torch.Tensor, lengths: torch.Tensor) -> bool:
        nonlocal calls
        calls += int(lengths.max()) == LARGE
        return calls > 2

    run, _, _ = tuning([made("a"), made("b", Faulty(when=late))], {"a": 20, "b": 1}, CASES[2:])
    result = run.run()
    assert "after it was timed: out: " in entry(result, "b")["reason"]
    assert list(result["cases"][0]["kernels"]) == ["a"] and result["winner"] == "a"


def test_a_call_that_no_graph_takes_is_wrong() -> None:
    class NoGraph(Clock):
        def prepare(self, run: Run, launch: Launch = "graph") -> Timed:
            return Timed(run, "launches", run(), run, "can't be captured: it waits")

    run, _, _ = tuning([made("a")], {"a": 1})
    run.device = NoGraph({"a": 1})
    result = run.run()
    assert "can't be captured: it waits" in entry(result, "a")["reason"]
    assert result["winner"] is None and result["cases"] == [] and to_svg(result) is None


def test_without_a_right_planners_choice_the_fastest_wins() -> None:
    wrong = made("a", TorchDecoder("swaps heads"), planner=True)
    run, _, _ = tuning([wrong, made("b"), made("c")], {"b": 20, "c": 10})
    result = run.run()
    assert result["winner"] == "c" and result["why"] == "the fastest" and result["ranking"][0]["ratio"] is None
    assert "units of the fastest" in str(to_svg(result)) and "own choice (a)" not in str(tuned_remarks(result))


def test_a_broken_device_stops_the_run_and_what_was_measured_stays() -> None:
    broken = Faulty(
        when=lambda q, lengths: int(lengths.max()) == LARGE,
        then=raising(RuntimeError("CUDA error: an illegal memory access was encountered\nmore")),
    )
    run, saved, _ = tuning([made("a"), made("b", broken)], {"a": 1, "b": 2})
    with pytest.raises(BenchError, match="b broke the device, 1 x 200 tokens"):
        run.run()
    assert len(saved[-1]["cases"]) == 2 and saved[-1]["winner"] == "a"
    assert "illegal memory access" in saved[-1]["stopped"]


def test_a_device_broken_by_a_small_problem_stops_the_run() -> None:
    class Broken(Clock):
        def wait(self) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

    run, saved, _ = tuning([made("a", TorchDecoder("raises"))], {"a": 1})
    run.device = Broken({"a": 1})
    with pytest.raises(BenchError, match=r"a broke the device: .*launch failure"):
        run.run()
    assert saved[-1]["candidates"][0]["state"] == "wrong" and saved[-1]["stopped"].startswith("a broke")


def test_an_interrupt_keeps_what_was_measured() -> None:
    stop = Faulty(when=lambda q, lengths: int(lengths.max()) == LARGE, then=raising(KeyboardInterrupt()))
    run, saved, _ = tuning([made("a"), made("b", stop)], {"a": 2, "b": 1})
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert saved[-1]["stopped"] == "interrupted" and len(saved[-1]["cases"]) == 2 and saved[-1]["winner"] == "b"


def test_a_budget_lowers_repeats_and_drops_nothing() -> None:
    class Slow(Clock):
        def time(self, calls: Mapping[str, Timed], repeats: int) -> dict[str, list[float]]:
            time.sleep(0.01)
            return super().time(calls, repeats)

    run, _, lines = tuning([made("a"), made("b")], {"a": 1, "b": 2}, repeats=100_000, budget=0.5)
    run.device = Slow({"a": 1, "b": 2})
    result = run.run()
    assert len(result["cases"]) == 3 and all(set(case["kernels"]) == {"a", "b"} for case in result["cases"])
    assert all(5 <= case["repeats"] < 100 for case in result["cases"])
    assert any("instead of 100000 repeats, to keep the budget" in line for line in lines)
    counts = {f"{case['repeats']}" for case in result["cases"]}
    assert all(count in tuned_remarks(result)[1] for count in (min(counts, key=int), max(counts, key=int)))


def test_many_candidates_have_colours_of_their_own() -> None:
    names = [f"stages {i}" for i in range(12)]
    run, _, _ = tuning([made(name) for name in names], {name: 10 + i for i, name in enumerate(names)}, CASES[:1])
    picture = str(to_svg(run.run()))
    assert len(set(re.findall(r'stroke="(hsl[^"]*)"', picture))) == 12


# ---- The command line ------------------------------------------------------------------------------------------------


def invoke(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(cli.cli, ["tune", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"# ours\n{MINIMAL}kernels:\n  decode: {{schedule: plain, tile_rows: 64, stages: auto}}  # choose\n"
    )
    return path


class Reading:
    """A decoder that reads its folder when it is called, as kernels do at their first call."""

    def __init__(self, decoder: TorchDecoder) -> None:
        self.decoder, self.manifest = decoder, decoder.manifest

    def decode(self, *tensors: Any, **rest: Any) -> Any:
        assert all(source.is_file() for source in self.manifest.sources)
        return self.decoder.decode(*tensors, **rest)


class Machine:
    """What a GPU and a compiler would give: times and faults by stages."""

    def __init__(self) -> None:
        self.times = {f"stages {n}": float(times) for n, times in ((2, 20), (3, 10), (4, 25))}
        self.decoders: dict[int, TorchDecoder] = {}
        self.not_compiled: set[int] = set()

    def load(self, folder: Path, **_options: object) -> Reading:
        manifest = read_manifest(folder)
        stages = sum(region.name.startswith("K") for region in manifest.decode.regions)
        if stages in self.not_compiled:
            raise CompileError(folder / "decode.cu", "warning: hm\ndecode.cu(7): error: no such thing\nmore")
        cache = Cache(manifest.cache.dtype, manifest.cache.page_size)

        @dataclasses.dataclass(frozen=True)
        class WithSources(Manifest):
            sources: tuple[Path, ...] = manifest.sources

        made = WithSources(manifest.d_qk, manifest.d_v, manifest.softmax_scale, cache)
        return Reading(dataclasses.replace(self.decoders.get(stages, TorchDecoder()), manifest=made))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()

    class Gpu(Clock):
        sms = 132

        def __init__(self, device: torch.device) -> None:
            super().__init__(made.times)

    class Nvml:
        def __init__(self, device: torch.device) -> None:
            pass

        def describe(self) -> dict[str, Any]:
            return {"driver": "580.1"}

    class Compiled:
        def __init__(self, source: Path) -> None:
            report = dataclasses.make_dataclass("Report", ("registers", "spill_stores", "spill_loads", "serialized"))
            self.kernels = {f"mla_{source.stem}": report(168, 4, 8, False)}

    monkeypatch.setattr("mlaforge_generator.cli.devices.why_no_hopper", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "no GPU")
    monkeypatch.setitem(mlaforge.__dict__, "load", made.load)
    monkeypatch.setattr("mlaforge.compiler.compile_many", lambda sources: None)
    monkeypatch.setattr("mlaforge.compiler.compile_kernel", Compiled)
    monkeypatch.setattr(timing, "Gpu", Gpu)
    monkeypatch.setattr(power, "Nvml", Nvml)
    monkeypatch.setattr(tune, "Options", functools.partial(Options, max_tokens=100, rest=0.0))
    return made


QUICK = ("--shapes", "1x70,2x64", "--heads", "4", "--examples", "2", "--sweep", "stages")


def test_the_fastest_is_written_with_its_measurements(machine: Machine, spec: Path, tmp_path: Path) -> None:
    before = spec.read_text()
    data = tmp_path / "data"
    result = invoke(spec, *QUICK, "--data", data)
    assert result.exit_code == 0, result.output
    assert spec.read_text() == before
    assert sorted(path.name for path in data.iterdir()) == ["tiny.yaml", "tune.json", "tune.svg", "tune.txt"]
    assert "winner: stages 3: the fastest, " in result.stdout and f"{data / 'tiny.yaml'}: written" in result.stdout
    text = (data / "tiny.yaml").read_text()
    new = load_spec(data / "tiny.yaml")
    assert new == with_settings(load_spec(spec), {"stages": 3})
    assert text.startswith("# ours\n") and "{schedule: plain, tile_rows: 64, stages: 3}  # choose\n" in text
    assert "  # Tuned by mlaforge " in text and "no GPU, driver 580.1" in text
    assert "1 x 70 tokens, 4 heads, s_q 1: 10.1 (10.1 to 10.2); 25.1 (25.1 to 25.2)" in text
    result_json = json.loads((data / "tune.json").read_text())
    assert result_json["winner"] == "stages 3" and result_json["candidates"][2]["kernels"]["mla_decode"]["spills"] == 12
    assert [case["s_k"] for case in result_json["cases"]] == [70, 64] and result_json["spec"]["page_size"] == 64
    # What can't be planned is in the table with the planner's reason, and no failure.
    assert "shared memory" in result.stdout and "stages 8" in (data / "tune.txt").read_text()
    # What was tuned is what is generated from it.
    swept = enumerate_candidates(load_spec(spec), ["stages"])
    assert render(make_plan(new)) == next(each.files for each in swept.candidates if each.label == "stages 3")


def test_in_place_and_again(machine: Machine, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(spec)
    assert invoke("link.yaml", *QUICK, "--write").exit_code == 0
    assert link.is_symlink() and spec.stat().st_mode & 0o777 == 0o640
    assert load_spec(spec).kernels.decode.stages == 3 and (tmp_path / "tune-tiny" / "tune.svg").is_file()
    first = spec.read_text()
    machine.times["stages 3"] = 50.0
    assert invoke(spec, *QUICK, "--write").exit_code == 0
    assert load_spec(spec).kernels.decode.stages == 2
    assert spec.read_text().count("Tuned by mlaforge") == first.count("Tuned by mlaforge") == 1


def test_nothing_is_written_over_a_spec_unasked(spec: Path, tmp_path: Path) -> None:
    for arguments in (("-o", spec), ("--data", tmp_path)):
        result = invoke(spec, *arguments)
        assert result.exit_code == 2 and "is the spec itself; say --write to change it" in result.stderr


def test_a_spec_edited_meanwhile_is_left_alone(machine: Machine, spec: Path, tmp_path: Path) -> None:
    edits: list[str] = []

    def edit(q: torch.Tensor, lengths: torch.Tensor) -> bool:
        if not edits:
            edits.append(spec.read_text() + "# mine\n")
            spec.write_text(edits[0])
        return False

    machine.decoders[2] = Faulty(when=edit)
    result = invoke(spec, *QUICK, "--write", "--data", tmp_path / "data")
    assert result.exit_code == 1 and "changed while it was tuned" in result.stderr
    assert spec.read_text() == edits[0] and load_spec(tmp_path / "data" / "tiny.yaml").kernels.decode.stages == 3


def test_json_alone_on_stdout(machine: Machine, spec: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.yaml"
    result = invoke(spec, *QUICK, "--json", "-o", out, "--data", tmp_path / "data")
    assert result.exit_code == 0 and json.loads(result.stdout)["winner"] == "stages 3"
    assert "winner: stages 3" in result.stderr and load_spec(out).kernels.decode.stages == 3
    assert json.loads(result.stdout) == json.loads((tmp_path / "data" / "tune.json").read_text())


def test_a_wrong_candidate_fails_at_the_end(machine: Machine, spec: Path, tmp_path: Path) -> None:
    machine.decoders[3] = TorchDecoder("base-2 lse")
    data = tmp_path / "data"
    result = invoke(spec, *QUICK, "--data", data)
    assert result.exit_code == 1 and result.stderr == "stages 3: wrong results\n"
    # The best of the others is written all the same.
    assert load_spec(data / "tiny.yaml").kernels.decode.stages == 2
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("reproduce: ")]
    words = shlex.split(line.removeprefix("reproduce: "))
    assert words[:2] == ["mlaforge", "verify"] and words[2] == str(data / "wrong_stages_3.yaml")
    assert load_spec(words[2]).kernels.decode.stages == 3 and Problem.parse(words[4])
    replayed = CliRunner().invoke(cli.cli, [*words[1:], "--device", "cpu"])
    assert replayed.exit_code == 1 and "failed: lse" in replayed.stdout


def test_no_right_candidate_no_spec(machine: Machine, spec: Path, tmp_path: Path) -> None:
    machine.decoders = dict.fromkeys(range(1, 5), TorchDecoder("swaps heads"))
    data = tmp_path / "data"
    result = invoke(spec, *QUICK, "--data", data)
    assert result.exit_code == 1 and "no candidate is right; no spec was written" in result.stderr
    assert not (data / "tiny.yaml").exists() and not (data / "tune.svg").exists() and (data / "tune.json").exists()


def test_ctrl_c_keeps_data_and_writes_no_spec(machine: Machine, spec: Path, tmp_path: Path) -> None:
    stop = Faulty(
        when=lambda q, lengths: len(lengths) == 2 and int(lengths.min()) == 64, then=raising(KeyboardInterrupt())
    )
    machine.decoders[4] = stop
    data, before = tmp_path / "data", spec.read_text()
    result = invoke(spec, *QUICK, "--data", data, "--write")
    assert result.exit_code == 1 and "stopped: interrupted" in result.stderr and "no spec was written" in result.stderr
    assert spec.read_text() == before and "1 x 70, h 4, s_q 1" in (data / "tune.txt").read_text()
    assert sorted(path.name for path in data.iterdir()) == ["tune.json", "tune.svg", "tune.txt"]
    assert len(json.loads((data / "tune.json").read_text())["cases"]) == 1


def test_what_does_not_compile_is_listed(machine: Machine, spec: Path, tmp_path: Path) -> None:
    machine.not_compiled = {3}
    data = tmp_path / "data"
    result = invoke(spec, *QUICK, "--data", data)
    assert result.exit_code == 0 and "winner: stages 2" in result.stdout
    assert "does not compile: decode.cu(7): error: no such thing" in result.stdout
    machine.not_compiled = {2, 3, 4}
    result = invoke(spec, *QUICK, "--data", data)
    assert result.exit_code == 3 and "stages 2: does not compile: decode.cu(7): error" in result.stderr


def test_a_missing_toolchain(machine: Machine, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(sources: object) -> None:
        raise ToolchainError("CUTLASS headers not found; run: pip install nvidia-cutlass")

    monkeypatch.setattr("mlaforge.compiler.compile_many", missing)
    result = invoke(spec, *QUICK)
    assert result.exit_code == 3 and result.stderr.endswith("run: pip install nvidia-cutlass\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "sim"], "--device sim: the simulator counts no time"),
        (["--suite", "sustained"], "call by call"),
        (["--suite", "bust"], "'bust' is no suite"),
        (["--shapes", "128"], "BATCHxTOKENS"),
        (["--heads", "0"], "positive"),
        (["--sweep", "stagees"], "no field stagees"),
        (["--write", "-o", "x.yaml"], "exclude each other"),
        (["--repeats", "0"], "--repeats"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_told_before_anything_else(spec: Path, arguments: list[str], message: str) -> None:
    result = invoke(spec, *arguments)
    assert result.exit_code == 2 and result.stdout == "" and message in result.stderr


def test_specs_that_can_t_be_tuned(tmp_path: Path) -> None:
    assert "deepseek_v3.yaml; give the path of a file, or -o FILE" in invoke("deepseek_v3", "--write").stderr
    unknown = invoke("deepseek_v4")
    assert unknown.exit_code == 2 and "neither a file nor a shipped spec" in unknown.stderr
    folder = invoke(tmp_path)
    assert folder.exit_code == 2 and "is a folder; only a spec can be tuned" in folder.stderr
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: Bad\nmodel: {num_attention_heads: 0}\n")
    result = invoke(bad)
    assert result.exit_code == 2 and result.stderr.startswith(f"{bad}:1:7: name: must be")
    bad.write_text(MINIMAL.replace("256", "320"))
    result = invoke(bad)
    assert result.exit_code == 2 and "nothing can be built: model.kv_lora_rank: the decode" in result.stderr
    fixed = with_settings(parse_spec(MINIMAL), first_settings(parse_spec(MINIMAL)))
    bad.write_text(dump_spec(fixed))
    result = invoke(bad)
    assert result.exit_code == 2 and f"{bad}: kernels.decode leaves nothing open" in result.stderr
    bad.write_text(FOLDED)
    result = invoke(bad)
    assert result.exit_code == 2 and "this layout can't be edited" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_tuning(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(spec)
    assert result.exit_code == 4 and result.stdout == "" and list(tmp_path.iterdir()) == [spec]
    assert result.stderr == (
        "no CUDA GPU found; tuning needs a Hopper GPU to time on, and the simulator counts no time\n"
    )


def test_shapes_and_rows_are_those_of_the_spec() -> None:
    own = cli.tune._tune_cases((), (), ("16",), ("1",))
    assert {(case.h, case.s_q) for case in own} == {(16, 1)} and len(own) == len(set(own)) == 8
    given = cli.tune._tune_cases((), ("2x64",), ("16", "128"), ("1", "2"))
    assert given == [Case(2, 64, h, s_q) for s_q in (1, 2) for h in (16, 128)]
    assert cli.tune._tune_cases(("burst,small",), ("2x64",), ("16",), ("1",)) == [Case(2, 64, 16, 1)]


def test_candidates_are_compiled_and_what_fails_has_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real compiler, on a candidate as it is and on one with an error in its text."""
    monkeypatch.setenv("MLAFORGE_CACHE_DIR", str(tmp_path / "cache"))
    swept = enumerate_candidates(load_spec(find_spec("minicpm3")))
    good = next(each for each in swept.candidates if each.planner)
    assert good.files is not None
    broken = {**good.files, "decode.cu": good.files["decode.cu"].replace("ring.advance();", "ring.advances();")}
    missing = next(each for each in swept.candidates if each.files is None)
    some = (good, dataclasses.replace(good, label="broken", planner=False, files=broken), missing)
    lines: list[str] = []
    right, wrong, unplanned = cli.tune._build(Sweep(swept.fields, some), tmp_path, lines.append)
    assert right.mla is not None and right.planner and right.reason is None and right.settings == good.settings
    assert "mla_decode" in right.kernels and not any(each["spills"] for each in right.kernels.values())
    assert wrong.mla is None and "advances" in str(wrong.reason) and "\n" not in str(wrong.reason)
    assert unplanned.mla is None and unplanned.reason == missing.reason
    assert lines == ["2 of 3 candidates can be planned"]
