"""Tests of `node.compute.devices`: which device is meant, and what a small one does when it is full."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from node.compute.device_performer import DevicePerformer
from node.compute.devices import device as device_module
from node.compute.devices import works
from node.compute.devices.choice import DeviceChoice
from node.compute.devices.device import (
    Accelerator,
    Device,
    SmallDevice,
    find_device,
    open_device,
    why_no_accelerator,
)
from node.machine.jobs import SetUpDevice
from protocol.base.errors import BadInputError, RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.base.machine import Computed
from protocol.run.course import Chunk, Course
from protocol.run.plan import Plan, ServerPlan, StagePlan
from tests.node.compute.small import VOCABULARY, small_run

HAS_ACCELERATOR = torch.accelerator.is_available()
CONFIG = small_run()
STAGE = StagePlan(servers=(ServerPlan(node=NodeId("front"), role="both", addresses=()),))
COURSE = Course((Chunk(0, CONFIG.block_count, 0),), ((0,),))
SET_UP = SetUpDevice(CONFIG, VOCABULARY, Plan(1, 1, -1, (STAGE,), course=COURSE), 0)


@pytest.mark.parametrize(
    ("text", "kind", "index"), [("auto", "auto", 0), ("CPU", "cpu", 0), ("cuda:3", "cuda", 3), (" mps", "mps", 0)]
)
def test_words_of_the_option(text: str, kind: str, index: int) -> None:
    """Kinds in any case, and a number where there may be several."""
    found = DeviceChoice.parse(text)
    assert (found.kind, found.index) == (kind, index)
    assert DeviceChoice.parse(str(found)) == found


@pytest.mark.parametrize("text", ["gpu", "", "cuda:", "cuda:x", "cuda:-1", "cpu:1", "auto:0", "small:1e3", "cuda:1,2"])
def test_other_words_are_refused_by_name(text: str) -> None:
    """One sentence that names the option and what was written."""
    with pytest.raises(BadInputError, match="--device " + text.replace("+", ".")):
        DeviceChoice.parse(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cuda:0,1", "cuda:0 cuda:1"), ("cuda, xpu:1,2", "cuda:0 xpu:1 xpu:2"), ("small:64,64", "small:64 small:64"),
        ("auto", "auto"),
    ],
)  # fmt: skip
def test_several_devices_with_commas(text: str, found: str) -> None:
    """A number alone is one more of the kind before it. What is shown can be written again, as a service does."""
    choices = DeviceChoice.parse_all(text)
    assert " ".join(map(str, choices)) == found
    assert DeviceChoice.parse_all(",".join(map(str, choices))) == choices


@pytest.mark.parametrize(
    "text", ["cuda:0,0", "cuda,cuda:0", "cuda:0,", "0,1", "auto,cpu", "cpu,cpu", "mps,1", "small:8" + ",8" * 8]
)
def test_lists_of_devices_that_cannot_be_are_refused_by_name(text: str) -> None:
    """One card twice, what can only be there once, nothing behind a comma, more than a computer holds."""
    with pytest.raises(BadInputError, match="--device "):
        DeviceChoice.parse_all(text)


def test_auto_is_the_processor_where_there_is_nothing_better_and_says_why() -> None:
    """An owner with a GPU that torch cannot use learns it from the first screen."""
    device = open_device(DeviceChoice())
    assert device.is_accelerator == HAS_ACCELERATOR
    assert bool(why_no_accelerator()) != HAS_ACCELERATOR
    assert device.total_bytes() >= device.free_bytes() > device.usable_bytes() > 0 and device.label


@pytest.mark.skipif(HAS_ACCELERATOR, reason="an accelerator is here")
@pytest.mark.parametrize("text", ["cuda", "cuda:1", "xpu", "mps"])
def test_a_device_that_is_not_there_is_named_with_what_is(text: str) -> None:
    """Rather than computing on something else in silence."""
    with pytest.raises(BadInputError, match=f"--device {text}.*there is no accelerator.*torch .* is built for"):
        find_device(DeviceChoice.parse(text))


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Two cards are here; what each says when it is tried stands in this table, and nothing where it works."""
    says: dict[str, str] = {}

    def compute(where: torch.device) -> None:
        if where.type != "cpu" and (words := says.get(str(where))):
            raise RuntimeError(words)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(works, "compute_a_little", compute)
    works.why_not.cache_clear()
    yield says
    works.why_not.cache_clear()


