/* The bytes of a READ: from the pool (mapped) or a tier file (pread) into the kernel. What is in memory is copied by the
 * thread that took the reply, since a hop to another one takes longer than most copies; what is not, or is large and
 * lies in a file, by threads of their own, which a disk that does not answer may hold up. */
#include "channel.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define COPIERS 4
#define COPIERS_MAX 64
#define STUCK_S 0.5 /* no copier has taken anything for so long: all wait for a disk that does not answer */
#define SMALL_BYTES 65536

static struct {
    pthread_mutex_t lock;
    pthread_cond_t work;
    struct copy *first, **end;
    unsigned copiers;
    double taken_s;
} queue = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER};

struct buffer {
    unsigned char *bytes;
    size_t size;
};

/* Gather the parts: places in the pool as they are, tier files through the buffer. 0, or the errno of the part that
 * failed (`copy->at`), -1 where the file ended early. flags: RWF_NOWAIT (preadv2(2)) or 0. */
static int gather(struct copy *copy, struct tier_file **files, struct buffer *buffer, struct iovec *vector, int flags) {
    size_t used = 0, wanted = 0;
    for (unsigned i = 0; i < copy->header.count; i++)
        if (copy->parts[i].slot != SLOT_POOL)
            wanted += copy->parts[i].length;
    if (wanted > buffer->size) {
        void *larger = NULL;
        if (posix_memalign(&larger, 4096, wanted))
            return ENOMEM;
        free(buffer->bytes);
        buffer->bytes = larger;
        buffer->size = wanted;
    }
    for (unsigned i = 0; i < copy->header.count; i++) {
        const struct read_part *part = &copy->parts[i];
        if (part->slot == SLOT_POOL) {
            vector[i] = (struct iovec){copy->epoch->pool + part->offset, part->length};
            continue;
        }
        copy->at = i;
        if (!files[i])
            return EBADF;
        vector[i] = (struct iovec){buffer->bytes + used, part->length};
        for (size_t done = 0; done < part->length;) {
            struct iovec rest = {buffer->bytes + used + done, part->length - done};
            ssize_t got = preadv2(files[i]->fd, &rest, 1, (off_t)(part->offset + done), files[i]->memory ? 0 : flags);
            if (got < 0 && errno == EINTR)
                continue;
            if (got <= 0)
                return got < 0 ? errno : -1;
            done += (size_t)got;
        }
        used += part->length;
    }
    return 0;
}

/* Lock held. */
static void give_back(struct copy *copy, struct tier_file **files) {
    for (unsigned i = 0; i < copy->header.count; i++)
        if (files[i])
            file_give_back(files[i]);
}

