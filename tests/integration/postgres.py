"""A PostgreSQL server of a test's own: a fresh cluster on loopback that ends with the test."""

from __future__ import annotations

import glob
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from protocol.drive.process import free_port

PATIENCE_S = 60.0
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}


def programs() -> Path | None:
    """The folder of `initdb` and `postgres`, which Debian keeps off the PATH; None: not installed."""
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"), key=lambda path: int(path.split("/")[4]))
    on_path = shutil.which("initdb")
    return Path(found[-1]).parent if found else Path(on_path).parent if on_path else None


def why_not() -> str:
    """Why this machine cannot have one; empty when it can."""
    if programs() is None:
        return "PostgreSQL is not installed (./deploy/test-deps)"
    if os.getuid() == 0:
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            return "PostgreSQL refuses to run as root, and there is no user `postgres`"
    return ""


class Cluster:
    """Starts with `start`; its URL stays the same over restarts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "cluster"
        self._user = "postgres" if os.getuid() == 0 else None
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"postgresql://barnraise@127.0.0.1:{self._port}/postgres"
        bin_folder = programs()
        assert bin_folder is not None, why_not()
        self._bin = bin_folder
        self._log = folder / "postgres.log"
        if self._user is not None:
            shutil.chown(folder, self._user)
        subprocess.run(
            [self._bin / "initdb", "-D", self._folder, "-A", "trust", "-U", "barnraise", "--no-sync"],
            check=True, user=self._user, cwd="/", stdout=subprocess.DEVNULL, env=ENVIRONMENT,
        )  # fmt: skip

    def start(self) -> None:
        options = {"listen_addresses": "127.0.0.1", "port": str(self._port), "unix_socket_directories": ""}
        words = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", self._folder, *words],
                user=self._user, cwd="/", stdout=log, stderr=log, env=ENVIRONMENT,
            )  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S
        while subprocess.run([self._bin / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self._port)]).returncode:
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, "PostgreSQL does not start"
            time.sleep(0.05)

    def stop(self) -> None:
        """At once: whoever is connected is cut off."""
        if self._process is not None:
            self._process.send_signal(2)  # SIGINT: its "fast shutdown"
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE_S)
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def postgres() -> Iterator[Cluster]:
    """A running cluster; nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="barnraise-postgres-") as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
