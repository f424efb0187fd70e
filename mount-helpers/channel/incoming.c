/* From the kernel: one thread per clone of /dev/fuse reads requests, for ever and without waiting for the daemon. */
#include "channel.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "parse.h"

/* Whether the thread that waits for a request is being killed, or gone (proc_pid_status(5)). Signals that a process
 * handles interrupt as well, and must not turn into errors of a read. */
static bool is_fatal(uint32_t pid) {
    if (pid == 0)
        return false; /* of a pid namespace we do not see: it waits for the answer */
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/%u/status", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return errno == ENOENT;
    unsigned long long pending = 0, shared = 0;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "SigPnd: %llx", &pending) != 1)
            (void)sscanf(line, "ShdPnd: %llx", &shared);
    fclose(file);
    return ((pending | shared) & 0x100) != 0;
}

/* The kernel sends one INTERRUPT for the first signal, and none when a later one is fatal: so look again. */
static void look_at(struct channel *c, struct request *r) {
    if (!r->answered && is_fatal(r->pid)) {
        count(c, COUNT_FATAL_INTERRUPTS, 1);
        request_answer(c, r, -EINTR);
    }
}

void interrupts_look(struct channel *c) {
    for (struct request *r = c->requests, *next; r && c->interrupted_count; r = next) {
        next = r->next;
        if (r->interrupted)
            look_at(c, r);
    }
}

static void mark_interrupted(struct channel *c, struct request *r) {
    if (r->interrupted)
        return;
    r->interrupted = true;
    c->interrupted_count++;
    count(c, COUNT_IGNORED_INTERRUPTS, 1);
    wake_main(c); /* it looks again from time to time */
    look_at(c, r);
}

static void interrupt(struct channel *c, const unsigned char *bytes) {
    struct fuse_interrupt_in in;
    memcpy(&in, bytes + sizeof(struct fuse_in_header), sizeof in);
    struct request *r = request_find(c, in.unique);
    if (r)
        mark_interrupted(c, r);
    else
        c->early_interrupts[c->early_next++ % 64] = in.unique;
}

static void forward(struct channel *c, int clone, const unsigned char *bytes, size_t length) {
    struct fuse_in_header header;
    memcpy(&header, bytes, sizeof header);
    if (header.opcode == OP_INIT && !c->init_known) {
        c->init_known = true;
        c->init_unique = header.unique;
        c->init_length = length < sizeof c->init_request ? length : sizeof c->init_request;
        memcpy(c->init_request, bytes, c->init_length);
    }
    if (header.opcode == OP_RELEASE)
        inode_released(c, header.nodeid);
    struct request *r = request_add(c, clone, bytes, length);
    if (!r) {
        kernel_reply(c, clone, header.unique, -ENOMEM, NULL, 0);
        return;
    }
    if (suspect_known(c, r)) {
        request_answer(c, r, -EIO);
        return;
    }
    request_send(c, r);
    for (unsigned i = 0; i < 64; i++)
        if (c->early_interrupts[i] == header.unique) {
            c->early_interrupts[i] = 0;
            mark_interrupted(c, r);
            break;
        }
}

void *incoming_run(void *argument) {
    struct incoming_argument *given = argument;
    struct channel *c = given->channel;
    int clone = given->clone;
    free(given);
    unsigned char *bytes = malloc(REQUEST_BYTES_MAX);
    while (bytes) {
        ssize_t length = read(c->clones[clone], bytes, REQUEST_BYTES_MAX);
        if (length < 0) {
            if (errno == EINTR || errno == EAGAIN || errno == ENOENT)
                continue;
            if (errno == ECONNABORTED)
                c->aborted = true;
            else if (errno != ENODEV)
                say("reading /dev/fuse: %s", strerror(errno));
            break;
        }
        int error;
        struct fuse_in_header header;
        enum verdict verdict = parse_request(bytes, (size_t)length, &error);
        if (verdict == VERDICT_BAD) {
            count(c, COUNT_BAD_MESSAGES, 1);
            if ((size_t)length >= sizeof header) { /* nobody shall wait for the answer to what we do not understand */
                memcpy(&header, bytes, sizeof header);
                kernel_reply(c, clone, header.unique, -EIO, NULL, 0);
            }
            continue;
        }
        memcpy(&header, bytes, sizeof header);
        count(c, header.opcode < 64 ? header.opcode : 0, 1);
        if (verdict == VERDICT_SWALLOW)
            continue;
        if (verdict == VERDICT_ANSWER) {
            kernel_reply(c, clone, header.unique, error, NULL, 0);
            continue;
        }
        pthread_mutex_lock(&c->lock);
        if (verdict == VERDICT_INTERRUPT)
            interrupt(c, bytes);
        else
            forward(c, clone, bytes, (size_t)length);
        pthread_mutex_unlock(&c->lock);
    }
    free(bytes);
    pthread_mutex_lock(&c->lock);
    c->gone = true;
    pthread_mutex_unlock(&c->lock);
    wake_main(c);
    return NULL;
}
