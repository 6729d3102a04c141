"""A schedule as text that a person can read and diff, and torch's schedule CSV where routes are the identity.

The text begins with what the orders mean (stages, flows), then one line per node:

    schedule stages=2 samples=2 tokens=2
    flow 0-1 route=0@0,1@1 segments=1,1
    node 0: 0F0 0F0.1 0F1 0B0.1 0F1.1 0B0 0B1.1 0B1
    node 1: 1F0 1F0.1 1B0.1 1F1 1B0 1F1.1 1B1.1 1B1

An operation is `position op [_name] microbatch [.segment] [/slice]`, then, when they are not the default, its
attributes in brackets: `3SEND_act5.1[to=2]`,
`0F3[t=0.5:1.5,mem=4:-2,after=1F2+2CUSTOM_sync1,try=1,skip,steal]`. Lines that are empty or start with `#`
say nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from protocol.base.errors import BadInputError
from protocol.schedule.ir import EVERY, TENSORS, Flow, Hop, Instruction, Key, Op, RouteRules, Schedule

#: Bounds on what a text may ask for, so that a file cannot fill memory.
TEXT_CHARS_MAX = 64_000_000
FLOWS_MAX = 100_000
NODES_MAX = 100_000
STAGES_MAX = 100_000
#: Of all flows together: one line can stand for many microbatches.
PARTS_MAX = 10_000_000
_TOO_MANY_PARTS = f"microbatches, stages, segments and slices make more than {PARTS_MAX} parts"

_NAMED = (Op.SEND, Op.RECV, Op.CUSTOM)
_OPERATION = re.compile(
    r"(?P<position>[0-9]{1,7})(?P<op>[A-Z]{1,6})(?:_(?P<name>[a-z_]{1,40}))?(?P<microbatch>[0-9]{1,7})?"
    r"(?:\.(?P<segment>[0-9]{1,5}))?(?:/(?P<slice>[0-9]{1,5}))?"
)


def parse_key(text: str) -> Key:
    """The key that `str(key)` wrote. Raises `BadInputError` naming the text."""
    match = _OPERATION.fullmatch(text)
    if match is None or match["op"] not in Op.__members__:
        raise BadInputError(f"{text[:60]!r} is not an operation like 0F3 or 2SEND_act5.1")
    op, name = Op[match["op"]], match["name"] or ""
    if (op in _NAMED) != bool(name) or (op in (Op.SEND, Op.RECV) and name not in TENSORS):
        raise BadInputError(f"{text!r}: {op} takes {'one of ' + ', '.join(TENSORS) if op in _NAMED else 'no name'}")
    if (op in (Op.REDUCE, Op.OPT)) != (match["microbatch"] is None):
        raise BadInputError(f"{text!r}: REDUCE and OPT serve a whole stage, every other operation one microbatch")
    return Key(
        op,
        EVERY if match["microbatch"] is None else int(match["microbatch"]),
        int(match["position"]),
        int(match["segment"] or 0),
        int(match["slice"] or 0),
        name,
    )


def write(schedule: Schedule) -> str:
    """The schedule's text form; `read` gives the same schedule back."""
    lines = [" ".join(_heading(schedule))]
    for first, last, flow in _alike(schedule.flows):
        lines.append(_flow_line(first, last, flow))
    for node, order in enumerate(schedule.orders):
        lines.append(f"node {node}: {' '.join(_instruction_text(i) for i in order)}".rstrip())
    return "\n".join(lines) + "\n"


