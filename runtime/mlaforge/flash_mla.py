"""FlashMLA's dense decode under its own names, so that its callers need to change an import and nothing else.

`get_mla_metadata` and `flash_mla_with_kvcache` take the arguments of FlashMLA's old form, in which the metadata are two
tensors, and of its new one, in which they are an object. More shapes are served than FlashMLA's: whatever widths of q
and V, element type and page size a spec can have. Kernels are made at the first call of such a family, once in a
process, and kept in the compile cache; the number of heads, batch and lengths make no new ones.

On CPU tensors the same kernels' text runs under the simulator: slowly, for those who have no Hopper GPU at hand. What
is not served, sparse attention, quantised caches and attention sinks, is a NotImplementedError that names the argument.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mlaforge.api import generate_tree, generate_yaml
from mlaforge.arguments import DTYPES, require_dtype, require_shape, shape_of
from mlaforge.decode import DecodeRunner, DecodeTensors
from mlaforge.launch import Cuda
from mlaforge.manifest import read_manifest
from mlaforge.simulator import Simulator

METADATA_WIDTH = 8
"""Words of a row of the old form's tile_scheduler_metadata."""
_TILE_ROWS = 64
"""Rows, query tokens x heads, by which FlashMLA counts the parts of its grid."""
_BACKENDS: dict[str, Cuda | Simulator] = {"cuda": Cuda(), "cpu": Simulator()}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class FlashMLASchedMeta:
    """What the new form of `get_mla_metadata` gives.

    FlashMLA keeps the division of the work here, made at the first call. These kernels divide the work themselves, at
    each launch and from the lengths that they find: there is nothing to keep, and one object serves calls of any
    shapes and lengths.
    """

    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *,
    num_heads_per_head_k: int | None = None,
) -> tuple[FlashMLASchedMeta, None] | tuple[torch.Tensor, torch.Tensor]:
    """Give what `flash_mla_with_kvcache` takes as metadata: two tensors where lengths are passed, otherwise an object.

    The kernels divide the work on the device from the lengths of each call. So nothing reads the tensors' content,
    which is 0; they have FlashMLA's shapes, for callers that keep buffers of them, and need not be made anew when
    lengths change.

    Args:
        cache_seqlens: (b,) int32: tokens of each request. None asks for the new form.
        num_q_tokens_per_head_k: s_q x h_q / h_kv.
        num_heads_k: h_kv.
        num_heads_q: h_q; not needed.
        is_fp8_kvcache: not served.
        topk: not served.
        num_heads_per_head_k: what num_q_tokens_per_head_k was called at first.

    Returns:
        New form: a `FlashMLASchedMeta` and None. Old form: int32 of shape (num_sm_parts, 8) and int32 of shape (b + 1,)
        on the device of cache_seqlens; num_sm_parts is what FlashMLA works out from the device's multiprocessors.

    Raises:
        ValueError: an argument is missing or wrong; it says which.
        NotImplementedError: is_fp8_kvcache or topk is given.
    """
    if is_fp8_kvcache:
        raise NotImplementedError("is_fp8_kvcache is set; quantised caches are not served")
    if topk is not None:
        raise NotImplementedError(f"topk is {topk}; sparse attention is not served")
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    rows = _positive(
        "num_q_tokens_per_head_k", num_heads_per_head_k if num_q_tokens_per_head_k is None else num_q_tokens_per_head_k
    )
    heads = _positive("num_heads_k", num_heads_k)
    require_shape("cache_seqlens", cache_seqlens, ("b",))
    require_dtype("cache_seqlens", cache_seqlens, torch.int32)
    multiprocessors = _backend("cache_seqlens", cache_seqlens).sm_count(cache_seqlens.device)
    parts = max(multiprocessors // heads // -(-rows // _TILE_ROWS), 1)
    metadata = cache_seqlens.new_zeros((parts, METADATA_WIDTH))
    return metadata, cache_seqlens.new_zeros((cache_seqlens.shape[0] + 1,))


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor | FlashMLASchedMeta,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from absorbed queries to a paged latent cache, whose first head_dim_v columns are V.

    Works on the current stream of q's device and never waits for it. A call can be captured in a CUDA graph, and the
    graph replayed with other lengths and tables, once one of as many rows (s_q x h_q) was made outside: it compiles
    and loads the kernel. A torch operator: `torch.compile(fullgraph=True)` works, and may trace before there is a
    kernel.

    Args:
        q: (b, s_q, h_q, d_qk), bf16 or fp16.
        k_cache: (num_blocks, page_size, h_kv, d_qk), the same dtype, pages of 1, 16, 32, 64 or 128 tokens; the last
            dimension contiguous, other strides multiples of 16 bytes.
        block_table: (b, max_blocks) int32: the block of each page. Entries behind a request's last page are not read.
        cache_seqlens: (b,) int32: tokens of each request.
        head_dim_v: columns of V: 128, 256, 384 or 512. What is behind them in q and k_cache is a multiple of 16, or 0.
        tile_scheduler_metadata: the first of what `get_mla_metadata` gave, in either form. Its content is not read.
        num_splits: the second; its content is not read.
        softmax_scale: of the logits; d_qk^-0.5 if None, as in FlashMLA. That is no model's own: for DeepSeek-V3 it
            would be 192^-0.5 times the square of yarn's factor (`mlaforge plan` prints it).
        causal: bottom-right aligned: query i of s_q sees the tokens before len - (s_q - 1) + i.
        is_fp8_kvcache: not served.
        indices: not served, nor are the arguments behind it.
        attn_sink: not served.
        extra_k_cache: not served.
        extra_indices_in_kvcache: not served.
        topk_length: not served.
        extra_topk_length: not served.

    Returns:
        out (b, s_q, h_q, head_dim_v) in q's dtype, and lse (b, h_q, s_q) float32, the natural logarithm of the sum of
        exponentials of each row. A row that sees no token has out 0 and lse +inf.

    Raises:
        ValueError: an argument does not fit, or no kernel has such a shape; it says which and why. Nothing was
            launched.
        NotImplementedError: an argument that is not served is given; it says which.
        CompileError: the kernel does not compile.
        ToolchainError: the compiler or its headers are missing.
        CudaError: the driver refused the launch.
    """
    if is_fp8_kvcache:
        raise NotImplementedError("is_fp8_kvcache is set; quantised caches are not served")
    for name, value in (
        ("indices", indices),
        ("attn_sink", attn_sink),
        ("extra_k_cache", extra_k_cache),
        ("extra_indices_in_kvcache", extra_indices_in_kvcache),
        ("topk_length", topk_length),
        ("extra_topk_length", extra_topk_length),
    ):
        if value is not None:
            raise NotImplementedError(f"{name} is given; neither sparse attention nor attention sinks are served")
    if block_table is None:
        raise ValueError("block_table is None; dense attention needs it")
    if cache_seqlens is None:
        raise ValueError("cache_seqlens is None; dense attention needs it")
    _check_metadata(tile_scheduler_metadata, num_splits, q)
    results: tuple[torch.Tensor, torch.Tensor] = torch.ops.mlaforge.flash_mla(
        q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal
    )
    return results


def prepare(
    *,
    d_qk: int = 576,
    head_dim_v: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 64,
    device_type: str = "cuda",
) -> None:
    """Compile all kernels of a family ahead of its first call, for this process and into the compile cache.

    Needs no GPU. `mlaforge compile --flash-mla 576,512,bf16,64` does the same from a shell, into the compile cache. The
    families of `SHIPPED` share their kernels with a shipped spec, whose name will do, too.

    Args:
        d_qk: elements of a head of q, and of a cached token.
        head_dim_v: columns of V.
        dtype: of q and the cache, bf16 or fp16.
        page_size: tokens in one page of the cache.
        device_type: "cuda", or "cpu" for the simulator.

    Raises:
        ValueError: no kernel has such a shape.
        CompileError: a kernel does not compile.
        ToolchainError: the compiler or its headers are missing.
    """
    if dtype not in _DTYPE_NAMES:
        raise ValueError(f"dtype is {dtype}; it must be {' or '.join(map(str, _DTYPE_NAMES))}")
    if device_type not in _BACKENDS:
        raise ValueError(f"device_type is {device_type!r}; it must be {' or '.join(map(repr, _BACKENDS))}")
    _runner(Family(d_qk, head_dim_v, _DTYPE_NAMES[dtype], page_size), device_type).compile()


class Family(NamedTuple):
    """The shapes that share kernels."""

    d_qk: int
    d_v: int
    dtype: str
    """As cache.dtype of a spec."""
    page_size: int

    def tree(self) -> dict[str, Any]:
        """Give a spec as plain data. Absorbed decode depends on no field of a model that is not set from the family."""
        return {
            "name": f"flash_mla_{self.d_qk}_{self.d_v}_{self.dtype}_{self.page_size}",
            "model": {
                "num_attention_heads": 1,
                "kv_lora_rank": self.d_v,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": self.d_qk - self.d_v,
                "v_head_dim": 128,
            },
            "cache": {"dtype": self.dtype, "page_size": self.page_size},
        }


SHIPPED = {
    Family(576, 512, "bf16", 64): "deepseek_v3",
    Family(512, 512, "bf16", 64): "glm_5_3_flash",
    Family(320, 256, "bf16", 64): "mistral_small_4",
    Family(288, 256, "bf16", 64): "minicpm3",
}
"""Families whose kernels are those of a shipped spec, so that each is compiled once. A spec's name is in their text."""

_WORDS = {
    "model.kv_lora_rank": "head_dim_v",
    "model.qk_rope_head_dim": "the columns of q behind head_dim_v",
    "cache.page_size": "dimension 1 of k_cache",
}
"""What the fields of a spec are here."""

_runners: dict[tuple[Family, str], DecodeRunner] = {}
_lock = threading.Lock()


def _runner(family: Family, device_type: str) -> DecodeRunner:
    """Give the runner of a family on a kind of device, made when it is first asked for."""
    runner = _runners.get((family, device_type))
    if runner is not None:
        return runner
    with _lock:
        if (family, device_type) not in _runners:
            _runners[family, device_type] = DecodeRunner(read_manifest(render(family)), _BACKENDS[device_type])
        return _runners[family, device_type]


def render(family: Family) -> Path:
    """Render the kernels of a family into the cache directory; give the folder, of which calls run the decode kernels.

    Raises:
        ValueError: no kernel has such a shape.
    """
    from mlaforge_generator.errors import SpecError

    if (shipped := SHIPPED.get(family)) is not None:
        return generate_yaml(shipped)
    try:
        return generate_tree(family.tree())
    except SpecError as error:
        reasons = "; ".join(f"{_WORDS.get(each.field, each.field)}: {each.message}" for each in error.problems)
        raise ValueError(
            f"no kernel has d_qk {family.d_qk}, head_dim_v {family.d_v} and pages of {family.page_size}: {reasons}"
        ) from None


def _backend(name: str, tensor: torch.Tensor) -> Cuda | Simulator:
    backend = _BACKENDS.get(tensor.device.type)
    if backend is None:
        raise ValueError(f"{name} is on {tensor.device}; it must be on a CUDA device, or on the CPU for the simulator")
    return backend


def _positive(name: str, value: int | None) -> int:
    if value is None or value < 1:
        raise ValueError(f"{name} is {value}; beside cache_seqlens it must be a positive number")
    return value


def _check_metadata(metadata: object, num_splits: object, q: torch.Tensor) -> None:
    """Refuse what `get_mla_metadata` does not give for such a batch."""
    if isinstance(metadata, FlashMLASchedMeta):
        if num_splits is not None:
            raise ValueError(f"num_splits is a {type(num_splits).__name__}; beside a FlashMLASchedMeta it must be None")
        return
    for name, value in (("tile_scheduler_metadata", metadata), ("num_splits", num_splits)):
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}; it must be what get_mla_metadata gave")
        require_dtype(name, value, torch.int32)
        require_shape(name, value, ("num_sm_parts", METADATA_WIDTH) if value is metadata else (q.shape[0] + 1,))


