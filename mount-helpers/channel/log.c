/* What every part needs: lines to standard error, a clock, the counters the daemon shows, and waking the main thread. */
#include "channel.h"

#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define LINES_MAX 20 /* in a window; a daemon that sends nonsense must not fill the disk */
#define WINDOW_S 10.0

/* Whether a line may be written now; *held: how many could not be since the last that was. */
static bool may_say(unsigned *held) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static double since_s;
    static unsigned lines, held_back;
    pthread_mutex_lock(&lock);
    if (now_s() - since_s >= WINDOW_S) {
        since_s = now_s();
        lines = 0;
    }
    bool may = lines < LINES_MAX;
    *held = may ? held_back : 0;
    held_back = may ? 0 : held_back + 1;
    lines += may;
    pthread_mutex_unlock(&lock);
    return may;
}

static void write_line(unsigned held, const char *format, va_list arguments) {
    char line[512];
    int start = held ? snprintf(line, sizeof line, "tierfs-channel: (%u lines held back) ", held)
                     : snprintf(line, sizeof line, "tierfs-channel: ");
    int length = vsnprintf(line + start, sizeof line - (size_t)start - 1, format, arguments);
    if (length < 0)
        return;
    size_t total = (size_t)(start + length);
    if (total > sizeof line - 2)
        total = sizeof line - 2;
    line[total++] = '\n';
    if (write(STDERR_FILENO, line, total) < 0)
        return; /* nobody listens */
}

/* One line to standard error, which the launcher points at a file beside the daemon's log. */
void say(const char *format, ...) {
    unsigned held;
    if (!may_say(&held))
        return;
    va_list arguments;
    va_start(arguments, format);
    write_line(held, format, arguments);
    va_end(arguments);
}

/* The same between fork and exec, where another thread may have held the lock of may_say for ever. */
void say_in_child(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    write_line(0, format, arguments);
    va_end(arguments);
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
