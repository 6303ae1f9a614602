"""Packages that the workshop alone needs."""

import sys

import pytest

from workshop.extra import require


def test_require_with_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ValueError, match=r"outrider check needs httpx: pip install 'outrider\[workshop\]'"):
        require("httpx", "outrider check")


def test_require_with_an_installed_package_raises_nothing() -> None:
    require("pytest", "this test")
