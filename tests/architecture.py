"""The rules of the house as functions over source text: what may import what, what is banned, and where.

Each takes a parsed module and yields sentences about what is wrong, so that planted mistakes can be tried on them.
"""

from __future__ import annotations

import ast
import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from protocol.drive.process import SECRET_FIELDS

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "coordinator", "node")

MAY_IMPORT = {
    "protocol": {"protocol"},
    "coordinator": {"protocol", "coordinator"},
    "node": {"protocol", "node"},
    "tests": {"protocol", "coordinator", "node", "tests"},
}
"""Which of our packages each may import (design section 2)."""

APART = {
    "coordinator/live/": ("coordinator.planning", "coordinator.process", "coordinator.commands"),
    "coordinator/planning/": ("coordinator.live", "coordinator.process", "coordinator.commands"),
    "node/machine/": ("node.process", "node.compute", "node.links", "node.commands"),
    "node/server/": ("node.process", "node.compute", "node.links", "node.commands"),
    "node/volunteer/": ("node.process", "node.compute", "node.links", "node.commands"),
}
"""Folders that must not import others: what runs live knows no planner, and machines know no driver."""

COMPUTE_ONLY = {"torch", "transformers", "safetensors"}
"""Heavy packages that only node/compute may import; elsewhere a start would take seconds."""

DRIVERS = {
    "protocol/drive/*": "the shared drivers",
    "protocol/cli.py": "the command line",
    "coordinator/commands/*": "the command line",
    "coordinator/process/*": "the coordinator's sockets, database and files",
    "coordinator/planning/*search.py": "an anytime search looks at its budget",
    "coordinator/planning/placement/advice.py": "an anytime search looks at its budget",
    "coordinator/planning/tune/*": "an anytime search looks at its budget",
    "node/*/cli.py": "the command line",
    "node/commands/*": "the command line",
    "node/compute/*": "owns the device, files and the lanes' threads",
    "node/data/*": "reads files",
    "node/demo/*": "starts and watches processes",
    "node/links/assemble.py": "puts the ways together",
    "node/links/callee.py": "answers peers that want a link",
    "node/links/channel/channel*.py": "data channels",
    "node/links/channel/sctp_fence.py": "the punching helper",
    "node/links/connector.py": "performs the ladder",
    "node/links/post.py": "waits for the answers to notes",
    "node/links/punch/helper.py": "runs the punching helper",
    "node/links/punch/ice*.py": "the punching helper",
    "node/links/punch/punched.py": "punches through NATs",
    "node/links/quic/certificate.py": "makes a key",
    "node/links/quic/datagrams.py": "a UDP socket",
    "node/links/quic/quic.py": "QUIC on a UDP socket",
    "node/links/relay/relayed.py": "the relay's driver",
    "node/links/router/port_mapping.py": "talks to the home router",
    "node/links/router/routers.py": "talks to the home router",
    "node/links/whereabouts.py": "looks at the addresses of this computer",
    "node/measure/measuring.py": "measures open links",
    "node/measure/netcheck.py": "asks running daemons",
    "node/platform/*": "what differs from system to system",
    "node/process/*": "the node's sockets, disk, tensors and clocks",
    "node/visit/*": "asks running daemons",
}
"""Files that may touch clocks, sockets, threads, processes or the system's randomness; all others are pure."""

IMPURE = {
    "asyncio", "concurrent", "datetime", "multiprocessing", "secrets", "select", "selectors", "signal", "socket", "ssl",
    "subprocess", "tempfile", "threading", "time", "trio", "uuid",
}  # fmt: skip
"""Modules that only drivers may import."""

POSIX_ONLY = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
POSIX_NAMES = {"AF_UNIX", "pass_fds", "preexec_fn", "send_fds", "recv_fds", "fork", "O_DIRECTORY", "getuid", "geteuid"}
KNOWS_THE_SYSTEM = {
    "node/platform/": "what differs from system to system",
    "node/demo/": "the demo runs on POSIX systems",
    "node/compute/": "holds what a server does on its disk",
    "protocol/drive/descriptors.py": "the limit of descriptors",
    "protocol/drive/file_lock.py": "the lock on a file",
    "coordinator/": "a coordinator runs on POSIX systems",
}
"""Modules and names that a volunteer's Windows lacks, and who may use them."""

BANNED_MODULES = {
    "pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "imp", "code", "codeop",
    "runpy",
}  # fmt: skip
"""Modules that run what they read."""