NO_KERNELS = "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be late."


def test_auto_is_the_first_card_that_works(cards: dict[str, str]) -> None:
    """One that this torch has no kernels for was taken, and no job could be done on it."""
    assert find_device(DeviceChoice()) == torch.device("cuda:0") and not why_no_accelerator()
    works.why_not.cache_clear()
    cards["cuda:0"] = NO_KERNELS
    assert find_device(DeviceChoice()) == torch.device("cuda:1")
    assert find_device(DeviceChoice("cuda")) == torch.device("cuda:0"), "who names a card gets that one"
    assert why_no_accelerator() == f"cuda:0 is here and does not work: {NO_KERNELS.splitlines()[0]}"


def test_auto_is_the_processor_where_no_card_works_and_says_why(cards: dict[str, str]) -> None:
    """Each by its own words."""
    cards.update({"cuda:0": NO_KERNELS, "cuda:1": "CUDA error: initialization error"})
    assert open_device(DeviceChoice()).name == "cpu"
    assert why_no_accelerator().count("does not work") == 2 and "initialization error" in why_no_accelerator()


def test_a_card_that_others_have_filled_works(cards: dict[str, str]) -> None:
    """A game ends: the card is taken, and its work waits for room."""
    cards["cuda:0"] = "CUDA error: out of memory"
    assert find_device(DeviceChoice()) == torch.device("cuda:0") and not why_no_accelerator()


def test_a_small_device_is_full_where_it_says() -> None:
    """Claims up to its size pass, one beyond fails as torch's own, and what is released can be claimed again."""
    device = open_device(DeviceChoice.parse("small:1"))
    assert isinstance(device, SmallDevice) and device.is_accelerator and device.free_bytes() == 1 << 20
    device.claim(1 << 19)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory") as caught:
        device.claim((1 << 19) + 1)
    assert device.is_out_of_memory(caught.value) and not device.is_out_of_memory(ValueError("out of luck"))
    device.claim(1 << 19)
    assert device.free_bytes() == 0
    device.release(1 << 20)
    assert device.free_bytes() == 1 << 20 and device.peak_bytes() == 1 << 20


class AnswersNothing(SmallDevice):
    """Its driver has something to say each time that it is asked."""

    def __init__(self, says: str) -> None:
        super().__init__(1 << 20)
        self._says = says

    def synchronize(self) -> None:
        raise RuntimeError(self._says)


@pytest.mark.parametrize(
    "words",
    [
        "CUDA out of memory. Tried to allocate 20.00 MiB",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    ],
)
def test_want_of_memory_is_known_in_every_librarys_words(words: str) -> None:
    """Of torch, and of what takes memory beside it; the device is well after it."""
    device, error = SmallDevice(1 << 20), RuntimeError(words)
    assert device.is_out_of_memory(error) and not device.is_lost(error)


def test_a_device_is_lost_where_its_driver_says_so_at_once_or_when_it_is_asked() -> None:
    """An error that stays with the context; not one of a job's data, and never on a processor."""
    launch, other = RuntimeError("CUDA error: unspecified launch failure"), RuntimeError("no stage was set up")
    well = SmallDevice(1 << 20)
    assert well.is_lost(launch) and not well.is_lost(other)
    assert AnswersNothing("the device is gone").is_lost(other)
    assert AnswersNothing("an illegal memory access").is_lost(torch.OutOfMemoryError("out of memory"))
    assert not AnswersNothing("out of memory").is_lost(other), "what a kernel needs to be loaded is memory too"
    for about_data in (BadInputError("a wrong word"), ValueError("not finite"), RemoteProtocolError("form", "short")):
        assert not AnswersNothing("never asked").is_lost(about_data)
    assert not Device(torch.device("cpu")).is_lost(launch)


