"""Up to how many new tokens a request is attended to faster in the latent space, and which threshold follows from it.

The two ways are those of `mlaforge.MLAAttention`, and it is a layer of the spec that goes them. Absorbed: the queries
times W_UK, the decode kernel with all new tokens as its query tokens, its result times W_UV. Decompressed: the latents
gathered, times W_UK and W_UV, and the prefill kernel, for the new tokens and then for the context in rounds, merged.
What both have in common, the projections before and behind, is left out. At each point of a grid the results of the two
are compared with each other, before they are timed in turn and again after. The result is plain data that json can
write, and it is handed to `save` after every point: a run that is killed keeps what it has.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mlaforge import __version__
from mlaforge.api import MLA
from mlaforge.attention import MLAAttention
from mlaforge.attention_batch import AttentionBatch
from mlaforge.attention_config import AttentionConfig
from mlaforge.bench.cases import Stats
from mlaforge.bench.inputs import random_pages
from mlaforge.bench.peers import one_line
from mlaforge.bench.session import BenchError, Save, is_fatal, time_in_turn
from mlaforge.bench.timing import Device, Timed
from mlaforge.bench.watchdog import PATIENCE, Watchdog, WatchedTiming

FORMAT = 1

ABSORBED, DECOMPRESSED = "absorbed", "decompressed"

USUAL = (128, 256, 512)
"""Thresholds that are told beside the one that is found."""

# Denser where a threshold may be.
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048)
CONTEXTS = (0, 1 << 10, 1 << 12, 1 << 14, 1 << 16)

MOST_DIFFERENCE = 0.02
"""The most that the results of a token may differ, root of the mean square, as a part of the result.

Queries that are absorbed, keys, values, probabilities, latents that come out, partial results and results are each
rounded to 16 bits, of bf16 by some 0.0017; together that is less than 0.01.
"""

# Tiles of each of the two kernels, so that the last ones to run leave few SMs idle.
_TILES_PER_SM = 4
_TILE_QUERIES, _TILE_ROWS, _TILE_TOKENS = 128, 64, 64
_MOST_SEQUENCES = 256
_MOST_CACHED = 1 << 22


@dataclass(frozen=True)
class Point:
    """Requests with equally many new tokens and equally long contexts."""

    b: int
    """Requests."""
    tokens: int
    """New ones, of each."""
    context: int
    """Tokens of each that are cached before."""

    def __str__(self) -> str:
        """Give the point in words."""
        return f"{self.b} x {self.tokens:,} new tokens, context {self.context:,}"


def make_points(tokens: Iterable[int], contexts: Iterable[int], heads: int, sms: int) -> tuple[Point, ...]:
    """Give the points of a grid, each with as few requests as fill the GPU.

    Args:
        tokens: new tokens of a request.
        contexts: cached tokens of a request.
        heads: of a rank.
        sms: of the GPU. Both kernels get four tiles for each, but no more than 256 requests, nor 4 Mi cached tokens.
    """
    return tuple(
        Point(_requests(n, context, heads, _TILES_PER_SM * sms), n, context)
        for context in sorted(set(contexts))
        for n in sorted(set(tokens))
    )


def _requests(tokens: int, context: int, heads: int, tiles: int) -> int:
    length = context + tokens
    prefill = heads * -(-tokens // _TILE_QUERIES)
    decode = -(-tokens * heads // _TILE_ROWS) * -(-length // _TILE_TOKENS)
    most = max(min(_MOST_SEQUENCES, _MOST_CACHED // length), 1)
    return min(-(-tiles // min(prefill, decode)), most)


@dataclass(frozen=True)
class Options:
    """What to measure, and how long."""

    points: tuple[Point, ...]
    repeats: int = 30
    """Timed calls of each way and point."""
    budget: float | None = None
    """Seconds of the whole run: repeats are lowered to keep it, no point is dropped."""
    rest: float = 0.1
    """Seconds without work before each point."""
    seed: int = 0
    patience: float = PATIENCE
    """Seconds after which a way hangs, in a first run of a point or while it is timed."""


def make_layer(mla: MLA, device: torch.device) -> MLAAttention:
    """Make a layer of a spec's dimensions with random weights. It does not rotate, which no kernel does for queries."""
    manifest = mla.manifest
    model = manifest.model
    heads, v_head_dim = int(model["num_attention_heads"]), int(model["v_head_dim"])
    config = AttentionConfig(
        # Of no effect here.
        hidden_size=int(model.get("hidden_size") or heads * v_head_dim),
        num_attention_heads=heads,
        q_lora_rank=model.get("q_lora_rank"),
        kv_lora_rank=int(model["kv_lora_rank"]),
        qk_nope_head_dim=int(model["qk_nope_head_dim"]),
        qk_rope_head_dim=int(model["qk_rope_head_dim"]),
        v_head_dim=v_head_dim,
        max_position_embeddings=1,
        softmax_scale=manifest.softmax_scale,
        rotation=None,
    )
    return MLAAttention(config, mla, device=device)


