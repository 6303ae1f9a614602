"""Every drafter that there is, and the indices that draft without a model."""
