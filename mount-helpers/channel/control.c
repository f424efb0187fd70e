/* The control socket: what the daemon asks of the channel. On the main thread, but for control_read_failed. */
#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "parse.h"

#define MESSAGES_AT_ONCE 256

struct __attribute__((packed)) head { uint32_t type, serial; };

static bool send_message(struct epoch *e, uint32_t type, uint32_t serial, const void *first, size_t first_length,
                         const void *second, size_t second_length, int fd) {
    struct head head = {type, serial};
    struct iovec vector[3] = {{&head, sizeof head},
                              {(void *)(uintptr_t)first, first_length},
                              {(void *)(uintptr_t)second, second_length}};
    char space[CMSG_SPACE(sizeof(int))] = {0};
    struct msghdr message = {.msg_iov = vector, .msg_iovlen = 3};
    if (fd >= 0) {
        message.msg_control = space;
        message.msg_controllen = sizeof space;
        struct cmsghdr *control = CMSG_FIRSTHDR(&message);
        control->cmsg_level = SOL_SOCKET;
        control->cmsg_type = SCM_RIGHTS;
        control->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(control), &fd, sizeof fd);
    }
    if (sendmsg(e->control_socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0)
        return true;
    if (errno != EPIPE && errno != ECONNRESET)
        say("control message %u not sent: %s", type, strerror(errno));
    return false;
}

static void acknowledge(struct epoch *e, uint32_t serial, int error, const char *text) {
    uint32_t status = (uint32_t)error;
    send_message(e, CONTROL_ACK, serial, &status, sizeof status, text, strlen(text), -1);
}

void control_stop(struct epoch *e) { send_message(e, CONTROL_STOP, 0, NULL, 0, NULL, 0, -1); }

bool control_read_failed(struct epoch *e, uint64_t unique, const struct read_part *part, int error) {
    struct __attribute__((packed)) {
        uint64_t unique;
        uint32_t slot, generation;
        uint64_t offset;
        uint32_t length, error;
    } body = {unique, part->slot, part->generation, part->offset, part->length, (uint32_t)error};
    return send_message(e, CONTROL_READ_FAILED, 0, &body, sizeof body, NULL, 0, -1);
}

