/* The requests the kernel waits for: entered when read, removed when nobody owes or expects anything for them.
 *
 *   read ─► QUEUED ─sent─► SENT ─► (answered) removed
 *              ▲             └─READ─► COPYING ─► (answered) removed
 *              │                        └ failed ─► SETTLING (the daemon is told) ─┐
 *              └────────── the daemon died, or settled ────────────────────────────┘
 *
 * A request whose reader was killed is answered at once, and stays here until the daemon's late reply has come. */
#include "channel.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define BUCKETS 16384

static struct request **bucket_of(struct channel *c, uint64_t unique) {
    if (!c->buckets)
        c->buckets = calloc(BUCKETS, sizeof *c->buckets);
    /* uniques are even and count up */
    return c->buckets ? &c->buckets[(unique >> 1) % BUCKETS] : NULL;
}

struct request *request_find(struct channel *c, uint64_t unique) {
    struct request **bucket = bucket_of(c, unique);
    for (struct request *r = bucket ? *bucket : NULL; r; r = r->chain)
        if (r->unique == unique)
            return r;
    return NULL;
}

struct request *request_add(struct channel *c, int clone, const void *bytes, size_t length) {
    struct fuse_in_header header;
    memcpy(&header, bytes, sizeof header);
    struct request **bucket = bucket_of(c, header.unique);
    struct request *r = bucket && c->request_count < REQUESTS_MAX ? calloc(1, sizeof *r + length) : NULL;
    if (!r) {
        count(c, COUNT_REFUSED_REQUESTS, 1);
        return NULL;
    }
    r->unique = header.unique;
    r->nodeid = header.nodeid;
    r->opcode = header.opcode;
    r->pid = header.pid;
    r->clone = clone;
    r->length = (uint32_t)length;
    memcpy(r->bytes, bytes, length);
    if (r->opcode == OP_READ) {
        struct fuse_read_in in;
        memcpy(&in, r->bytes + sizeof header, sizeof in);
        r->offset = in.offset;
        r->asked = in.size;
        unsigned size = 0;
        while (size < 15 && in.size > 4096u << size)
            size++;
        count(c, COUNT_READ_SIZES + size, 1);
    } else if (r->opcode == OP_OPEN) {
        struct fuse_open_in in;
        memcpy(&in, r->bytes + sizeof header, sizeof in);
        r->open_flags = in.flags;
    } else if (r->opcode == OP_READDIR || r->opcode == OP_READDIRPLUS) {
        struct fuse_read_in in;
        memcpy(&in, r->bytes + sizeof header, sizeof in);
        if (in.size > DIRECTORY_BYTES_MAX)
            in.size = DIRECTORY_BYTES_MAX;
        memcpy(r->bytes + sizeof header, &in, sizeof in);
    }
    r->chain = *bucket;
    *bucket = r;
    if (!c->requests_end)
        c->requests_end = &c->requests;
    r->previous = c->requests_end;
    *c->requests_end = r;
    c->requests_end = &r->next;
    c->request_count++;
    set_counter(c, COUNT_PENDING, c->request_count);
    if (c->request_count > c->counters[COUNT_PENDING_MAX])
        set_counter(c, COUNT_PENDING_MAX, c->request_count);
    return r;
}

void request_remove(struct channel *c, struct request *r) {
    for (struct request **at = bucket_of(c, r->unique); *at; at = &(*at)->chain)
        if (*at == r) {
            *at = r->chain;
            break;
        }
    *r->previous = r->next;
    if (r->next)
        r->next->previous = r->previous;
    else
        c->requests_end = r->previous;
    c->request_count--;
    c->interrupted_count -= r->interrupted;
    suspect_removed(c, r);
    set_counter(c, COUNT_PENDING, c->request_count);
    free(r);
}

/* Never waits: what does not fit stays QUEUED, and the main thread sends it when the socket has room. */
void request_send(struct channel *c, struct request *r) {
    struct epoch *e = c->epoch;
    r->state = REQUEST_QUEUED;
    if (!e || !(e->ready || (r->opcode == OP_INIT && e->asked)) || c->replacing || c->stopping) {
        if (!r->waited && (!e || (e->number > 1 && !e->ready))) {
            r->waited = true;
            count(c, COUNT_GRACE_WAITS, 1);
        }
        return;
    }
    if (send(e->fuse_socket, r->bytes, r->length, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)r->length) {
        r->state = REQUEST_SENT;
        if (r->deaths)
            r->sent_s = now_s();
        return;
    }
    if (errno == EAGAIN || errno == ENOBUFS || errno == ENOMEM) {
        count(c, COUNT_QUEUED, 1);
        if (!c->flushing) /* else it is the main thread, and knows */
            wake_main(c);
    }
}

