"""Words for a screen of 80 columns."""

from __future__ import annotations

from typing import Any

from node.owner.limits import OwnerLimits, shown
from node.owner.tally import Given, as_dict
from node.owner.update import update_words
from node.owner.words import describe, describe_news, headline, limits_in_words, list_limits
from protocol.base.printable import wrapped

OFFER = """Device
  computes on a graphics card with a long name
             (no other accelerator is used: this build of torch is for one kind only, and says so at some length)
  up    at most 3.5 GB an hour, set by this machine's speed, alone in its stage; 68 % of it activations

barnraise://127.0.0.1:42721/s6tes3twnf2glrbaadk5eniahzvf5ovbkkvqs3hmeqgfc2uaibrmbsowzq7ozyzcuei4ieabh3eyvuhyayfnjomtau6yna6"""


def test_lines_are_broken_between_words() -> None:
    """No word is cut or lost, what is short stays as it is, and what goes on is indented below its line."""
    lines = wrapped(OFFER, 80).splitlines()
    assert " ".join(lines).split() == OFFER.split()
    assert all(len(line) <= 80 for line in lines[:-1]) and lines[-1].startswith("barnraise://")
    assert lines[:2] == OFFER.splitlines()[:2] and "" in lines
    (first, more) = (number for number, line in enumerate(lines) if line.startswith("  up") or "activations" in line)
    assert more == first + 1 and lines[more].startswith("    ")
    assert wrapped(OFFER, 1000) == OFFER


def test_all_limits_fit_a_small_terminal() -> None:
    """Every one is on the screen with its value, beside the question."""
    values = shown(OwnerLimits())
    lines = list_limits(values, 80).splitlines()
    assert len(lines) < 20 and all(len(line) <= 80 for line in lines)
    words = " ".join(" ".join(lines).split())
    assert all(f"{name} {value}" in words for name, value in values.items())
    assert len(list_limits(values, 20).splitlines()) == len(values)


def test_the_headline_says_each_thing_once_and_counts_from_one() -> None:
    """It said "WAITING  waiting for …", and "stage 1 (2 of 4)", of which an owner knows neither number."""
    status = {"run": "tiny", "begun": True, "state": "waiting", "sentence": "waiting for the device to start"}
    assert headline({**status, "device": {"free": False}}) == "tiny  WAITING  for the device to start"
    working = {**status, "state": "working", "sentence": "computing", "stage": 1, "stages": 4}
    assert headline(working) == "tiny  WORKING  on part 2 of 4 of the model"


def test_rates_in_words() -> None:
    """Off is no number that a person must interpret."""
    assert limits_in_words(None, None) == "no limits"
    assert limits_in_words(2e6 / 8, None) == "at most 2 Mbit/s up, no limit down"


def test_a_newer_build_of_the_run_is_told() -> None:
    """By its numbers, not its letters; an older or equal one, or what is no release, is nothing to tell."""
    said = update_words("barnraise-0.10.0", "barnraise-0.9.1")
    assert said.startswith("the run's coordinator has Barnraise 0.10.0, this computer 0.9.1: ")
    for theirs in (
        "barnraise-0.9.1",
        "barnraise-0.9",
        "barnraise-0.8.20",
        "",
        "barnraise-",
        "0.x",
        "barnraise-9999999",
    ):
        assert update_words(theirs, "barnraise-0.9.1") == ""


def test_no_strangers_word_has_a_package_fetched_by_its_name() -> None:
    """Every volunteer of a run was told to fetch whatever a public index has under our name, as soon as its coordinator
    said a high number."""
    said = update_words("barnraise-999.0", "barnraise-0.9.1")
    assert "999.0" in said and "pip" not in said and "where you got this one" in said


def lent(**values: Any) -> dict[str, Any]:
    """A status of a computer that works."""
    amount = as_dict(Given(2048.0, 8.0, 600.0))
    device = {
        "name": "a processor", "free": False, "temperature_c": None, "temperature_limit_c": None, "power_w": None,
        "memory_bytes": 4e8, "share": 1.0,
    }  # fmt: skip
    line = {
        "bytes_per_s": 2.5e5, "up_limit_bytes_per_s": None, "down_limit_bytes_per_s": None, "moved_bytes": 5e8,
        "quota_left_bytes": None, "paths": {"tcp": 2},
    }  # fmt: skip
    return {
        "run": "tiny", "begun": True, "state": "working", "reason": "", "sentence": "computing", "stage": 1,
        "stages": 4, "holds": [], "complaint": "", "update": "", "today": amount, "ever": amount,
        "signed": {"ever": None}, "news": None, "device": device, "line": line, **values,
    }  # fmt: skip


