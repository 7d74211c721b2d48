"""Certificates that a TLS library accepts, for the names that are asked for."""

from __future__ import annotations

import ipaddress
import ssl
import stat
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kvpilot_tools.cluster.certificates import CertificateAuthority, generate_signing_keys


def test_a_certificate_names_user_group_and_addresses() -> None:
    pair = CertificateAuthority("test").issue("admin", organization="system:masters", dns=("a.b",), ips=("10.96.0.1",))
    certificate = x509.load_pem_x509_certificate(pair.certificate)
    assert certificate.subject.rfc4514_string() == "O=system:masters,CN=admin"
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["a.b"]
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("10.96.0.1")]


def test_a_certificate_is_verified_by_its_authority_and_by_no_other(tmp_path: Path) -> None:
    authority, other = CertificateAuthority("one"), CertificateAuthority("two")
    pair = authority.issue("server", dns=("localhost",))
    certificate = x509.load_pem_x509_certificate(pair.certificate)
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.certificate))
    assert certificate.issuer != x509.load_pem_x509_certificate(other.certificate).subject


def test_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    CertificateAuthority("test").issue("x").write(tmp_path, "x")
    assert stat.S_IMODE((tmp_path / "x.key").stat().st_mode) == 0o600
    ssl.create_default_context().load_cert_chain(str(tmp_path / "x.crt"), str(tmp_path / "x.key"))


def test_token_keys_belong_together() -> None:
    pair = generate_signing_keys()
    private = serialization.load_pem_private_key(pair.key, password=None)
    public = serialization.load_pem_public_key(pair.certificate)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert private.public_key().public_numbers() == public.public_numbers()
