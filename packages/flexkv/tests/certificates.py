# SPDX-License-Identifier: Apache-2.0
"""A certificate authority of a test, and a server's certificate."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: it comes with moto")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

PEM = serialization.Encoding.PEM


class Certificates(NamedTuple):
    """Files in PEM: the authority's certificate, and the server's of 127.0.0.1 with its key."""

    authority: Path
    server: Path

    @classmethod
    def write(cls, folder: Path) -> Certificates:
        made = cls(folder / "authority.pem", folder / "server.pem")
        root, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        made.authority.write_bytes(_signed(root, root, "a private authority"))
        private = key.private_bytes(
            PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        made.server.write_bytes(_signed(key, root, "localhost") + private)
        return made

    def context(self) -> ssl.SSLContext:
        """For the server."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.server)
        return context


def _signed(key: ec.EllipticCurvePrivateKey, root: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    issuer, own = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)])
        for each in ("a private authority", name)
    )
    made = (
        x509.CertificateBuilder()
        .subject_name(own)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=key is root, path_length=None), critical=True)
        .sign(root, hashes.SHA256())
    )
    return made.public_bytes(PEM)
