"""Keys, certificates and the token of a server that belongs to one machine.

Owns: making a certificate authority, the server's certificate, an administrator's, and a key to sign tokens with.
May not touch: sockets.
Start reading at: `make_missing`. As a program it does that for a directory and hosts given as arguments.
"""

import ipaddress
import socket
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from moorage.apiserver.access.pki import NODE_CLIENT, CertificateFacts, ServerIdentity, write_private

_TEN_YEARS = timedelta(days=3650)


def make_missing(identity: ServerIdentity, hosts: tuple[str, ...]) -> None:
    """Make the authority, the administrator's certificate and the signing key where they are missing, and the
    server's certificate for these hosts."""
    directory = identity.directory
    if not (directory / "ca.key").exists() or not identity.ca.exists():
        _make_authority(directory)
    if not all(path.exists() for path in identity.admin):
        subject = _name("moorage-admin", "system:masters")
        _issue(directory, "admin", subject, None, ExtendedKeyUsageOID.CLIENT_AUTH)
    if not all(path.exists() for path in identity.node_client):
        _issue(directory, "node-client", _name(NODE_CLIENT), None, ExtendedKeyUsageOID.CLIENT_AUTH)
    if not identity.signing_key.exists():
        write_private(identity.signing_key, _private_bytes(ec.generate_private_key(ec.SECP256R1())))
    _issue(directory, "server", _name("moorage-apiserver"), hosts, ExtendedKeyUsageOID.SERVER_AUTH)
    until = (datetime.now(UTC) + _TEN_YEARS).timestamp() - 86400
    write_private(identity.note, msgspec.json.encode(CertificateFacts(sorted(hosts), until)))


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


if __name__ == "__main__":
    make_missing(ServerIdentity(Path(sys.argv[1]), token=""), tuple(sys.argv[2:]))
