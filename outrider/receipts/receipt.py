"""Receipt of one answer: all inputs that determine its tokens, signed by the deployment. Torch-free."""

import base64
import json
from typing import Annotated, Any, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from pydantic import BaseModel, ConfigDict, Field

from outrider.decoding.settings import Sampling, TokenId

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Numerics(BaseModel):
    """Settings of an engine that affect its numerical results, besides the weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["float32", "bfloat16", "float16"]
    quantization: Literal["int8", "int4"] | None = None
    cache_dtype: Literal["auto", "float8_e4m3fn"] = "auto"
    batch_invariant: bool = False

    @classmethod
    def of(cls, engine: dict[str, Any]) -> "Numerics":
        """Returns the numerics in the settings of an engine. Raises pydantic.ValidationError."""
        return cls.model_validate({name: engine[name] for name in cls.model_fields if name in engine})


class Receipt(BaseModel):
    """Receipt of one answer. It holds token ids, without which the answer could not be recomputed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    version: Literal[1] = 1
    model: str  # name of the model in the request
    weights: Digest
    tokenizer: Digest
    adapter: str = Field(pattern="^[0-9a-f]*$")  # digest of the adapter's files; empty: no adapter
    numerics: Numerics
    prompt: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    answer: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    choice: Annotated[int, Field(ge=0)]  # index among the answers to this prompt
    sampling: Sampling  # resolved settings, including the seed
    stop: tuple[str, ...]  # stop strings, before which the answer may have ended
    finish_reason: Literal["stop", "length"]
    created: int  # seconds since 1970
    key: str  # public key in base64, 32 bytes
    signature: str = ""  # signature of ``signed_bytes`` in base64; empty: not signed yet

    @property
    def noise_key(self) -> int:
        """Key of the answer's noise."""
        return self.sampling.noise_key(self.choice, self.prompt)

    @property
    def signed_bytes(self) -> bytes:
        """Canonical JSON of all fields except the signature: sorted keys, no spaces, ASCII."""
        fields = self.model_dump(mode="json", exclude={"signature"})
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    def signed(self, key: Ed25519PrivateKey) -> "Receipt":
        """Returns the receipt with its signature."""
        receipt = self.model_copy(update={"key": _text_of(key.public_key().public_bytes_raw())})
        return receipt.model_copy(update={"signature": _text_of(key.sign(receipt.signed_bytes))})

    def is_signed_by(self, key: Ed25519PublicKey) -> bool:
        """Whether the signature was made with this key over these fields."""
        if self.key != _text_of(key.public_bytes_raw()):
            return False
        try:
            key.verify(base64.b64decode(self.signature), self.signed_bytes)
        except (InvalidSignature, ValueError):
            return False
        return True

    @property
    def own_key(self) -> Ed25519PublicKey:
        """Public key that the receipt names. Raises ValueError if it is no valid key."""
        return Ed25519PublicKey.from_public_bytes(base64.b64decode(self.key))


def private_key(pem: bytes) -> Ed25519PrivateKey:
    """Returns the key of a PEM file without a password. Raises ValueError."""
    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError as error:
        raise ValueError("it has a password: give a file without one") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"it holds a {type(key).__name__}: a private key of Ed25519 is accepted")
    return key


def public_key(pem: bytes) -> Ed25519PublicKey:
    """Returns the key of a PEM file. Raises ValueError."""
    key = load_pem_public_key(pem)
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(f"it holds a {type(key).__name__}: a public key of Ed25519 is accepted")
    return key


def _text_of(value: bytes) -> str:
    return base64.b64encode(value).decode()
