"""The public MLA kernels that decode is compared with, each behind one small adapter.

They are found if they can be imported, and none is needed. A peer that can't be imported, that refuses a shape or whose
result is not ours is reported with the reason; none is left out silently. Queries attend to one paged cache whose pages
they read where they lie; what a peer must copy into another form is left out of its time.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, Literal, TypeVar

import torch

from mlaforge.bench.cases import Case
from mlaforge.formats import E4M3_MAX, FORMATS, encode_e4m3

Run = Callable[[], torch.Tensor]
"""A call; gives its result, of decode (b, s_q, h, d_v)."""

_LATENT, _ROPE = 512, 64
"""The only dimensions that the specialised kernels know."""
_FP8 = "fp8_e4m3"

COSINE_TOLERANCE = 1e-4
"""Two bf16 kernels differ by about 1e-6; a wrong page or a wrong scale gives more than 1e-2."""
_FP8_TOLERANCE = 1e-2
"""Of kernels that may round q or softmax weights to e4m3: of flat weights, 2% of each, that alone gives 2e-4."""


class PeerError(Exception):
    """A peer can't be used; the message is the reason in a line."""


_CHUNK = 1024
"""Pages that are read at once."""


@dataclass(frozen=True)
class Problem:
    """The tensors of one call."""

    case: Case
    q: torch.Tensor
    """(b, s_q, h, d_qk): latent part, then RoPE."""
    kv_cache: torch.Tensor
    """(pages, page_size, d_qk), or rows of bytes if it is quantised."""
    block_table: torch.Tensor
    """(b, pages of a request) int32."""
    cache_seqlens: torch.Tensor
    """(b,) int32."""
    softmax_scale: float
    d_v: int
    tensor_scale: torch.Tensor | None = None
    """(1,) float32, of a quantised cache whose format has one."""
    format: str | None = None
    """Of a quantised cache, as cache.dtype; None if the cache has elements."""

    @property
    def d_qk(self) -> int:
        """Width of q, and of a cache of elements."""
        return self.q.shape[3]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.kv_cache.shape[1]

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The latent and the RoPE part of q, each (b * s_q, h, width) and contiguous."""
        flat = self.q.flatten(0, 1)
        return flat[..., : self.d_v].contiguous(), flat[..., self.d_v :].contiguous()

    def in_bf16(self) -> Problem:
        """Give the same call on a cache of bf16 elements: what the rows of a quantised one stand for, rounded."""
        return dataclasses.replace(self, kv_cache=self.elements(torch.bfloat16), tensor_scale=None, format=None)

    def elements(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Give the cache as it is if it has elements, else what its rows stand for: (pages, page_size, d_qk)."""
        if self.format is None:
            return self.kv_cache
        form, rank = FORMATS[self.format], self.d_v
        scale = None if self.tensor_scale is None else float(self.tensor_scale)
        pages, page, _ = self.kv_cache.shape
        cache = self.q.new_empty((pages, page, self.d_qk), dtype=dtype)
        # In pieces: the reference takes many times their memory.
        for first in range(0, pages, _CHUNK):
            rows = self.kv_cache[first : first + _CHUNK]
            parts = form.dequantise(rows, rank, self.d_qk - rank, scale, dtype)
            cache[first : first + _CHUNK] = torch.cat(parts, -1)
        return cache

    def shaped(self, out: torch.Tensor) -> torch.Tensor:
        """Give a result of another shape as (b, s_q, h, d_v)."""
        return out.view(*self.q.shape[:3], self.d_v)


@dataclass(frozen=True)
class Prepared:
    """A peer's call on one problem."""

    ready: Run
    """With metadata or a plan that was made before, as a server does once for all layers."""
    anew: Run
    """With metadata or a plan made in the call; the same as `ready` where there are none."""
    planning: Literal["none", "device", "host"]
    """Who makes them. A host that plans waits for the device: it is not captured, its time has the host's in it."""
    note: str = ""


ProblemT = TypeVar("ProblemT")


