"""What a model's config.json says of an attention layer: dimensions, rotation, scales, and what few models do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch

NORM_EPS = 1e-6
"""Of the norms of compressed queries and latents: models build them without rms_norm_eps, which some set to 1e-5."""

_ROPE_TYPES = {"deepseek_yarn": "yarn", "su": "longrope"}
"""Older words."""
_CONTEXTS = ("max_position_embeddings", "model_max_length")
_RENAMED = {
    "attention_kv_lora_dim": "kv_lora_rank",
    "attention_q_lora_dim": "q_lora_rank",
    "attention_qk_dim": "qk_nope_head_dim",
    "attention_qk_rope_dim": "qk_rope_head_dim",
    "attention_v_dim": "v_head_dim",
}
"""openPangu's words."""
_NEIGHBOURS = frozenset(
    {
        "bailing_hybrid",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k2",
        "longcat_flash",
        "mistral4",
        "youtu",
    }
)
"""Model types whose rotary pairs are neighbours, x_2i and x_2i+1."""
_HALVES = frozenset({"minicpm3"})
"""Model types whose rotary pairs are half of the elements apart."""
_UNROTATED = frozenset({"kimi_linear"})
"""Model types that keep the rotary elements and do not rotate them."""


@dataclass(frozen=True)
class Rotation:
    """The positional rotation of a model: what a position turns each pair by."""

    interleaved: bool
    """Whether neighbours are a pair, x_2i and x_2i+1, or x_i and x_i+half."""
    frequencies: tuple[float, ...]
    """Of each pair, radians a position."""
    attention_factor: float = 1.0
    """What cosines and sines are multiplied with."""
    long_frequencies: tuple[float, ...] | None = None
    """longrope: those of a context longer than `original_context`."""
    original_context: int = 0

    def of_context(self, tokens: int) -> tuple[float, ...]:
        """Give the frequencies for contexts of up to so many tokens."""
        if self.long_frequencies is not None and tokens > self.original_context:
            return self.long_frequencies
        return self.frequencies


@dataclass(frozen=True)
class QueryScaling:
    """Queries grow with their position: by 1 + beta ln(1 + floor(position / original_context)), as in Llama 4."""

    beta: float
    original_context: int


@dataclass(frozen=True)
class PositionTables:
    """What follows from a position, worked out once for all layers.

    The keys of a cache and the queries that meet them must be rotated by the same table.
    """

    cos_sin: torch.Tensor | None
    """(max_position, qk_rope_head_dim): cosines, then as many sines; None if the model does not rotate."""
    query_scale: torch.Tensor | None
    """(max_position,): factor of the queries; None if there is none."""

    @property
    def max_position(self) -> int | None:
        """How many positions the tables have; None if positions have no effect."""
        table = self.query_scale if self.cos_sin is None else self.cos_sin
        return None if table is None else table.shape[0]


