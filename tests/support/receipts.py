"""Keys of receipts, and the fields that targets publish for receipts."""

from functools import cache
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

PUBLISHED: dict[str, Any] = {
    "weights": "1" * 64,
    "tokenizer": "2" * 64,
    "settings": {"dtype": "float32", "batch_invariant": False, "block_size": 16},
}


@cache
def key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def pem_of(key: Ed25519PrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def public_pem_of(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
