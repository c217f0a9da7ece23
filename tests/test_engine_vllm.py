"""The backend inside of vLLM itself, on its CPU platform and under the simulator. Skipped where vLLM is not installed.

vLLM's own registry, selection, layer, metadata builder, merges and rounds of a context; of ours, everything. The tests
of the same classes without vLLM are in test_engines.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)
os.environ["VLLM_TARGET_DEVICE"] = "cpu"

from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig, set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from mlaforge.engines import register_vllm
from mlaforge.reference import decode_reference
from mlaforge.verify import IMPOSSIBLE_PAGE, check_output

HEADS, RANK, NOPE, ROPE, V = 4, 256, 64, 32, 64
SCALE, PAGE = 0.11, 16


# ---- What vLLM asks --------------------------------------------------------------------------------------------------


def test_the_entry_point_registers_and_loads_nothing() -> None:
    """In a process of its own, as vLLM's are; without the package installed, by calling what the entry point names."""
    found = [each.value for each in entry_points(group="vllm.general_plugins") if each.name == "mlaforge"]
    assert found in ([], ["mlaforge.engines:register_vllm"])
    load = "vllm.plugins.load_general_plugins()" if found else "mlaforge.engines.register_vllm()"
    code = (
        "import sys, vllm.plugins, mlaforge.engines\n"
        f"{load}\n"
        "assert 'mlaforge.engines.vllm' not in sys.modules\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum\n"
        "print(AttentionBackendEnum.CUSTOM.get_class().get_name())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment())
    assert done.stdout.splitlines()[-1:] == ["CUSTOM"], done.stderr


def test_the_name_reaches_processes_that_have_loaded_no_plugin() -> None:
    """As vLLM's configuration does when its workers are spawned."""
    register_vllm()
    text = pickle.dumps(AttentionBackendEnum.CUSTOM)
    code = f"import pickle; print(pickle.loads({text!r}).name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment())
    assert done.stdout.splitlines()[-1:] == ["CUSTOM"], done.stderr


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_registry() -> None:
    register_vllm()
    register_vllm()
    assert AttentionBackendEnum.CUSTOM.get_class() is backend()
    assert MLAPrefillBackendEnum.CUSTOM.get_class() is module().MLAForgePrefillBackend
    assert backend().get_builder_cls().get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH


def module() -> Any:
    from mlaforge.engines import vllm

    return vllm


def backend() -> Any:
    return module().MLAForgeBackend


ASKED = {
    "head_size": 576,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": None,
    "use_mla": True,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(9, 0),
    "attn_type": "decoder",
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *({"head_size": size} for size in (288, 320, 512)),
        {"dtype": torch.float16, "kv_cache_dtype": "float16"},
        {"kv_cache_dtype": "bfloat16"},
        *({"block_size": size} for size in (1, 16, 32, 64, 128, 48, 256)),
        {"use_dcp": True},
    ],
    ids=str,
)
def test_accepted(changes: dict[str, Any]) -> None:
    assert backend().validate_configuration(**{**ASKED, **changes}) == []


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"head_size": 640}, "is 640; it must be one of 288, 320, 512, 576"),
        ({"dtype": torch.float32}, r"dtype is torch.float32; it must be torch.bfloat16 or torch.float16"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is fp8; quantised caches are not served"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype is float16, dtype is torch.bfloat16; they must agree"),
        ({"device_capability": DeviceCapability(10, 0)}, "capability is 10.0; the kernels need 9.0"),
        ({"device_capability": DeviceCapability(8, 0)}, "capability is 8.0; the kernels need 9.0"),
        ({"use_sparse": True}, "sparse attention is not served"),
        ({"has_sink": True}, "attention sinks, which are not served"),
        ({"use_mla": False}, "non-MLA not supported"),
        ({"use_adaptive_verification": True}, "query lens mismatch not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"has_sliding_window": True}, "sliding window not supported"),
    ],
    ids=str,
)
def test_refused(changes: dict[str, Any], reason: str) -> None:
    reasons = backend().validate_configuration(**{**ASKED, **changes})
    assert any(reason in each for each in reasons), reasons


