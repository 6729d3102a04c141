"""Pictures hold every operation, traces open, and the committed page is what its command makes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from coordinator.commands.gallery import PICTURED, drawings, replaced
from coordinator.commands.plan import schedule
from coordinator.planning.schedules import KNOWN, known_design
from coordinator.planning.simulator.pictures import chrome_trace, legend, memory_steps, svg, terminal
from protocol.base.errors import BadInputError
from protocol.schedule.check import check
from protocol.schedule.text import read

COORDINATOR = Path(__file__).parents[4] / "coordinator"
TIMELINE = known_design("v-shape", 4, 8).timeline()


def test_the_svg_has_a_bar_for_every_operation_inside_its_frame() -> None:
    """Well-formed, one titled bar each, none wider than the picture."""
    root = ElementTree.fromstring(svg(TIMELINE, 'a "title" <&>', 800))
    space = "{http://www.w3.org/2000/svg}"
    bars = [r for r in root.iter(f"{space}rect") if r.find(f"{space}title") is not None]
    assert len(bars) == len(TIMELINE.graph)
    assert all(float(b.attrib["x"]) >= 0 for b in bars)
    assert all(float(b.attrib["x"]) + float(b.attrib["width"]) <= 800 for b in bars)


def test_almost_every_bar_says_whose_it_is_and_the_axis_has_times() -> None:
    """Segments as narrow as in the gallery keep the microbatch's number; times are round and carry their unit."""
    timeline = known_design("seq1f1b", 4, 8).timeline()
    drawn = svg(timeline, "t", 640, row_name="stage", unit="s")
    root = ElementTree.fromstring(drawn)
    numbers = [t for t in root.iter("{http://www.w3.org/2000/svg}text") if re.fullmatch(r"\d(\.\d)?", t.text or "")]
    assert len(numbers) == len(timeline.graph)
    for text in ("stage 3", ">0 s<", ">10 s<", f">{timeline.makespan_s:.4g} s<"):
        assert text in drawn


def test_the_terminal_has_a_line_for_every_node() -> None:
    """As wide as asked for; without colour the letters say which operation it is."""
    plain = terminal(TIMELINE, 80, colour=False).splitlines()
    assert len(plain) == 4 and all(len(line) == 85 for line in plain)
    assert plain[0].startswith("   0 F0")
    coloured = re.sub(r"\x1b\[[0-9;]*m", "", terminal(TIMELINE, 80))
    assert all(len(line) == 85 for line in coloured.splitlines())


