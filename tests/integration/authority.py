"""Certificates for tests: an authority of our own, and what it issues, good and bad."""

import datetime
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Issued:
    """A certificate with its key, as files."""

    cert: Path
    key: Path

    @property
    def options(self) -> tuple[str, ...]:
        """Of `tierfs serve`."""
        return ("--set", f"server.tls_cert_file={self.cert}", "--set", f"server.tls_key_file={self.key}")


class Authority:
    """A certificate authority; ``ca`` is what a client trusts."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self._ca = trustme.CA()
        self.ca = directory / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca)

    def issue(self, name: str = "127.0.0.1", *, days: float = 2, file: str = "server") -> Issued:
        """A certificate for that name; with negative ``days`` one that has expired."""
        now = datetime.datetime.now(datetime.UTC)
        made = self._ca.issue_cert(name, not_after=now + datetime.timedelta(days=days))
        issued = Issued(self._directory / f"{file}.pem", self._directory / f"{file}.key")
        issued.key.touch(mode=0o600)
        made.private_key_pem.write_to_path(issued.key)
        issued.cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        return issued