def test_pages() -> None:
    """vLLM cuts blocks into pages that the kernels have; unasked, it takes 64."""
    from vllm.v1.worker.utils import select_common_block_size

    pages = {size: select_common_block_size(size, [backend()]) for size in (1, 16, 48, 64, 96, 128, 256, 24)}
    assert pages == {1: 1, 16: 16, 48: 16, 64: 64, 96: 32, 128: 128, 256: 128, 24: 1}
    assert [backend().get_preferred_block_size(size) for size in (16, 64, 128)] == [64, 64, 128]


def test_prefill_refused() -> None:
    from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
    from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig

    def reasons(nope: int, rope: int, v: int, capability: DeviceCapability | None) -> list[str]:
        dimensions = MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=v)
        config = MLAPrefillSelectorConfig(torch.bfloat16, dimensions)
        return list(module().MLAForgePrefillBackend.validate_configuration(capability, config))

    hopper = DeviceCapability(9, 0)
    for served in ((128, 64, 128), (192, 64, 256), (256, 0, 256), (64, 64, 128), (64, 32, 64)):
        assert reasons(*served, hopper) == []
    assert any("needs one of 64, 128, 192, 256; got 96" in each for each in reasons(128, 64, 96, hopper))
    assert any("at most 256; got 320" in each for each in reasons(256, 64, 128, hopper))
    assert reasons(128, 64, 128, DeviceCapability(10, 0)) and reasons(128, 64, 128, None)


# ---- A layer of vLLM's -----------------------------------------------------------------------------------------------


@dataclass
class Layer:
    """vLLM's MLAAttention around the backend, and what else a batch takes."""

    config: VllmConfig
    layer: Any
    builder: Any


CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": RANK,
    "q_lora_rank": None,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": V,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
}


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Layer]:
    from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            tokenizer=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=512,
        ),
        cache_config=CacheConfig(block_size=PAGE),
        scheduler_config=SchedulerConfig(
            max_model_len=512, is_encoder_decoder=False, max_num_seqs=8, max_num_batched_tokens=512
        ),
        device_config=DeviceConfig(device="cpu"),
    )
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder / 'store'}", 0, "gloo")
        initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        try:
            kv_b = ColumnParallelLinear(RANK, HEADS * (NOPE + V), bias=False, prefix="kv_b")
            kv_b.weight.data.normal_(0, RANK**-0.5)
            kv_b.cpu_linear = torch.nn.functional.linear  # a model's loader chooses one
            made = MLAAttention(
                num_heads=HEADS,
                scale=SCALE,
                qk_nope_head_dim=NOPE,
                qk_rope_head_dim=ROPE,
                v_head_dim=V,
                q_lora_rank=None,
                kv_lora_rank=RANK,
                kv_b_proj=kv_b,
                cache_config=config.cache_config,
                prefix="layer",
                attn_backend=backend(),
                prefill_backend_cls=module().MLAForgePrefillBackend,
            )
        finally:
            torch.set_default_dtype(torch.float32)
        made.process_weights_after_loading(torch.bfloat16)
        builder = builder_of(config, made)
        # One of vLLM's, sized for long contexts: small, so that there are rounds.
        builder.chunked_prefill_workspace_size = 2 * PAGE
        builder.chunked_prefill_workspace = builder.chunked_prefill_workspace[: 2 * PAGE].fill_(torch.nan)
        yield Layer(config, made, builder)
        destroy_model_parallel()
        torch.distributed.destroy_process_group()


def builder_of(config: VllmConfig, made: Any) -> Any:
    return backend().get_builder_cls()(made.get_kv_cache_spec(config), ["layer"], config, torch.device("cpu"))


