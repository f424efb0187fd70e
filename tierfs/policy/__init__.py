"""Pure decisions: no I/O, no clock, no trio. Time and randomness are arguments."""
