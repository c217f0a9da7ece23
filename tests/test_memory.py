"""gather, append and merge under the simulator; their plans, arguments and operators."""

from __future__ import annotations

import functools
import itertools
import math
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaforge.api import MLA
from mlaforge.arguments import number_strides, piece_strides, require_devices, require_distinct_rows
from mlaforge.calls import divisor
from mlaforge.manifest import read_manifest
from mlaforge.memory import MemoryKernels, loaded
from mlaforge.memory_reference import append_reference, gather_reference, merge_reference
from mlaforge.memory_verify import KINDS, AppendProblem, GatherProblem, MergeProblem
from mlaforge.reference import decode_reference
from mlaforge.simulator import MODES, Simulator, SimulatorOptions
from mlaforge_generator.emit import write_folder
from mlaforge_generator.memory_plan import AppendPlan, GatherPlan, MergePlan
from mlaforge_generator.plan import make_plan
from mlaforge_generator.render import render
from mlaforge_generator.spec import Spec, parse_spec
from mlaforge_generator.target import H200
from strategies import specs
from test_verify import one_thread as one_thread

GENERATED = Path(__file__).parents[1] / "generated"
# The shipped shape; pages of one token, fp16, loads that leave lanes idle; no RoPE, several tokens for a half warp.
VARIANTS = {
    "576": (512, 64, 64, "bf16"),
    "432 fp16, pages of 1": (384, 48, 1, "fp16"),
    "128, no RoPE, pages of 128": (128, 0, 128, "bf16"),
}


def spec_text(rank: int, rope: int, page_size: int, dtype: str) -> str:
    return (
        f"name: r{rank}_r{rope}_p{page_size}_{dtype}\n"
        f"model: {{num_attention_heads: 16, kv_lora_rank: {rank}, qk_nope_head_dim: 128, qk_rope_head_dim: {rope},"
        " v_head_dim: 128}\n"
        f"cache: {{dtype: {dtype}, page_size: {page_size}}}\n"
    )


class Memory(MLA):
    """Without decode, on which the host's compiler works longer than on these kernels together."""

    def __init__(self, folder: Path) -> None:
        self.manifest, self.backend = read_manifest(folder), Simulator()
        self._memory = MemoryKernels(self.manifest, self.backend, f"memory of {folder}")
        loaded.add(self._memory)


@functools.cache
def variant(name: str = "576") -> MLA:
    if name == "576":
        return Memory(GENERATED / "deepseek_v3")
    folder = Path(tempfile.mkdtemp(prefix="mlaforge-memory-"))
    write_folder(folder, render(make_plan(parse_spec(spec_text(*VARIANTS[name])))))
    return Memory(folder)


# ---- Results ---------------------------------------------------------------------------------------------------------


# Of the last one the kernel that has more than one token for a half warp; each costs seconds of the host's compiler.
@pytest.mark.parametrize(
    ("name", "kernel"),
    [*itertools.product(list(VARIANTS)[:2], KINDS), ("128, no RoPE, pages of 128", "append")],
)
def test_random_problems(name: str, kernel: str) -> None:
    mla = variant(name)

    @settings(max_examples=40)
    @given(seed=st.integers(0, 2**32 - 1), schedule=st.integers(0, 2**32 - 1), mode=st.sampled_from(MODES))
    def accept(seed: int, schedule: int, mode: str) -> None:
        problem = KINDS[kernel].random(random.Random(seed), mla.manifest, 300)
        mla.backend.options = SimulatorOptions(seed=schedule, mode=mode)
        outcome = problem.run(mla, "cpu")
        assert outcome.ok, f"{problem}: {outcome.failures}"

    accept()


@pytest.mark.parametrize(
    "problem",
    [
        GatherProblem(counts=(0, 0, 70, 0, 0, 1, 0), starts=(5, 0, 63, 9, 64, 128, 0), extra_rows=5, table_filler=-1),
        GatherProblem(counts=(0, 0)),
        GatherProblem(counts=(1,) * 70),
        AppendProblem(tokens=50, left_out=1),
        AppendProblem(tokens=50, left_out=2, norm=True, rotate=1, one_projection=True),
        AppendProblem(tokens=0, norm=True),
        MergeProblem(tokens=9),
        MergeProblem(tokens=9, heads=2, width=512, in_place=1),
        MergeProblem(tokens=3, heads=3, width=128, batch=2, in_place=2, strided=True),
    ],
    ids=str,
)
def test_edges(problem: GatherProblem | AppendProblem | MergeProblem) -> None:
    outcome = problem.run(variant(), "cpu")
    assert outcome.ok, outcome.failures


