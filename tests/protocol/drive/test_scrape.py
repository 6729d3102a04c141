"""Where `/metrics` answers, and how it is found: the port file."""

from __future__ import annotations

import errno
import json
import os
import socket
import urllib.request
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from protocol.base.errors import BadInputError
from protocol.drive.addresses import OFF, MetricsPlace
from protocol.drive.metrics import Metrics
from protocol.drive.process import free_port
from protocol.drive.scrape import PORT_FILE, Scrape, open_metrics

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def opened(folder: Path, asked: tuple[str, int] | None = None, ports: tuple[int, ...] = ()) -> Scrape:
    scrape = open_metrics(Metrics(), folder, asked, ports, {"role": "server"})
    assert scrape is not None
    return scrape


def test_two_daemons_of_one_machine_answer_at_ports_of_their_own_that_their_files_name(tmp_path: Path) -> None:
    """Both want the same default port; the files are in the form that Prometheus reads."""
    wanted = free_port()
    scrapes = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        scrapes.append(opened(tmp_path / name, ports=(wanted,)))
    assert scrapes[0].port == wanted != scrapes[1].port
    for name in ("one", "two"):
        ((entry),) = json.loads((tmp_path / name / PORT_FILE).read_text())
        assert entry["labels"] == {"role": "server"}
        with _opener.open(f"http://{entry['targets'][0]}/metrics", timeout=10) as answer:
            assert b"barnraise_build_info" in answer.read()


def test_a_daemon_comes_back_at_its_port_and_takes_another_when_somebody_has_it(tmp_path: Path) -> None:
    """Prometheus sees one instance over restarts; a taken port stops nobody."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        (tmp_path / PORT_FILE).write_text(json.dumps([{"targets": [f"127.0.0.1:{port}"], "labels": {}}]))
        other = opened(tmp_path).port
        assert other != port
    (tmp_path / PORT_FILE).write_text(json.dumps([{"targets": [f"127.0.0.1:{port}"], "labels": {}}]))
    assert opened(tmp_path).port == port


def test_a_daemon_that_ends_in_peace_leaves_no_file_and_one_that_is_off_takes_the_old_one(tmp_path: Path) -> None:
    """After a crash the file stays: a daemon that should run and does not is what `up == 0` is for."""
    scrape = opened(tmp_path)
    assert scrape.file.exists()
    scrape.close()
    assert not scrape.file.exists()
    opened(tmp_path)
    assert open_metrics(Metrics(), tmp_path, OFF, (), {}) is None
    assert not (tmp_path / PORT_FILE).exists()


def test_an_address_that_cannot_be_is_named_and_a_broken_file_counts_as_none(tmp_path: Path) -> None:
    """Exit code 2 with the option in the sentence; whatever lies in the file, the daemon starts."""
    with pytest.raises(BadInputError, match=r"--metrics 192\.0\.2\.1:1"):
        opened(tmp_path, ("192.0.2.1", 1))
    for text in ("", "[]", "{}", '[{"targets": [7]}]', '[{"targets": ["x:99999999"]}]'):
        (tmp_path / PORT_FILE).write_text(text)
        assert opened(tmp_path).port > 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_without_room_costs_the_port_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The daemon answers and says what is missing: as an error of the command line nobody would begin it again."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", fail)
    with capture_logs() as said:
        scrape = opened(tmp_path)
    with _opener.open(scrape.url, timeout=10) as answer:
        assert answer.status == 200
    assert [line["event"] for line in said] == ["the port file is not written"] and not list(tmp_path.iterdir())


def test_a_folder_that_takes_no_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That does not pass by itself."""

    def forbidden(*_: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "replace", forbidden)
    with pytest.raises(BadInputError, match=r"metrics\.json: cannot be written: Permission denied"):
        opened(tmp_path)


def test_reports_say_whether_only_this_machine_may_ask(tmp_path: Path) -> None:
    """The coordinator lists a server elsewhere only when its metrics can be reached from elsewhere."""
    assert opened(tmp_path).counters().keys() == {"metrics_loopback_port"}
    open_to_all = opened(tmp_path, ("*", 0))
    assert open_to_all.counters() == {"metrics_port": float(open_to_all.port)}
    assert open_to_all.target == f"127.0.0.1:{open_to_all.port}"


def test_the_command_line_says_a_place_or_off() -> None:
    """`--metrics off`, `--metrics HOST:PORT`, and a sentence for anything else."""
    place = MetricsPlace()
    assert place.convert("off", None, None) == OFF
    assert place.convert("[::1]:90", None, None) == ("::1", 90)
    with pytest.raises(BadInputError, match="HOST:PORT"):
        place.convert("on", None, None)
