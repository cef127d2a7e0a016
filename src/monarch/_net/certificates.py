"""Certificates of one job: an authority that signs one certificate, which all members share, and then forgets its key.

Nobody can add a member afterwards, so there is nothing to revoke and no authority to guard. A job that outlives its certificates,
or that should tell its machines apart, brings its own: `tls.py` takes any that one authority signed.

Needs the extra `tls`. Using certificates needs the standard library only.

Read next: `tls.py` for what is asked of them.
"""

from __future__ import annotations

import datetime
import os
import shutil
from typing import Any

from monarch._base.errors import explain, require
from monarch._net.tls import TlsFiles

DEFAULT_DAYS = 30
MEMBER_FILE = "member.pem"
"""Private key and certificate chain: what a script gives as `private_key`."""
CA_FILE = "ca.pem"
"""The authority's certificate: what a script gives as `ca`."""
_CLOCKS_MAY_DIFFER = datetime.timedelta(hours=1)


def mint_job_certificates(folder: str | os.PathLike[str], *, days: int = DEFAULT_DAYS, now: datetime.datetime | None = None) -> TlsFiles:
    """Make a folder with the certificates of a job: `member.pem` and `ca.pem`, for this user alone.

    Args:
        folder: it must not be there yet; the one that holds it must.
        days: for so long they are valid, >= 1.
        now: when that begins, with a time zone; None: now. An hour before is covered too, because clocks differ.

    Returns:
        Their absolute paths.

    Raises:
        MissingExtraError: `cryptography` is not installed.
        FileExistsError: the folder is there; nothing was changed.
        ValueError: `days` < 1.

    Cost: some milliseconds, for two key pairs (ECDSA P-256).
    """
    if days < 1:
        raise ValueError(explain(f"certificates for {days} days make no sense", next="give at least 1"))
    begin = now or datetime.datetime.now(datetime.UTC)
    member, ca = _mint(begin - _CLOCKS_MAY_DIFFER, begin + datetime.timedelta(days=days))
    path = os.path.abspath(folder)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError as exc:
        raise FileExistsError(explain(f"{path} is there already", next="name a folder that is not; it is made")) from exc
    member_path, ca_path = os.path.join(path, MEMBER_FILE), os.path.join(path, CA_FILE)
    try:
        _write(member_path, member)
        _write(ca_path, ca)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return TlsFiles(cert=member_path, key=member_path, ca=ca_path)


def _write(path: str, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)


def _mint(begin: datetime.datetime, end: datetime.datetime) -> tuple[bytes, bytes]:
    """PEM of the member (key, certificate) and of the authority (certificate)."""
    serialization = require("cryptography.hazmat.primitives.serialization", extra="tls")
    x509 = require("cryptography.x509", extra="tls")
    job = f"monarch job {os.urandom(4).hex()}"
    ca_key, member_key = _new_key(), _new_key()
    ca_name = _name(f"{job} authority")
    authority = _builder(ca_name, ca_name, ca_key, ca_key).not_valid_before(begin).not_valid_after(end)
    authority = authority.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    authority = authority.add_extension(_usage("key_cert_sign"), critical=True)
    member = _builder(ca_name, _name(f"{job} member"), ca_key, member_key).not_valid_before(begin).not_valid_after(end)
    member = member.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    member = member.add_extension(_usage("digital_signature"), critical=True)
    both = [x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    member = member.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()  # the file is private; a password would have to lie beside it
    return (
        member_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain) + _signed(member, ca_key).public_bytes(pem),
        _signed(authority, ca_key).public_bytes(pem),
    )


def _new_key() -> Any:
    ec = require("cryptography.hazmat.primitives.asymmetric.ec", extra="tls")
    return ec.generate_private_key(ec.SECP256R1())


def _name(text: str) -> Any:
    x509 = require("cryptography.x509", extra="tls")
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _usage(*allowed: str) -> Any:
    x509 = require("cryptography.x509", extra="tls")
    names = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**{name: name in allowed for name in names})


def _builder(issuer: Any, subject: Any, issuer_key: Any, subject_key: Any) -> Any:
    x509 = require("cryptography.x509", extra="tls")
    public, signer = subject_key.public_key(), issuer_key.public_key()
    return (
        x509.CertificateBuilder(issuer_name=issuer, subject_name=subject, public_key=public, serial_number=x509.random_serial_number())
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    )


def _signed(builder: Any, key: Any) -> Any:
    hashes = require("cryptography.hazmat.primitives.hashes", extra="tls")
    return builder.sign(key, hashes.SHA256())
