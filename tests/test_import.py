"""Specs from the files of others: every MLA model's config.json, plugins' JSON, C headers, and what must be refused."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from mlaforge_generator import cli
from mlaforge_generator.exchange.draft import ForeignFileError, Imported
from mlaforge_generator.exchange.imports import MAX_BYTES, import_file
from mlaforge_generator.resources import spec_dir
from mlaforge_generator.spec import load_spec, parse_spec
from strategies import yaml_trees

DIMS = (
    "num_attention_heads",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "hidden_size",
    "num_hidden_layers",
)


def config(*dims: int | None, **others: object) -> dict[str, Any]:
    """Make a config.json of dimensions in the order of DIMS, with fields that any of them has."""
    rest = {"vocab_size": 1000, "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "rope_theta": 10000.0}
    return {"model_type": "some_model", **dict(zip(DIMS, dims, strict=True)), **rest, **others}


def yarn(factor: float, mscale: float = 1.0, word: str = "type") -> dict[str, Any]:
    return {
        word: "yarn",
        "factor": factor,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    }


def new_yarn(factor: float) -> dict[str, Any]:
    return {**yarn(factor, word="rope_type"), "rope_theta": 10000.0}


DEEPSEEK = (128, 512, 1536, 128, 64, 128, 7168, 61)
K2 = (64, 512, 1536, 128, 64, 128, 7168, 61)
SPARSE = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
LONGROPE = {"type": "longrope", "long_factor": [1.0, 1.1], "short_factor": [1.0, 1.0]}
PANGU = {
    "attention_kv_lora_dim": 512,
    "attention_q_lora_dim": 1536,
    "attention_qk_dim": 128,
    "attention_qk_rope_dim": 64,
    "attention_v_dim": 128,
}
PANGU_CONFIG = {
    **{name: value for name, value in config(*DEEPSEEK).items() if "lora" not in name and "head_dim" not in name},
    **PANGU,
    "hidden_size": 7680,
}
LONGCAT = config(64, 512, 1536, 128, 64, 128, 6144, 28, mla_scale_q_lora=True, mla_scale_kv_lora=True)
LONGCAT["num_layers"] = LONGCAT.pop("num_hidden_layers")
MISTRAL = (32, 256, 1024, 64, 64, 128, 4096, 36)
KIMI_LINEAR = (32, 512, None, 128, 64, 128, 2304, 27)

# Configuration, dimensions, softmax scale.
MODELS: dict[str, tuple[dict[str, Any], tuple[int | None, ...], float]] = {
    "V2": (
        config(128, 512, 1536, 128, 64, 128, 5120, 60, rope_scaling=yarn(40, 0.707)),
        (128, 512, 1536, 128, 64, 128, 5120, 60),
        0.114721,
    ),
    "V2-Lite": (
        config(16, 512, None, 128, 64, 128, 2048, 27, rope_scaling=yarn(40, 0.707)),
        (16, 512, None, 128, 64, 128, 2048, 27),
        0.114721,
    ),
    "V3": (config(*DEEPSEEK, rope_scaling=yarn(40)), DEEPSEEK, 0.135234),
    "V3, transformers 5": (config(*DEEPSEEK, rope_parameters=new_yarn(40)), DEEPSEEK, 0.135234),
    "V3.2": (config(*DEEPSEEK, rope_scaling=yarn(40), **SPARSE), DEEPSEEK, 0.135234),
    "K2": (config(*K2, rope_scaling=yarn(32)), K2, 0.130861),
    "K2.5": (
        {"model_type": "kimi_k25", "dtype": "bfloat16", "text_config": config(*K2, rope_scaling=yarn(64))},
        K2,
        0.144680,
    ),
    "K3": (
        config(96, 512, 1536, 128, 64, 128, 7168, 93, layer_types=["linear_attention", "full_attention"]),
        (96, 512, 1536, 128, 64, 128, 7168, 93),
        0.072169,
    ),
    "Kimi-Linear": (
        config(*KIMI_LINEAR, mla_use_nope=True, linear_attn_config={"full_attn_layers": [4]}, rope_scaling=None),
        KIMI_LINEAR,
        0.072169,
    ),
    "MiniCPM3": (
        config(40, 256, 768, 64, 32, 64, 2560, 62, rope_scaling=LONGROPE),
        (40, 256, 768, 64, 32, 64, 2560, 62),
        96**-0.5,
    ),
    "GLM-4.7-Flash": (
        config(20, 512, 768, 192, 64, 256, 2048, 47, qk_head_dim=256),
        (20, 512, 768, 192, 64, 256, 2048, 47),
        0.0625,
    ),
    "GLM-5": (
        config(64, 512, 2048, 192, 64, 256, 6144, 78, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        (64, 512, 2048, 192, 64, 256, 6144, 78),
        0.0625,
    ),
    "GLM-5.3-Flash": (
        {"model_type": "glm5_next", "text_config": config(64, 512, 1536, 256, 0, 256, 4096, 45, **SPARSE)},
        (64, 512, 1536, 256, 0, 256, 4096, 45),
        0.0625,
    ),
    "LongCat-Flash": (LONGCAT, (64, 512, 1536, 128, 64, 128, 6144, 28), 0.072169),
    "LongCat LSA": (
        config(32, 512, 1536, 128, 64, 128, 3072, 14, rope_scaling={**yarn(120), "type": "deepseek_yarn"}),
        (32, 512, 1536, 128, 64, 128, 3072, 14),
        192**-0.5 * (1 + 0.1 * 4.787491742782046) ** 2,
    ),
    "Mistral Small 4": (
        {
            "model_type": "mistral4",
            "text_config": config(*MISTRAL, rope_parameters={**new_yarn(128), "type": "yarn"}),
            "vision_config": {"hidden_size": 1664, "num_attention_heads": 16},
        },
        MISTRAL,
        0.194969,
    ),
    "Youtu-LLM": (
        config(16, 512, 1536, 128, 64, 128, 2048, 32, rope_interleave=True),
        (16, 512, 1536, 128, 64, 128, 2048, 32),
        0.072169,
    ),
    "openPangu-Ultra": (PANGU_CONFIG, (128, 512, 1536, 128, 64, 128, 7680, 61), 0.072169),
    "Ling-3.0-flash": (
        config(32, 512, None, 128, 64, 128, 2560, 42, layer_group_size=6),
        (32, 512, None, 128, 64, 128, 2560, 42),
        0.072169,
    ),
}


def imported(tmp_path: Path, content: object, **settings: object) -> Imported:
    path = tmp_path / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return import_file(path, settings)


def faults(tmp_path: Path, content: object, **settings: object) -> list[str]:
    with pytest.raises(ForeignFileError) as error:
        imported(tmp_path, content, **settings)
    lines = str(error.value).splitlines()
    assert all(line.isprintable() for line in lines)
    return [line.removeprefix(f"{tmp_path / 'config.json'}: ") for line in lines]


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(cli.cli, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# ---- config.json -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_every_model(tmp_path: Path, model: str) -> None:
    content, dims, scale = MODELS[model]
    result = imported(tmp_path, content)
    assert tuple(getattr(result.spec.model, name) for name in DIMS) == dims
    assert result.spec.softmax_scale == pytest.approx(scale, rel=1e-5)
    assert result.spec.cache.dtype == "bf16" and result.spec.name == content["model_type"]
    assert parse_spec(result.text) == result.spec


@pytest.mark.parametrize(
    ("shipped", "model"),
    [
        ("deepseek_v2", "V2"),
        ("deepseek_v2_lite", "V2-Lite"),
        ("deepseek_v3", "V3"),
        ("kimi_k2", "K2"),
        ("kimi_k2_5", "K2.5"),
        ("kimi_k3", "K3"),
        ("glm_4_7_flash", "GLM-4.7-Flash"),
        ("minicpm3", "MiniCPM3"),
        ("mistral_small_4", "Mistral Small 4"),
        ("longcat_flash", "LongCat-Flash"),
        ("youtu_llm_2b", "Youtu-LLM"),
    ],
)
def test_the_shipped_specs_are_what_an_import_gives(tmp_path: Path, shipped: str, model: str) -> None:
    assert imported(tmp_path, MODELS[model][0], name=shipped).spec == load_spec(spec_dir() / f"{shipped}.yaml")


def test_nothing_is_dropped_without_a_word(tmp_path: Path) -> None:
    """Every field of every config is in the spec, or among what is told and written down."""
    for content, _, _ in MODELS.values():
        result = imported(tmp_path, content)
        told = {note.field for note in result.notes} | set(result.others)
        inner = content.get("text_config")
        fields = {f"text_config.{name}": value for name, value in inner.items()} if inner else dict(content)
        fields |= {name: value for name, value in content.items() if inner and name != "text_config"}
        for name in fields:
            last = name.rpartition(".")[2]
            used = last in DIMS or last in PANGU or last in ("model_type", "num_layers", "dtype", "torch_dtype")
            assert used or name in told or last in ("rope_scaling", "rope_parameters"), name
        comments = " ".join(line.lstrip("# ") for line in result.text.splitlines() if line.startswith("#"))
        assert all(note.field in comments for note in result.notes)
        assert all(name in comments for name in result.others)


def test_what_concerns_attention_is_told_with_a_reason(tmp_path: Path) -> None:
    content = config(*DEEPSEEK, rope_scaling=yarn(40), sliding_window=512, attn_sink_size=4, attention_bias=False)
    notes = {note.field: str(note) for note in imported(tmp_path, {**content, **SPARSE}).notes}
    assert "index_topk" in notes and "sparse" in notes["index_topk"]
    assert "window" in notes["sliding_window"] and "512" in notes["sliding_window"]
    assert "not known here" in notes["attn_sink_size"]
    assert "rope_scaling.beta_fast" in notes and "attention_bias" not in notes


@pytest.mark.parametrize(
    ("name", "scheme"), [("kv_cache_scheme", {"num_bits": 8, "type": "float"}), ("kv_cache_quant_algo", "FP8")]
)
def test_a_cache_that_is_quantised_is_told(tmp_path: Path, name: str, scheme: object) -> None:
    result = imported(tmp_path, config(*DEEPSEEK, quantization_config={"quant_method": "x", name: scheme}))
    whys = {note.field: note.why for note in result.notes}
    assert "cache.dtype=fp8_e4m3" in whys[f"quantization_config.{name}"]
    assert f"#   quantization_config.{name} = " in result.text
    spec = imported(tmp_path, config(*DEEPSEEK, quantization_config={name: scheme}), **{"cache.dtype": "fp8_e4m3"}).spec
    assert spec.cache.dtype == "fp8_e4m3"
    for of_weights in ({"quant_method": "x"}, {name: None}, ["x"]):
        notes = {note.field for note in imported(tmp_path, config(*DEEPSEEK, quantization_config=of_weights)).notes}
        assert "quantization_config" in notes and not any("kv_cache" in note for note in notes)


@pytest.mark.parametrize(("word", "dtype"), [("float16", "fp16"), ("torch.bfloat16", "bf16")])
def test_the_dtype_under_either_name(tmp_path: Path, word: str, dtype: str) -> None:
    for name in ("dtype", "torch_dtype"):
        content = {**config(*DEEPSEEK, torch_dtype=None), name: word}
        assert imported(tmp_path, content).spec.cache.dtype == dtype


def test_a_dtype_that_no_cache_has_is_told(tmp_path: Path) -> None:
    result = imported(tmp_path, config(*DEEPSEEK, torch_dtype="float32"))
    assert result.spec.cache.dtype == "bf16"
    assert [note.field for note in result.notes if "bf16" in note.why] == ["torch_dtype"]


def test_rope_of_every_kind_of_layer(tmp_path: Path) -> None:
    alike = {"full_attention": new_yarn(40), "sliding_attention": {**new_yarn(40), "rope_theta": 1.0}}
    assert imported(tmp_path, config(*DEEPSEEK, rope_parameters=alike)).spec.softmax_scale == pytest.approx(0.1352338)
    odd = {"full_attention": {"rope_type": ["yarn"]}, "sliding_attention": {"rope_type": {}}}
    assert faults(tmp_path, config(*DEEPSEEK, rope_parameters=odd))
    other = {"full_attention": new_yarn(40), "sliding_attention": {"rope_type": "default"}}
    (line,) = faults(tmp_path, config(*DEEPSEEK, rope_parameters=other))
    assert line.startswith("rope_parameters: differs by kind of layer")
    given = {"model.rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1}}
    assert imported(tmp_path, config(*DEEPSEEK, rope_parameters=other), **given).spec.softmax_scale > 0.135


def test_rope_told_twice(tmp_path: Path) -> None:
    both = config(*DEEPSEEK, rope_parameters=new_yarn(40), rope_scaling=yarn(40))
    assert imported(tmp_path, both).spec.softmax_scale == pytest.approx(0.1352338)
    (line,) = faults(tmp_path, {**both, "rope_scaling": yarn(32)})
    assert line.startswith("rope_parameters.factor: ") and "40" in line and "32" in line
    (line,) = faults(tmp_path, config(*DEEPSEEK, rope_scaling={**yarn(40), "rope_type": "linear"}))
    assert line.startswith("rope_scaling.type: ")


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"kv_lora_rank": "512"}, "kv_lora_rank", "integer"),
        ({"kv_lora_rank": 512.0}, "kv_lora_rank", "integer"),
        ({"num_attention_heads": True}, "num_attention_heads", "integer"),
        ({"num_attention_heads": 0}, "num_attention_heads", "1 to 1024"),
        ({"v_head_dim": None}, "v_head_dim", "integer"),
        ({"rope_scaling": {"type": "yarn"}}, "model.rope_scaling.factor", "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": -1}}, "rope_scaling.factor", "number from 1"),
        ({"rope_scaling": {"type": "mine", "factor": 2}}, "rope_scaling.type", "must be one of"),
        ({"rope_scaling": {"type": ["yarn"], "factor": 2}}, "rope_scaling.type", "must be one of"),
        ({"rope_scaling": "yarn"}, "rope_scaling", "object"),
        ({"attention_v_dim": 64}, "attention_v_dim", "twice"),
        ({"qk_head_dim": 128}, "qk_head_dim", "192"),
        ({"use_mla": False}, "use_mla", "no latent"),
        ({"model_type": "DeepSeek-V3"}, "model_type", "--name"),
        ({"model_type": 7}, "model_type", "--name"),
    ],
)
def test_faults_name_the_field_of_the_file(tmp_path: Path, change: dict[str, Any], field: str, words: str) -> None:
    (line,) = faults(tmp_path, config(*DEEPSEEK, **change))
    assert line.startswith(f"{field}: ") and words in line


@pytest.mark.parametrize("missing", [name for name in DIMS if name.endswith("head_dim") or name.endswith("heads")])
def test_what_is_missing_is_named_and_can_be_given(tmp_path: Path, missing: str) -> None:
    content = config(*DEEPSEEK)
    value = content.pop(missing)
    (line,) = faults(tmp_path, content)
    assert line.startswith(f"model.{missing}: missing") and f"--set model.{missing}=" in line
    assert getattr(imported(tmp_path, content, **{f"model.{missing}": value}).spec.model, missing) == value


def test_what_the_user_sets_goes_before_a_fault(tmp_path: Path) -> None:
    content = config(*DEEPSEEK, rope_scaling={"type": "mine"}, kv_lora_rank="x", attention_v_dim=64, model_type=7)
    assert len(faults(tmp_path, content)) == 4
    given = {"model.rope_scaling": None, "model.kv_lora_rank": 256, "model.v_head_dim": 128, "name": "mine"}
    spec = imported(tmp_path, content, **given).spec
    assert (spec.name, spec.d_v, spec.model.v_head_dim, spec.model.rope_scaling) == ("mine", 256, 128, None)
    assert len(faults(tmp_path, content, **{**given, "model.kv_lora_rank": 0})) == 1
    header = HEADER.replace("kNumHeads = 128", "kNumHeads = 2 * 64")
    assert imported(tmp_path, header, name="mine", **{**V_HEAD_DIM, "model.num_attention_heads": 64}).spec


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    content = config(*DEEPSEEK, kv_lora_rank=-1, qk_head_dim=7, model_type="No Name")
    del content["v_head_dim"]
    assert len(faults(tmp_path, content)) == 4


def test_a_config_without_a_latent(tmp_path: Path) -> None:
    (line,) = faults(tmp_path, {"model_type": "llama", "num_attention_heads": 32})
    assert line.startswith("kv_lora_rank: missing")
    (line,) = faults(tmp_path, {"text_config": config(*DEEPSEEK), "talker_config": config(*K2)})
    assert line == "text_config and talker_config each have a kv_lora_rank; keep the one that is meant"


# ---- Untrusted -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        '{"kv_lora_rank": 512, "kv_lora_rank": 256}',
        '{"kv_lora_rank": NaN}',
        '{"kv_lora_rank": 512',
        "[1, 2]",
        '{"a":' * 100_000,
        '{"kv_lora_rank": 512, "x": ' + "[" * 40 + "]" * 40 + "}",
        '{"kv_lora_rank": 512, "x": ' + "[" * 900 + "]" * 900 + "}",
        f'{{"kv_lora_rank": {"9" * 10_000}}}',
        "{" + "\x00" + "}",
        "",
    ],
)
def test_what_is_no_file_of_the_kind(tmp_path: Path, content: str) -> None:
    assert faults(tmp_path, content)


def test_not_utf8_too_large_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for data in (b"\xff\xfe", b'{"a": "\xff"}', b" " * (MAX_BYTES + 1)):
        path.write_bytes(data)
        with pytest.raises(ForeignFileError, match=r"UTF-8|larger"):
            import_file(path, {})
    for missing in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(ForeignFileError, match="can't be read"):
            import_file(missing, {})


@pytest.mark.parametrize("text", ["/*", "/* */", '"', "kA=", "kA{", "#define kA ", "#define\n", "\\\n", "1'", "/"])
def test_no_header_takes_long(tmp_path: Path, text: str) -> None:
    """Work is linear in the size: a quarter of a megabyte takes seconds at most, and not hours."""
    start = time.process_time()
    faults(tmp_path, text * (250_000 // len(text)))
    assert time.process_time() - start < 20


EVIL = ["x\nname: evil", "\u2028name: evil", "../up", "\x85b", "# c", "\ud800", "a: b", "*/ int x;", "\x7f", "\x1b[31m"]


@pytest.mark.parametrize("text", EVIL)
def test_texts_of_a_file_stay_texts(tmp_path: Path, text: str) -> None:
    content = config(*DEEPSEEK, attention_note=text, rope_scaling={**yarn(40), text: text})
    content |= {text: 1, f"rope_{text}": [text], "torch_dtype": text}
    result = imported(tmp_path, {"model_type": "fine", text: {}, "text_config": {**content, "model_type": text}})
    assert parse_spec(result.text) == result.spec and result.spec.name == "fine"
    assert result.text.isascii() and all(line.isprintable() for line in result.text.splitlines())
    for line in faults(tmp_path, {**content, "model_type": text, "kv_lora_rank": text}):
        assert line.isprintable()


@given(yaml_trees())
def test_any_object_is_a_spec_or_a_fault(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    for content in (tree, {**config(*DEEPSEEK), **tree}, {"mla_plugin": tree, "mlaforge": tree}):
        path.write_text(json.dumps(content))
        try:
            result = import_file(path, {})
        except ForeignFileError as error:
            assert all(line.isprintable() for line in str(error).splitlines())
        else:
            assert parse_spec(result.text) == result.spec


_VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
_ANYTHING = _VALUES | st.lists(_VALUES, max_size=2) | st.dictionaries(st.text(), _VALUES, max_size=2)
_NAMES = [*DIMS, "rope_scaling", "rope_parameters", "qk_head_dim", "dtype", "layer_types", "model_type"]


@given(st.dictionaries(st.sampled_from(_NAMES), _ANYTHING))
def test_any_value_is_a_spec_or_a_fault(tmp_path_factory: pytest.TempPathFactory, change: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "any_value.json"
    path.write_text(json.dumps({**config(*DEEPSEEK), **change}))
    try:
        result = import_file(path, {})
    except ForeignFileError as error:
        assert all(line.isprintable() for line in str(error).splitlines())
    else:
        assert parse_spec(result.text) == result.spec


# ---- Plugins' JSON ---------------------------------------------------------------------------------------------------

PLUGIN = {
    "name": "mine",
    "num_heads": 128,
    "head_dim_content": 128,
    "latent_kv_dim": 512,
    "rope_dim": 64,
    "tile_s": 64,
    "num_stages": 3,
    "page_size": 64,
    "enable_matrix_absorption": True,
    "prefill_absorption_threshold": 512,
    "rope_compute_dtype": "fp32",
    "kv_cache_dtype": "bfloat16",
}
V_HEAD_DIM = {"model.v_head_dim": 128}


def test_a_plugins_json(tmp_path: Path) -> None:
    result = imported(tmp_path, {"mla_plugin": PLUGIN}, **V_HEAD_DIM)
    spec = result.spec
    assert (spec.name, spec.model.num_attention_heads, spec.d_qk, spec.d_v) == ("mine", 128, 576, 512)
    assert (spec.cache.dtype, spec.cache.page_size, spec.kernels.decode.stages) == ("bf16", 64, 3)
    assert spec.dispatch.prefill_absorption_threshold == 512 and result.notes == ()


@pytest.mark.parametrize(
    ("word", "dtype"),
    [
        ("half", "fp16"),
        ("fp8", "fp8_e4m3"),
        ("float8_e4m3fn", "fp8_e4m3"),
        ("fp8_ds_mla", "fp8_ds_mla"),
        ("nvfp4",) * 2,
    ],
)
def test_the_cache_of_a_plugin(tmp_path: Path, word: str, dtype: str) -> None:
    plugin = {"mla_plugin": {**PLUGIN, "kv_cache_dtype": word}}
    assert imported(tmp_path, plugin, **V_HEAD_DIM).spec.cache.dtype == dtype


def test_a_plugin_says_nothing_of_v(tmp_path: Path) -> None:
    (line,) = faults(tmp_path, {"mla_plugin": PLUGIN})
    assert line.startswith("model.v_head_dim: missing")


def test_what_our_kernels_can_not_have_is_told(tmp_path: Path) -> None:
    changes = {
        "tile_s": 128,
        "num_stages": 7,
        "enable_matrix_absorption": False,
        "rope_compute_dtype": "bf16",
        "vendor": [1],
    }
    result = imported(tmp_path, {"mla_plugin": {**PLUGIN, **changes}, "more": 1}, **V_HEAD_DIM)
    assert {note.field.removeprefix("mla_plugin.") for note in result.notes} == set(changes)
    assert result.others == ("more",)
    assert result.spec.kernels.decode.stages == "auto" and result.spec.kernels.decode.tile_tokens == 64


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kv_cache_dtype": "int8"}, "mla_plugin.kv_cache_dtype"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "mla_plugin.kv_cache_dtype"),
        ({"page_size": 48}, "mla_plugin.page_size"),
        ({"num_heads": "128"}, "mla_plugin.num_heads"),
        ({"prefill_absorption_threshold": -1}, "mla_plugin.prefill_absorption_threshold"),
        ({"name": "MLA Plugin"}, "mla_plugin.name"),
        ({"name": "../../etc/cron.d/x"}, "mla_plugin.name"),
    ],
)
def test_faults_of_a_plugin(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    (line,) = faults(tmp_path, {"mla_plugin": {**PLUGIN, **change}}, **V_HEAD_DIM)
    assert line.startswith(f"{field}: must be ")


@pytest.mark.parametrize(
    ("rest", "field"),
    [
        ({"name": "other"}, "mla_plugin.name"),
        ({"model": 5}, "mla_plugin.num_heads"),
        ({"cache": {"dtype": {"a": 1}}}, "mla_plugin.kv_cache_dtype"),
        ({"model.v_head_dim": 128}, "mlaforge.model.v_head_dim: unknown"),
        ({"kernels": {"decode": {"tile_tokens": 64}}}, "mla_plugin.tile_s"),
        ({"dispatch": {"prefill_absorption_threshold": 512}}, "mla_plugin.prefill_absorption_threshold"),
        ({"zz": 1}, "mlaforge.zz"),
        (7, "mlaforge"),
    ],
)
def test_the_rest_of_a_spec_contradicts_nothing(tmp_path: Path, rest: object, field: str) -> None:
    lines = faults(tmp_path, {"mla_plugin": PLUGIN, "mlaforge": rest}, **V_HEAD_DIM)
    assert any(field in line for line in lines), lines


def test_a_number_of_stages_that_was_changed_afterwards(tmp_path: Path) -> None:
    rest = {"kernels": {"decode": {"stages": "auto"}}}
    result = imported(tmp_path, {"mla_plugin": {**PLUGIN, "num_stages": 2}, "mlaforge": rest}, **V_HEAD_DIM)
    assert result.spec.kernels.decode.stages == "auto"
    (note,) = [note for note in result.notes if note.field == "mla_plugin.num_stages"]
    assert note.value == "2" and "takes 3" in note.why


# ---- C headers -------------------------------------------------------------------------------------------------------

HEADER = """
#pragma once
#ifndef MLA_CONFIG_H  // a guard
#define MLA_CONFIG_H
#include <cstdint>
/* kNumHeads = 7; */
namespace mla { // kHeadDimC = 9
constexpr int kNumHeads = 128;
static constexpr std::int32_t kHeadDimC{0x80};
inline constexpr auto kLatentKV = (512u);
enum : int { kRopeDim = 64, kHiddenDim = 7'168 };
static_assert(kLatentKV == 512, "kNumLayers = 3;");
#define kNumLayers 61
const int kTileS = 64; const int kNumStages = 2;
constexpr int kPrefillThresh = 128;
constexpr int kWarps = 4;
constexpr char kVendor[] = "us";
}
#endif
"""


def test_a_header_of_constants(tmp_path: Path) -> None:
    result = imported(tmp_path, HEADER, name="mine", **V_HEAD_DIM)
    model = result.spec.model
    assert tuple(getattr(model, name) for name in DIMS) == (128, 512, None, 128, 64, 128, 7168, 61)
    assert result.spec.kernels.decode.stages == 2
    assert result.spec.dispatch.prefill_absorption_threshold == 128
    assert {note.field for note in result.notes} == {"kWarps", "kVendor"}


@pytest.mark.parametrize(
    ("old", "new", "field", "words"),
    [
        ("kNumHeads = 128", "kNumHeads = 2 * 64", "kNumHeads", "plain literal"),
        ("kNumHeads = 128", "kNumHeads = -128", "kNumHeads", "1 to 1024"),
        ("kPrefillThresh = 128", "kPrefillThresh = 2000000", "kPrefillThresh", "0 to 1048576"),
        ("kPrefillThresh = 128", "kPrefillThresh = sizeof(int)", "kPrefillThresh", "plain literal"),
        ("kNumHeads = 128", "kNumHeads = 128.0", "kNumHeads", "integer"),
        ("kNumHeads = 128", "kNumHeads = " + "1" * 5000, "kNumHeads", "plain literal"),
        ("kNumHeads = 128", "kNumHeads = 128, kNumHeads = 64", "kNumHeads", "twice"),
        ("kNumHeads = 128", "kOther = 128", "model.num_attention_heads", "missing"),
        ("kWarps = 4", 'kName[] = "no name"', "kName", "--name"),
    ],
)
def test_faults_of_a_header(tmp_path: Path, old: str, new: str, field: str, words: str) -> None:
    name = {} if "kName" in new else {"name": "mine"}
    (line,) = faults(tmp_path, HEADER.replace(old, new), **name, **V_HEAD_DIM)
    assert line.startswith(f"{field}: ") and words in line


def test_a_header_of_nobody_needs_a_name(tmp_path: Path) -> None:
    (line,) = faults(tmp_path, HEADER, **V_HEAD_DIM)
    assert line.startswith("name: missing")


def test_a_softmax_scale_that_does_not_follow_is_told(tmp_path: Path) -> None:
    for scale, wrong in (("0.0721687836", False), ("0.041666", True)):
        text = HEADER.replace("constexpr int kWarps = 4", f"constexpr float kSoftmaxScale = {scale}f")
        result = imported(tmp_path, text, name="mine", **V_HEAD_DIM)
        assert ("kSoftmaxScale" in {note.field for note in result.notes}) == wrong


@given(st.text() | st.text(alphabet="k=A{};,\"'/*#define \n12\\[]"))
def test_any_text_is_a_spec_or_a_fault(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.h"
    path.write_bytes((HEADER + text).encode("utf-8", "replace"))
    try:
        result = import_file(path, {"name": "mine", **V_HEAD_DIM})
    except ForeignFileError as error:
        assert all(line.isprintable() for line in str(error).splitlines())
    else:
        assert parse_spec(result.text) == result.spec


# ---- The command -----------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    source, target = tmp_path / "config.json", tmp_path / "new" / "spec.yaml"
    source.write_text(json.dumps({**MODELS["V3.2"][0], "model_type": "deepseek_v32"}))
    result = run("import", source, "-o", target, "--tensor-parallel", "8", "--set", "cache.page_size=16")
    assert result.exit_code == 0 and result.stdout == f"{target}: written\n"
    assert "not in the spec: index_topk = 2048: sparse attention" in result.stderr
    assert "no part of a spec: " in result.stderr and "vocab_size" in result.stderr
    spec = load_spec(target)
    assert (spec.name, spec.tensor_parallel, spec.cache.page_size) == ("deepseek_v32", 8, 16)
    printed = run("import", source, "--name", "no")
    assert parse_spec(printed.stdout).name == "no"
    assert run("plan", target).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--name", "../x"], "--set name: must be text"),
        (["--tensor-parallel", "7"], "--set tensor_parallel: must divide"),
        (["--set", "model.v_head_dim"], "must be FIELD=VALUE"),
        (["--set", "model.v_head_dim=[1"], "--set model.v_head_dim:"),
        (["--set", "model.v_head_dim.x=1"], "no mapping"),
        (["--set", "model.v_head_dim=1\nx: 2"], "one value"),
        (["--set", "model.zz=1"], "--set model.zz: unknown field"),
    ],
)
def test_wrong_options(tmp_path: Path, arguments: list[str], words: str) -> None:
    source = tmp_path / "config.json"
    source.write_text(json.dumps(config(*DEEPSEEK)))
    result = run("import", source, "-o", tmp_path / "spec.yaml", *arguments)
    assert result.exit_code == 2 and words in result.stderr
    assert not (tmp_path / "spec.yaml").exists()


def test_a_shape_without_a_kernel_is_told(tmp_path: Path) -> None:
    source = tmp_path / "config.json"
    source.write_text(json.dumps(config(128, 500, 1536, 128, 64, 128, 7168, 61)))
    result = run("import", source)
    assert result.exit_code == 0 and "no kernels can be planned of it yet: model.kv_lora_rank: " in result.stderr


# ---- What transformers itself writes ---------------------------------------------------------------------------------

WRITTEN = {
    "deepseek_v2": "DeepseekV2Config",
    "deepseek_v3": "DeepseekV3Config",
    "longcat_flash": "LongcatFlashConfig",
    "glm4_moe_lite": "Glm4MoeLiteConfig",
    "youtu": "YoutuConfig",
    "mistral4": "Mistral4Config",
    "minicpm3": "MiniCPM3Config",
    "kimi_linear": "KimiLinearConfig",
}


@pytest.mark.parametrize("model", WRITTEN)
def test_what_transformers_writes(tmp_path: Path, model: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    made = getattr(transformers, WRITTEN[model], None)
    if made is None:
        pytest.skip(f"this transformers has no {model}")
    written = made()
    written.save_pretrained(tmp_path)
    for content in (written.to_dict(), json.loads((tmp_path / "config.json").read_text())):
        result = imported(tmp_path, content)
        assert result.spec.name == model
        for name in DIMS[:-1]:
            assert getattr(result.spec.model, name) == getattr(written, name)


def test_the_softmax_scale_is_that_of_transformers(tmp_path: Path) -> None:
    """Of a whole attention layer, as its model makes it of the config."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    pytest.importorskip("torch")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    for factor, mscale in ((40.0, 1.0), (32.0, 0.707)):
        rope = {"rope_type": "yarn", "factor": factor, "mscale": mscale, "mscale_all_dim": mscale, "rope_theta": 1e4}
        made = transformers.DeepseekV3Config(
            hidden_size=64, num_attention_heads=2, rope_parameters={**rope, "original_max_position_embeddings": 4096}
        )
        scale = DeepseekV3Attention(made, 0).scaling
        assert imported(tmp_path, made.to_dict()).spec.softmax_scale == pytest.approx(scale, rel=1e-12)


def test_transformers_is_not_imported(tmp_path: Path) -> None:
    source = tmp_path / "config.json"
    source.write_text(json.dumps(config(*DEEPSEEK)))
    program = (
        f"import sys; sys.path[:0] = {[entry for entry in sys.path if entry]!r}\n"
        "from mlaforge_generator.cli import cli\n"
        f"try: cli(['import', {str(source)!r}])\n"
        "except SystemExit: pass\n"
        "heavy = ('transformers', 'torch', 'cuda', 'numpy')\n"
        "wrong = [name for name in sys.modules if name.partition('.')[0] in heavy]\n"
        "sys.exit(str(wrong) if wrong else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
