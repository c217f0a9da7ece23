"""gather and append of quantised caches: bit by bit against the formats' reference, under the simulator."""

from __future__ import annotations

import functools
import itertools
import math
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunking import Chunked, simulated
from mlaforge.api import MLA
from mlaforge.bench.cases import MemoryCase, MemoryKernel
from mlaforge.bench.memory import memory_call
from mlaforge.compiler import compile_kernel
from mlaforge.formats import FORMATS, Format
from mlaforge.manifest import Manifest
from mlaforge.memory_verify import KINDS, AppendProblem, GatherProblem
from mlaforge.prefill_verify import PrefillProblem, kernel_of, random_chunked_problem
from mlaforge.prefill_verify import verify_problems as verify_prefill
from mlaforge.simulator import MODES, Simulator, SimulatorOptions
from mlaforge_generator.emit import write_folder
from mlaforge_generator.memory_plan import QuantisedAppendPlan, QuantisedGatherPlan
from mlaforge_generator.plan import make_plan
from mlaforge_generator.render import render
from mlaforge_generator.spec import Spec, parse_spec
from mlaforge_generator.target import H200
from prefilling import folder_of, spec_of
from strategies import specs
from test_memory import GENERATED, Memory, spec_text
from test_verify import one_thread as one_thread

# Latent, RoPE, page size. The shipped shape, twice; scales padded, loads that leave lanes idle, pages of 1; no RoPE,
# several tokens for a half warp.
VARIANTS = {
    "fp8_e4m3": (512, 64, 64),
    "fp8_ds_mla": (512, 64, 64),
    "nvfp4": (384, 48, 1),
    "fp8_e4m3_token": (128, 0, 128),
}
SHIPPED = ("fp8_e4m3", "fp8_ds_mla")


@functools.cache
def variant(name: str) -> MLA:
    if name in SHIPPED:
        return Memory(GENERATED / f"deepseek_v3_{name}")
    folder = Path(tempfile.mkdtemp(prefix="mlaforge-quantised-"))
    write_folder(folder, render(make_plan(parse_spec(spec_text(*VARIANTS[name], name)))))
    return Memory(folder)


def widths(mla: MLA) -> tuple[int, int]:
    return mla.manifest.d_v, mla.manifest.d_qk - mla.manifest.d_v


def scale_of(mla: MLA, value: float = 0.037) -> tuple[float | None, torch.Tensor | None]:
    """Give a tensor scale if there is one, as the reference and as the kernels take it."""
    if not mla.manifest.cache.tensor_scale:
        return None, None
    scale = torch.tensor([value])
    return float(scale), scale


def blank_cache(mla: MLA, pages: int) -> torch.Tensor:
    return torch.full((pages, mla.manifest.cache.page_size, mla.manifest.cache.row_bytes), 0xFF, dtype=torch.uint8)


