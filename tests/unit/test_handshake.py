"""The handshake, both sides against each other and against liars."""

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfs.blocks.errors import AuthenticationFailed, NotFound, ProtocolError, SourceUnavailable
from tierfs.wire import messages as m
from tierfs.wire.handshake import ClientHandshake, Role, ServerHandshake, prove

CLIENT_NONCE, SERVER_NONCE = b"c" * 32, b"s" * 32
WELCOME = m.Welcome(b"", b"b" * 16, 32, 60, "tierfs", ())
TOKEN = b"a shared secret of the export"


def client(token: bytes | None, export: str = "models") -> ClientHandshake:
    return ClientHandshake(export=export, token=token, nonce=CLIENT_NONCE, software="test")


def server(token: bytes | None) -> ServerHandshake:
    return ServerHandshake(tokens={"models": token}, nonce=SERVER_NONCE, welcome=WELCOME)


def shake(ours: ClientHandshake, theirs: ServerHandshake) -> tuple[m.Welcome, list[m.Message]]:
    """Run both sides; the welcome and everything that was sent."""
    sent: list[m.Message] = [ours.hello()]
    while True:
        sent.append(theirs.receive(sent[-1]))
        answer = ours.receive(sent[-1])
        if isinstance(answer, m.Welcome):
            return answer, sent
        sent.append(answer)


def test_both_sides_with_the_same_token_agree_and_the_token_does_not_travel() -> None:
    theirs = server(TOKEN)
    welcome, sent = shake(client(TOKEN), theirs)
    assert theirs.export == "models"
    assert [type(message) for message in sent] == [m.Hello, m.Challenge, m.Proof, m.Welcome]
    assert welcome.boot == WELCOME.boot
    assert not any(TOKEN in m.encode(message, request_id=0) for message in sent)


def test_an_export_without_a_token_needs_no_proof() -> None:
    theirs = server(None)
    _, sent = shake(client(None), theirs)
    assert [type(message) for message in sent] == [m.Hello, m.Welcome]
    assert theirs.export == "models"


def test_a_wrong_token_is_refused_and_gives_no_export() -> None:
    theirs = server(TOKEN)
    with pytest.raises(AuthenticationFailed, match="wrong token for export 'models'"):
        shake(client(TOKEN + b"!"), theirs)
    assert theirs.export is None


def test_a_client_without_a_token_says_what_to_configure() -> None:
    with pytest.raises(AuthenticationFailed, match=r"needs a token.*source\.token_file"):
        shake(client(None), server(TOKEN))


def test_a_client_with_a_token_refuses_a_server_that_does_not_prove_it() -> None:
    with pytest.raises(AuthenticationFailed, match="did not prove"):
        shake(client(TOKEN), server(None))


def test_a_challenge_alone_is_no_proof() -> None:
    ours = client(TOKEN)
    ours.receive(m.Challenge(SERVER_NONCE))
    with pytest.raises(AuthenticationFailed, match="did not prove"):
        ours.receive(WELCOME)


def test_a_clients_own_proof_sent_back_is_not_accepted() -> None:
    ours = client(TOKEN)
    proof = ours.receive(m.Challenge(SERVER_NONCE))
    assert isinstance(proof, m.Proof)
    with pytest.raises(AuthenticationFailed):
        ours.receive(m.Welcome(proof.proof, WELCOME.boot, 32, 60, "", ()))


def test_a_recorded_proof_is_worth_nothing_under_another_nonce() -> None:
    proof = prove(TOKEN, Role.CLIENT, export="models", client_nonce=CLIENT_NONCE, server_nonce=SERVER_NONCE)
    later = ServerHandshake(tokens={"models": TOKEN}, nonce=b"t" * 32, welcome=WELCOME)
    later.receive(client(TOKEN).hello())
    answer = later.receive(m.Proof(proof))
    assert isinstance(answer, m.Refused) and answer.code is m.Code.AUTHENTICATION


def test_an_unknown_export_is_not_found() -> None:
    with pytest.raises(NotFound, match="no export 'nope'"):
        shake(client(None, "nope"), server(None))


def test_a_busy_server_is_tried_again_later() -> None:
    with pytest.raises(SourceUnavailable, match="full"):
        client(None).receive(m.Refused(m.Code.BUSY, "full"))


@pytest.mark.parametrize("message", [m.Ping(), m.Proof(bytes(32)), m.ReadBlock(bytes(16), 0, 0, 1, 4096), WELCOME])
def test_a_server_refuses_anything_before_hello(message: m.Message) -> None:
    theirs = server(TOKEN)
    answer = theirs.receive(message)
    assert isinstance(answer, m.Refused) and answer.code is m.Code.PROTOCOL
    assert theirs.export is None


def test_a_server_refuses_requests_instead_of_a_proof_and_a_second_hello() -> None:
    for message in (m.Ping(), client(None).hello()):
        theirs = server(TOKEN)
        assert isinstance(theirs.receive(client(TOKEN).hello()), m.Challenge)
        assert isinstance(theirs.receive(message), m.Refused)
        assert theirs.export is None


def test_a_second_challenge_is_refused_by_the_client() -> None:
    ours = client(TOKEN)
    ours.receive(m.Challenge(SERVER_NONCE))
    with pytest.raises(ProtocolError, match="Challenge message has no place"):
        ours.receive(m.Challenge(SERVER_NONCE))


def test_the_transcript_is_the_documented_one() -> None:
    transcript = b"tierfs-handshake\0\x01\x06client\x06\x00\x20\x20models" + CLIENT_NONCE + SERVER_NONCE
    assert (
        prove(TOKEN, Role.CLIENT, export="models", client_nonce=CLIENT_NONCE, server_nonce=SERVER_NONCE)
        == hmac.new(TOKEN, transcript, hashlib.sha256).digest()
    )


_part = st.tuples(
    st.sampled_from(list(Role)), st.text(max_size=8), st.binary(min_size=1, max_size=8), st.binary(max_size=8)
)


@given(one=_part, other=_part)
def test_proofs_of_different_transcripts_differ(
    one: tuple[Role, str, bytes, bytes], other: tuple[Role, str, bytes, bytes]
) -> None:
    proofs = [prove(TOKEN, role, export=export, client_nonce=a, server_nonce=b) for role, export, a, b in (one, other)]
    assert (proofs[0] == proofs[1]) == (one == other)


@given(st.binary(min_size=32, max_size=32))
def test_no_guess_opens_the_door(guess: bytes) -> None:
    theirs = server(TOKEN)
    theirs.receive(client(TOKEN).hello())
    assert isinstance(theirs.receive(m.Proof(guess)), m.Refused)
    assert theirs.export is None
