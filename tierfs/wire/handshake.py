"""The handshake: which export, and that both sides know its token. Pure: nonces are arguments; no clock, no I/O.

    client                                 server
    Hello(export, nonce)         ->
                                 <-        Challenge(nonce)            only where the export has a token
    Proof(HMAC "client")         ->
                                 <-        Welcome(HMAC "server")      or Refused(code, reason) at any point

The token is the HMAC-SHA256 key and never travels. What is authenticated: the protocol version, who speaks, the export
and both nonces. The client proves first, so that a stranger who connects to a server learns nothing to guess against.
It protects the *connection attempt*, not the bytes after it: against somebody on the path, use TLS.
"""

import hashlib
import hmac
import struct
from collections.abc import Mapping
from enum import Enum

from tierfs.blocks.errors import AuthenticationFailed, ProtocolError
from tierfs.wire.framing import PROTOCOL_VERSION
from tierfs.wire.messages import (
    Challenge,
    Code,
    Hello,
    Message,
    Proof,
    Refused,
    Welcome,
    error_for,
    printable,
)


class Role(Enum):
    """Who makes a proof; part of what is proved, so that a proof cannot be sent back to its maker."""

    CLIENT = b"client"
    SERVER = b"server"


def prove(token: bytes, role: Role, *, export: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """The 32-byte proof of one role. Each variable part goes in with its length."""
    name = export.encode("utf-8")
    transcript = b"".join(
        (
            b"tierfs-handshake\0",
            struct.pack("<BB", PROTOCOL_VERSION, len(role.value)),
            role.value,
            struct.pack("<HBB", len(name), len(client_nonce), len(server_nonce)),
            name,
            client_nonce,
            server_nonce,
        )
    )
    return hmac.new(token, transcript, hashlib.sha256).digest()


class ClientHandshake:
    """The client's side of one handshake. ``nonce`` must be fresh: 32 random bytes."""

    def __init__(
        self, *, export: str, token: bytes | None, nonce: bytes, software: str, features: tuple[str, ...] = ()
    ) -> None:
        assert token is None or token, "an empty token proves nothing"
        self._features = features
        self._export = export
        self._token = token
        self._nonce = nonce
        self._software = software
        self._server_nonce: bytes | None = None

    def hello(self) -> Hello:
        """The first message."""
        return Hello(export=self._export, nonce=self._nonce, software=self._software, features=self._features)

    def receive(self, message: Message) -> Proof | Welcome:
        """A Proof to send, or the Welcome that ends it. Raises what the server's refusal stands for."""
        match message:
            case Challenge(nonce=nonce) if self._server_nonce is None:
                if self._token is None:
                    raise AuthenticationFailed(
                        f"export {self._export!r} needs a token and none is configured: set source.token_file"
                    )
                self._server_nonce = nonce
                return Proof(self._prove(self._token, Role.CLIENT, nonce))
            case Welcome():
                self._check(message)
                return message
            case Refused(code=code, reason=reason):
                raise error_for(code, reason)
            case _:
                raise ProtocolError(f"a {type(message).__name__} message has no place in the handshake")

    def _check(self, welcome: Welcome) -> None:
        if self._token is None:
            return
        if self._server_nonce is None or not hmac.compare_digest(
            welcome.proof, self._prove(self._token, Role.SERVER, self._server_nonce)
        ):
            raise AuthenticationFailed(
                f"the server did not prove that it knows the token of export {self._export!r}:"
                " it has none or another, or it is not the server it should be"
            )

    def _prove(self, token: bytes, role: Role, server_nonce: bytes) -> bytes:
        return prove(token, role, export=self._export, client_nonce=self._nonce, server_nonce=server_nonce)


class ServerHandshake:
    """The server's side of one handshake. ``tokens`` names every export; None means that it has no token."""

    def __init__(self, *, tokens: Mapping[str, bytes | None], nonce: bytes, welcome: Welcome) -> None:
        self._tokens = tokens
        self._nonce = nonce
        self._welcome = welcome
        self._hello: Hello | None = None
        self.export: str | None = None  # set when the handshake has succeeded

    def receive(self, message: Message) -> Challenge | Welcome | Refused:
        """The answer to send. Welcome and Refused end the handshake."""
        match message:
            case Hello() if self._hello is None:
                return self._greet(message)
            case Proof(proof=proof) if self._hello is not None and self.export is None:
                return self._verify(self._hello, proof)
            case _:
                return Refused(Code.PROTOCOL, f"a {type(message).__name__} message has no place in the handshake")

    def _greet(self, hello: Hello) -> Challenge | Welcome | Refused:
        if hello.export not in self._tokens:
            return Refused(Code.NOT_FOUND, printable(f"there is no export {hello.export!r} here"))
        self._hello = hello
        if self._tokens[hello.export] is None:
            self.export = hello.export
            return self._welcome
        return Challenge(self._nonce)

    def _verify(self, hello: Hello, proof: bytes) -> Welcome | Refused:
        token = self._tokens[hello.export]
        assert token, "a Proof is only awaited where there is a token"
        nonces = {"client_nonce": hello.nonce, "server_nonce": self._nonce}
        if not hmac.compare_digest(proof, prove(token, Role.CLIENT, export=hello.export, **nonces)):
            return Refused(Code.AUTHENTICATION, printable(f"wrong token for export {hello.export!r}"))
        self.export = hello.export
        return Welcome(
            proof=prove(token, Role.SERVER, export=hello.export, **nonces),
            boot=self._welcome.boot,
            max_requests=self._welcome.max_requests,
            idle_timeout_s=self._welcome.idle_timeout_s,
            software=self._welcome.software,
            features=self._welcome.features,
        )
