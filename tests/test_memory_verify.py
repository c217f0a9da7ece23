"""Verification of the memory-bound kernels: right ones pass, a faulty one is found, shrunk and replayed."""

from __future__ import annotations

import dataclasses
import math
import random
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import mlaforge
from mlaforge.formats import FORMATS
from mlaforge.manifest import Manifest, read_manifest
from mlaforge.memory_reference import append_reference, gather_reference, merge_reference
from mlaforge.memory_verify import (
    KINDS,
    AppendProblem,
    GatherProblem,
    MemoryProblem,
    MergeProblem,
    is_memory_problem,
    parse_problem,
    random_problems,
    verify_problems,
)
from mlaforge.verify import shrink
from mlaforge_generator import cli
from test_verify import one_thread as one_thread

GENERATED = Path(__file__).parents[1] / "generated"
MANIFESTS = [read_manifest(GENERATED / name) for name in ("deepseek_v3", "minicpm3", "glm_5_3_flash")]
QUANTISED = [read_manifest(GENERATED / f"deepseek_v3_{name}") for name in ("nvfp4", "fp8_ds_mla", "fp8_e4m3")]
PAGE_1 = dataclasses.replace(
    MANIFESTS[1], element="fp16", cache=dataclasses.replace(MANIFESTS[1].cache, dtype="fp16", page_size=1)
)