def test_a_small_device_fails_where_it_is_told_to() -> None:
    """As fragmentation does: a claim fails although there was room, and the next one passes."""
    device = SmallDevice(1 << 20, fail_claims=(2,))
    device.claim(10)
    with pytest.raises(torch.OutOfMemoryError):
        device.claim(10)
    device.claim(10)
    assert device.used_bytes() == 20


def test_an_owners_cap_bounds_what_is_free() -> None:
    """Whatever the machine has, no more than the owner said is planned with."""
    device = Device(torch.device("cpu"), cap_bytes=1 << 20)
    device.claim(1 << 19)
    assert device.free_bytes() == 1 << 19
    device.claim(1 << 20)
    assert device.free_bytes() == 0
    small = SmallDevice(1 << 20, cap_bytes=1 << 10)
    small.claim(1 << 9)
    assert small.free_bytes() == 1 << 9
    with pytest.raises(torch.OutOfMemoryError, match="512 of 1,024 bytes are taken"):
        small.claim(1 << 10)


class FakeCuda:
    """Of torch's module of a kind of device what is asked about memory; a card of 1,000 bytes, 600 of them others'."""

    def __init__(self) -> None:
        self.fractions: list[float] = []

    def mem_get_info(self, where: torch.device) -> tuple[int, int]:
        return 300, 1000

    def memory_reserved(self, where: torch.device) -> int:
        return 100

    def get_device_properties(self, where: torch.device) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1000)

    def set_per_process_memory_fraction(self, fraction: float, where: torch.device) -> None:
        self.fractions.append(fraction)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    monkeypatch.setattr(torch, "get_device_module", lambda where: made)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(device_module, "_repeats_itself", lambda: None)
    return made


@pytest.mark.parametrize(("cap_bytes", "fraction"), [(None, 0.4), (250, 0.25), (900, 0.4), (0, 0.0)])
def test_an_accelerator_takes_no_more_than_was_planned_with(
    fake_cuda: FakeCuda, cap_bytes: int | None, fraction: float
) -> None:
    """Of the owner's cap and of what it can have at its set-up. (Both were counted with, and nothing held them: torch's
    cache grew beyond the cap, and on Windows the driver went on in the system's memory.)"""
    device = Accelerator(torch.device("cuda", 0), cap_bytes)
    assert fake_cuda.fractions == [], "what it can have is known when it is set up"
    device.keep_within()
    assert fake_cuda.fractions == [fraction]


@pytest.fixture
def _numerics() -> Iterator[None]:
    """Torch's settings as they were."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction)
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction = before
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_numerics")
def test_no_wish_of_somebody_elses_changes_how_a_card_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment or a library has said before does not count: all members round alike."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    matmul.allow_tf32 = cudnn.allow_tf32 = matmul.allow_bf16_reduced_precision_reduction = True
    device_module._repeats_itself()
    assert not matmul.allow_tf32 and not cudnn.allow_tf32 and not matmul.allow_bf16_reduced_precision_reduction
    assert torch.get_float32_matmul_precision() == "highest"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and torch.are_deterministic_algorithms_enabled()


def test_each_set_up_bounds_the_device_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others have taken or left meanwhile counts."""
    said = []
    monkeypatch.setattr(SmallDevice, "keep_within", lambda self: said.append(self.free_bytes()))
    performer = DevicePerformer(1, DeviceChoice.parse("small:64"))
    for _ in range(2):
        assert isinstance(performer.perform(SET_UP, {}).fact, Computed)
    assert said == [64 << 20] * 2, "the stage before has gone by then"


def test_tensors_come_to_a_device() -> None:
    """Whole numbers keep their type; floats take the device's."""
    for device in (open_device(DeviceChoice()), SmallDevice(1 << 20)):
        x = torch.tensor([1.0, 2.5])
        there = device.upload(x, torch.bfloat16)
        assert there.dtype == torch.bfloat16 and there.device.type == device.torch_device.type
        assert torch.equal(there.cpu().float(), x)
        assert device.upload(torch.tensor([3]), torch.bfloat16).dtype == torch.int64