def test_merge_of_all_nine_combinations() -> None:
    """Of finite, -inf and +inf; what an empty side holds is NaN, the numbers are those of a table."""
    finite = (0.25, 1.5)
    rows = [(x, y) for x in (finite[0], -math.inf, math.inf) for y in (finite[1], -math.inf, math.inf)]
    lse1, lse2 = (torch.tensor([side]) for side in zip(*rows, strict=True))
    out1 = torch.full((9, 1, 16), 3.0).masked_fill(lse1.T.isinf()[..., None], math.nan).bfloat16()
    out2 = torch.full((9, 1, 16), -5.0).masked_fill(lse2.T.isinf()[..., None], math.nan).bfloat16()
    out, lse = variant().merge(out1, lse1, out2, lse2)
    share = math.exp(finite[0]) / (math.exp(finite[0]) + math.exp(finite[1]))
    both = torch.tensor(3 * share - 5 * (1 - share)).bfloat16().item()
    assert out[:, 0, 0].tolist() == [both, 3, 3, -5, 0, 0, -5, 0, 0]
    assert bool((out == out[..., :1]).all())
    none = [-math.inf] * 2
    of_both = math.log(math.exp(finite[0]) + math.exp(finite[1]))
    assert lse[0].tolist() == [pytest.approx(of_both, rel=1e-6), *finite[:1] * 2, finite[1], *none, finite[1], *none]


