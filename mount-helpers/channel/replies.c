/* From the daemon: a few threads per daemon take its replies off the socket, and wait for nothing else, nor for a disk.
 * The kernel asks in no order that replies would have to keep; what must be first (INIT) is answered before it asks on. */
#include "channel.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "parse.h"

/* What only the daemon can know whether it answers; all other flags are the channel's business. */
#define INIT_DAEMONS (INIT_EXPORT_SUPPORT | INIT_DO_READDIRPLUS | INIT_READDIRPLUS_AUTO)

/* What the daemon's library offers, less what makes no sense here, and what it cannot offer. */
static size_t patch_init(struct channel *c, unsigned char *body, size_t length) {
    struct fuse_init_out out = {0};
    struct fuse_init_in in = {0};
    memcpy(&out, body, length < sizeof out ? length : sizeof out);
    size_t sent = c->init_length - sizeof(struct fuse_in_header);
    memcpy(&in, c->init_request + sizeof(struct fuse_in_header), sent < sizeof in ? sent : sizeof in);
    uint32_t wanted = INIT_ABORT_ERROR | INIT_ASYNC_READ | INIT_PARALLEL_DIROPS | INIT_MAX_PAGES | INIT_CACHE_SYMLINKS | INIT_EXT;
    out.flags = (wanted | (out.flags & INIT_DAEMONS)) & in.flags;
    out.flags2 = 0;
    out.max_stack_depth = 0;
    if (c->passthrough_wanted && (in.flags & INIT_EXT) && (in.flags2 & INIT2_PASSTHROUGH)) {
        out.flags2 = INIT2_PASSTHROUGH;
        out.max_stack_depth = 1; /* so that an overlayfs may lie on top */
        c->passthrough = true;
    }
    out.max_readahead = UINT32_MAX & ~4095u;
    out.max_background = (uint16_t)c->options.max_background;
    out.congestion_threshold = (uint16_t)(c->options.max_background * 3 / 4);
    out.max_write = 4096; /* nothing is written: requests stay small */
    out.max_pages = (uint16_t)kernel_max_pages();
    out.map_alignment = 0;
    out.request_timeout = 0;
    c->init_reply = out;
    memcpy(body, &out, sizeof out);
    set_counter(c, COUNT_PASSTHROUGH, c->passthrough);
    set_counter(c, COUNT_MAX_PAGES, in.flags & INIT_MAX_PAGES ? out.max_pages : 32);
    set_counter(c, COUNT_MAX_BACKGROUND, out.max_background);
    set_counter(c, COUNT_CONGESTION, out.congestion_threshold);
    return sizeof out;
}

/* The first reply of a new daemon: to the first INIT, which the kernel has long forgotten. Lock held. */
static void taken_over(struct channel *c, struct epoch *e, const unsigned char *body, size_t length, int error) {
    struct fuse_init_out out = {0};
    memcpy(&out, body, length < sizeof out ? length : sizeof out);
    e->taking_over = false;
    uint32_t lacks = c->init_reply.flags & INIT_DAEMONS & ~out.flags; /* the kernel goes on asking for it */
    if (error || out.major != c->init_reply.major || lacks) {
        say("the new daemon speaks another protocol (%d, %u, lacks 0x%x): refused", error, out.major, lacks);
        shutdown(e->fuse_socket, SHUT_RDWR); /* it ends, and another is tried until the grace is over */
        return;
    }
    e->ready = true;
    e->ready_s = now_s();
    (void)requests_flush(c);
    wake_main(c);
}

/* The copy that the reply asks for, to be begun when the lock is free; NULL: it asked for nonsense, and is over. */
static struct copy *take_places(struct channel *c, struct epoch *e, struct request *r, const unsigned char *body,
                                size_t length) {
    struct copy *copy;
    size_t room = length < sizeof copy->header ? 0 : length - sizeof copy->header;
    copy = room <= READ_PARTS_MAX * sizeof *copy->parts ? malloc(sizeof *copy + room) : NULL;
    bool good = copy && parse_read_reply(body, length, r->offset, r->asked, &copy->header, copy->parts);
    for (unsigned i = 0; good && i < copy->header.count; i++) {
        const struct read_part *part = &copy->parts[i];
        if (part->slot == SLOT_POOL)
            good = e->pool && part->offset <= e->pool_bytes && part->length <= e->pool_bytes - part->offset;
        else if (e->files[part->slot].fd >= 0 && e->files[part->slot].generation == part->generation)
            good = part->offset + part->length <= e->files[part->slot].size;
    }
    if (!good) {
        count(c, COUNT_BAD_MESSAGES, 1);
        say("a READ reply of the daemon (inode %llu, offset %llu, length %u) does not say where all of it lies: answered EIO",
            (unsigned long long)r->nodeid, (unsigned long long)r->offset, r->asked);
        epoch_lease_done(e, parse_lease(body, length));
        free(copy);
        r->state = REQUEST_QUEUED; /* nothing is owed any more */
        request_answer(c, r, -EIO);
        return NULL;
    }
    copy->epoch = e;
    copy->request = r;
    copy->unique = r->unique;
    copy->clone = r->clone;
    copy->at = 0;
    r->copy = copy;
    r->state = REQUEST_COPYING;
    r->copying_looks = 0;
    e->users++;
    return copy;
}

