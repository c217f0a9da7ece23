"""The tensors of a measured call, and our own call on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlaforge import __version__
from mlaforge.arguments import DTYPES, cache_columns
from mlaforge.bench.cases import Case
from mlaforge.bench.peers import Peer, Prepared, Problem, Run
from mlaforge.formats import FORMATS
from mlaforge.manifest import Manifest
from mlaforge.verify import Decoder

# More than twice the L2 of any GPU that the kernels run on.
_CACHE_BYTES = 256 << 20
_DRAWN_PAGES = 1 << 10
"""Of a quantised cache, those that are drawn."""


@dataclass(frozen=True)
class Cached:
    """A paged cache and what says where the requests lie in it."""

    cache: torch.Tensor
    """(pages, page_size, d_qk), normal / 10; quantised (pages, page_size, row_bytes)."""
    table: torch.Tensor
    """(b, pages of a request) int32: random pages, each used once."""
    lengths: torch.Tensor
    """(b,) int32, all equal."""
    tensor_scale: torch.Tensor | None
    """(1,) float32, of a cache whose format has one."""


def make_cache(manifest: Manifest, device: torch.device, b: int, s_k: int, seed: int) -> Cached:
    """Make a cache of `b` requests of `s_k` tokens; on a GPU it is larger than L2, whatever they need."""
    columns = -(-s_k // manifest.cache.page_size)
    least = _CACHE_BYTES if device.type == "cuda" else 0
    pages = max(b * columns, -(-least // (manifest.cache.page_size * manifest.cache.row_bytes)))
    torch.manual_seed(seed)
    cache, tensor_scale = random_pages(manifest, device, pages, 0.1)
    table = torch.randperm(pages, device=device)[: b * columns].to(torch.int32).view(b, columns).contiguous()
    return Cached(cache, table, torch.full((b,), s_k, dtype=torch.int32, device=device), tensor_scale)


def random_pages(
    manifest: Manifest, device: torch.device, pages: int, deviation: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Fill pages with normal numbers of this standard deviation.

    Returns:
        (pages, page_size, d_qk), or rows of bytes if the cache is quantised; and the scale, if its format has one.
    """
    page, width = manifest.cache.page_size, cache_columns(manifest.cache, manifest.d_qk)
    if not manifest.cache.quantised:
        cache = torch.empty(pages, page, width, dtype=DTYPES[manifest.element], device=device)
        # In pieces: of a large cache random numbers of its own size beside it would be a waste.
        for first in range(0, pages, 1 << 13):
            cache[first : first + (1 << 13)].normal_().mul_(deviation)
        return cache, None
    form, rank = FORMATS[manifest.cache.dtype], manifest.d_v
    scale = form.tensor_scale(5 * deviation) if manifest.cache.tensor_scale else None
    # Rows that come again and again: the reference takes many times their memory.
    tokens = torch.randn(min(pages, _DRAWN_PAGES), page, manifest.d_qk, device=device).mul_(deviation)
    rows = form.quantise(tokens[..., :rank], tokens[..., rank:], scale)
    cache = torch.empty(pages, page, width, dtype=torch.uint8, device=device)
    for first in range(0, pages, len(rows)):
        cache[first : first + len(rows)] = rows[: pages - first]
    return cache, None if scale is None else torch.tensor([scale], device=device)


def make_problem(manifest: Manifest, case: Case, cached: Cached, seed: int) -> Problem:
    """Draw the queries of a case, normal / 10, beside a cache of its shape."""
    shape = (case.b, case.s_q, case.h, manifest.d_qk)
    torch.manual_seed(seed + 1)
    q = torch.randn(shape, device=cached.cache.device).div_(10).to(DTYPES[manifest.element])
    tensors = (q, cached.cache, cached.table, cached.lengths)
    form = manifest.cache.dtype if manifest.cache.quantised else None
    return Problem(case, *tensors, manifest.softmax_scale, manifest.d_v, cached.tensor_scale, form)


@dataclass(frozen=True)
class OurCall:
    """A call of our kernels with results of its own."""

    run: Run
    out: torch.Tensor
    """(b, s_q, h, d_v), what `run` gives."""
    lse: torch.Tensor
    """(b, h, s_q) float32."""


def our_call(mla: Decoder, problem: Problem) -> OurCall:
    """Prepare a call; the results are allocated here, once."""
    case = problem.case
    out = problem.q.new_empty((case.b, case.s_q, case.h, problem.d_v))
    lse = problem.q.new_empty((case.b, case.h, case.s_q), dtype=torch.float32)

    def run() -> torch.Tensor:
        made, _ = mla.decode(
            problem.q,
            problem.kv_cache,
            problem.block_table,
            problem.cache_seqlens,
            tensor_scale=problem.tensor_scale,
            causal=case.causal,
            out=out,
            lse=lse,
        )
        return made

    return OurCall(run, out, lse)


class OurBf16(Peer[Problem]):
    """Our own decode of the same tokens in a bf16 cache, beside which a quantised one shows what it gains or loses."""

    name = "mlaforge_bf16"
    title = "mlaforge, bf16 cache"

    def __init__(self, mla: Decoder) -> None:
        """Take our kernels of the same dimensions and page size, of a bf16 cache."""
        super().__init__()
        self._mla = mla

    def version(self) -> str | None:
        """Ours."""
        return __version__

    def prepare(self, problem: Problem) -> Prepared:
        """The cache is read into one of elements before."""
        call = our_call(self._mla, problem.in_bf16())
        return Prepared(call.run, call.run, "none")
