"""The arithmetic of drafting and verifying: Drafts, verification, sampling, noise, grammars."""