@runtime_checkable
class _Configuration(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class AttentionConfig:
    """The attention of one model, all heads, in the words of its config.json."""

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int | None
    """None if queries are projected directly."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    max_position_embeddings: int
    softmax_scale: float
    """Of the logits: (qk_nope_head_dim + qk_rope_head_dim)^-1/2, and yarn's factor squared."""
    rotation: Rotation | None
    """None if the model does not rotate, whether or not it has rotary elements."""
    attention_bias: bool = False
    """Whether q_a_proj, kv_a_proj_with_mqa and o_proj have a bias."""
    norm_eps: float = NORM_EPS
    """Of q_a_layernorm and kv_a_layernorm."""
    q_lora_scale: float = 1.0
    """LongCat: factor of the queries."""
    kv_lora_scale: float = 1.0
    """LongCat: factor of the normalised latent."""
    query_scaling: QueryScaling | None = None
    """Mistral Small 4."""
    output_gate: Literal["head", "element"] | None = None
    """Kimi-K3, Ling 3: o_proj's input is multiplied by the sigmoid of g_proj, one for each head or for each element."""

    @property
    def qk_head_dim(self) -> int:
        """Elements of a decompressed query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | object) -> AttentionConfig:
        """Read a config.json.

        Args:
            config: the parsed file, or a configuration of transformers. Of a multimodal model the text_config is read.

        Raises:
            ValueError: a field is missing, or says what is not known here; it is named.
        """
        config = _fields(config)
        model = config.get("model_type")
        nope, rope = _size(config, "qk_nope_head_dim"), _size(config, "qk_rope_head_dim", least=0)
        hidden, heads, kv_rank = (_size(config, k) for k in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
        q_rank = None if config.get("q_lora_rank") is None else _size(config, "q_lora_rank")
        # MiniCPM3 leaves it out where it is the hidden size divided by the heads.
        v_dim = hidden // heads if config.get("v_head_dim") is None else _size(config, "v_head_dim")
        # Kimi's models have another word for it.
        context = _size(config, next((k for k in _CONTEXTS if config.get(k) is not None), _CONTEXTS[0]))
        scaling = _rope_parameters(config, context)
        q_scale = kv_scale = 1.0
        if config.get("mla_scale_q_lora", model == "longcat_flash"):
            if q_rank is None:
                raise ValueError("q_lora_rank is null; it must be a number where compressed queries are scaled")
            q_scale = math.sqrt(hidden / q_rank)
        if config.get("mla_scale_kv_lora", model == "longcat_flash"):
            kv_scale = math.sqrt(hidden / kv_rank)
        gate: Literal["head", "element"] | None = None
        if model == "bailing_hybrid":
            gate = "head"
        elif config.get("mla_use_output_gate"):
            gate = "element"
        return cls(
            hidden_size=hidden,
            num_attention_heads=heads,
            q_lora_rank=q_rank,
            kv_lora_rank=kv_rank,
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope,
            v_head_dim=v_dim,
            max_position_embeddings=context,
            softmax_scale=_softmax_scale(nope + rope, scaling),
            rotation=_rotation(config, rope, scaling, context),
            attention_bias=bool(config.get("attention_bias", False)),
            q_lora_scale=q_scale,
            kv_lora_scale=kv_scale,
            query_scaling=_query_scaling(scaling),
            output_gate=gate,
        )

    def position_tables(
        self,
        max_position: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> PositionTables:
        """Work out what follows from a position.

        Args:
            max_position: positions; max_position_embeddings if None. Under longrope it also says which frequencies are
                used, for all positions: keys that are cached stay as they were rotated.
            device: of the tables.
            dtype: of the tables; the kernels take float32.
        """
        positions = self.max_position_embeddings if max_position is None else max_position
        if positions < 1:
            raise ValueError(f"max_position is {positions}; it must be positive")
        cos_sin = query_scale = None
        tokens = torch.arange(positions, dtype=torch.float64, device=device)
        if (rotation := self.rotation) is not None:
            frequencies = torch.tensor(rotation.of_context(positions), dtype=torch.float64, device=device)
            angles = torch.outer(tokens, frequencies)
            cos_sin = (torch.cat([angles.cos(), angles.sin()], -1) * rotation.attention_factor).to(dtype)
        if (scaling := self.query_scaling) is not None:
            query_scale = query_scales(tokens, scaling).to(dtype)
        return PositionTables(cos_sin, query_scale)


def query_scales(positions: torch.Tensor, scaling: QueryScaling) -> torch.Tensor:
    """Give the factors of queries at positions, of the positions' own dtype."""
    return 1 + scaling.beta * torch.log1p(torch.floor(positions / scaling.original_context))


def _fields(config: Mapping[str, Any] | object) -> Mapping[str, Any]:
    if isinstance(config, _Configuration):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise ValueError(
            f"config is a {type(config).__name__}; it must be a mapping as in config.json, or have to_dict()"
        )
    text = config.get("text_config")
    if not {"kv_lora_rank", "attention_kv_lora_dim"} & config.keys() and isinstance(text, Mapping):
        config = text
    return {_RENAMED.get(name, name): value for name, value in config.items()}


def _size(config: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be an integer from {least} on")
    return value


def _number(parameters: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = parameters.get(name)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} of the rotation is {value!r}; it must be a number")
    return float(value)


def _rope_parameters(config: Mapping[str, Any], context: int) -> Mapping[str, Any]:
    """Give what is said of the rotation, whether as rope_parameters or, in older files, rope_scaling and rope_theta."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"rope_parameters is {found!r}; it must be a mapping")
    for name, value in found.items():
        if isinstance(value, Mapping):
            raise ValueError(f"rope_parameters has a mapping at {name}; it must say the one rotation of all layers")
    parameters = {"rope_theta": config.get("rope_theta"), **found}
    kind = found.get("rope_type", found.get("type")) or "default"
    parameters["rope_type"] = _ROPE_TYPES.get(kind, kind)
    # Where a file has it outside, that one counts.
    original = config.get("original_max_position_embeddings")
    parameters["original_max_position_embeddings"] = (
        original or found.get("original_max_position_embeddings") or context
    )
    return parameters


def _yarn_factor(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def _softmax_scale(qk_head_dim: int, parameters: Mapping[str, Any]) -> float:
    scale = 1 / math.sqrt(qk_head_dim)
    if parameters["rope_type"] != "yarn" or not parameters.get("mscale_all_dim"):
        return scale
    return scale * _yarn_factor(_number(parameters, "factor"), _number(parameters, "mscale_all_dim")) ** 2


def _query_scaling(parameters: Mapping[str, Any]) -> QueryScaling | None:
    if parameters.get("llama_4_scaling_beta") is None:
        return None
    original = _number(parameters, "original_max_position_embeddings")
    return QueryScaling(_number(parameters, "llama_4_scaling_beta"), int(original))


def _interleaved(config: Mapping[str, Any]) -> bool:
    model = config.get("model_type")
    if model in _HALVES:
        return False
    interleaved = config.get("rope_interleave", config.get("rope_interleaved"))
    if interleaved is not None:
        return bool(interleaved)
    if model in _NEIGHBOURS:
        return True
    raise ValueError(
        f"model_type is {model!r}, of which it is not known which rotary elements are a pair; add rope_interleave: "
        "true if x_2i and x_2i+1 are, false if x_i and x_i+half are"
    )


def _rotation(config: Mapping[str, Any], dims: int, parameters: Mapping[str, Any], context: int) -> Rotation | None:
    if dims == 0 or config.get("mla_use_nope") or config.get("model_type") in _UNROTATED:
        return None
    if dims % 2:
        raise ValueError(f"qk_rope_head_dim is {dims}; it must be even where pairs are rotated")
    interleaved = _interleaved(config)
    theta = _number(parameters, "rope_theta", 1e7 if config.get("model_type") == "longcat_flash" else 1e4)
    turns = [theta ** (-2 * i / dims) for i in range(dims // 2)]
    kind = parameters["rope_type"]
    original = int(_number(parameters, "original_max_position_embeddings"))
    if kind == "default":
        return Rotation(interleaved, tuple(turns))
    if kind == "linear":
        factor = _number(parameters, "factor")
        return Rotation(interleaved, tuple(turn / factor for turn in turns))
    if kind == "yarn":
        factor = _number(parameters, "factor", context / original)
        frequencies = _yarn(turns, theta, factor, original, parameters)
        return Rotation(interleaved, frequencies, _yarn_attention_factor(factor, parameters))
    if kind == "longrope":
        factor = _number(parameters, "factor", context / original)
        grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        short, long = (_divided(turns, parameters, name) for name in ("short_factor", "long_factor"))
        attention_factor = _number(parameters, "attention_factor", grown)
        return Rotation(interleaved, short, attention_factor, long, original)
    raise ValueError(f"rope_type is {kind!r}; it must be default, linear, yarn or longrope")


def _divided(turns: list[float], parameters: Mapping[str, Any], name: str) -> tuple[float, ...]:
    factors = parameters.get(name)
    if not isinstance(factors, list | tuple) or len(factors) != len(turns):
        count = len(factors) if isinstance(factors, list | tuple) else factors
        raise ValueError(f"{name} of the rotation has {count!r} numbers; it must have {len(turns)}, one for each pair")
    return tuple(turn / float(factor) for turn, factor in zip(turns, factors, strict=True))


def _yarn(
    turns: list[float], theta: float, factor: float, original: int, parameters: Mapping[str, Any]
) -> tuple[float, ...]:
    """Slow pairs, which the original context does not turn once, are slowed down by the factor; fast ones are not."""

    def pair_of(rotations: float) -> float:
        # The pair that turns so often within the original context, as a real number.
        return len(turns) * math.log(original / (rotations * 2 * math.pi)) / math.log(theta)

    first = pair_of(_number(parameters, "beta_fast", 32.0))
    last = pair_of(_number(parameters, "beta_slow", 1.0))
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(turns) - 1)
    width = last - first or 0.001
    slowed = [min(max((i - first) / width, 0.0), 1.0) for i in range(len(turns))]
    return tuple(turn * (1 - part) + turn / factor * part for turn, part in zip(turns, slowed, strict=True))


def _yarn_attention_factor(factor: float, parameters: Mapping[str, Any]) -> float:
    if parameters.get("attention_factor") is not None:
        return _number(parameters, "attention_factor")
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        mscale, all_dim = _number(parameters, "mscale"), _number(parameters, "mscale_all_dim")
        return _yarn_factor(factor, mscale) / _yarn_factor(factor, all_dim)
    return _yarn_factor(factor, 1.0)
