"""Checkpoint that is quantized already: its needs, the form of its weights, and its shares by rank.

transformers loads it, by the library of its ``quant_method``. What becomes of its linear layers:

    fp8                   FP8, with a scale for each block of weights or for all of a layer
    compressed-tensors    FP8, with a scale for each output, if all layers have weights and inputs in
                          FP8; else they are dequantized as they load
    mxfp4                 4 bit on a GPU, by kernels from the hub; elsewhere dequantized at load
    awq, gptq,            as the library keeps them
    bitsandbytes

Other methods are refused: transformers would load their stored codes as if these were weights.
On devices that do not multiply FP8, such weights are dequantized as they load.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from transformers.utils import (
    is_bitsandbytes_available,
    is_compressed_tensors_available,
    is_gptqmodel_available,
    is_kernels_available,
    is_optimum_available,
    is_triton_available,
)

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loading.fp8_weights import SPLITS, Fp8Weight, fp8_weights, schemes
from outrider.engine.parallel.plan import generic

FP8_CAPABILITY = 8, 9  # capability of the first GPUs that multiply FP8
MXFP4_CAPABILITY = 7, 5  # capability of the first GPUs that run transformers' kernels for MXFP4
MXFP4_TRITON = "3.4.0"  # first version of Triton that these kernels take
ROW_UNIT = 16  # outputs and inputs come in multiples of this to the product with a scale for each output


@dataclass(frozen=True)
class Requirement:
    """Packages and kernels that a ``quant_method`` needs besides transformers."""

    extra: str  # extra of pyproject.toml that installs the packages
    libraries: Mapping[str, Callable[[], bool]]  # whether transformers finds a package in a usable version
    kernels: str | None = None  # repository of the hub whose kernels are fetched at first use


REQUIREMENTS = {
    "awq": Requirement("awq", {"gptqmodel": is_gptqmodel_available}),
    "bitsandbytes": Requirement("quantized", {"bitsandbytes": is_bitsandbytes_available}),
    "compressed-tensors": Requirement(
        "compressed-tensors", {"compressed-tensors": is_compressed_tensors_available}
    ),
    "fp8": Requirement("fp8", {"kernels": is_kernels_available}, "kernels-community/finegrained-fp8"),
    "gptq": Requirement("gptq", {"gptqmodel": is_gptqmodel_available, "optimum": is_optimum_available}),
    "mxfp4": Requirement(
        "mxfp4", {"kernels": is_kernels_available}, "kernels-community/gpt-oss-triton-kernels"
    ),
}


def is_quantized(config: Any) -> bool:
    """Whether the checkpoint's weights are quantized."""
    return getattr(config, "quantization_config", None) is not None


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the device multiplies FP8. A GPU outside this machine is assumed to multiply it."""
    if device.type != "cuda":
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= FP8_CAPABILITY


def keeps_mxfp4(device: torch.device) -> bool:
    """Whether transformers keeps MXFP4 on the device. A GPU outside this machine is assumed to keep it."""
    if device.type != "cuda" or not is_triton_available(MXFP4_TRITON):
        return False
    can = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= MXFP4_CAPABILITY
    return can and all(is_available() for is_available in REQUIREMENTS["mxfp4"].libraries.values())


def _are_cached(repository: str) -> bool:
    """Whether the hub's cache of this machine has a version of the repository."""
    caches = os.environ.get("KERNELS_CACHE"), constants.HF_HUB_CACHE
    folder = f"*--{repository.replace('/', '--')}"
    return any(any(Path(cache).glob(folder)) for cache in caches if cache)


class QuantizedCheckpoint:
    """Quantization of a checkpoint by its config; no weight is read."""

    def __init__(self, config: Any, name: str) -> None:
        """
        Args:
            config: of transformers, of a checkpoint that ``is_quantized``.
            name: for messages.

        Raises:
            UnsupportedModelError: the quantization method is not known.
        """
        self.name = name
        self._config = config
        self._quantization: dict[str, Any] = config.quantization_config
        self.method: str = (
            self._quantization.get("quant_method") or "bitsandbytes"
        )  # older checkpoints name no method
        if self.method not in REQUIREMENTS:
            raise UnsupportedModelError(
                f"model={name!r}: quant_method={self.method!r} is not served; these are:"
                f" {', '.join(sorted(REQUIREMENTS))}. Give such a checkpoint, or the one it was made from"
            )

    def check_libraries(self, device: torch.device) -> None:
        """Raises UnsupportedModelError naming a package or kernel that is missing, and its source."""
        requirement = REQUIREMENTS[self.method]
        if self.is_dequantized(device):
            return
        missing = [name for name, is_available in requirement.libraries.items() if not is_available()]
        if missing:
            raise UnsupportedModelError(
                f"model={self.name!r}: quant_method={self.method!r} needs {' and '.join(missing)}, which is"
                f" not installed here, or not in a version that transformers takes:"
                f" pip install 'outrider[{requirement.extra}]'"
            )
        source = requirement.kernels
        if source is not None and constants.HF_HUB_OFFLINE and not _are_cached(source):
            raise UnsupportedModelError(
                f"model={self.name!r}: quant_method={self.method!r} takes kernels of {source} from the hub,"
                f" HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} does not have them: load it once with"
                " the hub in reach, and keep this cache"
            )

    def is_dequantized(self, device: torch.device) -> bool:
        """Whether its weights are dequantized as they load, as the device does not multiply them."""
        if self.method == "mxfp4":
            return not keeps_mxfp4(device)
        return self.method == "fp8" and not multiplies_fp8(device)

    def lacks(self, device: torch.device) -> str | None:
        """Returns a sentence on what would keep MXFP4 on this GPU; None: nothing is missing."""
        if self.method != "mxfp4" or device.type != "cuda" or keeps_mxfp4(device):
            return None
        return (
            f"model={self.name!r}: quant_method='mxfp4' is dequantized to some four times its size; it stays"
            f" in 4 bit on GPUs of compute capability {'.'.join(map(str, MXFP4_CAPABILITY))} or above, with"
            f" Triton {MXFP4_TRITON} or above and kernels: pip install 'outrider[mxfp4]'"
        )

    def told_to_transformers(self, device: torch.device) -> dict[str, Any]:
        """Returns the config's ``quantization_config``, with the form of the weights on this device."""
        if self.method == "mxfp4":
            return {**self._quantization, "dequantize": self.is_dequantized(device)}
        if self.method != "compressed-tensors":
            return self._quantization
        if self.keeps_fp8(device):
            # As if nothing were packed: nothing is left for the library to unpack with the first pass.
            return {**self._quantization, "use_optimized_inference": True, "quantization_status": "frozen"}
        # With several groups transformers would dequantize all by one scheme. The library knows each scheme.
        return (
            {**self._quantization, "dequantize": True}
            if len(schemes(self._quantization)) == 1
            else self._quantization
        )

    def keeps_fp8(self, device: torch.device) -> bool:
        """Whether weights stay in FP8; else they are dequantized, or kept by another library."""
        return bool(self.fp8) and multiplies_fp8(device)

    def is_kept_as_stored(self, device: torch.device) -> bool:
        """Whether a library keeps the weights and multiplies them."""
        return self.method not in ("fp8", "compressed-tensors") and not self.is_dequantized(device)

    @cached_property
    def fp8(self) -> dict[str, Fp8Weight]:
        """Returns the weights that a GPU keeps in FP8, by name; empty if there are none."""
        return fp8_weights(self._config)

    def check_shares(self, ranks: int) -> None:
        """Raises UnsupportedModelError if this number of ranks cannot share it, naming numbers that can."""
        given = f"tensor_parallel={ranks}: model={self.name!r}"
        if not self.fp8:
            raise UnsupportedModelError(
                f"{given} is quantized by quant_method={self.method!r}, and transformers has no plan to share"
                " such weights between devices; give 1, or a checkpoint with quant_method='fp8', or with"
                " 'compressed-tensors' and weights and inputs of all linear layers in FP8"
            )
        unit = self._unit
        for name, weight in self.fp8.items():
            if weight.style not in SPLITS:
                continue
            dimension, parts = SPLITS[weight.style]
            size, block = weight.shape[dimension], unit[dimension]
            if size % (ranks * parts * block):
                what = "outputs" if dimension == -2 else "inputs"
                fitting = [str(n) for n in range(1, ranks) if size % (n * parts * block) == 0] or ["1"]
                of_config = f"weight_block_size={[*unit]}" if self.method == "fp8" else f"blocks of {block}"
                raise UnsupportedModelError(
                    f"{given} has {of_config}, and a rank's share of {name} would be {size / ranks / parts:g}"
                    f" {what}, which are no whole blocks; give {' or '.join(fitting)}"
                )

    @property
    def _unit(self) -> tuple[int, int]:
        """Returns the numbers whose multiples the outputs and inputs of a share must be."""
        if self.method != "fp8":
            return ROW_UNIT, ROW_UNIT
        outputs, inputs = self._quantization.get("weight_block_size", (128, 128)) or (1, 1)
        return int(outputs), int(inputs)

    def check_device(self, device: torch.device, ranks: int) -> None:
        """Checks the share of a rank on its device; ``check_shares`` has accepted this number of ranks.

        Raises:
            UnsupportedModelError: weights cannot stay in FP8 on the device, and cannot be dequantized either.
        """
        if not self.fp8 or self.keeps_fp8(device):
            return
        reason = None
        if self._has_blocks:
            blocks = self._unit
            torn = [
                f"{name} of {weight.shape[-2]} outputs and {weight.shape[-1]} inputs is no whole blocks"
                for name, weight in self.fp8.items()
                if weight.shape[-2] % blocks[0] or weight.shape[-1] % blocks[1]
            ]
            if torn:  # transformers would dequantize them by other blocks
                reason = f"weight_block_size={[*blocks]} cannot be dequantized, as {torn[0]}; give"
        elif ranks > 1:
            reason = f"tensor_parallel={ranks} cannot share scales that are not for blocks; give 1, or"
        if reason is not None:
            capability = ".".join(map(str, FP8_CAPABILITY))
            raise UnsupportedModelError(
                f"model={self.name!r}: {reason} GPUs of compute capability {capability} or above, where it"
                " stays in FP8"
            )

    @property
    def _has_blocks(self) -> bool:
        """Whether scales are for blocks of outputs and inputs."""
        return self.method == "fp8" and self._quantization.get("weight_block_size", True) is not None

    @property
    def share_plan(self) -> dict[str, str]:
        """Returns scales that each rank loads as a whole, which transformers' tensor-parallel plan lacks."""
        if self.method != "compressed-tensors":
            return {}
        return {f"{generic(name)}_scale": "replicate" for name in self.fp8}
