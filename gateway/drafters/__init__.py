"""Drafters of one sequence, seen from the gateway: in a draft worker, in the target, in an index here."""
