# SPDX-License-Identifier: Apache-2.0
"""Replays a trace on many caches: the whole trace, or a sample where that would take too long."""

from __future__ import annotations

from dataclasses import replace

from flexkv.plan.curve import LRUCurve
from flexkv.plan.replay import Outcome, Setup, replay
from flexkv.plan.sample import Sample, sample
from flexkv.plan.saving import Savings
from flexkv.plan.trace import Trace

LEAST_PROMPTS = 16
"""The least memory of a sample, in requests of average length; a smaller one evicts requests, where
that of the whole trace evicts blocks. On recorded coding agents, memory for 2 requests lost 2
points to that for 5 requests of the whole trace, and memory for 5 lost none to that for 10."""


class Replayer:
    """Replays a trace. If a replay has more than `most_uses` uses of blocks, a sample is replayed,
    unless the sample's memory would hold too few requests.

    Attributes:
        sample: the conversations that are replayed; None for the whole trace.
    """

    def __init__(
        self,
        trace: Trace,
        curve: LRUCurve,
        savings: Savings | None,
        engine_blocks: int,
        most_uses: int,
    ) -> None:
        self._trace = trace
        self._savings = savings
        self._engine_blocks = engine_blocks
        self._longest = max((len(e.blocks) + len(e.answer) for e in trace.requests), default=0)
        self.sample = sample(trace, curve, savings, most_uses, engine_blocks)

    def outcome(self, setup: Setup) -> Outcome:
        """The results of a cache, whose `engine_blocks` are those of the replayer."""
        setup = replace(setup, engine_blocks=self._engine_blocks)
        if self.sample is None or self._is_small(self.sample, setup):
            found = replay(self._trace, self._bounded(setup), self._savings)
            return replace(found, setup=setup)
        return self._estimate(self.sample, setup)

    def _bounded(self, setup: Setup) -> Setup:
        """The smallest cache with the same results: more room than twice all blocks stays empty,
        and its index would take memory."""
        most = 2 * self._trace.distinct_blocks
        return replace(
            setup,
            memory_blocks=min(setup.memory_blocks, most),
            disk_blocks=min(setup.disk_blocks, most),
            engine_blocks=min(setup.engine_blocks, most),
        )

    def _is_small(self, part: Sample, setup: Setup) -> bool:
        """Whether the sample's memory is too small to stand for that of the whole trace."""
        memory = part.scaled(setup.memory_blocks)
        mean = self._trace.uses / len(self._trace.requests)
        # Blocks of a request that memory has no room for do not get to the disk.
        return memory < LEAST_PROMPTS * mean or (setup.disk_blocks > 0 and memory < self._longest)

    def _estimate(self, part: Sample, setup: Setup) -> Outcome:
        writes = setup.write_blocks
        small = replace(
            setup,
            memory_blocks=part.scaled(setup.memory_blocks),
            disk_blocks=part.scaled(setup.disk_blocks),
            engine_blocks=part.scaled(setup.engine_blocks),
            write_blocks=None if writes is None else round(writes * part.share),
        )
        found = replay(part.trace, self._bounded(small), self._savings)
        of_sample, of_whole = part.points(max(setup.memory_blocks, setup.disk_blocks))
        tokens = part.estimate(found.hit_tokens, of_sample.hit_tokens, of_whole.hit_tokens)
        tokens = min(max(0.0, tokens), float(part.whole.at(part.whole.useful_blocks).hit_tokens))
        saved = None
        if found.saved_seconds is not None and of_sample.saved_seconds is not None:
            saved = part.estimate(
                found.saved_seconds, of_sample.saved_seconds, of_whole.saved_seconds or 0.0
            )
            saved = max(0.0, saved)
        return Outcome(
            setup,
            round(tokens),
            round(found.disk_tokens / part.share),
            tokens / self._trace.prompt_tokens,
            saved,
            round(found.written_blocks / part.share),
            round(found.refused_blocks / part.share),
            part.share,
        )
