/* Unit tests of the channel's parts without a kernel or a daemon: the parsers, and the tables of requests and inodes.
 * Built and run by test_channel_units.py, with the address and undefined-behaviour sanitizers. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "channel.h"
#include "parse.h"

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* -- the kernel, as the tables see it */

static uint64_t answered_unique;
static int answered_error, opened_backings, closed_backings, backing_result = 7;

int kernel_reply(struct channel *c, int clone, uint64_t unique, int error, const void *body, size_t length) {
    (void)c, (void)clone, (void)body, (void)length;
    answered_unique = unique;
    answered_error = error;
    return 0;
}
int kernel_backing_open(struct channel *c, int fd) {
    (void)c, (void)fd;
    opened_backings++;
    return backing_result;
}
void kernel_backing_close(struct channel *c, int id) {
    (void)c, (void)id;
    closed_backings++;
}

int main_mount(struct channel *c, char *why, size_t why_size) { return (void)c, (void)why, (void)why_size, 0; }
int main_take_over(struct channel *c, struct epoch *e, char *why, size_t why_size) {
    return (void)c, (void)e, (void)why, (void)why_size, 0;
}
unsigned kernel_max_pages(void) { return 256; }
void copy_begin(struct channel *c, struct copy *copy) {
    (void)c;
    free(copy);
}

static _Atomic uint64_t counters[COUNTERS];

static void prepare(struct channel *c, struct epoch *e, int sockets[2]) {
    memset(c, 0, sizeof *c);
    memset(e, 0, sizeof *e);
    memset((void *)counters, 0, sizeof counters);
    pthread_mutex_init(&c->lock, NULL);
    c->counters = counters;
    c->wake_fd = open("/dev/null", O_WRONLY);
    c->epoch = e;
    c->passthrough = true;
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) == 0);
    e->fuse_socket = sockets[0];
    e->number = 1;
    e->asked = e->ready = true;
    e->files = calloc(FILE_SLOTS, sizeof *e->files);
    for (unsigned i = 0; i < FILE_SLOTS; i++)
        e->files[i].fd = -1;
}

static void clear(struct channel *c, struct epoch *e, int sockets[2]) {
    while (c->requests)
        request_remove(c, c->requests);
    inodes_forget_offers(c);
    free(c->buckets);
    free(c->inodes);
    free(e->files);
    close(c->wake_fd);
    close(sockets[0]);
    close(sockets[1]);
}

struct message {
    struct fuse_in_header header;
    struct fuse_read_in read;
};

static struct message message_of(uint32_t opcode, uint64_t unique, uint64_t nodeid) {
    struct message message = {.header = {.len = sizeof message, .opcode = opcode, .unique = unique, .nodeid = nodeid}};
    message.read.size = opcode == OP_OPEN ? 0 : 1 << 20;
    return message;
}

/* -- parsers */

static void requests_of_a_wrong_length_are_bad(void) {
    struct message message = message_of(OP_READ, 2, 1);
    int error;
    CHECK(parse_request(&message, sizeof message, &error) == VERDICT_FORWARD);
    CHECK(parse_request(&message, sizeof message - 1, &error) == VERDICT_BAD);
    CHECK(parse_request(&message, 8, &error) == VERDICT_BAD);
    message.header.len = sizeof message.header + 8;
    CHECK(parse_request(&message, sizeof message.header + 8, &error) == VERDICT_BAD);
}

static void writes_and_unknown_requests_are_refused(void) {
    struct message message = message_of(16, 2, 1);
    int error;
    CHECK(parse_request(&message, sizeof message, &error) == VERDICT_ANSWER && error == -EROFS);
    message.header.opcode = 4000000000u;
    CHECK(parse_request(&message, sizeof message, &error) == VERDICT_ANSWER && error == -ENOSYS);
}

static void forgets_need_no_answer(void) {
    struct message message = message_of(OP_FORGET, 0, 1);
    int error;
    CHECK(parse_request(&message, sizeof message, &error) == VERDICT_SWALLOW);
}

static void replies_are_checked(void) {
    struct fuse_out_header header = {16, 0, 4}, parsed;
    CHECK(parse_reply(&header, 16, &parsed) && parsed.unique == 4);
    CHECK(!parse_reply(&header, 15, &parsed));
    header.error = 5;
    CHECK(!parse_reply(&header, 16, &parsed));
    struct { struct fuse_out_header header; uint64_t body; } failed = {{24, -5, 4}, 0};
    CHECK(!parse_reply(&failed, 24, &parsed));
}

