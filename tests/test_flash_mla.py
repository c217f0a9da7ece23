"""FlashMLA's names: its own dense test's problems, small and under the simulator, in both forms of its call."""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch._subclasses.fake_tensor import FakeTensorMode

from dropin import DropIn, Form
from mlaforge import flash_mla
from mlaforge.api import generate_yaml
from mlaforge.compiler import compile_kernel
from mlaforge.flash_mla import SHIPPED, Family, FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_metadata
from mlaforge.launch import Cuda
from mlaforge.manifest import read_manifest
from mlaforge.reference import decode_reference
from mlaforge.simulator import SimulatorOptions
from mlaforge.verify import IMPOSSIBLE_PAGE, Problem, check_output, run_problem
from mlaforge_generator import cli
from mlaforge_generator.plan import make_plan
from mlaforge_generator.render import render
from mlaforge_generator.resources import find_spec
from mlaforge_generator.spec import check_spec, load_spec

GENERATED = Path(__file__).parents[1] / "generated"
FOLDERS = sorted(path.parent for path in GENERATED.glob("*/manifest.json"))
V3 = Family(576, 512, "bf16", 64)
SMALL = Family(288, 256, "fp16", 16)


@functools.cache
def drop_in(family: Family, form: Form) -> DropIn:
    return DropIn(family, form)


# ---- Results ---------------------------------------------------------------------------------------------------------

# More rows than a narrow tile holds: one kernel less to compile; the V3 family has both for other tests.
PROBLEMS = (
    Problem(lengths=(20, 131, 0), h_q=40),
    Problem(lengths=(65, 3), s_q=2, h_q=33),
    Problem(lengths=(65, 1), s_q=2, h_q=33, causal=True),
    Problem(lengths=(70,), s_q=2, h_q=66, h_kv=2, causal=True, cache_layers=2, table_padding=3),
    Problem(lengths=(0, 0), h_q=64, table_extra_columns=2),
)


@pytest.mark.parametrize("family, form", [(V3, "old"), (V3, "new"), (SMALL, "old")], ids=["old", "new", "old, fp16"])
def test_dense(family: Family, form: Form) -> None:
    for problem in PROBLEMS if family == V3 else PROBLEMS[1:4]:
        errors = run_problem(drop_in(family, form), problem, "cpu")
        assert errors.ok, f"{problem}: {errors.failures}"


def test_few_heads_and_another_scale() -> None:
    for problem in (
        Problem(lengths=(64, 129), h_q=3, softmax_scale=0.2, q_gain=4),
        Problem(lengths=(3,), h_q=16, s_q=1, causal=True, softmax_scale=0.135234),
    ):
        errors = run_problem(drop_in(V3, "new"), problem, "cpu")
        assert errors.ok, f"{problem}: {errors.failures}"