static void reply(struct channel *c, struct epoch *e, unsigned char *bytes, size_t length) {
    struct fuse_out_header header;
    if (!parse_reply(bytes, length, &header)) {
        count(c, length >= sizeof header && header.unique == 0 ? COUNT_REFUSED_NOTIFICATIONS : COUNT_BAD_MESSAGES, 1);
        return; /* tierfs sends no notifications: a new version is a new inode */
    }
    unsigned char *body = bytes + sizeof header;
    length -= sizeof header;
    struct copy *copy = NULL;
    pthread_mutex_lock(&c->lock);
    if (e->taking_over && header.unique == c->init_unique) {
        taken_over(c, e, body, length, header.error);
        goto out;
    }
    struct request *r = request_find(c, header.unique);
    if (!r || r->state != REQUEST_SENT) {
        count(c, COUNT_BAD_MESSAGES, 1);
        goto out;
    }
    if (!e->first_reply) {
        e->first_reply = true;
        wake_main(c);
    }
    if (r->answered) { /* its reader was killed meanwhile */
        count(c, COUNT_LATE_REPLIES, 1);
        if (r->opcode == OP_READ && header.error == 0)
            epoch_lease_done(e, parse_lease(body, length));
        bool opened = r->opcode == OP_OPEN && header.error == 0 && length >= sizeof(struct fuse_open_out);
        uint64_t nodeid = r->nodeid, fh = 0;
        if (opened)
            memcpy(&fh, body, sizeof fh);
        request_remove(c, r);
        if (opened) {
            inode_not_opened(c, nodeid);
            request_made_release(c, nodeid, fh);
        }
        goto out;
    }
    if (r->opcode == OP_READ && header.error == 0) {
        copy = take_places(c, e, r, body, length);
        goto out;
    }
    if (r->opcode == OP_INIT && header.error == 0) {
        length = patch_init(c, body, length);
        e->ready = true;
        e->ready_s = now_s();
        wake_main(c);
    }
    struct fuse_open_out open = {0};
    bool opened = r->opcode == OP_OPEN && header.error == 0;
    if (opened) {
        if (length != sizeof open) {
            header.error = -EIO;
            opened = false;
        } else {
            memcpy(&open, body, sizeof open);
            if ((r->open_flags & 3) != 0 || !inode_opened(c, r, &open)) {
                request_made_release(c, r->nodeid, open.fh);
                header.error = (r->open_flags & 3) != 0 ? -EROFS : -ENFILE;
                opened = false;
            }
        }
        memcpy(body, &open, sizeof open);
    }
    int failed = kernel_reply(c, r->clone, r->unique, header.error, body, header.error ? 0 : length);
    if (failed && opened) { /* nobody waits for it any more: no RELEASE will come */
        inode_released(c, r->nodeid);
        request_made_release(c, r->nodeid, open.fh);
    } else if (failed && failed != ENOENT) {
        say("a reply to opcode %u was refused by the kernel: %s", r->opcode, strerror(failed));
        kernel_reply(c, r->clone, r->unique, -EIO, NULL, 0);
    }
    r->answered = true;
    request_remove(c, r);
out:
    pthread_mutex_unlock(&c->lock);
    if (copy)
        copy_begin(c, copy);
}

void *replies_run(void *argument) {
    struct epoch *e = argument;
    unsigned char *bytes = malloc(REPLY_BYTES_MAX);
    while (bytes) {
        ssize_t length = recv(e->fuse_socket, bytes, REPLY_BYTES_MAX, 0);
        if (length < 0 && (errno == EINTR || errno == ECONNRESET))
            continue; /* the reset comes once, and before what a daemon that died with requests unread had answered */
        if (length <= 0)
            break;
        reply(e->channel, e, bytes, (size_t)length);
    }
    free(bytes);
    return NULL;
}