class Peer(ABC, Generic[ProblemT]):
    """A public kernel of one kind of problem."""

    name: str
    title: str
    modules: Sequence[str] = ()
    """Names under which it may be importable, the first found is taken."""
    distributions: Sequence[str] = ()
    """Packages that may say its version."""
    cosine_tolerance: float = COSINE_TOLERANCE
    """How far its result may be from ours, 1 - 2 sum(xy) / sum(x^2 + y^2)."""

    def __init__(self) -> None:
        """Import nothing yet."""
        self._module: Any = None

    @property
    def module(self) -> Any:
        """The module found by `load`."""
        return self._module

    def load(self) -> None:
        """Import it.

        Raises:
            PeerError: no module can be imported; says why.
        """
        reasons = []
        for name in self.modules:
            try:
                self._module = importlib.import_module(name)
                return
            # A library built for another torch can fail with almost anything.
            except Exception as error:
                missing = isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]
                reasons.append(f"no module {name}" if missing else f"import {name}: {one_line(error)}")
        if reasons:
            raise PeerError("; ".join(reasons))

    def version(self) -> str | None:
        """Its version, None if nobody knows."""
        for name in self.distributions:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        found = getattr(self._module, "__version__", None)
        return str(found) if isinstance(self._module, ModuleType) and found else None

    def refuses(self, problem: ProblemT) -> str | None:
        """Say why it can't take a problem, None if it can."""
        return None

    @abstractmethod
    def prepare(self, problem: ProblemT) -> Prepared:
        """Make what its call needs. Whatever it raises is the reason why it is not timed."""


