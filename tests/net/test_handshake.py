"""The handshake: each byte counts, each message is read exactly, and whoever lacks the secret gets nowhere, whatever it sends."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monarch._base.errors import InternalError
from monarch._net import handshake
from monarch._net.handshake import (
    MAX_PREFACE_BYTES,
    MAX_PROOF_BYTES,
    MAX_STATUS_BYTES,
    MAX_UNPROVEN_BYTES,
    AcceptorProof,
    DialerProof,
    HandshakeError,
    Preface,
    PrefaceReader,
    Status,
    StatusCode,
    StatusReader,
    check_status,
    encode_preface,
    encode_status,
)

SECRET, OTHER = b"the secret of this job", b"the secret of that job"
BINDING = hashlib.sha256(b"two certificates").digest()


def counted(seed):
    """Entropy that differs for each seed and is the same in each run."""
    return lambda count: hashlib.shake_128(seed).digest(count)


def dialer(secret=SECRET, target="abc.3", binding=b"", seed=b"d"):
    return DialerProof(secret, target, binding, entropy=counted(seed))


def acceptor(secret=SECRET, target="abc.3", binding=b"", seed=b"a"):
    return AcceptorProof(secret, target, binding, entropy=counted(seed))


def prove(left, right):
    """Let a dialer and an acceptor talk; all that each said."""
    said = [left.first_bytes()]
    said.append(right.feed(said[0]))
    said.append(left.feed(said[1]))
    said.append(right.feed(said[2]))
    return said


def read(reader, data, cuts=()):
    """Feed `data` as a driver does, at most what is needed, in pieces of the lengths `cuts`; what was left over."""
    cuts = iter(cuts)
    while needed := min(reader.needed(), len(data)):
        count = min(needed, next(cuts, needed))
        reader.feed(data[:count])
        data = data[count:]
    return data


# --- preface and status --------------------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=("C", "Z")), max_size=60)
prefaces = st.builds(Preface, names, st.booleans())
statuses = st.builds(Status, st.sampled_from(StatusCode), st.booleans(), names)


@given(prefaces, st.binary(max_size=20), st.lists(st.integers(1, 9), max_size=40))
def test_a_preface_survives_any_split_and_what_follows_is_left_alone(preface, rest, cuts):
    reader = PrefaceReader()
    assert read(reader, encode_preface(preface) + rest, cuts) == rest
    assert reader.done
    assert reader.preface == preface


@given(statuses, st.binary(max_size=20), st.lists(st.integers(1, 9), max_size=40))
def test_a_status_survives_any_split_and_what_follows_is_left_alone(status, rest, cuts):
    reader = StatusReader()
    assert read(reader, encode_status(status) + rest, cuts) == rest
    assert reader.done
    assert reader.status == status


@pytest.mark.parametrize(
    ("reader", "data"),
    [(PrefaceReader, encode_preface(Preface("abc.3", True))), (StatusReader, encode_status(Status(StatusCode.GONE, True, "killed")))],
    ids=["preface", "status"],
)
def test_half_a_message_is_not_done_at_any_byte(reader, data):
    for cut in range(len(data)):
        machine = reader()
        assert read(machine, data[:cut]) == b""
        assert not machine.done
        assert machine.needed() > 0


def test_the_bytes_of_version_1_never_change():
    assert encode_preface(Preface("a.0", tls=True)) == b"\x8dmonarch\x01\x01\x03a.0"
    assert encode_preface(Preface("", tls=False)) == b"\x8dmonarch\x01\x00\x00"
    assert encode_status(Status(StatusCode.BUSY, True, "no")) == b"\x8dstatus:\x03\x01\x00\x02no"


@pytest.mark.parametrize("target", ["x" * 256, "é" * 128, "a\nb", "a\x1b[2J"])
def test_a_target_that_no_preface_can_hold_is_refused_by_the_dialer(target):
    with pytest.raises(ValueError, match=r"the target .* of a connection"):
        encode_preface(Preface(target, tls=False))


@pytest.mark.parametrize(
    ("data", "what", "next"),
    [
        (b"GET / HTTP/1.1\r\n", "is not monarch: it speaks HTTP", "address and port"),
        (b"POST /v1 HTTP/1.1", "is not monarch: it speaks HTTP", "address and port"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "is not monarch: it begins with TLS", "address and port"),
        (b"SSH-2.0-OpenSSH", "is not monarch: it speaks SSH", "address and port"),
        (b"\x00" * 11, r"is not monarch: it begins with b'\\x00", "address and port"),
        (b"\x8dmonarch\x02\x00\x00", "speaks version 2 of the protocol, this process version 1", "one version of monarch-mesh"),
        (b"\x8dmonarch\x01\x02\x00", r"unknown flags \(0x02\)", "one version of monarch-mesh"),
        (b"\x8dmonarch\x01\x00\x02\xff\xfe", "is not UTF-8", "damaged on their way"),
        (b"\x8dmonarch\x01\x00\x02a\n", "is not printable", "damaged on their way"),
    ],
)
def test_what_is_no_preface_is_named(data, what, next):
    reader = PrefaceReader()
    with pytest.raises(HandshakeError, match=rf"(?s){what}.*\n  next:  .*{next}"):
        read(reader, data)
    assert not reader.done
    with pytest.raises(InternalError):
        reader.preface


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "is not monarch: it speaks HTTP"),
        (b"\x15\x03\x03\x00\x02\x02\x46" + bytes(5), "is not monarch: it answers with an alert of TLS"),
        (encode_preface(Preface("abcd", tls=False)), "is not monarch: it begins with"),
        (b"\x8dstatus:\x09\x00\x00\x00", r"unknown code or flag \(9, 0x00\)"),
        (b"\x8dstatus:\x00\x80\x00\x00", r"unknown code or flag \(0, 0x80\)"),
        (b"\x8dstatus:\x00\x00\x02\x01", "a text of 513 bytes, more than 512"),
        (b"\x8dstatus:\x00\x00\xff\xff", "a text of 65535 bytes, more than 512"),
        (b"\x8dstatus:\x00\x00\x00\x01\xff", "is not UTF-8"),
        (b"\x8dstatus:\x00\x00\x00\x04\x1b[2J", "is not printable"),
    ],
)
def test_what_is_no_status_is_named(data, what):
    reader = StatusReader()
    with pytest.raises(HandshakeError, match=what):
        read(reader, data)
    assert not reader.done
    with pytest.raises(InternalError):
        reader.status


@pytest.mark.parametrize("text", ["", "two\nlines", "x" * 512, "x" * 600, "é" * 300, "\x1b[2J\udcff\t", "\x00" * 400])
def test_the_text_of_a_status_is_cut_and_harmless(text):
    reader = StatusReader()
    assert read(reader, encode_status(Status(StatusCode.GONE, False, text))) == b""
    shown = reader.status.text
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert shown == text or shown.endswith("...") or "\\" in shown
    assert len(shown.encode()) <= 512


def test_a_machine_that_is_fed_too_much_says_so():
    for machine in (PrefaceReader(), StatusReader(), dialer(), acceptor()):
        with pytest.raises(InternalError, match="was fed"):
            machine.feed(bytes(machine.needed() + 1))


# --- the verdict of a status --------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [code for code in StatusCode if code is not StatusCode.OK])
@pytest.mark.parametrize("text", ["", "abc.3 ended: Killed(sig=9)\n  next:  look at its log"])
def test_a_refusal_is_an_error_with_its_text(code, text):
    with pytest.raises(HandshakeError) as caught:
        check_status(Status(code, True, text), SECRET)
    assert str(caught.value) == (text or f"the other end refuses the connection ({code.name})")


@pytest.mark.parametrize(
    ("secret", "needs_secret", "what"),
    [
        (b"", False, None),
        (SECRET, True, None),
        (b"", True, "the other end requires the job's secret, and this process has none"),
        (SECRET, False, "this process requires the job's secret, and the other end has none"),
    ],
)
def test_a_status_tells_who_lacks_the_secret_before_any_proof(secret, needs_secret, what):
    status = Status(StatusCode.OK, needs_secret, "")
    if what is None:
        check_status(status, secret)
    else:
        with pytest.raises(HandshakeError, match=f"{what}\n  next:  .*MONARCH_SECRET"):
            check_status(status, secret)


def test_an_error_takes_a_place():
    error = HandshakeError("no", next="try").at("tcp://node7:26600")
    assert isinstance(error, HandshakeError)
    assert str(error) == "no\n  where: tcp://node7:26600\n  next:  try"


# --- the proofs ----------------------------------------------------------------------------------------------------

KEYS = {"none": b"", "the secret": SECRET, "another": OTHER}
TEXTS = {
    ("none", "the secret"): "the other end requires the job's secret, and this process has none",
    ("the secret", "none"): "this process requires the job's secret, and the other end has none",
    ("the secret", "another"): "the other end has another secret than this process",
}


@pytest.mark.parametrize("binding", [b"", BINDING], ids=["clear", "tls"])
@pytest.mark.parametrize("target", ["", "abc.3"])
@pytest.mark.parametrize(("ours", "theirs"), list(itertools.product(KEYS, repeat=2)))
def test_both_ends_pass_with_one_secret_and_the_dialer_says_why_not(ours, theirs, target, binding):
    left, right = dialer(KEYS[ours], target, binding), acceptor(KEYS[theirs], target, binding)
    if ours == theirs:
        said = prove(left, right)
        assert [len(data) for data in said] == [32, 64, 32, 0]
        assert left.done
        assert right.done
        return
    what = TEXTS.get((ours, theirs)) or TEXTS.get((ours.replace("another", "the secret"), theirs.replace("another", "the secret")))
    with pytest.raises(HandshakeError, match=what or TEXTS["the secret", "another"]) as caught:
        prove(left, right)
    assert not left.done
    assert not right.done
    assert not [key for key in (SECRET, OTHER) if key.decode() in str(caught.value)]


@pytest.mark.parametrize(("ours", "theirs"), [pair for pair in itertools.product(KEYS, repeat=2) if pair[0] != pair[1]])
def test_an_acceptor_that_gets_the_proof_of_another_secret_says_why_not(ours, theirs):
    right = acceptor(KEYS[ours])
    forger = dialer(KEYS[theirs])
    challenge = right.feed(forger.first_bytes())[:32]
    # What an acceptor with the forger's own secret would have said to it, under this acceptor's nonce.
    accomplice = AcceptorProof(KEYS[theirs], "abc.3", entropy=lambda count: challenge)
    proof = forger.feed(accomplice.feed(forger.first_bytes()))
    kind = tuple("the secret" if name == "another" else name for name in (ours, theirs))
    with pytest.raises(HandshakeError, match=TEXTS.get(kind, TEXTS["the secret", "another"])):
        right.feed(proof)
    assert not right.done


@given(st.lists(st.integers(1, 40), max_size=20), st.lists(st.integers(1, 40), max_size=20))
def test_proofs_survive_any_split(cuts, more):
    left, right = dialer(), acceptor()

    def fed(machine, data, cuts):
        cuts, said = iter(cuts), b""
        while data:
            count = min(len(data), next(cuts, len(data)))
            said += machine.feed(data[:count])
            data = data[count:]
        return said

    answer = fed(right, left.first_bytes(), cuts)
    assert fed(right, fed(left, answer, more), cuts) == b""
    assert left.done
    assert right.done


def test_half_a_proof_is_not_done_at_any_byte():
    said = prove(dialer(), acceptor())
    for cut in range(64):
        left = dialer()
        assert left.feed(said[1][:cut]) == b""
        assert not left.done
    for cut in range(32):
        right = acceptor()
        assert right.feed(said[0][:cut]) == b""
        right.feed(said[0][cut:])
        assert right.feed(said[2][:cut]) == b""
        assert not right.done


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["no secret", "secret"])
def test_every_flipped_bit_is_refused(secret):
    first, answer, last, _ = prove(dialer(secret), acceptor(secret))
    for bit in range(len(answer) * 8):
        left = dialer(secret)
        with pytest.raises(HandshakeError):
            left.feed(flipped(answer, bit))
        assert not left.done
    for bit in range(len(last) * 8):
        right = acceptor(secret)
        right.feed(first)
        with pytest.raises(HandshakeError):
            right.feed(flipped(last, bit))
        assert not right.done
    for bit in range(len(first) * 8):  # the dialer's nonce, on its way
        left, right = dialer(secret), acceptor(secret)
        with pytest.raises(HandshakeError):
            left.feed(right.feed(flipped(first, bit)))


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize(
    "changed",
    [{"target": "abc.4"}, {"target": ""}, {"binding": BINDING}, {"binding": BINDING[::-1]}, {"secret": SECRET + b"\0"}],
    ids=["target", "agent", "binding", "other binding", "secret"],
)
def test_a_proof_is_worth_nothing_elsewhere(changed):
    right = acceptor(**{"binding": b"", **changed})
    left = dialer()
    with pytest.raises(HandshakeError):
        left.feed(right.feed(left.first_bytes()))


def test_a_secret_of_zeros_is_not_the_empty_one():
    left, right = dialer(bytes(16)), acceptor(b"")
    with pytest.raises(HandshakeError, match="the other end has none"):
        left.feed(right.feed(left.first_bytes()))


def test_target_and_binding_can_not_be_shifted_into_each_other():
    said = [prove(dialer(target="ab", binding=b"cd"), acceptor(target="ab", binding=b"cd"))]
    said.append(prove(dialer(target="a", binding=b"bcd"), acceptor(target="a", binding=b"bcd")))
    assert said[0][1][32:] != said[1][1][32:]


def test_a_replay_to_an_acceptor_fails():
    first, _, last, _ = prove(dialer(), acceptor())
    again = acceptor(seed=b"another nonce")
    again.feed(first)
    with pytest.raises(HandshakeError):
        again.feed(last)
    assert not again.done


def test_a_replay_to_a_dialer_fails():
    _, answer, _, _ = prove(dialer(), acceptor())
    again = dialer(seed=b"another nonce")
    with pytest.raises(HandshakeError):
        again.feed(answer)
    assert not again.done


def test_an_acceptor_that_sends_proof_and_nonce_in_another_order_fails():
    left, right = dialer(), acceptor()
    answer = right.feed(left.first_bytes())
    with pytest.raises(HandshakeError):
        left.feed(answer[32:] + answer[:32])


def test_a_dialer_that_sends_its_proof_before_its_nonce_fails():
    first, _, last, _ = prove(dialer(), acceptor())
    right = acceptor()
    right.feed(last)
    with pytest.raises(HandshakeError):
        right.feed(first)


def test_an_end_that_mirrors_the_challenge_fails():
    left = dialer()
    with pytest.raises(HandshakeError, match="own challenge back"):
        left.feed(left.first_bytes() + bytes(32))
    right = acceptor()
    with pytest.raises(HandshakeError, match="own challenge back"):
        right.feed(counted(b"a")(32))


def test_an_end_that_mirrors_the_proof_fails():
    right = acceptor()
    answer = right.feed(dialer().first_bytes())
    with pytest.raises(HandshakeError):
        right.feed(answer[32:])
    assert not right.done


def test_an_acceptors_proof_for_one_connection_is_not_a_dialers_for_another():
    """Whoever has no secret and opens a second connection, to have the first one's challenge answered by the acceptor itself."""
    one, two = acceptor(seed=b"1"), acceptor(seed=b"2")
    challenge = one.feed(bytes(32))[:32]
    with pytest.raises(HandshakeError):
        one.feed(two.feed(challenge)[32:])