def arguments(**changes: Any) -> dict[str, Any]:
    """Make a call of the new form, b = 2, whose unused slots and table entries are poison."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([70, 3], dtype=torch.int32)
    table = torch.tensor([[2, 0], [1, IMPOSSIBLE_PAGE]], dtype=torch.int32)
    cache = torch.full((4, 64, 1, 576), math.nan, dtype=torch.bfloat16)
    for blocks, length in zip(table.tolist(), lengths.tolist(), strict=True):
        for token in range(length):
            cache[blocks[token // 64], token % 64] = torch.randn(576, generator=generator) / 10
    return {
        "q": (torch.randn(2, 1, 16, 576, generator=generator) / 10).bfloat16(),
        "k_cache": cache,
        "block_table": table,
        "cache_seqlens": lengths,
        "head_dim_v": 512,
        "tile_scheduler_metadata": FlashMLASchedMeta(),
        "num_splits": None,
        **changes,
    }


def reference(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return decode_reference(
        call["q"], call["k_cache"], call["block_table"], call["cache_seqlens"], d_v=512, softmax_scale=576**-0.5
    )


def test_as_flashmla_s_test_runs_it() -> None:
    """Under inference_mode and with defaults of its own; those of torch decide nothing here."""
    call = arguments()
    want = reference(call)
    metadata, num_splits = get_mla_metadata()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode():
            out, lse = flash_mla_with_kvcache(
                call["q"], call["k_cache"], call["block_table"], call["cache_seqlens"], 512, metadata, num_splits,
                causal=True,
            )  # fmt: skip
    finally:
        torch.set_default_dtype(torch.float32)
    assert check_output(out, lse, *want).ok


def test_one_object_serves_other_shapes_and_lengths() -> None:
    metadata, num_splits = get_mla_metadata()
    assert num_splits is None
    first = arguments(tile_scheduler_metadata=metadata)
    lengths = torch.tensor([5], dtype=torch.int32)
    second = {**first, "q": first["q"][:1], "block_table": first["block_table"][:1], "cache_seqlens": lengths}
    for call in (first, second):
        assert check_output(*flash_mla_with_kvcache(**call), *reference(call)).ok


def test_schedules_of_the_simulator_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    want = flash_mla_with_kvcache(**arguments())
    monkeypatch.setattr(flash_mla._BACKENDS["cpu"], "options", SimulatorOptions(seed=5, mode="lazy"))
    got = flash_mla_with_kvcache(**arguments())
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


# ---- Forms -----------------------------------------------------------------------------------------------------------


def test_names_and_order_are_flashmla_s() -> None:
    assert list(inspect.signature(flash_mla_with_kvcache).parameters) == [
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits",
        "softmax_scale", "causal", "is_fp8_kvcache", "indices", "attn_sink", "extra_k_cache",
        "extra_indices_in_kvcache", "topk_length", "extra_topk_length",
    ]  # fmt: skip
    assert list(inspect.signature(get_mla_metadata).parameters)[:6] == [
        "cache_seqlens", "num_q_tokens_per_head_k", "num_heads_k", "num_heads_q", "is_fp8_kvcache", "topk",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "rows, heads, parts", [(16, 1, 132), (64, 1, 132), (65, 1, 66), (256, 1, 33), (64, 8, 16), (64 * 200, 1, 1)]
)
def test_old_metadata(rows: int, heads: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_mla._BACKENDS["cpu"], "options", SimulatorOptions(sms=132))
    lengths = torch.tensor([5, 6, 7], dtype=torch.int32)
    for made in (
        get_mla_metadata(lengths, rows, heads),
        get_mla_metadata(lengths, num_heads_per_head_k=rows, num_heads_k=heads),
        get_mla_metadata(lengths, rows, heads, heads * rows, False, None),
    ):
        metadata, num_splits = made
        assert isinstance(metadata, torch.Tensor) and num_splits is not None
        assert (metadata.shape, metadata.dtype, metadata.device) == ((parts, 8), torch.int32, lengths.device)
        assert (num_splits.shape, num_splits.dtype, num_splits.device) == ((4,), torch.int32, lengths.device)
        assert metadata.is_contiguous() and not metadata.any() and not num_splits.any()


LENGTHS = torch.tensor([5], dtype=torch.int32)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"is_fp8_kvcache": True}, NotImplementedError, "is_fp8_kvcache is set"),
        ({"topk": 2048}, NotImplementedError, "topk is 2048"),
        ({"num_q_tokens_per_head_k": None}, ValueError, "num_q_tokens_per_head_k is None"),
        ({"num_heads_k": 0}, ValueError, "num_heads_k is 0"),
        ({"cache_seqlens": LENGTHS.long()}, ValueError, "cache_seqlens has dtype torch.int64"),
        ({"cache_seqlens": LENGTHS[None]}, ValueError, r"cache_seqlens has shape \(1, 1\)"),
        ({"cache_seqlens": LENGTHS.to("meta")}, ValueError, "cache_seqlens is on meta"),
    ],
    ids=str,
)
def test_metadata_that_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    call: dict[str, Any] = {"cache_seqlens": LENGTHS, "num_q_tokens_per_head_k": 16, "num_heads_k": 1, **changes}
    with pytest.raises(error, match=message):
        get_mla_metadata(**call)


# ---- Refusals --------------------------------------------------------------------------------------------------------


def words(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


UNSERVED = {
    "is_fp8_kvcache": True,
    "indices": words(2, 1, 64),
    "attn_sink": torch.zeros(16),
    "extra_k_cache": torch.zeros(4, 64, 1, 576),
    "extra_indices_in_kvcache": words(2, 1, 64),
    "topk_length": words(2),
    "extra_topk_length": words(2),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_what_is_not_served_is_named(name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"^{name} is "):
        flash_mla_with_kvcache(**arguments(**{name: UNSERVED[name]}))


def test_every_argument_behind_causal_is_unserved() -> None:
    parameters = list(inspect.signature(flash_mla_with_kvcache).parameters)
    assert parameters[parameters.index("causal") + 1 :] == list(UNSERVED)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no table": ({"block_table": None}, "block_table is None"),
    "no lengths": ({"cache_seqlens": None}, "cache_seqlens is None"),
    "no metadata": ({"tile_scheduler_metadata": None}, "tile_scheduler_metadata is a NoneType"),
    "splits beside the object": ({"num_splits": words(3)}, "num_splits is a Tensor; .* None"),
    "tensor without splits": ({"tile_scheduler_metadata": words(4, 8)}, "num_splits is a NoneType"),
    "metadata of another width": (
        {"tile_scheduler_metadata": words(4, 7), "num_splits": words(3)},
        r"tile_scheduler_metadata has shape \(4, 7\); it must be \(num_sm_parts, 8\)",
    ),
    "metadata of another dtype": (
        {"tile_scheduler_metadata": words(4, 8).long(), "num_splits": words(3)},
        "tile_scheduler_metadata has dtype torch.int64",
    ),
    "splits of another batch": (
        {"tile_scheduler_metadata": words(4, 8), "num_splits": words(4)},
        r"num_splits has shape \(4\); it must be \(3,\)",
    ),
    "q of 3 dimensions": ({"q": bf16(2, 16, 576)}, r"q has shape \(2, 16, 576\)"),
    "float8 q": ({"q": bf16(2, 1, 16, 576).to(torch.float8_e4m3fn)}, "q has dtype torch.float8"),
    "cache of 3 dimensions": ({"k_cache": bf16(4, 64, 576)}, r"k_cache has shape \(4, 64, 576\)"),
    "cache of another dtype": ({"k_cache": bf16(4, 64, 1, 576).half()}, "k_cache has dtype torch.float16"),
    "cache of another width": ({"k_cache": bf16(4, 64, 1, 512)}, r"k_cache has shape .*q's, 576"),
    "strided cache": ({"k_cache": bf16(4, 64, 1, 577)[..., :576]}, "^k_cache has a stride of 1154 B"),
    "heads that do not divide": ({"k_cache": bf16(4, 64, 3, 576)}, "^q has 16 heads, k_cache 3"),
    "pages of 48": ({"k_cache": bf16(4, 48, 1, 576)}, "pages of 48: dimension 1 of k_cache: must be 1, 16"),
    "V wider than K": ({"head_dim_v": 577}, "head_dim_v is 577"),
    "V of no kernel": ({"head_dim_v": 500}, "head_dim_v 500 .*: head_dim_v: the decode kernel needs one of 128"),
    "odd columns behind V": (
        {"q": bf16(2, 1, 16, 520), "k_cache": bf16(4, 64, 1, 520)},
        "the columns of q behind head_dim_v: .* multiple of 16",
    ),
    "K beyond shared memory": (
        {"q": bf16(2, 1, 16, 1536), "k_cache": bf16(4, 64, 1, 1536)},
        "no kernel has d_qk 1536, .* shared memory",
    ),
    "table of another batch": ({"block_table": words(3, 2)}, "block_table has 3 rows, q has a batch of 2"),
    "lengths of another dtype": ({"cache_seqlens": words(2).long()}, "cache_seqlens has dtype torch.int64"),
    "no scale": ({"softmax_scale": 0.0}, "softmax_scale is 0.0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case: str) -> None:
    changes, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        flash_mla_with_kvcache(**arguments(**changes))


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype is torch\.float32"):
        flash_mla.prepare(dtype=torch.float32)
    with pytest.raises(ValueError, match="device_type is 'mps'"):
        flash_mla.prepare(device_type="mps")


# ---- Kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_family_s_decode_kernels_are_those_of_any_model_that_has_it(folder: Path) -> None:
    """To the letter, but for the name: heads and decompressed dimensions are no part of absorbed decode."""
    manifest = read_manifest(folder)
    family = Family(manifest.d_qk, manifest.d_v, manifest.cache.dtype, manifest.cache.page_size)
    files = render(make_plan(check_spec({**family.tree(), "name": manifest.name})))
    for kernel in manifest.decodes:
        assert files[kernel.source.name] == kernel.source.read_text()
    for header in folder.glob("*.cuh"):
        assert files[header.name] == header.read_text()


@pytest.mark.parametrize("family", SHIPPED, ids=SHIPPED.get)
def test_shipped_kernels_serve_their_families(family: Family) -> None:
    """So that `mlaforge compile` of the spec leaves in the cache what a call here looks for."""
    spec = load_spec(find_spec(SHIPPED[family]))
    assert (spec.d_qk, spec.d_v, spec.cache.dtype, spec.cache.page_size) == family
    made, committed = generate_yaml(spec.name), GENERATED / spec.name
    for path in committed.iterdir():
        assert (made / path.name).read_bytes() == path.read_bytes()


def test_runners_are_those_of_the_shipped_spec() -> None:
    runner = flash_mla._runner(V3, "cpu")
    assert runner.manifest.name == "deepseek_v3" and runner is flash_mla._runner(V3, "cpu")


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """Forget the runners; list those that are made, slowly enough for others to come in between."""
    made: list[tuple[str, object]] = []
    real = flash_mla.DecodeRunner

    def slow(manifest: Any, backend: Any) -> Any:
        made.append((manifest.name, backend))
        time.sleep(0.2)
        return real(manifest, backend)

    monkeypatch.setattr(flash_mla, "_runners", {})
    monkeypatch.setattr(flash_mla, "DecodeRunner", slow)
    return made


def test_threads_make_a_family_s_kernels_once(cold: list[tuple[str, object]]) -> None:
    runners = []
    start = threading.Barrier(8)

    def first_call() -> None:
        start.wait()
        runners.append(flash_mla._runner(V3, "cpu"))

    threads = [threading.Thread(target=first_call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runners) == 8 and len({id(runner) for runner in runners}) == 1
    assert cold == [("deepseek_v3", flash_mla._BACKENDS["cpu"])]


def test_a_family_that_failed_is_tried_again(cold: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(manifest: Any, backend: Any) -> Any:
        raise RuntimeError("no compiler today")

    with monkeypatch.context() as broken:
        broken.setattr(flash_mla, "DecodeRunner", fail)
        with pytest.raises(RuntimeError, match="no compiler today"):
            flash_mla_with_kvcache(**arguments())
    flash_mla_with_kvcache(**arguments())
    assert len(cold) == 1


def test_prepare_compiles_every_kernel_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def kernel(self: Cuda, source: Path, *rest: object) -> None:
        compiled.append(f"{source.parent.name.rpartition('-')[0]}/{source.name}")

    monkeypatch.setattr(flash_mla, "_runners", {})
    monkeypatch.setattr(Cuda, "kernel", kernel)
    flash_mla.prepare(d_qk=576, head_dim_v=512, dtype=torch.float16, page_size=32)
    names = ["decode.cu", "decode_16.cu", "decode_32.cu"]
    assert sorted(compiled) == [f"flash_mla_576_512_fp16_32/{name}" for name in names]


def compile_for(*arguments: str) -> Result:
    return CliRunner().invoke(cli.cli, ["compile", *arguments])


def test_the_command_leaves_what_a_call_looks_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under the same keys, of decode alone."""
    monkeypatch.setenv("MLAFORGE_CACHE_DIR", str(tmp_path))
    result = compile_for("--flash-mla", "256,128,fp16,16", "--flash-mla", "256,128,fp16,16", "--json")
    assert result.exit_code == 0, result.stderr
    kernels = json.loads(result.stdout)
    names = ["decode.cu", "decode_16.cu", "decode_32.cu", "decode_40.cu"]
    assert sorted(each["file"] for each in kernels) == names
    found: list[bool] = []

    def kernel(self: Cuda, source: Path, *rest: object) -> None:
        found.append(compile_kernel(source).cache_hit)

    monkeypatch.setattr(flash_mla, "_runners", {})
    monkeypatch.setattr(Cuda, "kernel", kernel)
    flash_mla.prepare(d_qk=256, head_dim_v=128, dtype=torch.float16, page_size=16)
    assert found == [True] * len(names)


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("576,512", V3),
        ("320,256,bf16", Family(320, 256, "bf16", 64)),
        ("288,256,fp16,1", Family(288, 256, "fp16", 1)),
    ],
)
def test_families_of_the_command(text: str, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[Family] = []

    def fail(family: Family) -> Path:
        rendered.append(family)
        raise ValueError("not today")

    monkeypatch.setattr(flash_mla, "render", fail)
    assert "not today" in compile_for("--flash-mla", text).stderr and rendered == [family]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("576", "no family"),
        ("576,512,fp8", "no family"),
        ("576,512,bf16,64,1", "no family"),
        ("-1,512", "no family"),
        ("576,500", "head_dim_v"),
        ("576,512,bf16,48", "k_cache"),
        ("512,576", "head_dim_v"),
    ],
)
def test_what_is_no_family(text: str, word: str) -> None:
    result = compile_for("--flash-mla", text)
    assert result.exit_code == 2 and result.stdout == "" and word in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_nothing_to_compile() -> None:
    assert compile_for().exit_code == 2 and "--flash-mla" in compile_for().stderr