def _family(q: torch.Tensor, k_cache: torch.Tensor, head_dim_v: int) -> Family:
    """Say whose kernels serve a call; checked here is what that takes, and what FlashMLA's names are for."""
    require_shape("q", q, ("b", "s_q", "h_q", "d_qk"))
    require_shape("k_cache", k_cache, ("num_blocks", "page_size", "h_kv", "d_qk"))
    require_dtype("q", q, *_DTYPE_NAMES)
    require_dtype("k_cache", k_cache, q.dtype)
    d_qk = q.shape[3]
    if k_cache.shape[3] != d_qk:
        raise ValueError(
            f"k_cache has shape {shape_of(k_cache)}; its last dimension must be q's, {d_qk}, latent part first"
        )
    if not 1 <= head_dim_v <= d_qk:
        raise ValueError(f"head_dim_v is {head_dim_v}; V is the first columns of K, 1 to {d_qk} of them")
    return Family(d_qk, head_dim_v, _DTYPE_NAMES[q.dtype], k_cache.shape[1])


def _results(q: torch.Tensor, head_dim_v: int) -> tuple[torch.Tensor, torch.Tensor]:
    b, s_q, h_q, _ = q.shape
    return q.new_empty((b, s_q, h_q, head_dim_v)), q.new_empty((b, h_q, s_q), dtype=torch.float32)


# An operator of its own: what compiles and remembers kernels is then nothing that torch.compile would have to trace.
torch.library.define(
    "mlaforge::flash_mla",
    "(Tensor q, Tensor k_cache, Tensor block_table, Tensor cache_seqlens, SymInt head_dim_v, float? softmax_scale,"
    " bool causal) -> (Tensor, Tensor)",
)


@torch.library.impl("mlaforge::flash_mla", "default")
def _flash_mla(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    family = _family(q, k_cache, head_dim_v)
    _backend("q", q)
    runner = _runner(family, q.device.type)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = _results(q, head_dim_v)
    try:
        runner.run(DecodeTensors(q, k_cache, block_table, cache_seqlens, out, lse), causal, scale)
    except ValueError as error:
        # The cache's name here.
        raise ValueError(str(error).replace("kv_cache", "k_cache")) from None
    return out, lse


def _flash_mla_fake(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    _family(q, k_cache, head_dim_v)
    return _results(q, head_dim_v)


torch.library.register_fake("mlaforge::flash_mla", _flash_mla_fake)
