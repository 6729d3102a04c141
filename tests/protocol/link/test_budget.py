"""Links of one process share one memory: nobody fills it, and whoever holds most gives way."""

from __future__ import annotations

import random
from functools import partial

import pytest

from protocol.base.errors import RemoteProtocolError
from protocol.link.budget import Account, Budget


def accounts(budget: Budget, *strangers: bool) -> tuple[list[Account], list[str]]:
    """Open accounts, and who of them had to give way."""
    gone: list[str] = []
    made = [budget.open(stranger=stranger) for stranger in strangers]

    def give_way(number: int, sentence: str) -> None:
        gone.append(f"{number}: {sentence}")

    for number, account in enumerate(made):
        account.give_way = partial(give_way, number)
    return made, gone


def test_whoever_holds_most_gives_way_to_who_holds_less() -> None:
    """Its unfinished messages are what there is no room for; it hears why."""
    budget = Budget(100)
    (honest, greedy), gone = accounts(budget, True, True)
    greedy.reserve(90)
    honest.reserve(20)
    assert len(gone) == 1 and gone[0].startswith("1: it held 90")
    assert (budget.held_bytes, honest.held_bytes, greedy.held_bytes) == (20, 20, 0)
    with pytest.raises(RemoteProtocolError, match="busy"):
        greedy.reserve(1)


def test_nobody_pushes_out_who_holds_less() -> None:
    """Who asks for more than all others hold is refused himself, with how much there is."""
    budget = Budget(100)
    (honest, greedy), gone = accounts(budget, True, True)
    honest.reserve(40)
    greedy.reserve(40)
    with pytest.raises(RemoteProtocolError, match="of the 100"):
        greedy.reserve(30)
    assert gone == [] and budget.held_bytes == 80


def test_a_server_goes_after_all_strangers() -> None:
    """What servers send is what the run waits for; a crowd that each holds little is no reason to cut one off."""
    budget = Budget(100)
    (server, *crowd), gone = accounts(budget, False, *[True] * 10)
    server.reserve(50)
    for account in crowd:
        account.reserve(5)
    server.reserve(20)
    assert len(gone) == 4 and not any(sentence.startswith("0:") for sentence in gone)
    with pytest.raises(RemoteProtocolError):
        crowd[-1].reserve(30)


def test_what_the_process_holds_itself_counts_too() -> None:
    """And nobody is cut off for it: that would make no room."""
    held = [0]
    budget = Budget(100, lambda: held[0])
    (one, two), gone = accounts(budget, True, True)
    one.reserve(60)
    held[0] = 95
    with pytest.raises(RemoteProtocolError):
        two.reserve(10)
    assert gone == [] and one.held_bytes == 60


def test_the_budget_is_kept_and_small_holders_stay_whatever_strangers_do() -> None:
    """Random crowds: never more than the total, sums always right, and whoever holds less than his share of the total
    is neither refused nor cut off."""
    rng = random.Random(16)
    for _ in range(50):
        budget = Budget(1000)
        made, gone = accounts(budget, *[True] * 10)
        small = made[0]
        for _ in range(300):
            account = rng.choice(made[1:])
            try:
                if rng.random() < 0.3 and account.held_bytes:
                    account.release(rng.randint(1, account.held_bytes))
                else:
                    account.reserve(rng.randint(1, 900))
            except RemoteProtocolError:
                pass
            small.reserve(90)
            assert sum(each.held_bytes for each in made) == budget.held_bytes <= 1000
            small.release(90)
        assert not any(sentence.startswith("0:") for sentence in gone)
        for account in made:
            account.close()
        assert budget.held_bytes == 0