def read(text: str) -> Schedule:
    """The schedule that `text` describes; it is parsed, not yet valid (`schedule_check.check`).

    Raises:
        BadInputError: with the line's number and what is wrong there.
    """
    if len(text) > TEXT_CHARS_MAX:
        raise BadInputError(f"a schedule of more than {TEXT_CHARS_MAX} characters is refused")
    heading: dict[str, str] | None = None
    flows: list[Flow] = []
    orders: list[tuple[Instruction, ...]] = []
    known = parts = 0
    for number, line in enumerate(text.splitlines(), 1):
        word, _, rest = line.strip().partition(" ")
        if not word or word.startswith("#"):
            continue
        try:
            if word == "schedule" and heading is None:
                heading = _attributes(rest.split(), _HEADING_KEYS)
            elif heading is None:
                raise BadInputError("a schedule starts with a line like: schedule stages=4")
            elif word == "flow" and not orders:
                flows.extend(_read_flows(rest))
                if len(flows) > FLOWS_MAX:
                    raise BadInputError(f"more than {FLOWS_MAX} microbatches")
                parts += sum(len(f.route) * len(f.segment_tokens) * len(f.slice_samples) for f in flows[known:])
                known = len(flows)
                if parts > PARTS_MAX:
                    raise BadInputError(_TOO_MANY_PARTS)
            elif word == "node":
                label, _, operations = rest.partition(":")
                if label.strip() != str(len(orders)) or len(orders) >= NODES_MAX:
                    raise BadInputError(f"node {len(orders)} expected, got {label.strip()[:20]!r}")
                orders.append(tuple(_read_instruction(token) for token in operations.split()))
            else:
                raise BadInputError(f"{word[:20]!r} is not a line of a schedule here")
        except BadInputError as error:
            raise BadInputError(f"line {number}: {error}") from error
    if heading is None:
        raise BadInputError("line 1: a schedule starts with a line like: schedule stages=4")
    return _assemble(heading, flows, orders)


_HEADING_KEYS = ("stages", "samples", "tokens", "memory_max", "swaps_max", "visits", "routes_per_node_max")


def _heading(schedule: Schedule) -> Iterator[str]:
    yield f"schedule stages={schedule.stages}"
    rules = schedule.rules
    optional: dict[str, int | None] = {"samples": schedule.samples, "tokens": schedule.tokens}
    if rules is not None:
        optional |= {
            "swaps_max": rules.swaps_max,
            "visits": rules.visits_per_stage,
            "routes_per_node_max": rules.routes_per_node_max,
        }
    yield from (f"{key}={value}" for key, value in optional.items() if value is not None)
    if schedule.memory_max is not None:
        yield f"memory_max={','.join(map(str, schedule.memory_max))}"


def _assemble(heading: dict[str, str], flows: list[Flow], orders: list[tuple[Instruction, ...]]) -> Schedule:
    def number(key: str) -> int | None:
        return _int(heading[key], key) if key in heading else None

    rules = None
    if "swaps_max" in heading:
        rules = RouteRules(
            swaps_max=_int(heading["swaps_max"], "swaps_max"),
            visits_per_stage=number("visits"),
            routes_per_node_max=number("routes_per_node_max"),
        )
    stages = _int(heading.get("stages", ""), "stages")
    if stages > STAGES_MAX:
        raise BadInputError(f"stages: more than {STAGES_MAX}")
    return Schedule(
        stages=stages,
        flows=tuple(flows),
        orders=tuple(orders),
        samples=number("samples"),
        tokens=number("tokens"),
        memory_max=_ints(heading["memory_max"], "memory_max") if "memory_max" in heading else None,
        rules=rules,
    )


def _alike(flows: tuple[Flow, ...]) -> Iterator[tuple[int, int, Flow]]:
    """Runs of consecutive microbatches whose flows differ in nothing else: first, last, the first's flow."""
    start = 0
    for index in range(1, len(flows) + 1):
        first = flows[start]
        if index < len(flows):
            offset = index - start
            other = flows[index]
            if other.microbatch == first.microbatch + offset and _cut(other) == _cut(first):
                continue
        yield first.microbatch, flows[index - 1].microbatch, first
        start = index


def _cut(flow: Flow) -> tuple[object, ...]:
    return (flow.route, flow.segment_tokens, flow.slice_samples, flow.wave, flow.loss_node)


def _flow_line(first: int, last: int, flow: Flow) -> str:
    line = f"flow {first if first == last else f'{first}-{last}'} route="
    line += ",".join(f"{hop.stage}@{hop.node}" for hop in flow.route)
    if flow.segment_tokens != (1,):
        line += f" segments={','.join(map(str, flow.segment_tokens))}"
    if flow.slice_samples != (1,):
        line += f" slices={','.join(map(str, flow.slice_samples))}"
    if flow.wave:
        line += f" wave={flow.wave}"
    if flow.loss_node is not None:
        line += f" loss={flow.loss_node}"
    return line


