"""Storage of cached keys and values."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from outrider.engine.cache.memory import zeros
from outrider.engine.cache.narrow import Scales, widened
from outrider.engine.cache.recurrent_states import RecurrentStates
from outrider.engine.cache.windowed_blocks import WindowedBlocks
from outrider.engine.inputs.step_input import Rows

NO_SCALES: Mapping[int, Scales] = MappingProxyType({})
# Key/value heads, key dimension, value dimension, which is 0 if a value is a part of its key.
LayerShape = tuple[int, int, int]


class GatherSpace:
    """Memory into which scattered blocks are copied, reused by every layer and step.

    Fresh memory would take several times as long as the copy, since its pages have to be mapped first.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._memory: torch.Tensor | None = None

    def gather(self, stored: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Returns the slots of the blocks, [num_blocks * block_size, kv_heads, dim], until the next call.

        Args:
            stored: [slots, kv_heads, dim].
            blocks: int64 [num_blocks].
        """
        rows = stored.view(stored.shape[0] // self._block_size, -1)
        size = len(blocks) * rows.shape[1]
        if self._memory is None or len(self._memory) < size:
            self._memory = stored.new_empty(2 * size)
        copied = self._memory[:size].view(len(blocks), -1)
        torch.index_select(rows, 0, blocks, out=copied)
        return copied.view(-1, *stored.shape[1:])


class KeyValues:
    """Storage of the KV cache: ``keys[layer]`` and ``values[layer]`` are [slots, kv_heads, dim]."""

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Mapping[int, Scales] = NO_SCALES,
        windows: WindowedBlocks | None = None,
    ) -> None:
        """
        Args:
            num_blocks: number of blocks without the spare block, to which padding is written.
            scales: scales of layers in a narrow cache; the scales of other layers are 1.
            windows: pool of windowed layers; None: every layer stores ``num_blocks`` blocks.
        """
        self.block_size = block_size
        self.states: RecurrentStates | None = None  # states of recurrent layers, if the model has any
        self.scales = dict.fromkeys(shapes, Scales()) | dict(scales)
        self.key_space, self.value_space = GatherSpace(block_size), GatherSpace(block_size)
        self.spare_block = num_blocks
        self.windows = windows
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        windowed = frozenset() if windows is None else windows.windowed.layers
        whole = {layer: shape for layer, shape in shapes.items() if layer not in windowed}
        parts = {layer: shape for layer, shape in shapes.items() if layer in windowed}
        # [layers, slots, kv_heads, dim] of layers of one shape
        self._stored = self._allocate(whole, num_blocks, dtype, device)
        self._windowed = [] if windows is None else self._allocate(parts, windows.num_blocks, dtype, device)

    def _allocate(
        self, shapes: Mapping[int, LayerShape], num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> list[torch.Tensor]:
        slots, allocated = (num_blocks + 1) * self.block_size, []
        for shape in dict.fromkeys(shapes.values()):
            heads, *dims = shape
            layers = [layer for layer, own in shapes.items() if own == shape]
            for of_layer, dim in zip((self.keys, self.values), dims, strict=True):
                if dim:
                    stored = zeros((len(layers), slots, heads, dim), dtype, device)
                    allocated.append(stored)
                else:
                    stored = torch.empty((len(layers), slots, heads, 0), dtype=dtype, device=device)
                of_layer.update(zip(layers, stored, strict=True))
        return allocated

    def windows_of(self, layer: int) -> WindowedBlocks | None:
        """Returns the pool of the layer if it is windowed; None: it stores all blocks."""
        windows = self.windows
        return windows if windows is not None and layer in windows.windowed.layers else None

    def are_finite(self, slots: Rows, windowed_slots: Rows) -> torch.Tensor:
        """Returns bool [num_slots]: whether every key and value there is finite, in all layers.

        windowed_slots: the same slots in the pool of windowed layers, if there is one.
        """
        # A maximum is NaN if any number is NaN, and reads each number once.
        read = [stored[:, slots] for stored in self._stored]
        read += [stored[:, windowed_slots] for stored in self._windowed]
        largest = [widened(part, torch.float32).abs().amax(dim=(0, 2, 3)) for part in read]
        return torch.stack([part.float() for part in largest]).amax(dim=0).isfinite()
