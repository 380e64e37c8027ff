# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flexkv.tiers.job import Job, Outcome, Priority
from flexkv.tiers.queue import LinkQueue

LIMIT = 20
PRIORITIES = st.sampled_from(Priority)


def job(priority: Priority, size: int = 1) -> Job:
    return Job(priority, size, lambda: [Outcome.DONE])


def test_the_highest_priority_goes_first_then_the_first_come() -> None:
    queue = LinkQueue(LIMIT)
    jobs = [job(priority) for priority in [*reversed(Priority), *reversed(Priority)]]
    for one in jobs:
        assert queue.push(one) == []
    order = [queue.pop(writes=True) for _ in jobs]
    assert order == sorted(jobs, key=lambda one: one.priority)
    assert queue.pop(writes=True) is None


def test_what_comes_last_of_the_lowest_priority_is_dropped() -> None:
    queue = LinkQueue(3)
    first, second, third = job(Priority.WRITE), job(Priority.WRITE), job(Priority.PREFETCH)
    assert [queue.push(one) for one in (first, second, third)] == [[], [], []]
    late = job(Priority.WRITE)
    assert queue.push(late) == [late]
    assert queue.push(job(Priority.PREFETCH, 2)) == [second, first]


def test_loads_are_never_dropped() -> None:
    queue = LinkQueue(3)
    loads = [job(Priority.LOAD, 2) for _ in range(4)]
    assert [queue.push(one) for one in loads] == [[]] * 4
    write = job(Priority.WRITE)
    assert queue.push(write) == [write]
    assert [queue.pop(writes=False) for _ in loads] == loads


def test_a_write_waits_where_only_others_may_go() -> None:
    queue = LinkQueue(LIMIT)
    write = job(Priority.WRITE)
    queue.push(write)
    assert queue.pop(writes=False) is None
    assert queue.pop(writes=True) is write


class LinkQueueModel(RuleBasedStateMachine):
    """Random histories beside a model: one list in order of arrival at each priority."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = LinkQueue(LIMIT)
        self.waiting: dict[Priority, list[Job]] = {priority: [] for priority in Priority}
        self.ended: list[Job] = []

    def all_waiting(self) -> list[Job]:
        return [one for jobs in self.waiting.values() for one in jobs]

    @rule(priority=PRIORITIES, size=st.integers(0, 8))
    def push(self, priority: Priority, size: int) -> None:
        one = job(priority, size)
        self.waiting[priority].append(one)
        expected = []
        while sum(other.size for other in self.all_waiting()) > LIMIT:
            lowest = max((p for p in Priority if self.waiting[p]), default=Priority.LOAD)
            if lowest is Priority.LOAD:
                break
            expected.append(self.waiting[lowest].pop())
        assert self.queue.push(one) == expected
        self.ended += expected

    @rule(writes=st.booleans())
    def pop(self, writes: bool) -> None:
        choices = [p for p in Priority if self.waiting[p] and (writes or p is not Priority.WRITE)]
        expected = self.waiting[min(choices)].pop(0) if choices else None
        assert self.queue.pop(writes) is expected
        if expected is not None:
            self.ended.append(expected)

    @precondition(lambda self: self.ended or self.all_waiting())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        jobs = data.draw(st.lists(st.sampled_from(self.ended + self.all_waiting()), max_size=5))
        expected = [one for one in dict.fromkeys(jobs) if one in self.all_waiting()]
        assert self.queue.remove(jobs) == expected
        for one in expected:
            self.waiting[one.priority].remove(one)
        self.ended += expected

    @precondition(lambda self: self.ended or self.all_waiting())
    @rule(data=st.data(), priority=PRIORITIES)
    def raise_to(self, data: st.DataObject, priority: Priority) -> None:
        jobs = data.draw(st.lists(st.sampled_from(self.ended + self.all_waiting()), max_size=5))
        for one in dict.fromkeys(jobs):
            if one in self.all_waiting() and priority < one.priority:
                self.waiting[one.priority].remove(one)
                self.waiting[priority].append(one)
        before = {one: one.priority for one in self.ended}
        self.queue.raise_to(jobs, priority)
        assert {one: one.priority for one in self.ended} == before

    @invariant()
    def the_queue_and_the_model_agree(self) -> None:
        assert len(self.queue) == len(self.all_waiting())
        assert self.queue.size == sum(one.size for one in self.all_waiting())
        for priority, jobs in self.waiting.items():
            assert self.queue.waiting(priority) == len(jobs)
            assert all(one.priority is priority for one in jobs)

    def teardown(self) -> None:
        rest = [self.queue.pop(writes=True) for _ in self.all_waiting()]
        assert rest == self.all_waiting()


TestLinkQueue = LinkQueueModel.TestCase
