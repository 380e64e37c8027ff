# SPDX-License-Identifier: Apache-2.0
"""Computes the bytes of KV cache per token from the configuration of a model."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from flexkv.types.errors import TraceError

_MOST_BYTES = 1 << 22
"""The most bytes of a configuration; usual ones have some KiB."""
_MOST = 1 << 20
"""The largest number allowed, more than any model's layers, heads or dimensions."""

KV_DTYPES = {"auto": 0, "bfloat16": 2, "float16": 2, "fp8": 1, "float32": 4}
"""Bytes of a number, by the engine's setting. `auto` stands for the dtype that the model's
quantization names, else for 16 bits, which engines also use for models of 32 bits."""

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_INDEX_QUANTUM = 128
"""In the index of sparse attention (DeepSeek V3.2), keys have 8 bits, and this many numbers share a
scale of 4 bytes."""


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The KV cache of a model, over all ranks."""

    name: str
    """Kind of the model, such as `llama`."""
    full_bytes: int
    """Bytes of a token in the layers with full attention."""
    window_bytes: int
    """Bytes of a token in the layers with a sliding window."""
    window_tokens: int
    """Tokens of the widest window; 0 if there is none."""
    stateful_layers: int
    """The number of layers with a recurrent state, whose bytes are not counted."""
    attention_tokens: float | None = None
    """Position in a prompt at which attention takes as many operations as all else; None if the
    configuration does not say enough."""

    def token_bytes(self, new_tokens: float) -> float:
        """The average bytes of a stored token, if requests compute `new_tokens` on average.

        FlexKV stores windows only where a later request may continue: at the end of a prompt. For
        a model that has only windows, FlexKV stores all tokens.
        """
        if not self.full_bytes:
            return float(self.window_bytes)
        share = min(1.0, self.window_tokens / new_tokens) if new_tokens > 0 else 1.0
        return self.full_bytes + self.window_bytes * share


def read_model(path: str, kv_dtype: str = "auto") -> ModelCache:
    """Read the KV cache of a model from its `config.json`, or from the directory with it. Raises
    TraceError if the file cannot be read, lacks a field, or describes no attention."""
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    config = _read(file)
    nested = next((config[name] for name in _NESTED if isinstance(config.get(name), dict)), None)
    text = config | nested if isinstance(nested, dict) else config
    return _Model(file, text).cache(kv_dtype)


def _read(path: str) -> dict[str, object]:
    allowed = "a config.json of a model, or its directory"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ValueError("not a regular file")
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"larger than {_MOST_BYTES} bytes")
        config = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(
            f"cannot read {path!r} from --model: {reason}; allowed: {allowed}"
        ) from None
    if not isinstance(config, dict):
        raise TraceError(f"{path!r} from --model holds no object; allowed: {allowed}")
    return config


class _Model:
    """Reads one configuration."""

    def __init__(self, path: str, config: Mapping[str, object]) -> None:
        self._path = path
        self._config = config

    def cache(self, kv_dtype: str) -> ModelCache:
        """Compute the bytes of a token in each kind of layers.

        With latent attention (`kv_lora_rank`), a layer keeps one latent and the rotated part of the
        keys. Otherwise it keeps a key and a value for each KV head. Raises TraceError if a field is
        missing or wrong, or no layer keeps keys and values."""
        width = KV_DTYPES[kv_dtype] or self._quantized_width()
        shared = self._natural(("num_kv_shared_layers",), 0)
        layers = max(0, self._natural(_LAYERS) - shared)
        kinds, window = self._kinds(layers)
        if self._config.get("kv_lora_rank"):
            rank = self._natural(("kv_lora_rank",))
            per_layer = [(rank + self._natural(("qk_rope_head_dim",), 0)) * width] * layers
        else:
            dim = self._head_dim()
            values = self._natural(("v_head_dim",), dim)
            per_layer = [heads * (dim + values) * width for heads in self._kv_heads(layers)]
        index = self._natural(("index_head_dim",), 0)
        if index:
            per_layer = [each + index + -(-index // _INDEX_QUANTUM) * 4 for each in per_layer]
        of_kind = {"full": 0, "window": 0, "state": 0}
        for kind, size in zip(kinds, per_layer, strict=True):
            of_kind[kind] += size
        if not of_kind["full"] + of_kind["window"]:
            raise TraceError(
                f"{self._path!r} from --model has no layer that keeps keys and values; allowed: a "
                "model with attention, or --token-bytes in place of --model"
            )
        return ModelCache(
            str(self._config.get("model_type") or "model"),
            of_kind["full"],
            of_kind["window"],
            window if of_kind["window"] else 0,
            kinds.count("state"),
            self._attention_tokens(kinds),
        )

    def _attention_tokens(self, kinds: Sequence[str]) -> float | None:
        """See `ModelCache.attention_tokens`. Windows count as all else: their cost is bounded."""
        hidden, heads = self._known(*_HIDDEN), self._known(*_HEADS)
        if not hidden or not heads or "full" not in kinds:
            return None
        rank, rotated = self._known("kv_lora_rank"), self._known("qk_rope_head_dim")
        if rank:
            plain, values = self._known("qk_nope_head_dim"), self._known("v_head_dim")
            keys = plain + rotated
            queries = self._known("q_lora_rank")
            weights = (hidden + heads * keys) * queries if queries else hidden * heads * keys
            weights += hidden * (rank + rotated) + rank * heads * (plain + values)
        else:
            keys = self._known("head_dim", "kv_channels") or hidden // heads
            values = keys
            weights = hidden * keys * (heads + 2 * (self._known(*_KV_HEADS) or heads))
        weights += heads * values * hidden + self._feed_forward(hidden)
        return len(kinds) * weights / (kinds.count("full") * heads * (keys + values))

    def _feed_forward(self, hidden: int) -> int:
        """Weights of a layer's feed-forward network that one token uses."""
        width = self._known("intermediate_size", "ffn_hidden_size")
        experts = self._known("num_experts_per_tok", "moe_topk")
        if experts:
            width = self._known("moe_intermediate_size") or width
            width *= experts + self._known("n_shared_experts")
        return 3 * hidden * width if width else 2 * hidden * 4 * hidden

    def _known(self, *names: str) -> int:
        """The value of the first of these fields that has a whole number; 0 if none has."""
        values = (self._config.get(name) for name in names)
        return next((each for each in values if _is_natural(each)), 0)

    def _kinds(self, layers: int) -> tuple[list[str], int]:
        """The kind of each layer (full, window or state), and the tokens of a window."""
        config = self._config
        window = self._natural(("sliding_window", "attention_chunk_size"), 0)
        if config.get("use_sliding_window") is False:
            window = 0
        types = config.get("layer_types")
        if isinstance(types, list) and len(types) >= layers:
            return [_kind(each, window) for each in types[:layers]], window
        if not window:
            return ["full"] * layers, 0
        pattern = self._natural(("sliding_window_pattern", "_sliding_window_pattern"), 0)
        if pattern:
            return ["window" if (i + 1) % pattern else "full" for i in range(layers)], window
        from_layer = self._natural(("max_window_layers",), 0)
        if config.get("use_sliding_window") is True and from_layer:
            return ["full" if i < from_layer else "window" for i in range(layers)], window
        return ["window"] * layers, window

    def _head_dim(self) -> int:
        given = self._natural(("head_dim", "kv_channels"), 0)
        if given:
            return given
        if self._config.get("qk_nope_head_dim"):
            return self._natural(("qk_nope_head_dim",)) + self._natural(("qk_rope_head_dim",), 0)
        return self._natural(_HIDDEN) // self._natural(_HEADS)

    def _kv_heads(self, layers: int) -> list[int]:
        name = next((each for each in _KV_HEADS if self._config.get(each) is not None), None)
        given = None if name is None else self._config[name]
        if isinstance(given, list):
            if len(given) < layers or not all(map(_is_natural, given)):
                raise self._bad(str(name), given, f"a number from 0 to {_MOST} for each layer")
            return given[:layers]
        new_kind = self._config.get("new_decoder_architecture")
        if self._config.get("multi_query") is True and not new_kind and name is None:
            return [1] * layers
        return [self._natural((*_KV_HEADS, *_HEADS))] * layers

    def _quantized_width(self) -> int:
        quantization = self._config.get("quantization_config")
        if isinstance(quantization, dict):
            scheme = quantization.get("kv_cache_scheme")
            if isinstance(scheme, dict) and scheme.get("num_bits") == 8:
                return KV_DTYPES["fp8"]
            if str(quantization.get("kv_cache_quant_algo")).upper() == "FP8":
                return KV_DTYPES["fp8"]
        return KV_DTYPES["bfloat16"]

    def _natural(self, names: tuple[str, ...], default: int | None = None) -> int:
        """The value of the first present field; if all are missing, `default`. Raises TraceError if
        the value is not allowed, or all fields are missing without a default."""
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if not _is_natural(value):
                raise self._bad(name, value, f"a whole number from 0 to {_MOST}")
            if value or default is not None:
                return value
            raise self._bad(name, value, f"a whole number from 1 to {_MOST}")
        if default is None:
            raise self._bad(names[0], None, "a whole number")
        return default

    def _bad(self, field: str, value: object, allowed: str) -> TraceError:
        shown = "missing" if value is None else repr(value)[:60]
        return TraceError(
            f"{field} is {shown} in {self._path!r} from --model; allowed: {allowed}, or "
            "--token-bytes in place of --model"
        )


def _is_natural(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MOST


def _kind(layer_type: object, window: int) -> str:
    text = str(layer_type)
    if "sliding" in text or "chunked" in text:
        return "window" if window else "full"
    if text in ("full_attention", "attention", "global_attention"):
        return "full"
    return "state"
