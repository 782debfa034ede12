"""Who a site is: an Ed25519 identity, the identities it trusts, and an X25519 key for each run, signed.

The key of a run follows from the identity and the run's id, so that a site that was restarted has the same one. That
gives up forward secrecy: whoever takes an identity key later can take off the masks of messages kept from past runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import tomli_w
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedgp_flower.errors import ConfigError, ProtocolError

SEED_BYTES = 32


@dataclass(frozen=True, slots=True)
class Member:
    """A site of a roster: its key of the run, and its signature that the key is its."""

    site: str
    key: str
    """X25519 public key, hexadecimal."""
    signature: str
    """Ed25519, hexadecimal, over :func:`signed_words`."""


def signed_words(run: str, site: str, key: str) -> bytes:
    """The signature of a :class:`Member` is of these bytes."""
    return json.dumps(["fedgp run key 1", run, site, key]).encode()


@dataclass(frozen=True, slots=True)
class Identity:
    """The secret of a site: 32 bytes that its Ed25519 key and all keys of runs follow from."""

    seed: bytes

    @staticmethod
    def new() -> Identity:
        """From the operating system's randomness."""
        return Identity(os.urandom(SEED_BYTES))

    @staticmethod
    def simulated(site: str) -> Identity:
        """Of a simulated site: known to everybody who knows its id, so it keeps nothing secret."""
        return Identity(hashlib.sha256(f"fedgp simulated site {site}".encode()).digest())

    @staticmethod
    def read(path: Path) -> Identity:
        """From the file that ``fedgp site key`` wrote."""
        try:
            seed = bytes.fromhex(path.expanduser().read_text(encoding="ascii").strip())
            if len(seed) == SEED_BYTES:
                return Identity(seed)
            why = f"holds no key of {SEED_BYTES} bytes"
        except (OSError, ValueError) as error:
            why = f"cannot be read ({error.strerror if isinstance(error, OSError) else 'not hexadecimal'})"
        raise ConfigError(f"`site-key`: {path} {why}; make one: fedgp site key")

    def write(self, path: Path) -> None:
        """Into a new file that its owner alone may read."""
        try:
            handle = os.open(path.expanduser(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ConfigError(f"{path} exists: a key is never overwritten; choose another file") from None
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(self.seed.hex() + "\n")

    @property
    def public(self) -> str:
        """The Ed25519 public key, hexadecimal: what stands in a trust file."""
        return Ed25519PrivateKey.from_private_bytes(self.seed).public_key().public_bytes_raw().hex()

    def run_key(self, run: str) -> bytes:
        """The X25519 private key of a run."""
        return HKDF(SHA256(), SEED_BYTES, salt=None, info=b"fedgp run key 1 " + run.encode()).derive(self.seed)

    def member(self, run: str, site: str) -> Member:
        """This site's line of the roster of a run."""
        key = X25519PrivateKey.from_private_bytes(self.run_key(run)).public_key().public_bytes_raw().hex()
        signature = Ed25519PrivateKey.from_private_bytes(self.seed).sign(signed_words(run, site, key))
        return Member(site, key, signature.hex())


def short_hash(content: bytes) -> str:
    """A hash to be read out over the telephone."""
    short = hashlib.sha256(content).hexdigest()[:16]
    return "-".join(short[start : start + 4] for start in range(0, 16, 4))


def fingerprint(public: str) -> str:
    """A public key in short."""
    return short_hash(bytes.fromhex(public))


@dataclass(frozen=True, slots=True)
class Trust:
    """The public keys of the sites that a site adds its summands to. None: a simulation, where they follow from ids."""

    keys: Mapping[str, str] | None

    @staticmethod
    def read(path: Path) -> Trust:
        """From a trust file: TOML, ``[sites]`` with a site's id and its public key on each line."""
        trust = Trust({})
        try:
            sites = dict(tomllib.loads(path.expanduser().read_text(encoding="utf-8"))["sites"])
        except OSError as error:
            raise ConfigError(f"`trust`: {path} cannot be read ({error.strerror})") from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f'`trust`: {path} is no trust file, expected [sites] and lines SITE = "public key"; see `fedgp site`'
            ) from None
        for site, public in sites.items():
            trust = trust.with_site(site, str(public))
        return trust

    def with_site(self, site: str, public: str) -> Trust:
        """One more site."""
        keys = dict(self.keys or {})
        if len(public) != 2 * SEED_BYTES or not set(public) <= set("0123456789abcdef"):
            raise ConfigError(
                f"the public key of {site!r} should be {2 * SEED_BYTES} hexadecimal digits; see its owner"
            )
        if keys.get(site, public) != public:
            known = fingerprint(keys[site])
            raise ConfigError(f"site {site!r} has another key already ({known}); take out its line first")
        if other := [name for name, key in keys.items() if key == public and name != site]:
            raise ConfigError(f"that is the key of site {other[0]!r}")
        return Trust({**keys, site: public})

    def write(self, path: Path) -> None:
        """As a trust file."""
        path.expanduser().write_text(tomli_w.dumps({"sites": dict(self.keys or {})}), encoding="utf-8")

    def require(self, run: str, member: Member) -> None:
        """Refuse a line of a roster that its site has not signed."""
        public = _simulated(member.site) if self.keys is None else self.keys.get(member.site)
        if public is None:
            raise ProtocolError(f"site {member.site!r} of the roster is not in this site's trust file")
        if not _verified(public, signed_words(run, member.site, member.key), member.signature):
            raise ProtocolError(
                f"the key of site {member.site!r} in the roster is not signed by that site for this run"
            )


@lru_cache(maxsize=4096)
def _simulated(site: str) -> str:
    return Identity.simulated(site).public


@lru_cache(maxsize=4096)
def _verified(public: str, words: bytes, signature: str) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), words)
    except (InvalidSignature, ValueError):
        return False
    return True
