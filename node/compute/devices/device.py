"""Devices behind one face: the processor, accelerators of torch, and a small device for trying what happens when memory
runs out.

A device knows how much memory is free, takes tensors to itself and back, and says when an error means "out of memory".
Everything else about it is torch's business. Used from the thread that owns it.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import torch
from torch import Tensor

from node.compute.devices import works
from node.compute.devices.choice import DeviceChoice
from protocol.base.errors import BadInputError, ProtocolError

RESERVE_SHARE = 0.1
"""Of free memory that is left alone: allocators need room between blocks, and the owner's screen lives there too."""


class Device:
    """The processor, with the machine's memory; the face that all devices have.

    Args:
        torch_device: where torch puts tensors.
        cap_bytes: the most that this process may take of it, as the owner said; None for all that is free.
    """

    def __init__(self, torch_device: torch.device, cap_bytes: int | None = None) -> None:
        self.torch_device = torch_device
        self.cap_bytes = cap_bytes
        self._claimed = self._peak_bytes = 0

    @property
    def name(self) -> str:
        """As torch and `--device` say it: `cpu`, `cuda:0`."""
        return str(self.torch_device)

    @property
    def label(self) -> str:
        """For people: what it is, and its memory."""
        return f"{_processor()}, {self.total_bytes() / 2**30:.0f} GB of memory"

    @property
    def is_accelerator(self) -> bool:
        return False

    @property
    def gpu(self) -> str:
        """How NVIDIA's driver calls it (GPU-…), for its sensors; empty: it is none of that driver's."""
        return ""

    @property
    def fuses_norms(self) -> bool:
        """Whether RMSNorm is one kernel there, which keeps nothing but its input."""
        return self.torch_device.type == "cuda"

    # ---- memory ------------------------------------------------------------------------------------------------------

    def total_bytes(self) -> int:
        return int(psutil.virtual_memory().total)

    def free_bytes(self) -> int:
        """What this process may still take: of what is free, and of the owner's cap."""
        free = self._system_free_bytes()
        return free if self.cap_bytes is None else max(0, min(free, self.cap_bytes - self.used_bytes()))

    def usable_bytes(self) -> int:
        """`free_bytes` without the reserve: what plans may count on."""
        return int(self.free_bytes() * (1 - RESERVE_SHARE))

    def used_bytes(self) -> int:
        """What this process holds there, by claims."""
        return self._claimed

    def peak_bytes(self) -> int:
        """The most that this process has held there since `forget_peak`."""
        return self._peak_bytes

    def forget_peak(self) -> None:
        self._peak_bytes = self._claimed

    def _system_free_bytes(self) -> int:
        return int(psutil.virtual_memory().available)

    def claim(self, byte_count: int) -> None:
        """Says that so many bytes are about to be taken. Raises `torch.OutOfMemoryError` where they are too many."""
        self._claimed += byte_count
        self._peak_bytes = max(self._peak_bytes, self._claimed)

    def release(self, byte_count: int) -> None:
        """Gives a claim back."""
        self._claimed -= byte_count
        assert self._claimed >= 0, "more released than claimed"

    def keep_within(self) -> None:
        """From now on this process takes no more there than the owner's cap, and than it can have now; what it would
        take beyond fails for want of memory. Said at each set-up: what is planned is counted then."""

    def tidy(self) -> None:
        """Gives cached blocks back to the system, after something large has gone."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return works.is_out_of_memory(error)

    def is_lost(self, error: BaseException) -> bool:
        """Whether nothing can be computed there any more by this process, after a job that has failed with `error`.

        An illegal access, a failed launch or a driver that was reset stays with an accelerator's context: each later
        call in the same process fails as well, until the process ends. What is wrong with a job's data, or is only a
        lack of memory, does no such harm.
        """
        if not self.is_accelerator or isinstance(error, (ValueError, ProtocolError)):
            return False
        if works.is_of_the_driver(error):
            return True
        try:
            self.synchronize()
        except RuntimeError as left:
            return not self.is_out_of_memory(left)
        return False

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def upload(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor on the device, in `dtype` where that is given and the tensor holds floats."""
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=self.torch_device, dtype=wanted)

    def synchronize(self) -> None:
        """Waits until everything that was started is done."""


