# SPDX-License-Identifier: Apache-2.0
"""Completes SGLang's CPU engine, which PyPI's packages leave without ten things.

`install.py` has every Python of the environment call `start`, so that SGLang's own commands and all
processes that they start have it. Nothing is imported and nothing is changed before SGLang or
torchvision themselves are imported.

- torchvision's build for GPUs defines two operators that its Python files describe; without them
  `import torchvision` fails.
- HiCache pins its host pools for CUDA.
- HiCache copies between its host pool and the KV cache by functions of `sgl_kernel`, which it does
  not import on CPUs.
- A prefill server (PD disaggregation) copies the numbers of the pages that it sends to memory that
  is pinned for CUDA, if the sender waits for that copy.
- The attention backend for CPUs writes the keys of a sliding window to the windows' pool, and reads
  them by the numbers that they would have in the pool of full attention.
- The gated norm of linear attention takes its kernel for GPUs, unless the processor has AMX. SGLang
  has the same in plain torch beside it.
- Pages of several tokens need copies of recurrent states ("extra_buffer"), which SGLang refuses on
  CPUs: it copies them by kernels for GPUs, and from memory that is pinned for CUDA.
- With DP attention, SGLang asks the attention backend for the length of a request that fills up a
  batch, which the one for CPUs does not say, and a rank without requests rotates no tokens.
- The layers and the CPU backend of LoRA make small tensors in memory that is pinned for CUDA.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_HOST_POOLS = "sglang.srt.mem_cache.pool_host"


def before_torchvision() -> None:
    """Define the operators that torchvision's own library would define."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def transfer_kv_direct(
    src_layers: Sequence[Any],
    dst_layers: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
) -> None:
    """Copy tokens between layers that have one row a token."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices].view_as(target[dst_indices])


def transfer_kv_per_layer_direct_pf_lf(  # noqa: PLR0917  (as in sgl_kernel)
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer of host pages (pages, layers, tokens, ...) to rows of a device layer."""
    pages = src_indices[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].view_as(target[dst_indices])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
) -> None:
    """Copy rows of all device layers to host pages; `src_ptrs` are the layers of K, then of V."""
    pages = dst_indices[::page_size] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        target, layer = dst_ptrs[number // layers], number % layers
        target[pages, layer] = source[src_indices].view_as(target[pages, layer])


def _offer(*functions: Callable[..., Any]) -> Callable[[ModuleType], None]:
    """What gives a module these functions, in place of its own of the same names."""

    def after(module: ModuleType) -> None:
        for function in functions:
            setattr(module, function.__name__, function)

    return after


_after_host_pool = _offer(
    transfer_kv_direct, transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf
)


def _after_base(module: ModuleType) -> None:
    module.HostKVCache.pin_memory = property(lambda pool: False, lambda pool, value: None)


def _after_mooncake(module: ModuleType) -> None:
    module.MooncakeKVSender.supports_host_tensor_indices = False


class WindowSlots:
    """A table of the slots of requests' tokens, as the windows' pool numbers them.

    Args:
        table: with the slots of full attention, shape (requests, tokens).
        numbers: the slot in the windows' pool for each of these; 0 if the window has moved on.
    """

    def __init__(self, table: Any, numbers: Any) -> None:
        self._table = table
        self._numbers = numbers

    def __getitem__(self, place: Any) -> Any:
        return self._numbers[self._table[place]]


class _WindowTable:
    """In place of SGLang's pool of such tables."""

    def __init__(self, table: WindowSlots) -> None:
        self.req_to_token = table


def reads_windows(original: Callable[..., Any]) -> Callable[..., Any]:
    """`forward_extend` or `forward_decode` of the backend, which reads each layer's own slots."""

    def forward(backend: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        pool, tables = backend.token_to_kv_pool, backend.req_to_token_pool
        numbered = backend.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]
        if numbered:
            own = WindowSlots(tables.req_to_token, pool.full_to_swa_index_mapping)
            backend.req_to_token_pool = _WindowTable(own)
        try:
            return original(backend, q, k, v, layer, *args, **kwargs)
        finally:
            backend.req_to_token_pool = tables

    return forward


def _after_attention(module: ModuleType) -> None:
    backend = module.TorchNativeAttnBackend
    backend.forward_extend = reads_windows(backend.forward_extend)
    backend.forward_decode = reads_windows(backend.forward_decode)
    backend.get_cpu_graph_seq_len_fill_value = lambda backend: 1  # as SGLang's other backends


def _after_gated_norm(module: ModuleType) -> None:
    def forward(norm: Any, x: Any, z: Any = None) -> Any:
        groups, first = norm.group_size, norm.norm_before_gate
        return module.rms_norm_ref(x, norm.weight, norm.bias, z, norm.eps, groups, first)

    module.RMSNorm.forward = forward


def track_mamba_states_all_layers(  # noqa: PLR0917  (as in SGLang)
    conv_states_pool: Any,
    ssm_states_pool: Any,
    cache_indices: Any,
    mamba_track_mask: Any,
    mamba_track_indices: Any,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy the states of those requests that the mask names to other slots, in all layers.

    Args:
        conv_states_pool, ssm_states_pool: states, shape (layers, slots, ...); written.
        cache_indices: slot of each request.
        mamba_track_mask: whether the states of each request are copied.
        mamba_track_indices: where they are copied to.
        batch_size: requests.
        check_freed_slots: not needed here: for SGLang's unified memory pool.
    """
    chosen = mamba_track_mask[:batch_size]
    source = cache_indices[:batch_size][chosen].long()
    target = mamba_track_indices[:batch_size][chosen].long()
    for pool in (conv_states_pool, ssm_states_pool):
        pool[:, target] = pool[:, source]


def track_mamba_states_if_needed(
    conv_states: Any, ssm_states: Any, *args: Any, **kwargs: Any
) -> None:
    """The same in one layer."""
    track_mamba_states_all_layers(conv_states[None], ssm_states[None], *args, **kwargs)


def _platform_supports_mamba_cache_extra_buffer() -> bool:
    return True


def _after_batches(module: ModuleType) -> None:
    module.torch.Tensor.pin_memory = lambda tensor, *_: tensor


def _after_rotary(module: ModuleType) -> None:
    rotate = module.RotaryEmbedding.forward_native

    def forward(
        embedding: Any, positions: Any, query: Any, key: Any, *args: Any, **more: Any
    ) -> Any:
        if not positions.numel():  # of a rank that has no request meanwhile
            return query, key
        return rotate(embedding, positions, query, key, *args, **more)

    module.RotaryEmbedding.forward_native = forward


class UnpinnedTorch:
    """In place of torch, for modules that ask for pinned memory.

    Args:
        torch: the module.
    """

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._torch, name)
        if name not in {"tensor", "zeros"}:
            return found

        def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return found(*args, **kwargs)

        return unpinned


def _after_lora(module: ModuleType) -> None:
    vars(module)["torch"] = UnpinnedTorch(module.torch)


_BEFORE: dict[str, Callable[[], None]] = {"torchvision": before_torchvision}
_AFTER: dict[str, Callable[[ModuleType], None]] = {
    f"{_HOST_POOLS}.base": _after_base,
    f"{_HOST_POOLS}.mha": _after_host_pool,
    f"{_HOST_POOLS}.mla": _after_host_pool,
    "sglang.srt.disaggregation.mooncake.conn": _after_mooncake,
    "sglang.srt.layers.attention.torch_native_backend": _after_attention,
    "sglang.kernels.ops.attention.fla.layernorm_gated": _after_gated_norm,
    "sglang.kernels.ops.mamba.mamba_state_scatter_triton": _offer(
        track_mamba_states_all_layers, track_mamba_states_if_needed
    ),
    "sglang.srt.arg_groups.mamba_hook": _offer(_platform_supports_mamba_cache_extra_buffer),
    "sglang.srt.managers.schedule_batch": _after_batches,
    "sglang.srt.layers.rotary_embedding.base": _after_rotary,
    "sglang.srt.lora.layers": _after_lora,
    "sglang.srt.lora.backend.torch_backend": _after_lora,
}
_kept: list[object] = []  # an operator lives as long as the library that defined it


class _Loader(importlib.abc.Loader):
    """Runs a module as its own loader does, and then what comes after."""

    def __init__(self, inner: importlib.abc.Loader, after: Callable[[ModuleType], None]) -> None:
        self._inner = inner
        self._after = after

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._after(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Sees the imports that something comes before or after; finds no module by itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        before, after = _BEFORE.pop(name, None), _AFTER.pop(name, None)
        if before is not None:
            before()
        if after is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, after)
        return spec


def start() -> None:
    """Choose SGLang's CPU engine, and complete it as it is imported."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.meta_path.insert(0, _Finder())