def test_merge_of_nan_and_of_far_numbers() -> None:
    lse1 = torch.tensor([[math.nan, 1.0, 1e5, -1e5, 0.0]])
    lse2 = torch.tensor([[1.0, math.nan, 1e5 + 3, 0.0, -math.inf]])
    out1, out2 = torch.randn(2, 5, 1, 8).bfloat16()
    out, lse = variant().merge(out1, lse1, out2, lse2)
    assert bool(out[:2].isnan().all()) and bool(lse[0, :2].isnan().all())
    want, want_lse = merge_reference(out1, lse1, out2, lse2)
    torch.testing.assert_close(out[2:].double(), want[2:], rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(lse[0, 2:].double(), want_lse[0, 2:], rtol=1e-6, atol=0)
    assert torch.equal(out[4], out1[4]) and torch.equal(out[3], out2[3])


def test_gather_of_tokens_that_are_not_there() -> None:
    """Zeros, and nothing is dereferenced: beyond the table's width, in blocks that the cache does not have."""
    mla = variant()
    cache = torch.randn(4, 64, 576).bfloat16()
    table = torch.tensor([[2, 1], [-1, 0], [3, 2_147_480_000], [0, 4]], dtype=torch.int32)
    borders = torch.tensor([3, 73, 143, 213, 283], dtype=torch.int32)
    starts = torch.tensor([100, 30, 0, 60], dtype=torch.int32)
    out = torch.full((290, 576), math.nan, dtype=torch.bfloat16)
    want = gather_reference(cache, table, borders, starts, out)
    got = mla.gather(cache, table, borders, seq_starts=starts, out=out)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    assert got is out and bool(got[:3].isnan().all()) and bool(got[283:].isnan().all())
    zero = (got == 0).all(-1)
    assert [int(part.sum()) for part in zero[3:283].view(4, 70)] == [70 - 28, 34, 6, 66]
    # A start before the first token, by a host's mistake.
    starts[0] = -5
    assert bool((mla.gather(cache, table, borders, seq_starts=starts, out=out)[3:8] == 0).all())


def test_append_writes_what_gather_and_decode_read() -> None:
    """All see the cache alike: decode's reference over the pages gives what attention over the tokens gives."""
    mla = variant()
    generator = torch.Generator().manual_seed(3)
    cache = torch.full((6, 64, 576), math.nan, dtype=torch.bfloat16)
    tokens = torch.randn(100, 576, generator=generator).div(10).bfloat16()
    table = torch.tensor([[4, 1, 0]], dtype=torch.int32)
    at = torch.arange(100)
    mla.append(tokens[:, :512], tokens[:, 512:], cache, table[0, at // 64].long() * 64 + at % 64)
    borders = torch.tensor([0, 100], dtype=torch.int32)
    assert torch.equal(mla.gather(cache, table, borders, total_tokens=100), tokens)
    q = torch.randn(1, 1, 16, 576, generator=generator).bfloat16()
    out, _ = decode_reference(q, cache, table, torch.tensor([100]), d_v=512, softmax_scale=0.1)
    weights = (q[0, 0].double() @ tokens.double().T * 0.1).softmax(-1)
    torch.testing.assert_close(out[0, 0], weights @ tokens[:, :512].double())


def test_append_turns_as_a_complex_product() -> None:
    """Pairs as complex numbers, which is how the rotation was written first; a table of float32 angles."""
    mla = variant()
    c_kv, k_rope = torch.zeros(5, 512).bfloat16(), torch.randn(5, 64).bfloat16()
    positions = torch.tensor([0, 1, 7, 100, 511])
    angles = torch.arange(512)[:, None] * 10_000.0 ** -(torch.arange(32) / 32)
    table = torch.cat([angles.cos(), angles.sin()], -1)
    turn = torch.polar(torch.ones_like(angles), angles)[positions].to(torch.complex128)
    for interleaved in (True, False):
        cache = torch.full((1, 64, 576), math.nan, dtype=torch.bfloat16)
        mla.append(
            c_kv, k_rope, cache, torch.arange(5), positions=positions, cos_sin_cache=table, interleaved=interleaved
        )
        pairs = k_rope.double().unflatten(-1, (32, 2) if interleaved else (2, 32))
        pairs = pairs if interleaved else pairs.transpose(-1, -2)
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        want = (turned if interleaved else turned.transpose(-1, -2)).flatten(1)
        torch.testing.assert_close(cache[0, :5, 512:].double(), want, rtol=2**-8, atol=1e-6)
        assert bool((cache[0, :5, :512] == 0).all()) and bool(cache[0, 5:].isnan().all())


@settings(max_examples=300)
@given(d=st.integers(1, 2**31 - 1), n=st.integers(0, 2**31 - 1), multiple=st.integers(0, 2**31 - 1))
def test_division_by_multiplication(d: int, n: int, multiple: int) -> None:
    same, multiplier, shift = divisor(d)
    assert same == d and 0 < multiplier < 2**32
    border = multiple // d * d
    for number in {n, border, border - 1, 0, 2**31 - 1}:
        if 0 <= number < 2**31:
            assert ((number * multiplier >> 31) % 2**32) >> shift == number // d


# ---- Plans ----------------------------------------------------------------------------------------------------------


@given(specs())
def test_plans(spec: Spec) -> None:
    gather, append, merge = make_plan(spec).kernels[:3]
    assert isinstance(gather, GatherPlan) and isinstance(append, AppendPlan) and isinstance(merge, MergePlan)
    assert gather.pieces * 16 == spec.d_qk * 2 and gather.page_size == append.page_size == spec.cache.page_size
    loads = -(-gather.units_per_warp * gather.pieces // 32)
    assert loads <= 9 and (gather.units_per_warp == 32 or 2 * gather.units_per_warp * gather.pieces > 9 * 32)
    assert gather.constants["tokens_per_block"] == 8 * gather.units_per_warp
    assert append.latent_loads * 16 * 8 == append.kv_lora_rank == spec.model.kv_lora_rank
    assert append.rope_pieces * 8 == spec.model.qk_rope_head_dim and append.rope_pieces % 2 == 0
    assert append.latent_loads * append.tokens_per_half <= 4
    assert append.constants["tokens_per_block"] == 16 * append.tokens_per_half == 8 * append.units_per_warp
    assert merge.constants["pieces_per_warp"] * 8 == 1024
    assert gather.unit_bytes == append.unit_bytes == 4 * spec.d_qk
    assert gather.floor_us(10**6, H200) == pytest.approx(4e12 * spec.d_qk / H200.copy_bandwidth)
    for kernel in (gather, append, merge):
        assert kernel.threads % 32 == 0 and kernel.smem_bytes == 0 and not kernel.boxes


# ---- Arguments -------------------------------------------------------------------------------------------------------


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def two_bytes_off(*shape: int) -> torch.Tensor:
    return torch.zeros(math.prod(shape) + 8).bfloat16()[1 : 1 + math.prod(shape)].view(shape)


def gather_arguments(**changes: Any) -> dict[str, Any]:
    arguments = {
        "kv_cache": zeros(4, 64, 576),
        "block_table": ints(2, 3),
        "cu_seqlens": ints(3),
        "seq_starts": ints(2),
        "out": zeros(10, 576),
    }
    return {**arguments, **changes}


def append_arguments(**changes: Any) -> dict[str, Any]:
    arguments = {
        "c_kv": zeros(5, 512),
        "k_rope": zeros(5, 64),
        "kv_cache": zeros(4, 64, 576),
        "slot_mapping": torch.arange(5),
        "norm_weight": zeros(512),
        "eps": 1e-6,
        "positions": ints(5),
        "cos_sin_cache": torch.zeros(9, 64),
        "interleaved": True,
    }
    return {**arguments, **changes}


def merge_arguments(**changes: Any) -> dict[str, Any]:
    arguments = {
        "out1": zeros(5, 3, 64),
        "lse1": torch.zeros(3, 5),
        "out2": zeros(5, 3, 64),
        "lse2": torch.zeros(3, 5),
        "out": zeros(5, 3, 64),
        "lse": torch.zeros(3, 5),
    }
    return {**arguments, **changes}


WRONG: list[tuple[str, Callable[[], dict[str, Any]], str]] = [
    ("gather", lambda: {"kv_cache": zeros(4, 32, 576)}, r"kv_cache has shape \(4, 32, 576\); .*64, 576"),
    ("gather", lambda: {"kv_cache": zeros(4, 64, 2, 576)}, r"kv_cache has shape \(4, 64, 2, 576\); .*1, 576"),
    ("gather", lambda: {"kv_cache": zeros(4, 64, 576).half()}, r"kv_cache has dtype torch.float16; .*bfloat16"),
    ("gather", lambda: {"kv_cache": zeros(0, 64, 576)}, r"kv_cache has shape \(0, 64, 576\); .*at least one block"),
    ("gather", lambda: {"kv_cache": two_bytes_off(4, 64, 576)}, r"kv_cache begins at address 0x[0-9a-f]+, 2 B behind"),
    ("gather", lambda: {"kv_cache": zeros(4, 64, 577)[..., :576]}, r"kv_cache has a stride of 1154 B in dimension 1"),
    ("gather", lambda: {"kv_cache": zeros(4, 64, 1152)[..., ::2]}, r"kv_cache has stride 2 in its last dimension"),
    ("gather", lambda: {"block_table": ints(6)}, r"block_table has shape \(6\); it must be \(b, max_blocks\)"),
    ("gather", lambda: {"block_table": ints(2, 6)[:, ::2]}, r"block_table has stride 2"),
    ("gather", lambda: {"block_table": ints(2, 3, dtype=torch.int64)}, r"block_table has dtype torch.int64; .*int32"),
    ("gather", lambda: {"cu_seqlens": ints(2)}, r"cu_seqlens has shape \(2\), block_table has 2 rows; .*1 more"),
    ("gather", lambda: {"cu_seqlens": ints(6)[::2]}, r"cu_seqlens has strides \(2,\)"),
    ("gather", lambda: {"cu_seqlens": torch.zeros(3)}, r"cu_seqlens has dtype torch.float32"),
    ("gather", lambda: {"seq_starts": ints(3)}, r"seq_starts has shape \(3\), block_table has 2 rows"),
    ("gather", lambda: {"out": zeros(10, 512)}, r"out has shape \(10, 512\); it must be \(total_tokens, 576\)"),
    ("gather", lambda: {"out": zeros(10, 576).float()}, r"out has dtype torch.float32"),
    ("gather", lambda: {"out": two_bytes_off(10, 576)}, r"out begins at address .* 2 B behind a multiple of 16"),
    ("gather", lambda: {"out": zeros(10, 580)[:, :576]}, r"out has a stride of 1160 B in dimension 0"),
    ("gather", lambda: {"out": zeros(1, 576).expand(10, -1)}, r"out has shape .* its rows overlap"),
    ("gather", lambda: {"out": zeros(11, 576), "total_tokens": 10}, r"total_tokens is 10, out has 11 rows"),
    ("gather", lambda: {"out": None}, r"total_tokens is None"),
    ("gather", lambda: {"out": None, "total_tokens": -1}, r"total_tokens is -1; it must be 0 or more"),
    ("append", lambda: {"c_kv": zeros(5, 576)}, r"c_kv has shape \(5, 576\); it must be \(n, 512\)"),
    ("append", lambda: {"c_kv": zeros(5, 512).float()}, r"c_kv has dtype torch.float32"),
    ("append", lambda: {"c_kv": zeros(5, 516)[:, 4:]}, r"c_kv has a stride of 1032 B in dimension 0"),
    ("append", lambda: {"c_kv": zeros(5, 520)[:, 4:516]}, r"c_kv begins at address .* 8 B behind"),
    ("append", lambda: {"c_kv": zeros(5, 1024)[:, ::2]}, r"c_kv has stride 2 in its last dimension"),
    ("append", lambda: {"k_rope": zeros(4, 64)}, r"k_rope has 4 rows, c_kv has 5"),
    ("append", lambda: {"k_rope": zeros(5, 32)}, r"k_rope has shape \(5, 32\); it must be \(n, 64\)"),
    ("append", lambda: {"k_rope": None}, r"k_rope is None; it must be \(n, 64\)"),
    ("append", lambda: {"k_rope": zeros(5, 68)[:, 4:]}, r"k_rope has a stride of 136 B"),
    ("append", lambda: {"kv_cache": zeros(4, 16, 576)}, r"kv_cache has shape \(4, 16, 576\)"),
    ("append", lambda: {"kv_cache": zeros(1, 64, 576).expand(4, -1, -1)}, r"kv_cache has shape .* its rows overlap"),
    ("append", lambda: {"kv_cache": two_bytes_off(4, 64, 576)}, r"kv_cache begins at address"),
    ("append", lambda: {"slot_mapping": torch.arange(4)}, r"slot_mapping has shape \(4\), c_kv has 5 rows"),
    ("append", lambda: {"slot_mapping": torch.arange(5).short()}, r"slot_mapping has dtype torch.int16; .*int32 or"),
    ("append", lambda: {"slot_mapping": torch.arange(10)[::2]}, r"slot_mapping has strides \(2,\)"),
    ("append", lambda: {"norm_weight": zeros(576)}, r"norm_weight has shape \(576\); it must be \(512,\)"),
    ("append", lambda: {"norm_weight": zeros(512).float()}, r"norm_weight has dtype torch.float32"),
    ("append", lambda: {"eps": 0.0}, r"eps is 0.0; it must be positive"),
    ("append", lambda: {"eps": math.nan}, r"eps is nan"),
    ("append", lambda: {"positions": None}, r"positions is None; positions and cos_sin_cache go together"),
    ("append", lambda: {"cos_sin_cache": None}, r"cos_sin_cache is None; positions and cos_sin_cache go together"),
    ("append", lambda: {"positions": ints(6)}, r"positions has shape \(6\), c_kv has 5 rows"),
    ("append", lambda: {"cos_sin_cache": torch.zeros(9, 32)}, r"cos_sin_cache has shape \(9, 32\); .*64"),
    ("append", lambda: {"cos_sin_cache": zeros(9, 64)}, r"cos_sin_cache has dtype torch.bfloat16; .*float32"),
    ("append", lambda: {"cos_sin_cache": torch.zeros(9, 66)[:, :64]}, r"cos_sin_cache has a stride of 264 B"),
    ("append", lambda: {"interleaved": None}, r"interleaved is None"),
    ("merge", lambda: {"out1": zeros(15, 64)}, r"out1 has shape \(15, 64\); it must be \(tokens, heads, d\)"),
    ("merge", lambda: {"out1": zeros(5, 3, 60)}, r"out1 has shape \(5, 3, 60\); .*multiple of 8"),
    ("merge", lambda: {"out1": zeros(5, 3, 1032)}, r"out1 has shape \(5, 3, 1032\); .*1024"),
    ("merge", lambda: {"out1": zeros(5, 3, 64).float()}, r"out1 has dtype torch.float32"),
    ("merge", lambda: {"out2": zeros(5, 3, 72)}, r"out2 has shape \(5, 3, 72\) .*\(5, 3, 64\)"),
    ("merge", lambda: {"lse1": torch.zeros(5, 3)}, r"lse1 has shape \(5, 3\) .*\(3, 5\)"),
    ("merge", lambda: {"lse2": torch.zeros(3, 5).double()}, r"lse2 has .*float64; it must be"),
    ("merge", lambda: {"out": zeros(5, 3, 64).half()}, r"out has shape .* and dtype torch.float16"),
    ("merge", lambda: {"out": zeros(5, 1, 64).expand(5, 3, 64)}, r"out has shape .* its rows overlap"),
    ("merge", lambda: {"lse": torch.zeros(3, 1).expand(3, 5)}, r"lse has shape .* its rows overlap"),
    ("merge", lambda: {"out2": two_bytes_off(5, 3, 64)}, r"out2 begins at address"),
    ("merge", lambda: {"out2": zeros(5, 3, 68)[..., :64]}, r"out2 has a stride of 408 B in dimension 0"),
]
ARGUMENTS = {"gather": gather_arguments, "append": append_arguments, "merge": merge_arguments}


@pytest.mark.parametrize("number", range(len(WRONG)), ids=lambda i: f"{WRONG[i][0]}: {WRONG[i][2]}")
def test_wrong_arguments_are_refused_before_anything_is_launched(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, make, message = WRONG[number]
    mla = variant()
    monkeypatch.setattr(mla._memory, "_launch", lambda *_: pytest.fail("launched"))
    with pytest.raises(ValueError, match=message):
        getattr(mla, kernel)(**ARGUMENTS[kernel](**make()))


@pytest.mark.parametrize("kernel", ARGUMENTS)
def test_right_arguments_are_launched(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the messages above would mean nothing."""
    launched: list[str] = []
    mla = variant()
    monkeypatch.setattr(mla._memory, "_launch", lambda name, *_: launched.append(name))
    getattr(mla, kernel)(**ARGUMENTS[kernel]())
    assert launched == [kernel]


def test_without_a_rotary_part() -> None:
    mla = variant("128, no RoPE, pages of 128")
    with pytest.raises(ValueError, match=r"k_rope has shape \(2, 64\); it must be None, for qk_rope_head_dim of r128"):
        mla.append(zeros(2, 128), zeros(2, 64), zeros(1, 128, 128), torch.arange(2))


def test_nothing_to_do() -> None:
    mla = variant()
    assert mla.gather(zeros(1, 64, 576), ints(0, 1), ints(1), total_tokens=0).shape == (0, 576)
    assert mla.gather(zeros(1, 64, 576), ints(2, 1), ints(3), total_tokens=0).shape == (0, 576)
    mla.append(zeros(0, 512), zeros(0, 64), zeros(1, 64, 576), ints(0))
    out, lse = mla.merge(zeros(0, 3, 64), torch.zeros(3, 0), zeros(0, 3, 64), torch.zeros(3, 0))
    assert out.shape == (0, 3, 64) and lse.shape == (3, 0)


def test_checks_of_devices() -> None:
    here, there = zeros(1), zeros(1).to("meta")
    assert require_devices([("x", here), ("y", here)], "cpu") == here.device
    with pytest.raises(ValueError, match="x is on meta; these kernels run on cpu"):
        require_devices([("x", there), ("y", here)], "cpu")
    with pytest.raises(ValueError, match="y is on meta, x is on cpu; all must be on one device"):
        require_devices([("x", here), ("y", there)], "cpu")


def test_checks_of_strides() -> None:
    far = torch.empty_strided((2, 8), (1 << 35, 1), dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match=r"x has a stride of 68719476736 B"):
        piece_strides("x", far)
    with pytest.raises(ValueError, match=r"x has strides .* below 2\^31"):
        number_strides("x", torch.empty_strided((2, 2), (1 << 31, 1), device="meta"))
    assert piece_strides("x", zeros(1, 3, 7, 16)[:, ::2]) == (0, 28, 2)
    require_distinct_rows("x", zeros(3, 5, 8).transpose(0, 1))
    with pytest.raises(ValueError, match="overlap"):
        require_distinct_rows("x", zeros(64).as_strided((3, 16), (8, 1)))


# ---- Operators -------------------------------------------------------------------------------------------------------


def operator_arguments() -> dict[str, tuple[Any, ...]]:
    mla = variant()
    key = mla._memory.key
    cache = torch.randn(4, 64, 576).bfloat16()
    ranges = (cache, ints(2, 3), torch.tensor([0, 3, 10], dtype=torch.int32), None, None)
    partials = tuple(x for _ in range(2) for x in (torch.randn(5, 3, 64).bfloat16(), torch.randn(3, 5)))
    tokens = (torch.randn(5, 512).bfloat16(), torch.randn(5, 64).bfloat16(), cache, torch.arange(5))
    return {
        "gather": (*ranges, 10, key),
        "gather_out": (*ranges, zeros(10, 576), key),
        "append": (*tokens, torch.ones(512).bfloat16(), ints(5), torch.ones(9, 64), None, 1e-6, True, key),
        "merge": (*partials, key),
        "merge_out": (*partials, zeros(5, 3, 64), torch.zeros(3, 5), key),
    }


@pytest.mark.parametrize("name", ["gather", "gather_out", "append", "merge", "merge_out"])
def test_operator(name: str) -> None:
    operator = getattr(torch.ops.mlaforge, name)
    torch.library.opcheck(operator, operator_arguments()[name])


def test_torch_compile() -> None:
    """The whole of a layer's memory work in one graph, whose writes stay where they are."""
    mla = variant()

    def layer(
        c_kv: torch.Tensor, k_rope: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, borders: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mla.append(c_kv * 2, k_rope, cache, slots)
        tokens = mla.gather(cache, slots[:1, None].int() // 64, borders, total_tokens=5)
        out, lse = mla.merge(tokens[:, None, :64], torch.zeros(1, 5), tokens[:, None, 64:128], torch.zeros(1, 5))
        return out + 1, lse

    c_kv, k_rope = torch.randn(5, 512).bfloat16(), torch.randn(5, 64).bfloat16()
    slots, borders = torch.arange(64, 69), torch.tensor([0, 5], dtype=torch.int32)
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        cache = torch.zeros(3, 64, 576).bfloat16()
        out, lse = run(c_kv, k_rope, cache, slots, borders)
        assert torch.equal(cache[1, :5], torch.cat([c_kv * 2, k_rope], -1)) and not cache[[0, 2]].any()
        results.append((out, lse))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    tokens = append_reference(c_kv * 2, k_rope)
    want = (tokens[:, :64] + tokens[:, 64:128]) / 2 + 1
    torch.testing.assert_close(results[0][0][:, 0].double(), want, rtol=0, atol=0.04)


def test_a_folder_by_its_name() -> None:
    assert read_manifest(str(GENERATED / "deepseek_v3")) == read_manifest(GENERATED / "deepseek_v3")


def test_no_such_kernels() -> None:
    with pytest.raises(ValueError, match="no kernel 'x' is loaded"):
        torch.ops.mlaforge.merge(*operator_arguments()["merge"][:4], "x")


def test_other_specs_of_the_text() -> None:
    """The test's own specs are what it says they are."""
    for name, (rank, rope, page_size, dtype) in VARIANTS.items():
        spec = parse_spec(spec_text(rank, rope, page_size, dtype))
        assert (spec.d_qk, spec.cache.page_size, spec.cache.dtype) == (rank + rope, page_size, dtype), name
