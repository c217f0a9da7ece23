"""The attention layer: what a config says, how a step's requests are sorted, and the layer on the kernels."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attention_models import (
    MODELS,
    NOWHERE,
    ROOT,
    ExactKernels,
    Steps,
    Theirs,
    computing,
    error,
    manifest_for,
    weights_of,
)
from mlaforge.api import MLA
from mlaforge.attention import MLAAttention
from mlaforge.attention_batch import AttentionBatch, PrefillGroup
from mlaforge.attention_config import AttentionConfig, PositionTables, Rotation
from mlaforge.attention_reference import ReferenceAttention
from mlaforge.formats import FORMATS
from mlaforge.launch import Cuda
from mlaforge.manifest import CacheFormat, read_manifest
from mlaforge.simulator import Simulator, compile_library
from test_verify import one_thread as one_thread

pytestmark = pytest.mark.usefixtures("one_thread")

# ---- What a config says ----------------------------------------------------------------------------------------------

DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
V3 = {**DEEPSEEK, "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536}
K2 = {**V3, "model_type": "kimi_k2", "num_attention_heads": 64}
K3 = {**V3, "model_type": "kimi_linear", "num_attention_heads": 96, "mla_use_nope": True, "mla_use_output_gate": True}
GLM = {
    "model_type": "glm_moe_dsa",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
}
LONGCAT = {
    **DEEPSEEK,
    "model_type": "longcat_flash",
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
}


def yarn(factor: float, mscale: float = 1.0) -> dict[str, Any]:
    """Write yarn's fields as config.json has them."""
    return {
        "type": "yarn",
        "factor": factor,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    }


