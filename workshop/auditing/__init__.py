"""Audits receipts: computes answers again from the weights."""
