"""The owner's door: nobody else gets in, a daemon that is gone or hangs is told apart, on every system's way."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import trio

from node.platform.local_socket import NotRunningError, NotWellError, ask, is_ours, open_door
from node.platform.places import noted_folders


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's settings lie in the test's folder."""
    monkeypatch.setenv("BARNRAISE_CONFIG", str(tmp_path / "settings"))


@pytest.mark.parametrize("unix", [True, False])
async def test_an_order_and_its_answer(tmp_path: Path, unix: bool) -> None:
    """By Unix socket of mode 0600, or by a port on loopback with a token that stands in a private file."""
    door = await open_door(tmp_path, unix)

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            order = json.loads(await stream.receive_some())
            ours = is_ours(door.token, order["token"])
            await stream.send_all(json.dumps({"ours": ours, "verb": order["verb"]}).encode() + b"\n")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, answer, [door.listener])
        found = await trio.to_thread.run_sync(ask, tmp_path, {"verb": "status"})
        nursery.cancel_scope.cancel()
    assert found == {"ours": True, "verb": "status"}
    assert (tmp_path / "control.json").stat().st_mode & 0o777 == 0o600
    assert noted_folders() == [tmp_path]
    if unix:
        assert (tmp_path / "control.sock").stat().st_mode & 0o777 == 0o600
    else:
        assert not is_ours(door.token, "") and not is_ours(door.token, "x" * 43)
    door.close()
    assert noted_folders() == [] and not (tmp_path / "control.json").exists()


async def test_a_long_folder_gets_a_short_socket(tmp_path: Path) -> None:
    """A Unix socket's path holds a hundred bytes; state folders may be longer."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    door = await open_door(folder, unix=True)
    address = json.loads((folder / "control.json").read_text())["address"]
    assert len(os.fsencode(address)) < 110
    await door.listener.aclose()
    door.close()
    assert not Path(address.removeprefix("unix:")).parent.exists()


async def test_the_folder_of_a_short_socket_goes_after_a_crash_too(tmp_path: Path) -> None:
    """When the next one begins from the same state folder; `/tmp` would fill with them."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    killed = await open_door(folder, unix=True)
    left = Path(json.loads((folder / "control.json").read_text())["address"].removeprefix("unix:"))
    await killed.listener.aclose()
    assert left.exists()
    door = await open_door(folder, unix=True)
    await door.listener.aclose()
    assert not left.parent.exists()
    door.close()


async def test_a_door_that_is_opened_again_by_another_name_of_its_folder_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a crash, with a relative path or by a link: the older socket and the new one are one file."""
    (tmp_path / "state").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "state")
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "state", Path("state"), tmp_path / "alias"):
        door = await open_door(folder, unix=True)
        assert (tmp_path / "state" / "control.sock").exists()
        await door.listener.aclose()


@pytest.mark.parametrize("address", ["unix:/tmp/precious", "unix:", "7", "127.0.0.1:1"])
async def test_what_a_file_says_of_an_older_socket_takes_nothing_else_away(tmp_path: Path, address: str) -> None:
    """A state folder may have been copied from elsewhere, or be damaged."""
    precious = tmp_path / "precious" / "control.sock"
    precious.parent.mkdir()
    (precious.parent / "file").touch()
    papers = {"address": address.replace("/tmp/precious", str(precious.parent / "file")), "token": "", "pid": 1}
    (tmp_path / "control.json").write_text(json.dumps(papers))
    door = await open_door(tmp_path, unix=True)
    await door.listener.aclose()
    door.close()
    assert (precious.parent / "file").exists()


def test_a_daemon_that_is_gone_or_hangs_is_told_apart(tmp_path: Path) -> None:
    """No file, a socket that a crash left behind: not running. One that does not answer in time: unwell."""
    with pytest.raises(NotRunningError):
        ask(tmp_path, {"verb": "status"})
    path = tmp_path / "control.sock"
    papers = {"address": f"unix:{path}", "token": "", "pid": 1}
    (tmp_path / "control.json").write_text(json.dumps(papers))
    with pytest.raises(NotRunningError):
        ask(tmp_path, {"verb": "status"})
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        with pytest.raises(NotRunningError):
            ask(tmp_path, {"verb": "status"})
        listener.listen()
        with pytest.raises(NotWellError, match=r"within 0.05 s: it is stopped, or .* counts as soon as it goes on"):
            ask(tmp_path, {"verb": "status"}, within_s=0.05)
