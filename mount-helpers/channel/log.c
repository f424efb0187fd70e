#include "channel.h"

#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

/* One line to standard error, which the launcher points at the daemon's log. */
void say(const char *format, ...) {
    char line[512];
    int start = snprintf(line, sizeof line, "tierfs-channel: ");
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line + start, sizeof line - (size_t)start - 1, format, arguments);
    va_end(arguments);
    if (length < 0)
        return;
    size_t total = (size_t)(start + length);
    if (total > sizeof line - 2)
        total = sizeof line - 2;
    line[total++] = '\n';
    if (write(STDERR_FILENO, line, total) < 0)
        return; /* nobody listens */
}

double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

void count(struct channel *c, unsigned counter, uint64_t change) {
    __atomic_fetch_add((uint64_t *)&c->counters[counter], change, __ATOMIC_RELAXED);
}

void set_counter(struct channel *c, unsigned counter, uint64_t value) {
    __atomic_store_n((uint64_t *)&c->counters[counter], value, __ATOMIC_RELAXED);
}

void wake_main(struct channel *c) {
    uint64_t one = 1;
    if (write(c->wake_fd, &one, sizeof one) < 0)
        return; /* it is awake already */
}
