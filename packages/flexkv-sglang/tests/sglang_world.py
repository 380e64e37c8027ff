# SPDX-License-Identifier: Apache-2.0
"""A rank of SGLang without SGLang: pools as it has them, and its calls in its order."""

from __future__ import annotations

import enum
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang_requests import Request

from flexkv import CacheConfig
from flexkv_sglang.hashes import PromptPages
from flexkv_sglang.pages import NO_DRAFTS, DraftPools, Pages, describe_pages
from flexkv_sglang.ranks import Ranks
from flexkv_sglang.requests import SglangRequests
from flexkv_sglang.side import RankSide
from flexkv_sglang.start import Engine, start_rank

LAYERS, HEADS, DIM = 3, 2, 16
PATIENCE_SECONDS = 60.0


class Name(enum.Enum):
    """SGLang's names of pools and of orders of dimensions."""

    KV = "kv"
    INDEXER = "indexer"
    MAMBA = "mamba"
    NHD = "nhd"
    HND = "hnd"


class SWAKVPool(SimpleNamespace):
    """A pool of full attention beside one of sliding windows; named as SGLang's class."""


class HybridLinearKVPool(SimpleNamespace):
    """A pool of full attention beside recurrent states; named as SGLang's class."""


class MambaPool(SimpleNamespace):
    """A pool of recurrent states; named as SGLang's class."""


WINDOW_PAGES = 7
STATES = 5


def make_windowed(*, page_size: int = 4, layers: int = LAYERS, heads: int = HEADS) -> Any:
    """A pool of a model with `layers` layers of sliding windows, each followed by one of full
    attention as long as there are any of the `LAYERS`.

    Args:
        page_size: tokens of a page.
        layers: with a window.
        heads: of these layers, on this rank.
    """
    full = make_pool(page_size=page_size)
    window = make_pool(page_size=page_size, pages=WINDOW_PAGES, heads=heads, layers=layers)
    for pool, numbers in zip((window, full), _alternate(layers), strict=True):
        (described,) = pool.get_device_pool_infos()
        described.layer_ids = numbers
    return SWAKVPool(
        size=full.size,
        page_size=page_size,
        start_layer=0,
        dtype=full.dtype,
        full_kv_pool=full,
        swa_kv_pool=window,
        full_layer_nums=LAYERS,
        swa_layer_nums=layers,
        swa_req_ring_size=None,
    )


