"""Decode on quantised caches: the kernels on the simulator, what rows may hold, and the arguments."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch

import mlaforge
from folders import generate
from mlaforge.api import MLA
from mlaforge.compiler import compile_kernel
from mlaforge.formats import FORMATS, decode_e4m3
from mlaforge.reference import decode_reference
from mlaforge.simulator import SimulatorOptions
from mlaforge.verify import Problem, make_inputs, run_problem
from mlaforge_generator.emit import write_folder
from mlaforge_generator.plan import make_plan
from mlaforge_generator.render import render
from mlaforge_generator.spec import parse_spec

GENERATED = Path(__file__).parents[1] / "generated"
MODES = ("random", "lazy", "eager")

SMALL = """
name: small
model: {{num_attention_heads: 8, kv_lora_rank: {d_v}, qk_nope_head_dim: 64, qk_rope_head_dim: {rope}, v_head_dim: 64}}
cache: {{dtype: {dtype}, page_size: {page_size}}}
kernels: {{decode: {decode}}}
"""


def small_folder(
    into: Path,
    dtype: str,
    *,
    d_v: int = 128,
    rope: int = 64,
    page_size: int = 16,
    rows: int = 0,
    stages: int | str = 2,
    schedule: str = "swapped",
) -> Path:
    decode = f"{{schedule: {schedule}, tile_rows: {rows}, stages: {stages}}}" if rows else "{}"
    text = SMALL.format(d_v=d_v, rope=rope, dtype=dtype, page_size=page_size, decode=decode)
    write_folder(into, render(make_plan(parse_spec(text))))
    return into


# ---- Unbroken --------------------------------------------------------------------------------------------------------

# Rows up to a full tile and beyond it, borders of their own, rows and requests without a token, split requests,
# rescaling, NaN in a request.
PROBLEMS = (
    Problem(lengths=(1300,), h_q=3, table_extra_columns=3),
    Problem(lengths=(460, 70), h_q=16),
    Problem(lengths=(2, 130, 0), s_q=4, h_q=4, causal=True),
    Problem(lengths=(400, 130, 200, 300), h_q=16, q_gain=32, softmax_scale=1.0),  # references rise in late tiles, too
    Problem(lengths=(400, 130, 1), h_q=5, softmax_scale=150.0),  # of the single token far below 0 for some rows
    Problem(lengths=(0, 64, 0, 200, 1), h_q=15),
    Problem(lengths=(500, 90), h_q=10, s_q=3, q_gain=8, softmax_scale=0.3),
    Problem(lengths=(300, 65), h_q=33, h_kv=3, s_q=2, causal=True),
    Problem(lengths=(350, 129), h_q=17, nan_request=1),
    Problem(lengths=(330,), h_q=40, cache_layers=2),
)
STORED: dict[str, str | int] = {"dtype": "nvfp4", "schedule": "stored", "rows": 16}
KERNELS: dict[str, dict[str, str | int]] = {
    "fp8_e4m3, half a line of rope, pages of a token": {"dtype": "fp8_e4m3", "rope": 32, "page_size": 1},
    "fp8_e4m3_token, half a line of rope": {"dtype": "fp8_e4m3_token", "d_v": 256, "rope": 32, "page_size": 64},
    "fp8_e4m3_token, nothing behind the latent": {"dtype": "fp8_e4m3_token", "rope": 0, "page_size": 32},
    "fp8_ds_mla, three scales, pages of a token": {"dtype": "fp8_ds_mla", "d_v": 384, "page_size": 1},
    "nvfp4, a line and a half, pages of 128": {"dtype": "nvfp4", "d_v": 384, "page_size": 128},
    "nvfp4, half a line, 16 rows": {"dtype": "nvfp4", "rope": 32, "rows": 16},
    "nvfp4, pages of a token": {"dtype": "nvfp4", "page_size": 1},
    "nvfp4 stored, half a line, one tile of lines": {**STORED, "rope": 32, "stages": 1},
    "nvfp4 stored, a line and a half, pages of 128": {**STORED, "d_v": 384, "page_size": 128},
    "nvfp4 stored, nothing behind the latent, pages of a token": {**STORED, "d_v": 256, "rope": 0, "page_size": 1},
    "nvfp4 stored, all of shared memory": {**STORED, "d_v": 512, "page_size": 64, "stages": "auto"},
}


def check(folder: Path, problems: tuple[Problem, ...]) -> None:
    mla = mlaforge.load(folder, device="sim")
    for seed, problem in enumerate(problems):
        mode = MODES[seed % 3]
        mla.backend.options = SimulatorOptions(seed=seed, mode=mode, sms=1 + 3 * (seed % 2))
        errors = run_problem(mla, problem, "cpu")
        assert errors.ok, f"{problem} {mode} {seed}: {errors.failures}"


@pytest.mark.parametrize("kernel", KERNELS)
def test_small_kernels_pass_random_schedules(kernel: str, tmp_path: Path) -> None:
    check(small_folder(tmp_path / "small", **KERNELS[kernel]), PROBLEMS)  # type: ignore[arg-type]


@functools.cache
def shipped(dtype: str) -> MLA:
    """Load the kernels of a format; those of `stored` are nvfp4's."""
    if dtype == "stored":
        folder = generate(Path(tempfile.mkdtemp()), "deepseek_v3_nvfp4", schedule="stored")
        return mlaforge.load(folder, device="sim")
    return mlaforge.load(GENERATED / f"deepseek_v3_{dtype}", device="sim")


