"""The simulator of a pipeline's step: a closed form, what must not be, and the same by ticks of a clock."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_f_one_b import Meeting, Stage, play, program, step_seconds


def no_hop(*_):
    return 0.0


def pipeline(times: list[tuple[list, list]], replica: int = 0, **rest) -> list[Stage]:
    """One replica whose stages take these seconds for each microbatch, forwards and backwards."""
    last = len(times) - 1
    return [
        Stage(
            (replica, number),
            before=((replica, number - 1),) if number else (),
            after=((replica, number + 1),) if number < last else (),
            behind=last - number,
            forward=forward,
            backward=backward,
            **rest,
        )
        for number, (forward, backward) in enumerate(times)
    ]


def even(stages: int, microbatches: int, forward: float, backward: float) -> list[Stage]:
    return pipeline([([forward] * microbatches, [backward] * microbatches)] * stages)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.integers(1, 20), st.floats(0.01, 5), st.floats(0, 10))
def test_equal_stages_in_closed_form(stages, microbatches, forward, backward):
    """Narayanan et al., arXiv 2104.04473, section 2.2: the ideal time and the bubble."""
    found = step_seconds(even(stages, microbatches, forward, backward), microbatches, no_hop)
    assert found == pytest.approx((microbatches + stages - 1) * (forward + backward))


def by_ticks(stages: list[Stage], microbatches: int, hop) -> int:
    """The same step, tick by tick: each stage has something left to do, and looks at the others when it is idle."""
    sizes = Counter(stage.group for stage in stages if stage.group is not None)
    queues = [list(program(stage, microbatches, hop, sizes)) for stage in stages]
    left: list[float] = [0] * len(queues)
    running: list[dict] = [{} for _ in queues]  # meetings that a stage is in: ticks left, or None before they begin
    for now in itertools.count():
        changed = True
        while changed:
            changed = False
            for number, queue in enumerate(queues):
                if left[number] or not queue:
                    continue
                action = queue[0]
                if not isinstance(action, tuple):
                    left[number], changed = action, True
                    queue.pop(0)
                    continue
                for one in action:
                    if one.key not in running[number]:
                        running[number][one.key], changed = None, True
            for one in {one for queue in queues if queue and isinstance(queue[0], tuple) for one in queue[0]}:
                inside = [found for found in running if one.key in found]
                if len(inside) == one.parties and all(found[one.key] is None for found in inside):
                    for found in inside:
                        found[one.key], changed = one.seconds, True
            for number, queue in enumerate(queues):
                waiting = queue[0] if queue and isinstance(queue[0], tuple) else ()
                if waiting and all(running[number].get(one.key) == 0 for one in waiting):
                    queue.pop(0)
                    running[number], changed = {}, True
        if not any(queues) and not any(left):
            return now
        left = [max(one - 1, 0) for one in left]
        running = [{key: ticks and ticks - 1 for key, ticks in found.items()} for found in running]
        assert now < 10_000
    raise AssertionError


ticks = st.integers(0, 4)


@st.composite
def two_towers(draw):
    """Vision in front of language replicas: several for one, or one for several; some with experts in common."""
    microbatches, depth, fan = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    fan_in, together = draw(st.booleans()), draw(st.booleans())
    replicas = 1 if fan_in else fan
    vision = [("vision", number) for number in range(fan if fan_in else 1)]

    def times(least=0):
        return draw(st.lists(st.integers(least, 4), min_size=microbatches, max_size=microbatches))

    stages = []
    for replica in range(replicas):
        for one in pipeline([(times(1), times()) for _ in range(depth)], replica):
            alone = list(zip(times(), times(), strict=True)) if one.name[1] == 0 and draw(st.booleans()) else ()
            stages.append(
                Stage(
                    one.name,
                    before=one.before or tuple(vision),
                    after=one.after,
                    behind=one.behind,
                    forward=one.forward,
                    backward=one.backward,
                    alone=alone,
                    group=("experts", one.name[1]) if together else None,
                )
            )
    served = tuple((replica, 0) for replica in range(replicas))
    stages += [Stage(name, (), served, depth, times(), times()) for name in vision]
    hops = draw(st.dictionaries(st.sampled_from(["forward", "backward"]), ticks))
    return stages, microbatches, lambda sender, receiver, way, number: hops.get(way, 0)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 5), st.integers(1, 12))
def test_a_stage_holds_as_many_microbatches_as_stages_follow(behind, microbatches):
    """One more than that: what the planner counts, of the tower's ranks too."""
    stage = Stage("one", (), (), behind, [1.0] * microbatches, [-1.0] * microbatches)
    assert max(itertools.accumulate(program(stage, microbatches, no_hop, {}))) == min(behind + 1, microbatches)


@settings(max_examples=150, deadline=None)
@given(two_towers())
def test_as_tick_by_tick(made):
    assert step_seconds(*made) == by_ticks(*made)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_step_is_shorter_than_what_has_to_be_done(data):
    """Nor than the path of one microbatch; nor does it get shorter where something takes longer."""
    depth, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    lists = st.lists(st.floats(0, 5), min_size=microbatches, max_size=microbatches)
    times = [(data.draw(lists), data.draw(lists)) for _ in range(depth)]
    found = step_seconds(pipeline(times), microbatches, no_hop)
    busiest = max(sum(forward) + sum(backward) for forward, backward in times)
    paths = [sum(forward[i] + backward[i] for forward, backward in times) for i in range(microbatches)]
    assert found >= max(busiest, *paths) - 1e-9
    stage, way, number = (data.draw(st.integers(0, most - 1)) for most in (depth, 2, microbatches))
    times[stage][way][number] += 1
    longer = step_seconds(pipeline(times), microbatches, no_hop)
    assert longer >= found - 1e-9
    assert longer <= found + 1 + 1e-9
    assert step_seconds(pipeline(times), microbatches, lambda *_: 0.5) >= longer


def test_a_slow_member_holds_back_its_group():
    fast, slow = ([1.0, 1.0], [1.0, 1.0]), ([1.0, 5.0], [1.0, 1.0])
    apart = [*pipeline([fast]), *pipeline([slow], 1)]
    assert step_seconds(apart, 2, no_hop) == 8
    late = [*pipeline([fast], group="x"), *pipeline([fast], 1, group="x", alone=[(3.0, 0.0), (0.0, 2.0)])]
    assert step_seconds(late, 2, no_hop) == 3 + 4 + 2


def test_who_waits_for_ever_is_said():
    with pytest.raises(RuntimeError, match=r"programs \[0\] of 2 wait for ever"):
        play([[(Meeting("never", 2, 0.0),)], [1.0]])
