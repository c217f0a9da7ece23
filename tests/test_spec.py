"""Specs: meaning, defaults, the shipped models, and errors that say what to change."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from mlaforge_generator.errors import Problem, SpecError
from mlaforge_generator.spec import (
    Cache,
    Decode,
    Dispatch,
    Kernels,
    Model,
    Prefill,
    RopeScaling,
    Spec,
    dump_spec,
    load_spec,
    parse_spec,
)
from strategies import INTEGERS, NO_INTEGERS, BrokenSpec, broken_specs, specs, yaml_trees

SPECS = Path(__file__).resolve().parents[1] / "specs"

MODEL = """\
model:
  num_attention_heads: 128
  kv_lora_rank: 512
  qk_nope_head_dim: 128
  qk_rope_head_dim: 64
  v_head_dim: 128
"""
MINIMAL = "name: tiny\n" + MODEL


def errors_of(text: str | bytes) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "f")
    return [line.removeprefix("f:") for line in str(caught.value).split("\n")]


def test_only_name_and_model_are_needed() -> None:
    spec = parse_spec(MINIMAL)
    assert spec == Spec(
        name="tiny",
        model=Model(
            num_attention_heads=128,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            hidden_size=None,
            num_hidden_layers=None,
            rope_scaling=None,
        ),
        tensor_parallel=1,
        cache=Cache(dtype="bf16", page_size=64),
        target="sm_90a",
        kernels=Kernels(
            decode=Decode(schedule="auto", tile_rows="auto", tile_tokens=64, stages="auto"),
            prefill=Prefill(tile_q="auto", tile_kv="auto", stages="auto"),
        ),
        dispatch=Dispatch(prefill_absorption_threshold=256),
    )


def test_every_field_is_read() -> None:
    spec = parse_spec(
        """
name: all
model:
  num_attention_heads: 40
  kv_lora_rank: 256
  q_lora_rank: 768
  qk_nope_head_dim: 96
  qk_rope_head_dim: 32
  v_head_dim: 80
  hidden_size: 2560
  num_hidden_layers: 62
  rope_scaling: {type: yarn, factor: 40, mscale: 0.5, mscale_all_dim: 1e-1}
tensor_parallel: 8
cache: {dtype: fp16, page_size: 16}
target: sm_90a
kernels:
  decode: {schedule: plain, tile_rows: 64, tile_tokens: 64, stages: 3}
  prefill: {tile_q: 128, tile_kv: 96, stages: 2}
