"""Random decode problems against the float64 reference, by the acceptance criteria of FlashMLA's own tests.

A problem is a short text that says everything about it, so that a failure can be replayed; a failing one is first made
as small as it can be. What a kernel must not read is NaN or an impossible page number, and what it must write is NaN
beforehand.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

import torch

from mlaforge.arguments import DTYPES
from mlaforge.formats import FORMATS
from mlaforge.manifest import Manifest
from mlaforge.reference import cosine_difference, decode_reference

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OUT_ABS_TOLERANCE = 8e-4
OUT_REL_TOLERANCE = 2.01 / 128
OUT_COSINE_TOLERANCE = 5e-6
LSE_ABS_TOLERANCE = 1e-6
LSE_REL_TOLERANCE = 8.01 / 65536

LARGEST_POWER = 2
"""Of two, that latents of a quantised cache are multiplied with."""

IMPOSSIBLE_PAGE = 2_147_480_000
"""What FlashMLA's tests write in table entries that no token needs."""


class Shrinkable(Protocol):
    """A problem of any kernel."""

    def simpler(self) -> Iterable[Self]:
        """Give problems that are simpler by one step, the large steps first."""


class Judged(Shrinkable, Protocol):
    """A problem of a kernel that is judged by these criteria."""

    @property
    def kind(self) -> str:
        """The row of a report's table that the problem counts for."""


_S = TypeVar("_S", bound=Shrinkable)
_J = TypeVar("_J", bound=Judged)

# Elements around `out` and `lse` that must stay as they are; a multiple of any alignment asked for.
_GUARD = 1024
_SHRINK_RUNS = 200
# Of all requests of a random problem: float64 copies of `out` then take 270 MB each, at d_v = 512.
_MAX_ROWS = 1 << 16


