"""How deep to draft next, by what drafting costs and how often it is right. No model, no clock, no I/O."""
