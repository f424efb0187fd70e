"""Certificates: the files the configuration names, as what the transports take."""

import ssl
from pathlib import Path

from tierfs.blocks.errors import ConfigError


def client_tls(*, enabled: bool, ca_file: Path | None) -> ssl.SSLContext | None:
    """TLS for a client: the system's certificates, or those of one file."""
    if not enabled:
        return None
    try:
        return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"source.tls_ca_file: cannot use {ca_file}: {error}") from error


def server_tls(cert_file: Path | None, key_file: Path | None) -> ssl.SSLContext | None:
    """TLS for a server, if it has a certificate."""
    if cert_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(str(cert_file), None if key_file is None else str(key_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"server.tls_cert_file: cannot use {cert_file} and {key_file}: {error}") from error
    return context
