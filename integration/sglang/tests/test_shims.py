# SPDX-License-Identifier: Apache-2.0
"""The shims' copies move what sgl_kernel's move, for shapes as SGLang's pools have them."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from integration.sglang.shims import sgl_kernel, sglang_on_cpu

PAGE, PAGES, LAYERS, HEADS, DIM = 4, 6, 3, 2, 8
HOST_PAGES, DEVICE_PAGES = [4, 1], [2, 5]


def tokens_of(pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def device_layers() -> list[torch.Tensor]:
    """K of all layers, then V, with every number another one."""
    shape = (2 * LAYERS, PAGES * PAGE, HEADS, DIM)
    return list(torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape))


@pytest.mark.parametrize("tensors", [1, 2], ids=["mla", "mha"])
def test_pages_come_back_from_a_page_first_host_pool(tensors: int) -> None:
    layers = device_layers()[: tensors * LAYERS]
    host = [torch.zeros(PAGES, LAYERS, PAGE, HEADS, DIM) for _ in range(tensors)]
    there, here = tokens_of(HOST_PAGES), tokens_of(DEVICE_PAGES)
    sglang_on_cpu.transfer_kv_all_layer_direct_lf_pf(layers, host, here, there, PAGE)
    assert torch.equal(host[0][HOST_PAGES[0], 1], layers[1][DEVICE_PAGES[0] * PAGE :][:PAGE])

    back = [torch.zeros_like(layer) for layer in layers]
    for layer in range(LAYERS):
        target = back[layer::LAYERS]
        sglang_on_cpu.transfer_kv_per_layer_direct_pf_lf(host, target, there, here, layer, PAGE)
    for layer, copy in zip(layers, back, strict=True):
        assert torch.equal(copy[here], layer[here])
        assert copy[:PAGE].count_nonzero() == 0


def test_tokens_come_back_from_a_layer_first_host_pool() -> None:
    layers = device_layers()
    host = [torch.zeros_like(layer) for layer in layers]
    there, here = tokens_of(HOST_PAGES), tokens_of(DEVICE_PAGES)
    sglang_on_cpu.transfer_kv_direct(layers, host, here, there, PAGE)
    for layer, copy in zip(layers, host, strict=True):
        assert torch.equal(copy[there], layer[here])


def test_requests_get_their_slots() -> None:
    table = torch.zeros(4, 8, dtype=torch.int32)
    rows, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 0]), torch.tensor([3, 4])
    slots = torch.arange(10, 16)
    sgl_kernel.assign_req_to_token_pool_cpu(rows, table, starts, ends, slots, 8)
    assert table[2].tolist() == [0, 10, 11, 0, 0, 0, 0, 0]
    assert table[0].tolist() == [12, 13, 14, 15, 0, 0, 0, 0]


def test_states_are_copied_where_the_mask_says_so() -> None:
    conv, temporal = torch.randn(LAYERS, 6, 5, 3), torch.randn(LAYERS, 6, HEADS, DIM, 4)
    before = [conv.clone(), temporal.clone()]
    sources, targets = torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([4, 0, 5])
    mask = torch.tensor([True, False, True])
    sglang_on_cpu.track_mamba_states_all_layers(conv, temporal, sources, mask, targets, 3)
    for pool, old in zip((conv, temporal), before, strict=True):
        assert torch.equal(pool, old[:, [0, 1, 2, 3, 1, 3]])
    layer = (before[0][1], before[1][1])
    sglang_on_cpu.track_mamba_states_if_needed(*layer, sources, mask, targets, batch_size=1)
    for pool, copied in zip((conv, temporal), before, strict=True):
        assert torch.equal(copied[1, 4], pool[1, 4])
        assert not torch.equal(copied[1, 5], pool[1, 5])
        assert not torch.equal(copied[0, 4], pool[0, 4])


def test_lora_gets_memory_that_is_not_pinned() -> None:
    module = ModuleType("layers")
    module.torch = torch  # type: ignore[attr-defined]
    sglang_on_cpu._AFTER["sglang.srt.lora.layers"](module)
    offsets = module.torch.tensor([0, 3], dtype=torch.int32, pin_memory=True)
    assert offsets.tolist() == [0, 3]
    assert module.torch.zeros((2,), pin_memory=True).tolist() == [0, 0]
    assert module.torch.ones_like is torch.ones_like


def test_another_kernel_fails_by_name_when_called() -> None:
    kernel = sgl_kernel.fused_experts_cpu
    with pytest.raises(NotImplementedError, match="fused_experts_cpu"):
        kernel()
