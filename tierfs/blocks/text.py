"""Text from elsewhere, made safe to show: names that a source chose, words of a peer. Pure.

A terminal obeys what it is sent: an escape sequence in a name could change its title, hide lines or forge them.
"""


def printable(text: str) -> str:
    """The text in one line, with a question mark for each character that does not show itself: controls, line ends,
    directions of writing, bytes that are no UTF-8."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