def test_nonces_are_fresh():
    nonces = {DialerProof(SECRET, "").first_bytes() for _ in range(100)}
    nonces |= {AcceptorProof(SECRET, "").feed(bytes(32))[:32] for _ in range(100)}
    assert len(nonces) == 200


def test_after_an_error_a_machine_takes_nothing_more():
    right = acceptor()
    right.feed(dialer().first_bytes())
    with pytest.raises(HandshakeError):
        right.feed(bytes(32))
    with pytest.raises(InternalError):
        right.feed(prove(dialer(), acceptor())[2])
    assert not right.done


def test_a_connection_that_ends_early_is_told_by_what_was_missing():
    right = acceptor()
    assert "before it said anything" in str(right.cut())
    assert not isinstance(right.cut(), HandshakeError)
    right.feed(dialer().first_bytes())
    assert isinstance(right.cut(), HandshakeError)
    assert "has another one" in str(right.cut())
    assert isinstance(dialer().cut(), ConnectionResetError)
    assert "before it proved" in str(dialer().cut())


# --- strangers -----------------------------------------------------------------------------------------------------

MACHINES = {
    "preface": (PrefaceReader, MAX_PREFACE_BYTES),
    "status": (StatusReader, MAX_STATUS_BYTES),
    "dialer": (dialer, MAX_PROOF_BYTES),
    "acceptor": (acceptor, MAX_PROOF_BYTES),
}