LOG_CALLS = ("log", "debug", "info", "warning", "error", "exception")
BANNED_CALLS = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "compile": "makes code from text",
    "__import__": "imports by a computed name",
    "os.system": "starts a shell",
    "os.popen": "starts a shell",
    "torch.load": "unpickles",
    "torch.save": "pickles",
    "yaml.load": "builds any object",
    "yaml.unsafe_load": "builds any object",
    "msgpack.unpackb": "has no schema: use protocol.link.codec",
}
"""Calls by their full name."""

LINES_MAX = 600
_ORDER_FREE = {"sorted", "set", "frozenset", "any", "all", "sum", "len", "min", "max"}


@dataclass(frozen=True)
class Module:
    """One source file."""

    path: str
    """Relative to the repository's root, with slashes."""
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def package(self) -> str:
        return self.path.split("/")[0]

    @property
    def is_driver(self) -> bool:
        return any(fnmatch.fnmatch(self.path, pattern) for pattern in DRIVERS)


@cache
def modules(root: Path = ROOT, packages: tuple[str, ...] = PACKAGES) -> list[Module]:
    """All source files of these packages, in order of their paths."""
    return [
        Module(path.relative_to(root).as_posix(), path.read_text())
        for package in packages
        for path in sorted((root / package).rglob("*.py"))
    ]


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, full module name) of every import, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")


def _name(node: ast.expr) -> str:
    """The dotted name of an expression, or nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _name(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def packages_keep_apart(module: Module) -> Iterator[str]:
    """protocol <- coordinator, protocol <- node; never across, never relative."""
    for line, name in imports(module.tree):
        first = name.split(".")[0]
        if name.startswith("."):
            yield f"{module.path}:{line}: relative import"
        elif first in MAY_IMPORT and first not in MAY_IMPORT[module.package]:
            yield f"{module.path}:{line}: {module.package} must not import {first}"
        for folder, others in APART.items():
            if module.path.startswith(folder) and any(
                name == other or name.startswith(f"{other}.") for other in others
            ):
                yield f"{module.path}:{line}: {folder} must not import {name}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import) and any(alias.name in PACKAGES for alias in node.names):
            yield f"{module.path}:{node.lineno}: import names from a module, not a package whole"


def torch_keeps_its_place(module: Module) -> Iterator[str]:
    """Heavy packages are imported under node/compute only."""
    if module.path.startswith("node/compute/"):
        return
    for line, name in imports(module.tree):
        if name.split(".")[0] in COMPUTE_ONLY:
            yield f"{module.path}:{line}: {name} may be imported only under node/compute"


def nothing_runs_what_it_reads(module: Module) -> Iterator[str]:
    """No pickle in any dress, no code from text, no shell (state-and-trust S10)."""
    for line, name in imports(module.tree):
        if name.split(".")[0] in BANNED_MODULES:
            yield f"{module.path}:{line}: {name} is banned"
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        name = _name(node.func)
        if name in BANNED_CALLS:
            yield f"{module.path}:{node.lineno}: {name} is banned: it {BANNED_CALLS[name]}"
        for keyword in node.keywords:
            if keyword.arg in ("allow_pickle", "shell") and not _is_false(keyword.value):
                yield f"{module.path}:{node.lineno}: {keyword.arg} is banned"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if f"{node.module}.{alias.name}" in BANNED_CALLS:
                    yield f"{module.path}:{node.lineno}: {node.module}.{alias.name} is banned"


def no_line_of_the_log_hides_what_it_says(module: Module) -> Iterator[str]:
    """A field that is named like a secret is written as "hidden": what people are to read has another name."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOG_CALLS:
            for keyword in node.keywords:
                if keyword.arg in SECRET_FIELDS:
                    yield f"{module.path}:{node.lineno}: field {keyword.arg} is written as hidden"


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def only_drivers_touch_the_world(module: Module) -> Iterator[str]:
    """Machines, codecs and planners take time, randomness and bytes as arguments (design section 2)."""
    if module.is_driver:
        return
    for line, name in imports(module.tree):
        if name.split(".")[0] in IMPURE:
            yield f"{module.path}:{line}: {name} belongs into a driver"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            name = _name(node.func)
            own_randomness = name.startswith("random.") and (name != "random.Random" or not node.args)
            if own_randomness or name in ("os.urandom", "os.getrandom", "nacl.utils.random"):
                yield f"{module.path}:{node.lineno}: {name} draws its own randomness; take it as an argument"
        elif isinstance(node, ast.ImportFrom) and node.module == "random":
            for alias in node.names:
                if alias.name != "Random":
                    yield f"{module.path}:{node.lineno}: random.{alias.name} draws its own randomness"