dispatch: {prefill_absorption_threshold: 64}
"""
    )
    assert spec.model_dump() == {
        "name": "all",
        "model": {
            "num_attention_heads": 40,
            "kv_lora_rank": 256,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 96,
            "qk_rope_head_dim": 32,
            "v_head_dim": 80,
            "hidden_size": 2560,
            "num_hidden_layers": 62,
            "rope_scaling": {"type": "yarn", "factor": 40.0, "mscale": 0.5, "mscale_all_dim": 0.1},
        },
        "tensor_parallel": 8,
        "cache": {"dtype": "fp16", "page_size": 16},
        "target": "sm_90a",
        "kernels": {
            "decode": {"schedule": "plain", "tile_rows": 64, "tile_tokens": 64, "stages": 3},
            "prefill": {"tile_q": 128, "tile_kv": 96, "stages": 2},
        },
        "dispatch": {"prefill_absorption_threshold": 64},
    }
    assert (spec.heads_per_rank, spec.d_qk, spec.d_v) == (5, 288, 256)


# Name: heads, d_qk, d_v, softmax scale to six digits, all as the models' authors publish them.
SHIPPED = {
    "deepseek_v2": (128, 576, 512, 0.114721),
    "deepseek_v2_lite": (16, 576, 512, 0.114721),
    "deepseek_v3": (128, 576, 512, 0.135234),
    "deepseek_v3_fp8_ds_mla": (128, 576, 512, 0.135234),
    "deepseek_v3_fp8_e4m3": (128, 576, 512, 0.135234),
    "deepseek_v3_nvfp4": (128, 576, 512, 0.135234),
    "kimi_k2": (64, 576, 512, 0.130861),
    "kimi_k2_5": (64, 576, 512, 0.144680),
    "kimi_k3": (96, 576, 512, 0.072169),
    "minicpm3": (40, 288, 256, 0.102062),
    "mistral_small_4": (32, 320, 256, 0.194969),
    "glm_4_7_flash": (20, 576, 512, 0.0625),
    "glm_5": (64, 576, 512, 0.0625),
    "glm_5_3_flash": (64, 512, 512, 0.0625),
    "longcat_flash": (64, 576, 512, 0.072169),
    "youtu_llm_2b": (16, 576, 512, 0.072169),
}


def test_the_list_of_shipped_specs_is_complete() -> None:
    assert {path.stem for path in SPECS.glob("*.yaml")} == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_specs(name: str) -> None:
    path = SPECS / f"{name}.yaml"
    spec = load_spec(path)
    heads, d_qk, d_v, scale = SHIPPED[name]
    assert spec.name == name
    assert (spec.heads_per_rank, spec.d_qk, spec.d_v) == (heads, d_qk, d_v)
    assert spec.softmax_scale == pytest.approx(scale, abs=5.1e-7)
    assert path.read_text(encoding="utf-8").startswith("# yaml-language-server: $schema=schema.json\n")


def with_rope(rope: RopeScaling | None) -> Spec:
    model = Model(
        num_attention_heads=1,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=1,
        rope_scaling=rope,
    )
    return Spec(name="a", model=model)


@pytest.mark.parametrize(
    ("rope", "scale"),
    [
        (None, 0.0625),
        (RopeScaling(type="yarn", factor=40.0), 0.0625),
        (RopeScaling(type="yarn", factor=40.0, mscale=1.0), 0.0625),
        (RopeScaling(type="yarn", factor=40.0, mscale_all_dim=0.0), 0.0625),
        (RopeScaling(type="yarn", factor=1.0, mscale_all_dim=1.0), 0.0625),
        (RopeScaling(type="longrope", factor=40.0, mscale_all_dim=1.0), 0.0625),
        (RopeScaling(type="yarn", factor=40.0, mscale=2.0, mscale_all_dim=1.0), 0.0625 * 1.3688879454113936**2),
    ],
)
def test_only_yarn_with_mscale_all_dim_changes_the_softmax_scale(rope: RopeScaling | None, scale: float) -> None:
    assert with_rope(rope).softmax_scale == pytest.approx(scale, rel=1e-14)


@given(specs())
def test_dump_reads_back_as_the_same_spec(spec: Spec) -> None:
    assert parse_spec(dump_spec(spec)) == spec


@given(specs())
def test_drawn_specs_fit_together(spec: Spec) -> None:
    assert spec.heads_per_rank * spec.tensor_parallel == spec.model.num_attention_heads
    assert spec.d_v in (128, 256, 384, 512)
    assert spec.d_qk - spec.d_v in (0, 16, 32, 48, 64)


@given(broken_specs())
@example(BrokenSpec("trailing newline", "name", 'name: "tiny\\n"\n' + MODEL))
@example(BrokenSpec("ends a comment", "name", "name: a*/\n" + MODEL))
@example(BrokenSpec("leaves the folder", "name", "name: ../x\n" + MODEL))
def test_one_fault_gives_one_problem_that_names_its_field(broken: BrokenSpec) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(broken.text, "f")
    (problem,) = caught.value.problems
    assert problem.field == broken.field
    line = broken.text.split("\n")[problem.line - 1]
    if problem.message.startswith("missing"):
        assert broken.field.rpartition(".")[0].rpartition(".")[2] in line
    elif not problem.message.startswith("yarn needs"):
        before, rest = line[: problem.column - 1].strip(), line[problem.column - 1 :].replace("'", "")
        key = broken.field.rpartition(".")[2] + ":"
        assert before == key or (before == "" and rest.startswith(key))


@pytest.mark.parametrize("field", INTEGERS)
def test_nothing_passes_for_an_integer_but_an_integer(field: str) -> None:
    *parents, name = field.split(".")
    for value in NO_INTEGERS:
        tree = yaml.safe_load(MINIMAL + "cache: {}\nkernels: {decode: {}, prefill: {}}\ndispatch: {}\n")
        part = tree
        for parent in parents:
            part = part[parent]
        part[name] = value
        (error,) = errors_of(yaml.safe_dump(tree))
        assert f": {field}: must be " in error, value


@given(yaml_trees(), st.booleans())
def test_what_is_no_spec_gives_only_spec_errors(tree: dict[str, object], with_model: bool) -> None:
    if with_model:
        tree = {"name": "a", "model": tree, "kernels": tree}
    with pytest.raises(SpecError) as caught:
        parse_spec(yaml.safe_dump(tree))
    assert all(line.isprintable() for line in str(caught.value).split("\n"))


# Each: text, and the whole of what is said about it.
ERRORS = {
    "bound": (
        MINIMAL.replace("kv_lora_rank: 512", "kv_lora_rank: 9000"),
        ["4:17: model.kv_lora_rank: must be an integer from 1 to 8192; got 9000"],
    ),
    "YAML 1.1 boolean": (
        MINIMAL + "tensor_parallel: no",
        [
            "8:18: tensor_parallel: must be an integer from 1 to 1024; got 'no' "
            "(unquoted no is text in YAML 1.2; a boolean is true or false)"
        ],
    ),
    "boolean is no integer": (
        MINIMAL + "tensor_parallel: true",
        ["8:18: tensor_parallel: must be an integer from 1 to 1024; got true"],
    ),
    "quoted number": (
        MINIMAL + "cache: {page_size: '64'}",
        ["8:20: cache.page_size: must be 1, 16, 32, 64 or 128; got '64' (remove the quotes)"],
    ),
    "hexadecimal": (
        MINIMAL + "  hidden_size: 0x800",
        [
            "8:16: model.hidden_size: must be an integer from 1 to 1048576 or null; got '0x800' "
            "(integers are written in plain decimal: 2048)"
        ],
    ),
    "float for an integer": (
        MINIMAL + "  hidden_size: 2e3",
        [
            "8:16: model.hidden_size: must be an integer from 1 to 1048576 or null; got 2000.0 "
            "(write 2000, without a decimal point or an exponent)"
        ],
    ),
    "number as name": (
        "name: 123\n" + MODEL,
        ["1:7: name: must be text of the form [a-z][a-z0-9_]{0,63}; got 123 (put it in quotes if it is meant as text)"],
    ),
    "union": (
        MINIMAL + "kernels:\n  decode:\n    stages: 9",
        ["10:13: kernels.decode.stages: must be an integer from 1 to 8 or auto; got 9"],
    ),
    "null section": (MINIMAL + "cache:\n", ["8:7: cache: must be a mapping; got null"]),
    "infinite": (
        MINIMAL + "  rope_scaling: {type: yarn, factor: .inf}",
        ["8:38: model.rope_scaling.factor: must be a number from 1 to 1000000 or null; got inf"],
    ),
    "ranks": (
        MINIMAL.replace("128", "20", 1) + "tensor_parallel: 8",
        [
            "8:18: tensor_parallel: must divide model.num_attention_heads = 20; got 8; "
            "use one of 1, 2, 4, 5, 10, 20, or change model.num_attention_heads"
        ],
    ),
    "yarn without factor": (
        MINIMAL + "  rope_scaling: {type: yarn, mscale_all_dim: 1.0}",
        [
            "8:3: model.rope_scaling.factor: yarn needs a factor, a number from 1 to 1000000; add it, "
            "or change model.rope_scaling.type"
        ],
    ),
    "misspelt": (
        MINIMAL + "kernels: {decode: {stage: 2}}",
        ["8:20: kernels.decode.stage: unknown field; did you mean stages?"],
    ),
    "wrong case": (
        MINIMAL + "Tensor_Parallel: 2",
        ["8:1: Tensor_Parallel: unknown field; did you mean tensor_parallel?"],
    ),
    "wrong place": (MINIMAL + "page_size: 64", ["8:1: page_size: unknown field here; did you mean cache.page_size?"]),
    "wrong place of a mapping": (
        MINIMAL + "prefill: {tile_q: 128}",
        ["8:1: prefill: unknown field here; did you mean kernels.prefill?"],
    ),
    "not a field yet": (
        MINIMAL + "gather: {tile_q: 128}",
        [
            "8:1: gather: unknown field; the fields of a spec are name, model, tensor_parallel, cache, target, "
            "kernels and dispatch"
        ],
    ),
    "missing": (MODEL, ["1:1: name: missing; it must be text of the form [a-z][a-z0-9_]{0,63}"]),
    "missing in a mapping": (
        "name: a\nmodel: {num_attention_heads: 1, kv_lora_rank: 1, qk_nope_head_dim: 1, v_head_dim: 1}",
        ["2:1: model.qk_rope_head_dim: missing; it must be an integer from 0 to 1024"],
    ),
    "missing mapping": (
        "name: a",
        [
            "1:1: model: missing; it must be a mapping with num_attention_heads, kv_lora_rank, qk_nope_head_dim, "
            "qk_rope_head_dim and v_head_dim"
        ],
    ),
    "duplicate": (
        MINIMAL + "name: other\n",
        ["8:1: name: written twice, at line 1 column 1 and line 8 column 1; remove one of the two"],
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_messages(name: str) -> None:
    text, expected = ERRORS[name]
    assert errors_of(text) == expected


def test_all_faults_of_a_file_are_reported_at_once_in_its_order() -> None:
    text = """\
