"""Certificates of a job: what is in them, who can read them, and what is refused."""

from __future__ import annotations

import datetime
import re
import resource
import stat
import sys
from pathlib import Path

import pytest
from cryptography import x509

from monarch._base.errors import MissingExtraError
from monarch._net.certificates import mint_job_certificates


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return mint_job_certificates(tmp_path_factory.mktemp("certs") / "job")


@pytest.fixture
def member(files):
    return x509.load_pem_x509_certificate(certificate_in(files.cert))


@pytest.fixture
def authority(files):
    return x509.load_pem_x509_certificate(certificate_in(files.ca))


def certificate_in(path):
    return re.search(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n", Path(path).read_bytes(), re.DOTALL)[0]


def extension(certificate, kind):
    return certificate.extensions.get_extension_for_class(kind)


def test_the_folder_and_its_two_files_are_for_this_user_alone(files):
    folder = Path(files.ca).parent
    assert sorted(path.name for path in folder.iterdir()) == ["ca.pem", "member.pem"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert (files.cert, files.key, files.ca) == (str(folder / "member.pem"), str(folder / "member.pem"), str(folder / "ca.pem"))


def test_the_member_is_signed_by_the_authority_and_may_be_either_end(member, authority):
    member.verify_directly_issued_by(authority)
    authority.verify_directly_issued_by(authority)
    usage = extension(member, x509.ExtendedKeyUsage).value
    assert {x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH} == set(usage)
    assert member.public_key().curve.name == authority.public_key().curve.name == "secp256r1"


def test_the_member_can_sign_no_certificate(member, authority):
    assert extension(member, x509.BasicConstraints).value.ca is False
    assert extension(member, x509.KeyUsage).value.key_cert_sign is False
    assert extension(authority, x509.BasicConstraints).value == x509.BasicConstraints(ca=True, path_length=0)
    assert extension(authority, x509.KeyUsage).value.digital_signature is False


def test_nobody_keeps_the_key_of_the_authority(files):
    assert b"PRIVATE" not in Path(files.ca).read_bytes()
    assert Path(files.cert).read_bytes().count(b"BEGIN PRIVATE KEY") == 1


@pytest.mark.parametrize("days", [1, 30, 400])
def test_they_are_valid_from_an_hour_ago_for_so_many_days(tmp_path, days):
    made = mint_job_certificates(tmp_path / "job", days=days)
    now = datetime.datetime.now(datetime.UTC)
    for path in (made.cert, made.ca):
        certificate = x509.load_pem_x509_certificate(certificate_in(path))
        assert abs(now - datetime.timedelta(hours=1) - certificate.not_valid_before_utc) < datetime.timedelta(minutes=1)
        assert abs(now + datetime.timedelta(days=days) - certificate.not_valid_after_utc) < datetime.timedelta(minutes=1)


def test_two_jobs_have_nothing_in_common(files, tmp_path):
    other = mint_job_certificates(tmp_path / "job")
    assert certificate_in(files.ca) != certificate_in(other.ca)
    names = {x509.load_pem_x509_certificate(certificate_in(path)).subject for path in (files.ca, other.ca, files.cert, other.cert)}
    assert len(names) == 4


def test_a_folder_that_is_there_is_not_touched(tmp_path):
    (tmp_path / "job").mkdir()
    with pytest.raises(FileExistsError, match=r"job is there already\n  next:  name a folder that is not"):
        mint_job_certificates(tmp_path / "job")
    assert list((tmp_path / "job").iterdir()) == []


def test_what_could_not_be_written_is_removed(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # a full disk, as far as this process can tell
    try:
        with pytest.raises(OSError, match="File too large"):
            mint_job_certificates(tmp_path / "job")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_without_the_library_the_extra_is_named_and_nothing_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[tls\]' in the checkout"):
        mint_job_certificates(tmp_path / "job")
    assert list(tmp_path.iterdir()) == []


def test_no_days_are_refused(tmp_path):
    with pytest.raises(ValueError, match="for 0 days make no sense\n  next:  give at least 1"):
        mint_job_certificates(tmp_path / "job", days=0)
    assert list(tmp_path.iterdir()) == []