@dataclass
class Batch:
    """New tokens after cached ones, in vLLM's words, with NaN and impossible numbers wherever nothing may be read."""

    new: tuple[int, ...]
    cached: tuple[int, ...]
    padding: int = 0
    """Requests without tokens behind the others, as in a graph."""

    def __post_init__(self) -> None:
        requests = len(self.new) + self.padding
        lengths = [n + c for n, c in zip(self.new, self.cached, strict=True)]
        pages = [-(-length // PAGE) for length in lengths]
        order = torch.randperm(sum(pages) + 2)
        self.table = torch.full((requests, max(pages) + 2), IMPOSSIBLE_PAGE, dtype=torch.int32)
        blocks = iter(order.tolist())
        for row, count in enumerate(pages):
            for column in range(count):
                self.table[row, column] = next(blocks)
        self.cache = torch.full((len(order), PAGE, RANK + ROPE), torch.nan, dtype=torch.bfloat16)
        self.latents = [torch.randn(length, RANK + ROPE).bfloat16() for length in lengths]
        slots = []
        for row, (n, c) in enumerate(zip(self.new, self.cached, strict=True)):
            for token in range(n + c):
                block, place = int(self.table[row, token // PAGE]), token % PAGE
                if token < c:
                    self.cache[block, place] = self.latents[row][token]
                else:
                    slots.append(block * PAGE + place)
        self.unused = self.padding * max(self.new)
        self.slots = torch.tensor([*slots, *[-1] * self.unused], dtype=torch.int64)
        self.q = torch.randn(sum(self.new), HEADS, NOPE + ROPE).bfloat16()
        starts = torch.tensor([0, *self.new, *[0] * self.padding]).cumsum(0).int()
        self.common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([*lengths, *[0] * self.padding], dtype=torch.int32),
            num_reqs=requests,
            num_actual_tokens=len(self.slots),
            max_query_len=max(self.new),
            max_seq_len=max(lengths),
            block_table_tensor=self.table,
            slot_mapping=self.slots,
            seq_lens_cpu_upper_bound=torch.tensor([*lengths, *[0] * self.padding], dtype=torch.int32),
        )

    def run(self, of: Layer, builder: Any = None) -> tuple[torch.Tensor, Any]:
        """Do what a forward pass does: metadata, the cache's update, attention. Give it as (tokens, heads, v)."""
        metadata = (builder or of.builder).build(0, self.common)
        new = torch.cat([latent[c:] for latent, c in zip(self.latents, self.cached, strict=True)])
        # Behind the tokens of requests that are padding, two more, which have no slots either.
        more = self.unused + 2
        new = torch.cat([new, torch.full((more, RANK + ROPE), torch.nan).bfloat16()])
        c_kv, k_pe = new[:, :RANK].contiguous(), new[:, RANK:].unsqueeze(1)
        q = torch.cat([self.q, torch.full((more, HEADS, NOPE + ROPE), torch.nan).bfloat16()])
        out = torch.full((len(new), HEADS * V), torch.nan, dtype=torch.bfloat16)
        with set_current_vllm_config(of.config):
            layer = of.layer
            layer.update_kv_cache(c_kv, k_pe, self.cache, self.slots, metadata, "auto", layer._k_scale)
            layer.forward_impl(q, c_kv, k_pe, self.cache, metadata, output=out)
        assert out[-2:].isnan().all() and (out[len(self.q) : -2] == 0).all()
        return out[: len(self.q)].view(-1, HEADS, V), metadata

    def reference(self, of: Layer) -> torch.Tensor:
        """Attend in float64, with keys and values of every token decompressed."""
        weight = of.layer.kv_b_proj.weight.double().view(HEADS, NOPE + V, RANK)
        out = []
        first = 0
        for latent, n in zip(self.latents, self.new, strict=True):
            x = latent.double()
            k_nope, v = (torch.einsum("hdr,tr->htd", w, x[:, :RANK]) for w in weight.split([NOPE, V], dim=1))
            k = torch.cat([k_nope, x[:, RANK:].expand(HEADS, -1, -1)], dim=-1)
            q = self.q[first : first + n].double().transpose(0, 1)
            scores = SCALE * q @ k.transpose(1, 2)
            seen = torch.arange(len(x)) <= torch.arange(len(x) - n, len(x)).unsqueeze(1)
            out.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
            first += n
        return torch.cat(out)


BATCHES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "decode": ({"new": (1, 1, 1), "cached": (69, 2, 16)}, (3, 0)),
    "decode in a padded graph": ({"new": (1, 1), "cached": (31, 0), "padding": 2}, (4, 0)),
    "prefill": ({"new": (21, 5), "cached": (0, 0)}, (0, 2)),
    "prefill after a context of rounds": ({"new": (3, 7, 4), "cached": (70, 0, 9)}, (0, 3)),
    "both": ({"new": (1, 1, 9, 6), "cached": (40, 3, 35, 0)}, (2, 2)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_layer(layer: Layer, name: str) -> None:
    torch.manual_seed(len(name))
    given, (decodes, prefills) = BATCHES[name]
    batch = Batch(**given)
    out, metadata = batch.run(layer)
    assert (metadata.num_decodes, metadata.num_prefills) == (decodes, prefills)
    close(out, batch.reference(layer))


def close(out: torch.Tensor, want: torch.Tensor) -> None:
    """Compare what passed through several roundings to bf16: absorbed queries, partial results, the layer's output."""
    x, y = out.double(), want
    assert x.isfinite().all()
    assert float((x - y).norm() / y.norm()) < 0.01
    torch.testing.assert_close(x, y, rtol=0.03, atol=0.03)


def test_rounds_of_a_context_are_several(layer: Layer) -> None:
    batch = Batch(new=(3, 4), cached=(70, 9))
    metadata = layer.builder.build(0, batch.common)
    assert len(metadata.prefill.chunked_context.chunks) > 2


def test_drafted_tokens_are_verified_by_decode(layer: Layer) -> None:
    """Equally many of each request, and some requests that are padding."""
    layer.config.speculative_config = types.SimpleNamespace(
        num_speculative_tokens=2, parallel_drafting=False, method="mtp", enable_adaptive_verification=False
    )
    try:
        builder = builder_of(layer.config, layer.layer)
    finally:
        layer.config.speculative_config = None
    assert builder.reorder_batch_threshold == 3
    batch = Batch(new=(3, 3), cached=(30, 0), padding=1)
    out, metadata = batch.run(layer, builder)
    assert (metadata.num_decodes, metadata.num_prefills) == (3, 0)
    close(out, batch.reference(layer))
    mixed = Batch(new=(3, 2), cached=(30, 5))
    out, metadata = mixed.run(layer, builder)
    assert (metadata.num_decodes, metadata.num_prefills) == (1, 1)
    close(out, mixed.reference(layer))


def test_graph_capture_takes_decode_alone(layer: Layer) -> None:
    batch = Batch(new=(1, 1), cached=(3, 4))
    metadata = layer.builder.build_for_cudagraph_capture(batch.common)
    assert metadata.decode.block_table.data_ptr() == batch.table.data_ptr()
    assert metadata.decode.seq_lens.data_ptr() == batch.common.seq_lens.data_ptr()
    with pytest.raises(AssertionError):
        layer.builder.build_for_cudagraph_capture(Batch(new=(5, 1), cached=(3, 4)).common)


# ---- The kernels' part, called as vLLM calls it ----------------------------------------------------------------------


def test_decode_by_flashmla_s_criteria_with_lse(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks of decode context parallelism get it: a request may have no token on one of them."""
    torch.manual_seed(5)
    batch = Batch(new=(1, 1, 1), cached=(40, 0, 17))
    batch.common.seq_lens[1] = 0
    metadata = layer.builder.build(0, batch.common)
    for latent, row in zip(batch.latents, batch.table, strict=True):
        for token in range(len(latent)):
            batch.cache[row[token // PAGE], token % PAGE] = latent[token] / 10
    q = (torch.randn(3, HEADS, RANK + ROPE) / 10).bfloat16()
    monkeypatch.setattr(layer.layer.impl, "need_to_return_lse_for_decode", True)
    out, lse = layer.layer.impl.forward_mqa(q.split([RANK, ROPE], dim=-1), batch.cache, metadata, layer.layer)
    assert out.shape == (3, HEADS, RANK) and lse.shape == (3, HEADS) and lse.dtype == torch.float32
    ref_out, ref_lse = decode_reference(
        q.unsqueeze(1), batch.cache, batch.table, batch.common.seq_lens, d_v=RANK, softmax_scale=SCALE
    )
    errors = check_output(out.unsqueeze(1), lse.unsqueeze(2), ref_out, ref_lse)
    assert errors.ok, errors.failures
    assert (out[1] == 0).all() and (lse[1] == torch.inf).all()
    whole, of_whole = layer.layer.impl.forward_mqa(q, batch.cache, metadata, layer.layer)
    assert torch.equal(whole, out) and torch.equal(of_whole, lse)
    monkeypatch.setattr(layer.layer.impl, "need_to_return_lse_for_decode", False)
    assert layer.layer.impl.forward_mqa(q, batch.cache, metadata, layer.layer)[1] is None


def test_vllm_merges_our_parts_of_a_rank(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks' parts by vLLM's own arithmetic of decode context parallelism: what one rank gives for all tokens."""
    from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

    torch.manual_seed(6)
    batch = Batch(new=(1, 1), cached=(47, 20))
    cache = torch.nan_to_num(batch.cache, nan=0.1)
    q = (torch.randn(2, HEADS, RANK + ROPE) / 10).bfloat16()
    monkeypatch.setattr(layer.layer.impl, "need_to_return_lse_for_decode", True)

    def attend(table: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        decode = types.SimpleNamespace(block_table=table, seq_lens=torch.tensor(lengths, dtype=torch.int32))
        metadata = types.SimpleNamespace(decode=decode, num_decodes=2)
        out, lse = layer.layer.impl.forward_mqa(q, cache, metadata, layer.layer)
        return out, lse.T.contiguous()

    whole, whole_lse = attend(batch.table, [48, 21])
    # The first rank has the first page of each request; the second has none of the other's.
    first, first_lse = attend(batch.table, [16, 21])
    second, second_lse = attend(batch.table[:, 1:].contiguous(), [32, 0])
    out, lse = torch.empty_like(whole), torch.empty_like(whole_lse)
    merge_attn_states(out, first, first_lse, second, second_lse, lse)
    torch.testing.assert_close(out, whole, rtol=0.01, atol=0.002)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)


def test_uneven_queries_are_refused(layer: Layer) -> None:
    metadata = types.SimpleNamespace(decode=types.SimpleNamespace(), num_decodes=2)
    q = torch.zeros(3, HEADS, RANK + ROPE).bfloat16()
    with pytest.raises(ValueError, match="q has 3 tokens of 2 requests"):
        layer.layer.impl.forward_mqa(q, torch.zeros(1, PAGE, RANK + ROPE).bfloat16(), metadata, layer.layer)


ARGUMENTS: dict[str, Any] = {
    "num_heads": HEADS,
    "head_size": RANK + ROPE,
    "scale": SCALE,
    "num_kv_heads": 1,
    "alibi_slopes": None,
    "sliding_window": None,
    "kv_cache_dtype": "auto",
    "logits_soft_cap": None,
    "attn_type": "decoder",
    "kv_sharing_target_layer_name": None,
    "q_lora_rank": None,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "qk_head_dim": NOPE + ROPE,
    "v_head_dim": V,
    "kv_b_proj": None,
}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap is 30.0"),
        ({"alibi_slopes": [0.5]}, "alibi_slopes is"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype is fp8_e4m3"),
        ({"attn_type": "encoder"}, "attn_type is encoder"),
        ({"kv_lora_rank": 192}, "no kernel has .*kv_lora_rank=192"),
    ],
    ids=str,
)
def test_layers_that_are_refused(layer: Layer, changes: dict[str, Any], message: str) -> None:
    with set_current_vllm_config(layer.config):
        assert module().MLAForgeImpl(**ARGUMENTS).can_return_lse_for_decode
        with pytest.raises(NotImplementedError, match=message):
            module().MLAForgeImpl(**{**ARGUMENTS, **changes})


def test_widths_of_the_metadata() -> None:
    made = {
        "num_reqs": 0, "max_query_len": 0, "max_seq_len": 0, "num_actual_tokens": 0, "query_start_loc": None,
        "slot_mapping": None, "num_decodes": 0, "num_decode_tokens": 0, "num_prefills": 0,
    }  # fmt: skip
    module().MLAForgeMetadata(**made, head_dim=288)
    with pytest.raises(ValueError, match="head_dim is 640"):
        module().MLAForgeMetadata(**made, head_dim=640)


def test_an_output_in_fp8_is_refused(layer: Layer) -> None:
    with pytest.raises(NotImplementedError, match="output_scale is given"):
        layer.layer.prefill_backend.run_prefill_new_tokens(None, None, None, False, output_scale=torch.ones(1))


def test_writes_of_a_trial_run_are_none(layer: Layer) -> None:
    none = torch.empty(0)
    layer.layer.impl.do_kv_cache_update(none, none, none, none, "auto", none)


def test_this_is_vllm() -> None:
    """Not some double of it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None and Path(spec.origin).parent.name == "vllm"
    assert "site-packages" in spec.origin
