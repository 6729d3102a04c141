"""Lanes and disks that end nothing are noticed and named; busy ones, and suspended computers, are not."""

from __future__ import annotations

from node.machine.jobs import AddUp, Apply, LoadBatch, PrepareData, SetUpServer
from node.machine.stalls import PREPARE_S, STATE_BYTES, STATE_BYTES_PER_S, Stalls
from protocol.base.ids import NodeId, TaskId, TensorRef
from tests.node.setting import make_config, make_plan

CONFIG = make_config()
APPLY = Apply(3, 1.0, False)


def look(stalls: Stalls, begin: float, seconds: int) -> None:
    for second in range(0, seconds + 1, 2):
        stalls.look(begin + second)


def test_a_job_that_does_not_end_is_named_with_its_time() -> None:
    """From its first look on it counts; when it ends nothing is wrong any more."""
    stalls = Stalls()
    look(stalls, 0.0, 10)
    stalls.ordered(APPLY)
    stalls.ordered(LoadBatch(4, 0, 1, 2))
    look(stalls, 12.0, 6)
    assert stalls.sentence() == "" and stalls.seconds == 6.0
    look(stalls, 20.0, 10)
    assert stalls.sentence() == "the update of its parameters, which has not come to an end for 18 s"
    stalls.ended(APPLY)
    look(stalls, 32.0, 2)
    assert stalls.sentence() == "" and stalls.seconds < 10.0


def test_a_sum_that_does_not_end_is_noticed_while_the_server_s_own_lane_goes_on() -> None:
    """The next stage waits for it."""
    stalls = Stalls()
    ref = TensorRef(1, (1,), "q8", 10)
    stalls.ordered(AddUp(1, TaskId(0, 0, 1, "F"), NodeId("v1"), ref, ref, 2))
    for second in range(0, 22, 2):
        stalls.ordered(APPLY)
        stalls.ended(APPLY)
        stalls.look(float(second))
    assert stalls.sentence() == "its arithmetic, which has not come to an end for 20 s"


def test_a_disk_that_writes_nothing_is_named() -> None:
    """One record waits for it."""
    stalls = Stalls()
    stalls.writing()
    look(stalls, 0.0, 14)
    assert stalls.sentence() == "its disk, which has written nothing for 14 s"
    stalls.written()
    look(stalls, 16.0, 2)
    assert stalls.seconds == 0.0


def test_a_lane_that_always_has_work_and_ends_some_does_not_stand_still() -> None:
    """However long its queue is."""
    stalls = Stalls()
    for number in range(50):
        stalls.ordered(LoadBatch(number, 0, 1, 2))
    for number in range(50):
        stalls.look(2.0 * number)
        stalls.ended(LoadBatch(number, 0, 1, 2))
    assert stalls.seconds == 0.0


def test_a_suspended_computer_has_not_failed() -> None:
    """An hour between two looks counts as a few seconds."""
    stalls = Stalls()
    stalls.ordered(APPLY)
    look(stalls, 0.0, 4)
    stalls.look(3604.0)
    assert stalls.seconds < 10.0


def test_a_large_state_and_new_data_have_their_time() -> None:
    """A billion parameters take five minutes to write on a slow disk, and text hours to read, which says so."""
    stalls = Stalls()
    stalls.ended(SetUpServer(CONFIG, 259, make_plan(), 0, 0), 10**9)
    stalls.ordered(APPLY)
    state_s = 10**9 * STATE_BYTES / STATE_BYTES_PER_S
    look(stalls, 0.0, int(state_s))
    assert stalls.seconds == 0.0
    look(stalls, state_s, 20)
    assert 10.0 <= stalls.seconds <= 20.0
    stalls.ended(APPLY)
    stalls.ordered(PrepareData(CONFIG))
    for minute in range(100):
        stalls.goes_on(PrepareData(CONFIG), 0.0)
        look(stalls, 1000.0 + 28.0 * minute, 26)
    assert stalls.seconds == 0.0
    stalls.goes_on(PrepareData(CONFIG), 600.0)
    look(stalls, 3802.0, 600)
    assert stalls.seconds == 0.0


def test_data_whose_reading_hangs_is_named_within_a_minute() -> None:
    """A network disk that gives no answer: nobody waits an hour for it."""
    stalls = Stalls()
    stalls.ordered(PrepareData(CONFIG))
    look(stalls, 0.0, int(PREPARE_S) + 14)
    assert stalls.sentence().startswith("the reading of the data, which has not come to an end for")


def test_a_long_job_that_has_just_ended_is_not_asked_about() -> None:
    """Data was read for 25 s, which it may be, and nothing else is to do: whoever asks before the next look hears that
    all is well. The server died of that question when a message came in such a moment."""
    stalls = Stalls()
    stalls.ordered(PrepareData(CONFIG))
    look(stalls, 0.0, 25)
    stalls.ended(PrepareData(CONFIG))
    assert stalls.sentence() == "" and stalls.seconds == 0.0
    stalls.writing()
    look(stalls, 26.0, 14)
    stalls.written()
    assert stalls.sentence() == "" and stalls.seconds == 0.0