static void read_replies_must_add_up(void) {
    struct { struct read_header header; struct read_part parts[2]; } reply = {
        {READ_MAGIC, CHANNEL_VERSION, 2, 3, 8192, 1 << 20}, {{SLOT_POOL, 0, 0, 4096, 0}, {5, 1, 4096, 4096, 0}}};
    struct read_header header;
    struct read_part parts[READ_PARTS_MAX];
    CHECK(parse_read_reply(&reply, sizeof reply, 4096, 8192, &header, parts) && header.count == 2);
    CHECK(!parse_read_reply(&reply, sizeof reply, 4096, 8191, &header, parts));
    CHECK(!parse_read_reply(&reply, sizeof reply - 1, 4096, 8192, &header, parts));
    reply.header.length = 8191;
    CHECK(!parse_read_reply(&reply, sizeof reply, 4096, 8192, &header, parts));
    reply.header.length = 8192;
    reply.parts[1].slot = FILE_SLOTS;
    CHECK(!parse_read_reply(&reply, sizeof reply, 4096, 8192, &header, parts));
    reply.parts[1].slot = 5;
    reply.parts[1].offset = UINT64_MAX - 10;
    CHECK(!parse_read_reply(&reply, sizeof reply, 4096, 8192, &header, parts));
    CHECK(parse_lease(&reply, sizeof reply) == 3);
    CHECK(parse_lease(&reply, 8) == LEASE_NONE);
}

static void a_list_is_all_that_was_asked_for_up_to_the_end(void) {
    struct { struct read_header header; struct read_part part; } reply = {
        {READ_MAGIC, CHANNEL_VERSION, 1, 3, 4096, 12288}, {SLOT_POOL, 0, 0, 4096, 0}};
    struct read_header header;
    struct read_part parts[READ_PARTS_MAX];
    CHECK(parse_read_reply(&reply, sizeof reply, 4096, 4096, &header, parts));
    CHECK(parse_read_reply(&reply, sizeof reply, 8192, 65536, &header, parts)); /* the tail of the file */
    CHECK(!parse_read_reply(&reply, sizeof reply, 4096, 8192, &header, parts)); /* 4096 bytes would become zeros */
    CHECK(!parse_read_reply(&reply, sizeof reply, 8193, 65536, &header, parts)); /* more than there is */
    CHECK(!parse_read_reply(&reply, sizeof reply, 12288, 4096, &header, parts));
    CHECK(!parse_read_reply(&reply, sizeof reply, UINT64_MAX, 4096, &header, parts));
    reply.header.count = 0;
    reply.header.length = 0;
    CHECK(!parse_read_reply(&reply, sizeof reply.header, 12287, 4096, &header, parts));
    CHECK(parse_read_reply(&reply, sizeof reply.header, 12288, 4096, &header, parts));
    CHECK(parse_read_reply(&reply, sizeof reply.header, UINT64_MAX, 4096, &header, parts));
}

/* -- requests */

static void requests_are_sent_kept_and_replayed(void) {
    struct channel c;
    struct epoch e;
    int sockets[2];
    prepare(&c, &e, sockets);
    struct message message = message_of(OP_READ, 2, 9), got;
    request_send(&c, request_add(&c, 0, &message, sizeof message));
    CHECK(recv(sockets[1], &got, sizeof got, 0) == sizeof got && got.header.unique == 2);
    CHECK(request_find(&c, 2)->state == REQUEST_SENT);
    requests_requeue(&c, true);
    CHECK(request_find(&c, 2)->state == REQUEST_QUEUED && counters[COUNT_REPLAYS] == 1);
    CHECK(!requests_flush(&c));
    CHECK(recv(sockets[1], &got, sizeof got, MSG_DONTWAIT) == sizeof got && got.header.unique == 2);
    clear(&c, &e, sockets);
}

static void nothing_is_sent_to_a_daemon_that_is_not_ready(void) {
    struct channel c;
    struct epoch e;
    int sockets[2];
    prepare(&c, &e, sockets);
    e.ready = false;
    struct message message = message_of(OP_READ, 2, 9);
    request_send(&c, request_add(&c, 0, &message, sizeof message));
    CHECK(request_find(&c, 2)->state == REQUEST_QUEUED);
    CHECK(recv(sockets[1], &message, sizeof message, MSG_DONTWAIT) == -1);
    clear(&c, &e, sockets);
}

