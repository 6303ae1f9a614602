"""Audits receipts: checks signature and digests, and computes every token again in one pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import ValidationError

from outrider.engine.errors import EngineError
from outrider.engine.loop.engine import Engine
from outrider.engine.sequence import EngineSequence
from outrider.engine.settings import EngineSettings
from outrider.engine.work import NONE_ASKED, AskedAdapter, Audit, Audited, Failed
from outrider.receipts.digests import tokenizer_digest, weights_digest
from outrider.receipts.receipt import Numerics, Receipt, public_key
from outrider.receipts.verdict import AuditVerdict, judged, tolerance_of

ADAPTER = "audited"  # name under which the engine has the adapter of the receipt


class AuditError(Exception):
    """The audit failed, so it is unknown whether the answer is honest."""


@dataclass(frozen=True)
class AuditedReceipt:
    """Receipt with the result of its audit."""

    name: str  # file of the receipt
    receipt: Receipt
    verdict: AuditVerdict
    tolerance: float  # nats before temperature
    reasons: tuple[str, ...]  # why the receipt is not honest; empty if it is

    @property
    def line(self) -> str:
        """Result in one line of text."""
        told, verdict = f"{self.verdict.tokens} tokens", self.verdict
        if not self.reasons:
            ties = f"{verdict.near_ties} of them near-ties" if verdict.near_ties else "each is the choice"
            return f"{self.name}: honest, {told}, {ties}"
        return f"{self.name}: differs, {told}, {verdict.wrong} of them wrong: {'; '.join(self.reasons)}"

    def as_json(self) -> dict[str, Any]:
        """Returns the result without token ids."""
        receipt = self.receipt.model_dump(mode="json", exclude={"prompt", "answer"})
        found = {**vars(self.verdict), "tolerance": self.tolerance, "reasons": [*self.reasons]}
        return {"file": self.name, "honest": not self.reasons, **found, "receipt": receipt}


class ReceiptAuditor:
    """Audits receipts of one model. The model is loaded again only if a receipt has other numerics."""

    def __init__(
        self,
        model: str,
        key: Ed25519PublicKey | None = None,
        tolerance: float | None = None,
        adapter: str | None = None,
    ) -> None:
        """
        Args:
            model: checkpoint folder or hub id.
            key: public key of the deployment; None: the key in each receipt.
            tolerance: nats that count as rounding, before temperature; None: by the receipt's numerics.
            adapter: folder of the adapter, if there is one.
        """
        self._model, self._key, self._tolerance, self._adapter = model, key, tolerance, adapter
        self._digests = {"weights": weights_digest(model), "tokenizer": tokenizer_digest(model)}
        self._loaded: tuple[Numerics, Engine] | None = None

    def audit(self, name: str, receipt: Receipt) -> AuditedReceipt:
        """Audits a receipt. Raises AuditError."""
        reasons = [*self._signature(receipt), *self._named_files(receipt)]
        engine = self._engine(receipt.numerics)
        asked = NONE_ASKED if self._adapter is None else AskedAdapter(ADAPTER)
        try:
            sequence = engine.open(len(receipt.prompt), receipt.noise_key, receipt.sampling, adapter=asked)
        except (ValueError, EngineError) as error:
            raise AuditError(f"{name}: {error}") from error
        try:
            margins = _margins(engine, sequence, receipt)
        except (ValueError, EngineError, AuditError) as error:
            raise AuditError(f"{name}: {error}") from error
        finally:
            engine.close(sequence)
        tolerance = tolerance_of(receipt.numerics) if self._tolerance is None else self._tolerance
        verdict = judged(margins, receipt.sampling, tolerance)
        if verdict.differs:
            reasons.append(verdict.reason)
        if sequence.adapter.digest.hex() != receipt.adapter:
            reasons.append("its adapter is another one")
        if not _ends_as_told(sequence, receipt):
            reasons.append(f"it does not end by finish_reason {receipt.finish_reason!r}")
        return AuditedReceipt(name, receipt, verdict, tolerance, tuple(reasons))

    def _signature(self, receipt: Receipt) -> list[str]:
        try:
            key = self._key or receipt.own_key
        except ValueError:
            return ["it names no key of Ed25519"]
        reason = "its signature is not of this key, or not of these fields"
        return [] if receipt.is_signed_by(key) else [reason]

    def _named_files(self, receipt: Receipt) -> list[str]:
        """Returns a reason for each digest that differs from the auditor's files."""
        return [
            f"its {name} are others than those in {self._model}"
            for name, digest in self._digests.items()
            if getattr(receipt, name) != digest
        ]

    def _engine(self, numerics: Numerics) -> Engine:
        """Returns the engine with these numerics; memory holds no other engine. Raises AuditError."""
        if self._loaded is None or self._loaded[0] != numerics:
            self._loaded = None
            adapters = {} if self._adapter is None else {ADAPTER: self._adapter}
            settings = EngineSettings(
                model=self._model, adapters=adapters, max_sequences=1, **numerics.model_dump()
            )
            try:
                self._loaded = numerics, Engine.from_settings(settings)
            except EngineError as error:
                raise AuditError(str(error)) from error
        return self._loaded[1]


def read_receipt(file: Path) -> Receipt:
    """Returns the receipt of a file. Raises AuditError."""
    try:
        return Receipt.model_validate_json(file.read_bytes())
    except OSError as error:
        raise AuditError(f"{file} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "receipt"
        raise AuditError(f"{file}: {field}: {first['msg']}") from None


def read_key(file: Path) -> Ed25519PublicKey:
    """Returns the public key of a PEM file. Raises AuditError."""
    try:
        return public_key(file.read_bytes())
    except (OSError, ValueError) as error:
        raise AuditError(f"--public-key {file}: {error}") from error


def _margins(engine: Engine, sequence: EngineSequence, receipt: Receipt) -> Sequence[float]:
    """Returns the margins of the answer's tokens. Raises AuditError if the engine fails."""
    engine.submit(Audit(sequence.number, 0, (*receipt.prompt, *receipt.answer)))
    margins: list[float] = []
    while engine.has_work:
        for result in engine.step():
            if isinstance(result, Failed):
                raise AuditError(result.reason)
            assert isinstance(result, Audited)
            margins += result.margins
    return margins


def _ends_as_told(sequence: EngineSequence, receipt: Receipt) -> bool:
    """Whether the answer ends as its finish_reason says. Stop strings are not searched for."""
    if receipt.finish_reason == "length":
        return len(receipt.prompt) + len(receipt.answer) == sequence.limit
    return receipt.answer[-1] in sequence.end_token_ids or bool(receipt.stop)
