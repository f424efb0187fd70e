"""Logs: one event a line, as text or as JSON with fields, and never a flood."""

import json
import logging

from tierfs.app.logs import FloodFilter, JsonFormatter


def record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("tierfs.x", logging.WARNING, "f", 1, message, arguments, None)


def test_json_has_the_event_and_its_keys() -> None:
    line = json.loads(JsonFormatter().format(record("corrupt_block path=%r block=%d peer=%s", b"m/\xff", 7, "h:1")))
    assert (line["event"], line["block"], line["peer"], line["level"]) == ("corrupt_block", 7, "h:1", "warning")
    assert line["path"] == "m/\\xff"
    assert line["message"] == "corrupt_block path=b'm/\\xff' block=7 peer=h:1"


def test_an_event_that_repeats_is_held_back_and_counted() -> None:
    now = [0.0]
    flood = FloodFilter(clock=lambda: now[0])
    assert sum(flood.filter(record("event block=%d", number)) for number in range(1000)) == 10
    assert flood.filter(record("other event"))
    now[0] = 11.0
    later = record("event block=%d", 5)
    assert flood.filter(later)
    assert later.getMessage() == "event block=5 held_back=990"