static void a_full_socket_makes_requests_wait_not_the_caller(void) {
    struct channel c;
    struct epoch e;
    int sockets[2];
    prepare(&c, &e, sockets);
    struct message message = message_of(OP_READ, 0, 9);
    for (uint64_t unique = 2; unique < 20000; unique += 2) {
        message.header.unique = unique;
        struct request *r = request_add(&c, 0, &message, sizeof message);
        CHECK(r);
        request_send(&c, r);
    }
    CHECK(counters[COUNT_QUEUED] > 0);
    close(c.wake_fd);
    c.wake_fd = eventfd(0, EFD_NONBLOCK);
    CHECK(requests_flush(&c)); /* by the main thread, which must not wake itself for ever */
    uint64_t wakes, expected = 2;
    CHECK(read(c.wake_fd, &wakes, sizeof wakes) < 0);
    do {
        while (recv(sockets[1], &message, sizeof message, MSG_DONTWAIT) == sizeof message) {
            CHECK(message.header.unique == expected);
            expected += 2;
        }
    } while (requests_flush(&c) || expected < 20000);
    clear(&c, &e, sockets);
}

static void the_table_is_bounded(void) {
    struct channel c;
    struct epoch e;
    int sockets[2];
    prepare(&c, &e, sockets);
    struct message message = message_of(OP_GETATTR, 0, 9);
    for (uint64_t i = 1; i <= REQUESTS_MAX; i++) {
        message.header.unique = 2 * i;
        CHECK(request_add(&c, 0, &message, sizeof message));
    }
    message.header.unique = 2 * (REQUESTS_MAX + 1);
    CHECK(!request_add(&c, 0, &message, sizeof message));
    clear(&c, &e, sockets);
    CHECK(counters[COUNT_PENDING] == 0 && counters[COUNT_PENDING_MAX] == REQUESTS_MAX);
}

static void a_killed_reader_is_answered_and_its_request_stays_until_the_daemon_replies(void) {
    struct channel c;
    struct epoch e;
    int sockets[2];
    prepare(&c, &e, sockets);
    struct message message = message_of(OP_READ, 2, 9);
    struct request *r = request_add(&c, 0, &message, sizeof message);
    request_send(&c, r);
    CHECK(!request_answer(&c, r, -EINTR) && answered_unique == 2 && answered_error == -EINTR);
    CHECK(request_find(&c, 2) == r);
    requests_requeue(&c, true); /* the daemon died: nobody waits for it, so nobody gets it again */
    CHECK(!request_find(&c, 2));
    clear(&c, &e, sockets);
}

/* What the daemon at the other end has got, at most `limit` of it. */
static unsigned received(int socket, uint64_t *uniques, unsigned limit) {
    struct message message;
    unsigned number = 0;
    while (number < limit && recv(socket, &message, sizeof message, MSG_DONTWAIT) == sizeof message)
        uniques[number++] = message.header.unique;
    return number;
}

static void a_request_that_kills_daemons_is_given_up_and_no_other(void) {
    struct channel c;
    struct epoch e;
    int sockets[2];
    prepare(&c, &e, sockets);
    const uint64_t deadly = 20;
    for (uint64_t unique = 2; unique <= 42; unique += 2) {
        struct message message = message_of(OP_READ, unique, 9);
        message.read.offset = unique << 20;
        CHECK(request_add(&c, 0, &message, sizeof message));
    }
    unsigned deaths = 0, answered = 0;
    while (c.request_count) {
        (void)requests_flush(&c);
        uint64_t uniques[64];
        unsigned number = received(sockets[1], uniques, 64);
        CHECK(number > 0);
        bool died = false;
        for (unsigned i = 0; i < number; i++)
            died |= uniques[i] == deadly;
        if (died) { /* before it has answered anything */
            deaths++;
            requests_requeue(&c, true);
            continue;
        }
        for (unsigned i = 0; i < number; i++, answered++)
            request_remove(&c, request_find(&c, uniques[i]));
    }
    CHECK(deaths == 5 && answered == 20 && counters[COUNT_GIVEN_UP] == 1);
    CHECK(answered_unique == deadly && answered_error == -EIO && c.suspect_count == 0);
    struct message again = message_of(OP_READ, 100, 9);
    again.read.offset = (deadly << 20) + 4096;
    again.read.size = 4096;
    CHECK(suspect_known(&c, request_add(&c, 0, &again, sizeof again)));
    again.header.unique = 102;
    again.header.nodeid = 10;
    CHECK(!suspect_known(&c, request_add(&c, 0, &again, sizeof again)));
    again.header.unique = 104;
    again.header.nodeid = 9;
    again.read.offset = (deadly + 1) << 20;
    CHECK(!suspect_known(&c, request_add(&c, 0, &again, sizeof again)));
    clear(&c, &e, sockets);
}