name: Bad-Name
model:
  num_attention_heads: 0
  kv_lora_rank: &r 512
  qk_nope_head_dims: 128
  qk_rope_head_dim: *r
  v_head_dim: 128
  v_head_dim: wide
cache: {dtype: fp8}
cache_: 1
"""
    fields = [line.split(": ")[1] for line in errors_of(text)]
    assert fields == [
        "name",
        "model.qk_nope_head_dim",
        "model.num_attention_heads",
        "model.kv_lora_rank",
        "model.qk_nope_head_dims",
        "model.qk_rope_head_dim",
        "model.v_head_dim",
        "cache.dtype",
        "cache_",
    ]


def test_problems_of_later_stages_point_into_the_file() -> None:
    spec = parse_spec(MINIMAL + "kernels:\n  decode:\n    stages: 4\n", "dir/f.yaml")
    assert spec.problem("kernels.decode.stages", "too many") == Problem(
        "dir/f.yaml", 10, 13, "kernels.decode.stages", "too many"
    )
    assert spec.problem("kernels.decode.tile_rows", "m").line == 9
    assert spec.problem("cache.page_size", "m") == Problem("dir/f.yaml", 1, 1, "cache.page_size", "m")
    assert str(Spec(name="a", model=spec.model).problem("name", "m")) == "<spec>:1:1: name: m"


def test_where_a_spec_was_written_is_no_part_of_it() -> None:
    one = parse_spec(MINIMAL, "one")
    other = parse_spec("# comment\n\n" + MODEL + "name: tiny\ncache: {}\n", "other")
    built = Spec(name="tiny", model=one.model)
    assert one == other == built
    assert len({one, other, built}) == 1
    assert dump_spec(one) == dump_spec(other) == dump_spec(built)
    assert one.problem("name", "m") != other.problem("name", "m")
    assert one != parse_spec(MINIMAL.replace("tiny", "tinier"), "one")


def test_specs_survive_copies_and_processes_with_their_positions() -> None:
    spec = parse_spec(MINIMAL, "f")
    for twin in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec), spec.model_copy()):
        assert twin == spec
        assert twin.problem("model.v_head_dim", "m") == Problem("f", 7, 15, "model.v_head_dim", "m")


def test_specs_are_frozen() -> None:
    spec = parse_spec(MINIMAL)
    with pytest.raises(ValidationError):
        spec.model.kv_lora_rank = 256
    assert spec.d_v == 512


def test_building_a_spec_in_python_checks_it_too() -> None:
    model = parse_spec(MINIMAL).model
    with pytest.raises(ValidationError, match="must divide"):
        Spec(name="a", model=model, tensor_parallel=3)
    with pytest.raises(ValidationError):
        Spec(name="a", model=model, tensor_parallel="2")  # type: ignore[arg-type]


def test_a_file_is_named_in_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("name: 1\n" + MODEL, encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert str(caught.value).startswith(f"{path}:1:7: name: ")
    path.write_text(MINIMAL, encoding="utf-8")
    assert load_spec(str(path)) == load_spec(path) == parse_spec(MINIMAL)


def test_spec_errors_sort_drop_repeats_and_survive_pickling() -> None:
    late, early = Problem("f", 10, 1, "b", "m"), Problem("f", 9, 5, "a", "n")
    error = SpecError([late, early, late])
    assert error.problems == (early, late)
    assert str(error) == "f:9:5: a: n\nf:10:1: b: m"
    assert pickle.loads(pickle.dumps(error)).problems == error.problems
