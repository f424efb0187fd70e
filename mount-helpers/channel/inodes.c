/* The open files: how many handles each inode has, and whether they are passthrough.
 *
 *   no handle ─OPEN─► cached            (until the last RELEASE: a cached handle or map keeps passthrough out)
 *        └─OPEN, offered─► passthrough  (one backing id until the last RELEASE; every further OPEN gets the same)
 *
 * The kernel allows no mixing, and but one backing id per inode: fs/fuse/iomode.c, fs/fuse/passthrough.c. */
#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>

#define BUCKETS 4096

static struct inode **bucket_of(struct channel *c, uint64_t number) {
    if (!c->inodes)
        c->inodes = calloc(BUCKETS, sizeof(struct inode *));
    return c->inodes ? &c->inodes[(number ^ number >> 20) % BUCKETS] : NULL;
}

static struct inode **find(struct channel *c, uint64_t number) {
    struct inode **at = bucket_of(c, number);
    while (at && *at && (*at)->number != number)
        at = &(*at)->chain;
    return at;
}

static struct inode *find_or_add(struct channel *c, uint64_t number) {
    struct inode **at = find(c, number);
    if (!at || *at || c->inode_count >= INODES_MAX)
        return at ? *at : NULL;
    struct inode *inode = calloc(1, sizeof *inode);
    if (inode) {
        inode->number = number;
        *at = inode;
        c->inode_count++;
    }
    return inode;
}

static void drop_if_idle(struct channel *c, uint64_t number) {
    struct inode **at = find(c, number);
    struct inode *inode = at ? *at : NULL;
    if (inode && inode->opens == 0 && !inode->offered) {
        *at = inode->chain;
        c->inode_count--;
        free(inode);
    }
}

/* Whether the OPEN that follows is to be passthrough, as far as can be told before the kernel is asked. */
bool inode_offer(struct channel *c, uint64_t number, uint32_t slot, uint32_t generation) {
    struct inode *inode = find_or_add(c, number);
    if (!inode)
        return false;
    inode->offered = true;
    inode->offer_slot = slot;
    inode->offer_generation = generation;
    return c->passthrough && (inode->opens == 0 || inode->passthrough);
}

/* The daemon allowed an OPEN of a reader that was killed meanwhile: what it offered for it is for nobody. */
void inode_not_opened(struct channel *c, uint64_t number) {
    struct inode **at = find(c, number);
    if (at && *at)
        (*at)->offered = false;
    drop_if_idle(c, number);
}

/* The daemon allowed an OPEN: count the handle and decide how it is opened. False: there is no room to count it. */
bool inode_opened(struct channel *c, struct request *r, struct fuse_open_out *reply) {
    struct inode *inode = find_or_add(c, r->nodeid);
    if (!inode)
        return false;
    reply->open_flags = (reply->open_flags & ~OPEN_PASSTHROUGH) | OPEN_NOFLUSH;
    reply->backing_id = 0;
    bool offered = inode->offered && c->passthrough;
    inode->offered = false;
    if (inode->opens == 0 && offered) {
        struct tier_file *file = file_take(c->epoch, inode->offer_slot, inode->offer_generation);
        int id = file ? kernel_backing_open(c, file->fd) : -ENOENT;
        if (file)
            file_give_back(file);
        if (id > 0) {
            inode->passthrough = true;
            inode->backing_id = id;
            count(c, COUNT_PASSTHROUGH_INODES, 1);
        } else {
            count(c, COUNT_REFUSED_OPENS, 1);
            set_counter(c, COUNT_LAST_REFUSAL, (uint64_t)-id);
        }
    } else if (inode->opens > 0 && offered && !inode->passthrough) {
        count(c, COUNT_HELD_BACK_OPENS, 1);
    }
    if (inode->passthrough) {
        reply->open_flags = (reply->open_flags & ~(OPEN_KEEP_CACHE | OPEN_DIRECT_IO)) | OPEN_PASSTHROUGH;
        reply->backing_id = inode->backing_id;
    }
    inode->opens++;
    count(c, inode->passthrough ? COUNT_PASSTHROUGH_OPENS : COUNT_CACHED_OPENS, 1);
    return true;
}

void inode_released(struct channel *c, uint64_t number) {
    struct inode **at = find(c, number);
    struct inode *inode = at ? *at : NULL;
    if (!inode || inode->opens == 0)
        return;
    if (--inode->opens == 0 && inode->passthrough) {
        kernel_backing_close(c, inode->backing_id);
        inode->passthrough = false;
        count(c, COUNT_PASSTHROUGH_INODES, (uint64_t)-1);
    }
    drop_if_idle(c, number);
}

/* The daemon that made them is gone, and so are its files. */
void inodes_forget_offers(struct channel *c) {
    for (size_t bucket = 0; c->inodes && bucket < BUCKETS; bucket++)
        for (struct inode **at = &c->inodes[bucket], *inode; (inode = *at);) {
            inode->offered = false;
            if (inode->opens == 0) {
                *at = inode->chain;
                c->inode_count--;
                free(inode);
            } else {
                at = &inode->chain;
            }
        }
}

/* The open inodes, as pairs of the inode's number and how many handles it has. */
bool inodes_write(struct channel *c, FILE *file, uint32_t *number) {
    for (size_t bucket = 0; c->inodes && bucket < BUCKETS; bucket++)
        for (struct inode *inode = c->inodes[bucket]; inode; inode = inode->chain) {
            uint64_t pair[2] = {inode->number, inode->opens};
            if (inode->opens == 0)
                continue;
            if (fwrite(pair, sizeof pair, 1, file) != 1)
                return false;
            ++*number;
        }
    return true;
}