static void suspects_wait_for_each_other_but_not_for_ever(void) {
    struct channel c;
    struct epoch e;
    int sockets[2];
    prepare(&c, &e, sockets);
    struct message message = message_of(OP_READ, 2, 9);
    CHECK(request_add(&c, 0, &message, sizeof message));
    message.header.unique = 4;
    CHECK(request_add(&c, 0, &message, sizeof message));
    uint64_t uniques[8];
    for (int death = 0; death < 2; death++) {
        (void)requests_flush(&c);
        CHECK(received(sockets[1], uniques, 8) == 2);
        requests_requeue(&c, true);
    }
    CHECK(c.suspect_count == 2 && !requests_flush(&c));
    CHECK(received(sockets[1], uniques, 8) == 1 && uniques[0] == 2);
    (void)requests_flush(&c);
    CHECK(received(sockets[1], uniques, 8) == 0);
    request_find(&c, 2)->sent_s -= 3; /* as if time had passed */
    (void)requests_flush(&c);
    CHECK(received(sockets[1], uniques, 8) == 1 && uniques[0] == 4);
    clear(&c, &e, sockets);
    CHECK(c.suspect_count == 0);
}

static void many_innocent_suspects_do_not_go_one_by_one(void) {
    struct channel c;
    struct epoch e;
    int sockets[2];
    prepare(&c, &e, sockets);
    for (uint64_t unique = 2; unique <= 400; unique += 2) {
        struct message message = message_of(OP_READ, unique, 9);
        CHECK(request_add(&c, 0, &message, sizeof message));
    }
    static uint64_t uniques[400];
    for (int death = 0; death < 2; death++) {
        (void)requests_flush(&c);
        CHECK(received(sockets[1], uniques, 400) == 200);
        requests_requeue(&c, true);
    }
    unsigned rounds = 0;
    for (; c.request_count; rounds++) {
        (void)requests_flush(&c);
        unsigned number = received(sockets[1], uniques, 400);
        CHECK(number > 0 && number <= 64);
        for (unsigned i = 0; i < number; i++)
            request_remove(&c, request_find(&c, uniques[i]));
    }
    CHECK(rounds < 12);
    clear(&c, &e, sockets);
}

static void ends_that_were_asked_for_and_requests_not_sent_make_no_suspects(void) {
    struct channel c;
    struct epoch e;
    int sockets[2];
    prepare(&c, &e, sockets);
    struct message message = message_of(OP_READ, 2, 9);
    CHECK(request_add(&c, 0, &message, sizeof message));
    for (int end = 0; end < 20; end++) {
        e.ready = end % 2; /* every other daemon dies while it starts */
        (void)requests_flush(&c);
        requests_requeue(&c, !e.ready);
    }
    CHECK(request_find(&c, 2)->deaths == 0 && counters[COUNT_GIVEN_UP] == 0);
    clear(&c, &e, sockets);
}

static void directory_requests_are_cut_to_what_the_socket_takes(void) {
    struct channel c;
    struct epoch e;
    int sockets[2];
    prepare(&c, &e, sockets);
    struct message message = message_of(OP_READDIR, 2, 1);
    struct request *r = request_add(&c, 0, &message, sizeof message);
    memcpy(&message, r->bytes, sizeof message);
    CHECK(message.read.size == DIRECTORY_BYTES_MAX);
    clear(&c, &e, sockets);
}

/* -- inodes */

static struct request *an_open(struct channel *c, uint64_t unique, uint64_t nodeid) {
    struct message message = message_of(OP_OPEN, unique, nodeid);
    return request_add(c, 0, &message, sizeof message);
}

