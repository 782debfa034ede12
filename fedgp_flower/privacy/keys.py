"""The keys of a site: an Ed25519 identity key, a signed X25519 key for each run, and the public keys that it trusts.

The run key is derived from the identity key and the run's id, so that a restarted site has the same one. This gives up
forward secrecy: a thief of the identity key can remove the masks of recorded messages of past runs.
"""

from __future__ import annotations

import hashlib
import json
import os
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
from fedgp_flower.files import read_toml, write_bytes
from fedgp_flower.typing import Facts

SEED_BYTES = 32


@dataclass(frozen=True, slots=True)
class Member:
    """An entry of a roster: a site, its run key, and its signature of the key."""

    site: str
    key: str
    """X25519 public key, hexadecimal."""
    signature: str
    """Ed25519 signature of :func:`signed_words`, hexadecimal."""


def signed_words(run: str, site: str, key: str) -> bytes:
    """Return the bytes that a :class:`Member` signs."""
    return json.dumps(["fedgp run key 1", run, site, key]).encode()


@dataclass(frozen=True, slots=True)
class Identity:
    """The secret of a site: 32 bytes from which its Ed25519 key and its run keys are derived."""

    seed: bytes

    @staticmethod
    def new() -> Identity:
        """Generate an identity from the operating system's randomness."""
        return Identity(os.urandom(SEED_BYTES))

    @staticmethod
    def simulated(site: str) -> Identity:
        """Return the identity of a simulated site; it is not secret, because it is derived from the id alone."""
        return Identity(hashlib.sha256(f"fedgp simulated site {site}".encode()).digest())

    @staticmethod
    def read(path: Path) -> Identity:
        """Read the file that ``fedgp site key`` wrote."""
        try:
            seed = bytes.fromhex(path.expanduser().read_text(encoding="ascii").strip())
            if len(seed) == SEED_BYTES:
                return Identity(seed)
            why = f"is not a key of {SEED_BYTES} bytes"
        except (OSError, ValueError) as error:
            why = f"cannot be read ({error.strerror if isinstance(error, OSError) else 'not hexadecimal'})"
        raise ConfigError(f"`site-key`: {path} {why}; make one: fedgp site key")

    def write(self, path: Path) -> None:
        """Write a new file that only its owner can read."""
        try:
            handle = os.open(path.expanduser(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ConfigError(f"{path} exists: a key is never overwritten; choose another file") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}); choose another file") from None
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(self.seed.hex() + "\n")

    @property
    def public(self) -> str:
        """The Ed25519 public key for a trust file, hexadecimal."""
        return Ed25519PrivateKey.from_private_bytes(self.seed).public_key().public_bytes_raw().hex()

    def run_key(self, run: str) -> bytes:
        """Return the X25519 private key of a run."""
        return HKDF(SHA256(), SEED_BYTES, salt=None, info=b"fedgp run key 1 " + run.encode()).derive(self.seed)

    def member(self, run: str, site: str) -> Member:
        """Return this site's entry of the roster of a run."""
        key = X25519PrivateKey.from_private_bytes(self.run_key(run)).public_key().public_bytes_raw().hex()
        signature = Ed25519PrivateKey.from_private_bytes(self.seed).sign(signed_words(run, site, key))
        return Member(site, key, signature.hex())


def short_hash(content: bytes) -> str:
    """Return a hash that two people can compare by telephone: four groups of four digits."""
    short = hashlib.sha256(content).hexdigest()[:16]
    return "-".join(short[start : start + 4] for start in range(0, 16, 4))


def fingerprint(public: str) -> str:
    """Return the short hash of a public key."""
    return short_hash(bytes.fromhex(public))


@dataclass(frozen=True, slots=True)
class Trust:
    """The public keys of the sites with which a site shares masks."""

    keys: Mapping[str, str] | None
    """Public key by site id; None in a simulation, where ids determine the keys."""

    @staticmethod
    def read(path: Path) -> Trust:
        """Read a trust file: TOML with lines ``SITE = "public key"`` below ``[sites]``."""
        trust, sites = Trust({}), read_toml(path, "; check `trust`").get("sites")
        if not isinstance(sites, dict):
            raise ConfigError(
                f'`trust`: {path} is no trust file; expected [sites] and lines SITE = "public key"; see `fedgp site`'
            )
        for site, public in sites.items():
            trust = trust.with_site(site, str(public))
        return trust

    @staticmethod
    def of(node_config: Facts) -> Trust:
        """Read the trust file of a node; without one, or without a site in it, the node may answer in the clear."""
        return Trust.read(Path(str(node_config["trust"]))) if node_config.get("trust") else Trust({})

    def with_site(self, site: str, public: str) -> Trust:
        """Return this trust with one more site."""
        keys = dict(self.keys or {})
        if len(public) != 2 * SEED_BYTES or not set(public) <= set("0123456789abcdef"):
            raise ConfigError(
                f"the public key of {site!r} should be {2 * SEED_BYTES} hexadecimal digits; ask its owner"
            )
        if keys.get(site, public) != public:
            known = fingerprint(keys[site])
            raise ConfigError(f"site {site!r} has another key already ({known}); remove its line first")
        if same_key := [name for name, key in keys.items() if key == public and name != site]:
            raise ConfigError(f"this is the key of site {same_key[0]!r}")
        return Trust({**keys, site: public})

    def write(self, path: Path) -> None:
        """Write a trust file."""
        write_bytes(path.expanduser(), tomli_w.dumps({"sites": dict(self.keys or {})}).encode())

    def require(self, run: str, member: Member) -> None:
        """Raise ProtocolError if a site of a roster is not trusted, or did not sign its run key."""
        public = _simulated_public_key(member.site) if self.keys is None else self.keys.get(member.site)
        if public is None:
            raise ProtocolError(f"site {member.site!r} of the roster is not in this site's trust file")
        if not _is_signed(public, signed_words(run, member.site, member.key), member.signature):
            raise ProtocolError(
                f"the key of site {member.site!r} in the roster is not signed by that site for this run"
            )


@lru_cache(maxsize=4096)
def _simulated_public_key(site: str) -> str:
    return Identity.simulated(site).public


@lru_cache(maxsize=4096)
def _is_signed(public: str, words: bytes, signature: str) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), words)
    except (InvalidSignature, ValueError):
        return False
    return True
