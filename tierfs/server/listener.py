"""The server: listens, admits connections within limits, and runs a session for each.

``app`` builds it for `tierfs serve`. It exports things that others keep running. What must hold: an export without a
token is reachable from this machine only; whatever one peer does, the others are served; every peer that is turned
away is told why, unless too many are; a peer's mistakes are logged once per peer and reason.
"""

import errno
import logging
import secrets
import socket
import ssl
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import trio

from tierfs.blocks.errors import AuthenticationFailed, ConfigError, NotFound, ProtocolError, TierfsError
from tierfs.config.addresses import Address, parse_address
from tierfs.server.budget import ByteBudget
from tierfs.server.exports import Exported
from tierfs.server.feed import ExportFeed
from tierfs.server.limits import ServerLimits, ServerStatistics
from tierfs.server.rdma import RdmaService
from tierfs.server.session import Session
from tierfs.transport import tcp
from tierfs.transport.newcomers import Newcomers
from tierfs.wire.handshake import ServerHandshake
from tierfs.wire.messages import NONCE_BYTES, RDMA_FEATURE, Code, Welcome

log = logging.getLogger(__name__)

_SOFTWARE = "tierfs"
_REMEMBERED_COMPLAINTS = 1024


class Server:
    """Serves exports over TCP until its ``run`` is cancelled."""

    def __init__(
        self,
        exports: Mapping[str, Exported],
        *,
        listen: Sequence[Address | str],
        tokens: Mapping[str, bytes | None],
        tls: ssl.SSLContext | None = None,
        limits: ServerLimits | None = None,
        rdma: RdmaService | None = None,
    ) -> None:
        """``rdma``: what to lend over RDMA; never with TLS, for RDMA does not encrypt."""
        self._limits = limits or ServerLimits()
        self._listen = [parse_address(where) if isinstance(where, str) else where for where in listen]
        self._tokens = {name: tokens.get(name) for name in exports}
        for name, token in self._tokens.items():
            if token is not None and not token:
                raise ConfigError(f"export {name!r}: its token is empty; put 32 random bytes into the token file")
        self._tls = tls
        self._rdma = None if tls is not None else rdma
        self._boot = secrets.token_bytes(16)
        self._feeds = {name: ExportFeed(name, source, boot=self._boot) for name, source in exports.items()}
        self._budget = ByteBudget(self._limits.in_flight_bytes, patience_s=self._limits.patience_s)
        self._memory_budget = ByteBudget(self._limits.in_memory_bytes, patience_s=self._limits.patience_s)
        self._send_limiter = trio.CapacityLimiter(self._limits.send_threads)
        self._statistics = ServerStatistics(
            connections_limit=self._limits.connections,
            in_flight_limit_bytes=self._limits.in_flight_bytes,
            pinned_limit_bytes=0 if self._rdma is None else self._rdma.memory_bytes,
            exports={name: feed.statistics for name, feed in self._feeds.items()},
        )
        self._per_address: dict[str, int] = {}
        self._newcomers = Newcomers(grace_s=self._limits.newcomer_s)
        self._refusing = 0
        self._complaints: OrderedDict[tuple[str, str], None] = OrderedDict()

    def renew_tls(self, tls: ssl.SSLContext) -> None:
        """Another certificate, for connections that come from now on. Only of a server that speaks TLS."""
        assert self._tls is not None
        self._tls = tls

    def statistics(self) -> ServerStatistics:
        """Counters; never waits. The caller must not change them."""
        statistics = self._statistics
        statistics.in_flight_bytes = self._budget.held_bytes
        statistics.most_in_flight_bytes = self._budget.most_held_bytes
        statistics.pushed_out = self._newcomers.pushed_out
        statistics.cut_offs = self._budget.cut_offs + self._memory_budget.cut_offs
        statistics.pinned_bytes = 0 if self._rdma is None else self._rdma.lent_bytes
        return statistics

    async def run(self, *, task_status: "trio.TaskStatus[list[Address]]" = trio.TASK_STATUS_IGNORED) -> None:
        """Listen and serve; started with the addresses that are bound. Cancel to close.

        Raises ConfigError when an address cannot be bound, or would show an export without a token to other machines.
        """
        listeners = await self._bind()
        try:
            bound = [Address(*listener.getsockname()[:2]) for listener in listeners]
            async with trio.open_nursery() as nursery:
                for feed in self._feeds.values():
                    nursery.start_soon(feed.run)
                for listener, address in zip(listeners, bound, strict=True):
                    log.info("listening address=%s tls=%s exports=%s", address, bool(self._tls), list(self._feeds))
                    nursery.start_soon(self._accept, listener, nursery)
                task_status.started(bound)
        finally:
            for listener in listeners:
                listener.close()
            if self._rdma is not None:
                self._rdma.close()

    async def _bind(self) -> list[socket.socket]:
        open_exports = [name for name, token in self._tokens.items() if token is None]
        listeners: list[socket.socket] = []
        try:
            for address in self._listen:
                try:
                    literals = await tcp.resolve(address)
                    for literal in literals:  # before anything listens on it
                        if open_exports and not literal.loopback:
                            raise ConfigError(
                                f"export {open_exports[0]!r} has no token and would be readable by every machine that"
                                f" reaches {literal}: give it a token file, or listen on tcp://127.0.0.1 only"
                            )
                    for literal in literals:
                        listeners.append(tcp.listen(literal))
                except OSError as error:
                    raise ConfigError(f"cannot listen on {address}: {error}") from error
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        return listeners

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        exhausted = False
        while True:
            try:
                sock, host = await tcp.accept(listener)
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
                    raise  # a bug; anything else is about that connection, or passes
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    continue
                if not exhausted:
                    log.error("accept_failed error=%s: raise the limit of open files (LimitNOFILE=)", error)
                exhausted = True
                await trio.sleep(0.1)  # the waiting connection would make this a busy loop
                continue
            exhausted = False
            self._statistics.accepted += 1
            refusal = self._refusal(host)
            if refusal is None:
                self._statistics.connections += 1
                self._per_address[host] = self._per_address.get(host, 0) + 1
                nursery.start_soon(self._serve, sock, host)
            elif self._refusing < self._limits.refusals:
                self._refusing += 1
                nursery.start_soon(self._refuse, sock, host, refusal)
            else:
                self._statistics.refused["silently"] += 1
                sock.close()

    def _refusal(self, host: str) -> str | None:
        """Why there is no place for another peer from there. One that has not shaken hands gives its own up."""
        full = self._per_address.get(host, 0) >= self._limits.connections_per_address
        if full and not self._newcomers.push_out(host):
            return f"{host} has its {self._limits.connections_per_address} connections already"
        full = not full and self._statistics.connections >= self._limits.connections
        if full and not self._newcomers.push_out():
            return f"the server has its {self._limits.connections} connections already"
        return None

    async def _serve(self, sock: socket.socket, host: str) -> None:
        try:
            with self._newcomers.arrive(host) as newcomer:
                connection = await self._start(sock, host, self._limits.handshake_s)
                if connection is None:
                    return
                try:
                    await self._session(connection).run(self._handshake(), newcomer.settle)
                finally:
                    connection.close()
        except TierfsError as error:
            self._complain(host, error)
        except Exception:
            log.exception("session_failed peer=%s", host)  # a bug: the other sessions go on
        finally:
            self._statistics.connections -= 1
            self._per_address[host] -= 1
            if not self._per_address[host]:
                del self._per_address[host]

    async def _refuse(self, sock: socket.socket, host: str, reason: str) -> None:
        try:
            connection = await self._start(sock, host, self._limits.linger_s)
            if connection is not None:
                try:
                    await self._session(connection).refuse(Code.BUSY, reason)
                finally:
                    connection.close()
        finally:
            self._refusing -= 1

    async def _start(self, sock: socket.socket, host: str, timeout_s: float) -> tcp.TcpConnection | None:
        """The connection after TLS; None when the peer failed at that."""
        with trio.move_on_after(timeout_s) as scope:
            try:
                return tcp.TcpConnection(await tcp.start_server_tls(sock, self._tls), peer=host)
            except OSError as error:
                sock.close()
                self._complain(host, ProtocolError(f"TLS handshake failed: {error}"))
        self._statistics.timed_out += scope.cancelled_caught
        return None

    def _session(self, connection: tcp.TcpConnection) -> Session:
        return Session(
            connection,
            feeds=self._feeds,
            limits=self._limits,
            budget=self._budget,
            memory_budget=self._memory_budget,
            send_limiter=self._send_limiter,
            statistics=self._statistics,
            rdma=self._rdma,
        )

    def _handshake(self) -> ServerHandshake:
        welcome = Welcome(
            proof=b"",
            boot=self._boot,
            max_requests=self._limits.requests_per_connection,
            idle_timeout_s=max(1, int(self._limits.idle_s)),
            software=_SOFTWARE,
            features=() if self._rdma is None else (RDMA_FEATURE,),
        )
        return ServerHandshake(tokens=self._tokens, nonce=secrets.token_bytes(NONCE_BYTES), welcome=welcome)

    def _complain(self, host: str, error: TierfsError) -> None:
        """Count, and log once per peer and kind of mistake; a connection that just ended is nothing to tell."""
        if isinstance(error, ProtocolError):
            self._statistics.malformed += 1
        elif not isinstance(error, (AuthenticationFailed, NotFound)):
            log.debug("session_ended peer=%s reason=%s", host, error)
            return
        key = (host, type(error).__name__)
        if key in self._complaints:
            self._complaints.move_to_end(key)
            return
        self._complaints[key] = None
        if len(self._complaints) > _REMEMBERED_COMPLAINTS:
            self._complaints.popitem(last=False)
        log.warning("peer_refused peer=%s kind=%s reason=%s", host, key[1], error)