static void one_backing_id_until_the_last_release(void) {
    struct channel c;
    struct epoch e;
    int sockets[2];
    prepare(&c, &e, sockets);
    opened_backings = closed_backings = 0;
    e.files[3] = (struct tier_file){.fd = 0, .generation = 1};
    struct fuse_open_out reply = {9, OPEN_KEEP_CACHE, 0};
    CHECK(inode_offer(&c, 9, 3, 1));
    CHECK(inode_opened(&c, an_open(&c, 2, 9), &reply));
    CHECK(reply.open_flags == (OPEN_PASSTHROUGH | OPEN_NOFLUSH) && reply.backing_id == 7);
    reply = (struct fuse_open_out){9, OPEN_KEEP_CACHE, 0};
    CHECK(inode_opened(&c, an_open(&c, 4, 9), &reply)); /* not offered again: still no mixing */
    CHECK((reply.open_flags & OPEN_PASSTHROUGH) && reply.backing_id == 7 && opened_backings == 1);
    CHECK(inode_offer(&c, 9, 3, 1) && inode_opened(&c, an_open(&c, 6, 9), &reply));
    inode_released(&c, 9);
    inode_released(&c, 9);
    CHECK(closed_backings == 0);
    inode_released(&c, 9);
    CHECK(closed_backings == 1 && c.inode_count == 0 && e.files[3].users == 0);
    clear(&c, &e, sockets);
}

static void a_cached_handle_keeps_passthrough_out(void) {
    struct channel c;
    struct epoch e;
    int sockets[2];
    prepare(&c, &e, sockets);
    e.files[3] = (struct tier_file){.fd = 0, .generation = 1};
    struct fuse_open_out reply = {9, OPEN_KEEP_CACHE, 0};
    CHECK(inode_opened(&c, an_open(&c, 2, 9), &reply) && !(reply.open_flags & OPEN_PASSTHROUGH));
    CHECK(reply.open_flags == (OPEN_KEEP_CACHE | OPEN_NOFLUSH));
    CHECK(!inode_offer(&c, 9, 3, 1));
    CHECK(inode_opened(&c, an_open(&c, 4, 9), &reply) && !(reply.open_flags & OPEN_PASSTHROUGH));
    CHECK(counters[COUNT_HELD_BACK_OPENS] == 1);
    inode_released(&c, 9);
    inode_released(&c, 9);
    inode_offer(&c, 9, 3, 1);
    CHECK(inode_opened(&c, an_open(&c, 6, 9), &reply) && (reply.open_flags & OPEN_PASSTHROUGH));
    inode_released(&c, 9);
    clear(&c, &e, sockets);
}

static void a_refused_or_outdated_file_opens_cached(void) {
    struct channel c;
    struct epoch e;
    int sockets[2];
    prepare(&c, &e, sockets);
    e.files[3] = (struct tier_file){.fd = 0, .generation = 2};
    struct fuse_open_out reply = {9, OPEN_KEEP_CACHE, 0};
    inode_offer(&c, 9, 3, 1); /* the slot has another file by now */
    CHECK(inode_opened(&c, an_open(&c, 2, 9), &reply) && !(reply.open_flags & OPEN_PASSTHROUGH));
    CHECK(counters[COUNT_REFUSED_OPENS] == 1 && counters[COUNT_LAST_REFUSAL] == ENOENT);
    inode_released(&c, 9);
    backing_result = -ELOOP;
    inode_offer(&c, 9, 3, 2);
    CHECK(inode_opened(&c, an_open(&c, 4, 9), &reply) && !(reply.open_flags & OPEN_PASSTHROUGH));
    backing_result = 7;
    CHECK(counters[COUNT_REFUSED_OPENS] == 2 && counters[COUNT_LAST_REFUSAL] == ELOOP);
    inode_released(&c, 9);
    clear(&c, &e, sockets);
}

static void an_offer_for_a_reader_that_was_killed_is_for_nobody(void) {
    struct channel c;
    struct epoch e;
    int sockets[2];
    prepare(&c, &e, sockets);
    e.channel = &c;
    e.files[3] = (struct tier_file){.fd = 0, .generation = 1};
    struct request *r = an_open(&c, 2, 9);
    request_send(&c, r);
    CHECK(!request_answer(&c, r, -EINTR));
    inode_offer(&c, 9, 3, 1);
    struct { struct fuse_out_header header; struct fuse_open_out open; } late = {{sizeof late, 0, 2}, {9, 0, 0}};
    CHECK(send(sockets[1], &late, sizeof late, 0) == sizeof late);
    CHECK(shutdown(sockets[1], SHUT_WR) == 0);
    replies_run(&e);
    CHECK(counters[COUNT_LATE_REPLIES] == 1 && c.inode_count == 0);
    struct fuse_open_out reply = {9, OPEN_KEEP_CACHE, 0};
    CHECK(inode_opened(&c, an_open(&c, 4, 9), &reply) && !(reply.open_flags & OPEN_PASSTHROUGH));
    inode_released(&c, 9);
    clear(&c, &e, sockets);
}

/* -- copies that fail */

