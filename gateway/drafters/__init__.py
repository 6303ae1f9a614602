"""Drafters of one sequence, as the gateway sees them: in a draft worker, in the target, or an index here."""
