"""Scales that a checkpoint has for keys and values in 8 bit."""

import math
import re

from outrider.engine.cache.narrow import Scales
from outrider.engine.loading.stored_checkpoint import StoredCheckpoint
from outrider.engine.loading.text_part import served_config

# Names of compressed-tensors, of modelopt and of vLLM, with the layer's number and what is scaled.
SCALE = re.compile(r"\blayers\.(\d+)\.[\w.]*\b([kv])_scale$")


def cache_scales(model: str) -> dict[int, Scales]:
    """Returns the scales of the layers that have them, each rounded up to a power of two.

    Such a scale changes the exponent of a number alone. If each head has a scale, the largest counts.

    model: folder or hub id of a checkpoint, which has been loaded.
    """
    found: dict[int, Scales] = {}
    for (layer, kind), tensor in StoredCheckpoint(served_config(model), model).matching(SCALE):
        scale = 2.0 ** math.ceil(math.log2(float(tensor.max())))
        name = {"k": "keys", "v": "values"}[kind]
        found[int(layer)] = found.get(int(layer), Scales())._replace(**{name: scale})
    return found