def test_what_is_not_so_now_is_not_said_as_if_it_were() -> None:
    """Beside "the device's memory is free" stood memory in use for it; a line without links moved 2.0 Mbit/s now."""
    working = describe(lent())
    assert "a processor, 0.4 GB of memory in use for it" in working
    assert "2.0 Mbit/s now, 0.50 GB this visit, both ways together; no limits;" in working, "beside a lower limit up"
    assert "links: 2 by TCP" in working
    status = lent()
    status |= {"state": "paused", "reason": "user", "sentence": "by you", "holds": [["user", "by you"]]}
    status["device"] |= {"free": True, "memory_bytes": 1e8}
    status["line"]["paths"] = {}
    paused = describe(status)
    assert "a processor, 0.1 GB of memory for this program itself" in paused and "in use for it" not in paused
    assert "line    0.50 GB this visit, both ways together; no limits; links: none" in paused and "now" not in paused


def test_each_of_several_cards_has_a_line() -> None:
    """Which works on which part, which waits, and which takes no part and why: by the device that the owner named."""
    waits = {"device": "cuda:2", "stage": -1, "waiting_for": "", "busy": False, "ended": ""}
    slow = {"device": "cuda:3", "stage": 1, "waiting_for": "work", "busy": False, "ended": ""}
    gone = {"device": "cuda:4", "stage": 0, "waiting_for": "", "busy": False, "ended": "refused: banned"}
    cards = [
        {"device": "cuda:0, a card", "stage": 1, "waiting_for": "", "busy": True, "ended": ""},
        {"device": "cuda:1, a card", "stage": 3, "waiting_for": "work", "busy": True, "ended": ""},
    ]
    lines = describe(lent(cards=[*cards, waits, slow, gone])).splitlines()
    assert lines[0] == "tiny  WORKING  on parts 2 and 4 of 4 of the model"
    assert [line for line in lines if line.startswith("card")] == [
        "card    cuda:0, a card: part 2 of 4",
        "card    cuda:1, a card: part 4 of 4",
        "card    cuda:2: waiting for a place in the run",
        "card    cuda:3: part 2 of 4, waiting for work",
        "card    cuda:4: takes no part: refused: banned",
    ]
    assert describe(lent()).splitlines()[0] == "tiny  WORKING  on part 2 of 4 of the model"


def test_numbers_of_the_run_have_their_time_when_nobody_tells_new_ones() -> None:
    """Steps, loss and part stood for hours of a pause as if they were of now."""
    news = {
        "step": 41, "curve": [[0, 5.5], [41, 3.25]], "sample": "", "sample_step": -1, "hour_ratio": 0.012,
        "step_tasks": 318, "validated_step": -1, "validation_loss": 0.0, "as_of": "14:05",
    }  # fmt: skip
    said = " ".join(" ".join(describe_news(news)).split())
    assert "42 steps done" in said and "5.50 to 3.25, as of 14:05" in said
    assert "1.2 % of the hour before 14:05; step 42 holds 318 of your tasks." in said
    assert "as of" not in " ".join(describe_news({**news, "as_of": ""}))


def test_steps_are_counted_from_one_on_every_screen() -> None:
    """`status` said 1 of 60 where `top` said step 0. A share of a GPU is not called one of the processor."""
    news = {
        "step": 0, "curve": [[0, 5.5]], "sample": "", "sample_step": -1, "hour_ratio": 0.0, "step_tasks": 0,
        "validated_step": -1, "validation_loss": 0.0,
    }  # fmt: skip
    assert describe_news(news)[0].startswith("run     1 step done, loss ")
    assert describe_news({**news, "step": 41})[0].startswith("run     42 steps done, loss ")
    said = OwnerLimits(gpu_ratio=0.8).describe()
    assert "at most 80 % of a GPU's time" in said and "processor" not in said