static void a_failed_copy_is_told_once_the_socket_has_room(void) {
    struct channel c;
    struct epoch e;
    int sockets[2], control[2];
    prepare(&c, &e, sockets);
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, control) == 0);
    e.control_socket = control[0];
    while (send(control[0], "full", 4, MSG_DONTWAIT) == 4)
        ;
    struct message message = message_of(OP_READ, 2, 9);
    struct request *r = request_add(&c, 0, &message, sizeof message);
    r->state = REQUEST_COPYING;
    struct read_part part = {.slot = 3, .generation = 1, .offset = 4096, .length = 512};
    request_settle(&c, r, &part, EIO);
    CHECK(r->state == REQUEST_SETTLING && r->failures == 1 && requests_tell_failures(&c) && r->untold);
    char told[128];
    while (recv(control[1], told, sizeof told, MSG_DONTWAIT) == 4)
        ;
    CHECK(!requests_tell_failures(&c) && !r->untold);
    ssize_t length = recv(control[1], told, sizeof told, MSG_DONTWAIT);
    uint32_t type, error;
    CHECK(length == 8 + 32);
    memcpy(&type, told, sizeof type);
    memcpy(&error, told + length - sizeof error, sizeof error);
    CHECK(type == CONTROL_READ_FAILED && error == EIO);
    CHECK(recv(control[1], told, sizeof told, MSG_DONTWAIT) < 0); /* once */
    CHECK(recv(sockets[1], told, sizeof told, MSG_DONTWAIT) < 0); /* and not asked again before it is settled */
    close(control[0]);
    close(control[1]);
    clear(&c, &e, sockets);
}

static void a_copy_that_takes_too_long_is_asked_of_another_tier_and_what_it_brings_is_dropped(void) {
    struct channel c;
    struct epoch e;
    int sockets[2], control[2];
    prepare(&c, &e, sockets);
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, control) == 0);
    e.control_socket = control[0];
    struct message message = message_of(OP_READ, 2, 9);
    struct request *r = request_add(&c, 0, &message, sizeof message);
    struct copy *copy = calloc(1, sizeof *copy + 2 * sizeof *copy->parts);
    *copy = (struct copy){.epoch = &e, .request = r, .at = 1};
    copy->parts[1] = (struct read_part){.slot = 5, .generation = 1, .length = 512};
    r->state = REQUEST_COPYING;
    r->copy = copy;
    for (int look = 0; look < 2; look++) {
        CHECK(r->state == REQUEST_COPYING);
        requests_give_up_copies(&c, 1);
    }
    CHECK(r->state == REQUEST_SETTLING && !r->answered && !copy->request && !r->copy);
    struct __attribute__((packed)) { uint32_t type, serial; uint64_t unique; uint32_t slot, generation; uint64_t offset;
                                     uint32_t length, error; } told;
    CHECK(recv(control[1], &told, sizeof told, MSG_DONTWAIT) == sizeof told);
    CHECK(told.unique == 2 && told.slot == 5 && told.error == EINPROGRESS);
    free(copy);
    close(control[0]);
    close(control[1]);
    clear(&c, &e, sockets);
}

/* -- replies */

static void what_a_daemon_had_answered_counts_though_it_died_with_requests_unread(void) {
    struct channel c;
    struct epoch e;
    int sockets[2];
    prepare(&c, &e, sockets);
    e.channel = &c;
    for (uint64_t unique = 2; unique <= 6; unique += 2) {
        struct message message = message_of(OP_GETATTR, unique, 1);
        request_send(&c, request_add(&c, 0, &message, sizeof message));
    }
    for (uint64_t unique = 2; unique <= 4; unique += 2) {
        struct fuse_out_header header = {sizeof header, -ESTALE, unique};
        CHECK(send(sockets[1], &header, sizeof header, 0) == sizeof header);
    }
    int daemon = dup(sockets[1]);
    CHECK(dup2(c.wake_fd, sockets[1]) == sockets[1] && close(daemon) == 0);
    replies_run(&e);
    CHECK(c.request_count == 1 && request_find(&c, 6) && answered_unique == 4 && answered_error == -ESTALE);
    clear(&c, &e, sockets);
}