class ThresholdTuning:
    """One run."""

    def __init__(
        self,
        mla: MLA,
        device: Device,
        options: Options,
        *,
        about: Mapping[str, Any] | None = None,
        started: float | None = None,
        report: Callable[[str], None] = lambda line: None,
        advance: Callable[[str], None] = lambda what: None,
        save: Save = lambda result: None,
        abandon: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        """Prepare a run.

        Args:
            mla: the kernels, prefill among them.
            device: where they run.
            options: what to measure.
            about: facts of the machine for the result.
            started: when the run began by `time.perf_counter`, for the budget; now if None.
            report: gets lines of text as results come.
            advance: is told before each point which one it is.
            save: gets the result after each point.
            abandon: as in `Tuning`.

        Raises:
            ValueError: there is no prefill kernel, so that there is one way only.
        """
        manifest = mla.manifest
        if "prefill" not in manifest.kernels:
            raise ValueError(f"{manifest.name} has no prefill kernel: `mlaforge plan` says why")
        self.device, self.options = device, options
        self._report, self._advance, self._save = report, advance, save
        self._abandon = abandon
        self._watchdog = Watchdog(options.patience)
        self._start = time.perf_counter() if started is None else started
        torch.manual_seed(options.seed)
        self._layer = make_layer(mla, device.device)
        self.result: dict[str, Any] = {
            "format": FORMAT,
            "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": 0.0,
            "spec": {
                "name": manifest.name,
                "threshold": manifest.prefill_absorption_threshold,
                "heads": self._layer.num_heads,
                "model": dict(manifest.model),
                **dataclasses.asdict(manifest.cache),
            },
            "options": dataclasses.asdict(options),
            "machine": dict(about or {}),
            "versions": {"mlaforge": __version__, "python": platform.python_version(), "torch": torch.__version__},
            "points": [],
            "failed": [],
            "contexts": [],
            "thresholds": [],
            "found": None,
            "why": None,
            "stopped": None,
        }

    def run(self) -> dict[str, Any]:
        """Compare and time everything.

        Raises:
            BenchError: the device is no longer usable; what was measured before is in `result`.
            KeyboardInterrupt: likewise.
        """
        try:
            with self._watchdog:
                self._run()
        except BenchError as error:
            self._stop(str(error))
            raise
        except KeyboardInterrupt:
            self._stop("interrupted")
            raise
        return self.result

    def _run(self) -> None:
        manifest, points = self._layer.mla.manifest, self.options.points
        page = manifest.cache.page_size
        pages = max(point.b * -(-(point.context + point.tokens) // page) for point in points)
        cache, scale = random_pages(manifest, self.device.device, pages, 1.0)
        order = torch.randperm(pages, device=self.device.device).int()
        for point in points:
            self._advance(str(point))
            self._point(point, cache, order, scale)
            self.device.clear()
            self._keep()

    def _stop(self, reason: str) -> None:
        self.result["stopped"] = reason
        self._keep()

    def _keep(self) -> None:
        result = self.result
        result["seconds"] = round(time.perf_counter() - self._start, 1)
        if points := result["points"]:
            found = choose(points)
            result["contexts"] = crossings(points)
            told = sorted({found, *USUAL, result["spec"]["threshold"]})
            result["thresholds"] = [rate(points, each) for each in told]
            result["found"], result["why"] = found, explain(points, found)
        self._save(result)

    def _point(self, point: Point, cache: torch.Tensor, order: torch.Tensor, scale: torch.Tensor | None) -> None:
        begun = time.perf_counter()
        try:
            calls = self._prepare(point, cache, order, scale)
        except Exception as error:
            if is_fatal(error):
                raise BenchError(f"{point}: {one_line(error)}") from error
            self._fail(point, one_line(error))
            return
        if reason := next((f"{name}: {call.why}" for name, call in calls.items() if call.launch != "graph"), None):
            self._fail(point, reason)
            return
        before = self._difference(point, calls)
        if not before <= MOST_DIFFERENCE:
            self._fail(point, f"the two results differ by {before:.2g} of a token's, allowed {MOST_DIFFERENCE:g}")
            return
        options = self.options
        (samples,) = time_in_turn(
            WatchedTiming(self.device, self._watchdog, functools.partial(self._hangs, point)),
            [calls],
            options.repeats,
            begun=begun,
            deadline=None if options.budget is None else self._start + options.budget,
            cases_left=len(options.points) - len(self.result["points"]) - len(self.result["failed"]),
            rest=options.rest,
            report=self._report,
        )
        after = self._difference(point, calls)
        if not after <= MOST_DIFFERENCE:
            self._fail(point, f"after they were timed the two results differ by {after:.2g} of a token's")
            return
        stats = {name: Stats.of(times) for name, times in samples.items()}
        self.result["points"].append(
            {
                **dataclasses.asdict(point),
                "repeats": min(each.count for each in stats.values()),
                "difference": max(before, after),
                "us": {name: dataclasses.asdict(each) for name, each in stats.items()},
            }
        )
        absorbed, decompressed = stats[ABSORBED].median, stats[DECOMPRESSED].median
        self._report(f"{point}: absorbed {absorbed:,.1f} us, decompressed {decompressed:,.1f} us")

    def _prepare(
        self, point: Point, cache: torch.Tensor, order: torch.Tensor, scale: torch.Tensor | None
    ) -> dict[str, Timed]:
        layer, (b, n, context) = self._layer, dataclasses.astuple(point)
        columns = -(-(context + n) // cache.shape[1])
        table = order[: b * columns].view(b, columns)
        torch.manual_seed(self.options.seed + 1)
        shape = (b * n, layer.num_heads, layer.config.qk_head_dim)
        q = torch.randn(shape, device=cache.device).to(layer.dtype)
        # The ways, by the threshold that has all requests go them.
        calls = {}
        for name, threshold in ((ABSORBED, n), (DECOMPRESSED, 0)):
            batch = AttentionBatch.make(
                layer.mla, [n] * b, [context] * b, table, prefill_absorption_threshold=threshold
            )
            with self._watchdog.watching(functools.partial(self._hangs, point, name)):
                calls[name] = self.device.prepare(functools.partial(layer.attend, q, cache, batch, tensor_scale=scale))
        return calls

    def _difference(self, point: Point, calls: Mapping[str, Timed]) -> float:
        try:
            return difference(*(self._result(point, name, calls[name]) for name in (ABSORBED, DECOMPRESSED)))
        except Exception as error:
            raise BenchError(f"comparing {', '.join(calls)}: {one_line(error)}") from error

    def _result(self, point: Point, name: str, call: Timed) -> torch.Tensor:
        with self._watchdog.watching(functools.partial(self._hangs, point, name)):
            return self.device.result(call)

    def _hangs(self, point: Point, name: str | None) -> None:
        """Say so, save what there is, and give up; another thread is at it meanwhile, and won't come back."""
        reason = f"{name or 'one way'} hangs: it did not end within {self._watchdog.seconds:g} s"
        try:
            self._fail(point, reason)
            self._stop(f"{point}: {reason}")
        finally:
            self._abandon()

    def _fail(self, point: Point, reason: str) -> None:
        self.result["failed"].append({**dataclasses.asdict(point), "reason": reason})
        self._report(f"{point}: {reason}")


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Give the largest distance of a token's results, as a part of what is wanted; infinite where one is no number.

    Args:
        got: (tokens, heads, v_head_dim).
        want: of the same shape.
    """
    worst = 0.0
    # Float64 copies of all at once would be large.
    for first in range(0, want.shape[0], 1024):
        x, y = (each[first : first + 1024].flatten(1).double() for each in (got, want))
        parts = (x - y).norm(dim=1) / y.norm(dim=1)
        worst = max(worst, float(parts.nan_to_num(nan=math.inf, posinf=math.inf).max()))
    return worst


# ---- Selection -------------------------------------------------------------------------------------------------------

_Points = Sequence[Mapping[str, Any]]
"""As in a result."""


def ratio(point: Mapping[str, Any]) -> float:
    """Give the time of the absorbed way over that of the decompressed one."""
    return float(point["us"][ABSORBED]["median"] / point["us"][DECOMPRESSED]["median"])


def _loss(ratio: float, absorbed: bool) -> float:
    """Give by how much the way that is taken needs longer than the faster one, as a part of that."""
    return max((ratio if absorbed else 1 / ratio) - 1, 0.0)


def rate(points: _Points, threshold: int) -> dict[str, Any]:
    """Say what a threshold costs.

    Returns:
        `threshold`; `mean` and `worst` over all points of what the way that it takes needs longer than the faster one,
        as a part of that; `tokens` and `context` of the worst point, None if it takes the faster way everywhere.
    """
    losses = [_loss(ratio(point), point["tokens"] <= threshold) for point in points]
    worst = max(losses)
    at = points[losses.index(worst)] if worst > 0 else {}
    return {
        "threshold": threshold,
        "mean": sum(losses) / len(losses),
        "worst": worst,
        "tokens": at.get("tokens"),
        "context": at.get("context"),
    }


def choose(points: _Points) -> int:
    """Give the threshold with the least mean loss over all points, each of the same weight.

    All thresholds from a measured number of tokens to the next have the same. Between those counts what a threshold
    would lose at every number of tokens in between, of all contexts, by interpolated times.
    """
    tokens = sorted({int(point["tokens"]) for point in points})
    between = _interpolated(points, tokens[-1])
    ends = [*tokens, tokens[-1] + 1]
    best = []
    for first, end in zip([0, *tokens], ends, strict=True):
        threshold = min(range(first, end), key=between.__getitem__)
        best.append((rate(points, threshold)["mean"], between[threshold], threshold))
    return min(best)[-1]


def explain(points: _Points, found: int) -> str:
    """Say why a threshold is the one that was chosen."""
    rated = rate(points, found)
    words = (
        f"the least loss against the faster way at each of {len(points)} points, {rated['mean']:.2%} in the mean and "
        f"{rated['worst']:.1%} at most"
    )
    most = max(point["tokens"] for point in points)
    return f"{words}; more new tokens than that were not measured" if found == most else words


def _interpolated(points: _Points, most: int) -> list[float]:
    """Sum up, for each threshold from 0 to `most`, its losses at every number of tokens of each context.

    They are weighted by the reciprocal of the number of tokens: evenly in the logarithm, nearly as the points.
    """
    # Of each number of tokens, what absorbing loses there and what decompressing does.
    absorbing, decompressing = [0.0] * (most + 1), [0.0] * (most + 1)
    for curve in _curves(points).values():
        for (low, begin), (high, end) in itertools.pairwise(curve):
            for n in range(low + 1, high):
                share = math.log(n / low) / math.log(high / low)
                between = math.exp(math.log(begin) + share * math.log(end / begin))
                absorbing[n] += _loss(between, True) / n
                decompressing[n] += _loss(between, False) / n
        for n, measured in curve:
            absorbing[n] += _loss(measured, True) / n
            decompressing[n] += _loss(measured, False) / n
    none = sum(decompressing)
    return [none + sum_ for sum_ in itertools.accumulate(a - d for a, d in zip(absorbing, decompressing, strict=True))]


def _curves(points: _Points) -> dict[int, list[tuple[int, float]]]:
    """Give, by context, the ratio of times at each number of tokens, in their order."""
    curves: dict[int, list[tuple[int, float]]] = {}
    for point in points:
        curves.setdefault(int(point["context"]), []).append((int(point["tokens"]), ratio(point)))
    return {context: sorted(curves[context]) for context in sorted(curves)}


def crossings(points: _Points) -> list[dict[str, Any]]:
    """Find where the two ways take the same time, by interpolation in the logarithms of time and tokens.

    Returns:
        For each context: `context`; `first`, the way that is faster with the fewest tokens; `crossings`, the numbers of
        tokens at which it is the other way's turn, ascending. There may be none.
    """
    found = []
    for context, curve in _curves(points).items():
        at = []
        for (low, begin), (high, end) in itertools.pairwise(curve):
            if (begin > 1) != (end > 1):
                share = math.log(begin) / math.log(begin / end)
                at.append(low * (high / low) ** share)
        first = DECOMPRESSED if curve[0][1] > 1 else ABSORBED
        found.append({"context": context, "first": first, "crossings": at})
    return found
