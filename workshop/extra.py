"""The packages that the workshop needs and a server does not: the extra ``workshop``."""

from importlib.util import find_spec


def require(package: str, purpose: str) -> None:
    """Raises ValueError that names the extra if the package is not installed."""
    if find_spec(package) is None:
        raise ValueError(f"{purpose} needs {package}: pip install 'outrider[workshop]'")