static bool takes_over(uint32_t flags) {
    struct channel c;
    struct epoch e;
    int sockets[2];
    prepare(&c, &e, sockets);
    e.channel = &c;
    e.ready = false;
    e.taking_over = true;
    c.init_unique = 2;
    c.init_reply = (struct fuse_init_out){.major = 7, .flags = INIT_ASYNC_READ | INIT_DO_READDIRPLUS};
    struct { struct fuse_out_header header; struct fuse_init_out init; } reply = {
        {sizeof reply, 0, 2}, {.major = 7, .flags = flags}};
    CHECK(send(sockets[1], &reply, sizeof reply, 0) == sizeof reply);
    CHECK(shutdown(sockets[1], SHUT_WR) == 0);
    replies_run(&e);
    bool ready = e.ready;
    clear(&c, &e, sockets);
    return ready;
}

static void a_new_daemon_must_answer_what_the_kernel_was_told_it_does(void) {
    CHECK(takes_over(INIT_DO_READDIRPLUS));
    CHECK(takes_over(INIT_DO_READDIRPLUS | INIT_EXPORT_SUPPORT));
    CHECK(!takes_over(INIT_ASYNC_READ));
}

static void every_open_inode_is_listed_once(void) {
    struct channel c;
    struct epoch e;
    int sockets[2];
    prepare(&c, &e, sockets);
    struct fuse_open_out reply = {0};
    for (uint64_t inode = 2; inode < 5002; inode++) {
        struct request *r = an_open(&c, 2 * inode, inode * 0x9E3779B97F4A7C15u >> 1);
        CHECK(inode_opened(&c, r, &reply));
        request_remove(&c, r);
    }
    uint64_t pair[2];
    uint32_t number = 0, seen = 0;
    FILE *file = tmpfile();
    CHECK(file && inodes_write(&c, file, &number) && number == 5000);
    for (rewind(file); fread(pair, sizeof pair, 1, file) == 1; seen++)
        CHECK(pair[1] == 1);
    CHECK(seen == 5000);
    fclose(file);
    for (uint64_t inode = 2; inode < 5002; inode++)
        inode_released(&c, inode * 0x9E3779B97F4A7C15u >> 1);
    CHECK(c.inode_count == 0);
    clear(&c, &e, sockets);
}

/* -- control messages */

/* What the channel acknowledges one message with; the descriptor that came before the acknowledgement in *received. */
static uint32_t told(struct channel *c, int daemon, const uint32_t *words, size_t count, int fd, int *received) {
    union { char space[CMSG_SPACE(sizeof(int))]; struct cmsghdr align; } ancillary = {{0}};
    uint32_t body[8] = {0};
    struct iovec vector = {(void *)(uintptr_t)words, count * sizeof *words};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = &ancillary;
        message.msg_controllen = sizeof ancillary;
        struct cmsghdr *control = CMSG_FIRSTHDR(&message);
        *control = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(control), &fd, sizeof fd);
    }
    CHECK(sendmsg(daemon, &message, 0) > 0);
    pthread_mutex_lock(&c->lock);
    control_receive(c, c->epoch);
    pthread_mutex_unlock(&c->lock);
    for (;;) {
        vector = (struct iovec){body, sizeof body};
        message = (struct msghdr){.msg_iov = &vector, .msg_iovlen = 1, .msg_control = &ancillary,
                                  .msg_controllen = sizeof ancillary};
        CHECK(recvmsg(daemon, &message, MSG_DONTWAIT) >= 8);
        if (body[0] == CONTROL_ACK)
            return body[2];
        CHECK(received && body[0] == CONTROL_HANDLES && CMSG_FIRSTHDR(&message));
        memcpy(received, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof *received);
    }
}

static void a_dropped_file_is_closed_when_the_lock_is_free_and_its_slot_is_free_at_once(void) {
    struct channel c;
    struct epoch e;
    int sockets[2], control[2];
    struct stat status;
    prepare(&c, &e, sockets);
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, control) == 0);
    e.control_socket = control[0];
    e.hello = true;
    int file = open("/proc/self/exe", O_RDONLY);
    CHECK(fstat(file, &status) == 0);
    c.options.has_user = true;
    c.options.uid = status.st_uid;
    c.options.tier_count = 1;
    c.options.tier_devices[0] = status.st_dev;
    c.options.tiers[0] = "/nowhere";
    uint32_t size = (uint32_t)status.st_size;
    const uint32_t add[] = {CONTROL_FILE_ADD, 1, 3, 1, size, 0}, again[] = {CONTROL_FILE_ADD, 1, 3, 2, size, 0};
    const uint32_t drop[] = {CONTROL_FILE_DROP, 1, 3, 1};
    CHECK(told(&c, control[1], add, 6, file, NULL) == 0 && told(&c, control[1], again, 6, file, NULL) == EBUSY);
    int lent = e.files[3].fd;
    CHECK(told(&c, control[1], drop, 4, -1, NULL) == 0 && told(&c, control[1], drop, 4, -1, NULL) == ENOENT);
    CHECK(c.dropped_count == 1 && fcntl(lent, F_GETFD) >= 0);
    CHECK(told(&c, control[1], again, 6, file, NULL) == 0 && e.files[3].fd != lent);
    control_close_dropped(&c);
    CHECK(c.dropped_count == 0 && fcntl(lent, F_GETFD) < 0 && errno == EBADF);
    CHECK(file_take(&e, 3, 1) == NULL && file_take(&e, 3, 2) == &e.files[3]);
    close(e.files[3].fd);
    close(file);
    close(control[0]);
    close(control[1]);
    clear(&c, &e, sockets);
}

