"""Invariants of every plan, and the fields that errors name when a kernel can't exist."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given

from folders import plan_with
from mlaforge_generator import plan as plan_module
from mlaforge_generator.block import SMEM_ALIGNMENT
from mlaforge_generator.errors import SpecError
from mlaforge_generator.kernel_plan import ELEMENT_BYTES
from mlaforge_generator.plan import MAX_STAGES, DecodePlan, Plan, make_plan
from mlaforge_generator.resources import find_spec, spec_dir
from mlaforge_generator.spec import Spec, load_spec, parse_spec
from mlaforge_generator.target import Target
from strategies import MOST_ROWS, specs

SHIPPED = sorted(path.stem for path in spec_dir().glob("*.yaml"))


def regions_fit(decode: DecodePlan, target: Target) -> None:
    smem = decode.smem
    own = [region for region in smem.regions if region.alias_of is None]
    aliases = [region for region in smem.regions if region.alias_of is not None]
    for before, after in itertools.pairwise(sorted(own, key=lambda region: region.offset)):
        assert before.offset + before.size <= after.offset, (before, after)
    assert own[0].offset == 0 and all(region.size > 0 for region in smem.regions)
    assert max(region.offset + region.size for region in own) == smem.total
    assert smem.total <= smem.limit == target.smem_per_block
    by_name = {region.name: region for region in own}
    assert len(by_name) == len(own) and len({region.constant for region in smem.regions}) == len(smem.regions)
    for alias in aliases:
        host = by_name[str(alias.alias_of)]
        assert host.offset <= alias.offset and alias.offset + alias.size <= host.offset + host.size


def regions_are_aligned(decode: DecodePlan, target: Target) -> None:
    regions = {region.name: region for region in decode.smem.regions}
    for name in ("Q", "Q rope", "K", "tile", "rope", "rope or P", "P"):
        if name in regions:
            assert regions[name].offset % SMEM_ALIGNMENT == 0, name
            assert regions[name].size // regions[name].count % SMEM_ALIGNMENT == 0, name
    assert regions["barriers"].offset % 8 == 0
    assert all(region.offset % 16 == 0 for region in regions.values())


def barriers_expect_what_the_regions_hold(decode: DecodePlan, target: Target) -> None:
    size = {region.name: region.size for region in decode.smem.regions}
    barriers = {barrier.name: barrier for barrier in decode.mbarriers}
    tile = decode.tile
    held = {"full": ("K", "tile"), "q_full": ("Q",), "rope_full": ("rope",), "q_rope_full": ("Q rope",)}
    held |= {"scales_full": ("scales",)}
    if tile.gathered:
        # Threads arrive when their copies have landed: nobody counts bytes.
        del held["full"], held["rope_full"]
    threads = 32 if tile.gathered else 1
    assert barriers["full"].arrivals == tile.loaders * threads
    assert "rope_full" not in barriers or barriers["rope_full"].arrivals == threads
    for name, barrier in barriers.items():
        regions = [each for each in held.get(name, ()) if each in size]
        assert (barrier.bytes > 0) == bool(regions), name
        for each in regions:
            shared = size["rope or P"] if each == "rope" and tile.shared else 0
            assert size[each] + shared == barrier.count * barrier.bytes, name
    end = sum(region.offset + region.size for region in decode.smem.regions if region.name == "barriers")
    for before, after in itertools.pairwise(decode.mbarriers):
        assert before.offset + 8 * before.count == after.offset
    assert decode.mbarriers[-1].offset + 8 * decode.mbarriers[-1].count == end
    assert size["barriers"] == 8 * sum(barrier.count for barrier in decode.mbarriers)
    assert barriers["full"].count == barriers["empty"].count == (tile.ring_subtiles or tile.stages)
    lines = tile.subtiles if decode.row is None else decode.row.lines
    assert tile.ring_subtiles == 0 or tile.ring_subtiles // lines == tile.stages
    # mbarriers count bytes of a phase in 20 bits.
    assert all(barrier.bytes < 1 << 20 for barrier in decode.mbarriers)
    ids = [n.id + i for n in decode.named_barriers for i in range(n.count)]
    assert len(ids) == len(set(ids)) and all(1 <= i <= 15 for i in ids)
    assert all(n.threads % 32 == 0 and n.threads <= decode.launch.threads for n in decode.named_barriers)


def boxes_bring_whole_tiles(decode: DecodePlan, target: Target) -> None:
    tile = decode.tile
    assert tile.tokens % tile.box_tokens == 0
    assert tile.subtiles * 64 >= decode.d_qk > (tile.subtiles - 1) * 64
    boxes = {tensor_map.tensor: tensor_map.box for tensor_map in decode.tensor_maps}
    barriers = {barrier.name: barrier for barrier in decode.mbarriers}
    for tensor_map in decode.tensor_maps:
        assert len(tensor_map.box) == len(tensor_map.dims) <= 5
        assert all(1 <= extent <= 256 for extent in tensor_map.box)
        assert tensor_map.box[0] * ELEMENT_BYTES <= tensor_map.swizzle_bytes or tensor_map.swizzle_bytes == 0

    assert ("kv_cache" in boxes) != tile.gathered
    assert tile.gathered == (decode.page_size == 1 and decode.row is None)
    assert tile.loaders == (1 if tile.box_tokens == tile.tokens or decode.row is not None else 2)
    (loaders,) = (role.warps for role in decode.roles if re.match("tile loader|producer", role.name))
    assert loaders == tile.loaders

    def size(tensor: str) -> int:
        return boxes[tensor][0] * boxes[tensor][1] * ELEMENT_BYTES

    def bytes_of(*names: str) -> int:
        return sum(barriers[name].bytes for name in names if name in barriers)

    boxes_of_tile = tile.tokens // tile.box_tokens
    lines = tile.subtiles if decode.row is None else decode.row.lines
    brought = bytes_of("full", "rope_full") * (lines if tile.ring_subtiles else 1)
    assert brought == (0 if tile.gathered else boxes_of_tile * lines * size("kv_cache"))
    if decode.row is not None:
        row = decode.row
        assert ("scales" in boxes) == (row.scale_bytes > 0)
        assert "scales" not in boxes or boxes_of_tile * size("scales") == bytes_of("scales_full")
        # What is read lies within the row, but for what fills up the last line of codes.
        assert row.rope_offset + 2 * (decode.d_qk - row.code_columns) <= row.bytes
        assert row.scale_offset + row.scale_bytes <= row.bytes
        assert row.scale_box_bytes % 128 == 0
    # Q comes by barriers of its own, or the columns of V as a tile.
    if "q_full" in barriers:
        assert tile.subtiles * size("q") == bytes_of("q_full")
    elif not tile.gathered:
        assert tile.subtiles * size("q") == bytes_of("full", "q_rope_full")


def registers_are_there(decode: DecodePlan, target: Target) -> None:
    available = {role.name: role.registers for role in decode.roles}
    for name in {use.role for use in decode.registers}:
        assert sum(use.registers for use in decode.registers if use.role == name) <= available[name], name
    for limit in decode.launch.register_limits:
        assert limit.registers % 8 == 0 and 24 <= limit.registers <= target.max_registers_per_thread
    assert {limit.registers for limit in decode.launch.register_limits} == set(available.values())
    # A launch gets as many for each thread, in steps of 8; who waits for more than there were hangs.
    at_launch = min(target.registers_per_sm // decode.launch.threads // 8 * 8, target.max_registers_per_thread)
    assert sum(role.warps * 32 * role.registers for role in decode.roles) <= at_launch * decode.launch.threads
    assert sum(role.warps for role in decode.roles) * 32 == decode.launch.threads <= 1024


def choices_are_the_fields_left_open(plan: Plan) -> None:
    options = plan.spec.kernels.decode
    left = {f"kernels.decode.{each}" for each in type(options).model_fields if getattr(options, each) == "auto"}
    assert {choice.field for choice in plan.choices if choice.field.startswith("kernels.decode.")} == left
    assert all(choice.value and choice.why for choice in plan.choices)


def narrower_kernels_stand_beside_what_is_left_open(plan: Plan) -> None:
    options = plan.spec.kernels.decode
    wanted = options.schedule == options.tile_rows == "auto"
    # Where 40 rows were measured faster than 64.
    some = 40 if plan.spec.layout is None and plan.spec.d_v <= 256 else 64
    assert [each.tile.rows for each in plan.narrow_decodes] == ([16, 32, 40][: 2 + (some == 40)] if wanted else [])
    assert [plan.decode_for(rows).tile.rows for rows in (1, 16, 17, 32, 33, 40, 41, 256)] == (
        [16, 16, 32, 32, some, some, 64, 64] if wanted else [plan.decode.tile.rows] * 8
    )
    assert len({each.file for each in plan.decodes}) == len({each.entry for each in plan.decodes}) == len(plan.decodes)


DECODE_INVARIANTS: list[Callable[[DecodePlan, Target], None]] = [
    regions_fit,
    regions_are_aligned,
    barriers_expect_what_the_regions_hold,
    boxes_bring_whole_tiles,
    registers_are_there,
]


def of_every_decode_kernel(invariant: Callable[[DecodePlan, Target], None]) -> Callable[[Plan], None]:
    def check(plan: Plan) -> None:
        for decode in plan.decodes:
            invariant(decode, plan.target)

    check.__name__ = invariant.__name__
    return check


INVARIANTS: list[Callable[[Plan], None]] = [
    *map(of_every_decode_kernel, DECODE_INVARIANTS),
    choices_are_the_fields_left_open,
    narrower_kernels_stand_beside_what_is_left_open,
]


@given(specs())
def test_invariants_of_any_plan(spec: Spec) -> None:
    plan = make_plan(spec)
    for invariant in INVARIANTS:
        invariant(plan)
    assert plan == make_plan(spec)
    assert (plan.decode.d_qk, plan.decode.d_v) == (spec.d_qk, spec.d_v)


@pytest.mark.parametrize("invariant", INVARIANTS, ids=lambda invariant: invariant.__name__)
@pytest.mark.parametrize("name", SHIPPED)
def test_invariants_of_the_shipped_specs(name: str, invariant: Callable[[Plan], None]) -> None:
    invariant(make_plan(load_spec(find_spec(name))))


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("schedule", ["auto", "plain", "swapped"])
def test_how_tiles_are_brought_follows_from_the_pages(schedule: str, page_size: int) -> None:
    tree = load_spec(find_spec("deepseek_v3")).model_dump(exclude_none=True)
    tree["cache"]["page_size"] = page_size
    tree["kernels"]["decode"]["schedule"] = schedule
    plan = make_plan(Spec.model_validate(tree))
    for invariant in INVARIANTS:
        invariant(plan)
    assert {each.tile.gathered for each in plan.decodes} == {page_size == 1}
    (choice,) = (each for each in plan.choices if each.field == "decode loader")
    assert choice.value.startswith("1 warp" if page_size >= 64 else "2 warps")
    assert ("TMA" in choice.value) == (page_size > 1)


@given(specs())
def test_as_many_stages_as_fit_and_not_one_more(spec: Spec) -> None:
    stages = make_plan(spec).decode.tile.stages
    tree = spec.model_dump(exclude_none=True)
    tree["kernels"]["decode"]["stages"] = stages
    assert make_plan(Spec.model_validate(tree)).decode.tile.stages == stages
    assert stages <= MAX_STAGES
    if stages == MAX_STAGES:
        return
    tree["kernels"]["decode"]["stages"] = stages + 1
    with pytest.raises(SpecError) as caught:
        make_plan(Spec.model_validate(tree))
    (problem,) = caught.value.problems
    assert problem.field == "kernels.decode.stages" and problem.message.endswith(f"lower stages to {stages}")


def test_a_plan_is_plain_data() -> None:
    plan = make_plan(load_spec(find_spec("deepseek_v3")))
    data = json.loads(json.dumps(plan.to_json()))
    assert set(data) == {each.name for each in fields(Plan)} - {"decodes"} | {"decode", "narrow_decodes"}
    assert data["decode"]["smem"]["total"] == plan.decode.smem.total
    assert data["spec"]["model"]["kv_lora_rank"] == 512


QUANTISED = ("fp8_e4m3", "fp8_e4m3_token", "fp8_ds_mla", "nvfp4")


@pytest.mark.parametrize("dtype", QUANTISED)
def test_the_kernels_of_a_quantised_cache(dtype: str) -> None:
    tree = load_spec(find_spec("deepseek_v3")).model_dump(exclude_none=True)
    tree["cache"]["dtype"] = dtype
    plan = make_plan(Spec.model_validate(tree))
    assert plan.spec.element == "bf16" and next(kernel.name for kernel in plan.kernels) == "gather"
    assert [each.tile.rows for each in plan.decodes] == [16, 32, 64]
    for each in plan.decodes:
        stored = dtype == "nvfp4" and each.tile.rows == 16
        assert each.schedule_name == ("stored" if stored else "swapped")
        assert each.template == f"kernels/decode_{each.schedule_name}_quantised.cu.j2"
        assert each.smem.total <= each.smem.limit and each.tile.ring_subtiles >= (2 - stored) * each.row.lines
        assert ("tensor_scale" in [parameter.name for parameter in each.parameters]) == each.row.tensor_scale
    choices = {choice.field: choice for choice in plan.choices}
    assert choices["kernels.decode.schedule"].value == "swapped"
    assert "registers" in choices["kernels.decode.schedule"].why
    assert ("for 16 rows stored" in choices["kernels.decode.schedule"].why) == (dtype == "nvfp4")


@pytest.mark.parametrize(("page_size", "why"), [(1, "issues 64 boxes"), (16, "issues 4 boxes"), (64, "so one box")])
def test_one_warp_brings_quantised_rows_whatever_the_pages(page_size: int, why: str) -> None:
    tree = load_spec(find_spec("deepseek_v3")).model_dump(exclude_none=True)
    tree["cache"] = {"dtype": "fp8_e4m3", "page_size": page_size}
    plan = make_plan(Spec.model_validate(tree))
    for invariant in INVARIANTS:
        invariant(plan)
    assert {(each.tile.loaders, each.tile.gathered) for each in plan.decodes} == {(1, False)}
    (choice,) = (each for each in plan.choices if each.field == "decode loader")
    assert choice.value == "1 warp, TMA" and why in choice.why


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"schedule": "skewed"}, "no skewed kernel reads a cache of fp8_ds_mla; .*use auto or swapped"),
        ({"schedule": "stored"}, "no stored kernel reads a cache of fp8_ds_mla; got stored; use auto or swapped"),
        ({"stages": 1}, "the swapped schedule needs 2 stages; got 1"),
    ],
)
def test_what_a_quantised_cache_cannot_have(settings: dict[str, str | int], match: str) -> None:
    tree = load_spec(find_spec("deepseek_v3_fp8_ds_mla")).model_dump(exclude_none=True)
    tree["kernels"]["decode"] |= settings
    with pytest.raises(SpecError, match=match):
        make_plan(Spec.model_validate(tree))


@pytest.mark.parametrize("settings", [{"schedule": "stored"}, {"tile_rows": 16}])
def test_a_cache_of_nvfp4_may_have_the_stored_kernel(settings: dict[str, str | int]) -> None:
    plan = plan_with("deepseek_v3_nvfp4", **settings)
    for invariant in INVARIANTS:
        invariant(plan)
    assert plan.decodes == (plan.decode,) and plan.decode.tile.rows == 16
    assert plan.decode.template == "kernels/decode_stored_quantised.cu.j2"
    left = "kernels.decode.tile_rows" if "schedule" in settings else "kernels.decode.schedule"
    why = {choice.field: choice.why for choice in plan.choices}[left]
    assert why.startswith("N of WGMMA" if "schedule" in settings else "of e2m1 it is the widening")


def test_a_stored_kernel_that_there_is_not() -> None:
    # Three stages have no room beside V.
    plan = plan_with("deepseek_v3_nvfp4", tile_rows=16, stages=3)
    assert plan.decode.schedule_name == "swapped"
    with pytest.raises(SpecError, match="the stored schedule has tiles of 16 rows; got 32; use 16 or another schedule"):
        plan_with("deepseek_v3_nvfp4", schedule="stored", tile_rows=32)
    with pytest.raises(SpecError, match="no stored kernel reads a cache of bf16; got stored; use auto or plain"):
        plan_with("deepseek_v3", schedule="stored")


@pytest.mark.parametrize(("heads", "rows"), [(1, 16), (16, 16), (17, 32), (128, 32)])
def test_a_swapped_kernel_by_itself_has_as_many_rows_as_heads(heads: int, rows: int) -> None:
    tree = load_spec(find_spec("deepseek_v3")).model_dump(exclude_none=True)
    tree["model"]["num_attention_heads"] = heads
    tree["kernels"]["decode"]["schedule"] = "swapped"
    plan = make_plan(Spec.model_validate(tree))
    assert plan.decodes == (plan.decode,) and plan.decode.tile.rows == rows
    assert (plan.decode.schedule_name, plan.decode.file) == ("swapped", "decode.cu")


def test_tiles_of_few_rows_mean_the_swapped_schedule() -> None:
    tree = load_spec(find_spec("deepseek_v3")).model_dump(exclude_none=True)
    tree["kernels"]["decode"]["tile_rows"] = 16
    plan = make_plan(Spec.model_validate(tree))
    assert plan.decodes == (plan.decode,) and plan.decode.schedule_name == "swapped"


def with_rows(rank: int, rows: int | str, *, heads: int = 40, rope: int = 32, schedule: str = "auto") -> Spec:
    return parse_spec(
        f"name: rows\nmodel: {{num_attention_heads: {heads}, kv_lora_rank: {rank}, qk_nope_head_dim: 64,"
        f" qk_rope_head_dim: {rope}, v_head_dim: 64}}\n"
        f"kernels: {{decode: {{schedule: {schedule}, tile_rows: {rows}}}}}\n"
    )


@pytest.mark.parametrize("rows", [8, 16, 24, 32, 40, 48, 56])
@pytest.mark.parametrize("rank", MOST_ROWS)
def test_a_tile_has_as_many_rows_as_the_registers_hold(rank: int, rows: int) -> None:
    if rows <= MOST_ROWS[rank]:
        plan = make_plan(with_rows(rank, rows))
        assert plan.decodes == (plan.decode,) and plan.decode.tile.rows == rows
        assert (plan.decode.schedule_name, plan.decode.file) == ("swapped", "decode.cu")
        assert {each.box for each in plan.decode.tensor_maps if each.tensor == "q"} == {(64, rows, 1, 1)}
        for invariant in INVARIANTS:
            invariant(plan)
        return
    with pytest.raises(SpecError) as caught:
        make_plan(with_rows(rank, rows))
    (problem,) = caught.value.problems
    offered = {384: "8, 16, 24, 32 or 40", 512: "8, 16, 24 or 32"}[rank]
    assert problem.field == "kernels.decode.tile_rows"
    assert f"tiles of {offered} rows for model.kv_lora_rank {rank} ({rows} need " in problem.message
    assert problem.message.endswith(f"of a thread's 224 registers); got {rows}; use {offered} or another schedule")


def test_rows_that_leave_no_room_for_a_tile_of_tokens_are_told_from_a_cache_too_wide() -> None:
    assert make_plan(with_rows(384, 8, rope=928)).decode.tile.stages == 1
    with pytest.raises(SpecError, match=r"tile_rows: tiles of 40 rows need .* lower tile_rows to 8 or 16$") as caught:
        make_plan(with_rows(384, 40, rope=928))
    assert [problem.field for problem in caught.value.problems] == ["kernels.decode.tile_rows"]
    with pytest.raises(SpecError, match=r"model\.kv_lora_rank: even 1 stage needs"):
        make_plan(with_rows(512, "auto", rope=1024, schedule="swapped"))


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("rows", [8, 24, 40, 48, 56])
def test_a_quantised_cache_has_no_tiles_of_other_rows(rows: int, dtype: str) -> None:
    tree = load_spec(find_spec("deepseek_v3")).model_dump(exclude_none=True)
    tree["cache"]["dtype"] = dtype
    tree["kernels"]["decode"]["tile_rows"] = rows
    with pytest.raises(SpecError, match=f"tiles of 16, 32 or 64 rows; got {rows}; use 16, 32 or 64 or another"):
        make_plan(Spec.model_validate(tree))


@pytest.mark.parametrize(("rank", "narrow", "alone"), [(256, [16, 40, 48], 40), (512, [16], 16)])
def test_one_constant_names_the_rows_of_what_is_left_open(
    rank: int, narrow: list[int], alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "AUTO_TILE_ROWS", (16, 40, 48))
    plan = make_plan(with_rows(rank, "auto"))
    assert [each.tile.rows for each in plan.decodes] == [*narrow, 64]
    assert [each.file for each in plan.narrow_decodes] == [f"decode_{rows}.cu" for rows in narrow]
    assert plan.decode_for(33).tile.rows == next((rows for rows in narrow if rows >= 33), 64)
    assert make_plan(with_rows(rank, "auto", schedule="swapped")).decode.tile.rows == alone


def test_stages_that_a_spec_names_are_a_limit_for_narrower_kernels() -> None:
    tree = load_spec(find_spec("deepseek_v3")).model_dump(exclude_none=True)
    stages = {}
    for asked in (2, 3):
        tree["kernels"]["decode"]["stages"] = asked
        stages[asked] = [each.tile.stages for each in make_plan(Spec.model_validate(tree)).decodes]
    assert stages == {2: [2, 2, 2], 3: [2, 2, 3]}


BROKEN = """\
name: broken
model:
  num_attention_heads: 128
  kv_lora_rank: {rank}
  qk_nope_head_dim: 128
  qk_rope_head_dim: {rope}
  v_head_dim: 128
