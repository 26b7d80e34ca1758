"""Keys, certificates and the token of a server that belongs to one machine.

Owns: the `pki` directory: a certificate authority, the server's certificate, an administrator's, and a signing key.
May not touch: sockets.
Start reading at: `ensure_identity`.
"""

import ipaddress
import os
import secrets
import socket
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_TEN_YEARS = timedelta(days=3650)


@dataclass(frozen=True, slots=True)
class Identity:
    """Where the files are, and the token that they go with."""

    directory: Path
    token: str

    @property
    def ca(self) -> Path:
        return self.directory / "ca.crt"

    @property
    def server(self) -> tuple[Path, Path]:
        return self.directory / "server.crt", self.directory / "server.key"

    @property
    def admin(self) -> tuple[Path, Path]:
        return self.directory / "admin.crt", self.directory / "admin.key"

    @property
    def signing_key(self) -> Path:
        return self.directory / "tokens.key"


def ensure_identity(data_dir: Path, hosts: tuple[str, ...] = ()) -> Identity:
    """Make what is missing; a server certificate is made again when it does not cover the hosts."""
    directory = data_dir / "pki"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    token_path = directory / "token"
    if not token_path.exists():
        write_private(token_path, secrets.token_urlsafe(32).encode())
    identity = Identity(directory, token_path.read_text().strip())
    if not (directory / "ca.key").exists() or not identity.ca.exists():
        _make_authority(directory)
    if not all(path.exists() for path in identity.admin):
        subject = _name("moorage-admin", "system:masters")
        _issue(directory, "admin", subject, None, ExtendedKeyUsageOID.CLIENT_AUTH)
    if not _covers(identity.server[0], hosts):
        _issue(directory, "server", _name("moorage-apiserver"), hosts, ExtendedKeyUsageOID.SERVER_AUTH)
    if not identity.signing_key.exists():
        write_private(identity.signing_key, _private_bytes(ec.generate_private_key(ec.SECP256R1())))
    return identity


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def _private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _name(common: str, organization: str = "") -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common)]
    if organization:
        parts.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(parts)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    start = datetime.now(UTC) - timedelta(hours=1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + _TEN_YEARS)
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, key_cert_sign=signs_certificates, crl_sign=signs_certificates, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _make_authority(directory: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("moorage-ca")
    certificate = (
        _builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_private(directory / "ca.key", _private_bytes(key))
    write_private(directory / "ca.crt", certificate.public_bytes(serialization.Encoding.PEM))


def _issue(
    directory: Path, stem: str, subject: x509.Name, hosts: tuple[str, ...] | None, purpose: x509.ObjectIdentifier
) -> None:
    authority = x509.load_pem_x509_certificate((directory / "ca.crt").read_bytes())
    signer = serialization.load_pem_private_key((directory / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        _builder(subject, authority.subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if hosts is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName(_alternatives(hosts)), critical=False)
    certificate = builder.sign(signer, hashes.SHA256())
    write_private(directory / f"{stem}.key", _private_bytes(key))
    write_private(directory / f"{stem}.crt", certificate.public_bytes(serialization.Encoding.PEM))


_NAMES: tuple[str, ...] = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
_NAMES += ("kubernetes.default.svc.cluster.local",)


def _alternatives(hosts: tuple[str, ...]) -> list[x509.GeneralName]:
    found: dict[str, x509.GeneralName] = {}
    for host in ("127.0.0.1", "::1", *_NAMES, socket.gethostname(), *hosts):
        try:
            found[host] = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            found[host] = x509.DNSName(host)
    return list(found.values())


def _covers(path: Path, hosts: tuple[str, ...]) -> bool:
    if not path.exists() or not path.with_suffix(".key").exists():
        return False
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    if certificate.not_valid_after_utc < datetime.now(UTC) + timedelta(days=30):
        return False
    have = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return all(name in list(have) for name in _alternatives(hosts))
