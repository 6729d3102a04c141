"""The check of a device: rehearsed on a small one, and on a GPU where there is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from node.compute.devices.choice import DeviceChoice
from node.compute.devices.device import open_device
from node.compute.gpu_check import BILLION, TINY, check, main

HAS_CUDA = torch.cuda.is_available()


@pytest.mark.slow
def test_the_check_rehearses_on_a_small_device(tmp_path: Path) -> None:
    """Every figure is there; a full device is survived; a device that is the processor gives its very results."""
    out = tmp_path / "found.json"
    done = CliRunner().invoke(main, ["--device", "small:64", "--rehearsal", "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert found["rehearsal"] and found["recovery"]["ran_out"] and found["recovery"]["went_on"]
    for dtype, most in (("bf16", 12), ("fp32", 20)):
        memory = found["memory"][dtype]
        assert memory["counted_graph_bytes"] == memory["measured_graph_bytes"] > 0
        # What is claimed has room for a graph that nobody has kept, which the tasks that are measured do not make.
        assert memory["measured_peak_bytes"] == memory["counted_peak_bytes"] + memory["counted_graph_bytes"]
        assert memory["counted_bytes_per_parameter"] == most
    assert all(all(same.values()) for same in found["repeats"].values()) and all(found["forms_agree"].values())
    assert found["speed"]["ours_over_torch"] > 0
    for numbers in found["tolerance"].values():
        assert numbers == {"output": 0.0, "input_gradient": 0.0, "codes_that_differ": 0.0}


@pytest.mark.skipif(HAS_CUDA, reason="a CUDA device is here")
def test_without_a_gpu_the_check_says_so(tmp_path: Path) -> None:
    """Exit code 2, a sentence, and no figures that could be taken for a GPU's."""
    done = CliRunner().invoke(main, ["--out", str(tmp_path / "found.json")])
    assert done.exit_code == 2 and "Nothing was measured" in done.output and not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="NO GPU HERE: nothing of what needs one was tried")
def test_a_gpu_is_as_fast_and_as_exact_as_it_should_be(tmp_path: Path) -> None:
    """A volunteer reaches half of torch's own speed, 12 bytes a parameter, recovers, and stays near the processor."""
    choice = DeviceChoice("cuda")
    device = open_device(choice)
    large = device.total_bytes() > 24 << 30
    found = check(device, choice, BILLION if large else TINY, tmp_path)
    (tmp_path / "gpu-check.json").write_text(json.dumps(found, indent=1) + "\n")  # beside the trace, as the command's
    assert found["recovery"]["ran_out"] and found["recovery"]["went_on"]
    assert found["tolerance"]["fp32"]["output"] < 1e-4 and found["tolerance"]["bf16"]["output"] < 2e-2
    assert all(same["ours"] for same in found["repeats"].values()) and all(found["forms_agree"].values())
    assert found["memory"]["bf16"]["counted_bytes_per_parameter"] == 12
    for memory in found["memory"].values() if large else ():
        assert memory["measured_graph_bytes"] == pytest.approx(memory["counted_graph_bytes"], rel=0.1)
        assert memory["measured_peak_bytes"] == pytest.approx(memory["counted_peak_bytes"], rel=0.1)
    if large:
        assert found["speed"]["ours_over_torch"] >= 0.5