def only_the_platform_knows_the_system(module: Module) -> Iterator[str]:
    """What a volunteer's computer runs takes from the system only what every system has, but in one place."""
    if module.path.startswith(tuple(KNOWS_THE_SYSTEM)):
        return
    for line, name in imports(module.tree):
        if name.split(".")[0] in POSIX_ONLY:
            yield f"{module.path}:{line}: {name} exists on POSIX systems only (node/platform)"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in POSIX_NAMES:
            yield f"{module.path}:{node.lineno}: {node.attr} exists on POSIX systems only (node/platform)"
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg in POSIX_NAMES:
                    yield f"{module.path}:{node.lineno}: {keyword.arg} works on POSIX systems only"


def no_order_of_sets(module: Module) -> Iterator[str]:
    """Nobody walks a set where the order could matter: it differs from process to process."""
    tree = module.tree
    known = _names_of_sets(tree)

    def is_set(node: ast.expr) -> bool:
        if isinstance(node, ast.Set | ast.SetComp):
            return True
        if isinstance(node, ast.Call):
            if _name(node.func) in ("set", "frozenset"):
                return True
            methods = ("union", "intersection", "difference", "symmetric_difference", "copy")
            return isinstance(node.func, ast.Attribute) and node.func.attr in methods and is_set(node.func.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor):
            return is_set(node.left) or (is_set(node.right) and not isinstance(node.op, ast.Sub))
        return _name(node) in known

    harmless = {
        argument
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and _name(call.func) in _ORDER_FREE
        for argument in call.args
    }
    for node in ast.walk(tree):
        walked: list[ast.expr] = []
        if isinstance(node, ast.For):
            walked = [node.iter]
        elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.DictComp) and node not in harmless:
            walked = [part.iter for part in node.generators]
        elif isinstance(node, ast.Call) and _name(node.func) in ("list", "tuple", "iter", "enumerate", "zip", "map"):
            walked = node.args
        elif isinstance(node, ast.Starred):
            walked = [node.value]
        for iterable in walked:
            if is_set(iterable) and node not in harmless:
                yield f"{module.path}:{iterable.lineno}: walks a set; sort it, or keep a dict"


def _names_of_sets(tree: ast.Module) -> set[str]:
    """Names and attributes (as `self.x`) that are annotated as sets, or are only ever assigned new sets."""
    found: set[str] = set()
    others: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            annotated = ast.unparse(node.annotation).split("[")[0] in ("set", "frozenset")
            (found if annotated else others).add(node.arg if isinstance(node, ast.arg) else _name(node.target))
        elif isinstance(node, ast.Assign):
            value = node.value
            new = isinstance(value, ast.Set | ast.SetComp)
            new = new or (isinstance(value, ast.Call) and _name(value.func) in ("set", "frozenset"))
            (found if new else others).update(_name(target) for target in node.targets)
        elif isinstance(node, ast.For | ast.comprehension | ast.NamedExpr):
            others.add(_name(node.target))
    return found - others - {""}


def has_a_docstring(module: Module) -> Iterator[str]:
    """Every file begins by saying what it is for."""
    if not ast.get_docstring(module.tree):
        yield f"{module.path}: no docstring at its top"


def can_be_held_in_mind(module: Module) -> Iterator[str]:
    """No file grows beyond what a person can hold in mind, and none leaves work for later."""
    lines = module.text.count("\n")
    if lines > LINES_MAX:
        yield f"{module.path}: {lines} lines; split it by idea (at most {LINES_MAX})"
    for word in ("TO" + "DO", "FIX" + "ME"):
        if word in module.text:
            yield f"{module.path}: {word}"


Rule = Callable[[Module], Iterator[str]]
RULES: tuple[Rule, ...] = (
    packages_keep_apart,
    torch_keeps_its_place,
    nothing_runs_what_it_reads,
    no_line_of_the_log_hides_what_it_says,
    only_drivers_touch_the_world,
    only_the_platform_knows_the_system,
    no_order_of_sets,
    has_a_docstring,
    can_be_held_in_mind,
)
"""Held by everything that is shipped."""
TEST_RULES: tuple[Rule, ...] = (packages_keep_apart, has_a_docstring, can_be_held_in_mind)
"""Held by the tests too."""
