"""deploy/setup: what it does the second time, after a failure, and in places that nobody thought of."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
PYTHON = """#!/bin/bash
# A Python whose environments have a pip that writes down what it is told and fails where a file says so.
if [ "${1:-} ${2:-}" = "-m venv" ]; then
    rm -rf .venv && mkdir -p .venv/bin
    echo "VIRTUAL_ENV='$(pwd -P)/.venv'" > .venv/bin/activate
    cat > .venv/bin/python <<'END'
#!/bin/bash
if [ "${1:-} ${2:-}" = "-m pip" ]; then echo "$*" >> said; [ ! -e fails ]; exit; fi
case "${2:-}" in "import pip") exit 0 ;; *base_prefix*) echo BASE; exit ;; esac
exec REAL "$@"
END
    chmod +x .venv/bin/python
    exit
fi
case "${2:-}" in *base_prefix*) echo BASE; exit ;; esac
exec REAL "$@"
"""


class Tree:
    """A tree of files in which `setup` can be run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "deploy").mkdir(parents=True)
        shutil.copy(DEPLOY / "setup", folder / "deploy" / "setup")
        (folder / "pyproject.toml").write_text("")
        (folder / "deploy" / "constraints.txt").write_text("")
        (folder / "deploy" / "hashes.txt").write_text("")

    def python(self, path: Path, base: str = "one") -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PYTHON.replace("REAL", f'"{sys.executable}"').replace("BASE", base))
        path.chmod(0o755)
        return path

    def set_up(self, *arguments: str, python: Path, cwd: Path | None = None, **more: str) -> tuple[int, str]:
        """The exit code, and what was said."""
        environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), **more}
        script = "deploy/setup" if cwd is None else str(self.folder / "deploy" / "setup")
        done = subprocess.run(
            ["bash", script, *arguments],
            cwd=cwd or self.folder, env=environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.stdout == ""
        return done.returncode, done.stderr

    @property
    def installed(self) -> list[str]:
        """What pip was told, call by call."""
        said = self.folder / "said"
        return said.read_text().splitlines() if said.exists() else []


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "a folder with 'spaces' & more")


def test_it_works_once_with_spaces_in_every_path(tree: Tree, tmp_path: Path) -> None:
    python = tree.python(tmp_path / "my python" / "python3")
    assert tree.set_up(python=python)[0] == 0
    assert len(tree.installed) == 1
    assert tree.set_up(python=python) == (0, "")
    assert len(tree.installed) == 1


def test_a_python_that_is_named_and_does_not_fit_is_not_replaced_by_another(tree: Tree, tmp_path: Path) -> None:
    code, said = tree.set_up(python=tmp_path / "none")
    assert code == 1
    assert f"PYTHON={tmp_path / 'none'} is no Python 3.11 or newer" in said
    assert not (tree.folder / ".venv").exists()


def test_another_python_makes_another_environment(tree: Tree, tmp_path: Path) -> None:
    assert tree.set_up(python=tree.python(tmp_path / "one", "3.11"))[0] == 0
    assert tree.set_up(python=tree.python(tmp_path / "other", "3.12"))[0] == 0
    assert len(tree.installed) == 2
    assert "3.12" in (tree.folder / ".venv" / "bin" / "python").read_text()


def test_a_folder_that_was_moved_is_set_up_anew(tree: Tree, tmp_path: Path) -> None:
    """Its commands would begin the Python of the place where it was, or none."""
    python = tree.python(tmp_path / "python3")
    assert tree.set_up(python=python)[0] == 0
    tree.folder = tree.folder.rename(tmp_path / "moved")
    assert tree.set_up(python=python)[0] == 0
    assert len(tree.installed) == 2
    assert "moved/.venv" in (tree.folder / ".venv" / "bin" / "activate").read_text()


def test_an_environment_whose_python_is_gone_is_made_anew(tree: Tree, tmp_path: Path) -> None:
    """As after an upgrade of the system."""
    python = tree.python(tmp_path / "python3")
    assert tree.set_up(python=python)[0] == 0
    (tree.folder / ".venv" / "bin" / "python").unlink()
    (tree.folder / ".venv" / "bin" / "python").symlink_to("/no/such/python3")
    assert tree.set_up(python=python)[0] == 0
    assert len(tree.installed) == 2


def test_what_failed_half_way_is_done_again_and_says_so(tree: Tree, tmp_path: Path) -> None:
    """Also where an older set had been complete: it is not any more."""
    python = tree.python(tmp_path / "python3")
    assert tree.set_up(python=python)[0] == 0
    (tree.folder / "deploy" / "constraints.txt").write_text("thing==2\n")
    (tree.folder / "fails").touch()
    code, said = tree.set_up(python=python)
    assert code == 1
    assert "say the same again" in said
    (tree.folder / "deploy" / "constraints.txt").write_text("")
    (tree.folder / "fails").unlink()
    assert tree.set_up(python=python)[0] == 0
    assert len(tree.installed) == 3


def test_what_was_locked_is_not_installed_over_by_try_and_test(tree: Tree, tmp_path: Path) -> None:
    """They call it without the option, and would take files without hashes."""
    python = tree.python(tmp_path / "python3")
    assert tree.set_up("--locked", python=python)[0] == 0
    before = tree.installed
    assert any("--require-hashes" in line for line in before)
    assert tree.set_up(python=python) == (0, "")
    assert tree.installed == before
    (tree.folder / "deploy" / "hashes.txt").write_text("# others\n")
    assert tree.set_up("--locked", python=python)[0] == 0
    assert len(tree.installed) == 2 * len(before)


def test_a_search_path_for_cd_leads_nowhere_else(tree: Tree, tmp_path: Path) -> None:
    python = tree.python(tmp_path / "python3")
    (tmp_path / "elsewhere" / "deploy").mkdir(parents=True)
    assert tree.set_up(python=python, CDPATH=str(tmp_path / "elsewhere"))[0] == 0
    assert len(tree.installed) == 1


def test_windows_is_told_where_to_read(tree: Tree, tmp_path: Path) -> None:
    """Git brings a bash there; but an environment has other folders."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uname").write_text("#!/bin/sh\necho MINGW64_NT-10.0\n")
    (tmp_path / "bin" / "uname").chmod(0o755)
    python = tree.python(tmp_path / "python3")
    code, said = tree.set_up(python=python, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert code == 1
    assert "deploy/README.md" in said