def test_the_trace_has_every_operation_once_and_the_memory() -> None:
    """Chrome's format: complete events in microseconds on a thread per node, a counter per node."""
    events = json.loads(chrome_trace(TIMELINE, "run"))["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    assert len(bars) == len(TIMELINE.graph)
    assert max(event["ts"] + event["dur"] for event in bars) == pytest.approx(25.5e6)
    assert {event["tid"] for event in bars} == {0, 1, 2, 3}
    held = [event["args"]["held"] for event in events if event["ph"] == "C" and event["name"] == "memory of node 0"]
    assert max(held) == max(TIMELINE.peaks()) and held[-1] == 0


def test_memory_over_time_starts_and_ends_at_nothing() -> None:
    """Steps ascend in time and end at zero; their highest is the peak."""
    steps = memory_steps(TIMELINE, 2)
    assert steps[0] == (0.0, 0.0)
    assert steps[-1][1] == pytest.approx(0)
    assert [at for at, _ in steps] == sorted(at for at, _ in steps)
    assert max(held for _, held in steps) == pytest.approx(TIMELINE.peaks()[2])


def test_the_committed_page_is_what_its_command_makes() -> None:
    """Six pictures and the table; run `barnraise schedule gallery coordinator` when this fails."""
    page = (COORDINATOR / "README.md").read_text()
    assert replaced(page) == page
    made = drawings()
    assert len(made) == len(PICTURED) == 6
    for name, text in made.items():
        assert (COORDINATOR / "pictures" / f"{name}.svg").read_text() == text, name
    with pytest.raises(BadInputError, match=r"README\.md"):
        replaced("no marks")


def test_the_gallery_starts_from_nothing(tmp_path: Path) -> None:
    """In an empty folder it writes a page of its own."""
    result = CliRunner().invoke(schedule, ["gallery", str(tmp_path / "new")], catch_exceptions=False)
    assert result.exit_code == 0
    assert "| seq1f1b-i |" in (tmp_path / "new/README.md").read_text()
    assert len(list((tmp_path / "new/pictures").iterdir())) == 6


@pytest.mark.parametrize("name", list(KNOWN))
def test_show_prints_and_writes(name: str, tmp_path: Path) -> None:
    """Every known schedule: its costs, its picture, its trace, and a text form that checks."""
    files = ["--svg", str(tmp_path / "a.svg"), "--trace", str(tmp_path / "a.json")]
    result = CliRunner().invoke(schedule, ["show", name, *files, "--link", "0.1"], catch_exceptions=False)
    assert "makespan" in result.stdout and "lower bound" in result.stdout
    assert (tmp_path / "a.svg").stat().st_size > 1000 and json.loads((tmp_path / "a.json").read_text())
    check(read(CliRunner().invoke(schedule, ["show", name, "--text"], catch_exceptions=False).stdout))


MINE = """
from coordinator.planning.schedules.design import Design

def design(stages, microbatches):
    return Design.of(stages, microbatches).order("forward")
"""


def test_show_tells_forwards_from_backwards_without_colour() -> None:
    """Piped, or with NO_COLOR: letters stand for operations, and a line says what they mean."""
    wide = {"COLUMNS": "126"}  # whoever runs the tests may have a terminal of any width
    lines = CliRunner().invoke(schedule, ["show", "v-shape"], env=wide, catch_exceptions=False).stdout.splitlines()
    assert "\x1b" not in "".join(lines) and "F0" in lines[1] and "i0" in lines[1]
    assert "F forward, I input gradient, W weight gradient, small: further stages, · waiting" in lines[5]
    assert "\x1b[30;44m \x1b[0m forward" in legend(TIMELINE)


def test_show_takes_a_file_of_ones_own(tmp_path: Path) -> None:
    """A Python file runs here and gives explicit orders."""
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    result = CliRunner().invoke(
        schedule, ["show", str(mine), "--stages", "2", "--microbatches", "3"], catch_exceptions=False
    )
    assert "mine.py, 2 nodes, 3 microbatches" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing"], "NAME: 'nothing'"),
        (["/nowhere/gone.py"], "/nowhere/gone.py: no such file"),
        (["1f1b", "--svg", "/nowhere/a.svg"], "/nowhere/a.svg: cannot be written: No such file or directory"),
        (["1f1b", "--stages", "0"], "stages: 0"),
        (["1f1b", "--forward", "nan"], "--forward: nan"),
        (["1f1b", "--forward", "1e308"], "--forward: 1e+308 is not between 0 and 1e+12"),
        (["1f1b", "--link", "-1"], "--link: -1"),
        (["1f1b", "--weight-share", "2"], "--weight-share: 2"),
        (["1f1b", "--microbatches", "99999999"], "--microbatches"),
        (["interleaved-1f1b", "--microbatches", "6"], "microbatches: interleaved"),
        (["seq1f1b-i", "--stages", "3"], "segments: 4 neither divides"),
    ],
)
def test_show_refuses_by_name(arguments: list[str], complaint: str) -> None:
    """One sentence that names the option or the number."""
    result = CliRunner().invoke(schedule, ["show", *arguments])
    assert isinstance(result.exception, BadInputError)
    assert complaint in str(result.exception)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("def design(stages): pass\n", "TypeError"),
        ("x = 1\n", "no function design"),
        ("def design(stages, microbatches): return 7\n", "not a Design"),
        ("raise RuntimeError('no')\n", "RuntimeError: no"),
    ],
)
def test_show_says_what_is_wrong_with_a_file(tmp_path: Path, text: str, complaint: str) -> None:
    """The file's own mistakes, as sentences."""
    mine = tmp_path / "mine.py"
    mine.write_text(text)
    result = CliRunner().invoke(schedule, ["show", str(mine)])
    assert isinstance(result.exception, BadInputError) and complaint in str(result.exception)


def test_a_file_whose_order_deadlocks_shows_the_cycle(tmp_path: Path) -> None:
    """Exit 2 and who waits for whom."""
    mine = tmp_path / "mine.py"
    mine.write_text(MINE.replace('.order("forward")', '.place("V-shape").in_flight_total(lambda node: 1)'))
    result = CliRunner().invoke(schedule, ["show", str(mine)])
    assert isinstance(result.exception, BadInputError)
    assert "deadlock" in str(result.exception) and " waits for " in str(result.exception)
