"""Asks for metrics as an agent does, and reads them as Prometheus does."""

import os
import socket
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, str], float]


class Scraper:
    """Asks over the Unix socket, as an agent does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(60)
        try:
            connection.connect(os.fspath(self.path))
        except OSError:
            connection.close()
            raise
        return connection

    def page(self) -> str:
        with self.connect() as connection, connection.makefile("rb") as answer:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: tierfs\r\n\r\n")
            assert answer.readline() == b"HTTP/1.1 200 OK\r\n"
            length = 0
            while (line := answer.readline()) != b"\r\n":
                name, _, value = line.decode().partition(": ")
                length = int(value) if name == "Content-Length" else length
            body = answer.read()
        assert len(body) == length
        return body.decode()

    def samples(self) -> Samples:
        """By name and the values of the labels."""
        return {
            (sample.name, " ".join(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(self.page())
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }
