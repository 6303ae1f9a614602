"""Target drafters: heads and early layers that draft in the process of the target."""