@dataclass(frozen=True)
class TorchKernels:
    """The kernels in torch. Each of their faults is one that a kernel could have."""

    fault: str = ""
    manifest: Manifest = field(default_factory=lambda: MANIFESTS[0])

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
        assert out is not None and total_tokens is None
        if self.fault == "starts are ignored":
            seq_starts = None
        if self.fault == "starts are off by one" and seq_starts is not None:
            seq_starts = seq_starts + 1
        if self.fault == "the last row is left out":
            cu_seqlens = torch.cat([cu_seqlens[:-1], cu_seqlens[-1:] - 1])
        if self.fault == "pages of the first sequence serve all":
            block_table = block_table[:1].expand_as(block_table)
        if self.manifest.cache.quantised:
            kv_cache = self._read(kv_cache, tensor_scale)
        out.copy_(gather_reference(kv_cache, block_table, cu_seqlens, seq_starts, out))
        if self.fault == "rows of nobody are cleared":
            out[int(cu_seqlens[-1]) :] = 0
        if self.fault == "gather writes too far":
            torch.as_strided(out, (1,), (1,), out.storage_offset() + out.shape[0] * out.stride(0)).zero_()
        return out

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
        page, dtype = self.manifest.cache.page_size, c_kv.dtype
        if self.fault == "raises":
            raise RuntimeError("no such slot")
        if self.fault == "the other pairs":
            interleaved = not interleaved
        if self.fault == "turned backwards" and cos_sin_cache is not None:
            cos, sin = cos_sin_cache.chunk(2, -1)
            cos_sin_cache = torch.cat([cos, -sin], -1)
        if self.fault == "angles in 16 bits" and cos_sin_cache is not None:
            cos_sin_cache = cos_sin_cache.to(dtype).float()
        if self.fault == "unknown positions become the last" and positions is not None and cos_sin_cache is not None:
            positions = positions.clamp(0, cos_sin_cache.shape[0] - 1)
        tokens = append_reference(
            c_kv,
            k_rope,
            norm_weight=None if self.fault == "not normalised" else norm_weight,
            eps=eps,
            positions=positions,
            cos_sin_cache=cos_sin_cache,
            interleaved=bool(interleaved),
        )
        if self.fault == "rounded before the weight" and norm_weight is not None:
            ones = torch.ones_like(norm_weight)
            plain = append_reference(c_kv, None, norm_weight=ones, eps=eps).to(dtype)
            tokens[:, : c_kv.shape[1]] = plain.double() * norm_weight.double()
        slots = slot_mapping.long()
        places = kv_cache.shape[0] * page
        if self.fault == "a slot of -1 is the last":
            slots = slots.where(slots != -1, places - 1)
        if self.fault == "slots are off by one":
            slots = (slots + 1).where(slots >= 0, slots)
        kept = (slots >= 0) & (slots < places)
        cache = kv_cache.squeeze(2) if kv_cache.dim() == 4 else kv_cache
        if self.manifest.cache.quantised:
            cache[slots[kept] // page, slots[kept] % page] = self._written(tokens[kept], tensor_scale)
        else:
            cache[slots[kept] // page, slots[kept] % page] = tokens[kept].to(dtype)

    def _read(self, kv_cache: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
        form, rank = FORMATS[self.manifest.cache.dtype], self.manifest.d_v
        if self.fault == "the scale of the cache is 1" and tensor_scale is not None:
            tensor_scale = torch.ones(1)
        scale = None if tensor_scale is None else float(tensor_scale)
        dtype = torch.float32 if self.fault == "rounded to fp16 on the way" else torch.bfloat16
        read = torch.cat(form.dequantise(kv_cache, rank, self.manifest.d_qk - rank, scale, dtype), -1)
        return read.half().bfloat16() if dtype == torch.float32 else read

    def _written(self, tokens: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
        form, rank = FORMATS[self.manifest.cache.dtype], self.manifest.d_v
        scale = None if tensor_scale is None else float(tensor_scale)
        if self.fault == "rounded to bf16 before it is quantised":
            tokens = tokens.bfloat16()
        rows = form.quantise(tokens[:, :rank], tokens[:, rank:], scale)
        parts = {part.name: part for part in form.layout.parts(rank, tokens.shape[1] - rank)}
        latent = rows[:, parts["latent"].offset : parts["latent"].offset + parts["latent"].bytes]
        if self.fault == "the halves of a byte are swapped":
            latent.copy_(latent << 4 | latent >> 4)
        if self.fault == "a code is off by one in the last place":
            latent[:, 5] ^= 1
        if self.fault == "scales twice as large" and parts["scales"].dtype == "f32":
            scales = rows[:, parts["scales"].offset : parts["scales"].offset + parts["scales"].bytes]
            doubled = scales.clone().view(torch.float32) * 2
            halves = form.quantise(tokens[:, :rank] / 2, tokens[:, rank:], scale)[:, : latent.shape[1]]
            latent.copy_(halves)
            scales.copy_(doubled.view(torch.uint8))
        if self.fault == "the blocks of a row the other way around":
            scales = rows[:, parts["scales"].offset : parts["scales"].offset + parts["scales"].bytes]
            scales.copy_(scales.flip(1))
        if self.fault == "the rotary part is the next token's":
            rope = rows[:, parts["rope"].offset : parts["rope"].offset + parts["rope"].bytes]
            rope.copy_(rope.roll(1, 0).flip(1))
        return rows

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
        assert out is not None and lse is not None
        scale = math.log2(math.e) if self.fault == "lse taken for one of base 2" else 1.0
        if self.fault == "+inf is a number":
            lse1, lse2 = (x.nan_to_num(posinf=1e4, neginf=-math.inf) for x in (lse1, lse2))
        if self.fault == "lse is written first":
            lse.copy_(merge_reference(out1, lse1, out2, lse2)[1])
        merged, merged_lse = merge_reference(out1, lse1 / scale, out2, lse2 / scale)
        if self.fault == "the sides are swapped":
            merged, _ = merge_reference(out1, lse2, out2, lse1)
        if self.fault == "what an empty side holds counts":
            merged = merged + 0 * (out1.double() + out2.double())
        if self.fault == "two empty sides give +inf":
            merged_lse = merged_lse.where(merged_lse != -math.inf, math.inf)
        out.copy_(merged)
        lse.copy_(merged_lse * scale)
        return out, lse


@pytest.mark.parametrize("manifest", [*MANIFESTS, PAGE_1], ids=lambda m: f"{m.name} {m.cache.page_size}")
def test_right_kernels_pass(manifest: Manifest) -> None:
    seen: list[MemoryProblem] = []
    problems = random_problems(manifest, 40, 1, 600)
    report = verify_problems(TorchKernels(manifest=manifest), problems, seen.append, device="cpu")
    assert report.failure is None, report.failure
    assert seen == problems and report.counts == dict.fromkeys(("gather", "append", "merge"), 40)
    assert report.used["gather"] == 0 and 0.9 < report.used["append"] <= 1 and 0.9 < report.used["merge"] <= 1


FAULTS = {
    "starts are ignored": "gather",
    "starts are off by one": "gather",
    "the last row is left out": "gather",
    "pages of the first sequence serve all": "gather",
    "rows of nobody are cleared": "gather",
    "gather writes too far": "gather",
    "raises": "append",
    "the other pairs": "append",
    "turned backwards": "append",
    "angles in 16 bits": "append",
    "unknown positions become the last": "append",
    "not normalised": "append",
    "rounded before the weight": "append",
    "a slot of -1 is the last": "append",
    "slots are off by one": "append",
    "lse taken for one of base 2": "merge",
    "+inf is a number": "merge",
    "lse is written first": "merge",
    "the sides are swapped": "merge",
    "what an empty side holds counts": "merge",
    "two empty sides give +inf": "merge",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_shrunk_and_replayed(fault: str) -> None:
    kernels = TorchKernels(fault)
    report = verify_problems(kernels, random_problems(kernels.manifest, 60, 3, 300), device="cpu")
    assert report.failure is not None
    small = report.failure.problem
    assert small.kernel == FAULTS[fault]
    match small:
        case GatherProblem():
            assert sum(small.counts) <= 4 and len(small.counts) <= 2
        case AppendProblem():
            assert small.tokens <= 2
        case MergeProblem():
            assert small.tokens * small.heads <= 9 and small.width == 8
    replayed = parse_problem(shlex.split(small.to_repro("a_spec"))[-1])
    assert replayed == small
    again = replayed.run(kernels, "cpu")
    assert again == report.failure.outcome and not again.ok
    assert replayed.run(TorchKernels(), "cpu").ok


@pytest.mark.parametrize("manifest", QUANTISED, ids=lambda m: m.name)
def test_right_quantised_kernels_pass(manifest: Manifest) -> None:
    problems = [problem for problem in random_problems(manifest, 25, 1, 300) if problem.kernel != "merge"]
    report = verify_problems(TorchKernels(manifest=manifest), problems, device="cpu")
    assert report.failure is None, report.failure
    assert report.counts == {"gather": 25, "append": 25}


# By the format in which they can be.
QUANTISED_FAULTS = {
    "the scale of the cache is 1": ("nvfp4", "gather"),
    "rounded to fp16 on the way": ("fp8_ds_mla", "gather"),
    "starts are off by one": ("nvfp4", "gather"),
    "rounded to bf16 before it is quantised": ("fp8_ds_mla", "append"),
    "the halves of a byte are swapped": ("nvfp4", "append"),
    "a code is off by one in the last place": ("fp8_e4m3", "append"),
    "scales twice as large": ("fp8_ds_mla", "append"),
    "the blocks of a row the other way around": ("nvfp4", "append"),
    "the rotary part is the next token's": ("nvfp4", "append"),
    "turned backwards": ("fp8_e4m3", "append"),
    "not normalised": ("nvfp4", "append"),
    "slots are off by one": ("fp8_ds_mla", "append"),
}


@pytest.mark.parametrize("fault", QUANTISED_FAULTS)
def test_a_fault_of_quantised_rows_is_found_and_replayed(fault: str) -> None:
    name, kernel = QUANTISED_FAULTS[fault]
    (manifest,) = [each for each in QUANTISED if each.cache.dtype == name]
    problems = [each for each in random_problems(manifest, 40, 3, 200) if each.kernel == kernel]
    report = verify_problems(TorchKernels(fault, manifest), problems, device="cpu")
    assert report.failure is not None and report.failure.problem.kernel == kernel
    replayed = parse_problem(shlex.split(report.failure.problem.to_repro("a_spec"))[-1])
    assert replayed == report.failure.problem and not replayed.run(TorchKernels(fault, manifest), "cpu").ok
    assert replayed.run(TorchKernels(manifest=manifest), "cpu").ok


@given(
    seed=st.integers(0, 1 << 64),
    kernel=st.sampled_from(sorted(KINDS)),
    manifest=st.sampled_from([*MANIFESTS, *QUANTISED]),
    max_tokens=st.sampled_from([1, 64, 1 << 18]),
)
def test_random_problems_are_sound_and_survive_their_text(
    seed: int, kernel: str, manifest: Manifest, max_tokens: int
) -> None:
    problem = KINDS[kernel].random(random.Random(seed), manifest, max_tokens)
    assert problem == KINDS[kernel].random(random.Random(seed), manifest, max_tokens)
    assert is_memory_problem(str(problem)) and parse_problem(str(problem)) == problem
    match problem:
        case GatherProblem():
            assert sum(problem.counts) <= max_tokens
        case AppendProblem():
            assert problem.tokens <= max_tokens
    for simpler in problem.simpler():
        assert simpler != problem and simpler.kernel == kernel


@pytest.mark.parametrize("kernel", KINDS)
def test_random_problems_reach_every_edge(kernel: str) -> None:
    rng = random.Random(0)
    problems = [KINDS[kernel].random(rng, QUANTISED[0], 1 << 14) for _ in range(500)]
    for each in dataclasses.fields(KINDS[kernel]):
        if kernel != "merge" or each.name not in ("cache_layers", "spare_pages", "cache_4d"):
            assert len({getattr(problem, each.name) for problem in problems}) > 1, each.name


def test_all_combinations_of_lse_are_in_one_problem() -> None:
    """Of finite, -inf and +inf on either side; the reference is worked out by hand."""
    one, two = torch.meshgrid(
        torch.tensor([0.5, -math.inf, math.inf]), torch.tensor([1.5, -math.inf, math.inf]), indexing="ij"
    )
    lse1, lse2 = one.reshape(1, 9), two.reshape(1, 9)
    out1 = torch.full((9, 1, 8), 2.0).masked_fill(lse1.T.isinf()[..., None], math.nan)
    out2 = torch.full((9, 1, 8), 4.0).masked_fill(lse2.T.isinf()[..., None], math.nan)
    out, lse = merge_reference(out1, lse1, out2, lse2)
    share = 1 / (1 + math.e)
    both, first, second, none = 2 * share + 4 * (1 - share), 2.0, 4.0, 0.0
    want = [both, first, first, second, none, none, second, none, none]
    torch.testing.assert_close(out[:, 0, 0], torch.tensor(want, dtype=torch.float64))
    both, first, second, none = math.log(math.exp(0.5) + math.exp(1.5)), 0.5, 1.5, -math.inf
    want = [both, first, first, second, none, none, second, none, none]
    torch.testing.assert_close(lse[0], torch.tensor(want, dtype=torch.float64))
    # Nine rows are enough for the random problems to have them all.
    seen: list[tuple[bool, ...]] = []

    class Watch(TorchKernels):
        def merge(self, out1, lse1, out2, lse2, *, out=None, lse=None):  # type: ignore[no-untyped-def]
            pairs = zip(lse1.flatten().tolist(), lse2.flatten().tolist(), strict=True)
            seen.extend((x == math.inf, x == -math.inf, y == math.inf, y == -math.inf) for x, y in pairs)
            return super().merge(out1, lse1, out2, lse2, out=out, lse=lse)

    assert MergeProblem(tokens=9).run(Watch(), "cpu").ok
    assert len(seen) == len(set(seen)) == 9


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("gather counts=1,a", "1,a"),
        ("gather counts=-1", "at least 0"),
        ("gather counts=1,2 starts=3", "starts"),
        ("gather tokens=1", "tokens"),
        ("append tokens", "tokens"),
        ("append tokens=1 tokens=2", "twice"),
        ("append tokens=1,2", "one number"),
        ("append rotate=3", "0, 1 or 2"),
        ("append cache_layers=0", "cache_layers"),
        ("merge width=12", "multiple of 8"),
        ("merge width=1032", "1024"),
        ("merge in_place=3", "in_place"),
        ("merge heads=0", "heads"),
    ],
)
def test_bad_problem_texts_say_which_word(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse_problem(text)


def test_shrinking_finds_the_least_problem() -> None:
    start = GatherProblem(counts=(70, 0, 9), starts=(3, 4, 5), seed=9, extra_rows=33, cache_layers=3)

    def longer_than(n: int) -> Callable[[MemoryProblem], bool]:
        return lambda p: isinstance(p, GatherProblem) and max(p.counts) > n

    assert shrink(start, longer_than(6)) == GatherProblem(counts=(7,), seed=9)
    assert shrink(AppendProblem(tokens=400, norm=True), lambda p: getattr(p, "tokens", 0) > 3) == AppendProblem(
        tokens=4
    )


# ---- The command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let verification run on the CPU, with kernels in torch that have a fault."""
    monkeypatch.setattr("mlaforge_generator.cli.devices.why_no_hopper", lambda device: None)

    def use(fault: str) -> None:
        monkeypatch.setitem(mlaforge.__dict__, "load", lambda folder, **_: TorchKernels(fault, read_manifest(folder)))

    return use


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.cli, ["verify", "minicpm3", "--device", "cpu", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_verify_takes_kernels_by_name(on_cpu: Callable[[str], None]) -> None:
    on_cpu("")
    code, text, steps = run("--kernel", "append", "--kernel", "gather", "--examples", "5", "--max-tokens", "90", "-v")
    assert code == 0 and "gather, append: all 10 problems accepted" in text and "of tolerance" in text
    assert len(steps.splitlines()) == 10 and "merge" not in text
    code, text, _ = run("--problem", "merge tokens=9 heads=2 width=24")
    assert code == 0 and text.splitlines()[-1] == "merge: all 1 problems accepted"
    code, _, message = run("--problem", "merge tokens=x")
    assert code == 2 and "tokens=x" in message


def test_verify_fails_with_a_line_that_replays(on_cpu: Callable[[str], None]) -> None:
    on_cpu("two empty sides give +inf")
    code, text, message = run("--kernel", "merge", "--examples", "20", "--max-tokens", "90")
    assert code == 1 and "failed: lse" in text and "of merge, failed" in message
    (line,) = [line for line in text.splitlines() if line.startswith("reproduce: ")]
    problem = shlex.split(line)[-1]
    assert run("--problem", problem)[0] == 1
    on_cpu("")
    assert run("--problem", problem)[0] == 0
