"""Receipts of answers, digests of models, and the verdict of an audit."""
