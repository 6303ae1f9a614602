"""Table of all drafters, and the indices that draft without a model."""
