"""The backends for engines, without the engines: what they ask of the kernels, under the simulator and on doubles.

Inside of the engines themselves the backends run in test_engine_vllm.py and test_engine_sglang.py.
"""

from __future__ import annotations

import enum
import importlib.util
import subprocess
import sys
import threading
import time
import types
from typing import Any

import pytest
import torch

import engine_doubles
import mlaforge.engines
from engine_calls import (
    DIMENSIONS,
    Paged,
    Server,
    append_as_vllm,
    decode_as_sglang,
    decode_as_vllm,
    prefill_as_vllm,
    sglang_layer,
    vllm_impl,
)
from mlaforge.engines import kernels as kernels_module
from mlaforge.engines.kernels import SHIPPED, Dimensions, Shape, kernels, prepare, shape, why_no_prefill, why_not
from mlaforge.launch import Cuda
from mlaforge_generator.resources import find_spec
from mlaforge_generator.spec import check_spec, load_spec
from test_verify import one_thread as one_thread

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        any(importlib.util.find_spec(engine) for engine in ("vllm", "sglang")),
        reason="with an engine beside it the backend is tried inside of that",
    ),
]


# ---- Registration ----------------------------------------------------------------------------------------------------


def test_neither_engine_is_imported() -> None:
    code = (
        "import sys, mlaforge, mlaforge.engines\n"
        "assert not {'vllm', 'sglang', 'torch'} & set(sys.modules)\n"
        "import mlaforge.engines.kernels\n"
        "assert not {'vllm', 'sglang'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
    for register in (mlaforge.engines.register_vllm, mlaforge.engines.register_sglang):
        with pytest.raises(ImportError):
            register()


def test_entry_points_name_what_there_is() -> None:
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for group, function in (("vllm.general_plugins", "register_vllm"), ("sglang.srt.plugins", "register_sglang")):
        assert project["entry-points"][group] == {"mlaforge": f"mlaforge.engines:{function}"}
        assert callable(getattr(mlaforge.engines, function))


@pytest.mark.parametrize("with_prefill", [True, False])
def test_vllm_s_registries(with_prefill: bool) -> None:
    """Older releases have none for prefill."""
    registered: dict[Any, str] = {}

    class Places(enum.Enum):
        CUSTOM = None

    def register(place: Any, path: str) -> None:
        registered[place] = path

    class PrefillPlaces(enum.Enum):
        CUSTOM = None

    of_attention = {"AttentionBackendEnum": Places, "register_backend": register}
    of_prefill = {"MLAPrefillBackendEnum": PrefillPlaces, "register_mla_prefill_backend": register}
    made: dict[str, dict[str, Any]] = {"vllm.v1.attention.backends.registry": of_attention}
    if with_prefill:
        made["vllm.v1.attention.backends.mla.prefill.registry"] = of_prefill
    with engine_doubles.modules(made):
        for _ in range(2):
            mlaforge.engines.register_vllm()
    want: dict[Any, str] = {Places.CUSTOM: "mlaforge.engines.vllm.MLAForgeBackend"}
    if with_prefill:
        want[PrefillPlaces.CUSTOM] = "mlaforge.engines.vllm.MLAForgePrefillBackend"
    assert registered == want
    for path in registered.values():
        assert hasattr(engine_doubles.vllm(), path.rpartition(".")[2])


# ---- Kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dimensions", SHIPPED, ids=SHIPPED.get)
def test_shipped_specs_have_their_dimensions(dimensions: Dimensions) -> None:
    """So that `mlaforge compile` of the spec leaves in the cache what an engine looks for."""
    spec = load_spec(find_spec(SHIPPED[dimensions]))
    assert dimensions == tuple(getattr(spec.model, name) for name in Dimensions._fields)
    assert (spec.cache.dtype, spec.cache.page_size) == ("bf16", 64)
    assert kernels_module._folder(Shape(dimensions, "bf16", 64)).name.startswith(f"{spec.name}-")


def test_other_shapes_are_specs_of_their_own() -> None:
    needed = shape(DIMENSIONS, torch.float16, 16)
    spec = check_spec(needed.tree())
    assert (spec.d_qk, spec.cache.dtype, spec.cache.page_size) == (576, "fp16", 16)
    assert kernels_module._folder(needed).name.startswith("engine_512_128_64_128_fp16_16-")


def test_shapes_that_have_no_kernel() -> None:
    with pytest.raises(ValueError, match=r"dtype is torch\.float32; it must be torch\.bfloat16 or"):
        shape(DIMENSIONS, torch.float32, 64)
    with pytest.raises(ValueError, match=r"no kernel has .*page_size"):
        kernels(shape(DIMENSIONS, torch.bfloat16, 48), "cpu")
    with pytest.raises(ValueError, match="tensors are on 'mps'"):
        kernels(shape(DIMENSIONS, torch.bfloat16, 64), "mps")
    assert all(why_not(each) is None for each in SHIPPED)
    assert "kv_lora_rank" in str(why_not(Dimensions(192, 128, 64, 128)))
    assert all(why_no_prefill(*each[1:]) is None for each in SHIPPED)
    assert "got 96" in str(why_no_prefill(128, 64, 96)) and "got 320" in str(why_no_prefill(256, 64, 128))


def test_threads_share_what_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def slow(manifest: Any, backend: Any) -> object:
        time.sleep(0.1)
        made.append(manifest.name)
        return object()

    monkeypatch.setattr(kernels_module, "_loaded", {})
    monkeypatch.setattr(kernels_module, "MLA", slow)
    results: list[object] = []
    start = threading.Barrier(6)

    def ask() -> None:
        start.wait()
        results.append(kernels(shape(DIMENSIONS, torch.bfloat16, 64), "cpu"))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["deepseek_v3"] and len(set(map(id, results))) == 1


def test_prepare_compiles_every_kernel_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(kernels_module, "_loaded", {})
    monkeypatch.setattr(Cuda, "kernel", lambda self, source, *rest: compiled.append(source.name))
    prepare()
    names = ["append.cu", "decode.cu", "decode_16.cu", "decode_32.cu", "gather.cu", "merge.cu", "prefill.cu"]
    assert sorted(compiled) == names


# ---- vLLM ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new, halves", [(1, True), (1, False), (3, True)])
def test_vllm_decode(new: int, halves: bool) -> None:
    torch.manual_seed(new)
    decode_as_vllm("cpu", 4, new, Paged("cpu", (70, 0, 64, 3), layers=2), halves)


def test_vllm_append() -> None:
    append_as_vllm("cpu")


def test_vllm_prefill() -> None:
    torch.manual_seed(3)
    prefill_as_vllm("cpu", 2, (70, 1, 5), (33, 0, 80))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sliding_window": 9}, "sliding_window is 9"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is fp8"),
        ({"attn_type": "encoder"}, "attn_type is encoder"),
        ({"kv_lora_rank": 192}, "no kernel has .*kv_lora_rank=192"),
    ],
    ids=str,
)
def test_vllm_layers_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        vllm_impl(4, **changes)


