"""Credentials: they reach the processes that need them and appear nowhere else."""

from __future__ import annotations

import copy
import pickle
import socket

import cloudpickle
import pytest

from monarch import config
from monarch._base.ids import ProcRef
from monarch._net import credentials
from monarch._net.credentials import Credentials
from monarch._wire import messages

SECRET = b"a secret of thirty-two characters"
SHOWN = Credentials(SECRET, b"-----BEGIN PRIVATE KEY-----", b"-----BEGIN CERTIFICATE-----")
REF = ProcRef("p<1>", "tcp://127.0.0.1:1/p", "tcp://127.0.0.1:1")


@pytest.fixture(autouse=True)
def unset():
    credentials.set_credentials(None)
    yield
    credentials.set_credentials(None)


def test_they_travel_over_a_socket_pair_as_they_are():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        credentials.send(ours, SHOWN)
        assert credentials.receive(theirs) == SHOWN
        ours.close()
        with pytest.raises(EOFError, match="has ended"):
            credentials.receive(theirs)


@pytest.mark.parametrize("text", [repr, str, "{}".format, "%r".__mod__])
def test_they_are_never_printed(text):
    shown = text(SHOWN)
    assert shown == "Credentials(secret=yes, tls=yes)"
    assert text(Credentials()) == "Credentials(secret=no, tls=no)"


@pytest.mark.parametrize("dump", [pickle.dumps, cloudpickle.dumps, copy.deepcopy], ids=lambda f: f.__name__)
def test_they_can_t_be_pickled(dump):
    with pytest.raises(TypeError, match="can't be pickled"):
        dump(SHOWN)


def test_messages_that_carry_them_do_not_show_them():
    encoded = credentials.encode(SHOWN)
    boot = messages.ProcBoot(REF, REF, REF, "p", {}, "entry", credentials=encoded)
    spawn = messages.SpawnProcs("m", [], REF, {"MONARCH_SECRET": SECRET.decode()}, "/", [], [], {}, 1.0, credentials=encoded)
    for text in (repr(boot), str(spawn), repr([spawn])):
        assert "secret" not in text and "BEGIN" not in text and "p" in text
    assert messages.decode_boot(messages.encode(boot)) == boot


def test_the_configuration_that_is_handed_on_has_neither_secret_nor_certificates(monkeypatch):
    monkeypatch.setenv("MONARCH_SECRET", SECRET.decode())
    assert credentials.own_credentials().secret == SECRET
    with config.configured(hyperactor_tls_cert="/c.pem", hyperactor_tls_key="/k.pem", hyperactor_tls_ca="/a.pem"):
        text = repr(config.snapshot())
    assert SECRET.decode() not in text and ".pem" not in text


def test_a_process_of_this_host_gets_those_that_are_known_only():
    assert credentials.encoded_credentials() == b""
    credentials.set_credentials(SHOWN)
    assert credentials.decode(credentials.encoded_credentials()) == SHOWN


def test_one_of_key_and_authority_is_not_enough():
    with pytest.raises(ValueError, match=r"TLS needs ca as well\n  next:  private_key is PEM"):
        credentials.given_credentials(b"key", None)
    with pytest.raises(ValueError, match=r"TLS needs private_key as well"):
        credentials.given_credentials(None, b"ca")


def test_tls_without_a_certificate_says_how_to_get_one():
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ValueError, match=r"tls:// needs a certificate.*\n  next:  .*monarch certs"):
        Credentials(SECRET).dialer_tls(ours)


def test_a_file_that_can_t_be_read_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"can't be read .*\n  where: .*/no-such\.pem\n  next:  .*monarch certs"):
        credentials.given_credentials(tmp_path / "no-such.pem", b"ca")
