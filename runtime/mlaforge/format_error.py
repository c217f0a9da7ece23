"""What the rounding of a quantised cache does to attention, and what decode on such a cache gives.

`python -m mlaforge.format_error` prints the README's table: the rounding of the cache alone, all else in float64. With
`--device cuda`, or `sim` for small problems, decode runs on the same tokens and queries, and the table has its error
against float64 on the tokens before they were cached, and that of the kernel alone, against float64 on what the rows
stand for.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from mlaforge.api import MLA, generate_tree, load
from mlaforge.formats import FORMATS
from mlaforge.reference import cosine_difference, decode_reference
from mlaforge.verify import Decoder

_SCORE_SPREAD = 2.0
"""Standard deviation of the scores: the softmax of some thousand tokens is then neither flat nor a single one."""


BF16 = "bf16"
DTYPES = (BF16, *FORMATS)
"""As cache.dtype."""

Attended = tuple[torch.Tensor, torch.Tensor]
"""out (b, s_q, h_q, d_v) and lse (b, h_q, s_q)."""


@dataclass(frozen=True)
class AttentionError:
    """One result of attention compared with another, that over the cache itself or over a rounded one."""

    out_rms: float
    """Root of the mean square of the errors of `out`, over that of `out`."""
    out_columns: float
    """The same with each column of `out` over its own size, so that large ones hide nothing of the others."""
    out_cosine: float
    """1 - 2 sum(xy) / sum(x^2 + y^2) over `out`."""
    lse_max: float
    """Largest error of an lse."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    row_bytes: int
    """Bytes of a token."""
    error: AttentionError
    """Of the rounding: float64 over what the cache holds, against float64 over the tokens before."""
    decode: AttentionError | None = None
    """Of our decode against float64 over the tokens before; None if none was run."""
    kernel: AttentionError | None = None
    """Of our decode against float64 over what the cache holds."""


def attention_error(
    q: torch.Tensor, cache: torch.Tensor, rounded: torch.Tensor, *, d_v: int, softmax_scale: float
) -> AttentionError:
    """Compare absorbed attention over a cache with that over the same cache, rounded; both in float64.

    Args:
        q: (b, s_q, h_q, d_qk).
        cache: (b, tokens, d_qk): latent, then rotary part.
        rounded: as cache.
        d_v: columns of V; none of them is all zeros.
        softmax_scale: factor of the scores.
    """
    want, got = (_attend(q, each, d_v, softmax_scale) for each in (cache, rounded))
    return compare(got, want)


def _attend(q: torch.Tensor, cache: torch.Tensor, d_v: int, softmax_scale: float) -> Attended:
    """Attend in float64 to requests that are one page each."""
    b, tokens, _ = cache.shape
    table = torch.arange(b, device=q.device).unsqueeze(1)
    lengths = torch.full((b,), tokens, device=q.device)
    return decode_reference(q, cache, table, lengths, d_v=d_v, softmax_scale=softmax_scale)


def compare(got: Attended, want: Attended) -> AttentionError:
    """Compare a result with another one, which is float64 and has no column of `out` that is all zeros."""
    (near_out, near_lse), (out, lse) = (each.double() for each in got), want
    errors, sizes = ((near_out - out).square().mean((0, 1, 2)), out.square().mean((0, 1, 2)))
    return AttentionError(
        out_rms=float((errors.mean() / sizes.mean()).sqrt()),
        out_columns=float((errors / sizes).mean().sqrt()),
        out_cosine=cosine_difference(out, near_out),
        lse_max=float((near_lse - lse).abs().max()),
    )