# By the name of the shipped spec, or of a model that has none: config.json, and the softmax scale to six digits.
CONFIGS: dict[str, tuple[dict[str, Any], float]] = {
    "deepseek_v2": (
        {
            **V3,
            "model_type": "deepseek_v2",
            "hidden_size": 5120,
            "max_position_embeddings": 163840,
            "rope_scaling": yarn(40, 0.707),
        },
        0.114721,
    ),
    "deepseek_v2_lite": (
        {
            **V3,
            "model_type": "deepseek_v2",
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "q_lora_rank": None,
            "max_position_embeddings": 163840,
            "rope_scaling": yarn(40, 0.707),
        },
        0.114721,
    ),
    "deepseek_v3": ({**V3, "max_position_embeddings": 163840, "rope_scaling": yarn(40)}, 0.135234),
    "kimi_k2": ({**K2, "max_position_embeddings": 131072, "rope_theta": 5e4, "rope_scaling": yarn(32)}, 0.130861),
    "kimi_k2_5": (
        {"text_config": {**K2, "max_position_embeddings": 262144, "rope_theta": 5e4, "rope_scaling": yarn(64)}},
        0.144680,
    ),
    "kimi_k3": ({"text_config": {**K3, "model_max_length": 1048576}}, 0.072169),
    "Kimi-Linear": (
        {
            **DEEPSEEK,
            "model_type": "kimi_linear",
            "hidden_size": 2304,
            "num_attention_heads": 32,
            "q_lora_rank": None,
            "model_max_length": 1048576,
        },
        0.072169,
    ),
    "minicpm3": (
        {
            "model_type": "minicpm3",
            "hidden_size": 2560,
            "num_attention_heads": 40,
            "q_lora_rank": 768,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "max_position_embeddings": 32768,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 16,
                "long_factor": [2.0] * 16,
                "original_max_position_embeddings": 32768,
            },
        },
        0.102062,
    ),
    "glm_4_7_flash": (
        {
            **GLM,
            "model_type": "glm4_moe_lite",
            "hidden_size": 2048,
            "num_attention_heads": 20,
            "q_lora_rank": 768,
            "max_position_embeddings": 202752,
        },
        0.0625,
    ),
    "glm_5": (
        {**GLM, "hidden_size": 6144, "num_attention_heads": 64, "q_lora_rank": 2048, "max_position_embeddings": 202752},
        0.0625,
    ),
    "glm_5_3_flash": (
        {
            **GLM,
            "qk_nope_head_dim": 256,
            "qk_rope_head_dim": 0,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "q_lora_rank": 1536,
            "max_position_embeddings": 202752,
        },
        0.0625,
    ),
    "longcat_flash": ({**LONGCAT, "max_position_embeddings": 131072, "rope_theta": 1e7}, 0.072169),
    "LongCat LSA": (
        {**LONGCAT, "max_position_embeddings": 983040, "rope_theta": 1e7, "rope_scaling": yarn(120)},
        0.157811,
    ),
    "mistral_small_4": (
        {
            "model_type": "mistral4",
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "q_lora_rank": 1024,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "max_position_embeddings": 1048576,
            "rope_parameters": {**yarn(128), "rope_theta": 1e4, "llama_4_scaling_beta": 0.1},
        },
        0.194969,
    ),
    "youtu_llm_2b": (
        {
            **V3,
            "model_type": "youtu",
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "max_position_embeddings": 131072,
            "rope_theta": 1.6e6,
        },
        0.072169,
    ),
    "openPangu": (
        {
            "model_type": "pangu_ultra_moe",
            "attention_kv_lora_dim": 512,
            "attention_q_lora_dim": 1536,
            "attention_qk_dim": 128,
            "attention_qk_rope_dim": 64,
            "attention_v_dim": 128,
            "hidden_size": 7680,
            "num_attention_heads": 128,
            "max_position_embeddings": 131072,
            # Which it does not say itself.
            "rope_interleave": True,
        },
        0.072169,
    ),
    "DeepSeek-V3.2": (
        {**V3, "model_type": "deepseek_v32", "max_position_embeddings": 163840, "rope_scaling": yarn(40)},
        0.135234,
    ),
    "Ling 3": (
        {
            **DEEPSEEK,
            "model_type": "bailing_hybrid",
            "hidden_size": 2560,
            "num_attention_heads": 32,
            "q_lora_rank": None,
            "max_position_embeddings": 262144,
            "rope_theta": 6e6,
        },
        0.072169,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_softmax_scales(name: str) -> None:
    given_, scale = CONFIGS[name]
    config = AttentionConfig.from_hf(given_)
    assert round(config.softmax_scale, 6) == scale
    folder = ROOT / "generated" / name
    if folder.is_dir():
        # The shipped kernels are made for it, and a layer takes them.
        kernels = ExactKernels(read_manifest(folder))
        layer = MLAAttention.from_config(given_, kernels, max_position=8, device="meta")
        assert math.isclose(config.softmax_scale, kernels.manifest.softmax_scale, rel_tol=1e-12)
        assert layer.o_proj.weight.shape == (config.hidden_size, config.num_attention_heads * config.v_head_dim)


def test_every_shipped_spec_has_a_config() -> None:
    manifests = [read_manifest(folder) for folder in (ROOT / "generated").iterdir()]
    # A quantised cache is another's, of the same model.
    assert {each.name.removesuffix(f"_{each.cache.dtype}") for each in manifests} <= CONFIGS.keys()


def test_pairs_and_oddities() -> None:
    configs = {name: AttentionConfig.from_hf(given_) for name, (given_, _) in CONFIGS.items()}
    halves = {name for name, each in configs.items() if each.rotation and not each.rotation.interleaved}
    assert halves == {"minicpm3"}
    assert {name for name, each in configs.items() if each.rotation is None} == {
        "kimi_k3",
        "Kimi-Linear",
        "glm_5_3_flash",
    }
    assert {name: each.output_gate for name, each in configs.items() if each.output_gate} == {
        "kimi_k3": "element",
        "Ling 3": "head",
    }
    assert {name for name, each in configs.items() if each.query_scaling} == {"mistral_small_4"}
    assert {name for name, each in configs.items() if each.q_lora_scale != 1} == {"longcat_flash", "LongCat LSA"}
    assert (configs["longcat_flash"].q_lora_scale, configs["longcat_flash"].kv_lora_scale) == (2, math.sqrt(12))
    assert configs["minicpm3"].v_head_dim == 64
    pangu = configs["openPangu"]
    assert (pangu.kv_lora_rank, pangu.q_lora_rank, pangu.qk_head_dim, pangu.v_head_dim) == (512, 1536, 192, 128)
    # MiniCPM3, GLM and LongCat set rms_norm_eps to 1e-5, and their layers do not use it here.
    assert {each.norm_eps for each in configs.values()} == {1e-6}


@pytest.mark.parametrize(
    "name", ["deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k2_5", "LongCat LSA", "mistral_small_4"]
)
def test_frequencies_at_real_sizes_are_transformers(name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is what is compared with")
    given_ = CONFIGS[name][0]
    ours = AttentionConfig.from_hf(given_).rotation
    fields = {key: value for key, value in given_.get("text_config", given_).items() if key != "model_type"}
    model = MODELS["Mistral Small 4" if name == "mistral_small_4" else "DeepSeek-V3"]
    fields.setdefault("rope_parameters", fields.pop("rope_scaling", None))
    with computing(torch.float64):
        theirs = model.rotary(model.config(**fields, num_key_value_heads=fields["num_attention_heads"]))
    assert ours is not None and len(ours.frequencies) == 32
    torch.testing.assert_close(torch.tensor(ours.frequencies, dtype=torch.float64), theirs.inv_freq, rtol=1e-12, atol=0)
    assert math.isclose(ours.attention_factor, theirs.attention_scaling, rel_tol=1e-12)
    assert ours.attention_factor == 1.0


def test_longrope_is_chosen_by_the_context() -> None:
    rotation = Rotation(False, (1.0,), long_frequencies=(0.5,), original_context=32)
    config = replace(AttentionConfig.from_hf(CONFIGS["deepseek_v3"][0]), rotation=rotation)
    for context, frequency in ((32, 1.0), (33, 0.5)):
        table = config.position_tables(context).cos_sin
        assert table is not None and table.shape == (context, 2) and table.dtype == torch.float32
        torch.testing.assert_close(table[:, 1], (torch.arange(context).double() * frequency).sin().float())


WRONG_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no dimension": ({"qk_nope_head_dim": None}, "qk_nope_head_dim is None"),
    "a negative one": ({"qk_rope_head_dim": -2}, "qk_rope_head_dim is -2"),
    "an odd one": ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63; it must be even"),
    "an unknown model": ({"model_type": "new"}, "model_type is 'new'.*rope_interleave"),
    "an unknown rotation": ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type is 'dynamic'"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "factor of the rotation is None"),
    "too few factors": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "short_factor of the rotation has 1 numbers; it must have 32",
    ),
    "no mapping": ({"rope_scaling": "yarn"}, "rope_parameters is 'yarn'"),
    "a rotation for each layer": (
        {"rope_parameters": {"full_attention": yarn(40)}},
        "a mapping at full_attention",
    ),
    "no rank": ({"model_type": "longcat_flash", "q_lora_rank": None}, "q_lora_rank is null"),
}


