"""How deep to draft next, for all sequences at a target: costs, policy and exploration."""