kernels:
  decode:
    stages: {stages}
"""


@pytest.mark.parametrize(
    ("values", "line", "field", "words"),
    [
        ({"stages": 4}, 10, "kernels.decode.stages", ("320,440 B", "232,448 B", "lower stages to 3")),
        ({"stages": 8}, 10, "kernels.decode.stages", ("lower stages to 3",)),
        ({"stages": "3\n    schedule: plain"}, 10, "kernels.decode.stages", ("303,512 B", "lower stages to 2")),
        ({"stages": "1\n    schedule: skewed"}, 10, "kernels.decode.stages", ("needs 2 stages; got 1",)),
        ({"stages": "1\n    schedule: plain"}, 10, "kernels.decode.stages", ("needs 2 stages; got 1",)),
        ({"stages": "3\n    schedule: swapped"}, 10, "kernels.decode.stages", ("lower stages to 2",)),
        ({"stages": "2\n    tile_rows: 32\n    schedule: plain"}, 11, "kernels.decode.tile_rows", ("64 rows; got 32",)),
        (
            {"stages": "2\n    tile_rows: 64\n    schedule: swapped"},
            11,
            "kernels.decode.tile_rows",
            ("8, 16, 24 or 32", "got 64"),
        ),
        ({"rank": 520}, 4, "model.kv_lora_rank", ("128, 256, 384, 512", "520")),
        ({"rope": 24}, 6, "model.qk_rope_head_dim", ("multiple of 16", "use 16 or 32")),
        ({"rope": 512}, 4, "model.kv_lora_rank", ("232,448 B", "model.kv_lora_rank + model.qk_rope_head_dim = 1024")),
        ({"rope": 512, "stages": 2}, 4, "model.kv_lora_rank", ("even 2 stages need",)),
    ],
)
def test_hardware_limits_name_the_field(
    values: dict[str, object], line: int, field: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(BROKEN.format(**{"rank": 512, "rope": 64, "stages": "auto"} | values))
    with pytest.raises(SpecError) as caught:
        make_plan(load_spec(path))
    (problem,) = caught.value.problems
    assert (problem.file, problem.line, problem.field) == (str(path), line, field)
    assert all(word in problem.message for word in words), problem.message


def test_all_limits_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        make_plan(parse_spec(BROKEN.format(rank=520, rope=24, stages=3)))
    assert [problem.field for problem in caught.value.problems] == ["model.kv_lora_rank", "model.qk_rope_head_dim"]
