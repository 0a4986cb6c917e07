"""Frames, certificates and strangers on the control channel."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import socket
import ssl
import struct
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_world import BOOTSTRAP, READY, TOKENS, until

from pdtransfer.contract.base import Role
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.session import channel
from pdtransfer.session.api import Timeouts, TransferState
from pdtransfer.session.frames import HEADER, MAX_FRAME, Done, FrameError, Hello, Request, decode, encode

NAME = "pod.pdcluster.internal"


class Authority:
    """A throw-away CA."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.cert = self._sign("ca", self.key.public_key(), ca=True)

    def _sign(self, name: str, public, *, ca: bool = False) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = subject if ca else self.cert.subject
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("192.0.2.1"))]),
                critical=False,
            )
            .sign(self.key, hashes.SHA256())
        )

    def issue(self, folder: Path, name: str = NAME) -> str:
        folder.mkdir(exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        pem = serialization.Encoding.PEM
        (folder / "ca.crt").write_bytes(self.cert.public_bytes(pem))
        (folder / "tls.crt").write_bytes(self._sign(name, key.public_key()).public_bytes(pem))
        (folder / "tls.key").write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return str(folder)


def introduce(prefill, decode) -> None:
    prefill.endpoint.apply_peers([decode.endpoint.card])
    decode.endpoint.apply_peers([prefill.endpoint.card])


def test_mutual_tls_wires_and_moves(world, tmp_path):
    ca = Authority()
    prefill = world.rank(Role.PREFILL, tls_dir=ca.issue(tmp_path / "p"))
    decode = world.rank(Role.DECODE, tls_dir=ca.issue(tmp_path / "d"))
    introduce(prefill, decode)
    assert decode.endpoint.wait_wired(20), decode.endpoint.verdicts
    receiver = decode.endpoint.receive(room=1, attempt=0, bootstrap=BOOTSTRAP, pages=[2], tokens=TOKENS)
    prefill.pool.fill(1, [1])
    sender = prefill.endpoint.send(room=1, tokens=TOKENS)
    sender.chunk([1], 0, READY)
    sender.finish(b"")
    assert receiver.wait(30) is TransferState.SUCCESS and decode.pool.holds(1, [2])


@pytest.mark.parametrize("fault", ["decode has another CA", "prefill has another CA", "wrong name"])
def test_a_wrong_certificate_is_never_wired(world, tmp_path, fault):
    ca, other = Authority(), Authority()
    p_ca = other if fault.startswith("prefill") else ca
    d_ca = other if fault.startswith("decode") else ca
    name = "elsewhere.example" if fault == "wrong name" else NAME
    prefill = world.rank(Role.PREFILL, tls_dir=p_ca.issue(tmp_path / "p", name))
    decode = world.rank(Role.DECODE, tls_dir=d_ca.issue(tmp_path / "d"))
    introduce(prefill, decode)
    assert until(lambda: decode.endpoint.verdicts and decode.endpoint.verdicts[0].reason == "TLSFailed")
    assert decode.endpoint.verdicts[0].state is VerdictState.UNREACHABLE
    assert not prefill.agent.handles and not decode.agent.handles
    assert prefill.endpoint.failed is None and decode.endpoint.failed is None


def test_a_pod_of_another_pdcluster_under_the_same_ca_is_refused_even_with_a_rostered_identity(world, tmp_path):
    ca = Authority()
    prefill = world.rank(Role.PREFILL, tls_dir=ca.issue(tmp_path / "p"))
    decode = world.rank(Role.DECODE, tls_dir=ca.issue(tmp_path / "d", "other-uid.pod.pdcluster.internal"))
    introduce(prefill, decode)
    assert until(lambda: prefill.endpoint.counters.get("connections_refused", 0) >= 1)
    assert until(lambda: "does not name" in decode.endpoint.verdicts[0].message)
    assert not prefill.agent.handles and not decode.agent.handles


@pytest.mark.parametrize("change", ["agent_name", "incarnation", "layout_hash", "pod_uid"])
def test_a_rank_can_not_pass_for_a_rostered_one_without_all_of_its_identity(world, change):
    prefill, decode = world.rank(Role.PREFILL), world.rank(Role.DECODE)
    prefill.endpoint.apply_peers([decode.endpoint.card])
    assert until(lambda: prefill.endpoint.verdicts)
    card = decode.endpoint.card
    hello = Hello(
        cluster_uid="cluster-1",
        pod_uid=card.pod_uid,
        incarnation=card.incarnation,
        rank=card.rank,
        agent_name=card.agent_name,
        layout_hash=card.layout_hash,
        to_pod_uid="prefill-pod",
        to_incarnation="prefill-1",
        to_rank=0,
    )
    assert first_answer(prefill, encode(hello)).t == "welcome"
    forged = hello.model_copy(update={change: "another"})
    assert first_answer(prefill, encode(forged)).t == "refused"


def first_answer(rank, data: bytes):
    """The first frame that a raw client gets back; it hangs up then."""
    host, port = rank.endpoint.card.control.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as end, end.makefile("rb") as answers:
        end.sendall(data)
        (size,) = HEADER.unpack(answers.read(HEADER.size))
        return decode(answers.read(size))


def test_a_ca_that_was_rotated_out_is_trusted_no_more(world, tmp_path, monkeypatch):
    monkeypatch.setattr(channel.renew, "__defaults__", (0.1,))
    old, new = Authority(), Authority()
    folder = tmp_path / "p"
    prefill = world.rank(Role.PREFILL, tls_dir=old.issue(folder))
    host, port = prefill.endpoint.card.control.split(":")

    def greeted(client: Path, ca: Path) -> bool:
        context = ssl.create_default_context(cafile=str(ca))
        context.load_cert_chain(client / "tls.crt", client / "tls.key")
        try:
            with socket.create_connection((host, int(port)), timeout=20) as plain:
                end = context.wrap_socket(plain, server_hostname=NAME)
                end.sendall(encode(STRANGER))
                return len(end.recv(100)) > 0
        except (ssl.SSLError, OSError):
            return False

    old.issue(tmp_path / "old")
    new.issue(tmp_path / "new")
    assert greeted(tmp_path / "old", tmp_path / "old" / "ca.crt")
    new.issue(folder)
    assert until(lambda: greeted(tmp_path / "new", tmp_path / "new" / "ca.crt"))
    assert not greeted(tmp_path / "old", tmp_path / "new" / "ca.crt")


STRANGER = Hello(
    cluster_uid="cluster-1",
    pod_uid="x",
    incarnation="y",
    rank=0,
    agent_name="z",
    layout_hash="",
    to_pod_uid="prefill-pod",
    to_incarnation="prefill-1",
    to_rank=0,
)


def test_a_client_without_certificate_or_without_tls_gets_nothing(world, tmp_path):
    ca = Authority()
    folder = ca.issue(tmp_path / "p")
    prefill = world.rank(Role.PREFILL, tls_dir=folder)
    host, port = prefill.endpoint.card.control.split(":")
    hello = encode(STRANGER)
    context = ssl.create_default_context(cafile=str(tmp_path / "p" / "ca.crt"))
    for wrap in (False, True):
        with socket.create_connection((host, int(port)), timeout=20) as plain:
            try:
                end = context.wrap_socket(plain, server_hostname=NAME) if wrap else plain
                end.sendall(hello)
                assert end.recv(100) in (b"",) or not wrap
            except (ssl.SSLError, OSError):
                pass
    assert prefill.endpoint.failed is None
    assert prefill.endpoint.counters.get("connections_refused", 0) == 0  # never got as far as a hello


def talk(rank, data: bytes) -> bytes:
    """What a raw client gets back until the endpoint ends the connection."""
    host, port = rank.endpoint.card.control.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as end:
        end.sendall(data)
        got = b""
        try:
            while piece := end.recv(4096):
                got += piece
        except ConnectionResetError:
            pass
        return got


@pytest.mark.parametrize(
    "data",
    [
        HEADER.pack(MAX_FRAME + 1) + b"x",
        HEADER.pack(1 << 20) + b"x" * 100,  # over what is read before the peer is known
        HEADER.pack(5) + b"hello",
        HEADER.pack(2) + b"{}",
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER.pack(13) + b'{"t":"ping"}\n',
    ],
)
def test_bytes_that_are_no_hello_end_the_connection_and_harm_nobody(world, data):
    rank = world.rank(Role.PREFILL)
    assert talk(rank, data) == b""
    assert rank.endpoint.failed is None


def test_a_silent_client_is_dropped_after_the_connect_deadline(world):
    long = Timeouts(waiting=60, transfer=60, settle=60, connect=1, probe=60)
    rank = world.rank(Role.PREFILL, timeouts=long)
    began = time.monotonic()
    assert talk(rank, b"") == b"" and time.monotonic() - began > 0.9


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "PeerNotRostered"),
        ({"cluster_uid": "other"}, "OtherCluster"),
        ({"to_incarnation": "older"}, "PeerReplaced"),
        ({"to_rank": 3}, "PeerReplaced"),
    ],
)
def test_a_stranger_is_refused_by_name_at_once(world, change, reason):
    rank = world.rank(Role.PREFILL)
    hello = STRANGER.model_copy(update=change)
    answer = decode(talk(rank, encode(hello))[HEADER.size :])
    assert getattr(answer, "reason", None) == reason


