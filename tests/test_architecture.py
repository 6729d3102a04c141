"""The house's rules hold for every file, and each rule finds what is planted against it (S10, D4)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import architecture
from tests.architecture import ROOT, RULES, TEST_RULES, Module, Rule, modules


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_packages(rule: Rule) -> None:
    """Every module of the three packages keeps the rule."""
    assert not [sentence for module in modules() for sentence in rule(module)]


@pytest.mark.parametrize("rule", TEST_RULES, ids=lambda rule: rule.__name__)
def test_tests(rule: Rule) -> None:
    """The tests keep the rules that are theirs too."""
    assert not [sentence for module in modules(packages=("tests",)) for sentence in rule(module)]


_PLANTED = {
    "packages_keep_apart": [
        "from coordinator.live.core import X",
        "import node",
        "from . import sibling",
        "def f():\n    from coordinator import y",
    ],
    "torch_keeps_its_place": ["import torch", "from torch.nn import Linear", "def f():\n    import safetensors.torch"],
    "nothing_runs_what_it_reads": [
        "import pickle",
        "from marshal import loads",
        "import shelve as s",
        "torch.load(path)",
        "from torch import load",
        "x = eval(text)",
        "exec(text)",
        "yaml.load(text)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=maybe)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "msgpack.unpackb(data)",
    ],
    "no_line_of_the_log_hides_what_it_says": [
        "self._outbox.log('info', 'run changed', key=change.key)",
        "log.warning('left', link=link)",
    ],
    "only_drivers_touch_the_world": [
        "import time",
        "from time import monotonic",
        "import threading",
        "import socket",
        "import trio",
        "from datetime import datetime",
        "x = random.random()",
        "r = random.Random()",
        "from random import choice",
        "x = os.urandom(3)",
    ],
    "only_the_platform_knows_the_system": [
        "import fcntl",
        "def f():\n    import resource",
        "x = socket.socketpair(socket.AF_UNIX)",
        "open_process(command, pass_fds=numbers)",
        "handle = os.open(path, os.O_DIRECTORY)",
    ],
    "no_order_of_sets": [
        "for x in {1, 2}: pass",
        "for x in set(y): pass",
        "z = list(set(y))",
        "z = [x for x in frozenset(y)]",
        "class A:\n    def f(self):\n        self.x: set[int] = set()\n        return [y for y in self.x]",
        "def f(x: set[str]):\n    return tuple(x)",
        "def f(x: set[str]):\n    return [*x]",
        "def f(x: set[str], y: set[str]):\n    for z in x - y: pass",
        "def f(x: frozenset[str]):\n    return next(iter(x))",
        "def f(x):\n    seen = set()\n    for y in seen: pass",
    ],
    "has_a_docstring": ["x = 1", "# a comment is none"],
    "can_be_held_in_mind": ["x = 1\n" * 601, "# " + "TO" + "DO later"],
}

_HONEST = {
    "packages_keep_apart": "from protocol.base.ids import NodeId\nimport json\nfrom node import jobs",
    "torch_keeps_its_place": "import numpy",
    "nothing_runs_what_it_reads": "model.eval()\nnp.load(path, allow_pickle=False)\nre.compile(x)\nself.load(x)",
    "no_line_of_the_log_hides_what_it_says": "out.log('info', 'run changed', detail=key)\nfind(key=3)",
    "only_drivers_touch_the_world": "import random\ndef f(rng: random.Random): return rng.random(), random.Random(3)",
    "only_the_platform_knows_the_system": "import os\nhandle = os.open(path, os.O_RDONLY)",
    "no_order_of_sets": "def f(x: set[int]):\n    return sorted(x), any(y for y in x), len(x), {y for y in x}, sum(x)",
    "has_a_docstring": '"""Says what it is for."""',
    "can_be_held_in_mind": "x = 1\n" * 600,
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in _PLANTED.items() for text in texts], ids=lambda part: part[:40]
)
def test_planted_mistakes_are_found(name: str, text: str) -> None:
    """Each rule finds each mistake planted into a machine's file."""
    assert list(getattr(architecture, name)(Module("node/planted.py", text)))


@pytest.mark.parametrize("folder", list(architecture.APART))
def test_folders_that_must_keep_apart_do(folder: str) -> None:
    """An import that joins two folders which must not know each other is found."""
    for other in architecture.APART[folder]:
        assert list(architecture.packages_keep_apart(Module(f"{folder}planted.py", f"from {other}.x import Y")))
    assert not list(architecture.packages_keep_apart(Module(f"{folder}planted.py", "from protocol.base.ids import X")))


@pytest.mark.parametrize("name", list(_HONEST))
def test_honest_code_passes(name: str) -> None:
    """What looks alike but is harmless is left alone."""
    assert not list(getattr(architecture, name)(Module("node/honest.py", _HONEST[name])))


def test_every_rule_is_tried() -> None:
    """No rule is held that has not been seen to bite."""
    assert [rule.__name__ for rule in RULES] == list(_PLANTED) == list(_HONEST)


def test_coordinator_and_protocol_start_without_torch() -> None:
    """Importing every module of `protocol` and `coordinator` loads no torch: a planner starts in a blink."""
    names = [module.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for module in modules()]
    names = [name for name in names if name.split(".")[0] in ("protocol", "coordinator")]
    code = (
        "import sys, importlib\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, *names], check=True, cwd=ROOT)