def _alternate(layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of `layers` layers of another kind, and those of the layers of full attention,
    each of which follows one of them as long as there are any."""
    others: list[int] = []
    full: list[int] = []
    for number in range(LAYERS + layers):
        is_full = (number % 2 == 1 and len(full) < LAYERS) or len(others) == layers
        (full if is_full else others).append(number)
    return tuple(others), tuple(full)


def make_with_states(
    kind: str = "mha", *, page_size: int = 4, layers: int = LAYERS, heads: int = HEADS
) -> Any:
    """A pool of a model with `layers` layers with a state, each followed by one of full attention
    as long as there are any of the `LAYERS`; attribute `states` is the pool of states.

    Args:
        kind: of full attention; see `make_pool`.
        page_size: tokens of a page.
        layers: with a state.
        heads: of full attention, on this rank.
    """
    full = make_pool(kind, page_size=page_size, heads=heads)
    mine, numbers = _alternate(layers)
    if kind == "mha":
        (described,) = full.get_device_pool_infos()
        described.layer_ids = numbers
    info = SimpleNamespace(
        temporal=torch.zeros(layers, STATES, HEADS, 64, DIM),
        # In memory, the places of a window come before the channels.
        conv=(torch.zeros(layers, STATES, 3, 2 * HEADS * DIM).transpose(2, 3),),
        extra_checkpoint_buffers=(),
    )
    description = SimpleNamespace(layer_ids=mine, buffer_info=info)
    states = MambaPool(get_device_pool_infos=lambda: (description,))
    return HybridLinearKVPool(
        size=full.size,
        page_size=page_size,
        start_layer=0,
        dtype=full.dtype,
        full_kv_pool=full,
        full_attention_layer_id_mapping={layer: i for i, layer in enumerate(numbers)},
        states=states,
        info=info,
    )


def make_pool(
    kind: str = "mha",
    *,
    page_size: int = 4,
    pages: int = 12,
    dtype: torch.dtype = torch.float32,
    heads: int = HEADS,
    layers: int = LAYERS,
) -> Any:
    """A pool of SGLang's, by the attributes that describe it.

    Args:
        kind: mha, hnd (MHA whose rows are pages), mla, or dsa (MLA with an index).
        page_size: tokens of a page.
        pages: that SGLang hands out; one more, the first, is padding.
        dtype: as stored; quantised caches are stored as bytes.
        heads: of this rank.
        layers: of the model.
    """
    rows = (pages + 1) * page_size

    def made(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    pool = SimpleNamespace(size=pages * page_size, page_size=page_size, start_layer=0, dtype=dtype)
    declared = [Name.KV]
    if kind in {"mha", "hnd"}:
        shape = (rows, heads, DIM) if kind == "mha" else (pages + 1, heads, page_size, DIM)
        order = Name.NHD if kind == "mha" else Name.HND
        k = tuple(made(*shape) for _ in range(layers))
        v = tuple(made(*shape) for _ in range(layers))
        pool.tensors = [*k, *v]
        info = SimpleNamespace(buffers=SimpleNamespace(k=k, v=v, layout=order), scales=None)
    else:
        latent = tuple(made(rows, 1, DIM + 8) for _ in range(LAYERS))
        pool.tensors = list(latent)
        info = SimpleNamespace(buffers=latent, scales=None)
    if kind == "dsa":
        index = [torch.zeros((pages + 1, 72), dtype=torch.uint8) for _ in range(LAYERS)]
        pool.index_k_with_scale_buffer = index
        pool.tensors += index
        declared.append(Name.INDEXER)
    pool.info = info
    description = SimpleNamespace(layer_ids=tuple(range(layers)), buffer_info=info)
    pool.get_device_pool_infos = lambda: (description,)
    pool.host_pool_decls = lambda: [SimpleNamespace(pool_name=name) for name in declared]
    return pool


def hashes_of(text: str, count: int) -> list[str]:
    """SGLang's hashes of the pages of a prompt: each covers those before it."""
    made, last = [], b""
    for number in range(count):
        last = hashlib.sha256(last + f"{text} {number}".encode()).digest()
        made.append(last.hex())
    return made


class HashedPrompt(PromptPages):
    """The pages of a waiting request, which have these hashes.

    Attributes:
        asked: the parts whose hashes were asked for.
    """

    def __init__(self, hashes: Sequence[str]) -> None:
        self._hashes = hashes
        self.asked: list[tuple[int, int]] = []

    @property
    def pages(self) -> int:
        return len(self._hashes)

    def hashes(self, start: int, stop: int, before: str | None) -> Sequence[str]:
        assert before == (self._hashes[start - 1] if start else None)
        self.asked.append((start, stop))
        return self._hashes[start:stop]


def make_settings(model: Path, **others: Any) -> Any:
    """SGLang's settings, as far as FlexKV reads them."""
    values = {
        "model_path": str(model),
        "revision": None,
        "dtype": "float32",
        "quantization": None,
        "load_format": "auto",
        "kv_cache_dtype": "auto",
        "page_size": 4,
        "attention_backend": "torch_native",
        "random_seed": 0,
        "lora_paths": None,
        "device": "cpu",
        "chunked_prefill_size": 64,
        "max_prefill_tokens": 256,
    }
    return SimpleNamespace(**(values | others))


def make_model() -> Any:
    return SimpleNamespace(hf_config=SimpleNamespace(to_json_string=lambda: '{"layers": 3}'))


def write_weights(folder: Path) -> None:
    """Write the model's weights unless they are there; before ranks start at once."""
    weights = folder / "model.safetensors"
    if not weights.exists():
        weights.write_bytes(b"weights")


class Rank:
    """One rank and its pool.

    Args:
        folder: for the model, the session and the disk.
        kind: of the pool; see `make_pool`.
        heads: of the model over all ranks.
        ranks: of the engine.
        pool_heads: of this rank.
        pool: a real one of SGLang, instead of one that is made.
        drafts: pools of a draft model.
        settings: FlexKV's.
        engines: of the server.
        window: tokens of the model's sliding windows.
        pool_options: of `make_pool`.
    """

    def __init__(
        self,
        folder: Path,
        kind: str = "mha",
        *,
        heads: int | None = None,
        ranks: Ranks | None = None,
        pool_heads: int = HEADS,
        pool: Any = None,
        drafts: DraftPools = NO_DRAFTS,
        settings: dict[str, Any] | None = None,
        engines: int = 1,
        window: int = 0,
        **pool_options: Any,
    ) -> None:
        write_weights(folder)
        self._requests: dict[str, Request] = {}
        self.pool = pool or make_pool(kind, heads=pool_heads, **pool_options)
        self.ranks = ranks = ranks or Ranks()
        total = heads if heads is not None else (HEADS if kind in {"mha", "hnd"} else 1)
        size = self.pool.page_size
        states = getattr(self.pool, "states", None)
        self.pages: Pages = describe_pages(
            self.pool,
            size,
            heads=total,
            ranks=ranks.count // ranks.stages,
            drafts=drafts,
            states=states,
        )
        self._layers = self.pages.layers
        config = CacheConfig(
            **{"cpu_cache_gb": 1 / 256, "runtime_dir": str(folder / "run")} | (settings or {})
        )
        engine = Engine(
            make_settings(folder), make_model(), "0.5.23", size, False, engines, window=window
        )
        self.side: RankSide = start_rank(config, engine, self.pages, ranks)

    def close(self) -> None:
        self.side.close(PATIENCE_SECONDS)

    def fill(self, pages: Sequence[int], seed: int, *, windows: bool = False) -> list[torch.Tensor]:
        """Write other bytes to every tensor of these pages; returns them. `windows`: pages of the
        windows' pool."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self._tensors(windows=windows):
            shape = (len(pages), *tensor.shape[1:])
            numbers = torch.randint(0, 100, shape, generator=generator)
            tensor[list(pages)] = numbers.to(tensor.dtype)
        return self.read(pages, windows=windows)

    def read(self, pages: Sequence[int], *, windows: bool = False) -> list[torch.Tensor]:
        return [tensor[list(pages)].clone() for tensor in self._tensors(windows=windows)]

    def fill_states(self, states: Sequence[int], seed: int) -> list[torch.Tensor]:
        """Write other numbers to these states; returns them."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self._states:
            shape = (tensor.shape[0], len(states), *tensor.shape[2:])
            tensor[:, list(states)] = torch.rand(shape, generator=generator)
        return self.read_states(states)

    def read_states(self, states: Sequence[int]) -> list[torch.Tensor]:
        return [tensor[:, list(states)].clone() for tensor in self._states]

    def store(
        self,
        hashes: Sequence[str],
        pages: Sequence[int],
        windows: Sequence[int] = (),
        states: Sequence[int] = (),
    ) -> bool:
        """Offload pages, and what the last of them have in pools apart, and wait; returns what
        SGLang is told."""
        blocks = self.blocks(pages, windows, states)
        self.side.offload(hashes, lambda: blocks, last=self.last(windows, states))
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.side.ended_offloads():
            assert time.monotonic() < deadline
        return self.side.take_offload()

    @property
    def requests(self) -> SglangRequests:
        """The requests, on the rank that decides."""
        assert self.side.requests is not None
        return self.side.requests

    def request(
        self, rid: str, prompt: Sequence[int] = range(13), prefix: int = 0, **others: Any
    ) -> Request:
        """SGLang's request of this id, as it is now; the same object in each call."""
        made = Request(rid, list(prompt), prefix, **others)
        known = self._requests.setdefault(rid, made)
        vars(known).update(vars(made))
        return known

    def lookup(self, rid: str, hashes: Sequence[str], own_tokens: int = 0) -> list[int]:
        """Look up the pages of a request that SGLang lacks."""
        if self.side.requests is not None:
            known = self._requests.get(rid)
            self.requests.matched(known or self.request(rid), own_tokens)
        return self.side.lookup(rid, hashes)

    def look_ahead(self, rid: str, hashes: Sequence[str], **others: Any) -> None:
        """Look a request up ahead of its turn, in as many steps as that takes."""
        assert self.requests.waiting.is_new(rid)
        self.requests.look_ahead(self.request(rid, **others), HashedPrompt(hashes))
        while self.requests.waiting.looks_ahead:
            self.requests.waiting.go_on()

    def load(
        self,
        rid: str,
        hashes: Sequence[str],
        pages: Sequence[int],
        windows: Sequence[int] = (),
        states: Sequence[int] = (),
    ) -> bool:
        """Load pages as a batch does that needs all layers; whether SGLang may use them."""
        blocks = self.blocks(pages, windows, states)
        if not self.side.load(rid, hashes, blocks, self.last(windows, states)):
            return False
        self.side.start_batch()
        for layer in range(self._layers):
            self.side.wait_for_layer(layer)
        return self.side.finish_batch()

    def blocks(
        self, pages: Sequence[int], windows: Sequence[int] = (), states: Sequence[int] = ()
    ) -> list[int]:
        """The numbers of the blocks of pages, of pages of windows, part by part, and of states,
        kind by kind of their tensors."""
        made, first = list(pages), self.pages.layout.num_blocks
        for layout in self.pages.windows:
            made += [first + page for page in windows]
            first += layout.num_blocks
        for cut in self.pages.states:
            made += [
                first + each * cut.parts + part for part in range(cut.parts) for each in states
            ]
            first += cut.layout.num_blocks
        return made

    def last(self, windows: Sequence[int] = (), states: Sequence[int] = ()) -> dict[str, int]:
        """How many of the last pages have one, by SGLang's name of the pool, as SGLang names them:
        an offload names no pool without pages."""
        named = {"swa": len(windows), "mamba": len(states)}
        return {name: count for name, count in named.items() if count}

    @property
    def _states(self) -> list[torch.Tensor]:
        has = bool(self.pages.states)
        return [self.pool.info.temporal, *self.pool.info.conv] if has else []

    def _tensors(self, *, windows: bool) -> list[torch.Tensor]:
        named = self.pages.tensors.items()
        named = [(name, each) for name, each in named if not name.startswith("state")]
        return [each for name, each in named if name.startswith("window") == windows]


def wait_for(rank: Rank, rid: str) -> None:
    """Wait until SGLang may schedule a request."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while rank.side.held([rid]) != [False]:
        assert time.monotonic() < deadline
        rank.side.ended_offloads()


def same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(left, right) for left, right in zip(found, wanted, strict=True))
