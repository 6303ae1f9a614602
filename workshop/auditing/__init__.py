"""Audits of receipts: answers are computed again from the weights."""
