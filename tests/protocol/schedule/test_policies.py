"""A policy is a pure function: what it prefers, what it waits for, and that it never forgets."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.base.errors import BadInputError
from protocol.schedule.ir import Flow, Hop, Key, Op
from protocol.schedule.policies import First, Kind, Policy, Ready, Traversal, Weights, choose, ready, start

FLOW = Flow(microbatch=0, route=(Hop(0, 0), Hop(1, 0)))
CUT = Flow(microbatch=0, route=(Hop(0, 0), Hop(1, 0)), segment_tokens=(1, 1))


def item(op: Op, microbatch: int, chunk: int = 0, segment: int | None = None, seconds: float = 0.0) -> Ready:
    """A ready operation of a whole microbatch, or of the given one of its two segments."""
    return ready(Key(op, microbatch, chunk, segment or 0), FLOW if segment is None else CUT, chunk, seconds)


def pick(policy: Policy, *items: Ready, done: tuple[Ready, ...] = (), chunks: int = 1, **gaps: float) -> Ready | None:
    """What the policy starts after `done`, out of `items`."""
    split = any(i.kind is Kind.WEIGHT for i in (*items, *done))
    state = start(policy, [9] * chunks, [9] * chunks, split)
    for earlier in done:
        chosen, state = choose(policy, state, [earlier])
        assert chosen == earlier
    return choose(policy, state, items, **gaps)[0]


F0, F1, B0, W0 = (item(op, m) for op, m in ((Op.F, 0), (Op.F, 1), (Op.B, 0), (Op.W, 0)))


def test_the_kind_that_goes_first() -> None:
    """Backward first, forward first, and in turns of given lengths."""
    assert pick(Policy(first=First.BACKWARD), F1, B0) == B0
    assert pick(Policy(first=First.FORWARD), F1, B0) == F1
    turns = Policy(first=First.INTERLEAVED, forward_unit=2)
    assert pick(turns, F1, B0) == F1
    assert pick(turns, F1, B0, done=(F0,)) == F1
    assert pick(turns, item(Op.F, 2), B0, done=(F0, F1)) == B0


def test_a_turn_is_waited_for_once_a_backward_has_run() -> None:
    """Before that, whatever is ready; after it, nothing but the kind whose turn it is."""
    policy = Policy(first=First.INTERLEAVED, wait_turn=True)
    assert pick(policy, F1, done=(F0,)) == F1
    assert pick(policy, item(Op.B, 1), done=(F0, F1, B0)) is None


def test_oldest_microbatch_first_and_segments_as_a_partially_ordered_queue() -> None:
    """Forward: first segment first; backward: last segment of the oldest microbatch (Seq1F1B)."""
    first, second = item(Op.F, 0, segment=0), item(Op.F, 0, segment=1)
    assert pick(Policy(), item(Op.F, 1, segment=0), second, first) == first
    first, second = item(Op.B, 0, segment=0), item(Op.B, 0, segment=1)
    assert pick(Policy(), item(Op.B, 1, segment=1), first, second) == second


def test_breadth_depth_and_turns_of_stages() -> None:
    """Which of a node's stages goes first, and waiting for the stage whose turn it is."""
    near, far = item(Op.F, 3, 0), item(Op.F, 0, 1)
    assert pick(Policy(), near, far, chunks=2) == near
    assert pick(Policy(forward=Traversal(deepest_first=True)), near, far, chunks=2) == far
    turns = Policy(forward=Traversal(interval=2))
    done = (item(Op.F, 0), item(Op.F, 1))
    assert pick(turns, item(Op.F, 2), far, chunks=2, done=done) == far
    assert pick(turns, item(Op.F, 2), chunks=2, done=done) is None


def test_memory_limits_hold_until_the_backward_or_the_weight_gradient() -> None:
    """Per stage and per node; a split backward frees with W, a whole one with B."""
    for policy in (Policy(alive_max=(1,)), Policy(alive_total_max=1)):
        assert pick(policy, F1, done=(F0,)) is None
        assert pick(policy, F1, done=(F0, B0)) == F1
        first = item(Op.I, 0)
        assert pick(policy, F1, W0, done=(F0, first)) == W0
        assert pick(policy, F1, done=(F0, first, W0)) == F1


def test_a_microbatch_is_begun_beside_another_only_with_room_for_both() -> None:
    """Two segments each: in three places the second waits until the first is complete, in four it need not."""
    first, second, other = item(Op.F, 0, segment=0), item(Op.F, 0, segment=1), item(Op.F, 1, segment=0)
    for places in (3, 4):
        for policy in (Policy(alive_max=(places,)), Policy(alive_total_max=places)):
            assert pick(policy, other, done=(first,)) == (other if places == 4 else None)
            assert pick(policy, other, second, done=(first,)) == second
            assert pick(policy, other, done=(first, second)) == other


