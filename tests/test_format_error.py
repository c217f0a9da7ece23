"""The table of what quantised caches do to attention, decode in it: by stand-ins, and by a kernel on the simulator."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlaforge import format_error
from mlaforge.format_error import BF16, Row, main, measure, to_markdown
from mlaforge.formats import FORMATS
from mlaforge.reference import decode_reference
from test_verify import one_thread as one_thread

RANK, ROPE, PAGE = 128, 64, 16
SMALL: dict[str, Any] = {"batch": 2, "heads": 3, "tokens": 75, "seed": 3}


class Exact:
    """Decode by the reference, of float64; `fault` is what is wrong with it."""

    def __init__(self, dtype: str, fault: str = "") -> None:
        self.fault = fault
        cache = SimpleNamespace(dtype=dtype, page_size=PAGE, quantised=dtype != BF16)
        self.manifest: Any = SimpleNamespace(d_v=RANK, d_qk=RANK + ROPE, cache=cache)

    def decode(
        self, q: Any, kv_cache: Any, block_table: Any, cache_seqlens: Any, *, tensor_scale: Any, **options: Any
    ) -> Any:
        out, lse = options["out"], options["lse"]
        assert q.dtype == torch.bfloat16 == out.dtype and out.isnan().all() and lse.isnan().all()
        assert kv_cache.shape[:2] == (2 * 5, PAGE) and block_table.flatten().sort().values.tolist() == list(range(10))
        elements = kv_cache
        if self.manifest.cache.quantised:
            assert kv_cache.dtype == torch.uint8
            form = FORMATS[self.manifest.cache.dtype]
            assert (tensor_scale is not None) == form.layout.tensor_scale
            scale = None if tensor_scale is None else float(tensor_scale)
            elements = torch.cat(form.dequantise(kv_cache, RANK, ROPE, scale, torch.float64), -1)
        # 75 tokens are 4 pages and 11 tokens of a fifth.
        assert int(elements.isnan().all(-1).sum()) == 2 * 5
        scale = options["softmax_scale"] * (1.1 if self.fault == "scale" else 1)
        made = decode_reference(q, elements, block_table, cache_seqlens, d_v=RANK, softmax_scale=scale)
        out.copy_(made[0] * (1.1 if self.fault == "out" else 1))
        return out, lse.copy_(made[1])


def rows_of(fault: str = "", *, outliers: bool = False) -> dict[str, Row]:
    decoders = {dtype: Exact(dtype, fault) for dtype in (BF16, *FORMATS)}
    return {row.name: row for row in measure(RANK, ROPE, outliers=outliers, decoders=decoders, **SMALL)}


@pytest.mark.parametrize("outliers", [False, True])
def test_an_exact_decode_has_the_error_of_the_rounding(outliers: bool) -> None:
    rows = rows_of(outliers=outliers)
    assert set(rows) == {BF16, *FORMATS, "fp8_e4m3, scale 1"}
    for name, row in rows.items():
        assert row.decode is not None and row.kernel is not None
        # out is rounded to bf16, lse to float32.
        assert 0 < row.kernel.out_rms < 2**-8 and row.kernel.lse_max < 1e-5, name
        assert row.decode.out_rms == pytest.approx(math.hypot(row.error.out_rms, row.kernel.out_rms), rel=0.2), name
        assert row.decode.lse_max == pytest.approx(row.error.lse_max, abs=1e-5), name


def test_what_a_kernel_does_wrong_is_the_kernels() -> None:
    right = rows_of()
    for name, row in rows_of("out").items():
        assert row.kernel is not None and row.kernel.out_rms == pytest.approx(0.1, rel=0.05), name
        assert row.error == right[name].error, name
    for name, row in rows_of("scale").items():
        assert row.kernel is not None and row.kernel.lse_max > 0.01, name


def test_the_table_has_a_line_for_each() -> None:
    rows = rows_of()
    lines = to_markdown({"normal": list(rows.values())}).splitlines()
    assert len(lines) == 2 + len(rows) and lines[0].endswith(
        "| kernel: out | kernel: out, cosine | kernel: lse, largest |"
    )
    assert all(line.count("|") == 11 for line in lines)
    alone = to_markdown({"normal": [dataclasses.replace(row, decode=None, kernel=None) for row in rows.values()]})
    assert all(line.count("|") == 8 for line in alone.splitlines())
    assert alone.splitlines()[2].startswith("| normal | bf16 | 384 | ")


def require_small_errors_of_the_kernel(lines: list[str]) -> None:
    for line in lines[2:]:
        *_, decode, _, _, _, kernel, cosine, lse, _ = (cell.strip() for cell in line.split("|"))
        assert float(kernel.rstrip("%")) < 0.5 and float(cosine) < 1e-5 and float(lse) < 1e-4, line
        assert 0.05 < float(decode.rstrip("%")) < 40, line


def test_a_kernel_under_the_simulator(capsys: pytest.CaptureFixture[str]) -> None:
    """The one command that makes the README's table."""
    sizes = ["--rank", "128", "--rope", "16", "--batch", "1", "--heads", "2", "--tokens", "70"]
    main(["--device", "sim", "--dtypes", "fp8_ds_mla", *sizes])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2
    require_small_errors_of_the_kernel(lines)


def test_a_bar_names_each_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal; elsewhere the table is all that is printed."""
    sizes = [
        "--rank",
        "128",
        "--rope",
        "16",
        "--batch",
        "1",
        "--heads",
        "1",
        "--tokens",
        "20",
        "--dtypes",
        "bf16",
        "nvfp4",
    ]
    main(sizes)
    assert capsys.readouterr().err == ""
    steps: list[str] = []

    @contextlib.contextmanager
    def progress(total: int) -> Iterator[Callable[[str], None]]:
        steps.append(str(total))
        yield steps.append

    monkeypatch.setattr(format_error, "_progress", progress)
    main(sizes)
    assert steps == ["4", "normal, bf16", "normal, nvfp4", "outliers, bf16", "outliers, nvfp4"]
    monkeypatch.undo()
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    with format_error._progress(2) as begin:
        begin("first")
    shown = capsys.readouterr().err
    assert "first" in shown and "0/2" in shown


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_kernels_on_a_gpu(heads: int, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--device", "cuda", "--heads", str(heads)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * (2 + len(FORMATS))
    require_small_errors_of_the_kernel(lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_run_on_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--device", "cuda"])
    assert "no Hopper GPU" in capsys.readouterr().err
