"""When a queue pair gives up on its peer, computed from how long a transfer may take. Pure.

A requester that hears nothing sends again after an acknowledgement timeout of 4.096 us x 2^t (a device may take up to
four times as long) and fails after ``retries`` more attempts. It must have failed well before the transfer's own
deadline, so that there is time for another way. A short time-out is no gain either: a slow device that serves several
queue pairs in turn (soft-RoCE) is late without having lost anything, and then sends all again.
"""

import math

from tierfs.transport.rdma.verbs import Timing

ACK_UNIT_S = 4.096e-6
ACK_TIMEOUT_LEAST = 8  # 1 ms: a busy peer is not a dead one
ACK_TIMEOUT_MOST = 17  # 0.54 s
RETRIES_LEAST, RETRIES_USUAL, RETRIES_MOST = 2, 4, 6  # soft-RoCE takes 7 for "for ever", and never completes
_SLACK = 4  # how many times longer than its value a device may wait


def timing_for(transfer_timeout_s: float) -> Timing:
    """The most patient attributes that give up within ``transfer_timeout_s``, or nearly so where it is tiny."""
    assert transfer_timeout_s > 0
    share_s = transfer_timeout_s / (_SLACK * (RETRIES_USUAL + 1))
    exponent = math.floor(math.log2(share_s / ACK_UNIT_S)) if share_s > ACK_UNIT_S else 0
    ack_timeout = min(ACK_TIMEOUT_MOST, max(ACK_TIMEOUT_LEAST, exponent))
    tries = int(transfer_timeout_s / (_SLACK * ACK_UNIT_S * 2**ack_timeout))
    return Timing(ack_timeout, min(RETRIES_MOST, max(RETRIES_LEAST, tries - 1)))


def longest_s(timing: Timing) -> float:
    """How long a queue pair with this may take to fail, at most."""
    return _SLACK * ACK_UNIT_S * 2.0**timing.ack_timeout * (timing.retries + 1)
