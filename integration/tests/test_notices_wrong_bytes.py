# SPDX-License-Identifier: Apache-2.0
"""The other tests prove something only if wrong bytes change what they look at: first, prove that.

Each test damages cached KV, sees that the tokens change, and that undamaged KV gives the right
ones again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from integration.harness import processes
from integration.harness.checkpoint import TINY
from integration.harness.engine import Engine
from integration.tests import corpus
from integration.tests.corpus import DAMAGED
from integration.tests.reference import Reference, differs
from integration.tests.steps import ask, blocks_of, external_hits, whole_blocks

pytestmark = pytest.mark.proof
LAYERS = range(TINY.layers)
OWN_HIT = whole_blocks(len(DAMAGED), corpus.ENGINE_BLOCK)
# The top bit of a float32's exponent, in its last byte: 0.5 becomes 1.7e38.
EXPONENT_BIT = 0x40


def _byte_of_a_value(page: bytes) -> int:
    """Offset of the last byte of a number between 0.5 and 2 among the first head's V.

    The CPU backend keeps, for each head, all K of the block and then all V.
    """
    head = len(_first_head(page))
    for offset in range(head // 2, head, 4):
        (number,) = struct.unpack_from("<f", page, offset)
        if 0.5 <= abs(number) < 2:
            return offset + 3
    raise AssertionError("no value between 0.5 and 2 in this page")


def _page(engine: Engine, block: int, layer: int) -> bytes:
    return bytes.fromhex(engine.rpc("keeps_weights_read", [block], [layer])[0][0])


@pytest.mark.parametrize("layer", LAYERS)
def test_a_flipped_byte_in_the_engines_cache_changes_the_tokens(
    engine: Engine, reference: Reference, layer: int
) -> None:
    block = blocks_of(engine, DAMAGED)[3]
    offset = _byte_of_a_value(_page(engine, block, layer))
    engine.rpc("keeps_weights_flip", block, layer, offset, EXPONENT_BIT)

    damaged = ask(engine, DAMAGED)
    assert damaged.cached_tokens == OWN_HIT
    assert differs(damaged, reference.of(DAMAGED))

    engine.rpc("keeps_weights_flip", block, layer, offset, EXPONENT_BIT)
    reference.check(DAMAGED, ask(engine, DAMAGED), what="after the byte was put back")


@pytest.mark.parametrize("layer", LAYERS)
def test_a_flipped_byte_in_the_arena_changes_the_tokens(
    engine: Engine, reference: Reference, layer: int
) -> None:
    """The byte is flipped in the shared memory of FlexKV, behind its back."""
    block = blocks_of(engine, DAMAGED)[3]
    page = _page(engine, block, layer)
    offset = _byte_of_a_value(page)
    head = _first_head(page)  # in the arena other heads of the page lie elsewhere
    engine.forget()

    _flip_in_arena(engine, head, offset)
    damaged = ask(engine, DAMAGED)
    assert damaged.cached_tokens == whole_blocks(len(DAMAGED))
    assert differs(damaged, reference.of(DAMAGED))

    engine.forget()
    _flip_in_arena(engine, _flipped(head, offset), offset)
    reference.check(DAMAGED, ask(engine, DAMAGED), what="after the byte was put back")


def _first_head(page: bytes) -> bytes:
    """The part of a page that belongs to its first KV head."""
    return page[: len(page) // TINY.kv_heads]


def _flipped(head: bytes, offset: int) -> bytes:
    return head[:offset] + bytes([head[offset] ^ EXPONENT_BIT]) + head[offset + 1 :]


def _flip_in_arena(engine: Engine, head: bytes, offset: int) -> None:
    """Find the page of a head among FlexKV's slots and flip one byte of it there.

    Slots keep their bytes after a reset, so it may be there several times: in one slot that is in
    use, and in others from earlier tests.
    """
    flipped = bytes([head[offset] ^ EXPONENT_BIT])
    arena = next(
        arena for pid in engine.pids() for arena in processes.memory_files(pid, "flexkv-arena")
    )
    with arena.open("r+b") as file:
        content = file.read()
        at = content.find(head)
        assert at >= 0, "the page is not in the arena"
        while at >= 0:
            file.seek(at + offset)
            file.write(flipped)
            at = content.find(head, at + len(head))


def _zero_row(engine: Engine, blocks: list[int], layers: list[int]) -> None:
    engine.rpc("keeps_weights_zero_row", blocks[3], layers, 5)


def _wrong_block(engine: Engine, blocks: list[int], layers: list[int]) -> None:
    engine.rpc("keeps_weights_copy", blocks[0], blocks[3], layers)


@pytest.mark.parametrize(
    ("damage", "layers"),
    [
        pytest.param(_zero_row, list(LAYERS), id="a token's row zeroed"),
        *(pytest.param(_wrong_block, [n], id=f"a wrong block in layer {n}") for n in LAYERS),
    ],
)
def test_wrong_rows_and_blocks_are_noticed(
    engine: Engine,
    reference: Reference,
    damage: Callable[[Engine, list[int], list[int]], None],
    layers: list[int],
) -> None:
    blocks = blocks_of(engine, DAMAGED)
    damage(engine, blocks, layers)
    damaged = ask(engine, DAMAGED)
    assert damaged.cached_tokens == OWN_HIT
    with pytest.raises(AssertionError):
        reference.check(DAMAGED, damaged)


def test_a_scrubbed_cache_is_noticed(engine: Engine, reference: Reference) -> None:
    """``Engine.forget`` must leave nothing in the engine's memory that could pass for KV."""
    blocks_of(engine, DAMAGED)
    engine.rpc("keeps_weights_scrub")
    damaged = ask(engine, DAMAGED)
    assert damaged.cached_tokens == OWN_HIT
    assert differs(damaged, reference.of(DAMAGED))


def test_restored_blocks_have_the_bytes_that_were_computed(engine: Engine) -> None:
    """Byte by byte, over all layers; whatever the tokens say."""
    restorable = whole_blocks(len(DAMAGED)) // corpus.ENGINE_BLOCK
    computed = engine.rpc("keeps_weights_digests", blocks_of(engine, DAMAGED)[:restorable])
    assert len(set(computed[0])) == restorable

    engine.forget()
    hits = external_hits(engine)
    restored = engine.rpc("keeps_weights_digests", blocks_of(engine, DAMAGED)[:restorable])
    assert external_hits(engine) - hits == restorable * corpus.ENGINE_BLOCK
    assert restored == computed
