"""Placeholders for the tokens of a Verdict, which outrider/engine/kernels/verdict.py replaces on a GPU."""

# Numbers that the device returns for a Verdict: its last token, the number of accepted tokens, and the
# Draft's last accepted node (-1: no node).
TOLD = ("token", "accepted", "node")
ALTERNATIVE = 2**32  # more than the rows of any step


def told_tokens(rows: range, chain_length: int) -> list[int]:
    """Returns placeholders for the target's tokens after the root and after each node of a Draft's chain.

    A placeholder is -1 minus the row that chooses the token. The root's placeholder is also reduced by
    ALTERNATIVE for each alternative of the Draft. The rows of alternatives follow the rows of the chain.

    Args:
        rows: rows of the target's choice of tokens, for the root and each node, alternatives last.
        chain_length: nodes of the chain.
    """
    of_chain = rows[: 1 + chain_length]
    root, *nodes = (-1 - row for row in of_chain)
    return [root - ALTERNATIVE * (len(rows) - len(of_chain)), *nodes]