def test_a_rostered_peer_that_sends_rubbish_loses_its_connection_and_comes_back(world):
    (prefill,), (decode_rank,) = world.pair()
    wiring = decode_rank.endpoint._wiring
    (peer,) = wiring._peers.values()
    rubbish, before = HEADER.pack(7) + b"rubbish", peer.channel
    decode_rank.endpoint._core.call(lambda: peer.channel._transport.write(rubbish))
    assert until(lambda: prefill.endpoint.counters.get("frame_errors", 0) == 1)
    assert until(lambda: peer.channel not in (None, before))
    assert decode_rank.endpoint.wait_wired(30)
    assert prefill.endpoint.failed is None


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_make_the_decoder_raise_anything_but_its_own_error(data):
    with contextlib.suppress(FrameError):
        decode(data)


@settings(max_examples=50, deadline=None)
@given(
    room=st.integers(-(2**63), 2**63 - 1),
    attempt=st.integers(0, 2**31),
    pages=st.lists(st.integers(0, 2**31), max_size=50),
    words=st.text(max_size=20),
)
def test_frames_survive_the_wire(room, attempt, pages, words):
    ids = {"room": room, "attempt": attempt, "source": words, "destination": "d"}
    for frame in (
        Request(**ids, pages=tuple(pages), first_page=1, tokens=9, required=2),
        Done(**ids, nbytes=5, metadata="aGk="),
    ):
        data = encode(frame)
        (size,) = struct.unpack(">I", data[:4])
        assert size == len(data) - 4 and decode(data[4:]) == frame


def test_a_frame_over_the_bound_is_not_sent():
    with pytest.raises(FrameError, match="over the bound"):
        encode(Done(room=1, attempt=0, source="s", destination="d", nbytes=1, metadata="x" * MAX_FRAME))
