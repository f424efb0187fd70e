/* What the parts of the channel share.
 *
 *   kernel ──clone──► incoming.c ──► requests.c ──send──► daemon (Python)          one thread per clone
 *   kernel ◄──clone── replies.c  ◄── copy.c  ◄────recv──┘                          drain threads per daemon, copiers
 *                                    main.c: control messages, deaths, restarts, deadlines          the main thread
 *
 * One lock guards all tables. Nobody holds it while reading a tier file, or waiting for anybody. */
#ifndef TIERFS_CHANNEL_H
#define TIERFS_CHANNEL_H

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/types.h>

#include "protocol.h"

#define REQUEST_BYTES_MAX 16384 /* the kernel wants to see at least 8 KiB and room for max_write, which is 4 KiB here */
#define REQUESTS_MAX 32768      /* unanswered at once; the kernel's own limits are far lower */
#define INODES_MAX 262144       /* open files */
#define REPLY_BYTES_MAX 262144
#define DIRECTORY_BYTES_MAX 65536 /* of one READDIR: its reply must fit the socket */
#define CLONES_MAX 16
#define DRAINERS 2 /* take replies, and copy what is in memory */
#define GROUPS_MAX 256
#define DROPPED_MAX 512     /* files to be closed when the lock is free */
#define COPY_LOOKS 5        /* a tier that has not given its bytes at so many looks, one a second, does not answer */
#define GIVEN_UP_MAX 32     /* READs remembered as deadly */
#define READ_FAILURES_MAX 8 /* of one request; then its reader gets EIO */

enum counter {
    COUNT_READ_SIZES = 64, COUNT_PASSTHROUGH_OPENS = 96, COUNT_CACHED_OPENS, COUNT_HELD_BACK_OPENS, COUNT_REFUSED_OPENS,
    COUNT_LAST_REFUSAL, COUNT_REPLAYS, COUNT_DAEMON_STARTS, COUNT_GRACE_WAITS, COUNT_FATAL_INTERRUPTS,
    COUNT_IGNORED_INTERRUPTS, COUNT_COPIED_BYTES, COUNT_FAILED_COPIES, COUNT_LATE_REPLIES, COUNT_PENDING,
    COUNT_PENDING_MAX, COUNT_REFUSED_REQUESTS, COUNT_REFUSED_NOTIFICATIONS, COUNT_BAD_MESSAGES,
    COUNT_PASSTHROUGH_INODES, COUNT_MAX_PAGES, COUNT_MAX_BACKGROUND, COUNT_CONGESTION, COUNT_PASSTHROUGH,
    COUNT_READ_AHEAD, COUNT_QUEUED, COUNT_GIVEN_UP, COUNTERS = 256,
};

enum request_state {
    REQUEST_QUEUED,   /* to be sent, or sent again */
    REQUEST_SENT,     /* the daemon has it */
    REQUEST_COPYING,  /* answered by the daemon; a copier moves the bytes */
    REQUEST_SETTLING, /* the copy failed; the daemon is told, and tells when to send it again */
};

struct request {
    struct request *next, **previous;      /* in order of arrival */
    struct request *chain;                 /* of its bucket */
    uint64_t unique, nodeid;
    uint64_t offset; /* of a READ */
    uint32_t opcode, length, pid, asked, open_flags;
    int clone;
    enum request_state state;
    bool answered;    /* the kernel has its reply; what still comes from the daemon is dropped */
    bool waited;      /* for a daemon, and was counted for it */
    bool interrupted; /* a signal came; fatal or not is looked at again and again */
    unsigned failures;
    unsigned deaths; /* of daemons that had it */
    double sent_s;
    unsigned copying_looks;
    struct copy *copy;              /* while COPYING */
    struct read_part failed_part;   /* while SETTLING: what could not be copied, and why */
    int failed_error;
    bool untold;                    /* the daemon does not know yet */
    unsigned char bytes[];
};

/* A READ that is not tried again for a while. */
struct given_up {
    uint64_t nodeid, offset, length;
    double until_s;
};

struct inode {
    struct inode *chain;
    uint64_t number;
    uint64_t opens;
    bool passthrough; /* its open handles are: the kernel allows no mixing */
    int backing_id;
    uint32_t offer_slot, offer_generation;
    bool offered;
};

struct tier_file {
    int fd; /* -1: free */
    uint32_t generation, users;
    uint64_t size;
    bool dropped; /* closed by its last user */
    bool memory;  /* a tmpfs: a read waits for nothing */
};

/* One daemon, and what it lent us. Goes when the daemon is dead and the last copy is over. */
struct epoch {
    struct channel *channel;
    unsigned number, users;
    pid_t pid;
    int pidfd, fuse_socket, control_socket;
    bool hello, asked, taking_over, ready, first_reply, draining;
    double ready_s;
    char *pool;
    size_t pool_bytes;
    uint32_t *leases;
    uint32_t lease_count;
    struct tier_file *files;
    pthread_t drains[DRAINERS];
    unsigned drainers;
};

struct options {
    const char *mountpoint;
    bool allow_other;
    long read_ahead_bytes, max_background, threads;
    double restart_grace_s;
    int fuse_fd, keep_fd;
    bool has_user;
    uid_t uid;
    gid_t gid, groups[GROUPS_MAX]; /* the others of the user */
    unsigned group_count;
    const char *tiers[64];
    unsigned tier_count;
    dev_t tier_devices[64];
    char **daemon;
};

