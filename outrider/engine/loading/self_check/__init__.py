"""Check of a loaded model against the same weights under transformers."""