@pytest.mark.parametrize("name", WRONG_CONFIGS)
def test_wrong_configs_are_refused(name: str) -> None:
    fields, message = WRONG_CONFIGS[name]
    with pytest.raises(ValueError, match=message):
        AttentionConfig.from_hf({**V3, "max_position_embeddings": 4096, **fields})


def test_what_is_no_config() -> None:
    with pytest.raises(ValueError, match="config is a int"):
        AttentionConfig.from_hf(1)
    with pytest.raises(ValueError, match="max_position is 0"):
        AttentionConfig.from_hf(CONFIGS["deepseek_v3"][0]).position_tables(0)


def test_what_a_config_says_counts() -> None:
    for name in ("rope_interleave", "rope_interleaved"):
        given_ = {**V3, "model_type": "new", name: False, "max_position_embeddings": 8}
        rotation = AttentionConfig.from_hf(given_).rotation
        assert rotation is not None and not rotation.interleaved
    # In place of what its model type would say.
    unscaled = {"mla_scale_q_lora": False, "mla_scale_kv_lora": False}
    config = AttentionConfig.from_hf({**CONFIGS["longcat_flash"][0], **unscaled})
    assert (config.q_lora_scale, config.kv_lora_scale) == (1, 1)
    for kind, name in (("deepseek_yarn", "yarn"), ("su", "longrope")):
        factors = {"short_factor": [1.0 + i for i in range(32)], "long_factor": [2.0] * 32}
        one, other = (
            AttentionConfig.from_hf(
                {**V3, "max_position_embeddings": 9999, "rope_scaling": {**yarn(40), **factors, "type": each}}
            )
            for each in (kind, name)
        )
        assert one == other


# ---- The layer, exactly ----------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 24}
NO_ROPE = {
    **V3,
    **SIZES,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 0,
    "v_head_dim": 12,
    "max_position_embeddings": 512,
}
GATED = {**K3, **SIZES, "qk_nope_head_dim": 20, "qk_rope_head_dim": 16, "v_head_dim": 12, "model_max_length": 512}
EXACT = [*MODELS, "no rotary elements", "Kimi-K3"]


@functools.cache
def config_of(name: str) -> AttentionConfig:
    """Give a model's small config."""
    if name == "no rotary elements":
        return AttentionConfig.from_hf(NO_ROPE)
    if name == "Kimi-K3":
        return AttentionConfig.from_hf(GATED)
    pytest.importorskip("transformers", reason="transformers has the configurations")
    return AttentionConfig.from_hf(MODELS[name].config(**SIZES))


def exact_layer(config: AttentionConfig, ranks: int = 1, **manifest: Any) -> MLAAttention:
    """Make a layer that works in float64, on kernels that do."""
    layer = MLAAttention(config, ExactKernels(manifest_for(config, ranks=ranks, **manifest)))
    layer.tables = config.position_tables(dtype=torch.float64)
    layer.dtype = torch.float64
    return layer.double()


@pytest.mark.parametrize("name", EXACT)
def test_the_layer_is_exact(name: str) -> None:
    config = config_of(name)
    layer = exact_layer(config)
    weights = weights_of(layer, seed=1)
    layer.load_state_dict(weights)
    steps = Steps(layer, weights, requests=4)
    for lens in ([70, 3, 1, 5], [1, 9, 2, 1], [1, 1, 1, 1], [3, 4, 1, 2], [1, 70, 2, 12]):
        got, want = steps.step(lens, prefill_absorption_threshold=4)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    for i, latents in enumerate(steps.latents):
        torch.testing.assert_close(steps.cached(i), latents, rtol=0, atol=1e-13)