def one_line(error: BaseException) -> str:
    """Give an exception as a short line."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[:2])}"[:300]


def _wrong_rows(problem: Problem) -> str | None:
    return None if problem.format is None else "reads no quantised rows"


def _no_fp8_rows(problem: Problem) -> str | None:
    return None if problem.format == _FP8 else f"reads a cache of {_FP8} only"


def _wrong_dimensions(problem: Problem, dtypes: Sequence[torch.dtype], page_size: int | None = None) -> str | None:
    if (problem.d_qk, problem.d_v) != (_LATENT + _ROPE, _LATENT):
        return f"takes ({_LATENT + _ROPE}, {_LATENT}) only, not ({problem.d_qk}, {problem.d_v})"
    if problem.q.dtype not in dtypes:
        return f"takes {' and '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)} only"
    if page_size is not None and problem.page_size != page_size:
        return f"takes pages of {page_size} only, not {problem.page_size}"
    return None


class _FlashMla(Peer[Problem]):
    """FlashMLA's dense decode. Metadata are either filled in by the first call or made from the lengths before it."""

    def refuses(self, problem: Problem) -> str | None:
        """Only its own shape."""
        return _wrong_rows(problem) or _wrong_dimensions(problem, (torch.bfloat16, torch.float16), 64)

    def prepare(self, problem: Problem) -> Prepared:
        """Metadata of the newer form are empty at first: the call that meets them empty runs the scheduler."""
        kernel, metadata = self.module.flash_mla_with_kvcache, self.module.get_mla_metadata
        options: dict[str, Any] = {}
        accepted = inspect.signature(kernel).parameters
        if "use_legacy" in accepted:
            # The Hopper half of a library for several generations.
            options = {"is_fp8_kvcache": False, "use_legacy": True}
        required = [
            parameter
            for parameter in inspect.signature(metadata).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        lengths = (problem.cache_seqlens, problem.case.rows, 1) if required else ()
        cache = problem.kv_cache.unsqueeze(2)

        def call(made: tuple[Any, Any]) -> torch.Tensor:
            out, _ = kernel(
                problem.q,
                cache,
                problem.block_table,
                problem.cache_seqlens,
                problem.d_v,
                *made,
                problem.softmax_scale,
                problem.case.causal,
                **options,
            )
            return problem.shaped(out)

        kept = metadata(*lengths)
        return Prepared(lambda: call(kept), lambda: call(metadata(*lengths)), "device")


class FlashMla(_FlashMla):
    """The package flash_mla: DeepSeek's own, or sgl-flash-mla."""

    name = "flashmla"
    title = "FlashMLA (flash_mla)"
    modules = ("flash_mla",)
    distributions = ("sgl-flash-mla", "flash-mla", "flash_mla")


class FlashMlaVllm(_FlashMla):
    """The one that vLLM ships."""

    name = "flashmla_vllm"
    title = "FlashMLA (vLLM)"
    modules = ("flashmla_vllm", "vllm.third_party.flashmla.flash_mla_interface")
    distributions = ("vllm",)


class _FlashMlaFp8(Peer[Problem]):
    """FlashMLA's dense decode of fp8 queries and an fp8 cache."""

    cosine_tolerance = _FP8_TOLERANCE

    def load(self) -> None:
        """Import it; not every build has this kernel."""
        super().load()
        if not hasattr(self.module, "dense_fp8") and not hasattr(self.module, "flash_mla_with_kvcache_fp8"):
            raise PeerError(f"{self.module.__name__} has no dense fp8 decode")

    def refuses(self, problem: Problem) -> str | None:
        """Only its own shape and format."""
        return _no_fp8_rows(problem) or _wrong_dimensions(problem, (torch.bfloat16,), 64)

    def prepare(self, problem: Problem) -> Prepared:
        """Queries are rounded to e4m3 before, under one scale; the plan is made by a kernel from the lengths."""
        case, lengths = problem.case, problem.cache_seqlens
        q_scale = (problem.q.abs().amax().float() / E4M3_MAX).clamp(min=2.0**-100).view(1)
        q = encode_e4m3(problem.q.float() / q_scale).view(torch.float8_e4m3fn)
        cache = problem.kv_cache.view(torch.float8_e4m3fn).unsqueeze(2)
        scales = (q_scale, problem.tensor_scale)
        dense = getattr(self.module, "dense_fp8", None)

        def metadata() -> Any:
            if dense is not None:
                return dense.plan(lengths, rows=case.rows)
            return self.module.get_mla_metadata_dense_fp8(lengths, case.rows, 1)

        def call(made: Any) -> torch.Tensor:
            tensors = (q, cache, problem.block_table, lengths)
            if dense is not None:
                out, _ = dense.decode(*tensors, made, problem.softmax_scale, case.causal, *scales)
            else:
                options = (problem.d_v, *made, problem.softmax_scale, case.causal, *scales)
                out, _ = self.module.flash_mla_with_kvcache_fp8(*tensors, *options)
            return problem.shaped(out)

        kept = metadata()
        return Prepared(lambda: call(kept), lambda: call(metadata()), "device", "q in e4m3, rounded before")


class FlashMlaFp8(_FlashMlaFp8):
    """The package flash_mla, if its build has it."""

    name = "flashmla_fp8"
    title = "FlashMLA (flash_mla), fp8 q and cache"
    modules = FlashMla.modules
    distributions = FlashMla.distributions


class FlashMlaVllmFp8(_FlashMlaFp8):
    """The one that vLLM ships."""

    name = "flashmla_vllm_fp8"
    title = "FlashMLA (vLLM), fp8 q and cache"
    modules = ("flashmla_vllm", "vllm.v1.attention.ops.flashmla")
    distributions = FlashMlaVllm.distributions


class FlashAttention3(Peer[Problem]):
    """FlashAttention-3 with a separate q_v: RoPE as q and k, the latent part as q_v and v."""

    name = "fa3_vllm"
    title = "FlashAttention-3 qv (vLLM)"
    modules = ("fa3_vllm", "vllm.vllm_flash_attn")
    distributions = ("vllm",)

    def refuses(self, problem: Problem) -> str | None:
        """Only MLA's own widths."""
        return _wrong_rows(problem) or _wrong_dimensions(problem, (torch.bfloat16, torch.float16))

    def prepare(self, problem: Problem) -> Prepared:
        """Its scheduler is a kernel of its own."""
        case, d_v = problem.case, problem.d_v
        q_v, q = problem.parts
        k, v = problem.kv_cache[..., d_v:].unsqueeze(2), problem.kv_cache[..., :d_v].unsqueeze(2)
        starts = torch.arange(case.b + 1, dtype=torch.int32, device=q.device) * case.s_q

        def metadata() -> Any:
            return self.module.get_scheduler_metadata(
                batch_size=case.b,
                max_seqlen_q=case.s_q,
                max_seqlen_k=case.s_k,
                num_heads_q=case.h,
                num_heads_kv=1,
                headdim=problem.d_qk - d_v,
                cache_seqlens=problem.cache_seqlens,
                qkv_dtype=q.dtype,
                headdim_v=d_v,
                page_size=problem.page_size,
                cu_seqlens_q=starts,
                causal=True,
                num_splits=0,
            )

        def call(made: Any) -> torch.Tensor:
            out = self.module.flash_attn_varlen_func(
                q=q,
                k=k,
                v=v,
                q_v=q_v,
                max_seqlen_q=case.s_q,
                cu_seqlens_q=starts,
                max_seqlen_k=case.s_k,
                seqused_k=problem.cache_seqlens,
                block_table=problem.block_table,
                softmax_scale=problem.softmax_scale,
                causal=True,
                fa_version=3,
                scheduler_metadata=made,
                num_splits=0,
            )
            return problem.shaped(out[0] if isinstance(out, tuple) else out)

        kept = metadata()
        return Prepared(lambda: call(kept), lambda: call(metadata()), "device", "q in two contiguous parts")


class FlashInfer(Peer[Problem]):
    """FlashInfer's paged MLA with the backend fa3: the package, or its two modules compiled ahead of time."""

    name = "flashinfer"
    title = "FlashInfer fa3"
    modules = ("flashinfer_mla", "flashinfer.mla")
    distributions = ("flashinfer-python", "flashinfer")

    def refuses(self, problem: Problem) -> str | None:
        """Only MLA's own widths; under a mask a head count that does not divide its tile can lose a key."""
        if reason := self._wrong_cache(problem):
            return reason
        if problem.case.causal and 128 % problem.case.h:
            return f"{problem.case.h} heads under a mask are not a power of two up to 128"
        return _wrong_dimensions(problem, (torch.bfloat16,))

    def _wrong_cache(self, problem: Problem) -> str | None:
        return _wrong_rows(problem)

    def _cache(self, problem: Problem, wrapper: Any) -> tuple[torch.Tensor, Mapping[str, float]]:
        """Give the cache as it takes it, and what a run says of it beside."""
        return problem.kv_cache, {}

    def prepare(self, problem: Problem) -> Prepared:
        """It plans on the host."""
        case, page, d_v = problem.case, problem.page_size, problem.d_v
        device = problem.q.device
        pages = -(-case.s_k // page)
        kv_starts = torch.arange(case.b + 1, dtype=torch.int32) * pages
        q_starts = torch.arange(case.b + 1, dtype=torch.int32) * case.s_q
        lengths = torch.full((case.b,), case.s_k, dtype=torch.int32)
        numbers = problem.block_table[:, :pages].reshape(-1).contiguous()
        q_nope, q_pe = problem.parts
        out = torch.empty_like(q_nope)
        workspace = torch.empty(256 << 20, dtype=torch.int8, device=device)
        kind = self.module.BatchMLAPagedAttentionWrapper
        cache, options = self._cache(problem, kind)
        latent, rope = cache[..., :d_v], cache[..., d_v:]
        if "backend" in inspect.signature(kind.__init__).parameters:
            wrapper = kind(workspace, backend="fa3")
            indices = [each.to(device) for each in (q_starts, kv_starts, numbers, lengths)]
            form = (*indices, case.h, d_v, problem.d_qk - d_v, page, case.causal, problem.softmax_scale)
            plan: tuple[Any, ...] = (*form, problem.q.dtype, cache.dtype)
        else:
            wrapper = kind(workspace)
            plan = (q_starts, kv_starts, numbers, lengths, case.h, page, case.causal, problem.softmax_scale)
            plan = (*plan, cache.dtype)

        def ready() -> torch.Tensor:
            wrapper.run(q_nope, q_pe, latent, rope, out=out, **options)
            return problem.shaped(out)

        def anew() -> torch.Tensor:
            wrapper.plan(*plan)
            return ready()

        wrapper.plan(*plan)
        return Prepared(ready, anew, "host", "q in two contiguous parts")


class FlashInferFp8(FlashInfer):
    """The same with bf16 queries and an fp8 cache."""

    name = "flashinfer_fp8kv"
    title = "FlashInfer fa3, fp8 cache"
    cosine_tolerance = _FP8_TOLERANCE

    def _wrong_cache(self, problem: Problem) -> str | None:
        return _no_fp8_rows(problem)

    def _cache(self, problem: Problem, wrapper: Any) -> tuple[torch.Tensor, Mapping[str, float]]:
        """Scales are numbers of the host."""
        names = ("ckv_scale", "kpe_scale")
        if not set(names) <= set(inspect.signature(wrapper.run).parameters):
            raise PeerError("its run takes no scale of the cache")
        assert problem.tensor_scale is not None
        scale = float(problem.tensor_scale)
        return problem.kv_cache.view(torch.float8_e4m3fn), dict.fromkeys(names, scale)


class _Triton(Peer[Problem]):
    """A Triton kernel of one query token a request: more are given to it as more requests."""

    def refuses(self, problem: Problem) -> str | None:
        """Nearly nothing."""
        return _wrong_rows(problem) or (None if problem.q.dtype == torch.bfloat16 else "takes bfloat16 only")

    def _note(self, problem: Problem) -> str:
        return "query tokens as requests: reads the cache once for each" if problem.case.s_q > 1 else ""

    def _ends(self, problem: Problem) -> torch.Tensor:
        """Tokens that each query token sees, (b * s_q,) int32."""
        s_q = problem.case.s_q
        before = torch.arange(s_q, dtype=torch.int32, device=problem.q.device) - (s_q - 1)
        return (problem.cache_seqlens[:, None] + before).flatten().contiguous()


class TritonVllm(_Triton):
    """vLLM's."""

    name = "triton_vllm"
    title = "Triton (vLLM)"
    modules = ("triton_mla.vllm_decode", "vllm.v1.attention.ops.triton_decode_attention")
    distributions = ("vllm",)

    def prepare(self, problem: Problem) -> Prepared:
        """Splits by vLLM's rule: a power of two from the longest request, at most two for each SM."""
        case, q = problem.case, problem.q.flatten(0, 1).contiguous()
        table = problem.block_table.repeat_interleave(case.s_q, 0).contiguous()
        ends = self._ends(problem)
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        splits = min(1 << max(-(-case.s_k // 512) - 1, 0).bit_length(), 2 * sms)
        partial = torch.empty(case.b * case.s_q, case.h, splits, problem.d_v + 1, dtype=torch.float32, device=q.device)
        out = torch.zeros(case.b * case.s_q, case.h, problem.d_v, dtype=q.dtype, device=q.device)
        lse = torch.zeros(case.b * case.s_q, case.h, dtype=q.dtype, device=q.device)
        one = torch.ones((), dtype=torch.float32, device=q.device)
        k = problem.kv_cache.unsqueeze(2)
        v = k[..., : problem.d_v]

        def call() -> torch.Tensor:
            self.module.decode_attention_fwd(
                q,
                k,
                v,
                out,
                lse,
                table,
                ends,
                partial,
                splits,
                problem.softmax_scale,
                problem.page_size,
                k_scale=one,
                v_scale=one,
                is_mla=True,
            )
            return problem.shaped(out)

        return Prepared(call, call, "none", self._note(problem))


class TritonSglang(_Triton):
    """SGLang's; it addresses the cache by token."""

    name = "triton_sglang"
    title = "Triton (SGLang)"
    modules = ("triton_mla.sglang_decode", "sglang.srt.layers.attention.triton_ops.decode_attention")
    distributions = ("sglang",)

    def prepare(self, problem: Problem) -> Prepared:
        """The places of all tokens are worked out before; 8 splits for each request, more for small batches."""
        case, q, page = problem.case, problem.q.flatten(0, 1).contiguous(), problem.page_size
        device = q.device
        within = torch.arange(page, dtype=torch.int64, device=device)
        places = (problem.block_table.long()[:, :, None] * page + within).flatten(1)
        ends = self._ends(problem)
        rows = case.b * case.s_q
        indices = torch.cat([places[row // case.s_q, :end] for row, end in enumerate(ends.tolist())])
        starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        starts[1:] = ends.cumsum(0)
        splits = 8 if case.b > 16 else 32 if case.b > 1 else 128
        counts = torch.full((rows,), splits, dtype=torch.int32, device=device)
        partial = torch.empty(rows, case.h, splits, problem.d_v, dtype=torch.float32, device=device)
        lse = torch.empty(rows, case.h, splits, dtype=torch.float32, device=device)
        out = torch.zeros(rows, case.h, problem.d_v, dtype=q.dtype, device=device)
        k = problem.kv_cache.flatten(0, 1).unsqueeze(1)
        v = k[..., : problem.d_v]

        def call() -> torch.Tensor:
            self.module.decode_attention_fwd(
                q,
                k,
                v,
                out,
                starts,
                indices,
                partial,
                lse,
                counts,
                splits,
                problem.softmax_scale,
                1.0,
                1.0,
                has_mla=True,
            )
            return problem.shaped(out)

        return Prepared(call, call, "none", self._note(problem))


class Torch(Peer[Problem]):
    """Plain torch: the pages are gathered, then two matrix products and a softmax between them."""

    name = "torch"
    title = "torch (gather, two products)"

    MAX_TOKENS = 65_536
    """Its scores lie in memory: larger problems are no comparison."""

    def version(self) -> str | None:
        """Torch's."""
        return torch.__version__

    def refuses(self, problem: Problem) -> str | None:
        """Small problems only."""
        if reason := _wrong_rows(problem):
            return reason
        tokens = problem.case.tokens
        return None if tokens <= self.MAX_TOKENS else f"only up to {self.MAX_TOKENS:,} tokens, not {tokens:,}"

    def prepare(self, problem: Problem) -> Prepared:
        """In the cache's type, but for the softmax."""
        case = problem.case
        q, table = problem.q.flatten(1, 2), problem.block_table.flatten()
        hidden = None
        if case.causal:
            sees = case.s_k - case.s_q + torch.arange(case.s_q, device=q.device).repeat_interleave(case.h)
            hidden = torch.arange(case.s_k, device=q.device)[None, :] > sees[:, None]

        def call() -> torch.Tensor:
            pages = problem.kv_cache.index_select(0, table)
            k = pages.view(case.b, -1, problem.d_qk)[:, : case.s_k]
            scores = torch.bmm(q, k.transpose(1, 2)).float() * problem.softmax_scale
            if hidden is not None:
                scores = scores.masked_fill(hidden, float("-inf"))
            return problem.shaped(torch.bmm(scores.softmax(-1).to(q.dtype), k[..., : problem.d_v]))

        return Prepared(call, call, "none")


PEERS: Mapping[str, type[Peer[Problem]]] = {
    peer.name: peer
    for peer in (
        FlashMla,
        FlashMlaVllm,
        FlashAttention3,
        FlashInfer,
        TritonVllm,
        TritonSglang,
        Torch,
        FlashMlaFp8,
        FlashMlaVllmFp8,
        FlashInferFp8,
    )
}
