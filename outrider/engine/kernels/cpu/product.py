"""Matrix products with weights packed at load."""

from torch import Tensor, get_num_threads
from torch.nn.functional import pad

from outrider.engine.kernels.cpu.functions import functions


class PanelProduct:
    """Matrix product with a weight that is stored in the order in which a CPU reads it: panels of columns."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """
        Args:
            weight: float32 [out_features, in_features]
            bias: float32 [out_features]
        """
        self._functions = functions()
        self._outputs, self._inputs = weight.shape
        width = self._functions.panel_width()
        panels = -(-self._outputs // width)
        missing = panels * width - self._outputs
        filled = (
            pad(weight, (0, 0, 0, missing)) if missing else weight
        )  # without padding, a large weight is copied only once
        self.panels = filled.view(panels, width, self._inputs).transpose(1, 2).contiguous()
        self._bias = None if bias is None else bias.contiguous()

    def __call__(self, rows: Tensor, added: Tensor | None = None) -> Tensor:
        """Returns the product, float32 [num_rows, out_features], plus ``added`` of the same shape.

        rows: float32 [num_rows, in_features].
        """
        rows, num_rows = rows.contiguous(), rows.shape[0]
        added = None if added is None else added.contiguous()
        result = rows.new_empty(num_rows, self._outputs)
        self._functions.multiply(
            rows.data_ptr(),
            num_rows,
            self.panels.data_ptr(),
            self._inputs,
            self._outputs,
            None if self._bias is None else self._bias.data_ptr(),
            None if added is None else added.data_ptr(),
            result.data_ptr(),
            get_num_threads(),
        )
        return result