@settings(max_examples=40)
@given(
    lens=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=6), min_size=1, max_size=3),
    threshold=st.sampled_from([256, 0, 1, 2, 5, 8]),
    order=st.randoms(use_true_random=False),
)
@example(lens=[[1, 1, 5, 5, 1]], threshold=3, order=None)
def test_any_batch_is_exact(lens: list[list[int]], threshold: int, order: Any) -> None:
    layer = exact_layer(config_of("Kimi-K3"))
    weights = weights_of(layer, seed=2)
    layer.load_state_dict(weights)
    steps = Steps(layer, weights, requests=6)
    for each in lens:
        requests = list(range(6))
        if order is not None:
            order.shuffle(requests)
        got, want = steps.step(each, requests[: len(each)], prefill_absorption_threshold=threshold)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_a_spec_without_prefill_attends_in_the_latent_space() -> None:
    config = config_of("Kimi-K3")
    kernels = {k: v for k, v in manifest_for(config).kernels.items() if k != "prefill"}
    layer = exact_layer(config, kernels=kernels, prefill_absorption_threshold=1)
    weights = weights_of(layer, seed=3)
    layer.load_state_dict(weights)
    steps = Steps(layer, weights, requests=2)
    got, want = steps.step([30, 1])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("threshold", [0, 4])
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_quantised_cache(dtype: str, threshold: int) -> None:
    """Prompts and their continuations: what the format loses, and nothing else."""
    config, form = AttentionConfig.from_hf({**GATED, "kv_lora_rank": 128}), FORMATS[dtype]
    cache = CacheFormat(dtype, 64, form.row_bytes(128, 16), quantised=True, tensor_scale=form.layout.tensor_scale)
    layer = exact_layer(config, cache=cache, prefill_absorption_threshold=threshold)
    weights = weights_of(layer, seed=5)
    layer.load_state_dict(weights)
    steps = Steps(layer, weights, requests=3)
    for lens in ([70, 3, 1], [1, 9, 2], [1, 1, 70]):
        got, want = steps.step(lens)
        assert 1e-4 < error(got, want) < (0.15 if dtype == "nvfp4" else 0.05)


@pytest.mark.parametrize("name", ["biases, half-split", "Kimi-K3", "Ling-3", "DeepSeek-V2-Lite"])
def test_ranks_add_up(name: str) -> None:
    config = config_of(name)
    whole = exact_layer(config)
    weights = weights_of(whole, seed=4)
    whole.load_state_dict(weights)
    want, _ = Steps(whole, weights, requests=3).step([20, 1, 2], prefill_absorption_threshold=2)
    total = torch.zeros_like(want)
    for rank in range(2):
        layer = exact_layer(config, ranks=2)
        layer.load_state_dict(layer.shard(weights, rank))
        part, _ = Steps(layer, weights, requests=3).step([20, 1, 2], prefill_absorption_threshold=2)
        total += part
    torch.testing.assert_close(total, want, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="rank is 2; it must be from 0 to 1"):
        layer.shard(weights, 2)