class Accelerator(Device):
    """A GPU or its like, through `torch.accelerator`."""

    def __init__(self, torch_device: torch.device, cap_bytes: int | None = None) -> None:
        super().__init__(torch_device, cap_bytes)
        if torch_device.type == "cuda":
            _repeats_itself()
        self._module = torch.get_device_module(torch_device)
        self._pins = torch_device.type in ("cuda", "xpu")
        if torch_device.type != "mps":
            torch.accelerator.set_device_index(torch_device.index or 0)

    @property
    def label(self) -> str:
        named = getattr(self._module, "get_device_name", None)
        name = named(self.torch_device) if named is not None else "Apple GPU"
        return f"{name}, {self.total_bytes() / 2**30:.1f} GB ({self.name})"

    @property
    def is_accelerator(self) -> bool:
        return True

    @property
    def gpu(self) -> str:
        if self.torch_device.type != "cuda":
            return ""
        uuid = getattr(self._module.get_device_properties(self.torch_device), "uuid", "")
        return f"GPU-{str(uuid).removeprefix('GPU-')}" if uuid else ""

    def total_bytes(self) -> int:
        if self.torch_device.type == "mps":
            return int(self._module.recommended_max_memory())
        return int(self._module.get_device_properties(self.torch_device).total_memory)

    def _system_free_bytes(self) -> int:
        if self.torch_device.type == "mps":
            return self.total_bytes() - int(self._module.driver_allocated_memory())
        free, _total = self._module.mem_get_info(self.torch_device)
        # What torch caches and does not use is free for us.
        return int(free) + self._cached_bytes() - self.used_bytes()

    def _cached_bytes(self) -> int:
        return int(self._module.memory_reserved(self.torch_device))

    def used_bytes(self) -> int:
        if self.torch_device.type == "mps":
            return int(self._module.current_allocated_memory())
        return int(self._module.memory_allocated(self.torch_device))

    def peak_bytes(self) -> int:
        """MPS keeps no peak."""
        return 0 if self.torch_device.type == "mps" else int(self._module.max_memory_allocated(self.torch_device))

    def forget_peak(self) -> None:
        if self.torch_device.type != "mps":
            self._module.reset_peak_memory_stats(self.torch_device)

    def keep_within(self) -> None:
        # Of CUDA's devices: a driver on Windows does not refuse what is beyond the card's memory, it takes the
        # system's, at a tenth of the speed and at the cost of everything else on the owner's screen.
        if self.torch_device.type != "cuda":
            return
        free, _total = self._module.mem_get_info(self.torch_device)
        most = int(free) + self._cached_bytes()
        if self.cap_bytes is not None:
            most = min(most, self.cap_bytes)
        self._module.set_per_process_memory_fraction(min(1.0, most / self.total_bytes()), self.torch_device)

    def tidy(self) -> None:
        self._module.empty_cache()

    def upload(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if wanted.itemsize < tensor.dtype.itemsize:
            tensor = tensor.to(wanted)  # fewer bytes over the bus
        if self._pins and tensor.device.type == "cpu":
            # A copy out of pinned memory runs beside the kernels that were queued before it.
            return tensor.pin_memory().to(self.torch_device, non_blocking=True).to(wanted)
        return tensor.to(self.torch_device).to(wanted)

    def synchronize(self) -> None:
        self._module.synchronize()


class SmallDevice(Device):
    """The processor with little memory, and errors on demand: what a GPU does, repeatably.

    Memory is what was claimed; a claim beyond it fails as an allocation on a GPU would.

    Args:
        memory_bytes: the device's whole memory.
        fail_claims: the numbers (from 1) of claims that fail although there was room, as fragmentation makes them.
        cap_bytes: as for `Device`; a claim beyond it fails, too.
    """

    def __init__(
        self,
        memory_bytes: int,
        fail_claims: tuple[int, ...] = (),
        cap_bytes: int | None = None,
    ) -> None:
        super().__init__(torch.device("cpu"), cap_bytes)
        self._room_bytes = memory_bytes if cap_bytes is None else min(memory_bytes, cap_bytes)
        self._memory_bytes = memory_bytes
        self._fail_claims = fail_claims
        self.claims = 0

    @property
    def name(self) -> str:
        return f"small:{self._memory_bytes >> 20}"

    @property
    def label(self) -> str:
        return f"a small device for trying, {self._memory_bytes / 2**20:.0f} MB, on {_processor()}"

    @property
    def is_accelerator(self) -> bool:
        return True

    def total_bytes(self) -> int:
        return self._memory_bytes

    def _system_free_bytes(self) -> int:
        return max(0, self._memory_bytes - self._claimed)

    def claim(self, byte_count: int) -> None:
        self.claims += 1
        if self._claimed + byte_count > self._room_bytes or self.claims in self._fail_claims:
            raise torch.OutOfMemoryError(
                f"small device out of memory: {self._claimed:,} of {self._room_bytes:,} bytes are taken,"
                f" {byte_count:,} more are wanted"
            )
        super().claim(byte_count)


def _repeats_itself() -> None:
    """Makes CUDA give the same bits for the same task, as a processor does: whoever does a task again, and the
    reference on the same kind of device, must get its very gradient. Without it the backward of fused attention adds up
    in the order in which its blocks end. For the whole process, before it uses the device.

    Whatever changes bits is set outright, also to what it is by default: a variable of somebody's environment, or a
    library's wish, must not make one member round otherwise than all others. So products of fp32 never go by TF32
    (10 bits of 23), and a product in bf16 that is cut in parts has these added up in fp32. That costs a little time,
    and its bits are others than those of torch by itself: equal cards agree because every member says it.

    (cuBLAS: "Results reproducibility"; torch: "Reproducibility", "TensorFloat-32", "Reduced precision reduction".)
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def find_device(choice: DeviceChoice) -> torch.device:
    """What torch calls the device that the owner chose. `auto` is the first accelerator that works, which is tried (it
    takes some memory there); another one is not opened.

    Raises `BadInputError` with what there is instead.
    """
    if choice.kind in ("small", "cpu"):
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator(check_available=True)
    if choice.kind == "auto":
        return next((where for where in _accelerators() if not works.why_not(where)), torch.device("cpu"))
    if found is None or found.type != choice.kind:
        there = "no accelerator that this torch can use" if found is None else f"only {found.type}"
        raise BadInputError(f"--device {choice}: there is {there} here ({_torch_build()}); use auto or cpu")
    count = torch.accelerator.device_count()
    if choice.index >= count:
        raise BadInputError(f"--device {choice}: there are {count} here, numbered from 0")
    return _numbered(found.type, choice.index)


def open_device(choice: DeviceChoice, cap_bytes: int | None = None) -> Device:
    """The device that the owner chose. Raises `BadInputError` as `find_device` does."""
    if choice.kind == "small":
        return SmallDevice(choice.memory_bytes, cap_bytes=cap_bytes)
    where = find_device(choice)
    return Device(where, cap_bytes) if where.type == "cpu" else Accelerator(where, cap_bytes)


def _numbered(kind: str, index: int) -> torch.device:
    return torch.device(kind) if kind == "mps" else torch.device(kind, index)


def _accelerators() -> list[torch.device]:
    """All that torch can see, in their order."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return []
    count = 1 if found.type == "mps" else torch.accelerator.device_count()
    return [_numbered(found.type, index) for index in range(count)]


def passed_over() -> str:
    """The accelerators that `auto` has tried in vain before it took what it takes, and why; nothing where there are
    none."""
    told = []
    for where in _accelerators():
        if not (why := works.why_not(where)):
            break
        told.append(f"{where} is here and does not work: {why}")
    return "; ".join(told)


def why_no_accelerator() -> str:
    """For an owner whose GPU is not used: what torch was built for, and what is there, or what it says when it is
    tried. Nothing where the first one is used."""
    if torch.accelerator.current_accelerator(check_available=True) is not None:
        return passed_over()
    return f"no accelerator is used: {_torch_build()}" + (
        "; an NVIDIA card is here: install a torch with CUDA (pytorch.org says how)" if _has_nvidia() else ""
    )


def _torch_build() -> str:
    built = torch.accelerator.current_accelerator()
    return f"torch {torch.__version__} is built for " + ("processors only" if built is None else str(built.type))


def _has_nvidia() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def _processor() -> str:
    """The processor's name where the system tells it, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
