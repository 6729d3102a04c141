"""The certificate that a process shows inside QUIC: made by itself, trusted for its digest alone."""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificate:
    """A key of this process, and the certificate that it signed for itself."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate (32 bytes): what the peer is told over the signed signalling."""
        return hashlib.sha256(self.certificate.public_bytes(Encoding.DER)).digest()


def new_certificate() -> Certificate:
    """One for this process. It names nobody, and its dates say nothing: only its digest counts."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "barnraise")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC))
        .sign(key, SHA256())
    )
    return Certificate(key, certificate)
