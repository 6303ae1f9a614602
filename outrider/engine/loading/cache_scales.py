"""Scales of a checkpoint for keys and values that are cached in 8 bits."""

import math
import re

from outrider.engine.cache.narrow import Scales
from outrider.engine.loading.stored_checkpoint import StoredCheckpoint
from outrider.engine.loading.text_part import served_config

# Names in compressed-tensors, modelopt and vLLM. Groups: number of the layer, and k or v.
SCALE = re.compile(r"\blayers\.(\d+)\.[\w.]*\b([kv])_scale$")


def cache_scales(model: str) -> dict[int, Scales]:
    """Returns scales by number of the layer, if it has scales, each rounded up to a power of two.

    Such a scale changes only the exponent of a number. If each head has a scale, the largest is used.

    model: folder or hub id of a checkpoint that was loaded before.
    """
    found: dict[int, Scales] = {}
    for (layer, kind), tensor in StoredCheckpoint(served_config(model), model).matching(SCALE):
        scale = 2.0 ** math.ceil(math.log2(float(tensor.max())))
        name = {"k": "keys", "v": "values"}[kind]
        found[int(layer)] = found.get(int(layer), Scales())._replace(**{name: scale})
    return found
