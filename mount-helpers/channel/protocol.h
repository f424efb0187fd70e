/* The two protocols the channel speaks: the kernel's FUSE messages, as far as it looks into them, and its own with the
 * daemon (docs/CHANNEL.md). Layouts of FUSE: include/uapi/linux/fuse.h of the kernel, protocol 7.40. */
#ifndef TIERFS_PROTOCOL_H
#define TIERFS_PROTOCOL_H

#include <stdint.h>
#include <sys/ioctl.h>

enum fuse_opcode {
    OP_LOOKUP = 1, OP_FORGET = 2, OP_GETATTR = 3, OP_READLINK = 5, OP_OPEN = 14, OP_READ = 15, OP_STATFS = 17,
    OP_RELEASE = 18, OP_FSYNC = 20, OP_GETXATTR = 22, OP_LISTXATTR = 23, OP_FLUSH = 25, OP_INIT = 26, OP_OPENDIR = 27,
    OP_READDIR = 28, OP_RELEASEDIR = 29, OP_FSYNCDIR = 30, OP_ACCESS = 34, OP_INTERRUPT = 36, OP_DESTROY = 38,
    OP_BATCH_FORGET = 42, OP_READDIRPLUS = 44, OP_SYNCFS = 50,
};

struct fuse_in_header {
    uint32_t len, opcode;
    uint64_t unique, nodeid;
    uint32_t uid, gid, pid;
    uint16_t total_extlen, padding;
};
struct fuse_out_header {
    uint32_t len;
    int32_t error;
    uint64_t unique;
};
struct fuse_init_in {
    uint32_t major, minor, max_readahead, flags, flags2, unused[11];
};
struct fuse_init_out {
    uint32_t major, minor, max_readahead, flags;
    uint16_t max_background, congestion_threshold;
    uint32_t max_write, time_gran;
    uint16_t max_pages, map_alignment;
    uint32_t flags2, max_stack_depth;
    uint16_t request_timeout, unused[11];
};
struct fuse_open_in { uint32_t flags, open_flags; };
struct fuse_open_out { uint64_t fh; uint32_t open_flags; int32_t backing_id; };
struct fuse_read_in { uint64_t fh, offset; uint32_t size, read_flags; uint64_t lock_owner; uint32_t flags, padding; };
struct fuse_release_in { uint64_t fh; uint32_t flags, release_flags; uint64_t lock_owner; };
struct fuse_interrupt_in { uint64_t unique; };
struct fuse_backing_map { int32_t fd; uint32_t flags; uint64_t padding; };

_Static_assert(sizeof(struct fuse_in_header) == 40, "fuse_in_header");
_Static_assert(sizeof(struct fuse_out_header) == 16, "fuse_out_header");
_Static_assert(sizeof(struct fuse_init_in) == 64, "fuse_init_in");
_Static_assert(sizeof(struct fuse_init_out) == 64, "fuse_init_out");
_Static_assert(sizeof(struct fuse_read_in) == 40, "fuse_read_in");

#define INIT_ASYNC_READ (1u << 0)
#define INIT_EXPORT_SUPPORT (1u << 4)
#define INIT_AUTO_INVAL_DATA (1u << 12)
#define INIT_DO_READDIRPLUS (1u << 13)
#define INIT_READDIRPLUS_AUTO (1u << 14)
#define INIT_PARALLEL_DIROPS (1u << 18)
#define INIT_ABORT_ERROR (1u << 21)
#define INIT_MAX_PAGES (1u << 22)
#define INIT_CACHE_SYMLINKS (1u << 23)
#define INIT_EXT (1u << 30)
#define INIT2_PASSTHROUGH (1u << (37 - 32))

#define OPEN_DIRECT_IO (1u << 0)
#define OPEN_KEEP_CACHE (1u << 1)
#define OPEN_NOFLUSH (1u << 5)
#define OPEN_PASSTHROUGH (1u << 7)

#define DEV_CLONE _IOR(229, 0, uint32_t)
#define DEV_BACKING_OPEN _IOW(229, 1, struct fuse_backing_map)
#define DEV_BACKING_CLOSE _IOW(229, 2, uint32_t)

/* -- with the daemon ---------------------------------------------------------------------------------------------- */

#define CHANNEL_VERSION 2u

enum control_type {
    CONTROL_HELLO = 1, CONTROL_POOL, CONTROL_MOUNT, CONTROL_FILE_ADD, CONTROL_FILE_DROP, CONTROL_OFFER,
    CONTROL_LIST_HANDLES, CONTROL_STOPPING, CONTROL_READ_SETTLED,
    CONTROL_ACK = 100, CONTROL_READ_FAILED, CONTROL_WELCOME, CONTROL_HANDLES, CONTROL_STOP,
};

#define READ_MAGIC 0x44524654u
#define READ_PARTS_MAX 512
#define SLOT_POOL 0xFFFFFFFFu
#define LEASE_NONE 0xFFFFFFFFu
#define FILE_SLOTS 4096u

struct read_header { uint32_t magic; uint16_t version, count; uint32_t lease, length; uint64_t file_bytes; };
struct read_part { uint32_t slot, generation; uint64_t offset; uint32_t length, reserved; };
_Static_assert(sizeof(struct read_header) == 24, "read_header");
_Static_assert(sizeof(struct read_part) == 24, "read_part");

#endif