static uint32_t number32(const unsigned char *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t number64(const unsigned char *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static void hello(struct channel *c, struct epoch *e, uint32_t serial, const unsigned char *body) {
    if (number32(body) != CHANNEL_VERSION) {
        acknowledge(e, serial, EPROTO, "the channel is of another version of tierfs: install both from one");
        return;
    }
    e->hello = true;
    uint32_t numbers[3] = {CHANNEL_VERSION, e->number, c->passthrough_wanted};
    const char *why = c->passthrough_wanted ? "" : "passthrough needs CAP_SYS_ADMIN over the machine, not over a user "
                                                   "namespace: mount as its root";
    send_message(e, CONTROL_WELCOME, serial, numbers, sizeof numbers, why, strlen(why), c->counters_fd);
    acknowledge(e, serial, 0, "");
}

static void *map_sealed(int fd, size_t bytes, int protection) {
    struct stat status;
    int seals = fcntl(fd, F_GET_SEALS);
    if (bytes == 0 || fstat(fd, &status) || (uint64_t)status.st_size < bytes || seals < 0 || !(seals & F_SEAL_SHRINK)) {
        errno = EINVAL; /* what can shrink could kill us with SIGBUS */
        return NULL;
    }
    void *address = mmap(NULL, bytes, protection, MAP_SHARED, fd, 0);
    return address == MAP_FAILED ? NULL : address;
}

static void pool(struct epoch *e, uint32_t serial, const unsigned char *body, const int *fds) {
    uint64_t bytes = number64(body);
    uint32_t leases = number32(body + 8);
    if (e->pool || bytes > 1ull << 42 || leases > 1u << 20) {
        acknowledge(e, serial, EINVAL, "a second pool, or one too large");
        return;
    }
    char *address = map_sealed(fds[0], bytes, PROT_READ);
    uint32_t *counters = address ? map_sealed(fds[1], leases * sizeof *counters, PROT_READ | PROT_WRITE) : NULL;
    if (!counters) {
        int error = errno;
        if (address)
            munmap(address, bytes);
        acknowledge(e, serial, error, "the pool cannot be mapped");
        return;
    }
    e->pool_bytes = bytes;
    e->pool = address;
    e->lease_count = leases;
    e->leases = counters;
    acknowledge(e, serial, 0, "");
}

/* Only regular files of the daemon's user on a tier's device, open for reading: the kernel reopens a backing file with
 * no check of its own. */
static bool acceptable(struct channel *c, int fd, uint64_t size) {
    struct stat status;
    int flags = fcntl(fd, F_GETFL);
    uid_t owner = c->options.has_user ? c->options.uid : geteuid();
    if (flags < 0 || (flags & (O_ACCMODE | O_PATH)) != O_RDONLY || fstat(fd, &status) || !S_ISREG(status.st_mode) ||
        status.st_uid != owner || (uint64_t)status.st_size != size)
        return false;
    for (int round = 0; round < 2; round++) {
        for (unsigned i = 0; i < c->options.tier_count; i++)
            if (c->options.tier_devices[i] == status.st_dev)
                return true;
        for (unsigned i = 0; i < c->options.tier_count; i++) { /* made, or mounted, since */
            struct stat tier;
            if (stat(c->options.tiers[i], &tier) == 0) /* else what main.c saw, with more rights, still holds */
                c->options.tier_devices[i] = tier.st_dev;
        }
    }
    return false;
}

static void file_add(struct channel *c, struct epoch *e, uint32_t serial, const unsigned char *body, int *fd) {
    uint32_t slot = number32(body);
    struct statfs system;
    pthread_mutex_unlock(&c->lock); /* a tier that does not answer holds up the daemon's messages, not the requests */
    bool good = acceptable(c, *fd, number64(body + 8));
    bool memory = good && fstatfs(*fd, &system) == 0 && system.f_type == TMPFS_MAGIC;
    pthread_mutex_lock(&c->lock);
    if (slot >= FILE_SLOTS || e->files[slot].fd >= 0) {
        acknowledge(e, serial, EBUSY, "the slot is taken");
    } else if (!good) {
        acknowledge(e, serial, EACCES, "not a regular file of the daemon's user on a tier's device, open for reading");
    } else {
        e->files[slot] = (struct tier_file){
            .fd = *fd, .generation = number32(body + 4), .size = number64(body + 8), .memory = memory};
        *fd = -1;
        acknowledge(e, serial, 0, "");
    }
}

static void file_drop(struct channel *c, struct epoch *e, uint32_t serial, const unsigned char *body) {
    struct tier_file *file = file_take(e, number32(body), number32(body + 4));
    if (!file) {
        acknowledge(e, serial, ENOENT, "no such file");
        return;
    }
    if (file->users == 1 && c->dropped_count < DROPPED_MAX) {
        c->dropped[c->dropped_count++] = file->fd;
        *file = (struct tier_file){.fd = -1};
    } else {
        file->dropped = true;
        file_give_back(file);
    }
    acknowledge(e, serial, 0, "");
}

/* Without the lock: ours may be the last descriptor of an evicted file, whose space is given up by closing it. That takes
 * seconds for a large one in memory. */
void control_close_dropped(struct channel *c) {
    while (c->dropped_count > 0)
        close(c->dropped[--c->dropped_count]);
}

/* In a memory file: as packets, some 20,000 open files would overflow the socket's buffer. */
static void list_handles(struct channel *c, struct epoch *e, uint32_t serial) {
    requests_answer_releases(c);
    uint32_t number = 0;
    int fd = memfd_create("tierfs-handles", MFD_CLOEXEC);
    FILE *file = fd >= 0 ? fdopen(dup(fd), "w") : NULL;
    bool written = file && inodes_write(c, file, &number);
    if (file)
        written = fclose(file) == 0 && written;
    bool sent = written && send_message(e, CONTROL_HANDLES, serial, &number, sizeof number, NULL, 0, fd);
    acknowledge(e, serial, sent ? 0 : ENOMEM, sent ? "" : "the list of open files cannot be sent");
    if (fd >= 0)
        close(fd);
}

/* What the daemon has sent, a bounded part of it; lock held, but for a look at a file. What the main thread must do is left in the flags. */
void control_receive(struct channel *c, struct epoch *e) {
    unsigned char bytes[4096];
    for (int round = 0; round < MESSAGES_AT_ONCE; round++) {
        union {
            char space[CMSG_SPACE(2 * sizeof(int))];
            struct cmsghdr align;
        } ancillary;
        struct iovec vector = {bytes, sizeof bytes};
        struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = &ancillary,
                                 .msg_controllen = sizeof ancillary};
        ssize_t length = recvmsg(e->control_socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (length < 0 && errno == ECONNRESET)
            continue; /* it died with messages unread: this comes once, and before what it had said */
        if (length <= 0)
            return;
        int fds[2] = {-1, -1}, descriptors = 0;
        struct cmsghdr *control = CMSG_FIRSTHDR(&message);
        if (control && control->cmsg_level == SOL_SOCKET && control->cmsg_type == SCM_RIGHTS) {
            descriptors = (int)((control->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            if (descriptors > 2)
                descriptors = 2;
            memcpy(fds, CMSG_DATA(control), (size_t)descriptors * sizeof(int));
        }
        struct head head = {0, 0};
        if ((size_t)length >= sizeof head)
            memcpy(&head, bytes, sizeof head);
        const unsigned char *body = bytes + sizeof head;
        size_t body_length = (size_t)length >= sizeof head ? (size_t)length - sizeof head : 0;
        if (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC) || !parse_control(head.type, body_length, descriptors) ||
            (!e->hello && head.type != CONTROL_HELLO)) {
            count(c, COUNT_BAD_MESSAGES, 1);
            acknowledge(e, head.serial, EPROTO, "the channel does not understand this message");
        } else {
            switch (head.type) {
            case CONTROL_HELLO: hello(c, e, head.serial, body); break;
            case CONTROL_POOL: pool(e, head.serial, body, fds); break;
            case CONTROL_FILE_ADD: file_add(c, e, head.serial, body, &fds[0]); break;
            case CONTROL_FILE_DROP: file_drop(c, e, head.serial, body); break;
            case CONTROL_LIST_HANDLES: list_handles(c, e, head.serial); break;
            case CONTROL_OFFER:
                acknowledge(e, head.serial,
                            inode_offer(c, number64(body), number32(body + 8), number32(body + 12)) ? 0 : EBUSY, "");
                break;
            case CONTROL_STOPPING:
                if (number32(body) == 1)
                    c->stopping = true;
                else
                    c->replacing = true;
                acknowledge(e, head.serial, 0, "");
                wake_main(c);
                break;
            case CONTROL_READ_SETTLED: {
                struct request *r = request_find(c, number64(body));
                if (r && r->state == REQUEST_SETTLING)
                    request_send(c, r);
                acknowledge(e, head.serial, 0, "");
                break;
            }
            case CONTROL_MOUNT: {
                char why[256] = "";
                int error = e->number == 1 ? main_mount(c, why, sizeof why) : main_take_over(c, e, why, sizeof why);
                acknowledge(e, head.serial, error, why);
                break;
            }
            }
        }
        for (int i = 0; i < 2; i++)
            if (fds[i] >= 0)
                close(fds[i]);
    }
}