def test_memory_that_holds_up_a_forward_may_go_before_a_backward() -> None:
    """`free_first` runs W before another I when a forward waits for memory."""
    done = (F0, F1, item(Op.I, 0))
    waiting = (item(Op.F, 2), item(Op.I, 1), W0)
    assert pick(Policy(alive_max=(2,)), *waiting, done=done) == item(Op.I, 1)
    assert pick(Policy(alive_max=(2,), free_first=True), *waiting, done=done) == W0


def test_weight_gradients_wait_for_gaps_that_they_fit() -> None:
    """In any gap; only in one that is long enough; or always once no forward is left."""
    weight = item(Op.W, 0, seconds=2.0)
    done = (F0, item(Op.I, 0))
    assert pick(Policy(weights=Weights.GAP), weight, done=done, backward_gap_s=1.0) == weight
    assert pick(Policy(weights=Weights.FIT), weight, done=done, backward_gap_s=1.0) is None
    assert pick(Policy(weights=Weights.FIT), weight, done=done, backward_gap_s=2.0) == weight
    assert pick(Policy(weights=Weights.FIT_OR_TAIL), weight, done=done, backward_gap_s=1.0) is None
    state = start(Policy(weights=Weights.FIT_OR_TAIL), [0], [1], True)
    assert choose(Policy(weights=Weights.FIT_OR_TAIL), state, [weight], backward_gap_s=1.0)[0] == weight


def test_later_slices_finish_what_was_begun() -> None:
    """The second half of a microbatch goes before anything and takes no further place."""
    half = Ready(Kind.FORWARD, 0, 1, Key(Op.F, 0, 0, 0, 1))
    assert pick(Policy(alive_max=(1,)), B0, half, done=(F0,)) == half


def test_a_policy_crosses_the_wire() -> None:
    """It is numbers and names: encoded and decoded it is the same policy."""
    policy = Policy(first=First.INTERLEAVED, warmup=3, forward=Traversal(True, 4), alive_max=(2, 1))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(policy), type=Policy) == policy


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_choice_is_a_candidate_within_limits_and_leaves_its_arguments_alone(data: st.DataObject) -> None:
    """For any policy and any ready operations: pure, never above a limit, always one of the candidates or none."""
    policy = data.draw(
        st.builds(
            Policy,
            first=st.sampled_from(First),
            wait_turn=st.booleans(),
            warmup=st.none() | st.integers(0, 4),
            forward=st.builds(Traversal, st.booleans(), st.integers(0, 2)),
            backward=st.builds(Traversal, st.booleans(), st.integers(0, 2)),
            alive_max=st.just(()) | st.tuples(st.integers(1, 3), st.integers(1, 3)),
            alive_total_max=st.integers(0, 4),
            weights=st.sampled_from(Weights),
            free_first=st.booleans(),
            forward_unit=st.integers(1, 2),
            backward_unit=st.integers(1, 2),
        )
    )
    state = start(policy, [6, 6], [6, 6], True)
    ops = st.sampled_from([Op.F, Op.I, Op.W])
    for _ in range(data.draw(st.integers(1, 8))):
        items = data.draw(st.lists(st.builds(item, ops, st.integers(0, 5), st.integers(0, 1)), max_size=5))
        # Only what was begun can go back or be weighed.
        items = [i for i in items if i.kind is Kind.FORWARD or state.alive[i.chunk]]
        before = (list(items), state)
        chosen, after = choose(policy, state, items)
        assert (items, state) == before and choose(policy, state, items) == (chosen, after)
        assert chosen is None or chosen in items
        if chosen is None:
            assert after == state
        assert not policy.alive_max or all(a <= m for a, m in zip(after.alive, policy.alive_max, strict=True))
        assert not policy.alive_total_max or sum(after.alive) <= policy.alive_total_max
        state = after


@pytest.mark.parametrize("wrong", [{"alive_max": (0,)}, {"forward_unit": 0}, {"warmup": -1}, {"alive_total_max": -1}])
def test_a_policy_that_nothing_can_start_under_is_refused(wrong: dict[str, object]) -> None:
    """A cap of zero, a unit of zero, a negative warm-up: a sentence that names the key."""
    with pytest.raises(BadInputError, match=next(iter(wrong))):
        Policy(**wrong)  # type: ignore[arg-type]
