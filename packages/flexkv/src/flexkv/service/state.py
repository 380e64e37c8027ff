# SPDX-License-Identifier: Apache-2.0
"""What the service says of itself to operators, and how to ask one that runs; see
`flexkv.service.endpoints`."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import quote

import msgspec

from flexkv.figures.definitions import Kind, Metric, Samples
from flexkv.figures.health_samples import problems_of
from flexkv.operators.answers import CLEAR_SECONDS
from flexkv.operators.ask_door import CALL_SECONDS, AskError, ask
from flexkv.operators.verbs import AllPlaces, OfProcess, PromptQuestion
from flexkv.session.runtime_directory import RuntimeDirectory

SOCKET = "flexkv operators"
"""The name of the operators' door in the service's runtime directory."""

ENGINES = Metric(Kind.GAUGE, "engines", "Engines that are attached to the pool.", counted=((),))
GRANTED_BLOCKS = Metric(
    Kind.GAUGE,
    "granted_blocks",
    "FlexKV blocks of host memory that engines have for their next stores, or store to now.",
    counted=((),),
)
STALLED_BLOCKS = Metric(
    Kind.GAUGE,
    "stalled_blocks",
    "FlexKV blocks of host memory that engines keep whose schedulers are not attached, or whose "
    "loads do not end.",
    counted=((),),
)
PROMPT_BLOCKS = Metric(
    Kind.COUNTER, "prompt_blocks", "FlexKV blocks of the prompts of all engines.", counted=((),)
)
FOUND_BLOCKS = Metric(
    Kind.COUNTER,
    "found_blocks",
    "FlexKV blocks of these prompts that their engines found, in their own caches or in FlexKV.",
    counted=((),),
)
SERVICE_METRICS = (ENGINES, GRANTED_BLOCKS, STALLED_BLOCKS, PROMPT_BLOCKS, FOUND_BLOCKS)
"""Metrics that only the service has, for each pool."""


class EngineState(msgspec.Struct, frozen=True):
    """One engine of a pool. `processes` counts those that have the memory, as far as they are
    known; `granted_blocks` slots that it has for its next stores, or stores to now; `held_blocks`
    those that it loads now; `fetches` those from lower tiers that are under way. Of granted and
    held blocks, it keeps `stalled_blocks` because it has ended or hangs."""

    name: str
    number: int
    attached: bool
    processes: int
    granted_blocks: int
    held_blocks: int
    fetches: int
    stalled_blocks: int


class TenantState(msgspec.Struct, frozen=True):
    """One tenant of a pool; the name is empty for all tenants together that have no share. `blocks`
    are slots that have its blocks, or are granted to engines of its own; `share` the blocks that it
    has a right to."""

    name: str
    blocks: int
    share: float


class PoolState(msgspec.Struct, frozen=True):
    """One pool, by the name that its first engine serves the model by. `identity` has the parts of
    the fingerprint, for people to read; `slot_bytes` has the padding; `figures` has totals and
    gauges by `sample` name; `tenants` those that have shares, and all others, or nothing without
    shares."""

    fingerprint: str
    model: str
    identity: tuple[str, ...]
    slots: int
    slot_bytes: int
    policy: str
    figures: Samples
    engines: tuple[EngineState, ...]
    tenants: tuple[TenantState, ...] = ()


class ServiceState(OfProcess, frozen=True):
    """The service: seconds since its start, its pools, and what keeps engines from it, a sentence
    each."""

    version: str
    seconds: float
    pools: tuple[PoolState, ...]
    troubles: tuple[str, ...] = ()

    @property
    def problems(self) -> list[str]:
        """What keeps it from doing all that it should; a sentence each."""
        return [f"the service is degraded: {each}" for each in self.troubles] + [
            f"pool {pool.fingerprint} is {each.trouble.state}: {each.text}"
            for pool in self.pools
            for each in problems_of(pool.figures)
        ]


class Cleared(msgspec.Struct, frozen=True):
    """The pools that were cleared, or would be, by fingerprint, with the blocks that host memory
    had; and why some may stay, for people."""

    pools: dict[str, int]
    reason: str = ""


def own_figures(engines: tuple[EngineState, ...], prompt: int, found: int) -> Samples:
    """The values of `SERVICE_METRICS` of a pool; `prompt` and `found` are the totals of
    `PROMPT_BLOCKS` and `FOUND_BLOCKS`."""
    return {
        ENGINES.name: sum(each.attached for each in engines),
        GRANTED_BLOCKS.name: sum(each.granted_blocks for each in engines),
        STALLED_BLOCKS.name: sum(each.stalled_blocks for each in engines),
        PROMPT_BLOCKS.name: prompt,
        FOUND_BLOCKS.name: found,
    }


Told = TypeVar("Told", ServiceState, Cleared, AllPlaces)


def is_service(root: str) -> bool:
    """Whether a directory is that of a service that runs, or was killed. Raises OSError if it
    cannot be read."""
    return RuntimeDirectory.has_socket(root, SOCKET)


def metrics_of(root: str) -> bytes:
    """The metrics of the service in a directory, in Prometheus's text format. Raises AskError
    if it does not answer."""
    return _ask(root, "GET", "/metrics")


def state_of(root: str) -> ServiceState:
    """The state of the service in a directory. Raises AskError if it does not answer, or is of
    another version."""
    return _decoded(root, _ask(root, "GET", "/state"), ServiceState)


def clear_pools(root: str, fingerprint: str | None) -> Cleared:
    """Have the service in a directory drop the blocks of its memory and of its disks: of the pool
    of a fingerprint, or of all. Raises AskError if it does not answer, or has no such pool."""
    query = f"?fingerprint={quote(fingerprint or 'all')}"
    return _decoded(root, _ask(root, "POST", f"/clear{query}", seconds=CLEAR_SECONDS), Cleared)


def find_prompt(root: str, question: PromptQuestion, fingerprint: str | None) -> AllPlaces:
    """Where the pools of the service in a directory, or the one of a fingerprint, have the blocks
    of a prompt. Raises AskError if it does not answer, or has no such pool."""
    query = "" if fingerprint is None else f"?fingerprint={quote(fingerprint)}"
    body = msgspec.json.encode(question)
    return _decoded(root, _ask(root, "POST", f"/lookup{query}", body), AllPlaces)


def _decoded(root: str, answer: bytes, kind: type[Told]) -> Told:
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:
        raise AskError(
            f"the service in {root!r} answers as another version of FlexKV does: {error}"
        ) from None


def _ask(
    root: str, method: str, path: str, body: bytes = b"", seconds: float = CALL_SECONDS
) -> bytes:
    return ask(root, SOCKET, "service of FlexKV", (method, path), body, seconds=seconds)