def test_state_of_transformers_layers_is_taken() -> None:
    pytest.importorskip("transformers", reason="transformers is what is compared with")
    for model in MODELS.values():
        config = model.config(**SIZES)
        layer = exact_layer(AttentionConfig.from_hf(config))
        layer.load_state_dict(model.layer(config).state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_real_sizes_are_transformers(name: str) -> None:
    """At the sizes that transformers has as defaults, those of the published models."""
    pytest.importorskip("transformers", reason="transformers is what is compared with")
    model = MODELS[name]
    theirs_config = model.config_class()()
    config = AttentionConfig.from_hf(theirs_config)
    with torch.device("meta"):
        theirs = model.layer_class()(theirs_config, layer_idx=0)
    assert math.isclose(config.softmax_scale, theirs.scaling, rel_tol=1e-12)
    norms = [each for each in theirs.modules() if hasattr(each, "variance_epsilon")]
    assert {each.variance_epsilon for each in norms} == {config.norm_eps}
    layer = MLAAttention(config, ExactKernels(manifest_for(config)), config.position_tables(8, "meta"), device="meta")
    shapes, wanted = ({key: each.shape for key, each in x.state_dict().items()} for x in (layer, theirs))
    assert shapes == wanted


# ---- A step's requests -----------------------------------------------------------------------------------------------


def kernels(threshold: int = 256) -> ExactKernels:
    return ExactKernels(manifest_for(config_of("Kimi-K3"), prefill_absorption_threshold=threshold))


def table_of(requests: int, width: int = 4) -> torch.Tensor:
    return torch.arange(requests * width, dtype=torch.int32).view(requests, width)


def test_requests_are_sorted() -> None:
    batch = AttentionBatch.make(kernels(8), [1, 1, 3, 4, 9, 2, 1], [70, 0, 1, 2, 3, 4, 5], table_of(7))
    assert batch.total_tokens == 21 and batch.max_seqlen == 71
    assert [(group.requests, group.s_q) for group in batch.decode] == [(3, 1), (1, 2), (2, 4)]
    one, two, four = batch.decode
    # Not in a row: the last request decodes, too.
    assert isinstance(one.tokens, torch.Tensor) and one.tokens.tolist() == [0, 1, 20] and one.kept is None
    assert one.cache_seqlens.tolist() == [71, 1, 6] and one.block_table.tolist() == table_of(7)[[0, 1, 6]].tolist()
    assert two.tokens == slice(18, 20) and two.written == slice(18, 20) and two.kept is None
    # 3 tokens among those with 4: the first query is padding.
    assert isinstance(four.tokens, torch.Tensor) and four.tokens.tolist() == [2, 2, 3, 4, 5, 6, 7, 8]
    assert four.kept is not None and four.kept.tolist() == [1, 2, 3, 4, 5, 6, 7] and four.written == slice(2, 9)
    assert four.cache_seqlens.tolist() == [4, 6] and four.cache_seqlens.dtype == torch.int32
    assert four.block_table.data_ptr() == 0 or four.block_table.tolist() == table_of(7)[2:4].tolist()
    prompt = batch.prefill
    assert isinstance(prompt, PrefillGroup) and prompt.tokens == slice(9, 18) and prompt.total_tokens == 9
    assert prompt.cu_seqlens_q.tolist() == [0, 9] and prompt.context_lens.tolist() == [3]
    assert (prompt.max_context, prompt.total_context) == (3, 3)
    assert batch.positions.tolist() == [70, 0, 1, 2, 3, 2, 3, 4, 5, *range(3, 12), 4, 5, 5]
    assert batch.slot_mapping.dtype == batch.positions.dtype == torch.int64
    page = 64
    assert batch.slot_mapping.tolist()[:3] == [1 * page + 6, 4 * page, 8 * page + 1]


def test_requests_that_decode_take_no_copy() -> None:
    table = table_of(4)
    batch = AttentionBatch.make(kernels(), [2, 2, 2, 2], [3, 0, 9, 64], table)
    (group,) = batch.decode
    assert group.tokens == group.written == slice(0, 8) and group.kept is None and batch.prefill is None
    assert group.block_table.data_ptr() == table.data_ptr()


def test_padding_is_at_most_half() -> None:
    for longest in range(1, 40):
        lens = list(range(1, longest + 1))
        batch = AttentionBatch.make(kernels(), lens, [0] * longest, table_of(longest, 1))
        queries = sum(group.requests * group.s_q for group in batch.decode)
        assert sum(lens) <= queries < 2 * sum(lens) and len(batch.decode) == (longest - 1).bit_length() + 1


def test_slots_may_be_given() -> None:
    slots = torch.tensor([7, -1, 9])
    batch = AttentionBatch.make(kernels(), [1, 2], [0, 0], table_of(2), slot_mapping=slots)
    assert batch.slot_mapping is slots


@pytest.mark.parametrize("s_q", [1, 3])
def test_a_batch_takes_over_another(s_q: int) -> None:
    config = config_of("Mistral Small 4")
    layer = exact_layer(config)
    weights = weights_of(layer, seed=5)
    layer.load_state_dict(weights)
    steps = Steps(layer, weights, requests=4)
    steps.step([66, 3, 1, 8])
    # What a graph would have captured: of other requests, lengths and tables, and padded.
    captured = AttentionBatch.make(layer.mla, [s_q], [0], torch.zeros(4, 4, dtype=torch.int32), pad_to=4)
    tensors = [captured.positions, captured.slot_mapping, captured.decode[0].block_table]
    for requests in ([0, 1, 2, 3], [2, 0], [3]):
        contexts = [steps.contexts[i] for i in requests]
        table = torch.full((4, 4), NOWHERE, dtype=torch.int32)
        table[: len(requests)] = steps.table[requests]
        new = AttentionBatch.make(layer.mla, [s_q] * len(requests), contexts, table, pad_to=4)
        assert new.slot_mapping.tolist().count(-1) == s_q * (4 - len(requests))
        captured.copy_(new)
        assert tensors[0] is captured.positions and tensors[2] is captured.decode[0].block_table
        before = steps.cache.clone()
        hidden = torch.randn(4 * s_q, config.hidden_size, generator=steps.generator, dtype=torch.float64)
        got = layer(hidden, steps.cache, captured)
        for k, i in enumerate(requests):
            rows = slice(k * s_q, (k + 1) * s_q)
            want, steps.latents[i] = steps.reference(hidden[rows], steps.latents[i])
            steps.contexts[i] += s_q
            torch.testing.assert_close(got[rows], want, rtol=0, atol=1e-12)
        # Padding is 0 before o_proj, and writes nothing.
        assert bool((got[len(requests) * s_q :] == 0).all())
        changed = (before != steps.cache) & ~(before.isnan() & steps.cache.isnan())
        assert int(changed.any(-1).sum()) == s_q * len(requests)


def test_batches_that_differ_are_not_taken_over() -> None:
    mla = kernels(2)
    mine = AttentionBatch.make(mla, [1, 1], [0, 0], table_of(2))
    with pytest.raises(ValueError, match=r"3 tokens in 1 groups: .*, this one is 2 tokens"):
        mine.copy_(AttentionBatch.make(mla, [1, 1, 1], [0, 0, 0], table_of(3)))
    with pytest.raises(ValueError, match="tables of 5 blocks"):
        mine.copy_(AttentionBatch.make(mla, [1, 1], [0, 0], table_of(2, 5)))
    with pytest.raises(ValueError, match=r"this one is 2 tokens in 1 groups: 2 x 1 queries"):
        mine.copy_(AttentionBatch.make(mla, [1, 2], [0, 0], table_of(2)))
    with pytest.raises(ValueError, match="has prompts"):
        mine.copy_(AttentionBatch.make(mla, [2, 3], [0, 0], table_of(2)))


WRONG_BATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "lengths that disagree": ({"context_lens": [0]}, "context_lens has 1 entries, query_lens has 2"),
    "no requests": ({"query_lens": [], "context_lens": []}, "query_lens is empty"),
    "no tokens": ({"query_lens": [1, 0]}, r"query_lens\[1\] is 0; it must be 1 or more"),
    "half a token": ({"query_lens": [1, 2.5]}, r"query_lens\[1\] is 2.5; it must be an integer"),
    "lengths elsewhere": ({"query_lens": torch.ones(2, device="meta")}, "query_lens is on meta; it must be on the CPU"),
    "a row for each length": ({"context_lens": torch.zeros(2, 1).int()}, r"context_lens has shape \(2, 1\)"),
    "fewer than none": ({"context_lens": [-1, 0]}, r"context_lens\[0\] is -1; it must be 0 or more"),
    "a long table": ({"block_table": torch.zeros(2, 4).long()}, "block_table has dtype torch.int64"),
    "a flat table": ({"block_table": torch.zeros(2).int()}, "block_table has shape"),
    "too few rows": ({"block_table": table_of(1)}, r"block_table has shape \(1, 4\); it must have 2 rows"),
    "too few pages": ({"context_lens": [0, 256]}, "pages for 256 tokens a request; request 1 has 256 cached and 1 new"),
    "a negative threshold": ({"prefill_absorption_threshold": -1}, "prefill_absorption_threshold is -1"),
    "slots of another length": ({"slot_mapping": torch.zeros(3).long()}, r"slot_mapping has shape \(3\)"),
    "short slots": ({"slot_mapping": torch.zeros(2).int()}, "slot_mapping has dtype torch.int32"),
    "slots elsewhere": ({"slot_mapping": torch.zeros(2, device="meta").long()}, "slot_mapping is on meta"),
    "padding to fewer": ({"pad_to": 1}, "pad_to is 1, query_lens has 2"),
    "padding past the table": ({"pad_to": 3}, r"block_table has shape \(2, 4\); it must have 3 rows, as pad_to says"),
    "padding of unequal ones": (
        {"query_lens": [1, 2], "pad_to": 2},
        "query_lens has 1 to 2 tokens a request; with pad_to all must have equally many",
    ),
    "padding of prompts": ({"query_lens": [3, 3], "pad_to": 2, "prefill_absorption_threshold": 2}, "at most .* = 2"),
}


