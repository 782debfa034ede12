"""What a SuperLink and its SuperNodes prove themselves with: a certificate authority, a server certificate, node keys.

For trying a deployment on one machine. Between machines, certificates come from the organisation's own authority, and
each site makes its node key itself and hands over only the public half.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = datetime.timedelta(days=30)
_CURVE = ec.SECP384R1()


@dataclass(frozen=True, slots=True)
class ServerCredentials:
    """Files for TLS: the authority's certificate goes to every site, the other two stay at the server."""

    authority: Path
    certificate: Path
    key: Path


def create_server_credentials(folder: Path, host: str = "127.0.0.1") -> ServerCredentials:
    """A fresh authority and a server certificate signed by it, for ``localhost`` and ``host``.

    The authority's own key is never written: nothing can be signed with it afterwards. ``host`` is a numeric address.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority_key, server_key = ec.generate_private_key(_CURVE), ec.generate_private_key(_CURVE)
    authority_name = _name("fedgp demonstration authority")
    authority = (
        _builder(authority_name, authority_name, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(authority_key, hashes.SHA384())
    )
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(host))]
    server = (
        _builder(_name("localhost"), authority_name, server_key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    files = ServerCredentials(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    files.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    files.certificate.write_bytes(server.public_bytes(serialization.Encoding.PEM))
    _write_secret(files.key, _private_bytes(server_key, serialization.PrivateFormat.PKCS8))
    return files


def create_node_key(path: Path) -> Path:
    """A SuperNode's key pair in OpenSSH's format, as ``ssh-keygen -t ecdsa -b 384`` makes it; the public file."""
    key = ec.generate_private_key(_CURVE)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_secret(path, _private_bytes(key, serialization.PrivateFormat.OpenSSH))
    public = path.with_name(f"{path.name}.pub")
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    public.write_bytes(line)
    return public


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _private_bytes(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner has ever been able to read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
