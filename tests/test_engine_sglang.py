"""The backend inside of SGLang itself, on the CPU and under the simulator. Skipped where SGLang is not installed.

SGLang's own registry, memory pools, batches, layer and division between prefill and decode; a model runner, which takes
a GPU, is described by the few facts that are asked of it. The tests of the same class without SGLang are in
test_engines.py.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel, get_spec
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

from mlaforge.engines import NAME, register_sglang
from mlaforge.reference import decode_reference
from mlaforge.verify import check_output

HEADS, RANK, NOPE, ROPE, V = 4, 256, 64, 32, 64
WIDTH = RANK + ROPE
SCALE, PAGE, CONTEXT = 0.11, 16, 200


@pytest.fixture(autouse=True)
def published() -> Iterator[None]:
    with get_context().override_server_args(page_size=PAGE):
        register_sglang()
        yield


class Server:
    """The pools of a server, with NaN in every slot that no request has, and a model runner's facts around them."""

    def __init__(self, lengths: list[int], new: int = 1, page: int = PAGE, **changes: Any) -> None:
        slots = 16 * 40
        self.pool = MLATokenToKVPool(
            size=slots,
            page_size=page,
            dtype=torch.bfloat16,
            kv_lora_rank=RANK,
            qk_rope_head_dim=ROPE,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
        )
        self.requests = ReqToTokenPool(size=8, max_context_len=CONTEXT, device="cpu", enable_memory_saver=False)
        self.layer = RadixAttention(HEADS, WIDTH, SCALE, 1, layer_id=1, v_head_dim=RANK)
        self.cache = self.pool.get_key_buffer(1)
        self.cache.fill_(torch.nan)
        self.requests.req_to_token.fill_(2147480000)
        pages = iter((torch.randperm(slots // page) + 1).tolist())  # page 0 is for padding
        rows = torch.tensor([3, 1, 6, 2][: len(lengths)])
        self.tokens = torch.randn(len(lengths), new, 1, WIDTH).bfloat16() / 10
        taken = []
        for row, length, tokens in zip(rows.tolist(), lengths, self.tokens, strict=True):
            held = [next(pages) for _ in range(-(-length // page))]
            ids = torch.tensor([held[i // page] * page + i % page for i in range(length)])
            self.requests.req_to_token[row, :length] = ids.int()
            self.cache[ids[: length - new]] = torch.randn(length - new, 1, WIDTH).bfloat16() / 10
            taken.append(ids[length - new :])
            assert len(tokens) == new
        self.locations = torch.cat(taken)
        self.rows, self.lengths, self.new, self.page = rows, torch.tensor(lengths), new, page
        facts: dict[str, Any] = {
            "model_config": types.SimpleNamespace(
                kv_lora_rank=RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V, context_len=CONTEXT
            ),
            "device": "cpu",
            "dtype": torch.bfloat16,
            "kv_cache_dtype": torch.bfloat16,
            "page_size": page,
            "use_mla_backend": True,
            "kv_index_translator": None,
            "req_to_token_pool": self.requests,
            "token_to_kv_pool": self.pool,
        }
        self.runner = types.SimpleNamespace(**{**facts, **changes})

    def backend(self) -> Any:
        return ATTENTION_BACKENDS[NAME](self.runner)

    def batch(self, mode: ForwardMode = ForwardMode.DECODE, host_lengths: bool = True) -> ForwardBatch:
        # Of a verification SGLang's lengths are those before the drafted tokens.
        lengths = self.lengths - (self.new if mode.is_target_verify() else 0)
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(self.rows),
            input_ids=torch.zeros(len(self.locations), dtype=torch.int64),
            req_pool_indices=self.rows,
            seq_lens=lengths,
            out_cache_loc=self.locations,
            seq_lens_sum=int(lengths.sum()),
            seq_lens_cpu=lengths if host_lengths else None,
        )

    def query(self) -> torch.Tensor:
        return torch.randn(len(self.rows) * self.new, HEADS, WIDTH).bfloat16() / 10

    def accept(self, out: torch.Tensor, q: torch.Tensor) -> None:
        """Compare with float64, by FlashMLA's criteria; the cache must hold the new tokens by now."""
        b = len(self.rows)
        assert torch.equal(self.cache[self.locations], self.tokens.flatten(0, 1))
        firsts = self.requests.req_to_token[self.rows][:, :: self.page]
        want, lse = decode_reference(
            q.view(b, self.new, HEADS, WIDTH),
            self.cache.view(-1, self.page, WIDTH),
            firsts // self.page,
            self.lengths,
            d_v=RANK,
            softmax_scale=SCALE,
            causal=True,
        )
        assert out.shape == (b * self.new, HEADS * RANK) and out.isfinite().all()
        errors = check_output(out.view(want.shape), lse.float(), want, lse)
        assert errors.ok, errors.failures

    def run(self, backend: Any, batch: ForwardBatch) -> None:
        q, k = self.query(), self.tokens.flatten(0, 1)
        self.accept(backend.forward(q.flatten(1), k, k[..., :RANK], self.layer, batch), q)


def test_the_entry_point_registers_and_loads_nothing() -> None:
    """In a process of its own, by SGLang's own loader if the package is installed."""
    found = [each.value for each in entry_points(group="sglang.srt.plugins") if each.name == "mlaforge"]
    assert found in ([], ["mlaforge.engines:register_sglang"])
    code = (
        "import sys, mlaforge.engines\n"
        f"{'from sglang.srt.plugins import load_plugins as go' if found else 'go = mlaforge.engines.register_sglang'}\n"
        "go()\n"
        "assert 'mlaforge.engines.sglang' not in sys.modules\n"
        "from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS\n"
        "from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES\n"
        "print('mlaforge' in ATTENTION_BACKENDS, 'mlaforge' in ATTENTION_BACKEND_CHOICES)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1:] == ["True True"], done.stderr


def test_registered_once() -> None:
    register_sglang()
    assert ATTENTION_BACKEND_CHOICES.count(NAME) == 1 and NAME in ATTENTION_BACKENDS


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("host_lengths", [True, False])
def test_decode(page: int, host_lengths: bool) -> None:
    torch.manual_seed(page)
    server = Server([70, 1, 17, 16], page=page)
    backend, batch = server.backend(), server.batch(host_lengths=host_lengths)
    backend.init_forward_metadata(batch)
    width = backend.forward_metadata.shape[1]
    assert width == -(-(70 if host_lengths else CONTEXT) // page)
    server.run(backend, batch)


def test_drafted_tokens() -> None:
    torch.manual_seed(2)
    server = Server([70, 3, 20], new=3)
    with get_spec().override(speculative_num_draft_tokens=3, speculative_eagle_topk=1):
        backend = server.backend()
    batch = server.batch(ForwardMode.TARGET_VERIFY)
    backend.init_forward_metadata(batch)
    server.run(backend, batch)


def test_tables_of_graphs_stay_where_they_are() -> None:
    """Between replays another batch comes: its pages are written where the graph looks for them."""
    torch.manual_seed(3)
    first, second = Server([70, 1, 17]), Server([5, 90, 33])
    second.requests.req_to_token[[0, 4, 5, 7]] = 0
    backend = first.backend()
    backend.init_cuda_graph_state(4, 4)
    batch = first.batch()
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    table = backend.forward_metadata
    first.run(backend, batch)
    backend._req_to_token, backend.token_to_kv_pool = second.requests.req_to_token, second.pool
    batch = second.batch()
    backend.init_forward_metadata_out_graph(batch)
    assert backend.forward_metadata.data_ptr() == table.data_ptr()
    assert torch.equal(table[:, :6], second.requests.req_to_token[second.rows][:, ::PAGE][:, :6] // PAGE)
    second.run(backend, batch)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1


def test_decode_beside_another_backend_for_prefill() -> None:
    torch.manual_seed(4)
    server = Server([70, 2])
    both = HybridAttnBackend(server.runner, TorchNativeAttnBackend(server.runner), server.backend())
    batch = server.batch()
    both.init_forward_metadata(batch)
    server.run(both, batch)


def test_tokens_that_the_pool_has_already() -> None:
    torch.manual_seed(5)
    server = Server([40, 9])
    backend, batch = server.backend(), server.batch()
    backend.init_forward_metadata(batch)
    server.cache[server.locations] = server.tokens.flatten(0, 1)
    q = server.query()
    nan = torch.full((2, 1, WIDTH), torch.nan).bfloat16()
    server.accept(backend.forward_decode(q, nan, nan, server.layer, batch, save_kv_cache=False), q)
    server.accept(backend.forward_decode(q, None, None, server.layer, batch), q)


def test_prefill_is_refused() -> None:
    server = Server([3])
    backend, batch = server.backend(), server.batch(ForwardMode.EXTEND)
    backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match=r"mode is EXTEND; .*--prefill-attention-backend"):
        backend.forward(server.query(), None, None, server.layer, batch)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"use_mla_backend": False}, "the model is no MLA model"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "kv_cache_dtype is torch.float8_e4m3fn, dtype is torch.bfloat16"),
        ({"dtype": torch.float32, "kv_cache_dtype": torch.float32}, "dtype is torch.float32; it must be"),
        ({"page_size": 48}, "no kernel has .*page_size"),
        ({"kv_index_translator": types.SimpleNamespace(reads_are_translated=True)}, "virtual pages"),
    ],
    ids=str,
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Server([3], **changes).backend()


def test_options_that_are_refused() -> None:
    server = Server([3])
    with get_spec().override(speculative_eagle_topk=4), pytest.raises(ValueError, match="chains are served"):
        server.backend()
    with get_parallel().override(dcp_enabled=True), pytest.raises(ValueError, match="context parallelism"):
        server.backend()
    backend, batch = server.backend(), server.batch()
    backend.init_forward_metadata(batch)
    server.layer.logit_cap = 30.0
    with pytest.raises(NotImplementedError, match=r"logit_cap is 30\.0"):
        backend.forward_decode(server.query(), None, None, server.layer, batch)
