"""Rendered text: the same everywhere, complete, and impossible to make from a misspelt template."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest
from hypothesis import given

from mlaforge.manifest import read_manifest
from mlaforge_generator import render as render_module
from mlaforge_generator.kernel_plan import KernelPlan
from mlaforge_generator.kernels import PLANNERS
from mlaforge_generator.plan import DecodePlan, Plan, make_plan
from mlaforge_generator.prefill_plan import PrefillPlan
from mlaforge_generator.render import render
from mlaforge_generator.resources import find_spec, spec_dir, template_dir
from mlaforge_generator.spec import Spec, load_spec
from strategies import specs

SHIPPED = sorted(path.stem for path in spec_dir().glob("*.yaml"))


def plan_of(name: str = "deepseek_v3") -> Plan:
    return make_plan(load_spec(find_spec(name)))


def constants(text: str) -> dict[str, str]:
    return dict(re.findall(r"^ *(?:static )?constexpr int (\w+) = ([^;]+);", text, re.MULTILINE))


def check_text(plan: Plan, files: dict[str, str]) -> None:
    for name, text in files.items():
        assert text.endswith("\n") and not text.endswith("\n\n"), name
        assert "\r" not in text and "\t" not in text, name
        if name.endswith(".json"):
            continue
        assert not re.search(r"\bNone\b|\bTrue\b|\bFalse\b|Undefined", text), name
        # Headers are no templates: `{%` is PTX there.
        assert name.endswith(".cuh") or not re.search(r"\{\{ |\{%", text), name
        on_the_gpu = re.sub(r"#ifdef MLAFORGE_SIMULATOR.*?#else", "", text, flags=re.DOTALL)
        for include in re.findall(r'#include "([^"]+)"', on_the_gpu):
            assert include in files, (name, include)
    for decode in plan.decodes:
        found = constants(files[decode.file])
        assert int(found["kHeadDimQK"]) == decode.d_qk and int(found["kHeadDimV"]) == decode.d_v
        ring = ("kRing", decode.tile.ring_subtiles) if decode.tile.ring_subtiles else ("kStages", decode.tile.stages)
        assert int(found[ring[0]]) == ring[1] and int(found["kPageSize"]) == decode.page_size
        assert all(int(found[region.constant]) == region.offset for region in decode.smem.regions)
        assert all(int(found[barrier.constant]) == barrier.id for barrier in decode.named_barriers)
    assert {name for name in files if name.endswith(".cu")} == {
        *(decode.file for decode in plan.decodes),
        *(kernel.file for kernel in plan.kernels),
    }
    for kernel in plan.kernels:
        if isinstance(kernel, PrefillPlan):
            found = constants(files[kernel.file])
            assert int(found["kHeadDimQK"]) == kernel.d_qk and int(found["kRows"]) == kernel.tile.rows
            assert int(found["kStages"]) == kernel.tile.stages and int(found["kQueries"]) == kernel.tile.queries
            assert all(int(found[region.constant]) == region.offset for region in kernel.smem.regions)


@given(specs())
def test_any_plan_renders(spec: Spec) -> None:
    plan = make_plan(spec)
    files = render(plan)
    check_text(plan, files)
    assert json.loads(files["manifest.json"])["name"] == spec.name


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_specs_render(name: str) -> None:
    plan = plan_of(name)
    check_text(plan, render(plan))


def test_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    program = (
        "import sys; from mlaforge_generator.plan import make_plan; from mlaforge_generator.render import render;"
        "from mlaforge_generator.resources import find_spec; from mlaforge_generator.spec import load_spec;"
        "sys.stdout.write(repr(render(make_plan(load_spec(find_spec('kimi_k3'))))))"
    )
    want = repr(render(plan_of("kimi_k3")))
    for seed, zone in (("1", "UTC"), ("2", "Asia/Tokyo")):
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TZ": zone, "LC_ALL": "C", "PYTHONPATH": path}
        command = [sys.executable, "-c", program]
        run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert run.stdout == want


# ---- Wrong templates -------------------------------------------------------------------------------------------------


# Printed, an undefined variable is first seen by the check for literals; elsewhere by jinja2.
UNDEFINED = (jinja2.UndefinedError, TypeError)


def every_loader(schedule: str, name: str = "deepseek_v3") -> list[DecodePlan]:
    """Give a schedule's kernels for pages that hold a tile, that hold parts of it, and of a token."""
    tree = plan_of(name).spec.model_dump(exclude_none=True)
    tree["kernels"]["decode"]["schedule"] = schedule
    pages = (64, 16, 1)
    return [make_plan(Spec.model_validate({**tree, "cache": {"page_size": each}})).decode for each in pages]


QUANTISED = ("fp8_ds_mla", "nvfp4")


