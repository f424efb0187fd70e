"""TLS between a real server and real mounts: certificates good, expired, of another name or authority, and none."""

import hashlib
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.authority import Authority, Issued
from tests.integration.processes import Mount, Serve, eventually, tierfs

pytestmark = pytest.mark.fuse

BYTES = 5 << 20


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "model.bin").write_bytes(os.urandom(BYTES))
    return tmp_path / "models"


def tls_lines(ca: Path, *, tls: bool = True) -> str:
    """For the end of the table [source], which a Mount's token_file stands at the end of."""
    return f'tls = true\ntls_ca_file = "{ca}"\n' if tls else ""


def settings(tmp_path: Path, url: str, more: str) -> Path:
    config = tmp_path / "mount.toml"
    config.write_text(
        f'state_dir = "{tmp_path}/state"\n[source]\nurl = "{url}"\ntimeout = "2s"\n{more}[mount]\nmode = "direct"\n'
    )
    (tmp_path / "mnt").mkdir(exist_ok=True)
    return config


def served_certificate(server: Serve) -> bytes:
    """What a client that trusts anything is shown."""
    host, _, port = server.url.removeprefix("tierfs://").rstrip("/").partition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((host, int(port)), timeout=5) as sock,
        context.wrap_socket(sock) as wrapped,
    ):
        shown = wrapped.getpeercert(binary_form=True)
    assert shown
    return shown


def first_certificate(issued: Issued) -> bytes:
    return ssl.PEM_cert_to_DER_cert(issued.cert.read_text().split("-----END")[0] + "-----END CERTIFICATE-----\n")


@pytest.mark.parametrize("kind", ["direct", "channel"])
def test_a_mount_over_tls_reads_every_byte_and_lives_through_a_renewed_certificate(
    tmp_path: Path, models: Path, serve: Callable[..., Serve], mount: Callable[..., Mount], kind: str
) -> None:
    authority = Authority(tmp_path / "authority")
    old = authority.issue()
    server = serve(models, *old.options)
    mounted = mount(server.url, source=tls_lines(authority.ca), mode=kind)
    whole = (models / "model.bin").read_bytes()
    assert (mounted.path / "model.bin").read_bytes() == whole
    shown = served_certificate(server)
    assert shown == first_certificate(old)

    old.key.write_text("no key")
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: "certificate_not_renewed" in server.log.read_text(), "the mistake is told")
    assert served_certificate(server) == shown, "the old one stays in force"

    new = authority.issue()  # into the same files
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: "certificate_renewed" in server.log.read_text(), "the new one is in force")
    assert served_certificate(server) == first_certificate(new) != shown

    (models / "later.bin").write_bytes(whole[::-1])
    eventually((mounted.path / "later.bin").exists, "a connection made before goes on")
    assert hashlib.sha256((mounted.path / "later.bin").read_bytes()).digest() == hashlib.sha256(whole[::-1]).digest()
    assert server.process.poll() is None


BAD: list[tuple[str, str]] = [
    ("expired", "expired"),
    ("another name", "IP address mismatch"),
    ("another authority", "certificate is not trusted"),
    ("no TLS at the server", "cannot be reached"),
]


@pytest.mark.parametrize(("bad", "said"), BAD, ids=[bad for bad, _ in BAD])
def test_a_server_that_does_not_prove_its_name_gives_no_mount_and_says_why(
    tmp_path: Path, models: Path, serve: Callable[..., Serve], bad: str, said: str
) -> None:
    authority = Authority(tmp_path / "authority")
    issuer = Authority(tmp_path / "another") if bad == "another authority" else authority
    issued = issuer.issue("192.0.2.1" if bad == "another name" else "127.0.0.1", days=-1 if bad == "expired" else 2)
    server = serve(models, *(() if bad == "no TLS at the server" else issued.options))
    config = settings(tmp_path, server.url, tls_lines(authority.ca))
    began_s = time.monotonic()
    refused = tierfs("mount", config, tmp_path / "mnt", check=False)
    try:
        assert refused.returncode != 0 and time.monotonic() - began_s < 30
        assert len(refused.stderr.strip().splitlines()) == 1 and said in refused.stderr
        assert not os.path.ismount(tmp_path / "mnt")
    finally:
        tierfs("unmount", tmp_path / "mnt", check=False)
    doctor = tierfs("doctor", config, "--json", check=False, timeout_s=100).stdout
    assert said in doctor


def test_a_client_without_tls_gets_nothing_from_a_server_with_it(
    tmp_path: Path, models: Path, serve: Callable[..., Serve]
) -> None:
    server = serve(models, *Authority(tmp_path / "authority").issue().options)
    refused = tierfs("mount", settings(tmp_path, server.url, ""), tmp_path / "mnt", check=False)
    try:
        assert refused.returncode != 0 and "source.tls" in refused.stderr
        assert not os.path.ismount(tmp_path / "mnt")
    finally:
        tierfs("unmount", tmp_path / "mnt", check=False)
    assert "TLS handshake failed" in server.log.read_text()


def test_old_versions_of_tls_are_refused(tmp_path: Path, models: Path, serve: Callable[..., Serve]) -> None:
    server = serve(models, *Authority(tmp_path / "authority").issue().options)
    port = int(server.url.rstrip("/").rpartition(":")[2])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock)


@pytest.mark.parametrize("without", ["cert", "key"])
def test_a_certificate_whose_file_is_no_certificate_is_an_error_at_start(
    tmp_path: Path, models: Path, without: str
) -> None:
    issued = Authority(tmp_path / "authority").issue()
    getattr(issued, without).write_text("nothing\n")
    refused = tierfs("serve", models, "--state-dir", tmp_path / "state", *issued.options, check=False)
    assert refused.returncode != 0 and "server.tls_cert_file: cannot use" in refused.stderr