def test_vllm_refusals_name_the_reason() -> None:
    hopper = types.SimpleNamespace(major=9, minor=0)
    asked: dict[str, Any] = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "device_capability": hopper,
    }  # fmt: skip
    ask = engine_doubles.vllm().MLAForgeBackend.supports_combination
    assert ask(**asked) is None
    blackwell = types.SimpleNamespace(major=10, minor=0)
    reason = ask(**{**asked, "head_size": 640, "kv_cache_dtype": "fp8", "device_capability": blackwell})
    assert reason == (
        "mlaforge: head_size, kv_lora_rank + qk_rope_head_dim, is 640; it must be one of 288, 320, 512, 576; "
        "kv_cache_dtype is fp8; quantised caches are not served; the GPU's compute capability is 10.0; the kernels "
        "need 9.0 (Hopper)"
    )


def test_vllm_builder_makes_kernels_before_there_are_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(kernels_module, "_loaded", {})
    monkeypatch.setattr(Cuda, "kernel", lambda self, source, *rest: compiled.append(source.name))
    config = types.SimpleNamespace(mla_dims=DIMENSIONS)
    spec = types.SimpleNamespace(dtype=torch.bfloat16, block_size=64)
    builder = engine_doubles.vllm().MLAForgeMetadataBuilder
    builder(spec, ["layer"], config, torch.device("cpu"))
    assert not compiled
    builder(spec, ["layer"], config, torch.device("cuda"))
    assert {"decode.cu", "decode_16.cu", "append.cu", "prefill.cu"} <= set(compiled)


# ---- SGLang ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", [1, 3])
def test_sglang_decode(new: int) -> None:
    torch.manual_seed(new)
    decode_as_sglang("cpu", 64, 4, (70, 3, 64), new)


def test_sglang_prefill_is_refused() -> None:
    server = Server("cpu", 64)
    batch = types.SimpleNamespace(forward_mode=engine_doubles.Mode.EXTEND)
    with pytest.raises(NotImplementedError, match=r"mode is EXTEND; .*--decode-attention-backend mlaforge"):
        server.backend.forward_extend(None, None, None, sglang_layer(4), batch)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"use_mla_backend": False}, "no MLA model"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "kv_cache_dtype is torch.float8_e4m3fn"),
        ({"kv_index_translator": types.SimpleNamespace(reads_are_translated=True)}, "virtual pages"),
    ],
    ids=str,
)
def test_sglang_refusals_name_the_reason(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Server("cpu", 64, **changes)
