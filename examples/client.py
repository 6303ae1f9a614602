"""Asks a service for an answer, and shows that drafting changes nothing but the speed.

    serve run cluster.app               # in another terminal
    python examples/client.py           # or: python examples/client.py HOST:PORT

The client speaks gRPC. If a gateway is lost during an answer, it continues the answer at another gateway.
"""

import sys

from outrider import Client

PROMPT = '{"name": "'
MAX_TOKENS = 60


def main(address: str = "127.0.0.1:9000") -> int:
    """Asks twice with the same seed. Returns the exit status: 1 if the texts differ."""
    with Client(address) as client:
        drafted = client.generate(PROMPT, max_tokens=MAX_TOKENS, temperature=0.7)
        for piece in drafted:  # a piece arrives as soon as the target has verified it
            print(piece.text, end="", flush=True)
        assert drafted.usage is not None
        tokens, passes = drafted.usage.completion_tokens, drafted.usage.speculation.target_passes
        print(f"\n\nseed {drafted.seed}: {tokens} tokens in {passes} passes of the target")

        plain = client.generate(
            PROMPT, speculation={"mode": "off"}, max_tokens=MAX_TOKENS, temperature=0.7, seed=drafted.seed
        )
        is_equal = plain.read() == drafted.text
        print("without drafts: the same text" if is_equal else "without drafts: ANOTHER TEXT")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
