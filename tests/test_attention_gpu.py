"""The attention layer on a Hopper GPU at the sizes of DeepSeek-V2-Lite: against float64, transformers, and in a graph.

Run with `pytest -m gpu`.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import mlaforge
from attention_models import MODELS, YARN, Steps, Theirs, error, weights_of
from mlaforge.attention import MLAAttention
from mlaforge.attention_batch import AttentionBatch
from mlaforge.attention_config import AttentionConfig
from mlaforge.launch import Cuda
from test_attention import TOLERANCE, check_example, check_quantised, example_of_readme

pytestmark = pytest.mark.gpu

LITE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_parameters": {
        **YARN,
        "original_max_position_embeddings": 4096,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}


@functools.cache
def lite() -> MLAAttention:
    config = AttentionConfig.from_hf({"model_type": "deepseek_v2", **LITE})
    layer = MLAAttention(config, mlaforge.load("deepseek_v2_lite"), config.position_tables(8192, "cuda"))
    layer.load_state_dict(weights_of(layer, seed=1))
    return layer


def steps_of(requests: int, pages: int = 64) -> Steps:
    layer = lite()
    return Steps(layer, layer.state_dict(), requests, pages=pages)


def accept(got: torch.Tensor, want: torch.Tensor, lens: list[int]) -> None:
    for mine, right in zip(got.split(lens), want.split(lens), strict=True):
        assert error(mine, right) < TOLERANCE


def test_mixed_batches() -> None:
    steps = steps_of(6)
    for lens in ([700, 300, 1, 5, 257, 256], [1, 1, 1, 1, 1, 1], [1, 400, 3, 2, 1, 700], [4, 1, 300, 3, 17, 1]):
        accept(*steps.step(lens), lens)
    for _ in range(20):
        accept(*steps.step([1] * 6), [1] * 6)
    for i, latents in enumerate(steps.latents):
        assert latents is not None and error(steps.cached(i), latents) < 0.003


def test_in_one_graph() -> None:
    """By torch's own compiler, against the layer as it is."""
    layer = lite()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    table = torch.arange(8, dtype=torch.int32, device="cuda").view(2, 4)
    cache = torch.randn(8, 64, 576, device="cuda").bfloat16()
    with torch.no_grad():
        for lens, cached in (([1, 1], [5, 200]), ([30, 50], [0, 70]), ([1, 40], [70, 2])):
            hidden = torch.randn(sum(lens), 2048, device="cuda").bfloat16()
            batch = AttentionBatch.make(layer.mla, lens, cached, table, prefill_absorption_threshold=2)
            want = layer(hidden, cache.clone(), batch)
            accept(compiled(hidden, cache.clone(), batch), want, lens)


def test_a_long_context_in_rounds() -> None:
    steps = steps_of(3)
    for lens in ([3000, 2500, 300], [300, 1, 600]):
        accept(*steps.step(lens, workspace_tokens=512), lens)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_ds_mla", "nvfp4"])
def test_quantised_caches(dtype: str) -> None:
    check_quantised(dtype, Cuda(), ([700, 3, 1], [1, 300, 2], *[[1, 1, 1]] * 5, [2, 1, 500]), pages=16)


def test_transformers_prompt_and_decode() -> None:
    """Our layer is no farther from the exact result than transformers' own in bf16."""
    pytest.importorskip("transformers", minversion="5.24", reason="transformers is what the layer is compared with")
    layer, model = lite(), MODELS["DeepSeek-V2-Lite"]
    config = model.config(**LITE)
    theirs_layer = model.layer(config).cuda()
    theirs_layer.load_state_dict(layer.state_dict())
    steps = steps_of(1)
    theirs = Theirs(model, config, theirs_layer, torch.bfloat16)
    for n in (900, *[1] * 30):
        state = steps.generator.get_state()
        got, want = steps.step([n])
        steps.generator.set_state(state)
        hidden = torch.randn(n, 2048, generator=steps.generator, dtype=torch.float64).to("cuda", layer.dtype)
        assert error(got, want) < max(1.5 * error(theirs(hidden), want), TOLERANCE / 2)


def test_nobody_waits() -> None:
    steps = steps_of(4)
    steps.step([300, 2, 1, 300])
    layer = steps.layer
    hidden = torch.randn(603, 2048, device="cuda").to(layer.dtype)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = AttentionBatch.make(layer.mla, [300, 2, 1, 300], steps.contexts, steps.blocks)
        layer(hidden, steps.cache, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("s_q", [1, 3])
def test_a_graph_is_replayed_with_other_lengths(s_q: int) -> None:
    steps = steps_of(8)
    lens = [66, 3, 900, 8, 300, 1, 64, 65]
    accept(*steps.step(lens), lens)
    layer = steps.layer
    table = torch.zeros(8, steps.blocks.shape[1], dtype=torch.int32, device="cuda")
    captured = AttentionBatch.make(layer.mla, [s_q], [0], table, pad_to=8)
    hidden = torch.zeros(8 * s_q, 2048, dtype=layer.dtype, device="cuda")
    scratch = torch.zeros_like(steps.cache)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer(hidden, scratch, captured)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Warm on another cache: only the replays write to the one that counts.
    with torch.cuda.graph(graph):
        out = layer(hidden, steps.cache, captured)
    for requests in (list(range(8)), [5, 2], [7, 6, 5, 4, 3], [0]):
        contexts = [steps.contexts[i] for i in requests]
        rows = torch.full_like(table, 2147480000)
        rows[: len(requests)] = steps.blocks[requests]
        captured.copy_(AttentionBatch.make(layer.mla, [s_q] * len(requests), contexts, rows, pad_to=8))
        hidden.copy_(torch.randn(hidden.shape, generator=steps.generator))
        graph.replay()
        for k, i in enumerate(requests):
            part = slice(k * s_q, (k + 1) * s_q)
            want, steps.latents[i] = steps.reference(hidden[part], steps.latents[i])
            steps.contexts[i] += s_q
            assert error(out[part], want) < TOLERANCE
        assert bool((out[len(requests) * s_q :] == 0).all())


def test_the_example_of_the_readme() -> None:
    names: dict[str, Any] = {}
    exec(example_of_readme(), names)
    assert names["layer"].device.type == "cuda"
    check_example(names)
