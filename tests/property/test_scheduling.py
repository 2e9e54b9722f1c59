"""The scheduler against a model worker: bounds hold, everybody gets done, and order is kept."""

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmesh.errors import NoFreeBlocks, Overloaded
from flashmesh.scheduling import Demand, Limits, Scheduler, Work
from flashmesh.types import pages_for

LIMITS = Limits(num_pages=12, num_slots=4, max_rows=64, max_waiting=50)


class Worker:
    """Carries plans out as a device would, late by `depth` - 1 plans, and checks them on the way."""

    def __init__(self, limits, rng, depth, rows_within=None):
        self.limits, self.rng, self.depth = limits, rng, depth
        self.scheduler = Scheduler(limits, *([rows_within] if rows_within else []))
        self.demands, self.position, self.known = {}, {}, {}
        self.open, self.ended, self.cancelled = set(), [], set()
        self.num_preempted = self.num_steps = self.num_copied = 0
        self.plans = deque()

    def submit(self, demand):
        key = self.scheduler.submit(demand)
        self.demands[key] = demand
        self.known[key] = demand.num_known
        return key

    def cancel(self, key):
        if key not in self.ended:
            self.cancelled.add(key)
            self.scheduler.leave(key)

    def held(self, key):
        return pages_for(max(self.position[key], self.demands[key].num_stored))

    def run(self, plan):
        """One step on the device; returns what it has to report."""
        self.num_steps += 1
        for key in plan.close + plan.preempt:
            self.open.discard(key)
        self.num_preempted += len(plan.preempt)
        for key, leader in plan.open:
            assert key not in self.open
            if leader is not None:
                assert leader in self.open
                assert self.position[leader] == self.known[leader] - 1
                self.num_copied += 1
            first = self.demands[key].first_row
            self.position[key] = self.known[key] - 1 if leader is not None else first
            self.open.add(key)
        assert len(self.open) <= self.limits.num_slots
        reports, drafts = [], plan.num_drafts
        rows = sum(work.rows for work in plan.work) + plan.num_drafts
        assert rows <= self.limits.max_rows
        assert len({work.key for work in plan.work}) == len(plan.work)
        for work in plan.work:
            if work.key not in self.open:  # ended in a step that was not reported in time
                continue
            demand, key = self.demands[work.key], work.key
            begin = self.position[key]
            if work.generating:
                assert begin == self.known[key] - 1
                extra = min(drafts, self.rng.randint(0, demand.max_drafts))
                drafts -= extra
                took = 1 + min(self.rng.randint(0, extra), demand.max_tokens - begin - 1)
                self.known[key] += took
            else:
                took = work.rows
                assert begin + took <= self.known[key]
                if demand.generates and begin + took == self.known[key]:
                    self.known[key] += 1
            self.position[key] = begin + took
            assert self.position[key] <= demand.max_tokens
            limit = demand.max_tokens if demand.generates else demand.num_known
            done = self.position[key] == limit
            if done:
                self.open.discard(key)
            reports.append((key, self.position[key], self.known[key], done))
        assert sum(map(self.held, self.open)) <= self.limits.num_pages
        return reports

    def turn(self):
        """Plans ahead, runs the oldest plan, reports it; says whether anything happened."""
        while len(self.plans) < self.depth:
            plan = self.scheduler.plan()
            assert self.scheduler.num_used_pages <= self.limits.num_pages
            if not plan:
                break
            self.plans.append(plan)
        if not self.plans:
            return False
        for key, position, known, done in self.run(self.plans.popleft()):
            self.scheduler.report(key, position, known)
            if done and key not in self.cancelled:
                self.ended.append(key)
                self.scheduler.leave(key)
        return True

    def finish(self):
        for _ in range(20_000):
            if not self.turn():
                break
        assert self.scheduler.num_used_pages == 0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert not self.open
        assert set(self.ended) | self.cancelled == set(self.demands)


def random_demand(rng, follows=None):
    first, known = rng.choice([(0, rng.randint(1, 300)), (128, rng.randint(256, 700))])
    generates = rng.random() < 0.8
    return Demand(
        first_row=first,
        num_known=known,
        max_tokens=known + rng.randint(0, 400) if generates else known,
        num_stored=first + 128 if first else 0,
        generates=generates,
        max_drafts=rng.choice([0, 3, 5]) if generates else 0,
        priority=rng.choice([0, 0, 1]),
        follows=follows,
    )


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 20), depth=st.sampled_from([1, 2]))
def test_every_sequence_ends_and_no_bound_is_broken(seed, depth):
    rng = random.Random(seed)
    worker = Worker(LIMITS, rng, depth)
    for _ in range(rng.randint(1, 25)):
        worker.submit(random_demand(rng))
        for _ in range(rng.randint(0, 12)):
            worker.turn()
        if rng.random() < 0.2:
            worker.cancel(rng.choice(list(worker.demands)))
    worker.finish()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 20), depth=st.sampled_from([1, 2]))
