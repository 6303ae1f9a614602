"""Receipts of this gateway's answers: made when an answer ends, signed with the deployment's key."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gateway.adapter import Adapter
from gateway.errors import InvalidRequestError
from gateway.sequence import GatewaySequence
from gateway.workers.fleet import Fleet
from outrider.receipts.receipt import Numerics, Receipt, private_key

FIELD = "receipt"


@dataclass(frozen=True)
class ReceiptIssuer:
    """Issuer of the receipts of one request."""

    key: Ed25519PrivateKey
    model: str
    weights: str  # digest
    tokenizer: str  # digest
    numerics: Numerics
    stop: tuple[str, ...]

    def receipt(self, sequence: GatewaySequence, told: int, choice: int) -> dict[str, Any]:
        """Returns the JSON of an answer's receipt.

        Args:
            sequence: the complete answer.
            told: number of its tokens that the caller gets; a stop string may cut the rest.
            choice: index among the answers to its prompt.
        """
        plain = {"logprobs": None, "logprobs_of": "raw"}  # log-probabilities do not influence the tokens
        receipt = Receipt.model_construct(  # validated already
            model=self.model,
            weights=self.weights,
            tokenizer=self.tokenizer,
            adapter=sequence.adapter.digest.hex(),
            numerics=self.numerics,
            prompt=sequence.prompt,
            answer=tuple(sequence.generated[:told]),
            choice=choice,
            sampling=sequence.sampling.model_copy(update=plain),
            stop=self.stop,
            finish_reason=sequence.finish_reason,
            created=int(time.time()),
            key="",
        )
        return receipt.signed(self.key).model_dump(mode="json")


class ReceiptSigner:
    """Signs receipts, if the deployment has a key."""

    def __init__(self, pem: str | None, fleet: Fleet) -> None:
        """pem: private key; None: no receipts. Raises ValueError unless it is an Ed25519 key."""
        self._key = None if pem is None else private_key(pem.encode())
        self._fleet = fleet

    def issuer(self, model: str, adapter: Adapter, stop: Sequence[str], verification: str) -> ReceiptIssuer:
        """Returns the issuer of a request's receipts.

        Raises:
            InvalidRequestError: such an answer cannot have a receipt, or there are no receipts at all.
            WorkerLostError: there is no target.
        """
        if self._key is None:
            raise InvalidRequestError(FIELD, "is not served: access.receipt_key_file names no key")
        if verification != "coupled":
            raise InvalidRequestError(
                FIELD, f"needs speculation.verification 'coupled': no seed repeats {verification!r}"
            )
        targets = self._fleet.targets()
        made_of = {(target.weights, target.tokenizer, Numerics.of(target.settings)) for target in targets}
        if len(made_of) > 1:
            raise InvalidRequestError(FIELD, "is not served while targets hold different weights")
        weights, tokenizer, numerics = made_of.pop()
        return ReceiptIssuer(self._key, adapter.name or model, weights, tokenizer, numerics, tuple(stop))
