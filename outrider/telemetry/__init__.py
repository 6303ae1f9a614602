"""Names, units and meanings of all metrics and spans."""