# ---- What rows may hold ----------------------------------------------------------------------------------------------


def attend(mla: MLA, rows: torch.Tensor, scale: float | None, heads: int = 5) -> tuple[torch.Tensor, ...]:
    """Attend to one request's rows (tokens, row_bytes); give the results and what they should be."""
    form, d_qk, d_v = FORMATS[mla.manifest.cache.dtype], mla.manifest.d_qk, mla.manifest.d_v
    page = mla.manifest.cache.page_size
    length = rows.shape[0]
    pages = -(-length // page)
    cache = torch.full((pages * page, rows.shape[1]), 0xFF, dtype=torch.uint8)
    cache[:length] = rows
    cache = cache.view(pages, page, -1)
    table = torch.arange(pages, dtype=torch.int32)[None]
    lengths = torch.tensor([length], dtype=torch.int32)
    q = (torch.randn(1, 1, heads, d_qk, generator=torch.Generator().manual_seed(1)) / 10).bfloat16()
    tensor = None if scale is None else torch.tensor([scale])
    out, lse = mla.decode(q, cache, table, lengths, tensor_scale=tensor)
    elements = torch.cat(form.dequantise(cache, d_v, d_qk - d_v, scale, torch.float64), -1)
    want = decode_reference(q, elements, table, lengths, d_v=d_v, softmax_scale=mla.manifest.softmax_scale)
    return out, lse, *want


def require_close(out: torch.Tensor, lse: torch.Tensor, want_out: torch.Tensor, want_lse: torch.Tensor) -> None:
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(
        out.double(), want_out, rtol=2**-6, atol=float(want_out.nan_to_num().abs().max()) * 2**-8, equal_nan=True
    )


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_ds_mla", "nvfp4", "stored"])
def test_every_code(name: str) -> None:
    """All codes that are numbers, in every place of a row's period, with scales of nvfp4 that are subnormal, too."""
    mla = shipped(name)
    dtype = mla.manifest.cache.dtype
    rows = torch.arange(256).repeat(8)[None, : mla.manifest.cache.row_bytes] + 7 * torch.arange(70)[:, None]
    rows = rows.remainder(256).to(torch.uint8)
    scale = {"fp8_e4m3": 0.011, "fp8_ds_mla": None, "nvfp4": 0.0031}[dtype]
    for part in FORMATS[dtype].layout.parts(512, 64):
        section = rows[:, part.offset : part.offset + part.bytes]
        if part.dtype == "e4m3":
            section[decode_e4m3(section).isnan()] = 0x11
        elif part.name == "rope":
            section[:] = torch.randn(70, 64).bfloat16().view(torch.uint8)
        elif part.dtype == "f32":
            section[:] = (torch.rand(70, 4) * 0.01 + 0.001).view(torch.uint8)
    require_close(*attend(mla, rows, scale))


@pytest.mark.parametrize("dtype", ["fp8_e4m3_token", "fp8_ds_mla"])
@pytest.mark.parametrize("power", [-40, -7, 0, 6])
def test_float32_scales_of_any_size(dtype: str, power: int, tmp_path: Path) -> None:
    """Each token's its own, no powers of two, and 0, as others may write it."""
    mla = (
        shipped(dtype) if dtype == "fp8_ds_mla" else mlaforge.load(small_folder(tmp_path, dtype, rows=16), device="sim")
    )
    form, rank = FORMATS[dtype], mla.manifest.d_v
    generator = torch.Generator().manual_seed(power)
    latent = torch.randn(130, rank, generator=generator) * 2.0 ** min(power, 6)
    rows = form.quantise(latent, torch.randn(130, 64, generator=generator) / 10)
    part = next(part for part in form.layout.parts(rank, 64) if part.name == "scales")
    section = rows[:, part.offset : part.offset + part.bytes]
    scales = section.clone().view(torch.float32)
    scales *= torch.rand(scales.shape, generator=generator) + 0.5
    if power == -40:
        scales[::3] = 0.0
    section[:] = scales.view(torch.uint8)
    require_close(*attend(mla, rows, None))


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_ds_mla", "nvfp4", "stored"])
@pytest.mark.parametrize("what", ["code", "scale", "rope"])
def test_nan_of_a_token_reaches_all_rows(name: str, what: str) -> None:
    mla = shipped(name)
    dtype = mla.manifest.cache.dtype
    form = FORMATS[dtype]
    scale = 0.01 if form.layout.tensor_scale else None
    rows = form.quantise(torch.randn(80, 512) / 10, torch.randn(80, 64) / 10, scale)
    parts = {part.name: part for part in form.layout.parts(512, 64)}
    if what == "code" and parts["latent"].dtype == "e4m3":
        rows[70, 300] = 0xFF
    elif what == "scale" and "scales" in parts:
        end = parts["scales"].offset + parts["scales"].bytes
        rows[70, end - 4 : end] = 0x7F if dtype == "nvfp4" else torch.tensor([0, 0, 0xC0, 0x7F], dtype=torch.uint8)
    else:
        begin = parts["rope"].offset
        rows[70, begin : begin + 2] = 0x7F if dtype == "fp8_e4m3" else torch.tensor([0xC0, 0x7F], dtype=torch.uint8)
    out, lse, _, want_lse = attend(mla, rows, scale)
    assert bool(want_lse.isnan().all()) and bool(lse.isnan().all()) and bool(out.isnan().all())


# ---- Machine code ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_ds_mla", "nvfp4", "stored"])
def test_machine_code(name: str) -> None:
    manifest = shipped(name).manifest
    for kernel in manifest.decodes:
        report = compile_kernel(kernel.source).kernels[kernel.entry]
        assert report.spill_stores == report.spill_loads == report.stack_frame == 0 and not report.warnings


# ---- Arguments -------------------------------------------------------------------------------------------------------


def test_arguments() -> None:
    mla = shipped("fp8_e4m3")
    inputs = make_inputs(Problem(lengths=(3,), h_q=4), mla.manifest, "cpu")
    call = (inputs.q, inputs.kv_cache, inputs.block_table, inputs.cache_seqlens)
    with pytest.raises(ValueError, match="tensor_scale is None; it must be one float32"):
        mla.decode(*call)
    with pytest.raises(ValueError, match=r"tensor_scale has shape \(2\); it must be one number"):
        mla.decode(*call, tensor_scale=torch.ones(2))
    with pytest.raises(ValueError, match=r"kv_cache has dtype torch.bfloat16; it must be torch.uint8 or"):
        mla.decode(call[0], call[1].bfloat16(), *call[2:], tensor_scale=inputs.tensor_scale)
    with pytest.raises(ValueError, match=r"kv_cache has shape .* rows of fp8_e4m3"):
        mla.decode(call[0], call[1][..., :512], *call[2:], tensor_scale=inputs.tensor_scale)
    odd = torch.zeros(2, 64, 1, 584, dtype=torch.uint8)[..., :576]
    with pytest.raises(
        ValueError, match="kv_cache has a stride of 584 B in dimension 1; it must be a multiple of 16 B"
    ):
        mla.decode(call[0], odd, *call[2:], tensor_scale=inputs.tensor_scale)
    with pytest.raises(ValueError, match=r"q has dtype torch.float16; it must be torch.bfloat16"):
        mla.decode(call[0].half(), *call[1:], tensor_scale=inputs.tensor_scale)
    plain = mlaforge.load(GENERATED / "deepseek_v3", device="sim")
    elements = make_inputs(Problem(lengths=(3,), h_q=4), plain.manifest, "cpu")
    with pytest.raises(ValueError, match=r"tensor_scale has shape .*; it must be None"):
        plain.decode(elements.q, elements.kv_cache, *call[2:], tensor_scale=torch.ones(1))


def test_codes_as_the_type_they_are() -> None:
    mla = shipped("fp8_e4m3")
    inputs = make_inputs(Problem(lengths=(70,), h_q=4), mla.manifest, "cpu")
    call = (inputs.q, inputs.kv_cache, inputs.block_table, inputs.cache_seqlens)
    out, lse = mla.decode(*call, tensor_scale=inputs.tensor_scale)
    assert inputs.tensor_scale is not None
    again = mla.decode(
        call[0], call[1].view(torch.float8_e4m3fn), *call[2:], tensor_scale=inputs.tensor_scale.reshape(())
    )
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("name", ["decode", "decode_out"])
def test_operator(name: str) -> None:
    mla = shipped("nvfp4")
    inputs = make_inputs(Problem(lengths=(70, 3), h_q=4), mla.manifest, "cpu")
    tensors = (inputs.q, inputs.kv_cache, inputs.block_table, inputs.cache_seqlens, inputs.tensor_scale)
    results = (inputs.out, inputs.lse) if name == "decode_out" else ()
    torch.library.opcheck(getattr(torch.ops.mlaforge, name), (*tensors, *results, mla._runner.key, False, 0.1))
