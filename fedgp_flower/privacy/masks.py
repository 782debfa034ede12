"""Masks that cancel in a total: fixed-point numbers and pairwise keystreams.

A summand x becomes q = rint(2^80 x) mod 2^128, two limbs of 64 bits. Sites i < j share a secret k_ij. For a question
with hash H, both sites expand the secret to the keystream G(k_ij, H); site i adds it and site j subtracts it::

    sent_i = q_i + Σ_{j > i} G(k_ij, H) − Σ_{j < i} G(k_ij, H)   mod 2^128,      Σ_i sent_i = Σ_i q_i   mod 2^128.

Each of K sites refuses to encode |x| > 2^46 / K, so |Σ q| ≤ 2^126 + K/2 < 2^127: a residue stands for one signed
integer. The rounding error of a total is at most K 2^-81. The first word counts the summands. A site that cannot answer
sends masked zeros. A count outside 0 … K shows that the masks did not cancel (Bonawitz et al., *Practical secure
aggregation*, 2017, without their second mask; see ``docs/privacy.md``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
from numpy.typing import NDArray

from fedgp_flower import compensated_sums
from fedgp_flower.errors import NumericsError, ProtocolError
from fedgp_flower.typing import Array

Words = NDArray[np.uint64]
"""Residues mod 2^128, [n, 2]: low limb, high limb."""

FRACTION_BITS = 80
LARGEST_TOTAL = 2.0**46
"""Each entry of a summand of K sites is at most 2^46 / K."""
ALL = slice(None)


def encode(values: Array, sites: int) -> Words:
    """Return the residues of a summand of ``sites`` sites.

    >>> encode(np.array([-(2.0**-80), 2.0**-16]), 3).tolist()
    [[18446744073709551615, 18446744073709551615], [0, 1]]
    """
    bound = LARGEST_TOTAL / sites
    with np.errstate(invalid="ignore"):
        invalid = int((~(np.abs(values) <= bound)).sum())
    if invalid:
        raise NumericsError(
            f"{invalid} of {np.size(values)} entries of a summand are not finite or larger than 2^46 / {sites} sites; "
            "scale the data (`standardise = true`)"
        )
    size = np.rint(np.ldexp(np.abs(values), FRACTION_BITS))
    high = np.floor(np.ldexp(size, -64))
    words = np.empty((np.size(values), 2), np.uint64)
    words[:, 0] = size - np.ldexp(high, 64)  # exact: the difference has at most 53 bits
    words[:, 1] = high
    _negate(words, np.signbit(values))
    return words


def decode(words: Words) -> Array:
    """Return the numbers nearest to residues."""
    size = words.copy()
    negative = (words[:, 1] >> np.uint64(63)).astype(bool)
    _negate(size, negative)
    halves = size.astype("<u8", copy=False).view("<u4").astype(np.float64)  # [n, 4]; two words do not fit one number
    values = compensated_sums.start(np.ldexp(halves[:, 3], 96 - FRACTION_BITS))
    for place in (2, 1, 0):
        values = compensated_sums.plus(values, np.ldexp(halves[:, place], 32 * place - FRACTION_BITS))
    return np.where(negative, -1.0, 1.0) * compensated_sums.rounded(values)


def add(total: Words, words: Words) -> None:
    """Add words to a total in place, mod 2^128."""
    total[:, 0] += words[:, 0]
    carry = total[:, 0] < words[:, 0]
    total[:, 1] += words[:, 1]
    total[:, 1] += carry


def _negate(words: Words, where: NDArray[np.bool_] | slice = ALL) -> None:
    words[where] = ~words[where]
    words[where, 0] += np.uint64(1)
    words[where, 1] += words[where, 0] == 0


@lru_cache(maxsize=4096)
def pair_secret(private: bytes, public: bytes, info: bytes) -> bytes:
    """Return k_ij, the secret that two sites derive from their X25519 keys; ``info`` names the run and both sites."""
    try:
        key = X25519PrivateKey.from_private_bytes(private)
        shared = key.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise ProtocolError("a key of the roster is not a valid X25519 key") from None
    return HKDF(SHA256(), 32, salt=None, info=info).derive(shared)


def keystream(secret: bytes, question: bytes, length: int) -> Words:
    """Return G(k_ij, H), ``length`` residues; the nonce may be 0 because each question has its own key."""
    key = HKDFExpand(SHA256(), 32, info=b"fedgp mask" + question).derive(secret)
    words = np.zeros((length, 2), np.dtype("<u8"))
    cipher = Cipher(ChaCha20(key, bytes(16)), None).encryptor()
    cipher.update_into(words.data.cast("B"), words.data.cast("B"))
    return words.astype(np.uint64, copy=False)


def counted(values: Array, sites: int) -> Words:
    """Return [1 ‖ q], the words of a summand."""
    head = np.array([[1, 0]], np.uint64)
    return np.concatenate([head, encode(np.ravel(values), sites)])


def nothing(length: int) -> Words:
    """Return [0 ‖ 0], the words of a site that cannot answer."""
    return np.zeros((length + 1, 2), np.uint64)


def masked(words: Words, secrets: Mapping[str, bytes], site: str, question: bytes) -> Words:
    """Return the words of ``site`` plus the masks of the secrets that it shares with the other sites."""
    result = words.copy()
    for other, secret in secrets.items():
        mask = keystream(secret, question, len(words))
        if site > other:
            _negate(mask)
        add(result, mask)
    return result


def total(parts: Iterable[Words]) -> tuple[int, Array]:
    """Return the number of summands, an unsigned integer of 128 bits, and their sum."""
    first, *others = parts
    words = first.copy()
    for part in others:
        add(words, part)
    return int(words[0, 0]) | int(words[0, 1]) << 64, decode(words[1:])
