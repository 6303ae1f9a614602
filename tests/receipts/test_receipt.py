"""Receipts: signed, read back, and refused once a field is another."""

from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from pydantic import ValidationError

from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.receipts.receipt import Numerics, Receipt, private_key, public_key
from tests.support.receipts import key, pem_of, public_pem_of

FIELDS: dict[str, Any] = {
    "model": "m",
    "weights": "1" * 64,
    "tokenizer": "2" * 64,
    "adapter": "",
    "numerics": Numerics(dtype="float32"),
    "prompt": (1, 2),
    "answer": (3, 4, 5),
    "choice": 1,
    "sampling": Sampling(seed=7, temperature=1, logit_bias={3: 0.5}, max_tokens=3),
    "stop": (),
    "finish_reason": "length",
    "created": 1,
    "key": "",
}


def signed() -> Receipt:
    return Receipt(**FIELDS).signed(key())


def test_receipt_read_back_from_json_is_signed_by_its_key() -> None:
    read = Receipt.model_validate_json(signed().model_dump_json())
    assert read == signed()
    assert read.is_signed_by(key().public_key())
    assert read.is_signed_by(read.own_key)


def test_receipt_written_by_a_reader_without_decimal_points_is_still_signed() -> None:
    """JavaScript writes 1.0 as 1."""
    read = Receipt.model_validate_json(signed().model_dump_json().replace(":1.0,", ":1,"))
    assert read.is_signed_by(key().public_key())


@pytest.mark.parametrize(
    "changed",
    [
        {"answer": (3, 4, 6)},
        {"prompt": (1, 3)},
        {"weights": "3" * 64},
        {"model": "n"},
        {"choice": 0},
        {"finish_reason": "stop"},
        {"sampling": Sampling(seed=8, temperature=1, logit_bias={3: 0.5}, max_tokens=3)},
        {"numerics": Numerics(dtype="float32", quantization="int8")},
        {"signature": ""},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_receipt_with_a_changed_field_is_not_signed(changed: dict[str, Any]) -> None:
    assert not signed().model_copy(update=changed).is_signed_by(key().public_key())


def test_receipt_signed_by_another_key_is_not_signed_by_this_key() -> None:
    other = Receipt(**FIELDS).signed(Ed25519PrivateKey.generate())
    assert not other.is_signed_by(key().public_key())


def test_receipt_noise_key_is_that_of_its_choice() -> None:
    assert signed().noise_key == noise_key(7, 1, (1, 2))


def test_receipt_whose_noise_all_prompts_share_has_a_noise_key_without_its_prompt() -> None:
    receipt = signed()
    shared = receipt.sampling.model_copy(update={"noise_scope": "seed"})
    assert receipt.model_copy(update={"sampling": shared}).noise_key == noise_key(7, 1, ())


def test_receipt_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError, match="texts"):
        Receipt.model_validate({**FIELDS, "texts": "x"})


def test_keys_are_read_from_pem_files() -> None:
    pem = pem_of(key()).encode()
    assert private_key(pem).private_bytes_raw() == key().private_bytes_raw()
    assert public_key(public_pem_of(key())) == key().public_key()


def test_private_key_of_another_algorithm_is_refused() -> None:
    pem = generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with pytest.raises(ValueError, match="a private key of Ed25519 is accepted"):
        private_key(pem)
