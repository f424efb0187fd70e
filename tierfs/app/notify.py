"""Tells systemd that a service is ready: sd_notify(3) without its library.

Called by what runs in the foreground, as a unit of Type=notify does. Elsewhere NOTIFY_SOCKET is not set and nothing
happens. A word that cannot be sent changes nothing for the readers of a mount, so it is only logged.
"""

import logging
import os
import socket

log = logging.getLogger(__name__)

_SOCKET = "NOTIFY_SOCKET"


def ready(status: str) -> None:
    """The service can be used now; ``status`` is what `systemctl status` shows."""
    place = os.environ.get(_SOCKET, "")
    if not place.startswith(("/", "@")):
        return
    address = "\0" + place[1:] if place.startswith("@") else place
    text = " ".join(status.split())
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to_systemd:
            to_systemd.settimeout(5)
            to_systemd.sendto(f"READY=1\nSTATUS={text}\n".encode(), address)
    except OSError as error:
        log.warning("notify_failed socket=%s error=%s", place, error)
