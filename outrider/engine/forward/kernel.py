"""Choice of the kernel for attention over the paged cache on a device."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from outrider.engine.cache.key_values import LayerShape
from outrider.engine.inputs.context_parts import third_length
from outrider.engine.inputs.paged_input import PagedInput
from outrider.engine.kernels.cpu.attention import DTYPES, WIDEST_VECTOR, CpuAttention
from outrider.engine.kernels.cpu.functions import found

WIDEST_HEAD, WIDEST_VECTOR_OF_LATENTS = 256, 512 + 64  # dimensions, on a GPU
PROGRAMS = 2  # programs for each multiprocessor


class Kernel(Protocol):
    """Attention that reads the cache in place."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether calls return before the result is ready. Then steps have graphs and are launched early."""

    def take_in(self, paged: PagedInput[torch.Tensor]) -> None:
        """Writes new blocks into the block tables on the device."""

    def __call__(
        self,
        paged: PagedInput[torch.Tensor],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        windowed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes attention of the rows of a batch over the cache of a layer.

        Args:
            query: [heads, rows, key_dim], the last dimension contiguous.
            keys, values: [slots, kv_heads, dim] of the layer; contiguous, or values are a part of the keys.
            scaling: factor of scores; None: 1 / sqrt(key_dim).
            window: positions that a query sees, its own included; ``paged.ancestors`` are seen beyond it.
            softcap: bound of scores (Gemma 2).
            sinks: [heads] logits of attention sinks, which take part in the softmax but have no value.
            windowed: integers [num_blocks], WindowedBlocks.on_device: blocks of a windowed layer by blocks of
                the block tables. No block before a row's window is read. None: the same blocks.

        Returns:
            [rows, heads, value_dim]
        """


def find_kernel(
    shapes: Mapping[int, LayerShape],
    dtype: torch.dtype,
    device: torch.device,
    *,
    block_size: int,
    context_length: int,
) -> Kernel | str:
    """Returns the kernel for layers of these shapes, or the reason why blocks have to be gathered instead.

    Args:
        context_length: tokens of the longest sequence.
    """
    if device.type == "cpu":
        return why_no_cpu_kernel(shapes, dtype) or CpuAttention(block_size)
    if (reason := why_no_gpu_kernel(shapes)) is not None:
        return reason
    try:
        from outrider.engine.kernels.paged_attention import PagedAttention
    except ImportError as error:
        return f"Triton is missing, which chooses tokens too: pip install triton ({error})"
    properties: Any = torch.cuda.get_device_properties(device)  # torch's type stubs lack some fields
    return PagedAttention(
        block_size,
        third_length(context_length),
        properties.shared_memory_per_block_optin,
        programs=PROGRAMS * properties.multi_processor_count,
    )


def why_no_gpu_kernel(shapes: Mapping[int, LayerShape]) -> str | None:
    """Returns why a GPU with Triton has no kernel for layers of these shapes; None: it has a kernel."""
    for _, key_dim, value_dim in shapes.values():
        most = WIDEST_HEAD if value_dim else WIDEST_VECTOR_OF_LATENTS
        if (widest := max(key_dim, value_dim)) > most:
            kind = "heads" if value_dim else "latents"
            return f"{kind} have {widest} dimensions, a kernel on a GPU takes {most} at most"
    return None


def why_no_cpu_kernel(shapes: Mapping[int, LayerShape], dtype: torch.dtype) -> str | None:
    """Returns why a CPU has no kernel for layers of these shapes; None: it has a kernel."""
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"dtype={name!r} has no kernel on a CPU, which takes 'float32' and 'bfloat16'"
    if odd := [dim for dim in _dims_of(shapes) if dim % WIDEST_VECTOR]:
        return f"heads have {odd[0]} dimensions, a kernel on a CPU takes multiples of {WIDEST_VECTOR}"
    return library if isinstance(library := found(), str) else None


def _dims_of(shapes: Mapping[int, LayerShape]) -> list[int]:
    return [dim for _, *dims in shapes.values() for dim in dims]