def test_lengths_of_any_kind() -> None:
    """Those of NumPy, say, whose integers lack methods of Python's."""
    numpy = pytest.importorskip("numpy", reason="NumPy has integers of its own")
    lens, contexts = [3, 70, 1], [5, 0, 64]
    want = AttentionBatch.make(kernels(), lens, contexts, table_of(3))
    for make in (torch.tensor, numpy.array, tuple, iter):
        got = AttentionBatch.make(kernels(), make(lens), make(contexts), table_of(3))
        assert got.total_tokens == want.total_tokens and torch.equal(got.slot_mapping, want.slot_mapping)
        assert [group.s_q for group in got.decode] == [group.s_q for group in want.decode]


@pytest.mark.parametrize("name", WRONG_BATCHES)
def test_wrong_batches_are_refused(name: str) -> None:
    fields, message = WRONG_BATCHES[name]
    given_ = {"query_lens": [1, 1], "context_lens": [0, 0], "block_table": table_of(2), **fields}
    with pytest.raises(ValueError, match=message):
        AttentionBatch.make(kernels(), **given_)


def test_wrong_calls_are_refused() -> None:
    config = config_of("DeepSeek-V2-Lite")
    layer = exact_layer(config)
    cache = torch.full((9, 64, layer.mla.manifest.d_qk), math.nan).double()
    batch = AttentionBatch.make(layer.mla, [1, 1], [0, 0], table_of(2))
    with pytest.raises(ValueError, match=r"hidden_states has shape \(3, 32\); it must be \(2, 32\)"):
        layer(torch.zeros(3, 32).double(), cache, batch)
    with pytest.raises(ValueError, match=r"hidden_states has dtype torch\.float32"):
        layer(torch.zeros(2, 32), cache, batch)
    layer.tables = config.position_tables(7)
    batch = AttentionBatch.make(layer.mla, [1, 1], [0, 7], table_of(2))
    with pytest.raises(ValueError, match="a request has 8 tokens, the tables have 7 positions"):
        layer(torch.zeros(2, 32).double(), cache, batch)
    assert bool(cache.isnan().all())