struct channel {
    struct options options;
    pthread_mutex_t lock;
    _Atomic uint64_t *counters;
    int counters_fd;
    int clones[CLONES_MAX];
    pthread_t readers[CLONES_MAX];
    _Atomic bool mounted, gone, aborted, stopping, replacing;
    unsigned mount_major, mount_minor; /* 0, 0: not known */
    bool limits_set, flushing;
    int wake_fd; /* eventfd: the main thread shall look */

    struct request *requests, **requests_end;
    struct request **buckets;
    unsigned request_count, interrupted_count, suspect_count;
    bool untold; /* some requests may be */
    unsigned suspects_at_once; /* beside one */
    struct given_up given_up[GIVEN_UP_MAX];
    unsigned given_up_next;
    uint64_t early_interrupts[64]; /* of requests another thread has read but not entered yet */
    unsigned early_next;
    struct inode **inodes;
    unsigned inode_count;

    int dropped[DROPPED_MAX]; /* the main thread's alone */
    unsigned dropped_count;

    struct epoch *epoch;
    bool passthrough_wanted, passthrough, init_known;
    uint64_t init_unique, made_unique;
    unsigned char init_request[256];
    size_t init_length;
    struct fuse_init_out init_reply;
};

/* log.c */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void say_in_child(const char *format, ...) __attribute__((format(printf, 1, 2)));
double now_s(void);
void count(struct channel *c, unsigned counter, uint64_t change);
void set_counter(struct channel *c, unsigned counter, uint64_t value);
void wake_main(struct channel *c);

/* kernel.c */
int kernel_open(struct channel *c, char *why, size_t why_size);
int kernel_mount(struct channel *c, char *why, size_t why_size);
void kernel_unmount(struct channel *c);
int kernel_reply(struct channel *c, int clone, uint64_t unique, int error, const void *body, size_t length);
int kernel_backing_open(struct channel *c, int fd);
void kernel_backing_close(struct channel *c, int id);
void kernel_set_read_ahead(struct channel *c);
unsigned kernel_max_pages(void);

/* requests.c: all with the lock held */
struct request *request_add(struct channel *c, int clone, const void *bytes, size_t length);
struct request *request_find(struct channel *c, uint64_t unique);
void request_remove(struct channel *c, struct request *r);
void request_send(struct channel *c, struct request *r);
bool requests_flush(struct channel *c); /* whether some still wait for room in the socket */
void requests_requeue(struct channel *c, bool by_itself);
void requests_fail_all(struct channel *c, int error);
void requests_answer_releases(struct channel *c);
void requests_give_up_copies(struct channel *c, unsigned looks_max);
void request_settle(struct channel *c, struct request *r, const struct read_part *part, int error);
bool requests_tell_failures(struct channel *c); /* whether some still wait for room in the socket */
bool request_answer(struct channel *c, struct request *r, int error);
void request_made_release(struct channel *c, uint64_t nodeid, uint64_t fh);

/* suspects.c: all with the lock held */
bool suspect_died(struct channel *c, struct request *r);
bool suspect_held_back(const struct request *r);
bool suspects_send(struct channel *c); /* whether one waits for room in the socket */
void suspect_removed(struct channel *c, const struct request *r);
bool suspect_known(struct channel *c, const struct request *r);

/* inodes.c: all with the lock held */
bool inode_offer(struct channel *c, uint64_t number, uint32_t slot, uint32_t generation);
bool inode_opened(struct channel *c, struct request *r, struct fuse_open_out *reply);
void inode_not_opened(struct channel *c, uint64_t number);
void inode_released(struct channel *c, uint64_t number);
void inodes_forget_offers(struct channel *c);
bool inodes_write(struct channel *c, FILE *file, uint32_t *number);

/* epoch.c */
struct epoch *epoch_start(struct channel *c, unsigned number);
void epoch_release(struct epoch *e);
struct tier_file *file_take(struct epoch *e, uint32_t slot, uint32_t generation);
void file_give_back(struct tier_file *file);
void epoch_lease_done(struct epoch *e, uint32_t lease);
void drop_capabilities(const struct options *options);

/* incoming.c */
void *incoming_run(void *argument);
void interrupts_look(struct channel *c);
struct incoming_argument { struct channel *channel; int clone; };

/* replies.c, copy.c */
void *replies_run(void *argument);
struct copy {
    struct copy *next;
    struct epoch *epoch;
    struct request *request; /* NULL: given up, nobody wants the bytes any more; read and written with the lock */
    uint64_t unique;
    int clone;
    _Atomic unsigned at; /* the part that is being read, or failed */
    struct read_header header;
    struct read_part parts[];
};
int copiers_start(struct channel *c);
void copy_begin(struct channel *c, struct copy *copy);

/* control.c */
void control_receive(struct channel *c, struct epoch *e);
void control_close_dropped(struct channel *c);
bool control_read_failed(struct epoch *e, uint64_t unique, const struct read_part *part, int error);
void control_stop(struct epoch *e);

/* main.c: both answer a MOUNT of the daemon, lock held */
int main_mount(struct channel *c, char *why, size_t why_size);
int main_take_over(struct channel *c, struct epoch *e, char *why, size_t why_size);

#endif
