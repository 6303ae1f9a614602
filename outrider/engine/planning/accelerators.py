"""Peak rates of accelerators by their data sheets, and the shares of these that our steps reach."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# Shares of the peak rates. `python -m bench costs` compares them with measured steps of an H100.
MEMORY = 0.79  # products of few rows: H100, steps of an 8B minus steps of a 1B (bench/results/gpu.json)
ARITHMETIC = 0.65  # products of many rows: H100, prompts of an 8B in chunks of 8,192
ATTENTION = 0.4  # attention of a prompt: H100, 1.07 Tflop in 2.7 ms (docs/benchmarks.md)
LINK = 0.42  # exchanges by NCCL: 40 us for 5.2 MB over NVLink of an H100, an estimate


@dataclass(frozen=True)
class Accelerator:
    """Peak rates of a device in its maker's data sheet."""

    bytes_per_s: float
    flops_per_s: float  # operations of products in bfloat16, without sparsity
    processors: int
    link_bytes_per_s: float  # one way, to other devices of the machine: NVLink, else PCIe

    @property
    def read_s(self) -> float:
        """Seconds to read a byte from memory."""
        return 1.0 / (MEMORY * self.bytes_per_s)

    @property
    def exchange_s(self) -> float:
        """Seconds to exchange a byte with another device."""
        return 1.0 / (LINK * self.link_bytes_per_s)


ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {
        "A10G": Accelerator(600e9, 70e12, 80, 32e9),
        "A100": Accelerator(2.04e12, 312e12, 108, 300e9),
        "B200": Accelerator(8.0e12, 2250e12, 148, 900e9),
        "H100": Accelerator(3.35e12, 989e12, 132, 450e9),
        "H200": Accelerator(4.8e12, 989e12, 132, 450e9),
        "L4": Accelerator(300e9, 121e12, 58, 32e9),
        "L40S": Accelerator(864e9, 362e12, 142, 32e9),
    }
)