@pytest.mark.cpu_limit(10)
@pytest.mark.parametrize("name", MACHINES)
@given(data=st.data())
def test_random_bytes_raise_handshake_errors_only_and_ask_for_no_more_than_the_bound(name, data):
    make, bound = MACHINES[name]
    beginning = data.draw(st.sampled_from([b"", b"\x8dmonarch", b"\x8dmonarch\x01", b"\x8dstatus:", b"\x8dstatus:\0\0"]))
    stream = beginning + data.draw(st.binary(max_size=700))
    machine, taken = make(), 0
    try:
        while stream[taken:] and machine.needed():
            assert taken + machine.needed() <= bound
            count = min(machine.needed(), data.draw(st.integers(1, 64)), len(stream) - taken)
            machine.feed(stream[taken : taken + count])
            taken += count
    except HandshakeError:
        assert not machine.done
    if name in ("dialer", "acceptor"):
        assert not machine.done


@given(prefaces)
@example(Preface("x" * 255, tls=True))
def test_nothing_is_longer_than_its_bound(preface):
    assert len(encode_preface(preface)) <= MAX_PREFACE_BYTES
    assert len(encode_status(Status(StatusCode.GONE, True, preface.target * 40))) <= MAX_STATUS_BYTES
    assert max(MAX_PREFACE_BYTES, MAX_STATUS_BYTES) + MAX_PROOF_BYTES == MAX_UNPROVEN_BYTES < 1024


def test_proofs_are_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(left, right):
        compared.append((left, right))
        return left == right

    monkeypatch.setattr(handshake.hmac, "compare_digest", compare)
    said = prove(dialer(), acceptor())
    assert [right for _, right in compared if right in (said[1][32:], said[2])] == [said[1][32:], said[2]]