def test_choices_of_one_prompt_run_it_once_where_slots_allow(seed, depth):
    rng = random.Random(seed)
    worker = Worker(LIMITS, rng, depth)
    known = rng.randint(2, 200)
    base = {"first_row": 0, "num_known": known, "max_tokens": known + 20, "generates": True}
    leader = worker.submit(Demand(**base, leads=True))
    for _ in range(3):
        worker.submit(Demand(**base, follows=leader))
    worker.finish()
    assert worker.num_copied == 3


def test_a_sequence_preempted_for_want_of_pages_comes_back():
    rng = random.Random(0)
    limits = Limits(num_pages=4, num_slots=4, max_rows=64, max_waiting=9)
    worker = Worker(limits, rng, depth=2)
    for _ in range(3):
        worker.submit(Demand(first_row=0, num_known=10, max_tokens=400, generates=True))
    worker.finish()
    assert worker.num_preempted > 0
    assert worker.ended == [1, 2, 3]


def test_a_higher_priority_takes_the_slot_of_a_lower_one_and_not_of_an_equal():
    limits = Limits(num_pages=99, num_slots=1, max_rows=64, max_waiting=9)
    scheduler = Scheduler(limits)
    low = scheduler.submit(
        Demand(first_row=0, num_known=9, max_tokens=99, generates=True, priority=1)
    )
    assert scheduler.plan().open == [(low, None)]
    scheduler.submit(Demand(first_row=0, num_known=9, max_tokens=99, generates=True, priority=1))
    assert not scheduler.plan().preempt
    high = scheduler.submit(Demand(first_row=0, num_known=9, max_tokens=99, generates=True))
    plan = scheduler.plan()
    assert (plan.preempt, plan.open) == ([low], [(high, None)])


def test_streams_come_before_prompts_and_prompts_in_order():
    scheduler = Scheduler(Limits(num_pages=99, num_slots=9, max_rows=32, max_waiting=9))
    stream = scheduler.submit(Demand(first_row=0, num_known=1, max_tokens=99, generates=True))
    first = scheduler.submit(Demand(first_row=0, num_known=40, max_tokens=40))
    second = scheduler.submit(Demand(first_row=0, num_known=40, max_tokens=40))
    assert scheduler.plan().work == [Work(stream, 1, True), Work(first, 31, False)]
    scheduler.report(stream, 1, 2)
    scheduler.report(first, 31, 40)
    assert scheduler.plan().work == [
        Work(stream, 1, True),
        Work(first, 9, False),
        Work(second, 22, False),
    ]


def test_a_cancelled_prompt_ends_at_the_next_step_and_the_one_behind_it_waits_for_that_step_only():
    scheduler = Scheduler(Limits(num_pages=99, num_slots=9, max_rows=1024, max_waiting=9))
    cold = scheduler.submit(Demand(first_row=0, num_known=3968, max_tokens=3968))
    assert scheduler.plan().work == [Work(cold, 1024, False)]
    behind = scheduler.submit(Demand(first_row=0, num_known=512, max_tokens=512))
    scheduler.leave(cold)
    plan = scheduler.plan()
    assert plan.close == [cold]
    assert plan.work == [Work(behind, 512, False)]


def test_prompt_rows_beside_streams_keep_to_the_step_time():
    limits = Limits(num_pages=99, num_slots=9, max_rows=1024, max_waiting=9, max_step_s=0.1)
    scheduler = Scheduler(limits, lambda seconds, most: min(most, int(seconds * 1000)))
    scheduler.submit(Demand(first_row=0, num_known=1, max_tokens=99, generates=True, max_drafts=5))
    scheduler.submit(Demand(first_row=0, num_known=4000, max_tokens=4000))
    plan = scheduler.plan()
    assert [work.rows for work in plan.work] == [1, 94]
    assert plan.num_drafts == 5


def test_prompt_rows_never_starve_however_slow_a_step_is():
    limits = Limits(num_pages=99, num_slots=9, max_rows=1024, max_waiting=9, max_step_s=0.1)
    scheduler = Scheduler(limits, lambda seconds, most: 0)
    scheduler.submit(Demand(first_row=0, num_known=1, max_tokens=99, generates=True))
    scheduler.submit(Demand(first_row=0, num_known=4000, max_tokens=4000))
    assert [work.rows for work in scheduler.plan().work] == [1, 16]


def test_what_can_never_fit_and_what_is_too_much_is_refused():
    scheduler = Scheduler(Limits(num_pages=2, num_slots=1, max_rows=16, max_waiting=1))
    with pytest.raises(NoFreeBlocks, match="257 tokens need 3 pages, this worker has 2"):
        scheduler.submit(Demand(first_row=0, num_known=1, max_tokens=257))
    scheduler.submit(Demand(first_row=0, num_known=1, max_tokens=256))
    with pytest.raises(Overloaded, match="1 sequences are waiting"):
        scheduler.submit(Demand(first_row=0, num_known=1, max_tokens=1))
