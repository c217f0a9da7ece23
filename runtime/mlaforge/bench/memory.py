"""The kernels that move data, as the bench measures them: calls of hundreds of megabytes, and a copy of as many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mlaforge.arguments import DTYPES
from mlaforge.bench.cases import MemoryCase
from mlaforge.bench.peers import Run
from mlaforge.formats import FORMATS
from mlaforge.manifest import Manifest
from mlaforge.memory_reference import append_reference, gather_reference, merge_reference
from mlaforge.memory_verify import LOST, MemoryKernelsOf
from mlaforge.quantised_verify import quantised_failures

HEADS = 16
"""Of the results that are merged."""
_SEQUENCES = 64
_POSITIONS = 8192
_LOST = 1e-5
"""Of a number near zero, what float32 and the sum of two roundings may lose."""


@dataclass(frozen=True)
class MemoryCall:
    """One of our calls, on tensors of its own."""

    run: Run
    """Gives what is written."""
    bytes: int
    """Read and written, each once: data, tables, slots, positions and angles."""
    check: Callable[[torch.Tensor], str | None]
    """Says what is wrong with what a run gave, None if nothing is."""


def memory_call(mla: MemoryKernelsOf, case: MemoryCase, device: torch.device, seed: int) -> MemoryCall:
    """Make the tensors of a case and the call."""
    torch.manual_seed(seed)
    if case.kernel == "gather":
        return _gather(mla, case.tokens, device)
    if case.kernel in ("append", "append_rotated"):
        return _append(mla, case.tokens, device, computed=case.kernel == "append_rotated")
    width = mla.manifest.d_v if case.kernel == "merge_latent" else int(mla.manifest.model["v_head_dim"])
    return _merge(mla, case.tokens, width, device)


def copy_call(size: int, device: torch.device) -> tuple[Run, int]:
    """Copy as many bytes as a call reads and writes, half of them each; gives the call and what it really moves.

    A kernel of torch copies, 16 bytes a load: 0 is added. `copy_` would be a memcpy, which as a node of a graph is far
    slower: on an H200 2.8 TB/s of a gigabyte, where kernels reach 4.
    """
    source = torch.arange(max(size // 8, 1), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return lambda: torch.add(source, 0, out=target), 8 * source.numel()


def _size(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _normal(manifest: Manifest, device: torch.device, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=DTYPES[manifest.element], device=device).normal_()


def _pages(manifest: Manifest, tokens: int) -> int:
    return -(-tokens // manifest.cache.page_size)


def _gather(mla: MemoryKernelsOf, tokens: int, device: torch.device) -> MemoryCall:
    """Sequences of equal length, each from a token in its first page on, out of random pages."""
    manifest = mla.manifest
    page, each = manifest.cache.page_size, -(-tokens // _SEQUENCES)
    columns = _pages(manifest, each + page)
    elements, scale = _normal(manifest, device, _SEQUENCES * columns, page, manifest.d_qk), _tensor_scale(manifest)
    cache = elements
    if manifest.cache.quantised:
        form = FORMATS[manifest.cache.dtype]
        cache = torch.cat([form.quantise(*_parts(manifest, rows), scale) for rows in torch.split(elements, _CHUNK)])
        read = [form.dequantise(rows, *_widths(manifest), scale, elements.dtype) for rows in torch.split(cache, _CHUNK)]
        elements = torch.cat([torch.cat(parts, -1) for parts in read])
    table = torch.randperm(len(cache), device=device).to(torch.int32).view(_SEQUENCES, columns)
    borders = (torch.arange(_SEQUENCES + 1, device=device) * each).clamp(max=tokens).to(torch.int32)
    starts = torch.randint(0, page, (_SEQUENCES,), dtype=torch.int32, device=device)
    out = elements.new_empty((tokens, manifest.d_qk))
    options: dict[str, Any] = _scale_argument(scale, device)

    def check(got: torch.Tensor) -> str | None:
        return _same(got, gather_reference(elements, table, borders, starts, out))

    return MemoryCall(
        lambda: mla.gather(cache, table, borders, seq_starts=starts, out=out, **options),
        tokens * manifest.cache.row_bytes + _size(out) + _size(table, borders, starts),
        check,
    )


_CHUNK = 1024
"""Pages that are quantised at once, by a reference that takes many times their memory."""


def _widths(manifest: Manifest) -> tuple[int, int]:
    return manifest.d_v, manifest.d_qk - manifest.d_v


def _parts(manifest: Manifest, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return rows[..., : manifest.d_v], rows[..., manifest.d_v :]


def _tensor_scale(manifest: Manifest) -> float | None:
    """Give a tensor scale for normal numbers, if the cache has one."""
    return FORMATS[manifest.cache.dtype].tensor_scale(6.0) if manifest.cache.tensor_scale else None


def _scale_argument(scale: float | None, device: torch.device) -> dict[str, Any]:
    return {} if scale is None else {"tensor_scale": torch.tensor([scale], device=device)}


def _append(mla: MemoryKernelsOf, tokens: int, device: torch.device, *, computed: bool) -> MemoryCall:
    """Tokens of one projection's output to pages in random order; normalised and rotated on the way, or as they are."""
    manifest = mla.manifest
    rank, rope = int(manifest.model["kv_lora_rank"]), int(manifest.model["qk_rope_head_dim"])
    page, pages = manifest.cache.page_size, _pages(manifest, tokens)
    rows = _normal(manifest, device, tokens, manifest.d_qk)
    cache = rows.new_empty((pages, page, manifest.d_qk))
    if manifest.cache.quantised:
        cache = rows.new_empty((pages, page, manifest.cache.row_bytes), dtype=torch.uint8)
    places = torch.randperm(pages, device=device)[:, None] * page + torch.arange(page, device=device)
    slots = places.flatten()[:tokens].contiguous()
    c_kv, k_rope = rows[:, :rank], rows[:, rank:] if rope else None
    options: dict[str, Any] = {}
    size = _size(rows) + tokens * manifest.cache.row_bytes + _size(slots)
    if computed:
        options["norm_weight"] = _normal(manifest, device, rank)
    if computed and rope:
        turns = torch.arange(_POSITIONS, device=device)[:, None] * 1e4 ** -(
            torch.arange(rope // 2, device=device) / (rope // 2)
        )
        options["positions"] = torch.arange(tokens, device=device) % _POSITIONS
        options["cos_sin_cache"] = torch.cat([turns.cos(), turns.sin()], -1)
        options["interleaved"] = True
    size += _size(*(each for each in options.values() if isinstance(each, torch.Tensor)))

    scale = _tensor_scale(manifest)
    given = _scale_argument(scale, device)

    def run() -> torch.Tensor:
        mla.append(c_kv, k_rope, cache, slots, **options, **given)
        return cache

    def check(got: torch.Tensor) -> str | None:
        written = got.flatten(0, 1)[slots]
        if manifest.cache.quantised:
            return _quantised(manifest, written, append_reference(c_kv, k_rope, **options), scale, computed)
        return _near(written, append_reference(c_kv, k_rope, **options)) if computed else _same(written, rows)

    return MemoryCall(run, size, check)


def _merge(mla: MemoryKernelsOf, tokens: int, width: int, device: torch.device) -> MemoryCall:
    """Two results of all tokens."""
    out1, out2 = (_normal(mla.manifest, device, tokens, HEADS, width) for _ in range(2))
    lse1, lse2 = torch.randn(2, HEADS, tokens, device=device)
    out, lse = torch.empty_like(out1), torch.full_like(lse1, float("nan"))

    def check(got: torch.Tensor) -> str | None:
        want, want_lse = merge_reference(out1, lse1, out2, lse2)
        return _near(got, want) or _near(lse, want_lse)

    return MemoryCall(
        lambda: mla.merge(out1, lse1, out2, lse2, out=out, lse=lse)[0],
        3 * _size(out, lse),
        check,
    )


def _quantised(
    manifest: Manifest, written: torch.Tensor, want: torch.Tensor, scale: float | None, computed: bool
) -> str | None:
    """Compare quantised rows with tokens in float64; the rotary part of 16 bits as near as one rounding leaves it."""
    form, (rank, rope) = FORMATS[manifest.cache.dtype], _widths(manifest)
    pieces = (torch.split(tensor, 64 * _CHUNK) for tensor in (written, want))
    for rows, tokens in zip(*pieces, strict=True):
        largest = tokens.abs()
        if rope:
            largest[:, rank:] = largest[:, rank:].amax(-1, keepdim=True)
        lost = LOST * largest if computed else torch.zeros_like(tokens)
        if failures := quantised_failures(form, rows, tokens, lost, rank, scale):
            return failures[0]
        if form.layout.rope == "bf16" and rope:
            _, read = form.dequantise(rows, rank, rope, scale, torch.bfloat16)
            if failure := _near(read, tokens[:, rank:]):
                return failure
    return None


def _same(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Compare to the bit."""
    wrong = int((got.view(torch.int16) != want.contiguous().view(torch.int16)).sum())
    return f"{wrong:,} of {got.numel():,} elements are not what was copied" if wrong else None


def _near(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Compare with float64: as near as one rounding leaves it."""
    tolerance = _LOST + 2**-8 * want.abs()
    # NaN is within no tolerance.
    wrong = int((~((got.double() - want).abs() <= tolerance)).sum())
    return f"{wrong:,} of {got.numel():,} elements are not what they must be" if wrong else None
