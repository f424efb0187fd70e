/* Checks of what the kernel and the daemon send: pure functions over bytes, nothing is trusted before they said so. */
#ifndef TIERFS_PARSE_H
#define TIERFS_PARSE_H

#include <stdbool.h>
#include <stddef.h>

#include "protocol.h"

enum verdict {
    VERDICT_BAD,       /* not a message: drop it */
    VERDICT_FORWARD,   /* the daemon answers */
    VERDICT_SWALLOW,   /* no answer is expected (FORGET) */
    VERDICT_INTERRUPT,
    VERDICT_ANSWER,    /* the channel answers by itself, with *error */
};

/* What to do with a request of the kernel of `length` bytes; sets *error (0 or a negative errno) for VERDICT_ANSWER. */
enum verdict parse_request(const void *bytes, size_t length, int *error);

/* Whether these bytes are a reply as a FUSE server writes it. */
bool parse_reply(const void *bytes, size_t length, struct fuse_out_header *header);

/* A READ reply of the daemon: its parts, at most READ_PARTS_MAX, whose lengths sum to header->length, and that is all of
 * the file from `offset` on, at most `asked` bytes: the kernel would make zeros of what is missing. */
bool parse_read_reply(const void *body, size_t length, uint64_t offset, uint32_t asked, struct read_header *header,
                      struct read_part *parts);

/* The lease a reply that is dropped names, or LEASE_NONE. */
uint32_t parse_lease(const void *body, size_t length);

/* The payload of a control message of the daemon: whether `length` fits its type. */
bool parse_control(uint32_t type, size_t length, int descriptors);

#endif
