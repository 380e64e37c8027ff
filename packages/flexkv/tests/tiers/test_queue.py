# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flexkv.tiers.job import Job, Outcome, Priority, Urgency
from flexkv.tiers.link import LinkQueue

LIMIT = 20
PRIORITIES = st.sampled_from(Priority)


TURNS = st.sampled_from((0, 0, -3, 5))


def job(priority: Priority, size: int = 1, turn: int = 0) -> Job:
    return Job(priority, size, lambda: [Outcome.DONE], turn=turn)


def test_the_highest_priority_goes_first_then_the_first_come() -> None:
    queue = LinkQueue(LIMIT)
    jobs = [job(priority) for priority in [*reversed(Priority), *reversed(Priority)]]
    for one in jobs:
        assert queue.push(one) == []
    order = [queue.pop(writes=True) for _ in jobs]
    assert order == sorted(jobs, key=lambda one: one.priority)
    assert queue.pop(writes=True) is None


def test_of_one_priority_the_lowest_turn_goes_first() -> None:
    queue = LinkQueue(LIMIT)
    turns = (0, 5, -3, 0, -3, 5)
    jobs = [job(priority, turn=turn) for turn in turns for priority in Priority]
    for one in jobs:
        queue.push(one)
    order = [queue.pop(writes=True) for _ in jobs]
    assert order == sorted(jobs, key=lambda one: (one.priority, one.turn))


def test_what_comes_last_of_the_last_turn_is_dropped() -> None:
    queue = LinkQueue(3)
    late, usual, first = (job(Priority.PREFETCH, turn=turn) for turn in (5, 0, -3))
    for one in (late, usual, first):
        queue.push(one)
    assert queue.push(job(Priority.PREFETCH, 2, turn=-3)) == [late, usual]


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
    """Random histories beside a model: one list in order of arrival at each urgency."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = LinkQueue(LIMIT)
        self.waiting: list[Job] = []  # in order of arrival at their urgency
        self.ended: list[Job] = []

    def in_order(self, writes: bool = True) -> list[Job]:
        jobs = [one for one in self.waiting if writes or one.priority is not Priority.WRITE]
        return sorted(jobs, key=lambda one: (one.priority, one.turn))

    @rule(priority=PRIORITIES, size=st.integers(0, 8), turn=TURNS)
    def push(self, priority: Priority, size: int, turn: int) -> None:
        one = job(priority, size, turn)
        self.waiting.append(one)
        expected = []
        while sum(other.size for other in self.waiting) > LIMIT:
            last = self.in_order()[-1]
            if last.priority is Priority.LOAD:
                break
            expected.append(last)
            self.waiting.remove(last)
        assert self.queue.push(one) == expected
        self.ended += expected

    @rule(writes=st.booleans())
    def pop(self, writes: bool) -> None:
        expected = next(iter(self.in_order(writes)), None)
        assert self.queue.pop(writes) is expected
        if expected is not None:
            self.waiting.remove(expected)
            self.ended.append(expected)

    @precondition(lambda self: self.ended or self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        jobs = data.draw(st.lists(st.sampled_from(self.ended + self.waiting), max_size=5))
        expected = [one for one in dict.fromkeys(jobs) if one in self.waiting]
        assert self.queue.remove(jobs) == expected
        for one in expected:
            self.waiting.remove(one)
        self.ended += expected

    @precondition(lambda self: self.ended or self.waiting)
    @rule(data=st.data(), priority=PRIORITIES, turn=TURNS)
    def raise_to(self, data: st.DataObject, priority: Priority, turn: int) -> None:
        jobs = data.draw(st.lists(st.sampled_from(self.ended + self.waiting), max_size=5))
        for one in dict.fromkeys(jobs):
            if one in self.waiting and (priority, turn) < (one.priority, one.turn):
                self.waiting.remove(one)
                self.waiting.append(one)
        urgency = Urgency(priority, turn)
        expected = [min(urgency, Urgency(one.priority, one.turn)) for one in self.waiting]
        raised = set(jobs)
        known = {
            one: expected[i] if one in raised else Urgency(one.priority, one.turn)
            for i, one in enumerate(self.waiting)
        } | {one: Urgency(one.priority, one.turn) for one in self.ended}
        self.queue.raise_to(jobs, urgency)
        assert {one: (one.priority, one.turn) for one in known} == known

    @invariant()
    def the_queue_and_the_model_agree(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert self.queue.size == sum(one.size for one in self.waiting)
        for priority in Priority:
            count = sum(one.priority is priority for one in self.waiting)
            assert self.queue.waiting(priority) == count

    def teardown(self) -> None:
        rest = [self.queue.pop(writes=True) for _ in self.waiting]
        assert rest == self.in_order()


TestLinkQueue = LinkQueueModel.TestCase
