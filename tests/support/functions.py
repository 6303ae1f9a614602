"""Compiled functions of this processor, which some tests need."""

import pytest

from outrider.engine.kernels.cpu.functions import compiled

needs_functions = pytest.mark.skipif(compiled() is None, reason="no compiled functions on this machine")
