"""Check for packages that only the workshop needs: they are installed by extras."""

from importlib.util import find_spec


def require(package: str, purpose: str, extra: str = "workshop") -> None:
    """Raises ValueError that names the extra if the package is not installed."""
    if find_spec(package) is None:
        raise ValueError(f"{purpose} needs {package}: pip install 'outrider[{extra}]'")
