from collections.abc import Iterator

import pytest
from triton.runtime.interpreter import InterpretedFunction

from tests.support.triton_interpreter import patching_once


@pytest.fixture(autouse=True, scope="package")
def quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(InterpretedFunction, "__call__", patching_once(InterpretedFunction.__call__))
        yield