def test_kernels_of_another_model_are_refused() -> None:
    given_, _ = CONFIGS["deepseek_v3"]
    mla = ExactKernels(read_manifest(ROOT / "generated" / "deepseek_v3"))
    for name, value, message in (
        ("num_attention_heads", 64, "num_attention_heads of the config is 64, of the spec deepseek_v3 128"),
        ("v_head_dim", 256, "v_head_dim of the config is 256"),
        ("q_lora_rank", None, "q_lora_rank of the config is None, of the spec deepseek_v3 1536"),
        ("rope_scaling", yarn(32), "softmax scale of the config is 0.130861, of the spec deepseek_v3 0.135234"),
    ):
        with pytest.raises(ValueError, match=message):
            MLAAttention.from_config({**given_, name: value}, mla, max_position=8, device="meta")
    config = AttentionConfig.from_hf(given_)
    for tables, message in (
        (PositionTables(None, None), "tables.cos_sin is None, and the model has one"),
        (PositionTables(torch.zeros(8, 64), torch.zeros(8)), "tables.query_scale is given, and the model has no use"),
    ):
        with pytest.raises(ValueError, match=message):
            MLAAttention(config, mla, tables, device="meta")
    tables = config.position_tables(8)
    assert MLAAttention.from_config(given_, mla, tables=tables, device="meta").tables is tables
    with pytest.raises(ValueError, match="max_position is 8 and tables are given"):
        MLAAttention.from_config(given_, mla, tables=tables, max_position=8, device="meta")


# ---- The layer on the kernels, under the simulator -------------------------------------------------------------------

