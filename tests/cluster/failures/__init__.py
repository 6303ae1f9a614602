"""A package, so that its tests share one service and no others do: pytest knows its scope by this file."""
