"""Random problems of gather, append and merge against their references.

As for decode, a problem is a short text that says everything about it, what must not be read is NaN or an impossible
page number, and what must be written is NaN beforehand. What is copied must arrive to the bit; what is computed must be
the reference rounded once, but for what float32 loses on the way.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self

import torch

from mlaforge.arguments import DTYPES, cache_columns
from mlaforge.formats import FORMATS
from mlaforge.manifest import Manifest
from mlaforge.memory_reference import append_reference, gather_reference, merge_reference
from mlaforge.quantised_verify import quantised_failures
from mlaforge.verify import IMPOSSIBLE_PAGE, shrink, usable

LOST = 2.0**-20
"""What float32 may lose of the largest number that takes part in an element, as a share of it."""

_GUARD = 1024


class MemoryKernelsOf(Protocol):
    """What `mlaforge.load` returns, as far as these problems use it."""

    @property
    def manifest(self) -> Manifest:
        """What the kernels were made for."""

    def gather(
        self,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens: torch.Tensor,
        *,
        seq_starts: torch.Tensor | None = None,
        tensor_scale: torch.Tensor | None = None,
        total_tokens: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Copy cached tokens out of their pages."""

    def append(
        self,
        c_kv: torch.Tensor,
        k_rope: torch.Tensor | None,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 1e-6,
        positions: torch.Tensor | None = None,
        cos_sin_cache: torch.Tensor | None = None,
        interleaved: bool | None = None,
        tensor_scale: torch.Tensor | None = None,
    ) -> None:
        """Write tokens into their slots."""

    def merge(
        self,
        out1: torch.Tensor,
        lse1: torch.Tensor,
        out2: torch.Tensor,
        lse2: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge two partial results."""


@dataclass(frozen=True)
class Outcome:
    """What came of a problem."""

    used: float = 0.0
    """Share of its tolerance that the worst element takes; above 1 it fails. 0 for what is only copied."""
    failures: tuple[str, ...] = ()
    """What is wrong, a line each; empty if the result is accepted."""

    @property
    def ok(self) -> bool:
        """Whether the result is accepted."""
        return not self.failures


# ---- Problems --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryProblem(ABC):
    """One call. Its data follow from its fields, on the same kind of device."""

    kernel: ClassVar[str]

    seed: int = 0
    cache_layers: int = 1
    """The cache is one layer, the last, of an allocation (pages, layers, page_size, d_qk)."""
    spare_pages: int = 1
    """Pages of the cache that nobody needs."""
    cache_4d: bool = False
    """The cache is passed with a dimension of one head."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning with a ValueError."""
        for name, least in (("cache_layers", 1), ("spare_pages", 0)):
            _at_least(self, name, least)

    def __str__(self) -> str:
        """Give the text that `parse_problem` reads: the kernel, then the fields that differ from their default."""
        words = [self.kernel]
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if value != each.default:
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(int(value))
                words.append(f"{each.name}={text}")
        return " ".join(words)

    def to_repro(self, spec: str) -> str:
        """Give the command line that replays exactly this problem; `spec` is a spec's name or path."""
        return f"mlaforge verify {shlex.quote(spec)} --problem {shlex.quote(str(self))}"

    @classmethod
    @abstractmethod
    def random(cls, rng: random.Random, manifest: Manifest, max_tokens: int) -> Self:
        """Draw a problem, mostly one at an edge."""

    @abstractmethod
    def run(self, mla: MemoryKernelsOf, device: str | torch.device) -> Outcome:
        """Make the tensors, call the kernel and judge the result."""

    def simpler(self) -> Iterator[Self]:
        """Give problems that are simpler by one step."""
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.name != "seed" and value != each.default:
                yield from self._changed(**{each.name: each.default})
                if isinstance(value, int) and not isinstance(value, bool):
                    for smaller in sorted({value // 4, value // 2, value * 3 // 4, value - 1} - {value}):
                        yield from self._changed(**{each.name: smaller})

    def _changed(self, **fields: object) -> Iterator[Self]:
        try:
            changed = dataclasses.replace(self, **fields)  # type: ignore[arg-type]
        except ValueError:
            return
        if changed != self:
            yield changed

    def _cache(self, pages: int, manifest: Manifest, device: str | torch.device) -> torch.Tensor:
        """Give a cache of NaN, (pages, page_size, d_qk), or a layer of one. No result is poisoned with this NaN.

        Of quantised rows all bits are set, which is NaN in every format.
        """
        shape = (pages, self.cache_layers, manifest.cache.page_size, cache_columns(manifest.cache, manifest.d_qk))
        if manifest.cache.quantised:
            return torch.full(shape, 0xFF, dtype=torch.uint8, device=device)[:, -1]
        return torch.full(shape, 0x7FFF, dtype=torch.int16, device=device).view(DTYPES[manifest.element])[:, -1]

    def _passed(self, cache: torch.Tensor) -> torch.Tensor:
        return cache.unsqueeze(2) if self.cache_4d else cache


def _tensor_scale(
    manifest: Manifest, generator: torch.Generator, device: str | torch.device
) -> tuple[float | None, torch.Tensor | None]:
    """Draw a tensor scale from 2^-7 to 100, if the cache has one: as a number, and as calls take it."""
    if not manifest.cache.tensor_scale:
        return None, None
    scale = torch.exp2(torch.rand(1, generator=generator, device=device) * (7 + math.log2(100)) - 7)
    return float(scale), scale


def _at_least(problem: MemoryProblem, name: str, least: int) -> None:
    if getattr(problem, name) < least:
        raise ValueError(f"{name} must be at least {least}; got {getattr(problem, name)}")


@dataclass(frozen=True)
class GatherProblem(MemoryProblem):
    """Ranges of cached tokens."""

    kernel: ClassVar[str] = "gather"

    counts: tuple[int, ...] = (1,)
    """Tokens of each sequence that are copied."""
    starts: tuple[int, ...] = ()
    """The first of them; without any, all begin at 0 and the call is not told."""
    extra_rows: int = 0
    """Rows of the result that no sequence has."""
    out_padding: int = 0
    """Pieces of 16 bytes that lie between the result's rows."""
    table_extra_columns: int = 0
    table_padding: int = 0
    table_filler: int = IMPOSSIBLE_PAGE
    any_bytes: bool = False
    """The rows of a quantised cache are of any bytes, as nobody would have written them."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning with a ValueError."""
        super().__post_init__()
        for name in ("extra_rows", "out_padding", "table_extra_columns", "table_padding"):
            _at_least(self, name, 0)
        if not self.counts or min(self.counts) < 0:
            raise ValueError(f"counts must be one or more, each at least 0; got {self.counts}")
        if self.starts and (len(self.starts) != len(self.counts) or min(self.starts) < 0):
            raise ValueError(f"starts must be none, or one for each of counts and at least 0; got {self.starts}")

    @classmethod
    def random(cls, rng: random.Random, manifest: Manifest, max_tokens: int) -> Self:
        """Draw ranges that begin and end about the borders of pages."""
        page = manifest.cache.page_size
        edges = [0, 0, 1, 2, *(n * page + d for n in (1, 2, 3) for d in (-1, 0, 1))]
        match rng.choice(("edges", "edges", "long", "many")):
            case "edges":
                counts = [rng.choice(edges) for _ in range(rng.randint(1, 9))]
            case "long":
                counts = [rng.randint(0, max_tokens // 2) for _ in range(rng.randint(1, 3))]
            case _:
                counts = [rng.choice((0, 1, 1, 2, 5)) for _ in range(rng.randint(10, 70))]
        sums = itertools.accumulate(counts)
        counts = [count if total <= max_tokens else 0 for count, total in zip(counts, sums, strict=True)]
        starts = [rng.choice((*edges, rng.randint(0, 10 * page))) for _ in counts] if rng.random() < 0.7 else []
        return cls(
            seed=rng.randrange(1 << 31),
            cache_layers=rng.choice((1, 1, 1, 3)),
            spare_pages=rng.choice((0, 1, 7)),
            cache_4d=rng.random() < 0.3,
            counts=tuple(counts),
            starts=tuple(starts),
            extra_rows=rng.choice((0, 0, 1, 33)),
            out_padding=rng.choice((0, 0, 1)),
            table_extra_columns=rng.choice((0, 0, 1, 9)),
            table_padding=rng.choice((0, 0, 5)),
            table_filler=rng.choice((IMPOSSIBLE_PAGE, IMPOSSIBLE_PAGE, -1)),
            any_bytes=manifest.cache.quantised and rng.random() < 0.4,
        )

    def simpler(self) -> Iterator[Self]:
        """Give problems that are simpler by one step: fewer sequences, shorter ones, then the other fields."""
        starts = self.starts or (0,) * len(self.counts)
        for size in (len(self.counts) // 2, 1):
            for begin in range(0, len(self.counts), size) if 0 < size < len(self.counts) else ():
                keep = [i for i in range(len(self.counts)) if not begin <= i < begin + size]
                fewer = tuple(self.counts[i] for i in keep)
                yield from self._changed(counts=fewer, starts=tuple(starts[i] for i in keep) if self.starts else ())
        for name in ("counts", "starts"):
            values = getattr(self, name)
            for i, value in enumerate(values):
                for smaller in sorted({0, value // 2, value - 1} - {value, -1}):
                    yield from self._changed(**{name: (*values[:i], smaller, *values[i + 1 :])})
        yield from super().simpler()

    def run(self, mla: MemoryKernelsOf, device: str | torch.device) -> Outcome:
        """Copy, and compare to the bit."""
        manifest, generator = mla.manifest, torch.Generator(device).manual_seed(self.seed)
        page, d_qk = manifest.cache.page_size, manifest.d_qk
        starts = self.starts or (0,) * len(self.counts)
        needed = [
            range(start // page, -(-(start + count) // page)) if count else range(0)
            for start, count in zip(starts, self.counts, strict=True)
        ]
        pages = max(sum(map(len, needed)) + self.spare_pages, 1)
        order = torch.randperm(pages, generator=generator, device=device).int()
        width = max(1, *(columns.stop for columns in needed)) + self.table_extra_columns
        size = (len(self.counts), width + self.table_padding)
        table = torch.full(size, self.table_filler, dtype=torch.int32, device=device)[:, :width]
        cache = self._cache(pages, manifest, device)
        scale, tensor_scale = _tensor_scale(manifest, generator, device)
        used = 0
        for i, (start, count, columns) in enumerate(zip(starts, self.counts, needed, strict=True)):
            table[i, columns.start : columns.stop] = order[used : used + len(columns)]
            used += len(columns)
            tokens = torch.arange(start, start + count, device=device)
            values = torch.randn((count, d_qk), generator=generator, device=device)
            rows = self._rows(values, manifest, scale, generator)
            cache[table[i, tokens // page].long(), tokens % page] = rows
        borders = list(itertools.accumulate(self.counts, initial=0))
        cu_seqlens = torch.tensor(borders, dtype=torch.int32, device=device)
        seq_starts = torch.tensor(self.starts, dtype=torch.int32, device=device) if self.starts else None
        rows_of_out = borders[-1] + self.extra_rows
        apart = d_qk + 8 * self.out_padding
        dtype = DTYPES[manifest.element]
        memory = torch.full((_GUARD + rows_of_out * apart + _GUARD,), math.nan, dtype=dtype, device=device)
        out = memory[_GUARD:-_GUARD].view(rows_of_out, apart)[:, :d_qk]
        wanted = memory.clone()
        of_rows = wanted[_GUARD:-_GUARD].view(rows_of_out, apart)[:, :d_qk]
        elements = cache
        if manifest.cache.quantised:
            read = FORMATS[manifest.cache.dtype].dequantise(cache, manifest.d_v, d_qk - manifest.d_v, scale, dtype)
            elements = torch.cat(read, -1)
        of_rows.copy_(gather_reference(elements, table, cu_seqlens, seq_starts, out))
        passed = self._passed(cache)
        error = _error_of(
            lambda: mla.gather(passed, table, cu_seqlens, seq_starts=seq_starts, tensor_scale=tensor_scale, out=out),
            device,
        )
        if error is not None:
            return Outcome(math.inf, (error,))
        if manifest.cache.quantised:
            # What is NaN may be any NaN.
            of_rows.copy_(out.where(out.isnan() & of_rows.isnan(), of_rows))
        return Outcome(0.0, _different("out", out, of_rows) or _different("memory beside out", memory, wanted))

    def _rows(
        self, values: torch.Tensor, manifest: Manifest, scale: float | None, generator: torch.Generator
    ) -> torch.Tensor:
        """Give tokens as the cache has them."""
        if not manifest.cache.quantised:
            return values.to(DTYPES[manifest.element])
        if self.any_bytes:
            size = (len(values), manifest.cache.row_bytes)
            return torch.randint(0, 256, size, generator=generator, device=values.device, dtype=torch.uint8)
        values = values * (30 * (scale or 1.0))
        return FORMATS[manifest.cache.dtype].quantise(values[:, : manifest.d_v], values[:, manifest.d_v :], scale)


@dataclass(frozen=True)
class AppendProblem(MemoryProblem):
    """New tokens."""

    kernel: ClassVar[str] = "append"

    tokens: int = 1
    norm: bool = False
    rotate: int = 0
    """0: not; 1: neighbours are pairs; 2: pairs are half of the elements apart."""
    left_out: int = 0
    """Of how many tokens one has no slot; 0: all have one."""
    foreign_slots: bool = False
    """Slots behind the cache's last take the place of -1."""
    foreign_positions: bool = False
    """Some positions are not in the table."""
    long_slots: bool = False
    long_positions: bool = False
    one_projection: bool = False
    """c_kv and k_rope are parts of rows that hold something before them, too."""
    gain: int = 1
    """Factor of c_kv, a power of two."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning with a ValueError."""
        super().__post_init__()
        for name, least in (("tokens", 0), ("left_out", 0), ("rotate", 0), ("gain", 1)):
            _at_least(self, name, least)
        if self.rotate > 2:
            raise ValueError(f"rotate must be 0, 1 or 2; got {self.rotate}")

    @classmethod
    def random(cls, rng: random.Random, manifest: Manifest, max_tokens: int) -> Self:
        """Draw a number of tokens about the borders of warps and blocks, and any of the options."""
        tokens = rng.choice((0, 1, 2, 3, 15, 16, 17, 33, rng.randint(1, max(max_tokens // 4, 1))))
        return cls(
            seed=rng.randrange(1 << 31),
            cache_layers=rng.choice((1, 1, 3)),
            spare_pages=rng.choice((0, 1, 7)),
            cache_4d=rng.random() < 0.3,
            tokens=min(tokens, max_tokens),
            norm=rng.random() < 0.6,
            rotate=rng.choice((0, 1, 1, 2, 2)) if manifest.model["qk_rope_head_dim"] else 0,
            left_out=rng.choice((0, 0, 1, 2, 5)),
            foreign_slots=rng.random() < 0.3,
            foreign_positions=rng.random() < 0.2,
            long_slots=rng.random() < 0.5,
            long_positions=rng.random() < 0.5,
            one_projection=rng.random() < 0.5,
            gain=rng.choice((1, 1, 1, 64)),
        )

    def run(self, mla: MemoryKernelsOf, device: str | torch.device) -> Outcome:
        """Write, and compare the written slots with float64, all else to the bit."""
        manifest, generator = mla.manifest, torch.Generator(device).manual_seed(self.seed)
        dtype = DTYPES[manifest.element]
        rank, rope_dim = int(manifest.model["kv_lora_rank"]), int(manifest.model["qk_rope_head_dim"])
        page, n = manifest.cache.page_size, self.tokens

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        before = 8 if self.one_projection else 0
        rows = normal(n, before + rank + rope_dim).to(dtype)
        rows[:, before : before + rank] *= self.gain
        c_kv, k_rope = rows[:, before : before + rank], rows[:, before + rank :]
        if not self.one_projection:
            c_kv, k_rope = c_kv.clone(), k_rope.clone()
        cache = self._cache(-(-n // page) + max(self.spare_pages, 1), manifest, device)
        places = cache.shape[0] * page
        slots = torch.randperm(places, generator=generator, device=device)[:n]
        if self.left_out:
            nobody = places + 3 if self.foreign_slots else -1
            slots[:: self.left_out] = nobody
        weight = normal(rank).to(dtype) if self.norm else None
        positions = angles = None
        if self.rotate:
            frequencies = 10_000.0 ** -(torch.arange(0, rope_dim, 2, device=device) / rope_dim)
            turns = torch.arange(512, device=device)[:, None] * frequencies
            # A factor, as yarn's attention factor is one.
            angles = torch.cat([turns.cos(), turns.sin()], -1) * 1.25
            positions = torch.randint(0, 512, (n,), generator=generator, device=device)
            if self.foreign_positions:
                positions[::3] = 512
                positions[1::7] = -1
            positions = positions.long() if self.long_positions else positions.int()
        scale, tensor_scale = _tensor_scale(manifest, generator, device)
        wanted = cache.clone()
        error = _error_of(
            lambda: mla.append(
                c_kv,
                k_rope if rope_dim else None,
                self._passed(cache),
                slots.long() if self.long_slots else slots.int(),
                norm_weight=weight,
                eps=1e-5,
                positions=positions,
                cos_sin_cache=angles,
                interleaved=self.rotate == 1 if self.rotate else None,
                tensor_scale=tensor_scale,
            ),
            device,
        )
        if error is not None:
            return Outcome(math.inf, (error,))
        reference = append_reference(
            c_kv,
            k_rope if rope_dim else None,
            norm_weight=weight,
            eps=1e-5,
            positions=positions,
            cos_sin_cache=angles,
            interleaved=self.rotate == 1,
        )
        kept = (slots >= 0) & (slots < places)
        block, place = slots[kept] // page, slots[kept] % page
        # Of a rotated element the largest number that takes part is about that of its pair, of others the element.
        largest = reference.abs()
        if self.rotate:
            largest[:, rank:] = 1.25 * k_rope.double().abs().amax(-1, keepdim=True)
        written, reference, largest = cache[block, place], reference[kept], largest[kept]
        if manifest.cache.quantised:
            outcome = self._judged(written, reference, largest, manifest, scale)
        else:
            outcome = _rounded("the cache", written, reference, largest, dtype)
        wanted[block, place] = written
        return Outcome(outcome.used, outcome.failures or _different("slots that no token has", cache, wanted))

    def _judged(
        self,
        rows: torch.Tensor,
        reference: torch.Tensor,
        largest: torch.Tensor,
        manifest: Manifest,
        scale: float | None,
    ) -> Outcome:
        """Judge quantised rows: to the bit what is neither normalised nor rotated."""
        form, rank = FORMATS[manifest.cache.dtype], manifest.d_v
        lost = LOST * largest
        lost[:, :rank] *= self.norm
        lost[:, rank:] *= self.rotate > 0
        failures = tuple(quantised_failures(form, rows, reference, lost, rank, scale))
        if form.layout.rope != "bf16" or reference.shape[1] == rank:
            return Outcome(0.0, failures)
        _, rope = form.dequantise(rows, rank, reference.shape[1] - rank, scale, torch.bfloat16)
        outcome = _rounded("the rotary part", rope, reference[:, rank:], largest[:, rank:], torch.bfloat16)
        return Outcome(outcome.used, failures + outcome.failures)


@dataclass(frozen=True)
class MergeProblem(MemoryProblem):
    """Partial results."""

    kernel: ClassVar[str] = "merge"

    tokens: int = 1
    """Query tokens, of each request if there are any."""
    heads: int = 1
    width: int = 8
    """Elements of a row."""
    batch: int = 0
    """Requests; 0: the tensors have no such dimension."""
    in_place: int = 0
    """0: the result is new; 1, 2: it is that partial result itself."""
    strided: bool = False
    """Rows lie apart, and lse the other way around."""
    spread: int = 4
    """Standard deviation of lse."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning with a ValueError."""
        super().__post_init__()
        for name, least in (("tokens", 0), ("heads", 1), ("width", 8), ("batch", 0), ("in_place", 0), ("spread", 0)):
            _at_least(self, name, least)
        if self.width % 8 or self.width > 1024:
            raise ValueError(f"width must be a multiple of 8 up to 1024; got {self.width}")
        if self.in_place > 2:
            raise ValueError(f"in_place must be 0, 1 or 2; got {self.in_place}")

    @classmethod
    def random(cls, rng: random.Random, manifest: Manifest, max_tokens: int) -> Self:
        """Draw the width of a value or of a latent, or any other, and numbers of rows that do not fill a warp."""
        width = rng.choice(
            (manifest.d_v, int(manifest.model["v_head_dim"]) // 8 * 8 or 8, 8, 24, 64, 72, 192, 256, 1024)
        )
        heads = rng.choice((1, 2, 3, 5, 16, 20, 128))
        most = max(max_tokens * 64 // (heads * width), 1)
        return cls(
            seed=rng.randrange(1 << 31),
            tokens=rng.choice((0, 1, 2, 3, min(most, 9), rng.randint(1, most))),
            heads=heads,
            width=width,
            batch=rng.choice((0, 0, 1, 3)) if most >= 3 else 0,
            in_place=rng.choice((0, 0, 1, 2)),
            strided=rng.random() < 0.4,
            spread=rng.choice((4, 4, 0, 1000)),
        )

    def run(self, mla: MemoryKernelsOf, device: str | torch.device) -> Outcome:
        """Merge, and compare with float64."""
        dtype = DTYPES[mla.manifest.element]
        generator = torch.Generator(device).manual_seed(self.seed)
        batch = (self.batch,) if self.batch else ()
        apart = 8 if self.strided else 0
        rows = math.prod(batch) * self.tokens * self.heads
        # All nine combinations of finite, -inf and +inf, in an order of their own; the first is of two finite ones.
        kinds = torch.arange(rows, device=device) % 9
        if rows > 9:
            kinds = kinds[torch.randperm(rows, generator=generator, device=device)]

        def partial(kind: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            shape = (*batch, self.tokens, self.heads, self.width + apart)
            out = torch.randn(shape, generator=generator, device=device).to(dtype)[..., : self.width]
            lse = torch.randn(rows, generator=generator, device=device) * self.spread
            lse = lse.where(kind == 0, math.inf).where(kind != 1, -math.inf).view(*batch, self.tokens, self.heads)
            # Garbage where there is nothing.
            out.masked_fill_(lse.isinf().unsqueeze(-1), math.nan)
            lse = lse.transpose(-1, -2)
            return out, lse if self.strided else lse.contiguous()

        (out1, lse1), (out2, lse2) = partial(kinds % 3), partial(kinds // 3)
        reference, reference_lse = merge_reference(out1, lse1, out2, lse2)
        largest = torch.maximum(out1.double().abs().nan_to_num(), out2.double().abs().nan_to_num())
        out, lse = [(None, None), (out1, lse1), (out2, lse2)][self.in_place]
        memory = None
        if out is None or lse is None:
            memory = torch.full((_GUARD + rows * self.width + _GUARD,), math.nan, dtype=dtype, device=device)
            out = memory[_GUARD:-_GUARD].view(*batch, self.tokens, self.heads, self.width)
            lse = torch.full((*batch, self.heads, self.tokens), math.nan, device=device)
        error = _error_of(lambda: mla.merge(out1, lse1, out2, lse2, out=out, lse=lse), device)
        if error is not None:
            return Outcome(math.inf, (error,))
        of_out = _rounded("out", out, reference, largest, dtype)
        # An lse of 0 is no number to measure by.
        of_lse = _rounded("lse", lse, reference_lse, reference_lse.abs() + 1, torch.float32)
        beside: tuple[str, ...] = ()
        if memory is not None and not (memory[:_GUARD].isnan().all() and memory[-_GUARD:].isnan().all()):
            beside = ("memory beside out was written to",)
        return Outcome(max(of_out.used, of_lse.used), (*of_out.failures, *of_lse.failures, *beside))


KINDS: dict[str, type[MemoryProblem]] = {kind.kernel: kind for kind in (GatherProblem, AppendProblem, MergeProblem)}
"""The problems of each kernel."""


def parse_problem(text: str) -> MemoryProblem:
    """Read what `str` gave. ValueError says which word is wrong."""
    kernel, *words = text.split()
    kind = KINDS[kernel]
    known = {each.name: each for each in dataclasses.fields(kind)}
    values: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            raise ValueError(
                f"{word!r} is no field of a problem of {kernel}: they are {', '.join(known)}, as name=value"
            )
        if name in values:
            raise ValueError(f"{name} is given twice")
        default = known[name].default
        try:
            numbers = [int(number) for number in value.split(",")]
        except ValueError:
            raise ValueError(f"{word!r}: {value!r} is not a number or numbers") from None
        if isinstance(default, tuple):
            values[name] = tuple(numbers)
        elif len(numbers) > 1:
            raise ValueError(f"{word!r}: {name} is one number")
        else:
            values[name] = bool(numbers[0]) if isinstance(default, bool) else numbers[0]
    return kind(**values)  # type: ignore[arg-type]


def is_memory_problem(text: str) -> bool:
    """Whether a problem's text is of one of these kernels, whose name is its first word."""
    return text.split(" ", 1)[0] in KINDS


def random_problems(manifest: Manifest, count: int, seed: int, max_tokens: int) -> list[MemoryProblem]:
    """Draw `count` problems of each kernel of a manifest; the same for the same arguments."""
    problems = []
    for name, kind in KINDS.items():
        if name in manifest.kernels:
            rng = random.Random(f"{name} {seed}")
            problems += [kind.random(rng, manifest, max_tokens) for _ in range(count)]
    return problems


# ---- Judgement -------------------------------------------------------------------------------------------------------


def _error_of(call: Callable[[], object], device: str | torch.device) -> str | None:
    """Run a call to its end; its exception as text, if it ends in one."""
    try:
        call()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)  # so that a fault of the kernel shows here
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _different(name: str, got: torch.Tensor, want: torch.Tensor) -> tuple[str, ...]:
    """Compare to the bit, NaN included."""
    bits = {1: torch.uint8, 2: torch.int16}[got.element_size()]
    wrong = got.contiguous().view(bits) != want.contiguous().view(bits)
    if not wrong.any():
        return ()
    at = tuple(int(i) for i in wrong.nonzero()[0])
    return (
        f"{name}: {int(wrong.sum()):,} of {wrong.numel():,} elements differ, first at {list(at)} "
        f"({got[at].item():.6g}, not {want[at].item():.6g})",
    )


def _rounded(name: str, got: torch.Tensor, want: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> Outcome:
    """Compare with a float64 reference that was rounded once to `dtype`, `largest` being the numbers it came from."""
    x, y = got.double(), want.double()
    failures = []
    for what, special in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = special(x) != special(y.to(dtype))
        if wrong.any():
            failures.append(_where(name, wrong, x, y, f"{what} in one and not in the other"))
    finite = x.isfinite() & y.isfinite()
    x, y, largest = x.where(finite, 0.0), y.where(finite, 0.0), largest.where(finite, 0.0)
    info = torch.finfo(dtype)
    # Half a unit in the last place, or of the least number that there is.
    power = torch.ldexp(torch.ones_like(y), torch.frexp(y).exponent - 1)
    tolerance = power.clamp(min=info.smallest_normal) * info.eps / 2
    used = (x - y).abs() / (tolerance + LOST * largest)
    if (used > 1).any():
        failures.append(_where(name, used > 1, x, y, "beyond the tolerance"))
    return Outcome(float(used.max()) if used.numel() else 0.0, tuple(failures))


def _where(name: str, wrong: torch.Tensor, x: torch.Tensor, y: torch.Tensor, what: str) -> str:
    at = tuple(int(i) for i in wrong.nonzero()[0])
    first = f"first at {list(at)} ({x[at]:.6g}, not {y[at]:.6g})"
    return f"{name}: {int(wrong.sum()):,} of {wrong.numel():,} elements, {first}, {what}"


# ---- The whole -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryFailure:
    """A problem whose result was not accepted."""

    found: MemoryProblem
    problem: MemoryProblem
    """The same made as small as it still fails."""
    outcome: Outcome
    """Of the small one."""


@dataclass
class MemoryReport:
    """What came of a verification: how many problems of each kernel ran, the worst of them, and the first failure."""

    counts: dict[str, int] = field(default_factory=dict)
    used: dict[str, float] = field(default_factory=dict)
    failure: MemoryFailure | None = None

    @property
    def problems(self) -> int:
        """Problems that ran."""
        return sum(self.counts.values())


def verify_problems(
    mla: MemoryKernelsOf,
    problems: Iterable[MemoryProblem],
    progress: Callable[[MemoryProblem], None] | None = None,
    *,
    device: str | torch.device = "cuda",
) -> MemoryReport:
    """Run problems until one fails, which is then shrunk. `progress` is called with each before it runs.

    Nothing is shrunk where a fault of the kernel has left the device unusable.
    """
    report = MemoryReport()
    for problem in problems:
        if progress is not None:
            progress(problem)
        outcome = problem.run(mla, device)
        report.counts[problem.kernel] = report.counts.get(problem.kernel, 0) + 1
        report.used[problem.kernel] = max(report.used.get(problem.kernel, 0.0), outcome.used)
        if not outcome.ok:
            small = shrink(problem, lambda candidate: usable(device) and not candidate.run(mla, device).ok)
            if small != problem and usable(device):
                outcome = small.run(mla, device)
            report.failure = MemoryFailure(problem, small, outcome)
            break
    return report
