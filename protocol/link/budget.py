"""One budget of tensor bytes for all links of a process: room is taken when a message is announced, before its bytes.

Each peer has its window, and all of them together what the machine can spare. When that is used up somebody must go,
and it is whoever holds the most, volunteers before servers: nobody can be pushed out by another who holds more than
himself, and a crowd of identities that each begin a large message push out each other.
"""

from __future__ import annotations

from collections.abc import Callable

from protocol.base.errors import RemoteProtocolError


class Account:
    """What one link holds of the budget. `give_way` ends the link, with a sentence."""

    def __init__(self, budget: Budget, *, stranger: bool) -> None:
        self._budget = budget
        self.stranger = stranger
        self.held_bytes = 0
        self.closed = False
        self.give_way: Callable[[str], None] = lambda sentence: None

    def reserve(self, byte_count: int) -> None:
        """Takes room for a message; raises `RemoteProtocolError` ("busy") when it is this link that must go."""
        self._budget.reserve(self, byte_count)

    def release(self, byte_count: int) -> None:
        """So many bytes are somebody else's now, or gone."""
        assert byte_count <= self.held_bytes, "more released than reserved"
        self._budget.held_bytes -= byte_count
        self.held_bytes -= byte_count

    def close(self) -> None:
        """The link is over: all that it held is free."""
        self.release(self.held_bytes)
        self.closed = True
        self._budget.forget(self)


class Budget:
    """What all links of a process may hold.

    Args:
        total_bytes: of messages under way or undigested, and of what `others` counts.
        others: bytes that the process holds apart from its links, out of the same memory.
    """

    def __init__(self, total_bytes: int, others: Callable[[], int] = lambda: 0) -> None:
        self.total_bytes = total_bytes
        self.held_bytes = 0
        """By links."""
        self._others = others
        self._accounts: dict[Account, None] = {}

    def open(self, *, stranger: bool) -> Account:
        """An account of a new link; a stranger's gives way first."""
        account = Account(self, stranger=stranger)
        self._accounts[account] = None
        return account

    def forget(self, account: Account) -> None:
        """For `Account`."""
        self._accounts.pop(account, None)

    def reserve(self, account: Account, byte_count: int) -> None:
        """For `Account`: makes room by ending the links that hold most, or refuses."""
        if account.closed:
            raise RemoteProtocolError("busy", "the link had to give way")
        room = self.total_bytes - self._others() - byte_count
        rank = account.stranger, account.held_bytes + byte_count
        while self.held_bytes > room:
            largest = max(self._accounts, key=lambda each: (each.stranger, each.held_bytes))
            if largest is account or (largest.stranger, largest.held_bytes) <= rank or room < 0:
                raise RemoteProtocolError(
                    "busy",
                    f"no memory for {byte_count} tensor bytes more: of the {self.total_bytes} that this process may"
                    f" hold, links hold {self.held_bytes}, this one {account.held_bytes}",
                )
            freed = largest.held_bytes
            largest.close()
            largest.give_way(f"it held {freed} tensor bytes, the most of all, where others needed room")
        self.held_bytes += byte_count
        account.held_bytes += byte_count
