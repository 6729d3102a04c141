"""Before `join` has a life: it asks the run, measures, and waits for a yes, for up to a minute or until the run begins.
Its owner is heard meanwhile as later: `leave`, `pause`, `limits`, `status` from another terminal.

A thread serves the local socket until the keeper opens its own (`node.process.lend`). A pause is kept in the file from
which the keeper reads it; `leave` ends `join` as Ctrl-C does.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import trio

from node.owner.consent import withdraw_consent
from node.owner.governor import UserPause
from node.owner.limits import read_limits, shown, with_values, write_limits
from node.platform.local_socket import NotRunningError, NotWellError, ask, open_door
from node.platform.notify import notify
from node.process.control import serve_orders
from node.process.pauses import clock_words, keep_pause, kept_pause, pause_seconds
from protocol.base.errors import BadInputError

BEGINNING = "getting ready"
NOTHING_BEGUN = "It had not joined yet: nothing was begun, and nothing of it runs here now."
LAST_WORD_S = 0.2
"""Until the answer to `leave` is with whoever asked."""
BEAT_S = 5.0
"""Between two words to a service manager, which has less than a minute of patience."""
OPEN_S = 5.0
"""Until the socket is there; a computer that takes longer begins without it."""


class Starting:
    """Use as a context around everything that comes before `lend`.

    Args:
        interrupt: ends what the main thread does, by a `KeyboardInterrupt` there.
    """

    def __init__(self, state: Path, settings: Path, run_id: str, interrupt: Callable[[], None] | None = None) -> None:
        self._state = state
        self._settings = settings
        self._run_id = run_id
        self._interrupt = interrupt or _interrupt_main
        self.run = ""
        """Its name, as soon as it has answered."""
        self.says = BEGINNING
        self.loads_device = False
        """Its process is there already, and looks at the device."""
        self.left = False
        """Its owner wants it to end."""
        self._over = False
        """The keeper answers from here on."""
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None
        self._end: Callable[[], None] = lambda: None
        self._was_deaf = False
        """Shells start what runs in the background of a script so that it does not hear Ctrl-C."""

    def __enter__(self) -> Starting:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
            # `leave` comes as a Ctrl-C; until a life begins a real one costs nothing either.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._was_deaf = True
        try:
            ask(self._state, {"verb": "status"})
        except NotRunningError:
            self._thread = threading.Thread(target=self._serve, name="starting", daemon=True)
            self._thread.start()
            self._ready.wait(OPEN_S)
        except NotWellError:
            pass  # somebody has the folder: that will be said
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def hand_over(self) -> None:
        """From here on a pause would come too late for the keeper to read it."""
        with self._lock:
            self._over = True

    def close(self) -> None:
        """The socket is the keeper's by now, or goes with this thread."""
        if self._was_deaf:
            with suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._end()
        if self._thread is not None:
            self._thread.join(OPEN_S)
            self._thread = None

    def _serve(self) -> None:
        with suppress(OSError):  # a folder that cannot be written will be named by whoever needs it
            self._state.mkdir(parents=True, exist_ok=True, mode=0o700)
            trio.run(self._serve_until_closed)
        self._ready.set()

    async def _serve_until_closed(self) -> None:
        token, over = trio.lowlevel.current_trio_token(), trio.Event()

        def end() -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(over.set)

        door = await open_door(self._state, role="volunteer", run_id=self._run_id)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve_orders, door, self)
                nursery.start_soon(self._tell_manager)
                self._end = end
                self._ready.set()
                await over.wait()
                nursery.cancel_scope.cancel()
        finally:
            if not self._over:
                door.close()

    async def _tell_manager(self) -> None:
        """To a service manager it has begun: a run may take hours to."""
        notify("READY=1")
        while True:
            notify("WATCHDOG=1", f"STATUS={self.says}")
            await trio.sleep(BEAT_S)

    # ---- the owner -----------------------------------------------------------------------------------------------

    def order(self, order: dict[str, Any]) -> dict[str, Any]:
        """As the keeper's: one order, and the answer. Raises `BadInputError`."""
        verb = order.get("verb")
        with self._lock:
            if verb != "status" and self._over:
                raise BadInputError("it begins this very moment: say it again in a few seconds")
            if verb in ("pause", "finish"):
                for_s = pause_seconds(order.get("for_s"))
                until = None if for_s is None else time.time() + for_s
                keep_pause(self._state, UserPause(until_unix_s=until, finish=verb == "finish"))
            elif verb == "resume":
                keep_pause(self._state, None)
            elif verb == "limits":
                write_limits(self._settings, with_values(read_limits(self._settings), order.get("values") or {}))
            elif verb == "leave":
                self.left = True
                if order.get("for_good"):
                    withdraw_consent(self._settings.parent, self._run_id)
            elif verb != "status":
                raise BadInputError(f"there is no order {verb!r}")
        answer = self.status()
        if verb == "leave":
            threading.Timer(LAST_WORD_S, self._interrupt).start()
        return answer

    def status(self) -> dict[str, Any]:
        """What screens show of a beginning: nothing runs, nothing was given."""
        pause = kept_pause(self._state)
        holds = []
        if pause is not None and (pause.until_unix_s is None or pause.until_unix_s > time.time()):
            until = pause.until_unix_s
            holds = [["user", "by you" if until is None else f"by you until {clock_words(until, time.time())}"]]
        return {
            "run": self.run,
            "state": "leaving" if self.left else "starting",
            "begun": False,
            "reason": "",
            "sentence": self.says,
            "holds": holds,
            "complaint": "",
            "stage": -1,
            "stages": 0,
            "device": {"name": "loading" if self.loads_device else "not started yet", "free": not self.loads_device},
            "thanks": NOTHING_BEGUN,
            "update": "",
            "limits": shown(read_limits(self._settings)),
            "pid": os.getpid(),
            "unix_s": time.time(),
        }


def _interrupt_main() -> None:
    """As Ctrl-C would: also out of a call that waits."""
    if os.name == "nt":
        _thread.interrupt_main()
    else:
        os.kill(os.getpid(), signal.SIGINT)