# Together they take every branch of the templates.
@pytest.mark.parametrize(
    "choose",
    [
        lambda: [*every_loader("skewed"), plan_of("mistral_small_4").decode],
        lambda: every_loader("plain"),
        lambda: every_loader("swapped"),
        *(lambda i=i: [plan_of(name).kernels[i] for name in ("deepseek_v3", "glm_5")] for i in range(len(PLANNERS))),
        *(lambda i=i: [plan_of(f"deepseek_v3_{name}").kernels[i] for name in QUANTISED] for i in range(2)),
    ],
    ids=[
        *("skewed", "plain", "swapped"),
        *(planner.__name__.removeprefix("plan_") for planner in PLANNERS),
        *("gather, quantised", "append, quantised"),
    ],
)
def test_every_misspelt_variable_fails(choose: Callable[[], list[DecodePlan | KernelPlan]]) -> None:
    kernels = choose()
    text = (template_dir() / kernels[0].template).read_text(encoding="utf-8")
    name = r"\b((?:plan|region|barrier|group|limit|parameter|role)\.[\w.]+)"
    variables = list(re.finditer(rf"(?:\{{\{{|\{{%|\bin\b)[^%}}]*?{name}", text))
    assert len(variables) > 5
    environment = render_module._environment()

    def renders(text: str, kernel: DecodePlan | KernelPlan) -> bool:
        try:
            environment.from_string(text).render(plan=kernel, banner="")
        except UNDEFINED:
            return False
        return True

    assert all(renders(text, kernel) for kernel in kernels)
    for variable in variables:
        broken = f"{text[: variable.end(1)]}x{text[variable.end(1) :]}"
        assert not all(renders(broken, kernel) for kernel in kernels), variable.group()


@pytest.mark.parametrize(
    "expression", ["{{ nothing }}", "{% if nothing %}{% endif %}", "{% for x in nothing %}{% endfor %}"]
)
def test_undefined_fails_wherever_it_stands(expression: str) -> None:
    with pytest.raises(UNDEFINED):
        render_module._environment().from_string(expression).render()


@pytest.mark.parametrize("value", [None, [1], (1, 2), {"a": 1}, 1.5, b"1"])
def test_what_is_no_literal_fails(value: object) -> None:
    with pytest.raises(TypeError, match="no C\\+\\+ literal"):
        render_module._environment().from_string("{{ value }}").render(value=value)


def test_literals_are_those_of_cpp() -> None:
    text = render_module._environment().from_string("{{ a }} {{ b }} {{ c }} {{ d }}")
    assert text.render(a=True, b=False, c=-3, d="float") == "true false -3 float"


# ---- Manifest --------------------------------------------------------------------------------------------------------


def signature(text: str, entry: str) -> list[tuple[str, str]]:
    """Give the parameters of a kernel, (type, name) in order."""
    inside = re.search(rf"\b{entry}\(([^)]*)\)", text)
    assert inside
    words = [parameter.split() for parameter in inside[1].split(",")]
    return [(" ".join(parameter[:-1]), parameter[-1]) for parameter in words]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_manifest_is_complete(name: str, tmp_path: Path) -> None:
    plan = plan_of(name)
    for file, text in render(plan).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    manifest = read_manifest(tmp_path)
    assert manifest.name == plan.spec.name and manifest.target == plan.target.arch
    assert manifest.softmax_scale == plan.softmax_scale
    assert (manifest.d_qk, manifest.d_v) == (plan.spec.d_qk, plan.spec.d_v)
    cache, layout = manifest.cache, plan.spec.layout
    assert (cache.dtype, cache.page_size) == (plan.spec.cache.dtype, plan.spec.cache.page_size)
    assert (manifest.element, cache.row_bytes) == (plan.spec.element, plan.spec.row_bytes)
    assert (cache.quantised, cache.tensor_scale) == (layout is not None, layout is not None and layout.tensor_scale)
    assert dict(manifest.model) == plan.spec.model.model_dump()
    assert manifest.tensor_parallel == plan.spec.tensor_parallel
    assert manifest.prefill_absorption_threshold == plan.spec.dispatch.prefill_absorption_threshold
    for each_plan, kernel in zip(plan.decodes, manifest.decodes, strict=True):
        assert kernel.source.name == each_plan.file
        assert kernel.smem_bytes == each_plan.smem.total and kernel.threads == each_plan.launch.threads
        assert (kernel.tile_rows, kernel.tile_tokens) == (each_plan.tile.rows, each_plan.tile.tokens)
        assert kernel.stages == each_plan.tile.stages
        assert kernel.boxes == {each.tensor: each.box for each in each_plan.tensor_maps}
        assert kernel.max_parts == each_plan.max_parts
    for rows in range(1, 200):
        assert manifest.decode_for(rows).source.name == plan.decode_for(rows).file
    assert list(manifest.kernels) == [each.name for each in plan.kernels]
    for planned in plan.kernels:
        entry = manifest.kernels[planned.name]
        assert (entry.entry, entry.threads, entry.smem_bytes) == (planned.entry, planned.threads, planned.smem_bytes)
        assert entry.boxes == planned.boxes and entry.constants == planned.constants
        assert manifest.dynamic_smem[entry.source] == planned.smem_bytes
    assert set(manifest.dynamic_smem) == set(manifest.sources)
    others = [(each, len(each.boxes)) for each in manifest.kernels.values()]
    for each, maps in (*((kernel, len(kernel.boxes)) for kernel in manifest.decodes), *others):
        text = each.source.read_text(encoding="utf-8")
        parameters = [(parameter.ctype, parameter.name) for parameter in each.parameters]
        assert signature(text, each.entry)[maps:] == parameters
        bounds = re.search(r"__launch_bounds__\((\d+)", text)
        assert bounds and int(bounds[1]) == each.threads


def test_parts_share_a_request_as_far_as_the_merge_has_room() -> None:
    text = (template_dir() / "device" / "splits.cuh").read_text(encoding="utf-8")
    splits = re.search(r"kMaxSplits = (\d+);", text)
    assert splits and int(splits[1]) == plan_of().decode.max_parts