static void open_files_are_listed_and_releases_that_wait_are_over_by_then(void) {
    struct channel c;
    struct epoch e;
    int sockets[2], control[2], list = -1;
    prepare(&c, &e, sockets);
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, control) == 0);
    e.control_socket = control[0];
    e.hello = true;
    e.ready = false;
    struct fuse_open_out reply = {0};
    CHECK(inode_opened(&c, an_open(&c, 2, 9), &reply));
    struct message release = message_of(OP_RELEASE, 4, 8);
    request_add(&c, 0, &release, sizeof release);
    const uint32_t words[] = {CONTROL_LIST_HANDLES, 1};
    CHECK(told(&c, control[1], words, 2, -1, &list) == 0 && list >= 0);
    uint64_t pair[3];
    CHECK(pread(list, pair, sizeof pair, 0) == 16 && pair[0] == 9 && pair[1] == 1);
    CHECK(request_find(&c, 4) == NULL && answered_unique == 4 && answered_error == 0);
    close(list);
    inode_released(&c, 9);
    close(control[0]);
    close(control[1]);
    clear(&c, &e, sockets);
}

static void a_flood_of_lines_is_held_back_and_counted(void) {
    int pipe_fds[2], saved = dup(STDERR_FILENO);
    CHECK(pipe(pipe_fds) == 0 && dup2(pipe_fds[1], STDERR_FILENO) >= 0);
    for (int i = 0; i < 200; i++)
        say("line %d", i);
    CHECK(dup2(saved, STDERR_FILENO) >= 0);
    close(pipe_fds[1]);
    close(saved);
    static char text[65536];
    size_t length = 0;
    for (ssize_t got; (got = read(pipe_fds[0], text + length, sizeof text - 1 - length)) > 0;)
        length += (size_t)got;
    close(pipe_fds[0]);
    unsigned lines = 0;
    for (size_t i = 0; i < length; i++)
        lines += text[i] == '\n';
    CHECK(lines > 0 && lines <= 20);
}

int main(void) {
    requests_of_a_wrong_length_are_bad();
    writes_and_unknown_requests_are_refused();
    forgets_need_no_answer();
    replies_are_checked();
    read_replies_must_add_up();
    a_list_is_all_that_was_asked_for_up_to_the_end();
    requests_are_sent_kept_and_replayed();
    nothing_is_sent_to_a_daemon_that_is_not_ready();
    a_full_socket_makes_requests_wait_not_the_caller();
    the_table_is_bounded();
    a_killed_reader_is_answered_and_its_request_stays_until_the_daemon_replies();
    a_request_that_kills_daemons_is_given_up_and_no_other();
    suspects_wait_for_each_other_but_not_for_ever();
    many_innocent_suspects_do_not_go_one_by_one();
    ends_that_were_asked_for_and_requests_not_sent_make_no_suspects();
    directory_requests_are_cut_to_what_the_socket_takes();
    one_backing_id_until_the_last_release();
    a_cached_handle_keeps_passthrough_out();
    a_refused_or_outdated_file_opens_cached();
    an_offer_for_a_reader_that_was_killed_is_for_nobody();
    a_failed_copy_is_told_once_the_socket_has_room();
    a_copy_that_takes_too_long_is_asked_of_another_tier_and_what_it_brings_is_dropped();
    what_a_daemon_had_answered_counts_though_it_died_with_requests_unread();
    a_new_daemon_must_answer_what_the_kernel_was_told_it_does();
    a_dropped_file_is_closed_when_the_lock_is_free_and_its_slot_is_free_at_once();
    open_files_are_listed_and_releases_that_wait_are_over_by_then();
    a_flood_of_lines_is_held_back_and_counted();
    every_open_inode_is_listed_once();
    puts("ok");
    return 0;
}