# ---- torch -----------------------------------------------------------------------------------------------------------


def layer_old(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    metadata, num_splits = get_mla_metadata(lengths, q.shape[1] * q.shape[2], 1)
    out, lse = flash_mla_with_kvcache(q * 2, cache, table, lengths, 512, metadata, num_splits, causal=True)
    return out.float() + lse.transpose(1, 2).unsqueeze(-1)


def layer_new(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    metadata, num_splits = get_mla_metadata()
    out, lse = flash_mla_with_kvcache(
        q * 2, cache, table, lengths, 512, metadata, num_splits, softmax_scale=0.1, causal=True
    )
    return out.float() + lse.transpose(1, 2).unsqueeze(-1)


@pytest.mark.parametrize("layer", [layer_old, layer_new])
def test_torch_compile_before_there_is_a_kernel(
    layer: Callable[..., torch.Tensor], cold: list[tuple[str, object]]
) -> None:
    call = arguments()
    tensors = (call["q"], call["k_cache"], call["block_table"], call["cache_seqlens"])
    torch._dynamo.reset()
    got = torch.compile(layer, fullgraph=True, backend="eager")(*tensors)
    assert len(cold) == 1
    assert torch.equal(got, layer(*tensors))


def test_torch_compile_with_sizes_that_vary() -> None:
    def layer(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        width = cache[..., :512].shape[-1]
        metadata, num_splits = get_mla_metadata(lengths, q.shape[1] * q.shape[2] // cache.shape[2], cache.shape[2])
        return flash_mla_with_kvcache(q, cache, table, lengths, width, metadata, num_splits)[0] + 1

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    call = arguments()
    tensors = (call["q"], call["k_cache"], call["block_table"], call["cache_seqlens"])
    for b, h_q in ((2, 16), (2, 7), (1, 7)):
        some = (tensors[0][:b, :, :h_q], tensors[1], tensors[2][:b], tensors[3][:b])
        assert torch.equal(compiled(*some), layer(*some))


def test_tracing_makes_no_kernel(cold: list[tuple[str, object]]) -> None:
    real = arguments()
    with FakeTensorMode() as mode:
        call = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in real.items()}
        out, lse = flash_mla_with_kvcache(**call)
        assert (out.shape, out.dtype) == ((2, 1, 16, 512), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((2, 16, 1), torch.float32)
        with pytest.raises(ValueError, match="head_dim_v is 577"):
            flash_mla_with_kvcache(**{**call, "head_dim_v": 577})
    assert not cold


def test_operator() -> None:
    call = arguments()
    tensors = (call["q"], call["k_cache"], call["block_table"], call["cache_seqlens"])
    torch.library.opcheck(torch.ops.mlaforge.flash_mla, (*tensors, 512, None, False))


def test_readme_example() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (section,) = re.findall(r"### In place of FlashMLA\n(.*?)\n##", text, re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["out"].shape == (2, 1, 16, 512) and bool(names["lse"].isfinite().all())