/* False, and nothing done: it would have to wait for a medium (only with flags RWF_NOWAIT). */
static bool run(struct channel *c, struct copy *copy, struct buffer *buffer, int flags) {
    struct iovec vector[READ_PARTS_MAX + 1];
    struct tier_file *files[READ_PARTS_MAX] = {0};
    struct epoch *e = copy->epoch;
    pthread_mutex_lock(&c->lock);
    bool wanted = copy->request && !copy->request->answered; /* else it was given up while it was queued */
    for (unsigned i = 0; wanted && i < copy->header.count; i++)
        if (copy->parts[i].slot != SLOT_POOL)
            files[i] = file_take(e, copy->parts[i].slot, copy->parts[i].generation);
    pthread_mutex_unlock(&c->lock);

    int error = wanted ? gather(copy, files, buffer, vector + 1, flags) : ECANCELED;

    pthread_mutex_lock(&c->lock);
    if (error && flags) { /* whatever it is, who may wait meets it again */
        give_back(copy, files);
        pthread_mutex_unlock(&c->lock);
        return false;
    }
    struct request *r = copy->request;
    bool mine = !error && r && !r->answered;
    if (mine)
        r->answered = true; /* from here on the reply is ours to give: an interrupt finds it answered */
    pthread_mutex_unlock(&c->lock);
    if (mine) {
        struct fuse_out_header header = {(uint32_t)(sizeof header + copy->header.length), 0, copy->unique};
        vector[0] = (struct iovec){&header, sizeof header};
        if (writev(c->clones[copy->clone], vector, (int)copy->header.count + 1) < 0) {
            if (errno != ENOENT) { /* never zeros, never less: an error */
                say("a READ reply of %u bytes was refused by the kernel: %s", copy->header.length, strerror(errno));
                kernel_reply(c, copy->clone, copy->unique, -EIO, NULL, 0);
            }
        } else {
            count(c, COUNT_COPIED_BYTES, copy->header.length);
        }
    }
    pthread_mutex_lock(&c->lock);
    give_back(copy, files);
    epoch_lease_done(e, copy->header.lease); /* last: who sees it may drop the files, and use their slots again */
    r = copy->request;
    if (r)
        r->copy = NULL;
    if (r && error && !r->answered) {
        if (e == c->epoch && !e->draining)
            request_settle(c, r, &copy->parts[copy->at], error < 0 ? 0 : error);
        else /* the daemon that decided so is gone: ask the next one */
            request_send(c, r);
    } else if (r) {
        request_remove(c, r);
    }
    epoch_release(e);
    pthread_mutex_unlock(&c->lock);
    free(copy);
    return true;
}

static void *copier_run(void *argument) {
    struct buffer buffer = {0};
    for (;;) {
        pthread_mutex_lock(&queue.lock);
        if (!queue.first && queue.copiers > COPIERS) /* what it was added for is over */
            break;
        while (!queue.first)
            pthread_cond_wait(&queue.work, &queue.lock);
        struct copy *copy = queue.first;
        queue.first = copy->next;
        if (!queue.first)
            queue.end = &queue.first;
        queue.taken_s = now_s();
        pthread_mutex_unlock(&queue.lock);
        (void)run(argument, copy, &buffer, 0);
    }
    queue.copiers--;
    pthread_mutex_unlock(&queue.lock);
    free(buffer.bytes);
    return NULL;
}

/* Whether nothing but the pool's memory is copied. */
static bool in_memory(const struct copy *copy) {
    for (unsigned i = 0; i < copy->header.count; i++)
        if (copy->parts[i].slot != SLOT_POOL)
            return false;
    return true;
}

/* One more copier; with the queue's lock. 0 or an errno. */
static int add_copier(struct channel *c) {
    pthread_t thread;
    int error = pthread_create(&thread, NULL, copier_run, c);
    if (error)
        return error;
    pthread_detach(thread);
    queue.copiers++;
    return 0;
}

/* Bounded by the table of requests: each has at most one copy. Without the lock. */
void copy_begin(struct channel *c, struct copy *copy) {
    if (copy->header.length <= SMALL_BYTES || in_memory(copy)) {
        _Alignas(4096) unsigned char bytes[SMALL_BYTES];
        struct buffer buffer = {bytes, sizeof bytes};
        if (run(c, copy, &buffer, RWF_NOWAIT))
            return;
    }
    copy->next = NULL;
    pthread_mutex_lock(&queue.lock);
    if (!queue.end)
        queue.end = &queue.first;
    *queue.end = copy;
    queue.end = &copy->next;
    if (queue.first != copy && queue.taken_s > 0 && now_s() - queue.taken_s > STUCK_S &&
        queue.copiers < COPIERS_MAX)
        (void)add_copier(c); /* so that the other disks' readers go on; without one they wait */
    pthread_cond_signal(&queue.work);
    pthread_mutex_unlock(&queue.lock);
}

int copiers_start(struct channel *c) {
    int error = 0;
    pthread_mutex_lock(&queue.lock);
    while (!error && queue.copiers < COPIERS)
        error = add_copier(c);
    pthread_mutex_unlock(&queue.lock);
    return error;
}
