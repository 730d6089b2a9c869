"""What a figure was measured on and with, written into every results file, and what the device can do."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from huggingface_hub.dataclasses import strict
from transformers.utils.import_utils import is_torch_bf16_gpu_available

CPU_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")  # x86, then ARM, as torch names them


def native_bfloat16(device_type: str) -> bool:
    """Whether a kind of device of this machine has bfloat16 arithmetic of its own.

    On CPUs without it products in bfloat16 take about five times as long as in float32, but for those of one vector.

    Args:
        device_type: "cpu", "cuda" or another of torch's.
    """
    if device_type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name, False) for name in CPU_BFLOAT16)
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return is_torch_bf16_gpu_available()


@strict
@dataclass
class Versions:
    """Versions that were imported."""

    python: str
    torch: str
    transformers: str
    spechead: str


@strict
@dataclass
class Hardware:
    """The device, its memory in bytes, its count (threads on a CPU) and the machine's architecture."""

    device: str
    memory: int
    count: int
    architecture: str


def describe_hardware(device: torch.device) -> Hardware:
    """Describe the machine as far as timings depend on it.

    Args:
        device: where the target runs.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Hardware(properties.name, properties.total_memory, torch.cuda.device_count(), platform.machine())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return Hardware(
        processor_name() if device.type == "cpu" else device.type, memory, torch.get_num_threads(), platform.machine()
    )


def processor_name() -> str:
    """Return the processor's name as the kernel gives it, else what Python knows."""
    table = Path("/proc/cpuinfo")
    if table.exists():
        for line in table.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_versions() -> Versions:
    """Return the versions that were imported."""
    return Versions(
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=version("transformers"),
        spechead=version("spechead"),
    )