# A bf16 rounding moves a number by 2^-9 of it at most, by 0.0017 in the mean square. Before the softmax there are five
# (q_proj, the rotation, absorption; the latent's projection, its norm), which move logits of 2 in the mean square by
# sqrt(5) x 2 x 0.0017 = 0.0076; behind it five (probabilities, the latent that comes out, its values, the gate, and
# o_proj): 0.0038. Together 0.0085; of a single request it may be twice that.
TOLERANCE = 0.017
SIMULATED = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
}


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compile what the simulator runs side by side."""
    manifest = read_manifest(ROOT / "generated" / "deepseek_v2_lite")
    kernels = [manifest.decode, manifest.decode_for(1), *manifest.kernels.values()]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda kernel: compile_library(kernel.source, kernel.entry), kernels))


def simulated(config: AttentionConfig) -> MLA:
    return MLA(manifest_for(config), Simulator())


@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite", "biases, half-split", "LongCat-Flash", "Ling-3"])
@pytest.mark.usefixtures("compiled")
def test_the_layer_on_simulated_kernels(name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is what is compared with")
    model = MODELS[name]
    theirs_config = model.config(**SIMULATED)
    config = AttentionConfig.from_hf(theirs_config)
    layer = MLAAttention(config, simulated(config))
    layer.load_state_dict(model.layer(theirs_config).state_dict())
    weights = layer.state_dict()
    steps = Steps(layer, weights, requests=3)
    # One prompt by transformers itself, too, with the weights rounded as ours are.
    rounded = model.layer(theirs_config)
    rounded.load_state_dict(weights)
    theirs = Theirs(model, theirs_config, rounded, torch.float64)
    other = other_models(config)
    worst = dict.fromkeys(other, 0.0)
    for lens in ([66, 3, 1], [1, 7, 2], [1, 3, 3]):
        state = steps.generator.get_state(), list(steps.latents)
        got, want = steps.step(lens, prefill_absorption_threshold=3)
        for mine, right in zip(got.split(lens), want.split(lens), strict=True):
            assert error(mine, right) < TOLERANCE
        steps.generator.set_state(state[0])
        hidden = torch.randn(sum(lens), 64, generator=steps.generator, dtype=torch.float64).bfloat16()
        torch.testing.assert_close(theirs(hidden[: lens[0]].double()), want[: lens[0]], rtol=0, atol=1e-11)
        for key, changed in other.items():
            out, _ = ReferenceAttention(changed, weights)(hidden[: lens[0]], state[1][0])
            worst[key] = max(worst[key], error(got[: lens[0]], out))
    for i, latents in enumerate(steps.latents):
        # Two roundings.
        assert latents is not None and error(steps.cached(i), latents) < 0.003
    # What a layer of a slightly different model gives is told apart.
    assert all(each > 2 * TOLERANCE for each in worst.values()), worst


def check_quantised(dtype: str, backend: Cuda | Simulator, steps: Iterable[list[int]], pages: int = 3) -> None:
    """Compare with exact kernels that quantise likewise: what is left are roundings to bf16, and codes that they move.

    A number that is off by a part d is given another code, a part s away, with a probability of d / s: sqrt(d s) in the
    mean square, of e4m3 with its s of 1/16 as much as the roundings, of e2m1 with 1/3 twice as much.
    """
    sizes = {name: SIMULATED[name] for name in ("hidden_size", "num_attention_heads", *DEEPSEEK)}
    config = AttentionConfig.from_hf({**V3, **sizes, "q_lora_rank": None, "max_position_embeddings": 2048})
    manifest = manifest_for(config, f"deepseek_v3_{dtype}")
    layer = MLAAttention(config, MLA(manifest, backend))
    weights = {name: each.bfloat16() for name, each in weights_of(layer, seed=6).items()}
    exact, unquantised = exact_layer(config, cache=manifest.cache), exact_layer(config)
    all_steps = []
    for each in (layer, exact, unquantised):
        each.load_state_dict(weights)
        all_steps.append(Steps(each, each.state_dict(), requests=3, pages=pages))
    tolerance = (4 if dtype == "nvfp4" else 2) * TOLERANCE
    for lens in steps:
        got, want, other = (each.step(lens, prefill_absorption_threshold=3)[0].cpu() for each in all_steps)
        assert error(got, want) < tolerance
        # What the format loses is not lost twice, nor is it less.
        assert 0.7 < error(got, other) / error(want, other) < 1.4


@pytest.mark.parametrize("dtype", ["fp8_ds_mla", "nvfp4"])
def test_the_layer_on_simulated_kernels_of_a_quantised_cache(dtype: str) -> None:
    check_quantised(dtype, Simulator(), ([66, 3, 1], [1, 7, 2], [1, 1, 5]))


def other_models(config: AttentionConfig) -> dict[str, AttentionConfig]:
    """Give configs that differ in one thing each."""
    rotation = config.rotation
    assert rotation is not None
    others = {
        "pairs": replace(config, rotation=replace(rotation, interleaved=not rotation.interleaved)),
        "no rotation": replace(config, rotation=None),
        "softmax scale": replace(config, softmax_scale=config.softmax_scale * 1.15),
    }
    if config.q_lora_scale != 1:
        others["latents"] = replace(config, kv_lora_scale=1.0)
        others["queries"] = replace(config, q_lora_scale=1.0)
    if config.output_gate is not None:
        others["gate"] = replace(config, output_gate=None)
    return others


def example_of_readme() -> str:
    """Give the code of README.md that runs a layer."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (example_,) = [block for block in blocks if "MLAAttention" in block]
    return str(example_)


@pytest.mark.usefixtures("compiled")
def test_the_example_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names: dict[str, Any] = {}
    exec(example_of_readme(), names)
    check_example(names)


@pytest.mark.usefixtures("compiled")
def test_the_layer_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that decode, of prompts, and of both at once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names: dict[str, Any] = {}
    exec(example_of_readme(), names)
    layer, mla, table = names["layer"], names["mla"], names["table"]
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    generator = torch.Generator().manual_seed(4)
    cache = torch.randn(names["kv_cache"].shape, generator=generator).bfloat16()
    with torch.no_grad():
        for lens, cached in (([1, 1], [5, 3]), ([3, 5], [0, 70]), ([1, 4], [70, 2])):
            hidden = torch.randn(sum(lens), 2048, generator=generator).bfloat16()
            batch = AttentionBatch.make(mla, lens, cached, table, prefill_absorption_threshold=2)
            of_layer, of_graph = cache.clone(), cache.clone()
            want = layer(hidden, of_layer, batch)
            assert torch.equal(compiled(hidden, of_graph, batch), want) and want.isfinite().all()
            assert torch.equal(of_graph, of_layer) and not torch.equal(of_graph, cache)


def check_example(names: dict[str, Any]) -> None:
    """Compare what the example gives with the reference."""
    layer: MLAAttention = names["layer"]
    reference = ReferenceAttention(layer.config, layer.state_dict())
    for prompt, token, first, second in zip(
        names["prompts"].split([5, 3]),
        names["tokens"].split(1),
        names["first"].split([5, 3]),
        names["second"].split(1),
        strict=True,
    ):
        want, latents = reference(prompt)
        assert error(first, want) < TOLERANCE
        want, _ = reference(token, latents)
        assert error(second, want) < TOLERANCE