class Decoder(Protocol):
    """What `mlaforge.load` returns, as far as verification uses it."""

    @property
    def manifest(self) -> Manifest:
        """What the kernel was made for."""

    def decode(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        *,
        tensor_scale: torch.Tensor | None = None,
        causal: bool = False,
        softmax_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Absorbed attention over the paged cache."""


# ---- Problems --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """One decode call. Its data follow from its fields, on the same kind of device."""

    lengths: tuple[int, ...]
    """Tokens of each request."""
    s_q: int = 1
    h_q: int = 1
    h_kv: int = 1
    causal: bool = False
    seed: int = 0
    softmax_scale: float = 0.0
    """0 leaves it to the kernel's own."""
    table_extra_columns: int = 0
    """Columns of the block table that no request needs."""
    table_padding: int = 0
    """Columns that lie between the table's rows in memory, beyond its width."""
    table_filler: int = IMPOSSIBLE_PAGE
    """What table entries hold that no token needs."""
    spare_pages: int = 1
    """Pages of the cache that no request has."""
    cache_layers: int = 1
    """The cache is one layer, the last, of an allocation (pages, layers, page_size, h_kv, d_qk)."""
    cache_3d: bool = False
    """The cache is passed without its dimension of heads."""
    q_gain: int = 1
    """Factor of q, a power of two: 1 gives almost uniform weights, as in FlashMLA's tests, 32 peaked ones."""
    logit_shift: int = 0
    """Added to every raw score, through the last column of q and K; a multiple of 256."""
    nan_request: int = -1
    """A request one of whose own tokens is NaN, which must stay in it; -1 if none."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning with a ValueError."""
        if not self.lengths or min(self.lengths) < 0:
            raise ValueError(f"lengths must be one or more, each at least 0; got {self.lengths}")
        counts = ("s_q", "h_q", "h_kv", "cache_layers", "q_gain")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name in ("table_extra_columns", "table_padding", "spare_pages"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0; got {getattr(self, name)}")
        if self.h_q % self.h_kv:
            raise ValueError(f"h_kv must divide h_q; got {self.h_kv} and {self.h_q}")
        if self.cache_3d and self.h_kv > 1:
            raise ValueError(f"cache_3d has no dimension for h_kv = {self.h_kv}")
        if self.logit_shift % 256:
            raise ValueError(f"logit_shift must be a multiple of 256; got {self.logit_shift}")
        if not -1 <= self.nan_request < self.batch:
            raise ValueError(f"nan_request must be -1 or a request of {self.batch}; got {self.nan_request}")

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Cached tokens of all requests."""
        return sum(self.lengths)

    @property
    def kind(self) -> str:
        """The row of a report's table that the problem counts for."""
        if self.nan_request >= 0:
            return "NaN in a request"
        shortest = self.s_q if self.causal else 1
        if min(self.lengths) < shortest:
            return "rows without a token"
        if self.causal and self.s_q > 1:
            return "causal"
        return "long, 4,096 tokens and more" if max(self.lengths) >= 4096 else "short"

    def __str__(self) -> str:
        """Give the text that `parse` reads: fields that differ from their default, lengths with repeats counted."""
        return shown_fields(self, ("lengths",))

    @classmethod
    def parse(cls, text: str) -> Problem:
        """Read what `str` gave. ValueError says which word is wrong."""
        values = parse_fields(cls, text.split(), ("lengths",))
        if "lengths" not in values:
            raise ValueError("a problem needs lengths=, as in lengths=1,64x3,0")
        return cls(**values)  # type: ignore[arg-type]

    def to_repro(self, spec: str) -> str:
        """Give the command line that replays exactly this problem; `spec` is a spec's name or path."""
        return f"mlaforge verify {shlex.quote(spec)} --problem {shlex.quote(str(self))}"

    def simpler(self) -> Iterator[Problem]:
        """Give problems that are simpler by one step, the large steps first."""

        def change(**fields: object) -> Iterator[Problem]:
            # What a step makes impossible, such as heads that no longer divide, is no step.
            try:
                candidate = dataclasses.replace(self, **fields)  # type: ignore[arg-type]
            except ValueError:
                return
            if candidate != self:
                yield candidate

        for lengths in fewer(self.lengths):
            yield from change(lengths=lengths, nan_request=-1)
            yield from change(lengths=lengths)
        for each in dataclasses.fields(self):
            if each.name not in {"lengths", "s_q", "h_q", "seed"}:
                yield from change(**{each.name: each.default})
        for smaller in lower(self.s_q, 1):
            yield from change(s_q=smaller)
        for smaller in lower(self.h_q, 1):
            yield from change(h_q=smaller)
            yield from change(h_q=smaller, h_kv=1)
        yield from change(lengths=tuple(length // 2 for length in self.lengths))
        for i, length in enumerate(self.lengths):
            for smaller in lower(length, 0):
                yield from change(lengths=(*self.lengths[:i], smaller, *self.lengths[i + 1 :]))


def shown_fields(problem: DataclassInstance, lengths: Collection[str]) -> str:
    """Write the fields of a problem that differ from their default as name=value; those in `lengths` always."""
    words = []
    for each in dataclasses.fields(problem):
        value = getattr(problem, each.name)
        if each.name in lengths:
            words.append(f"{each.name}={_shown_lengths(value)}")
        elif value != each.default:
            words.append(f"{each.name}={int(value) if isinstance(value, bool) else value}")
    return " ".join(words)


def parse_fields(
    kind: type[DataclassInstance], words: Iterable[str], lengths: Collection[str]
) -> dict[str, float | tuple[int, ...]]:
    """Read the words that `shown_fields` gave of a problem of a kind. ValueError says which one is wrong."""
    known = {each.name: each for each in dataclasses.fields(kind)}
    values: dict[str, float | tuple[int, ...]] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            raise ValueError(f"{word!r} is no field of a problem: they are {', '.join(known)}, as name=value")
        if name in values:
            raise ValueError(f"{name} is given twice")
        try:
            values[name] = _parse_lengths(value) if name in lengths else _parse_number(value, known[name].type)
        except ValueError:
            form = "as in 1,64x3,0" if name in lengths else "a number"
            raise ValueError(f"{word!r}: {value!r} is not {form}") from None
    return values


def _parse_number(text: str, kind: object) -> float:
    return float(text) if kind == "float" else bool(int(text)) if kind == "bool" else int(text)


def _shown_lengths(lengths: Iterable[int]) -> str:
    runs = [(length, len(list(group))) for length, group in itertools.groupby(lengths)]
    return ",".join(str(n) if count == 1 else f"{n}x{count}" for n, count in runs)


def _parse_lengths(text: str) -> tuple[int, ...]:
    lengths: list[int] = []
    for run in text.split(","):
        length, times, count = run.partition("x")
        lengths += [int(length)] * (int(count) if times else 1)
    return tuple(lengths)


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, and the poisoned ones that it must fill."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    guards: tuple[torch.Tensor, ...] = field(repr=False)
    """The memory before and behind `out` and `lse`, all NaN."""
    tensor_scale: torch.Tensor | None = None
    """Of a quantised cache that has one."""

    def elements(self, manifest: Manifest) -> torch.Tensor:
        """Give the cache as elements: what the rows of a quantised one stand for, as float32."""
        return elements_of(self.kv_cache, manifest, self.tensor_scale, torch.float32)


def elements_of(
    kv_cache: torch.Tensor, manifest: Manifest, tensor_scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Give a cache as elements: what the rows of a quantised one stand for, rounded to a dtype; another as it is."""
    if not manifest.cache.quantised:
        return kv_cache
    scale = None if tensor_scale is None else float(tensor_scale)
    form, rank = FORMATS[manifest.cache.dtype], manifest.d_v
    return torch.cat(form.dequantise(kv_cache, rank, manifest.d_qk - rank, scale, dtype), dim=-1)


def make_inputs(problem: Problem, manifest: Manifest, device: str | torch.device) -> Inputs:
    """Make the tensors of a problem as FlashMLA's tests do: normal values / 10, pages in random order.

    Cache slots that no token has are NaN, table entries that no token needs hold `problem.table_filler`, and what the
    call must write is NaN. Tokens of a quantised cache are larger and smaller than that by powers of two, and so are
    their scales; a tensor scale may be such that some of them saturate.
    """
    generator = torch.Generator(device).manual_seed(problem.seed)
    dtype = DTYPES[manifest.element]
    page_size, d_qk = manifest.cache.page_size, manifest.d_qk
    b, s_q, h_q, h_kv = problem.batch, problem.s_q, problem.h_q, problem.h_kv

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).div_(10).clamp_(-1, 1)

    q = normal(b, s_q, h_q, d_qk).mul_(problem.q_gain).to(dtype)
    if problem.logit_shift:
        q[..., -1] = problem.logit_shift // 256

    lengths = torch.tensor(problem.lengths, dtype=torch.int32, device=device)
    pages = [-(-length // page_size) for length in problem.lengths]
    first_page = list(itertools.accumulate(pages, initial=0))
    num_blocks = max(first_page[-1] + problem.spare_pages, 1)
    order = torch.randperm(num_blocks, generator=generator, device=device).int()
    width = max(1, *pages) + problem.table_extra_columns
    table = torch.full((b, width + problem.table_padding), problem.table_filler, dtype=torch.int32, device=device)
    for i, count in enumerate(pages):
        table[i, :count] = order[first_page[i] : first_page[i] + count]
    block_table = table[:, :width]

    quantised = manifest.cache.quantised
    shape = (num_blocks, problem.cache_layers, page_size, h_kv, manifest.cache.row_bytes if quantised else d_qk)
    # All bits set are NaN in every format.
    cache = torch.full(shape, 0xFF if quantised else math.nan, dtype=torch.uint8 if quantised else dtype, device=device)
    cache = cache[:, -1]
    scale = tensor_scale = None
    if manifest.cache.tensor_scale:
        # Of the largest values 1/64 of the range, or 4 times what there is.
        share = float(torch.exp2(torch.rand(1, generator=generator, device=device) * 8 - 6))
        scale = FORMATS[manifest.cache.dtype].tensor_scale(share)
        tensor_scale = torch.tensor([scale], dtype=torch.float32, device=device)
    for i, length in enumerate(problem.lengths):
        # One request at a time: the float32 values of a large cache would take twice its memory.
        tokens = torch.arange(length, device=device)
        values = normal(length, h_kv, d_qk)
        if problem.logit_shift:
            values[..., -1] = 256
        if i == problem.nan_request:
            values[length // 2 : length // 2 + 1] = math.nan
        if quantised:
            powers = torch.randint(-4, LARGEST_POWER + 1, (length, h_kv, 1), generator=generator, device=device)
            values[..., : manifest.d_v] *= torch.exp2(powers.float())
            latent, rope = values.tensor_split((manifest.d_v,), -1)
            rows = FORMATS[manifest.cache.dtype].quantise(latent, rope, scale)
        else:
            rows = values.to(dtype)
        cache[block_table[i, tokens // page_size].long(), tokens % page_size] = rows
    out, out_guards = poisoned((b, s_q, h_q, manifest.d_v), dtype, device)
    lse, lse_guards = poisoned((b, h_q, s_q), torch.float32, device)
    kv_cache = cache.squeeze(2) if problem.cache_3d else cache
    return Inputs(q, kv_cache, block_table, lengths, out, lse, (*out_guards, *lse_guards), tensor_scale)


def poisoned(
    shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Give a tensor full of NaN, and the NaN around it."""
    size = math.prod(shape)
    memory = torch.full((size + 2 * _GUARD,), math.nan, dtype=dtype, device=device)
    return memory[_GUARD : _GUARD + size].view(shape), (memory[:_GUARD], memory[_GUARD + size :])


def random_problem(rng: random.Random, manifest: Manifest, max_tokens: int) -> Problem:
    """Draw a problem, mostly one at an edge, with at most about `max_tokens` cached tokens in all."""
    s_q = rng.choice((1, 1, 1, 2, 2, 3, 4, 17))
    h_q = rng.choice((1, 3, 9, 16, 20, 63, 64, 96, 126, 128))
    h_kv = rng.choice([n for n in (2, 3, 8) if h_q % n == 0] or [1]) if rng.random() < 0.1 else 1
    lengths = _random_lengths(rng, manifest.cache.page_size, s_q, max_tokens)[: _MAX_ROWS // (s_q * h_q)]
    causal = rng.random() < 0.5
    shift = rng.choice((-51_200, 102_400)) if rng.random() < 0.1 else 0

    def sometimes(value: int, otherwise: int = 0) -> int:
        return value if rng.random() < 0.25 else otherwise

    return Problem(
        lengths=lengths,
        s_q=s_q,
        h_q=h_q,
        h_kv=h_kv,
        causal=causal,
        seed=rng.randrange(1 << 31),
        # A larger scale makes too much of what float32 loses of a score of 100,000.
        softmax_scale=0.0 if shift else rng.choice((0.0, 0.0, 0.0, 0.05, 0.3)),
        table_extra_columns=rng.choice((0, 0, 1, 2, 231)),
        table_padding=sometimes(rng.randint(1, 9)),
        table_filler=rng.choice((IMPOSSIBLE_PAGE, IMPOSSIBLE_PAGE, -1)),
        spare_pages=rng.choice((0, 1, 1, 7)),
        cache_layers=sometimes(3, 1) if sum(lengths) * 3 <= max_tokens else 1,
        cache_3d=h_kv == 1 and rng.random() < 0.5,
        q_gain=rng.choice((1, 1, 8, 32)),
        logit_shift=shift,
        # Under a mask it is a matter of tiles which rows a masked token's NaN reaches.
        nan_request=rng.randrange(len(lengths)) if rng.random() < 0.1 and not (causal and s_q > 1) else -1,
    )


def random_problems(manifest: Manifest, count: int, seed: int, max_tokens: int) -> list[Problem]:
    """Draw `count` problems; the same for the same arguments."""
    rng = random.Random(seed)
    return [random_problem(rng, manifest, max_tokens) for _ in range(count)]


def _random_lengths(rng: random.Random, page_size: int, s_q: int, max_tokens: int) -> tuple[int, ...]:
    edges = [0, 1, 2, *range(62, 67), *range(126, 131), *range(191, 194), s_q - 1, s_q, s_q + 1]
    edges += [n * page_size + d for n in (1, 2, 3) for d in (-1, 0, 1)]
    match rng.choice(("edges", "edges", "edges", "holes", "one long", "few long", "many")):
        case "edges":
            lengths = [rng.choice(edges) for _ in range(rng.randint(1, 9))]
        case "holes":
            mean = max_tokens // 16
            lengths = [0 if rng.random() < 0.5 else _varied(rng, mean) for _ in range(rng.randint(2, 24))]
        case "one long":
            lengths = [rng.randint(max_tokens // 4, max_tokens)]
        case "few long":
            choices = (lambda: rng.choice(edges), lambda: rng.randint(1, max_tokens // 4))
            lengths = [rng.choice(choices)() for _ in range(rng.randint(2, 4))]
        case _:
            count = rng.randint(10, 300)
            lengths = [_varied(rng, max_tokens // count) for _ in range(count)]
    # What goes over the limit becomes an empty request.
    sums = itertools.accumulate(lengths)
    return tuple(length if total <= max_tokens else 0 for length, total in zip(lengths, sums, strict=True))


def _varied(rng: random.Random, mean: int) -> int:
    return max(int(rng.normalvariate(mean, mean / 2)), 1)


def flashmla_matrix() -> Iterator[Problem]:
    """Give the problems of FlashMLA's own dense test, for the shape that it serves."""
    heads = (1, 3, 9, 63, 64, 126, 128)
    flags = (False, True)
    axes = itertools.product((1, 2, 6, 64), (1, 2, 4), (20, 140, 4096), heads, (1, 2, 3, 8), flags, flags)
    for b, s_q, s_k, h_q, h_kv, varlen, causal in axes:
        if h_q % h_kv == 0:
            lengths = _flashmla_lengths(b, s_q, s_k) if varlen else (s_k,) * b
            yield Problem(lengths=lengths, s_q=s_q, h_q=h_q, h_kv=h_kv, causal=causal)
    rng = random.Random(0)
    full = _flashmla_lengths(128, 2, 4096)
    holes = tuple(0 if rng.random() < 0.5 else length for length in full)
    for causal in flags:
        yield Problem(lengths=holes, s_q=2, h_q=128, causal=causal)


def _flashmla_lengths(b: int, s_q: int, s_k: int) -> tuple[int, ...]:
    rng = random.Random(f"{b} {s_q} {s_k}")
    return tuple(max(int(rng.normalvariate(s_k, s_k / 2)), s_q) for _ in range(b))


# ---- Judgement -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """How far a result is from its reference, and what is wrong with it, if anything."""

    out_abs: float = 0.0
    """Largest difference of an element of `out` from the reference, rounded to the type of `out`."""
    out_used: float = 0.0
    """Share of its tolerance that the worst element of `out` takes; above 1 it fails."""
    cosine: float = 0.0
    """1 - 2 sum(xy) / sum(x^2 + y^2) over `out`."""
    lse_abs: float = 0.0
    """Largest difference of an element of `lse`."""
    lse_used: float = 0.0
    """Share of its tolerance that the worst element of `lse` takes."""
    failures: tuple[str, ...] = ()
    """What is wrong, a line each; empty if the result is accepted."""

    @property
    def ok(self) -> bool:
        """Whether the result is accepted."""
        return not self.failures


@dataclass(frozen=True)
class _Difference:
    largest: float
    used: float
    cosine: float
    failures: tuple[str, ...]


def check_output(
    out: torch.Tensor,
    lse: torch.Tensor,
    ref_out: torch.Tensor,
    ref_lse: torch.Tensor,
    *,
    q_gain: int = 1,
    value_gain: int = 1,
    score_error: float = 0.0,
) -> Errors:
    """Judge a result by FlashMLA's criteria.

    NaN and infinities must be where the reference has them. Of the rest, every element must be within its absolute or
    its relative tolerance, and `out` as a whole within that of the cosine. `out` is compared with the reference rounded
    to its own type. The absolute tolerance of `lse` is meant for scores as small as those of FlashMLA's inputs; where q
    was multiplied by `q_gain` or the latents by up to `value_gain`, so is it. `score_error` is what float32 may lose of
    a scaled score: a weight is off by as much, and the cosine by half its square; what that does to `out` grows with
    the latents.
    """
    cosine = max(OUT_COSINE_TOLERANCE, score_error**2 / 2)
    out_tolerance = OUT_ABS_TOLERANCE * (value_gain if score_error else 1)
    of_out = _difference("out", out, ref_out.to(out.dtype), out_tolerance, OUT_REL_TOLERANCE, cosine)
    of_lse = _difference("lse", lse, ref_lse, LSE_ABS_TOLERANCE * q_gain * value_gain, LSE_REL_TOLERANCE, math.inf)
    return Errors(
        out_abs=of_out.largest,
        out_used=of_out.used,
        cosine=of_out.cosine,
        lse_abs=of_lse.largest,
        lse_used=of_lse.used,
        failures=of_out.failures + of_lse.failures,
    )


def _difference(
    name: str,
    got: torch.Tensor,
    want: torch.Tensor,
    abs_tolerance: float,
    rel_tolerance: float,
    cosine_tolerance: float,
) -> _Difference:
    if got.shape != want.shape:
        return _Difference(math.inf, math.inf, math.inf, (f"{name} is {tuple(got.shape)}, not {tuple(want.shape)}",))
    x, y = got.double(), want.double()
    failures = []
    for what, special in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = special(x) != special(y)
        if wrong.any():
            failures.append(f"{name}: {_where(wrong, x, y)} {what} in one and not in the other")
    finite = x.isfinite() & y.isfinite()
    x, y = x.where(finite, 0.0), y.where(finite, 0.0)
    distance = (x - y).abs()
    used = torch.minimum(distance / abs_tolerance, distance / (y.abs() + 1e-6) / rel_tolerance)
    if (used >= 1).any():
        failures.append(f"{name}: {_where(used >= 1, x, y)} beyond the tolerance")
    cosine = cosine_difference(x, y)
    if cosine >= cosine_tolerance:
        failures.append(f"{name}: cosine difference {cosine:.2e}, allowed {cosine_tolerance:.0e}")
    largest, most = (float(each.max()) if each.numel() else 0.0 for each in (distance, used))
    return _Difference(largest, most, cosine, tuple(failures))


def _where(wrong: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> str:
    """Say how many elements are wrong, and show the first."""
    at = tuple(int(i) for i in wrong.nonzero()[0])
    return f"{int(wrong.sum()):,} of {wrong.numel():,} elements, first at {list(at)} ({x[at]:.6g}, not {y[at]:.6g}),"


def run_problem(mla: Decoder, problem: Problem, device: str | torch.device = "cuda") -> Errors:
    """Make a problem's tensors, run it and judge the result; an exception of the call is a failure of the problem."""
    manifest = mla.manifest
    inputs = make_inputs(problem, manifest, device)
    try:
        mla.decode(
            inputs.q,
            inputs.kv_cache,
            inputs.block_table,
            inputs.cache_seqlens,
            tensor_scale=inputs.tensor_scale,
            causal=problem.causal,
            softmax_scale=problem.softmax_scale or None,
            out=inputs.out,
            lse=inputs.lse,
        )
        inputs.lse.sum().item()  # Waits, so that a fault of the kernel shows here.
    except Exception as error:
        return Errors(math.inf, math.inf, math.inf, math.inf, math.inf, (f"{type(error).__name__}: {error}",))
    ref_out, ref_lse = decode_reference(
        inputs.q,
        inputs.elements(manifest),
        inputs.block_table,
        inputs.cache_seqlens,
        d_v=manifest.d_v,
        softmax_scale=problem.softmax_scale or manifest.softmax_scale,
        causal=problem.causal,
    )
    # A raw score of 2^17 has a unit in the last place of 2^-6, and a sum of many products loses a few of them.
    score_error = 4 * abs(problem.logit_shift) * 2**-23 * (problem.softmax_scale or manifest.softmax_scale)
    errors = check_output(
        inputs.out,
        inputs.lse,
        ref_out,
        ref_lse,
        q_gain=problem.q_gain,
        value_gain=2**LARGEST_POWER if manifest.cache.quantised else 1,
        score_error=score_error,
    )
    if not all(guard.isnan().all() for guard in inputs.guards):
        errors = dataclasses.replace(errors, failures=(*errors.failures, "memory beside out or lse was written to"))
    return errors


# ---- Shrinking -------------------------------------------------------------------------------------------------------


def shrink(problem: _S, fails: Callable[[_S], bool], max_runs: int = _SHRINK_RUNS) -> _S:
    """Make a failing problem simpler, step by step, for as long as it fails and at most `max_runs` are tried."""
    runs = 0
    progress = True
    while progress:
        progress = False
        for candidate in problem.simpler():
            if runs == max_runs:
                return problem
            runs += 1
            if fails(candidate):
                problem = candidate
                progress = True
                break
    return problem


def fewer(lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Leave out halves, quarters, ... and at last single requests."""
    size = len(lengths) // 2
    while size:
        for begin in range(0, len(lengths), size):
            yield (*lengths[:begin], *lengths[begin + size :])
        size //= 2


def lower(value: int, least: int) -> Iterator[int]:
    """Give smaller numbers, the smallest first, and close ones last."""
    yield from sorted({n for n in (least, value // 4, value // 2, value * 3 // 4, value - 1) if least <= n < value})


# ---- The whole -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure(Generic[_J]):
    """A problem whose result was not accepted."""

    found: _J
    problem: _J
    """The same made as small as it still fails."""
    errors: Errors
    """Of the small one."""


@dataclass
class Report(Generic[_J]):
    """What came of a verification: the worst errors for each kind of problem, and the first failure."""

    problems: int = 0
    worst: dict[str, Errors] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    failure: Failure[_J] | None = None

    @property
    def ok(self) -> bool:
        """Whether every result was accepted."""
        return self.failure is None

    def add(self, problem: _J, errors: Errors) -> None:
        """Take in the errors of one problem."""
        self.problems += 1
        kind = problem.kind
        self.counts[kind] = self.counts.get(kind, 0) + 1
        worst = self.worst.get(kind, Errors())
        self.worst[kind] = Errors(
            out_abs=max(worst.out_abs, errors.out_abs),
            out_used=max(worst.out_used, errors.out_used),
            cosine=max(worst.cosine, errors.cosine),
            lse_abs=max(worst.lse_abs, errors.lse_abs),
            lse_used=max(worst.lse_used, errors.lse_used),
            failures=worst.failures + errors.failures,
        )


def verify(
    mla: Decoder,
    examples: int,
    seed: int,
    progress: Callable[[Problem], None] | None = None,
    *,
    device: str | torch.device = "cuda",
    max_tokens: int = 1 << 18,
) -> Report[Problem]:
    """Run random problems, `examples` of them; `seed` decides which. See `verify_problems`."""
    return verify_problems(mla, random_problems(mla.manifest, examples, seed, max_tokens), progress, device=device)


def verify_problems(
    mla: Decoder,
    problems: Iterable[Problem],
    progress: Callable[[Problem], None] | None = None,
    *,
    device: str | torch.device = "cuda",
) -> Report[Problem]:
    """Run decode problems until one fails; see `verify_by`."""
    return verify_by(lambda problem: run_problem(mla, problem, device), problems, progress, device)


def verify_by(
    run: Callable[[_J], Errors],
    problems: Iterable[_J],
    progress: Callable[[_J], None] | None,
    device: str | torch.device,
) -> Report[_J]:
    """Run problems until one fails, which is then shrunk. `progress` is called with each before it runs.

    Shrinking stops early where a fault of the kernel has left the device unusable.
    """
    report: Report[_J] = Report()
    for problem in problems:
        if progress is not None:
            progress(problem)
        errors = run(problem)
        report.add(problem, errors)
        if not errors.ok:
            small = shrink(problem, lambda candidate: usable(device) and not run(candidate).ok)
            if small != problem and usable(device):
                errors = run(small)
            report.failure = Failure(problem, small, errors)
            break
    return report


def usable(device: str | torch.device) -> bool:
    """Whether the device still works: an illegal access leaves a CUDA context broken for good."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True
