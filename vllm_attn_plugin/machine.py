"""What the choice of kernels depends on besides the model and the engine's limits: the machine, real or named."""

import re
from dataclasses import dataclass, field

import torch

from vllm_attn_plugin.kernels import SHIPPED, Shelf, Toolchain, find_toolchain
from vllm_attn_plugin.settings import own_tables

Capability = tuple[int, int]

# Compute capabilities by a part of the name that the driver gives a GPU; the first that fits counts.
GPUS: dict[str, Capability] = {
    "RTX PRO 6000": (12, 0),
    "RTX 50": (12, 0),
    "GB300": (10, 3),
    "B300": (10, 3),
    "GB200": (10, 0),
    "B200": (10, 0),
    "GB10": (12, 1),
    "SPARK": (12, 1),
    "GH200": (9, 0),
    "H200": (9, 0),
    "H100": (9, 0),
    "H800": (9, 0),
    "H20": (9, 0),
    "RTX 6000 ADA": (8, 9),
    "RTX 40": (8, 9),
    "L40": (8, 9),
    "L4": (8, 9),
    "RTX A6000": (8, 6),
    "RTX 30": (8, 6),
    "A100": (8, 0),
    "A800": (8, 0),
    "A30": (8, 0),
    "A10": (8, 6),
    "A40": (8, 6),
    "T4": (7, 5),
    "V100": (7, 0),
}


class MachineError(ValueError):
    """A GPU's name is not known; the message says which may be given."""


@dataclass(frozen=True)
class Machine:
    """A machine as the dispatch sees it.

    Attributes:
        device: where the cache lives.
        compute_capability: (major, minor) of an NVIDIA GPU; None on any other device.
        num_sms: multiprocessors of an NVIDIA GPU; 0 where that is not known.
        toolchain: where the code of FlashInfer's kernels can come from.
        tables: measured decode times.
    """

    device: torch.device
    compute_capability: Capability | None = None
    num_sms: int = 0
    toolchain: Toolchain = field(default_factory=Toolchain)
    tables: Shelf = field(default_factory=Shelf)


def named_machine(name: str) -> Machine:
    """A machine with a GPU that need not be here, and with all that FlashInfer needs to compile its kernels.

    Args:
        name: SM and the compute capability (SM90, SM103), or a GPU's name (H200, "NVIDIA L40S"). With a name, tables
            that were measured on that GPU count too, for the FlashInfer that is installed here.

    Raises:
        MachineError: the name is not known.
    """
    numbers = re.fullmatch(r"sm_?(\d+)(\d)a?", name.strip(), re.IGNORECASE)
    if numbers:
        return Machine(torch.device("cuda"), (int(numbers[1]), int(numbers[2])))
    given = name.upper()
    for part, capability in GPUS.items():
        if re.search(rf"(?<![A-Z0-9]){part}", given):
            full = name if given.startswith("NVIDIA") else f"NVIDIA {name}"
            tables = Shelf(full, find_toolchain().flashinfer_version or "", (own_tables(), SHIPPED))
            return Machine(torch.device("cuda"), capability, tables=tables)
    raise MachineError(
        f"there is no GPU {name!r} that this version knows; give its compute capability, such as SM90, or a name with "
        f"one of: {', '.join(GPUS)}."
    )
