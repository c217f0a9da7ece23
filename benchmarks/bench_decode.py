"""Time the decode kernel of a spec on the present GPU, end to end (split and combine).

    python benchmarks/bench_decode.py deepseek_v3 --output benchmarks/results/NAME.json

Each call is a replay of a captured graph between two CUDA events, after the L2 cache was overwritten. Tables are random
permutations of a cache larger than L2; medians of many calls. TFLOP/s counts 2 b s_q h s_k (d_qk + d_v), GB/s the cache
once plus q and out. The read stream and the matrix product of the same run are printed beside.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

import mlaforge
from mlaforge.decode import DTYPES

SHAPES = [(128, 4096), (128, 8192), (64, 8192), (16, 32768), (4, 131072), (1, 65536), (8, 4096), (1, 4096)]


def median_us(run: Callable[[], object], repeats: int, flush: torch.Tensor) -> tuple[float, float]:
    """Time replays of a graph of `run`: median and interquartile range, microseconds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    quarter = statistics.quantiles(times, n=4)
    return statistics.median(times), quarter[2] - quarter[0]


def ceilings(flush: torch.Tensor) -> dict[str, float]:
    """Measure what this machine can do: GB/s of a read of 4 GB, TFLOP/s of a bf16 matrix product on random data."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    read, _ = median_us(lambda: data.sum(), 10, flush)
    n = 8192
    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    product, _ = median_us(lambda: a @ b, 10, flush)
    return {"read_GBps": data.numel() * 4 / read / 1e3, "bf16_gemm_TFLOPs": 2 * n**3 / product / 1e6}


def main() -> None:
    """Run the sweep and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec")
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--s-q", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    mla = mlaforge.load(options.spec)
    m = mla.manifest
    dtype = DTYPES[m.cache.dtype]
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    result = {
        "spec": m.name,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ceilings": ceilings(flush),
        "rows": [],
    }
    print(f"{result['gpu']}, torch {torch.__version__}; " + str(result["ceilings"]))
    print(f"{'b':>5} {'s_k':>7} {'h':>4} {'s_q':>4} {'us':>9} {'iqr':>7} {'TFLOP/s':>8} {'GB/s':>6}")
    for b, s_k in SHAPES:
        page = m.cache.page_size
        pages = b * s_k // page
        cache = (torch.randn(pages, page, m.d_qk, device="cuda") / 10).to(dtype)
        table = torch.randperm(pages, device="cuda").to(torch.int32).view(b, s_k // page)
        lengths = torch.full((b,), s_k, dtype=torch.int32, device="cuda")
        for h in options.heads:
            for s_q in options.s_q:
                q = (torch.randn(b, s_q, h, m.d_qk, device="cuda") / 10).to(dtype)
                us, spread = median_us(
                    lambda q=q, cache=cache, table=table, lengths=lengths: mla.decode(
                        q, cache, table, lengths, causal=True
                    ),
                    options.repeats,
                    flush,
                )
                flops = 2 * b * s_q * h * s_k * (m.d_qk + m.d_v)
                moved = 2 * b * (s_k * m.d_qk + s_q * h * (m.d_qk + m.d_v))
                row = {
                    "b": b,
                    "s_k": s_k,
                    "h": h,
                    "s_q": s_q,
                    "us": us,
                    "iqr_us": spread,
                    "TFLOPs": flops / us / 1e6,
                    "GBps": moved / us / 1e3,
                }
                result["rows"].append(row)
                print(f"{b:5} {s_k:7} {h:4} {s_q:4} {us:9.1f} {spread:7.1f} {row['TFLOPs']:8.0f} {row['GBps']:6.0f}")
        del cache
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
