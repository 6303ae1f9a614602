"""Numbers that stand for the tokens of a Verdict until outrider/engine/kernels/verdict.py finds them."""

# Numbers that the device tells of a Verdict: its last token, how many drafted tokens are accepted, and the
# last accepted node of the Draft, -1 without any.
TOLD = ("token", "accepted", "node")
ALTERNATIVE = 2**32  # more than a step has rows


def told_tokens(rows: range, chain_length: int) -> list[int]:
    """Returns a number for the root and each node of a Draft's chain, where a Verdict may have a token.

    It is -1 less the row that chooses the token. The root's number is also less ALTERNATIVE for each
    alternative of the Draft. The rows of alternatives follow those of the chain.

    Args:
        rows: rows of the target's choice of tokens, for the root and each node, alternatives last.
        chain_length: nodes of the chain.
    """
    of_chain = rows[: 1 + chain_length]
    root, *nodes = (-1 - row for row in of_chain)
    return [root - ALTERNATIVE * (len(rows) - len(of_chain)), *nodes]
