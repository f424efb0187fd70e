/* Fuzz target of the channel's parsers. With clang: -fsanitize=fuzzer,address. Without libFuzzer this file's own main
 * mutates well-formed messages: fuzz [SECONDS] [SEED]. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "parse.h"

#define BEFORE 12 /* what was asked for: u32 length, u64 offset; then the daemon's message */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    int error = 0;
    struct fuse_out_header reply;
    struct read_header header;
    struct read_part parts[READ_PARTS_MAX];
    uint32_t asked = 0, type = 0;
    uint64_t offset = 0;
    enum verdict verdict = parse_request(data, size, &error);
    if (verdict == VERDICT_ANSWER && error > 0)
        abort();
    if (parse_reply(data, size, &reply) && reply.error > 0)
        abort();
    if (size >= BEFORE + 4) {
        memcpy(&asked, data, 4);
        memcpy(&offset, data + 4, 8);
        memcpy(&type, data + BEFORE, 4);
        const uint8_t *body = data + BEFORE;
        size -= BEFORE;
        if (parse_read_reply(body, size, offset, asked, &header, parts)) {
            uint64_t sum = 0;
            for (unsigned i = 0; i < header.count; i++)
                sum += parts[i].length;
            if (sum != header.length || sum > asked || (sum < asked && sum > 0 && offset + sum != header.file_bytes) || header.count > READ_PARTS_MAX)
                abort();
        }
        (void)parse_lease(body, size);
        (void)parse_control(type, size - 4, (int)(size % 4));
    }
    return 0;
}

#ifndef WITH_LIBFUZZER
static uint64_t state;

static uint32_t number(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 16);
}

static size_t well_formed(uint8_t *out) {
    if (number() % 2) {
        struct fuse_in_header header = {.opcode = number() % 60, .unique = 2, .nodeid = 1};
        size_t length = sizeof header + number() % 128;
        header.len = (uint32_t)length;
        memcpy(out, &header, sizeof header);
        return length;
    }
    struct read_header header = {READ_MAGIC, CHANNEL_VERSION, (uint16_t)(number() % (READ_PARTS_MAX + 3)), 0, 0, 0};
    for (unsigned i = 0; i < header.count; i++) {
        struct read_part part = {number() % 3 ? number() % FILE_SLOTS : SLOT_POOL, 1, number(), number() % 65536, 0};
        header.length += part.length;
        memcpy(out + BEFORE + sizeof header + i * sizeof part, &part, sizeof part);
    }
    uint64_t offset = number() % 3 * 4096;
    uint32_t asked = header.length + number() % 2 * 4096; /* in full, or up to the end of the file */
    header.file_bytes = offset + header.length;
    memcpy(out, &asked, 4);
    memcpy(out + 4, &offset, 8);
    memcpy(out + BEFORE, &header, sizeof header);
    return BEFORE + sizeof header + header.count * sizeof(struct read_part);
}

int main(int argc, char **argv) {
    long seconds = argc > 1 ? atol(argv[1]) : 5;
    state = argc > 2 ? strtoull(argv[2], NULL, 10) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)state);
    state = state * 2 + 1;
    time_t end = time(NULL) + seconds;
    unsigned long rounds = 0;
    for (; time(NULL) < end; rounds++) {
        /* On the heap and of its exact size, so that a byte too far is seen. */
        uint8_t space[16384];
        memset(space, 0, sizeof space);
        size_t length = well_formed(space);
        for (unsigned changes = number() % 4; changes > 0; changes--)
            space[number() % length] = (uint8_t)number();
        if (number() % 3 == 0)
            length = number() % (length + 1);
        uint8_t *exact = malloc(length ? length : 1);
        memcpy(exact, space, length);
        LLVMFuzzerTestOneInput(exact, length);
        free(exact);
    }
    printf("%lu messages\n", rounds);
    return 0;
}
#endif
