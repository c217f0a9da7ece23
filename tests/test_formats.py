"""Formats of quantised caches: layouts in numbers, codes against exact arithmetic, bounds, and what is not finite."""

from __future__ import annotations

import bisect
import itertools
import math
import struct
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mlaforge.format_error import attention_error, measure
from mlaforge.formats import (
    FORMATS,
    FP8_DS_MLA,
    FP8_E4M3,
    FP8_E4M3_TOKEN,
    NVFP4,
    Format,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
)
from mlaforge_generator.cache_layout import LAYOUTS, CacheLayout
from mlaforge_generator.errors import SpecError
from mlaforge_generator.resources import find_spec
from mlaforge_generator.spec import load_spec

PAIRS = [(512, 64), (512, 0), (256, 64), (256, 32)]
FLOAT32_MAX = torch.finfo(torch.float32).max
TINY = 2.0**-126
# For the float32 roundings of scales and quotients.
SLACK = 1 + 2.0**-20

formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def e4m3_value(code: int) -> Fraction | None:
    """Give what a code stands for by the definition of the type; None for NaN."""
    sign, exponent, mantissa = (-1) ** (code >> 7), code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    if exponent == 0:
        return sign * Fraction(mantissa, 8) / 2**6
    return sign * (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


def e2m1_value(code: int) -> Fraction:
    sign, exponent, mantissa = (-1) ** (code >> 3), code >> 1 & 3, code & 1
    if exponent == 0:
        return sign * Fraction(mantissa, 2)
    return sign * (1 + Fraction(mantissa, 2)) * Fraction(2) ** (exponent - 1)


def nearest(x: float, values: list[Fraction]) -> int:
    """Give the code of the nearest value, of the even code in a tie; `values` are magnitudes by code."""
    size = Fraction(min(abs(x), float(values[-1])))
    above = bisect.bisect_left(values, size)
    return min((max(above - 1, 0), above), key=lambda i: (abs(values[i] - size), i % 2))


E4M3 = [value for code in range(128) if (value := e4m3_value(code)) is not None]
E2M1 = [e2m1_value(code) for code in range(8)]


def near_borders(values: list[Fraction]) -> torch.Tensor:
    """Give all values, the ties between them, and the float32 numbers next to each, of both signs."""
    ties = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    at = torch.tensor([float(x) for x in [*values, *ties, values[-1] * 2]], dtype=torch.float32)
    around = torch.cat([at, at.nextafter(torch.tensor(math.inf)), at.nextafter(torch.tensor(-math.inf)).clamp(min=0)])
    return torch.cat([around, -around])


def tokens(kind: str, seed: int, n: int, width: int) -> torch.Tensor:
    """Give float32 tokens (n, width) of a kind."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((n, width), generator=generator)
    if kind == "outliers":
        # Some channels are large in every token, as in trained models, and some single elements are.
        x[:, torch.randperm(width, generator=generator)[: max(width // 64, 1)]] *= 100
        x[torch.rand((n, width), generator=generator) < 0.002] *= 1000
    elif kind == "wide":
        x *= 2.0 ** torch.randint(-30, 30, (n, width), generator=generator)
    elif kind == "tiny":
        x *= 2.0 ** torch.randint(-22, 12, (n, 1), generator=generator) * TINY
    elif kind == "zeros":
        x *= torch.rand((n, width), generator=generator) < 0.01
    return x


kinds = st.sampled_from(["normal", "outliers", "wide", "tiny", "zeros"])
seeds = st.integers(0, 1 << 30)
pairs = st.sampled_from([*PAIRS, (128, 16), (384, 48)])
# Powers of two and others.
scales = st.sampled_from([1.0, 2.0**-7, 100.0, 0.3, 1 / 448]) | st.floats(2.0**-7, 100.0)


def scale_for(fmt: Format, scale: float) -> float | None:
    return scale if fmt.layout.tensor_scale else None


@pytest.mark.parametrize(
    ("name", "row_bytes"),
    [
        ("fp8_e4m3", [576, 512, 320, 288]),
        ("fp8_e4m3_token", [656, 528, 400, 336]),
        ("fp8_ds_mla", [656, 528, 400, 336]),
        ("nvfp4", [416, 288, 272, 208]),
    ],
)
def test_bytes_of_a_token(name: str, row_bytes: list[int]) -> None:
    assert [FORMATS[name].row_bytes(*pair) for pair in PAIRS] == row_bytes


def test_offsets_at_512_and_64() -> None:
    def shown(name: str) -> list[tuple[str, str, int, int]]:
        return [(part.name, part.dtype, part.offset, part.bytes) for part in LAYOUTS[name].parts(512, 64)]

    assert shown("fp8_e4m3") == [("latent", "e4m3", 0, 512), ("rope", "e4m3", 512, 64)]
    assert shown("fp8_e4m3_token") == [
        ("latent", "e4m3", 0, 512),
        ("rope", "bf16", 512, 128),
        ("scales", "f32", 640, 4),
    ]
    assert shown("fp8_ds_mla") == [("latent", "e4m3", 0, 512), ("scales", "f32", 512, 16), ("rope", "bf16", 528, 128)]
    assert shown("nvfp4") == [("latent", "e2m1", 0, 256), ("rope", "bf16", 256, 128), ("scales", "e4m3", 384, 32)]


@given(st.sampled_from(list(LAYOUTS.values())), st.integers(1, 8), st.integers(0, 8))
def test_parts_are_aligned_and_follow_each_other(layout: CacheLayout, ranks: int, ropes: int) -> None:
    rank, rope = 128 * ranks, 16 * ropes
    parts = layout.parts(rank, rope)
    end = 0
    for part in parts:
        assert part.offset % 16 == 0
        assert 0 <= part.offset - end < 16
        assert part.bytes > 0
        end = part.offset + part.bytes
    width = layout.row_bytes(rank, rope)
    assert width % 16 == 0
    assert 0 <= width - end < 16
    assert parts[0].name == "latent"
    assert parts[0].offset == 0
    elements = {part.name: part.elements for part in parts}
    assert elements.pop("latent") == rank
    assert elements.pop("rope", 0) == rope
    assert (
        elements.pop("scales", 0)
        == {"fp8_e4m3": 0, "fp8_e4m3_token": 1, "fp8_ds_mla": ranks, "nvfp4": 8 * ranks}[layout.name]
    )


@formats
def test_dimensions_without_rows_are_refused(fmt: Format) -> None:
    for rank in (0, -128, 64, 500):
        with pytest.raises(ValueError, match=f"kv_lora_rank is {rank}"):
            fmt.row_bytes(rank, 64)
    for rope in (-16, 8, 65):
        with pytest.raises(ValueError, match=f"qk_rope_head_dim is {rope}"):
            fmt.row_bytes(512, rope)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_spec_can_ask_for_them(name: str, tmp_path: Path) -> None:
    text = find_spec("deepseek_v3").read_text()
    changed = text.replace("dtype: bf16", f"dtype: {name}")
    assert changed != text
    path = tmp_path / "x.yaml"
    path.write_text(changed)
    spec = load_spec(path)
    assert spec.layout is LAYOUTS[name] and spec.element == "bf16"
    assert spec.row_bytes == FORMATS[name].row_bytes(512, 64)
    # And for no other.
    path.write_text(text.replace("dtype: bf16", f"dtype: {name}x"))
    with pytest.raises(SpecError, match=rf"cache\.dtype: must be bf16, fp16, .*{list(LAYOUTS)[-1]}; got '?{name}x"):
        load_spec(path)


def test_all_codes_of_e4m3() -> None:
    decoded = decode_e4m3(torch.arange(256, dtype=torch.uint8)).tolist()
    for code, value in enumerate(decoded):
        want = e4m3_value(code)
        if want is None:
            assert math.isnan(value)
            assert code in (0x7F, 0xFF)
        else:
            assert Fraction(value) == want
            assert math.copysign(1, value) == (-1) ** (code >> 7)
    codes = torch.arange(256, dtype=torch.uint8)
    again = encode_e4m3(decode_e4m3(codes))
    assert torch.equal(again, codes.where(codes != 0xFF, 0x7F))


def test_kernels_hold_every_e2m1_and_its_product_with_a_scale_as_an_fp16() -> None:
    codes = decode_e2m1(torch.arange(16, dtype=torch.uint8)).double() * 2**-14
    scales = decode_e4m3(torch.arange(0x7F, dtype=torch.uint8)).double()
    products = codes * scales.unsqueeze(-1)
    for exact in (codes, scales, products):
        assert torch.equal(exact.half().double(), exact)


def test_all_codes_of_e2m1() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    decoded = decode_e2m1(codes)
    assert [Fraction(value) for value in decoded.tolist()] == [e2m1_value(code) for code in range(16)]
    assert decoded.signbit().tolist() == [code >= 8 for code in range(16)]
    assert torch.equal(encode_e2m1(decoded), codes)


def test_every_border_of_e4m3_is_rounded_to_even() -> None:
    x = near_borders(E4M3)
    want = [nearest(each, E4M3) | (math.copysign(1, each) < 0) << 7 for each in x.tolist()]
    assert encode_e4m3(x).tolist() == want


def test_every_border_of_e2m1_is_rounded_to_even() -> None:
    x = near_borders(E2M1)
    want = [nearest(each, E2M1) | (math.copysign(1, each) < 0) << 3 for each in x.tolist()]
    assert encode_e2m1(x).tolist() == want


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_codes_of_any_number(numbers: list[float]) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    signs = [math.copysign(1, each) < 0 for each in numbers]
    assert encode_e4m3(x).tolist() == [nearest(e, E4M3) | s << 7 for e, s in zip(numbers, signs, strict=True)]
    assert encode_e2m1(x).tolist() == [nearest(e, E2M1) | s << 3 for e, s in zip(numbers, signs, strict=True)]


def test_codes_of_nan() -> None:
    nan = torch.tensor([0x7FC00000, 0xFFC00000 - (1 << 32), 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert nan.isnan().all()
    assert encode_e4m3(nan).tolist() == [0x7F] * 3
    assert [code & 7 for code in encode_e2m1(nan).tolist()] == [7] * 3


def row_by_definition(name: str, row: bytes, rank: int, rope: int, scale: float) -> tuple[list[float], list[float]]:
    """Read one row's bytes by exact arithmetic, with offsets written out; none of them is the layout's own."""

    def e4m3(code: int) -> Fraction:
        value = e4m3_value(code)
        assert value is not None
        return value

    factor = Fraction(scale)
    if name == "fp8_e4m3":
        return (
            [float(e4m3(code) * factor) for code in row[:rank]],
            [float(e4m3(code) * factor) for code in row[rank : rank + rope]],
        )
    if name == "fp8_ds_mla":
        section = -(-rank // 128 * 4 // 16) * 16
        by_tile = struct.unpack_from(f"<{rank // 128}f", row, rank)
        latent = [float(e4m3(row[i]) * Fraction(by_tile[i // 128])) for i in range(rank)]
        words = struct.unpack_from(f"<{rope}H", row, rank + section)
    elif name == "fp8_e4m3_token":
        (of_token,) = struct.unpack_from("<f", row, rank + 2 * rope)
        latent = [float(e4m3(row[i]) * Fraction(of_token)) for i in range(rank)]
        words = struct.unpack_from(f"<{rope}H", row, rank)
    else:
        block = rank // 2 + 2 * rope
        latent = [
            float(e2m1_value(row[i // 2] >> 4 * (i % 2) & 15) * e4m3(row[block + i // 16]) * factor)
            for i in range(rank)
        ]
        words = struct.unpack_from(f"<{rope}H", row, rank // 2)
    return latent, [struct.unpack("<f", struct.pack("<I", word << 16))[0] for word in words]


@formats
@given(seeds, kinds, pairs, scales)
def test_rows_are_read_by_definition(fmt: Format, seed: int, kind: str, pair: tuple[int, int], scale: float) -> None:
    x = tokens(kind, seed, 2, sum(pair))
    scale = float(torch.tensor(scale, dtype=torch.float32))
    rows = fmt.quantise(x[:, : pair[0]], x[:, pair[0] :], scale_for(fmt, scale))
    assert rows.dtype == torch.uint8
    assert rows.shape == (2, fmt.row_bytes(*pair))
    latent, rope = fmt.dequantise(rows, *pair, scale_for(fmt, scale), torch.float64)
    for i in range(2):
        want = row_by_definition(fmt.name, bytes(rows[i].tolist()), *pair, scale)
        assert latent[i].tolist() == want[0]
        assert rope[i].tolist() == want[1]
    # The other types are rounded from there by way of float32.
    near = fmt.dequantise(rows, *pair, scale_for(fmt, scale))
    assert torch.equal(near[0], latent.float())
    assert torch.equal(near[1], rope.float())
    half = fmt.dequantise(rows, *pair, scale_for(fmt, scale), torch.bfloat16)
    assert torch.equal(half[0], near[0].bfloat16())
    assert torch.equal(half[1], near[1].bfloat16())


def divided(x: float, y: float) -> float:
    """Divide two float32 numbers, rounded to float32: a quotient in float64 is close enough to round again."""
    return float(torch.tensor(x / y, dtype=torch.float64).float())


@given(seeds, st.sampled_from([FP8_E4M3, FP8_E4M3_TOKEN, FP8_DS_MLA]), st.floats(2.0**-7, 100.0, width=32))
def test_codes_of_e4m3_by_definition(seed: int, fmt: Format, scale: float) -> None:
    # Elements that are, or nearly are, ties under their scale show every other way to divide.
    ties = torch.tensor([float(a + b) / 2 for a, b in itertools.pairwise(E4M3)])
    generator = torch.Generator().manual_seed(seed)
    x = ties[torch.randint(len(ties), (128,), generator=generator)] * scale
    x[0] = 448 * scale
    rows = fmt.quantise(x, scale=scale_for(fmt, scale))
    if fmt is not FP8_E4M3:
        scale = divided(float(x[0]), 448)
        assert struct.unpack_from("<f", bytes(rows.tolist()), 128) == (scale,)
    assert rows[:128].tolist() == [nearest(divided(each, scale), E4M3) for each in x.tolist()]


@given(seeds, scales)
def test_codes_of_nvfp4_by_definition(seed: int, scale: float) -> None:
    scale = float(torch.tensor(scale, dtype=torch.float32))
    ties = torch.tensor([float(a + b) / 2 for a, b in itertools.pairwise(E2M1)])
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand((8, 1), generator=generator) * 40
    x = ties[torch.randint(len(ties), (8, 16), generator=generator)] * sizes.to(torch.float8_e4m3fn).float() * scale
    x[:, 0] = 6 * sizes[:, 0] * scale
    row = bytes(NVFP4.quantise(x.flatten(), scale=scale).tolist())
    for i, block in enumerate(x.tolist()):
        code = nearest(divided(max(block), float(torch.tensor(6 * scale, dtype=torch.float32))), E4M3)
        assert row[64 + i] == max(code, 1)
        whole = float(torch.tensor(float(E4M3[row[64 + i]]) * scale, dtype=torch.float32))
        want = [nearest(divided(each, whole), E2M1) for each in block]
        assert [row[8 * i + j // 2] >> 4 * (j % 2) & 15 for j in range(16)] == want


def e4m3_bound(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.maximum(x.abs() / 17, 2.0**-10 * scale) * SLACK


def rope_bound(x: torch.Tensor) -> torch.Tensor:
    return (x.abs() / 257).clamp(min=2.0**-134)


@given(seeds, kinds, pairs, scales)
def test_bound_of_fp8_e4m3(seed: int, kind: str, pair: tuple[int, int], scale: float) -> None:
    x = tokens(kind, seed, 8, sum(pair))
    latent, rope = FP8_E4M3.round_trip(x[:, : pair[0]], x[:, pair[0] :], scale)
    x = x.double()
    bound = torch.maximum(e4m3_bound(x, torch.tensor(scale)), x.abs() - 448 * scale * (1 - 2.0**-23))
    assert bool(((torch.cat([latent, rope], -1) - x).abs() <= bound).all())


@given(seeds, kinds, pairs, st.sampled_from([FP8_E4M3_TOKEN, FP8_DS_MLA]))
def test_bound_of_fp8_by_token_and_tile(seed: int, kind: str, pair: tuple[int, int], fmt: Format) -> None:
    x = tokens(kind, seed, 8, sum(pair))
    latent, rope = fmt.round_trip(x[:, : pair[0]], x[:, pair[0] :])
    x = x.double()
    groups = x[:, : pair[0]].reshape(8, -1, 128 if fmt is FP8_DS_MLA else pair[0])
    amax = groups.abs().amax(-1, keepdim=True)
    error = (latent.reshape(groups.shape) - groups).abs()
    scale = (amax / 448).clamp(min=TINY)
    assert bool((error <= e4m3_bound(groups, scale)).all())
    # Below that the scale is the least one and the steps no longer follow amax.
    assert bool(((error <= amax / 28 * SLACK) | (amax < 448 * TINY)).all())
    assert bool(((rope - x[:, pair[0] :]).abs() <= rope_bound(x[:, pair[0] :])).all())


@given(seeds, kinds, pairs, scales, st.booleans())
def test_bound_of_nvfp4(seed: int, kind: str, pair: tuple[int, int], scale: float, fitted: bool) -> None:
    x = tokens(kind, seed, 8, sum(pair))
    if fitted:
        scale = NVFP4.tensor_scale(float(x[:, : pair[0]].abs().max()))
    rows = NVFP4.quantise(x[:, : pair[0]], x[:, pair[0] :], scale)
    latent, rope = NVFP4.dequantise(rows, *pair, scale, torch.float64)
    x = x.double()
    blocks = x[:, : pair[0]].reshape(8, -1, 16)
    error = (latent.reshape(blocks.shape) - blocks).abs()
    stored = decode_e4m3(rows[:, pair[0] // 2 + 2 * pair[1] :][:, : pair[0] // 16]).double().unsqueeze(-1)
    whole = stored * torch.tensor(scale, dtype=torch.float32).double()
    saturated = blocks.abs() - 6 * whole
    bound = torch.maximum(torch.maximum(blocks.abs() / 5, whole / 4) * SLACK, saturated + 2.0**-20 * blocks.abs())
    assert bool((error <= bound).all())
    amax = blocks.abs().amax(-1, keepdim=True)
    normal = (amax >= 6 * 2.0**-6 * scale) & (amax <= 2688 * scale)
    assert bool(((error <= amax * 3 / 17 * SLACK) | ~normal).all())
    assert bool(((saturated <= amax / 17 * SLACK) | ~normal).all())
    assert bool(((rope - x[:, pair[0] :]).abs() <= rope_bound(x[:, pair[0] :])).all())


def test_the_bounds_are_reached() -> None:
    x = torch.zeros(1, 128)
    # Under a scale of 1: a tie above a power of two, a tie between the subnormal numbers, and half the last step.
    x[0, :4] = torch.tensor([448.0, 1 + 2.0**-4, 2.0**-10, 432.0])
    for fmt in (FP8_E4M3_TOKEN, FP8_DS_MLA):
        assert fmt.round_trip(x)[0][0, :4].tolist() == [448, 1, 0, 448]
    x[0, :4] = torch.tensor([6.0, 1.25, 0.25, 5.0])
    assert NVFP4.round_trip(x, scale=1.0)[0][0, :4].tolist() == [6, 1, 0, 4]
    # A scale in the middle of two e4m3 numbers: down to 1, where the largest saturates, and up to 1.25.
    x[0, :4] = torch.tensor([6.0 * 17 / 16, 0, 0, 0])
    assert NVFP4.round_trip(x, scale=1.0)[0][0, 0] == 6
    x[0, :4] = torch.tensor([6.0 * 19 / 16, 6.25, 0, 0])
    assert NVFP4.round_trip(x, scale=1.0)[0][0, :2].tolist() == [7.5, 5]


@formats
@given(seeds, kinds, pairs, scales)
def test_rows_that_were_read_give_the_same_rows(
    fmt: Format, seed: int, kind: str, pair: tuple[int, int], scale: float
) -> None:
    x = tokens(kind, seed, 8, sum(pair))
    rank, _ = pair
    given_scale = scale_for(fmt, scale)
    rows = fmt.quantise(x[:, :rank], x[:, rank:], given_scale)
    if fmt is NVFP4:
        assert bool((stored_scales(rows, pair) > 0).all())
        x[:, :rank].view(8, -1, 16)[stored_scales(rows, pair) == 2] = 0
        rows = fmt.quantise(x[:, :rank], x[:, rank:], given_scale)
    assert torch.equal(fmt.quantise(*fmt.dequantise(rows, *pair, given_scale), given_scale), rows)


def stored_scales(rows: torch.Tensor, pair: tuple[int, int]) -> torch.Tensor:
    """Give the bytes of the block scales of rows of nvfp4."""
    (part,) = (part for part in LAYOUTS["nvfp4"].parts(*pair) if part.name == "scales")
    return rows[:, part.offset : part.offset + part.bytes]


@given(seeds, st.sampled_from(["normal", "outliers", "wide"]), pairs, scales)
def test_rows_read_as_bf16_keep_their_codes(seed: int, kind: str, pair: tuple[int, int], scale: float) -> None:
    x = tokens(kind, seed, 8, sum(pair))
    rank, _ = pair
    for fmt in FORMATS.values():
        given_scale = scale_for(fmt, scale)
        if fmt is NVFP4:
            x[:, :rank].view(8, -1, 16)[stored_scales(fmt.quantise(x[:, :rank], x[:, rank:], scale), pair) == 2] = 0
        rows = fmt.quantise(x[:, :rank], x[:, rank:], given_scale)
        again = fmt.quantise(*fmt.dequantise(rows, *pair, given_scale, torch.bfloat16), given_scale)
        for part in fmt.layout.parts(*pair):
            before, after = (each[:, part.offset : part.offset + part.bytes].clone() for each in (rows, again))
            if part.dtype == "f32":
                before, after = before.view(torch.float32), after.view(torch.float32)
                assert bool(((after - before).abs() <= before / 128).all())
            else:
                assert torch.equal(before, after)


def test_a_block_of_twice_the_least_scale_may_come_back_smaller() -> None:
    x = torch.zeros(1, 128)
    x[0, 0] = 6 * 1.6 * 2.0**-9
    rows = NVFP4.quantise(x, scale=1.0)
    read, _ = NVFP4.dequantise(rows, 128, 0, 1.0)
    assert stored_scales(rows, (128, 0))[0, 0] == 2
    assert read[0, 0] == 4 * 2 * 2.0**-9
    assert stored_scales(NVFP4.quantise(read, scale=1.0), (128, 0))[0, 0] == 1


@given(st.floats(2.0**-119, FLOAT32_MAX / 2, width=32))
@example(7.0)
@example(8 - 2.0**-21)
@example(8 * (1 - 2.0**-24))
def test_float32_scales_are_found_again(amax: float) -> None:
    x = torch.zeros(1, 128)
    x[0, 5] = amax
    rows = FP8_DS_MLA.quantise(x)
    read, _ = FP8_DS_MLA.dequantise(rows, 128, 0)
    assert torch.equal(FP8_DS_MLA.quantise(read), rows)


def test_float32_scales_are_found_again_throughout_a_binade() -> None:
    # amax is seven bits and more of these: every 509th number from 1 to 2, and some that end the binades of 7 x scale.
    bits = torch.cat([torch.arange(0x3F800000, 0x40000000, 509), torch.arange(0x3FFFFF00, 0x40000100)]).int()
    amax = bits.view(torch.float32)
    x = torch.zeros(len(amax), 1, 128)
    x[:, 0, 0] = amax
    rows = FP8_E4M3_TOKEN.quantise(x)
    assert torch.equal(FP8_E4M3_TOKEN.quantise(FP8_E4M3_TOKEN.dequantise(rows, 128, 0)[0]), rows)


@formats
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-7, 100.0, 0.3, 2.0**100])
def test_no_finite_input_gives_nan(fmt: Format, scale: float) -> None:
    sizes = [0.0, 2.0**-149, TINY, 2.0**-100, 1.0, 449.0, 1e30, FLOAT32_MAX]
    for size in sizes:
        x = torch.linspace(-1, 1, 128 + 16)[None] * size
        latent, rope = fmt.round_trip(x[:, :128], x[:, 128:], scale_for(fmt, scale))
        assert bool(latent.float().isfinite().all())
        # bf16 has no number for the last of float32; they are rounded to infinity, as any conversion does.
        assert not rope.isnan().any()
        assert bool((latent * x[:, :128] >= 0).all())
        if size == 0:
            assert not latent.any()


def test_what_is_too_large_saturates() -> None:
    x = torch.tensor([[448.0, 449, 464, 465, 1e30, math.inf, -math.inf, -500.0]]).repeat(1, 16)
    latent, _ = FP8_E4M3.round_trip(x, scale=1.0)
    assert latent[0, :8].tolist() == [448] * 6 + [-448] * 2
    latent, _ = FP8_E4M3.round_trip(x * 3, scale=3.0)
    assert latent[0, :8].tolist() == [3 * 448] * 6 + [-3 * 448] * 2
    # The block's scale saturates first, at 448.
    latent, _ = NVFP4.round_trip(x.clamp(-1e30, 1e30) * 1e6, scale=2.0)
    assert latent[0, 4] == 2 * 448 * 6
    latent, _ = NVFP4.round_trip(torch.full((1, 128), -2688.0 * 2), scale=2.0)
    assert bool((latent == -2688 * 2).all())


@formats
def test_zeros_keep_their_signs(fmt: Format) -> None:
    x = torch.tensor([0.0, -0.0]).repeat(72)[None]
    latent, rope = fmt.round_trip(x[:, :128], x[:, 128:], scale_for(fmt, 0.7))
    assert torch.equal(torch.cat([latent, rope], -1).signbit(), x.signbit())
    assert not latent.any()


def test_scales_of_zeros_and_of_the_least() -> None:
    zeros = torch.zeros(1, 512)
    scales_of = FP8_DS_MLA.quantise(zeros)[0, 512:528].clone().view(torch.float32)
    assert scales_of.tolist() == [TINY] * 4
    assert stored_scales(NVFP4.quantise(zeros, scale=1.0), (512, 0)).unique().tolist() == [1]
    # Below 448 x the least scale there are fewer and fewer steps, down to none.
    x = torch.full((1, 128), 2.0**-149)
    assert FP8_DS_MLA.round_trip(x)[0].unique().tolist() == [0.0]
    x = torch.full((1, 128), 3 * 2.0**-135)
    assert FP8_DS_MLA.round_trip(x)[0].unique().tolist() == [3 * 2.0**-135]


def test_any_float32_scale_is_read_as_it_stands() -> None:
    rows = FP8_DS_MLA.quantise(torch.full((5, 512), 448.0))
    found = torch.tensor([0.0, 2.0**-149, 2.0**-7, 100.0, 1 / 3], dtype=torch.float32)
    rows[:, 512:516] = found.unsqueeze(1).view(torch.uint8)
    latent, _ = FP8_DS_MLA.dequantise(rows, 512, 0, dtype=torch.float64)
    assert torch.equal(latent[:, 0], found.double() * 448)
    assert bool((latent[:, 128:] == 448).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_nan_under_its_scale(bad: float) -> None:
    x = torch.ones(3, 512)
    x[1, 130] = bad
    for fmt, first, end in ((FP8_E4M3_TOKEN, 0, 512), (FP8_DS_MLA, 128, 256), (NVFP4, 128, 144)):
        scale = scale_for(fmt, 1 / 6)
        rows = fmt.quantise(x, scale=scale)
        wrong = torch.zeros(3, 512, dtype=torch.bool)
        wrong[1, first:end] = True
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            latent, _ = fmt.dequantise(rows, 512, 0, scale, dtype)
            assert torch.equal(latent.isnan(), wrong)
            assert bool((latent[~wrong] == 1).all() if dtype == torch.bfloat16 else latent[~wrong].isfinite().all())
        again, _ = fmt.round_trip(fmt.dequantise(rows, 512, 0, scale)[0], scale=scale)
        assert torch.equal(again.isnan(), wrong)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_in_rope(bad: float) -> None:
    latent, rope = torch.ones(2, 128), torch.ones(2, 16)
    rope[0, 3] = bad
    for fmt in FORMATS.values():
        read, turned = fmt.round_trip(latent, rope, scale_for(fmt, 1.0))
        assert bool(read.isfinite().all())
        others = turned.flatten()[torch.arange(32) != 3]
        assert bool((others == 1).all())
        want = math.copysign(448, bad) if fmt is FP8_E4M3 and not math.isnan(bad) else bad
        torch.testing.assert_close(
            turned[0, 3], torch.tensor(want, dtype=torch.float64), rtol=0, atol=0, equal_nan=True
        )


def test_nan_under_a_given_scale_is_alone() -> None:
    x = torch.ones(1, 128)
    x[0, 7] = math.nan
    rows = FP8_E4M3.quantise(x, scale=1.0)
    assert rows[0, 7] == 0x7F
    assert FP8_E4M3.dequantise(rows, 128, 0, 1.0)[0].isnan().nonzero().tolist() == [[0, 7]]


@formats
def test_any_shape_and_strides(fmt: Format) -> None:
    x = tokens("normal", 3, 2 * 3 * 5, 144).view(2, 3, 5, 144)
    scale = scale_for(fmt, 0.01)
    rows = fmt.quantise(x[..., :128], x[..., 128:], scale)
    assert rows.shape == (2, 3, 5, fmt.row_bytes(128, 16))
    flat = x.view(-1, 144)
    assert torch.equal(fmt.quantise(flat[:, :128], flat[:, 128:], scale).view(rows.shape), rows)
    turned = x.transpose(0, 2).contiguous().transpose(0, 2)
    assert torch.equal(fmt.quantise(turned[..., :128], turned[..., 128:], scale), rows)
    # Rows at an odd address, and others between them.
    spread = torch.full((2, 3, 5, 2 * rows.shape[-1] + 1), 0xFF, dtype=torch.uint8)
    spread[..., 1 : 1 + rows.shape[-1]] = rows
    want = fmt.dequantise(rows, 128, 16, scale)
    got = fmt.dequantise(spread[..., 1 : 1 + rows.shape[-1]], 128, 16, scale)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    # One row is contiguous where it lies.
    odd = torch.cat([rows.new_zeros(1), rows[1, 2, 3]])[1:]
    got = fmt.dequantise(odd, 128, 16, scale)
    assert torch.equal(got[0], want[0][1, 2, 3])
    assert torch.equal(got[1], want[1][1, 2, 3])
    assert fmt.quantise(x[:0, ..., :128], x[:0, ..., 128:], scale).shape == (0, 3, 5, rows.shape[-1])
    empty, none = fmt.dequantise(rows[:0], 128, 16, scale)
    assert (empty.shape, none.shape) == ((0, 3, 5, 128), (0, 3, 5, 16))


@formats
def test_input_of_16_bits_is_taken_as_it_is(fmt: Format) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = tokens("normal", 5, 4, 144).to(dtype)
        scale = scale_for(fmt, 0.01)
        rows = fmt.quantise(x[:, :128], x[:, 128:], scale)
        assert torch.equal(rows, fmt.quantise(x[:, :128].float(), x[:, 128:].float(), scale))


@formats
def test_padding_is_zero_and_is_not_read(fmt: Format) -> None:
    x = tokens("normal", 1, 4, 144)
    scale = scale_for(fmt, 0.01)
    rows = fmt.quantise(x[:, :128], x[:, 128:], scale)
    used = torch.zeros(rows.shape[-1], dtype=torch.bool)
    for part in fmt.layout.parts(128, 16):
        used[part.offset : part.offset + part.bytes] = True
    assert not rows[:, ~used].any()
    assert int((~used).sum()) == {"fp8_e4m3": 0, "fp8_e4m3_token": 12, "fp8_ds_mla": 12, "nvfp4": 8}[fmt.name]
    poisoned = rows.clone()
    poisoned[:, ~used] = 0xFF
    for got, want in zip(fmt.dequantise(poisoned, 128, 16, scale), fmt.dequantise(rows, 128, 16, scale), strict=True):
        assert torch.equal(got, want)


def test_tensor_scales_from_amax() -> None:
    assert FP8_E4M3.tensor_scale(448.0) == 1
    assert NVFP4.tensor_scale(2688.0 * 3) == 3
    assert FP8_E4M3.tensor_scale(0) == 1
    assert NVFP4.tensor_scale(1e-40) == 2.0**-100
    for bad in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="amax is"):
            FP8_E4M3.tensor_scale(bad)
    for fmt in (FP8_E4M3_TOKEN, FP8_DS_MLA):
        with pytest.raises(ValueError, match="has no tensor scale"):
            fmt.tensor_scale(1.0)


@given(seeds, st.sampled_from(["normal", "outliers", "wide"]))
def test_a_scale_from_amax_loses_nothing_large(seed: int, kind: str) -> None:
    x = tokens(kind, seed, 8, 128)
    largest = x.abs().argmax()
    amax = float(x.abs().max())
    for fmt, bound in ((FP8_E4M3, 2.0**-22), (NVFP4, 2.0**-20)):
        read, _ = fmt.round_trip(x, scale=fmt.tensor_scale(amax))
        assert abs(read.flatten()[largest] - x.flatten()[largest]) <= bound * amax


def test_what_is_refused() -> None:
    x, rope = torch.zeros(2, 128), torch.zeros(2, 16)
    for fmt in (FP8_E4M3, NVFP4):
        with pytest.raises(ValueError, match=f"{fmt.name} has a tensor scale"):
            fmt.quantise(x, rope)
        for bad in (0.0, -1.0, math.nan, math.inf, 2.0**-101, 2.0**101):
            with pytest.raises(ValueError, match="it must be from 2"):
                fmt.quantise(x, rope, bad)
            with pytest.raises(ValueError, match="it must be from 2"):
                fmt.dequantise(torch.zeros(2, fmt.row_bytes(128, 16), dtype=torch.uint8), 128, 16, bad)
    for fmt in (FP8_E4M3_TOKEN, FP8_DS_MLA):
        with pytest.raises(ValueError, match=f"{fmt.name} has no tensor scale"):
            fmt.quantise(x, rope, 1.0)
    with pytest.raises(ValueError, match=r"latent has dtype torch\.int32; it must be a floating type"):
        FP8_DS_MLA.quantise(x.int(), rope)
    with pytest.raises(ValueError, match=r"rope has shape \(3, 16\), latent \(2, 128\)"):
        FP8_DS_MLA.quantise(x, torch.zeros(3, 16))
    with pytest.raises(ValueError, match="kv_lora_rank is 100"):
        FP8_DS_MLA.quantise(x[:, :100], rope)
    rows = FP8_DS_MLA.quantise(x, rope)
    with pytest.raises(ValueError, match=r"rows has dtype torch\.int8"):
        FP8_DS_MLA.dequantise(rows.view(torch.int8), 128, 16)
    with pytest.raises(ValueError, match=r"rows has shape \(2, 176\); its last dimension must be 656 for fp8_ds_mla"):
        FP8_DS_MLA.dequantise(rows, 512, 64)


def test_error_of_attention() -> None:
    cache = tokens("normal", 1, 64, 144).view(1, 64, 144)
    q = tokens("normal", 2, 4, 144).view(1, 1, 4, 144)
    same = attention_error(q, cache, cache.clone(), d_v=128, softmax_scale=0.1)
    assert (same.out_rms, same.out_columns, same.lse_max) == (0, 0, 0)
    # Twice V and the same scores: rows of q that see only RoPE.
    q[..., :128] = 0
    doubled = torch.cat([2 * cache[..., :128], cache[..., 128:]], -1)
    twice = attention_error(q, cache, doubled, d_v=128, softmax_scale=0.1)
    assert (twice.out_rms, twice.out_columns, twice.lse_max) == pytest.approx((1, 1, 0))
    assert twice.out_cosine == pytest.approx(1 - 2 * 2 / 5)


@pytest.mark.parametrize("pair", PAIRS)
def test_formats_rank_as_their_steps_do(pair: tuple[int, int]) -> None:
    for outliers in (False, True):
        rows = measure(*pair, outliers=outliers, batch=1, heads=4, tokens=512, seed=7)
        errors = {row.name: row.error for row in rows}
        assert set(errors) >= {"bf16", *FORMATS}
        for row in rows:
            assert 0 < row.error.out_rms < 1
            assert 0 < row.error.out_cosine < row.error.out_rms**2
        assert errors["bf16"].out_rms < errors["fp8_ds_mla"].out_rms < errors["nvfp4"].out_rms
        assert errors["fp8_ds_mla"].out_rms < 0.08
        assert errors["fp8_ds_mla"].out_columns < 0.12
        assert errors["fp8_e4m3_token"].out_rms < 0.1
        assert errors["fp8_e4m3"].out_rms < 0.1
        assert errors["nvfp4"].out_rms < 0.4
        assert errors["fp8_ds_mla"].lse_max < 0.1
        assert errors["nvfp4"].lse_max < 0.3
        if not outliers:
            assert 2 * errors["fp8_e4m3"].out_rms < errors["nvfp4"].out_rms < 0.2