def decode_pages(
    mla: Decoder, q: torch.Tensor, rows: torch.Tensor, scale: float | None, *, softmax_scale: float, seed: int
) -> Attended:
    """Run our decode over tokens that lie in random pages; slots that no token has, and what it must write, are NaN.

    Args:
        mla: the kernels.
        q: (b, s_q, h_q, d_qk), of the spec's element type.
        rows: (b, tokens, d_qk) elements, or (b, tokens, row_bytes) bytes as the spec's cache has them.
        scale: the tensor scale, of a format that has one.
        softmax_scale: factor of the scores.
        seed: of the order of the pages.
    """
    page = mla.manifest.cache.page_size
    b, tokens, width = rows.shape
    columns = -(-tokens // page)
    order = torch.randperm(b * columns, generator=torch.Generator().manual_seed(seed)).to(rows.device)
    # All bits set are NaN in every format.
    empty = 0xFF if rows.dtype == torch.uint8 else math.nan
    cache = torch.full((b * columns * page, width), empty, dtype=rows.dtype, device=rows.device)
    table = order.view(b, columns)
    places = (table[:, :, None] * page + torch.arange(page, device=rows.device)).flatten(1)[:, :tokens]
    cache[places] = rows
    return mla.decode(
        q,
        cache.view(b * columns, page, width),
        table.int(),
        torch.full((b,), tokens, dtype=torch.int32, device=rows.device),
        tensor_scale=None if scale is None else torch.tensor([scale], device=rows.device),
        softmax_scale=softmax_scale,
        out=q.new_full((*q.shape[:3], mla.manifest.d_v), math.nan),
        lse=q.new_full((b, q.shape[2], q.shape[1]), math.nan, dtype=torch.float32),
    )


def load_decoders(dtypes: Sequence[str], kv_lora_rank: int, qk_rope_head_dim: int, device: str) -> dict[str, MLA]:
    """Load kernels of caches with pages of 64, by cache.dtype.

    Args:
        dtypes: bf16 or formats.
        kv_lora_rank: elements of the latent.
        qk_rope_head_dim: those of the rotary part.
        device: as for `mlaforge.load`.

    Raises:
        SpecError: there are no kernels of these dimensions.
    """
    model = {
        "num_attention_heads": 16,
        "kv_lora_rank": kv_lora_rank,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": qk_rope_head_dim,
        "v_head_dim": 128,
    }
    return {
        dtype: load(
            generate_tree({"name": f"format_{dtype}", "model": model, "cache": {"dtype": dtype, "page_size": 64}}),
            device=device,
        )
        for dtype in dtypes
    }


def measure(
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    *,
    outliers: bool,
    batch: int,
    heads: int,
    tokens: int,
    seed: int,
    dtypes: Sequence[str] = DTYPES,
    decoders: Mapping[str, Decoder] | None = None,
    device: str | torch.device = "cpu",
) -> list[Row]:
    """Give the error of caches of these dtypes, of random tokens.

    q, latent and rotary part are normal, and the scores are scaled to a standard deviation of 2. With `outliers`, one
    channel of the latent in 64 is 20 times as large in all tokens, and one element in 1,000 of the others 10 times.
    Tensor scales are those of the largest magnitude; "fp8_e4m3, scale 1" is what comes of no calibration. With
    `decoders`, by cache.dtype, each runs on the same tokens on `device`; q is then rounded to bf16 before, for all.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    latent = normal(batch, tokens, kv_lora_rank)
    rope = normal(batch, tokens, qk_rope_head_dim)
    q = normal(batch, 1, heads, kv_lora_rank + qk_rope_head_dim)
    if outliers:
        latent *= torch.where(torch.rand(latent.shape, generator=generator) < 1e-3, 10.0, 1.0)
        channels = torch.randperm(kv_lora_rank, generator=generator)[: kv_lora_rank // 64]
        latent[..., channels] = 20 * normal(batch, tokens, len(channels))
    if decoders is not None:
        q = q.bfloat16()
    q, latent, rope = q.to(device), latent.to(device), rope.to(device)
    cache = torch.cat([latent, rope], -1).double()
    softmax_scale = _SCORE_SPREAD / float((q.squeeze(1).double() @ cache.mT).std())
    want = _attend(q, cache, kv_lora_rank, softmax_scale)

    def row(name: str, dtype: str, stored: torch.Tensor, rounded: torch.Tensor, scale: float | None) -> Row:
        near = _attend(q, rounded, kv_lora_rank, softmax_scale)
        row_bytes = stored.shape[-1] * stored.element_size()
        if decoders is None:
            return Row(name, row_bytes, compare(near, want))
        made = decode_pages(decoders[dtype], q, stored, scale, softmax_scale=softmax_scale, seed=seed)
        return Row(name, row_bytes, compare(near, want), compare(made, want), compare(made, near))

    rows = []
    for dtype in dtypes:
        if dtype == BF16:
            rows.append(row(BF16, BF16, cache.bfloat16(), cache.bfloat16(), None))
            continue
        each = FORMATS[dtype]
        scales: dict[str, float | None] = {each.name: None}
        if each.layout.tensor_scale:
            seen = latent if each.layout.rope == "bf16" else cache
            scales[each.name] = each.tensor_scale(float(seen.abs().max()))
        if each.name == "fp8_e4m3":
            scales["fp8_e4m3, scale 1"] = 1.0
        for name, scale in scales.items():
            stored = each.quantise(latent, rope, scale)
            parts = each.dequantise(stored, kv_lora_rank, qk_rope_head_dim, scale, torch.float64)
            rows.append(row(name, each.name, stored, torch.cat(parts, -1), scale))
    return rows


def to_markdown(rows: Mapping[str, Sequence[Row]]) -> str:
    """Write rows, by the kind of their data, as a table; where decode ran, its errors and those of the kernel alone."""
    decoded = any(row.decode is not None for each in rows.values() for row in each)
    columns = ["data", "format", "bytes per token", "out", "out, by columns", "out, cosine", "lse, largest"]
    if decoded:
        columns += ["kernel: out", "kernel: out, cosine", "kernel: lse, largest"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for data, each in rows.items():
        for row in each:
            error = row.decode or row.error
            cells = [data, row.name, f"{row.row_bytes}", *_cells(error)]
            if row.kernel is not None:
                out, _, cosine, lse = _cells(row.kernel)
                cells += [out, cosine, lse]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cells(error: AttentionError) -> tuple[str, str, str, str]:
    shares = (f"{100 * error.out_rms:.2g}%", f"{100 * error.out_columns:.2g}%")
    return (*shares, f"{error.out_cosine:.1e}", f"{error.lse_max:.2g}")


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on a terminal; yields what is called as each step begins."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        # What has begun is not done.
        task = bar.add_task("", total=total, completed=-1)
        yield lambda what: bar.update(task, advance=1, description=what)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the errors as a table in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m mlaforge.format_error", description=main.__doc__)
    parser.add_argument(
        "--device",
        choices=("cuda", "sim"),
        help="run decode there; without it the table is of the rounding alone, all else in float64",
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="of the cache; default: all")
    sizes = {"rank": 512, "rope": 64, "batch": 2, "heads": 16, "tokens": 4096, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9):
        parser.error("--device cuda: there is no Hopper GPU here; `--device sim` runs the kernels' text on the CPU")
    rows: dict[str, list[Row]] = {"normal": [], "outliers": []}
    with _progress(len(given.dtypes) * (len(rows) + (given.device is not None))) as begin:
        decoders: dict[str, MLA] | None = None
        if given.device is not None:
            decoders = {}
            for dtype in given.dtypes:
                begin(f"compiling decode, {dtype}")
                decoders |= load_decoders([dtype], given.rank, given.rope, given.device)
        for data in rows:
            for dtype in given.dtypes:
                begin(f"{data}, {dtype}")
                rows[data] += measure(
                    given.rank,
                    given.rope,
                    outliers=data == "outliers",
                    batch=given.batch,
                    heads=given.heads,
                    tokens=given.tokens,
                    seed=given.seed,
                    dtypes=[dtype],
                    decoders=decoders,
                    device="cuda" if given.device == "cuda" else "cpu",
                )
    print(to_markdown(rows))


if __name__ == "__main__":
    main()
