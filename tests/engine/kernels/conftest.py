from collections.abc import Iterator

import pytest

from tests.support.triton_interpreter import replacements


@pytest.fixture(autouse=True, scope="package")
def quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for owner, name, value in replacements():
            patched.setattr(owner, name, value)
        yield