def appended(mla: MLA, c_kv: torch.Tensor, k_rope: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Give the rows that append makes of tokens; no other byte of the cache may change."""
    n, page = len(c_kv), mla.manifest.cache.page_size
    cache = blank_cache(mla, -(-n // page) + 1)
    slots = torch.randperm(cache.shape[0] * page, generator=torch.Generator().manual_seed(0))[:n]
    mla.append(c_kv, k_rope if k_rope.shape[1] else None, cache, slots, tensor_scale=scale)
    rows = cache.flatten(0, 1)
    others = torch.ones(len(rows), dtype=torch.bool)
    others[slots] = False
    assert bool((rows[others] == 0xFF).all())
    return rows[slots]


# ---- Results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kernel"), [*itertools.product(VARIANTS, ("gather", "append"))])
def test_random_problems(name: str, kernel: str) -> None:
    mla = variant(name)

    @settings(max_examples=20)
    @given(seed=st.integers(0, 2**32 - 1), schedule=st.integers(0, 2**32 - 1), mode=st.sampled_from(MODES))
    def accept(seed: int, schedule: int, mode: str) -> None:
        problem = KINDS[kernel].random(random.Random(seed), mla.manifest, 200)
        mla.backend.options = SimulatorOptions(seed=schedule, mode=mode)
        outcome = problem.run(mla, "cpu")
        assert outcome.ok, f"{problem}: {outcome.failures}"

    accept()


@pytest.mark.parametrize(
    "problem",
    [
        GatherProblem(counts=(70, 0, 33), starts=(63, 9, 64), extra_rows=5, table_filler=-1, any_bytes=True),
        GatherProblem(counts=(0, 0)),
        GatherProblem(counts=(1,) * 40, out_padding=1, cache_layers=3),
        AppendProblem(tokens=50, left_out=1),
        AppendProblem(tokens=50, left_out=2, norm=True, rotate=1, one_projection=True),
        AppendProblem(tokens=50, rotate=2, foreign_positions=True, long_positions=True, gain=64),
        AppendProblem(tokens=0, norm=True),
    ],
    ids=str,
)
def test_edges(problem: GatherProblem | AppendProblem) -> None:
    outcome = problem.run(variant("fp8_ds_mla"), "cpu")
    assert outcome.ok, outcome.failures


def hard_tokens(form: Format, rank: int, rope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of every size, zeros, numbers too large and too small for any scale, and what is not finite."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(60, rank + rope, generator=generator)
    tokens *= torch.exp2(torch.randint(-125, 120, (60, 1), generator=generator).double()).float()
    tokens[:20] = torch.randn(20, rank + rope, generator=generator)
    tokens[0], tokens[1] = 0, -0.0
    tokens[2], tokens[3] = 3e38, -(2.0**-133)
    tokens[4], tokens[4, 1] = 0, 2.0**-130
    tokens[5, 17], tokens[6, 100], tokens[7, 64] = math.nan, math.inf, -math.inf
    # Ties: halves of steps, under a scale of one.
    tokens[8, ::2], tokens[8, 1::2] = 448.0, 17.0
    tokens[9, ::2], tokens[9, 1::2] = 6.0 * 448, 2.5
    if rope:
        tokens[10, rank + 3], tokens[11, rank + 4] = math.nan, math.inf
    tokens = tokens.bfloat16()
    return tokens[:, :rank], tokens[:, rank:]


SCALES = (0.037, 1.0, 2.0**-7, 100.0, 2.0**-100, 2.0**100)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in VARIANTS for value in (SCALES if FORMATS[name].layout.tensor_scale else SCALES[:1])],
)
def test_the_bytes_are_those_of_the_reference(name: str, value: float) -> None:
    mla, form = variant(name), FORMATS[name]
    rank, rope = widths(mla)
    scale, tensor = scale_of(mla, value)
    c_kv, k_rope = hard_tokens(form, rank, rope)
    got, want = appended(mla, c_kv, k_rope, tensor), form.quantise(c_kv, k_rope, scale)
    for part in form.layout.parts(rank, rope):
        section = slice(part.offset, part.offset + part.bytes)
        if part.dtype == "f32":
            # Of a scale that is NaN, any will do.
            rows, wanted = (x[:, section].contiguous().view(torch.float32) for x in (got, want))
            nan = rows.isnan() & wanted.isnan()
            assert torch.equal(rows[~nan].view(torch.int32), wanted[~nan].view(torch.int32)) and bool(nan.any())
            got[:, section], want[:, section] = 0, 0
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_read_is_what_any_bytes_stand_for(name: str) -> None:
    """All bytes, as nobody would have written them; exact, then rounded to float32 and from there to bf16."""
    mla, form = variant(name), FORMATS[name]
    rank, rope = widths(mla)
    scale, tensor = scale_of(mla)
    generator = torch.Generator().manual_seed(2)
    page = mla.manifest.cache.page_size
    cache = torch.randint(0, 256, (256 // page, page, mla.manifest.cache.row_bytes), generator=generator).to(
        torch.uint8
    )
    tokens = torch.cat(form.dequantise(cache.flatten(0, 1), rank, rope, scale, torch.bfloat16), -1)
    table = torch.randperm(256 // page, generator=generator).int()[None]
    want = tokens.view(-1, page, rank + rope)[table[0].long()].flatten(0, 1)[3:203]
    borders, starts = torch.tensor([0, 200], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    got = mla.gather(cache, table, borders, seq_starts=starts, tensor_scale=tensor, total_tokens=200)
    assert got.dtype == torch.bfloat16
    same = (got.view(torch.int16) == want.view(torch.int16)) | (got.isnan() & want.isnan())
    assert bool(same.all()) and bool(got.isnan().any())


@pytest.mark.parametrize("name", VARIANTS)
def test_what_was_appended_is_gathered(name: str) -> None:
    """Within the format's own bounds, from the tokens themselves."""
    mla, form = variant(name), FORMATS[name]
    rank, rope = widths(mla)
    tokens = torch.randn(100, rank + rope, generator=torch.Generator().manual_seed(3)).bfloat16()
    scale, tensor = scale_of(mla, 0.02 if name == "fp8_e4m3" else 0.002)
    page = mla.manifest.cache.page_size
    cache = blank_cache(mla, 128 // page)
    mla.append(tokens[:, :rank], tokens[:, rank:] if rope else None, cache, torch.arange(100), tensor_scale=tensor)
    table = torch.arange(128 // page, dtype=torch.int32)[None]
    borders = torch.tensor([0, 100], dtype=torch.int32)
    got = mla.gather(cache, table, borders, tensor_scale=tensor, total_tokens=100)
    exact = torch.cat(form.round_trip(tokens[:, :rank], tokens[:, rank:] if rope else None, scale), -1)
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=0)
    share = float((got.double() - tokens.double()).norm() / tokens.double().norm())
    assert share < {"nvfp4": 0.11}.get(name, 0.03)


@functools.cache
def chunked(name: str) -> MLA:
    tree = spec_of((96, 64)).model_dump(exclude_none=True)
    tree["model"] |= {"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
    tree["cache"] = {"dtype": name, "page_size": 16}
    return Chunked(folder_of(Spec.model_validate(tree)), Simulator())


@pytest.mark.parametrize("name", FORMATS)
def test_chunked_prefill_from_a_quantised_cache(name: str) -> None:
    """To the bit what it gives from a bf16 cache that holds what the quantised one stands for."""
    plain, form, mla = simulated(), FORMATS[name], chunked(name)
    scale, tensor = scale_of(mla, 0.02)
    generator = torch.Generator().manual_seed(4)
    contexts, new = [70, 0, 33], [5, 20, 1]
    q, latent = torch.randn(26, 2, 96, generator=generator), torch.randn(26, 160, generator=generator)
    kv_b = torch.randn(2, 128, 128, generator=generator) / 12
    tokens = torch.randn(8, 16, 160, generator=generator)
    cache = form.quantise(tokens[..., :128], tokens[..., 128:], scale)
    elements = torch.cat(form.dequantise(cache, 128, 32, scale, torch.bfloat16), -1)
    table = torch.tensor([[7, 1, 5, 0, 3], [-1] * 5, [4, 2, 6, -1, -1]], dtype=torch.int32)
    borders = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    first = [x.bfloat16() for x in (q, latent, kv_b)]
    limits = {"max_context": 70, "workspace_tokens": 60}
    out, lse = mla.chunked_prefill(*first, cache, table, borders, lengths, tensor_scale=tensor, **limits)
    want, want_lse = plain.chunked_prefill(*first, elements, table, borders, lengths, **limits)
    assert torch.equal(out, want) and torch.equal(lse, want_lse) and not bool(out.isnan().any())
    wrongs: list[tuple[torch.Tensor | None, str]] = [(torch.ones(1), "tensor_scale has shape .* must be None")]
    if form.layout.tensor_scale:
        wrongs = [(None, "tensor_scale is None"), (torch.ones(1).half(), "tensor_scale has dtype")]
    for wrong, message in wrongs:
        with pytest.raises(ValueError, match=message):
            mla.chunked_prefill(*first, cache, table, borders, lengths, tensor_scale=wrong, **limits)
    with pytest.raises(ValueError, match="kv_cache has dtype"):
        mla.chunked_prefill(*first, cache.bfloat16(), table, borders, lengths, tensor_scale=tensor, **limits)


@dataclass
class Misread:
    """Kernels whose caller takes the wrong scale of the cache, or for each token the scales of another."""

    mla: MLA

    @property
    def manifest(self) -> Manifest:
        return self.mla.manifest

    def prefill(self, *tensors: Any, **options: Any) -> Any:
        return self.mla.prefill(*tensors, **options)

    def chunked_prefill(self, *tensors: Any, tensor_scale: torch.Tensor | None, **options: Any) -> Any:
        if tensor_scale is not None:
            return self.mla.chunked_prefill(*tensors, tensor_scale=tensor_scale * 1.25, **options)
        cache, manifest = tensors[3].clone(), self.manifest
        parts = FORMATS[manifest.cache.dtype].layout.parts(manifest.d_v, manifest.d_qk - manifest.d_v)
        (part,) = (part for part in parts if part.name == "scales")
        scales = slice(part.offset, part.offset + part.bytes)
        cache[..., scales] = cache[..., scales].roll(1, 1)
        return self.mla.chunked_prefill(*tensors[:3], cache, *tensors[4:], tensor_scale=None, **options)


@pytest.mark.parametrize("name", FORMATS)
def test_verification_of_chunked_prefill_reads_the_format(name: str) -> None:
    mla = chunked(name)
    problems = [random_chunked_problem(random.Random(seed), kernel_of(mla.manifest), 60) for seed in range(6)]
    # Of a row with few tokens one takes all the weight.
    problems.append(PrefillProblem(q=(2, 1), k=(40, 20), heads=2, q_gain=32, workspace=20))
    report = verify_prefill(mla, problems, device="cpu")
    assert report.ok and report.counts == {"chunked": 7}
    assert not verify_prefill(Misread(mla), problems, device="cpu").ok


# ---- Plans and machine code ------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(spec=specs(), dtype=st.sampled_from(sorted(FORMATS)))
def test_plans(spec: Spec, dtype: str) -> None:
    tree = spec.model_dump(exclude_none=True)
    tree["cache"]["dtype"] = dtype
    tree["kernels"]["decode"] = {}  # what is chosen there is of other schedules
    plan = make_plan(Spec.model_validate(tree))
    gather, append, *_ = plan.kernels
    assert isinstance(gather, QuantisedGatherPlan) and isinstance(append, QuantisedAppendPlan)
    form, row_bytes = FORMATS[dtype], plan.spec.row_bytes
    assert row_bytes == form.row_bytes(spec.d_v, spec.model.qk_rope_head_dim) and row_bytes % 16 == 0
    # Every element of a row comes from codes or from the 16-bit rotary part.
    assert gather.coded + 8 * gather.rope_pieces == spec.d_qk == 8 * gather.pieces
    assert gather.code_pieces + gather.rope_pieces <= row_bytes // 16
    assert gather.units_per_warp * (gather.code_pieces + gather.rope_pieces) <= 9 * 32
    assert append.kv_lora_rank == 128 * append.latent_loads and append.latent_loads * append.tokens_per_half <= 4
    assert gather.scales_offset == append.scales_offset and gather.group == append.group
    assert gather.unit_bytes == append.unit_bytes == row_bytes + 2 * spec.d_qk
    assert gather.floor_us(10**6, H200) == pytest.approx(1e12 * gather.unit_bytes / H200.copy_bandwidth)
    for kernel in (gather, append):
        names = [parameter.name for parameter in kernel.parameters]
        assert ("tensor_scale" in names) == form.layout.tensor_scale
        assert not form.layout.tensor_scale or names[-1] == "tensor_scale"
    assert set(render(plan)) >= {"gather.cu", "append.cu", "merge.cu", "prefill.cu"} - (
        {"prefill.cu"} if "prefill" not in {kernel.name for kernel in plan.kernels} else set()
    )


@pytest.mark.parametrize("file", ["gather.cu", "append.cu"])
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in SHIPPED])
def test_compiles_for_hopper(name: str, file: str) -> None:
    """Of the shipped ones test_compiler.py says the same."""
    kernel = compile_kernel(variant(name).manifest.folder / file).with_sass()
    (report,) = kernel.kernels.values()
    assert not kernel.warnings and report.registers <= 128
    assert report.spill_stores == report.spill_loads == report.stack_frame == report.static_smem == 0
    assert report.sass is not None and report.sass.get("LDL", 0) == report.sass.get("STL", 0) == 0
    assert report.sass.get("BAR", 0) == 0, "warps of a block wait for each other"


# ---- The bench -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["gather", "append", "append_rotated"])
@pytest.mark.parametrize("name", SHIPPED)
def test_the_bench_counts_what_really_moves(name: str, kernel: MemoryKernel) -> None:
    mla = variant(name)
    call = memory_call(mla, MemoryCase(kernel, 130), torch.device("cpu"), 0)
    got = call.run()
    assert call.check(got) is None
    beside = call.bytes - 130 * (mla.manifest.cache.row_bytes + 2 * 576)
    assert 0 < beside < (3_000 if kernel != "append_rotated" else 3_000_000)
    got.view(torch.uint8).flatten()[5] ^= 0x40
    assert call.check(got) is not None


# ---- Arguments -------------------------------------------------------------------------------------------------------


E4M3 = torch.float8_e4m3fn


def rows(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def gather_arguments(mla: MLA) -> dict[str, Any]:
    return {
        "kv_cache": rows(4, 64, mla.manifest.cache.row_bytes),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "cu_seqlens": torch.zeros(3, dtype=torch.int32),
        "tensor_scale": scale_of(mla)[1],
        "out": torch.zeros(10, 576).bfloat16(),
    }


def append_arguments(mla: MLA) -> dict[str, Any]:
    return {
        "c_kv": torch.zeros(5, 512).bfloat16(),
        "k_rope": torch.zeros(5, 64).bfloat16(),
        "kv_cache": rows(4, 64, mla.manifest.cache.row_bytes),
        "slot_mapping": torch.arange(5),
        "tensor_scale": scale_of(mla)[1],
    }


def off_by(count: int, *shape: int) -> torch.Tensor:
    size = math.prod(shape)
    return rows(size + 16)[count : count + size].view(shape)


ARGUMENTS = {"gather": gather_arguments, "append": append_arguments}
FAR_PAGES = torch.zeros(4, 41_992, dtype=torch.uint8)[:, :41_984].unflatten(1, (64, 656))
WRONG: list[tuple[str, Callable[[], dict[str, Any]], str]] = [
    ("fp8_ds_mla", lambda: {"kv_cache": rows(4, 64, 576)}, r"kv_cache has shape \(4, 64, 576\); .*656\), rows of fp8"),
    ("fp8_ds_mla", lambda: {"kv_cache": rows(4, 32, 656)}, r"kv_cache has shape \(4, 32, 656\)"),
    ("fp8_ds_mla", lambda: {"kv_cache": rows(4, 64, 2, 656)}, r"kv_cache has shape \(4, 64, 2, 656\); .*1, 656"),
    ("fp8_ds_mla", lambda: {"kv_cache": rows(4, 64, 656).to(torch.bfloat16)}, r"kv_cache has dtype .*16; .*uint8"),
    ("fp8_ds_mla", lambda: {"kv_cache": rows(4, 64, 656).view(E4M3)}, r"kv_cache has dtype .*e4m3fn; .*uint8"),
    ("fp8_ds_mla", lambda: {"kv_cache": off_by(8, 4, 64, 656)}, r"kv_cache begins at address 0x[0-9a-f]+, 8 B behind"),
    ("fp8_e4m3", lambda: {"kv_cache": off_by(1, 4, 64, 576)}, r"kv_cache begins at address 0x[0-9a-f]+, 1 B behind"),
    ("fp8_ds_mla", lambda: {"kv_cache": rows(4, 64, 664)[..., :656]}, r"kv_cache has a stride of 664 B in dimension 1"),
    ("fp8_ds_mla", lambda: {"kv_cache": FAR_PAGES}, r"kv_cache has a stride of 41992 B in dimension 0"),
    ("fp8_ds_mla", lambda: {"kv_cache": rows(4, 64, 1312)[..., ::2]}, r"kv_cache has stride 2 in its last dimension"),
    ("fp8_ds_mla", lambda: {"tensor_scale": torch.ones(1)}, r"tensor_scale has shape \(1\); it must be None, .*ds_mla"),
    ("fp8_e4m3", lambda: {"tensor_scale": None}, r"tensor_scale is None; it must be one float32, .* fp8_e4m3"),
    ("fp8_e4m3", lambda: {"tensor_scale": torch.ones(2)}, r"tensor_scale has shape \(2\); it must be one number"),
    ("fp8_e4m3", lambda: {"tensor_scale": torch.ones(1).double()}, r"tensor_scale has dtype torch.float64; .*float32"),
]


@pytest.mark.parametrize("kernel", ARGUMENTS)
@pytest.mark.parametrize("number", range(len(WRONG)), ids=lambda i: f"{WRONG[i][0]}: {WRONG[i][2]}")
def test_wrong_arguments_are_refused_before_anything_is_launched(
    number: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, make, message = WRONG[number]
    mla = variant(name)
    monkeypatch.setattr(mla._memory, "_launch", lambda *_: pytest.fail("launched"))
    with pytest.raises(ValueError, match=message):
        getattr(mla, kernel)(**{**ARGUMENTS[kernel](mla), **make()})


@pytest.mark.parametrize("kernel", ARGUMENTS)
@pytest.mark.parametrize("name", SHIPPED)
def test_right_arguments_are_launched(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the messages above would mean nothing; as one dimension more, and in the format's own type, too."""
    launched: list[str] = []
    mla = variant(name)
    monkeypatch.setattr(mla._memory, "_launch", lambda name, *_: launched.append(name))
    arguments = ARGUMENTS[kernel](mla)
    caches = [arguments["kv_cache"], arguments["kv_cache"].unsqueeze(2)]
    if name == "fp8_e4m3":
        caches.append(caches[0].view(E4M3))
        arguments["tensor_scale"] = arguments["tensor_scale"].squeeze()
    for cache in caches:
        getattr(mla, kernel)(**{**arguments, "kv_cache": cache})
    assert launched == [kernel] * len(caches)


def test_a_bf16_cache_takes_no_tensor_scale() -> None:
    mla = Memory(GENERATED / "deepseek_v3")
    with pytest.raises(
        ValueError, match=r"tensor_scale has shape \(1\); it must be None, for a cache of bf16 has none"
    ):
        mla.gather(
            torch.zeros(1, 64, 576).bfloat16(),
            torch.zeros(1, 1, dtype=torch.int32),
            torch.zeros(2, dtype=torch.int32),
            tensor_scale=torch.ones(1),
            total_tokens=0,
        )


@pytest.mark.parametrize("name", ["gather", "gather_out", "append"])
def test_operator(name: str) -> None:
    mla = variant("fp8_e4m3")
    key, scale = mla._memory.key, torch.tensor([0.5])
    cache = torch.randint(0, 0x7F, (4, 64, 576)).to(torch.uint8)
    ranges = (cache, torch.zeros(2, 3, dtype=torch.int32), torch.tensor([0, 3, 10], dtype=torch.int32), None, scale)
    tokens = (torch.randn(5, 512).bfloat16(), torch.randn(5, 64).bfloat16(), cache, torch.arange(5), None, None, None)
    arguments = {
        "gather": (*ranges, 10, key),
        "gather_out": (*ranges, torch.zeros(10, 576).bfloat16(), key),
        "append": (*tokens, scale, 1e-6, False, key),
    }
    torch.library.opcheck(getattr(torch.ops.mlaforge, name), arguments[name])