def _read_flows(rest: str) -> list[Flow]:
    label, *words = rest.split() or [""]
    first, _, last = label.partition("-")
    numbers = range(_int(first, "flow"), _int(last or first, "flow") + 1)
    if not 0 < len(numbers) <= FLOWS_MAX:
        raise BadInputError(f"flow {label[:30]}: not a range of microbatches")
    keys = _attributes(words, ("route", "segments", "slices", "wave", "loss"))
    hops = []
    for hop in keys.get("route", "").split(","):
        stage, _, node = hop.partition("@")
        hops.append(Hop(_int(stage, "route"), _int(node, "route")))
    # One line stands for up to FLOWS_MAX microbatches: what they share is read, and counted, once.
    route, segments = tuple(hops), _ints(keys.get("segments", "1"), "segments")
    slices = _ints(keys.get("slices", "1"), "slices")
    if len(numbers) * len(route) * len(segments) * len(slices) > PARTS_MAX:
        raise BadInputError(_TOO_MANY_PARTS)
    wave = _int(keys.get("wave", "0"), "wave")
    loss_node = _int(keys["loss"], "loss") if "loss" in keys else None
    return [
        Flow(
            microbatch=number,
            route=route,
            segment_tokens=segments,
            slice_samples=slices,
            wave=wave,
            loss_node=loss_node,
        )
        for number in numbers
    ]


def _instruction_text(instruction: Instruction) -> str:
    attributes = []
    if instruction.peer >= 0:
        attributes.append(f"to={instruction.peer}")
    if instruction.start_s is not None and instruction.end_s is not None:
        attributes.append(f"t={instruction.start_s!r}:{instruction.end_s!r}")
    if instruction.memory_start or instruction.memory_end:
        attributes.append(f"mem={instruction.memory_start}:{instruction.memory_end}")
    if instruction.after:
        attributes.append(f"after={'+'.join(map(str, instruction.after))}")
    if instruction.attempt:
        attributes.append(f"try={instruction.attempt}")
    attributes += [word for word, on in (("skip", instruction.skippable), ("steal", instruction.stealable)) if on]
    return f"{instruction.key}[{','.join(attributes)}]" if attributes else str(instruction.key)


def _read_instruction(token: str) -> Instruction:
    operation, bracket, rest = token.partition("[")
    key = parse_key(operation)
    if not bracket:
        return Instruction(key=key)
    if not rest.endswith("]"):
        raise BadInputError(f"{token[:60]!r}: no closing bracket")
    words = _attributes(rest[:-1].split(","), ("to", "t", "mem", "after", "try", "skip", "steal"))
    start, end = _pair(words["t"], "t") if "t" in words else (None, None)
    memory = re.fullmatch(r"(-?[0-9]{1,18}):(-?[0-9]{1,18})", words.get("mem", "0:0"))
    if memory is None:
        raise BadInputError(f"mem: {words['mem'][:40]!r} is not two whole numbers like 4:-2")
    return Instruction(
        key=key,
        peer=_int(words["to"], "to") if "to" in words else -1,
        after=tuple(map(parse_key, words["after"].split("+"))) if "after" in words else (),
        start_s=start,
        end_s=end,
        memory_start=int(memory[1]),
        memory_end=int(memory[2]),
        attempt=_int(words.get("try", "0"), "try"),
        skippable="skip" in words,
        stealable="steal" in words,
    )


def _attributes(words: list[str], known: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in known or key in found:
            raise BadInputError(f"{key[:30]!r}: expected each of {', '.join(known)} at most once")
        found[key] = value
    return found


def _int(text: str, key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise BadInputError(f"{key}: {text[:30]!r} is not a whole number of at least 0")
    return int(text)


def _ints(text: str, key: str) -> tuple[int, ...]:
    return tuple(_int(part, key) for part in text.split(","))


def _pair(text: str, key: str) -> tuple[float, float]:
    first, _, second = text.partition(":")
    try:
        pair = float(first), float(second)
    except ValueError:
        pair = (math.inf, math.inf)
    if not (math.isfinite(pair[0]) and math.isfinite(pair[1])):
        raise BadInputError(f"{key}: {text[:40]!r} is not two numbers like 0.5:1.5")
    return pair