bool requests_flush(struct channel *c) {
    if (!c->epoch || !c->epoch->asked || c->replacing || c->stopping)
        return false;
    bool full = false;
    c->flushing = true;
    for (struct request *r = c->requests; r && !full; r = r->next)
        if (r->state == REQUEST_QUEUED && !suspect_held_back(r)) {
            request_send(c, r);
            full = r->state == REQUEST_QUEUED;
        }
    full = full || suspects_send(c);
    c->flushing = false;
    return full && c->epoch->ready;
}

/* The daemon is dead: what it had not answered goes to the next one; what nobody waits for any more goes.
 * `by_itself`: nobody had told it to end. */
void requests_requeue(struct channel *c, bool by_itself) {
    for (struct request *r = c->requests, *next; r; r = next) {
        next = r->next;
        if (r->state == REQUEST_COPYING)
            continue;
        if (r->answered) {
            request_remove(c, r);
        } else if (r->state != REQUEST_QUEUED && !(by_itself && suspect_died(c, r))) {
            r->state = REQUEST_QUEUED;
            r->untold = false;
            count(c, COUNT_REPLAYS, 1);
        }
    }
}

/* A place could not be copied: the daemon drops it there, and says when the request may be sent again. */
void request_settle(struct channel *c, struct request *r, const struct read_part *part, int error) {
    count(c, COUNT_FAILED_COPIES, 1);
    if (++r->failures > READ_FAILURES_MAX) {
        r->state = REQUEST_QUEUED;
        request_answer(c, r, -EIO);
        return;
    }
    r->state = REQUEST_SETTLING;
    r->failed_part = *part;
    r->failed_error = error;
    r->untold = true;
    c->untold = true;
    (void)requests_tell_failures(c);
}

/* Of those that the daemon does not know yet, as many as its socket takes. Whether some are left. */
bool requests_tell_failures(struct channel *c) {
    if (!c->untold || !c->epoch)
        return false;
    for (struct request *r = c->requests; r; r = r->next)
        if (r->untold && !control_read_failed(c->epoch, r->unique, &r->failed_part, r->failed_error)) {
            wake_main(c); /* which waits for room */
            return true;
        } else {
            r->untold = false;
        }
    c->untold = false;
    return false;
}

/* Answer the kernel without the daemon. True: the request is gone from the table. */
bool request_answer(struct channel *c, struct request *r, int error) {
    if (!r->answered) {
        r->answered = true;
        if (r->unique != 0 && r->clone >= 0)
            kernel_reply(c, r->clone, r->unique, error, NULL, 0);
    }
    if (r->state == REQUEST_SENT || r->state == REQUEST_COPYING)
        return false;
    request_remove(c, r);
    return true;
}

void requests_fail_all(struct channel *c, int error) {
    for (struct request *r = c->requests, *next; r; r = next) {
        next = r->next;
        request_answer(c, r, error);
    }
}

/* A daemon that takes over learns which handles are open, not what was released while there was none. */
void requests_answer_releases(struct channel *c) {
    for (struct request *r = c->requests, *next; r; r = next) {
        next = r->next;
        if (r->opcode == OP_RELEASE && r->state == REQUEST_QUEUED)
            request_answer(c, r, 0);
    }
}

/* Called once a second. Their copiers still sit in a read of a medium that does not answer; what they come back with is
 * dropped, and another tier is asked meanwhile. Looks are counted: a channel that was stopped has waited for nobody.
 * The daemon is told EINPROGRESS, which no medium says: it takes the device for stalled, and drops nothing. */
void requests_give_up_copies(struct channel *c, unsigned looks_max) {
    for (struct request *r = c->requests, *next; r; r = next) {
        next = r->next;
        if (r->state != REQUEST_COPYING || r->answered || ++r->copying_looks <= looks_max)
            continue;
        struct copy *copy = r->copy;
        copy->request = NULL;
        r->copy = NULL;
        if (copy->epoch == c->epoch && !copy->epoch->draining)
            request_settle(c, r, &copy->parts[copy->at], EINPROGRESS);
        else
            request_send(c, r);
    }
}

/* The daemon opened a file for a reader that was killed meanwhile: the kernel will never release that handle. */
void request_made_release(struct channel *c, uint64_t nodeid, uint64_t fh) {
    struct {
        struct fuse_in_header header;
        struct fuse_release_in release;
    } message = {.header = {.len = sizeof message, .opcode = OP_RELEASE, .nodeid = nodeid}, .release = {.fh = fh}};
    /* The kernel's own numbers are even and small. */
    message.header.unique = UINT64_MAX - 2 * c->made_unique++;
    struct request *r = request_add(c, -1, &message, sizeof message);
    if (r) {
        r->answered = true;
        request_send(c, r);
    }
}
