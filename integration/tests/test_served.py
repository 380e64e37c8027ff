# SPDX-License-Identifier: Apache-2.0
"""Engines of one node share one cache, `flexkv serve`: the tokens are those of an engine without
FlexKV, also while the service hangs, after its end, and with the next one."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from integration.harness import connector
from integration.harness.config import EngineConfig
from integration.harness.connector import Connector
from integration.harness.host import EngineHost
from integration.harness.server import Server
from integration.tests.corpus import ABORTED, CONCURRENT, EVICTED, SHORT, WARM
from integration.tests.disks import restorable, restored
from integration.tests.node_service import NodeService
from integration.tests.nodes import PATIENCE_SECONDS, Nodes
from integration.tests.reference import Reference
from integration.tests.steps import ask, ask_each, ask_together
from integration.tests.test_observed import Scrape

FIRST = ABORTED[:1] + WARM
LATE = EVICTED[:4]


def test_what_one_engine_has_computed_another_loads(
    nodes: Nodes, service: NodeService, reference: Reference
) -> None:
    root = str(service.root)
    one, other = nodes.start(service=root), nodes.start(service=root)
    reference.check_all(FIRST, ask_each(one, FIRST), what="the first engine")
    found = ask_each(other, FIRST)
    reference.check_all(FIRST, found, what="the other engine")
    assert restored(found) == restorable(FIRST)

    # Both compute and load at once.
    reference.check_all(CONCURRENT, ask_together(other, CONCURRENT), what="together")
    one.forget()
    reference.check_all(CONCURRENT, ask_together(one, CONCURRENT), what="together again")

    # It hangs, then it is gone: what is in host memory is loaded as before.
    service.process.send_signal(signal.SIGSTOP)
    for what in ("it hangs", "it is gone"):
        one.forget()
        found = ask_each(one, FIRST)
        reference.check_all(FIRST, found, what=what)
        assert restored(found) == restorable(FIRST), what
        reference.check_all(LATE, ask_each(other, LATE), what=what)
        service.kill()

    # Another one begins: the engines attach to it, and nothing that was stored is lost.
    service.start()
    end = time.monotonic() + PATIENCE_SECONDS
    loaded: list[int] = []
    while loaded != restorable(LATE):
        assert time.monotonic() < end, "the engines do not attach again"
        other.forget()
        reference.check_all(LATE, ask_each(other, LATE), what="stored again")
        one.forget()
        found = ask_each(one, LATE)
        reference.check_all(LATE, found, what="loaded again")
        loaded = restored(found)
    for each in (one, other):
        each.forget()
        found = ask_each(each, FIRST)
        reference.check_all(FIRST, found, what="after the restart")
        assert restored(found) == restorable(FIRST)


def test_a_decode_engine_gets_whole_prompts_of_a_prefill_engine(
    nodes: Nodes,
    service: NodeService,
    reference: Reference,
    flexkv: Callable[..., dict[str, Any]],
) -> None:
    """At once: what is still being stored is worth a wait."""
    settings = flexkv(service=str(service.root), always_load=True)
    prefill, decode = (
        nodes.start_with(connector.plugin(role=role, recompute=True, **settings))
        for role in ("kv_producer", "kv_consumer")
    )
    answers = []
    for prompt in EVICTED:
        prefill.generate(prompt, max_tokens=1)
        answers.append(ask(decode, prompt))
    reference.check_all(EVICTED, answers, what="the decode engine")
    assert restored(answers) == restorable(EVICTED)
    prefill.forget()
    again = prefill.generate(EVICTED[0], max_tokens=1)
    assert restored([again]) == [0]


def test_data_parallel_engines_of_a_server_share_it(
    tmp_path: Path,
    host: EngineHost,
    service: NodeService,
    engine_config: Callable[..., EngineConfig],
    offloading: Callable[..., Connector],
) -> None:
    """Under vLLM's own connector. The first test has the plugin."""
    host.close()  # this server has two engines
    chosen = offloading(service=str(service.root))
    config = engine_config(chosen, probe=False, extra_args={"data_parallel_size": 2})
    with Server(config, tmp_path / "server.log", None) as server:
        computed = [server.generate(prompt, 16, engine=0) for prompt in FIRST]
        found = [server.generate(prompt, 16, engine=1) for prompt in FIRST]
        assert found == computed
        assert _hits(server) == [0, sum(restorable(FIRST))]

        together = [server.generate(prompt, 16, engine=1) for prompt in CONCURRENT]
        server.reset_prefix_cache(external=False)
        before = _hits(server)[0]
        assert [server.generate(prompt, 16, engine=0) for prompt in CONCURRENT] == together
        assert _hits(server)[0] > before

        service.kill()
        server.reset_prefix_cache(external=False)
        before = _hits(server)[1]
        without = [server.generate(prompt, 16, engine=1) for prompt in FIRST]
        assert without == computed
        assert _hits(server)[1] - before == sum(restorable(FIRST)), "without a service"


def _hits(server: Server) -> list[float]:
    """Tokens that each engine of a server has found in its connector, as vLLM counts them: its
    OffloadingConnector shows FlexKV no requests. Engines report what has happened with their next
    steps."""
    for engine in (0, 1):
        server.generate(SHORT, 3, engine=engine)
    seen = Scrape(server.metrics())
    return [seen.value("external_prefix_cache_hits_total", engine=engine) for engine in ("0", "1")]
