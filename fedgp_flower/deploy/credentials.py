"""Credentials of a federation: a certificate authority, a server certificate, and the sites' node keys."""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedgp_flower.errors import ConfigError

_CURVE = ec.SECP384R1()


def create_authority(folder: Path, days: int) -> None:
    """Write ``ca.crt`` and ``ca.key`` of an authority for certificates of a SuperLink; only the owner reads the key.

    Whoever has the key can pose as the SuperLink.
    """
    key, name = ec.generate_private_key(_CURVE), _name("fedgp authority")
    certificate = _builder(name, name, key, days, authority=True).sign(key, hashes.SHA384())
    (folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_secret(folder / "ca.key", key, serialization.PrivateFormat.PKCS8)


def certify(authority: Path, folder: Path, host: str, days: int) -> None:
    """Write or replace ``server.key`` and ``server.pem`` for ``localhost`` and a host, and copy ``ca.crt``."""
    try:
        signer = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
        certificate = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{authority}: no authority in ca.crt and ca.key ({error})") from None
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key, host = ec.generate_private_key(_CURVE), host.strip("[]")  # of an IPv6 address
    try:
        name: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        name = x509.DNSName(host)
    local = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    server = (
        _builder(_name(host), certificate.subject, key, days, authority=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(list(dict.fromkeys([*local, name]))), critical=False)
        .add_extension(issuer, critical=False)
        .sign(signer, hashes.SHA384())
    )
    (folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").unlink(missing_ok=True)
    (folder / "server.pem").write_bytes(server.public_bytes(serialization.Encoding.PEM))
    _write_secret(folder / "server.key", key, serialization.PrivateFormat.PKCS8)


def create_node_key(path: Path) -> Path:
    """Write a SuperNode's key pair, like ``ssh-keygen -t ecdsa -b 384``. Return the public file."""
    key = ec.generate_private_key(_CURVE)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_secret(path, key, serialization.PrivateFormat.OpenSSH)
    public = path.with_name(f"{path.name}.pub")
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    public.write_bytes(line)
    return public


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int, *, authority: bool
) -> x509.CertificateBuilder:
    """Return the common part of the certificates of an authority and of a server."""
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    names = ["digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"]
    names += ["key_cert_sign", "crl_sign", "encipher_only", "decipher_only"]
    used = {"key_cert_sign", "crl_sign"} if authority else {"digital_signature"}
    usage = x509.KeyUsage(**{name: name in used for name in names})
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - datetime.timedelta(minutes=5))
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(usage, critical=True)
    )


def _write_secret(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    """Write a private key to a new file that only its owner can read."""
    content = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
