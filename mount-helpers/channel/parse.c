#include "parse.h"

#include <errno.h>
#include <string.h>

static size_t smallest_body(uint32_t opcode) {
    switch (opcode) {
    case OP_OPEN:
    case OP_OPENDIR: return sizeof(struct fuse_open_in);
    case OP_READ:
    case OP_READDIR:
    case OP_READDIRPLUS: return sizeof(struct fuse_read_in);
    case OP_RELEASE:
    case OP_RELEASEDIR: return sizeof(struct fuse_release_in);
    case OP_INTERRUPT: return sizeof(struct fuse_interrupt_in);
    case OP_INIT: return 16; /* as kernels before 7.36 send it */
    case OP_LOOKUP: return 1;
    default: return 0;
    }
}

enum verdict parse_request(const void *bytes, size_t length, int *error) {
    struct fuse_in_header header;
    *error = 0;
    if (length < sizeof header)
        return VERDICT_BAD;
    memcpy(&header, bytes, sizeof header);
    if (header.len != length || header.unique == 0)
        return header.opcode == OP_FORGET && header.len == length ? VERDICT_SWALLOW : VERDICT_BAD;
    if (length - sizeof header < smallest_body(header.opcode))
        return VERDICT_BAD;
    switch (header.opcode) {
    case OP_FORGET:
    case OP_BATCH_FORGET: return VERDICT_SWALLOW;
    case OP_INTERRUPT: return VERDICT_INTERRUPT;
    case OP_DESTROY:
    case OP_SYNCFS: return VERDICT_ANSWER;
    case OP_LOOKUP:
    case OP_GETATTR:
    case OP_READLINK:
    case OP_OPEN:
    case OP_READ:
    case OP_STATFS:
    case OP_RELEASE:
    case OP_FSYNC:
    case OP_GETXATTR:
    case OP_LISTXATTR:
    case OP_INIT:
    case OP_OPENDIR:
    case OP_READDIR:
    case OP_RELEASEDIR:
    case OP_FSYNCDIR:
    case OP_ACCESS:
    case OP_READDIRPLUS: return VERDICT_FORWARD;
    case 4: case 6: case 8: case 9: case 10: case 11: case 12: case 13: /* setattr, symlink, mknod ... link */
    case 16: case 21: case 24: case 35: case 43: case 45: case 47: case 51: /* write, setxattr ... tmpfile */
        *error = -EROFS;
        return VERDICT_ANSWER;
    default: /* FLUSH too: answered so once, the kernel never asks again */
        *error = -ENOSYS;
        return VERDICT_ANSWER;
    }
}

bool parse_reply(const void *bytes, size_t length, struct fuse_out_header *header) {
    if (length < sizeof *header)
        return false;
    memcpy(header, bytes, sizeof *header);
    if (header->len != length || header->error > 0 || header->error < -4095)
        return false;
    return header->error == 0 || length == sizeof *header;
}

bool parse_read_reply(const void *body, size_t length, uint64_t offset, uint32_t asked, struct read_header *header,
                      struct read_part *parts) {
    if (length < sizeof *header)
        return false;
    memcpy(header, body, sizeof *header);
    if (header->magic != READ_MAGIC || header->version != CHANNEL_VERSION || header->count > READ_PARTS_MAX ||
        length != sizeof *header + header->count * sizeof *parts)
        return false;
    uint64_t left = offset < header->file_bytes ? header->file_bytes - offset : 0;
    if (header->length != (left < asked ? left : asked))
        return false;
    memcpy(parts, (const char *)body + sizeof *header, header->count * sizeof *parts);
    uint64_t sum = 0;
    for (unsigned i = 0; i < header->count; i++) {
        if (parts[i].length == 0 || parts[i].reserved != 0 || parts[i].offset > INT64_MAX - (uint64_t)UINT32_MAX ||
            (parts[i].slot != SLOT_POOL && parts[i].slot >= FILE_SLOTS))
            return false;
        sum += parts[i].length;
    }
    return sum == header->length && (header->count == 0 || header->lease != LEASE_NONE);
}

uint32_t parse_lease(const void *body, size_t length) {
    struct read_header header;
    if (length < sizeof header)
        return LEASE_NONE;
    memcpy(&header, body, sizeof header);
    return header.magic == READ_MAGIC ? header.lease : LEASE_NONE;
}

bool parse_control(uint32_t type, size_t length, int descriptors) {
    switch (type) {
    case CONTROL_HELLO: return length == 4 && descriptors == 0;
    case CONTROL_POOL: return length == 12 && descriptors == 2;
    case CONTROL_MOUNT: return length == 0 && descriptors == 0;
    case CONTROL_FILE_ADD: return length == 16 && descriptors == 1;
    case CONTROL_FILE_DROP: return length == 8 && descriptors == 0;
    case CONTROL_OFFER: return length == 16 && descriptors == 0;
    case CONTROL_LIST_HANDLES: return length == 0 && descriptors == 0;
    case CONTROL_STOPPING: return length == 4 && descriptors == 0;
    case CONTROL_READ_SETTLED: return length == 8 && descriptors == 0;
    default: return false;
    }
}
