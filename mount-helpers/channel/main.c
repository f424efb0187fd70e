/* tierfs-channel: owns /dev/fuse and the mount, starts the daemon, and outlives it.
 *
 *   start daemon ─MOUNT─► mount ─► relay ─┬─ the daemon died ─► start again (back-off); after the grace: fail, unmount
 *                                         ├─ SIGHUP ─► STOP, start again
 *                                         └─ SIGTERM, STOPPING, unmounted by somebody ─► fail what waits, unmount, end
 *
 * The main thread waits for signals, deaths, control messages and deadlines, and for nothing else. */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <linux/capability.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "channel.h"

#define END_S 8.5          /* what a daemon gets to end; it gives itself 8 s */
#define BACKOFF_LIMIT_S 5.0
#define INTERRUPT_TICK_MS 50

struct lifetime {
    double start_at_s, backoff_s, grace_ends_s, kill_at_s, looked_s;
    unsigned epochs;
    bool told_to_end;
};

static void usage(const char *problem) {
    say("%s; usage: tierfs-channel --mountpoint DIR [--allow-other] [--read-ahead BYTES] [--max-background N] "
        "[--restart-grace S] [--threads N] [--tier DIR]... [--user UID:GID] [--group GID]... "
        "[--fuse-fd N] [--keep-fd N] -- DAEMON...",
        problem);
    exit(2);
}

static long number_between(const char *text, long least, long most) {
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (errno || *end || end == text || value < least || value > most)
        usage("a number is out of range");
    return value;
}

static void parse_options(struct options *o, int argc, char **argv) {
    static const struct option names[] = {
        {"mountpoint", 1, NULL, 'm'}, {"allow-other", 0, NULL, 'o'}, {"read-ahead", 1, NULL, 'r'},
        {"max-background", 1, NULL, 'b'}, {"restart-grace", 1, NULL, 'g'}, {"threads", 1, NULL, 'n'},
        {"tier", 1, NULL, 't'}, {"user", 1, NULL, 'u'}, {"group", 1, NULL, 'G'},
        {"fuse-fd", 1, NULL, 'f'}, {"keep-fd", 1, NULL, 'k'},
        {NULL, 0, NULL, 0}};
    *o = (struct options){.read_ahead_bytes = 4 << 20, .max_background = 64, .threads = 2, .restart_grace_s = 60,
                          .fuse_fd = -1, .keep_fd = -1};
    for (int option; (option = getopt_long(argc, argv, "+", names, NULL)) != -1;) {
        char *colon;
        switch (option) {
        case 'm': o->mountpoint = optarg; break;
        case 'o': o->allow_other = true; break;
        case 'r': o->read_ahead_bytes = number_between(optarg, 4096, 1 << 30); break;
        case 'b': o->max_background = number_between(optarg, 1, 65535); break;
        case 'g': o->restart_grace_s = (double)number_between(optarg, 0, 86400); break;
        case 'n': o->threads = number_between(optarg, 1, CLONES_MAX); break;
        case 'f': o->fuse_fd = (int)number_between(optarg, 0, 1 << 20); break;
        case 'k': o->keep_fd = (int)number_between(optarg, 0, 1 << 20); break;
        case 't':
            if (o->tier_count == 64)
                usage("too many tiers");
            o->tiers[o->tier_count++] = optarg;
            break;
        case 'G':
            if (o->group_count == GROUPS_MAX)
                usage("too many groups");
            o->groups[o->group_count++] = (gid_t)number_between(optarg, 0, 0xfffffffel);
            break;
        case 'u':
            colon = strchr(optarg, ':');
            if (!colon)
                usage("--user wants UID:GID");
            *colon = 0;
            o->has_user = true;
            o->uid = (uid_t)number_between(optarg, 1, 0xfffffffel);
            o->gid = (gid_t)number_between(colon + 1, 0, 0xfffffffel);
            break;
        default: usage("an option is not known");
        }
    }
    o->daemon = argv + optind;
    if (!o->mountpoint || !*o->daemon)
        usage("a mountpoint and the daemon's command are needed");
}

/* What the kernel wants for a backing file: the capability over the machine, not over a container's user namespace. */
static bool may_pass_through(void) {
    struct stat own;
    if (stat("/proc/self/ns/user", &own) || own.st_ino != 0xEFFFFFFDu) /* PROC_USER_INIT_INO of the kernel */
        return false;
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {0};
    return syscall(SYS_capget, &header, data) == 0 && (data[0].effective >> CAP_SYS_ADMIN & 1);
}

/* The devices of the tiers, or what they will be made on. Later, a directory of another user may be closed to us. */
static void find_devices(struct options *o) {
    for (unsigned i = 0; i < o->tier_count; i++) {
        struct stat status;
        char path[4096];
        snprintf(path, sizeof path, "%s", o->tiers[i]);
        bool found = stat(path, &status) == 0;
        for (char *slash; !found && (slash = strrchr(path, '/')) && slash != path;) {
            *slash = 0;
            found = stat(path, &status) == 0;
        }
        o->tier_devices[i] = found ? status.st_dev : 0;
    }
}

/* A daemon lends up to FILE_SLOTS files, and those of the one before may still be open; 1,024 is a usual default. */
static void raise_descriptor_limit(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit))
        return;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

int main_mount(struct channel *c, char *why, size_t why_size) {
    c->epoch->asked = true;
    if (c->limits_set || c->readers[0])
        return EBUSY;
    int error = kernel_mount(c, why, why_size);
    for (int i = 0; !error && i < c->options.threads; i++) {
        struct incoming_argument *argument = malloc(sizeof *argument);
        if (!argument)
            return ENOMEM;
        *argument = (struct incoming_argument){c, i};
        error = pthread_create(&c->readers[i], NULL, incoming_run, argument);
    }
    return error;
}

/* A new daemon is ready: it gets the first INIT again, and once it has answered that, all that waits. */
int main_take_over(struct channel *c, struct epoch *e, char *why, size_t why_size) {
    (void)why_size;
    (void)why;
    e->asked = true;
    if (c->init_reply.major == 0) { /* the one before died before it answered the INIT: it is still waiting */
        (void)requests_flush(c);
        return 0;
    }
    e->taking_over = true;
    if (send(e->fuse_socket, c->init_request, c->init_length, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
        return errno;
    return 0;
}

static void start(struct channel *c, struct lifetime *life) {
    struct epoch *e = epoch_start(c, life->epochs + 1);
    pthread_mutex_lock(&c->lock);
    while (e && e->drainers < DRAINERS && !pthread_create(&e->drains[e->drainers], NULL, replies_run, e))
        e->drainers++;
    if (e && e->drainers == 0) {
        kill(e->pid, SIGKILL);
        waitpid(e->pid, NULL, 0);
        epoch_release(e);
        e = NULL;
    }
    c->epoch = e;
    c->replacing = false;
    pthread_mutex_unlock(&c->lock);
    life->start_at_s = 0;
    life->kill_at_s = 0;
    if (e) {
        life->epochs++;
    } else {
        say("a daemon cannot be started: %s", strerror(errno));
        life->backoff_s = life->backoff_s < 0.1 ? 0.1 : life->backoff_s * 2;
        life->start_at_s = now_s() + life->backoff_s;
    }
}

/* The daemon is dead. Returns its wait status. */
static int bury(struct channel *c, struct lifetime *life) {
    struct epoch *e = c->epoch;
    int status = 0;
    waitpid(e->pid, &status, 0);
    pthread_mutex_lock(&c->lock);
    control_receive(c, e); /* it may have said why */
    /* One that nobody asked anything while it lived has proved itself by living; the first request may kill the next. */
    bool lived = e->ready && now_s() - e->ready_s > BACKOFF_LIMIT_S;
    e->draining = true;
    e->ready = false;
    pthread_mutex_unlock(&c->lock);
    control_close_dropped(c);
    shutdown(e->fuse_socket, SHUT_RDWR); /* nothing more comes; what is there is taken off before its end is seen */
    for (unsigned i = 0; i < e->drainers; i++)
        pthread_join(e->drains[i], NULL);
    pthread_mutex_lock(&c->lock);
    /* Nothing a request does ends a daemon by SIGKILL: somebody, or the kernel for want of memory, did. */
    bool by_itself = !c->replacing && !c->stopping && !(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    requests_requeue(c, by_itself);
    inodes_forget_offers(c);
    bool answered = e->first_reply;
    c->epoch = NULL;
    epoch_release(e);
    pthread_mutex_unlock(&c->lock);
    double now = now_s();
    if (answered || lived || c->replacing)
        life->backoff_s = 0;
    else
        life->backoff_s = life->backoff_s < 0.1 ? 0.1 : life->backoff_s * 2;
    if (life->backoff_s > BACKOFF_LIMIT_S)
        life->backoff_s = BACKOFF_LIMIT_S;
    life->start_at_s = now + life->backoff_s;
    if (life->grace_ends_s == 0)
        life->grace_ends_s = now + c->options.restart_grace_s;
    life->kill_at_s = 0;
    return status;
}

static void begin_end(struct channel *c, struct lifetime *life, int error) {
    pthread_mutex_lock(&c->lock);
    c->stopping = true;
    requests_fail_all(c, error);
    pthread_mutex_unlock(&c->lock);
    kernel_unmount(c);
    life->kill_at_s = now_s() + END_S;
}

static void take_signals(struct channel *c, struct lifetime *life, int signals) {
    struct signalfd_siginfo info;
    while (read(signals, &info, sizeof info) == sizeof info) {
        if (info.ssi_signo == SIGHUP) {
            pthread_mutex_lock(&c->lock);
            if (!c->stopping && c->epoch && life->epochs > 0 && c->mounted) {
                c->replacing = true;
                control_stop(c->epoch);
                life->kill_at_s = now_s() + END_S;
            } else if (!c->stopping && !c->epoch) {
                life->start_at_s = 0; /* somebody has put right what ended the last one */
                life->backoff_s = 0;
            }
            pthread_mutex_unlock(&c->lock);
        } else if (info.ssi_signo != SIGCHLD && !life->told_to_end) {
            say("told to end by signal %u", info.ssi_signo);
            life->told_to_end = true;
            begin_end(c, life, -ENOTCONN);
            if (c->epoch)
                kill(c->epoch->pid, SIGTERM);
        }
    }
}

/* Until the mount is over; the exit status. */
static int supervise(struct channel *c, struct lifetime *life, int signals) {
    bool ending = false;
    for (;;) {
        pthread_mutex_lock(&c->lock);
        struct epoch *e = c->epoch;
        bool room_wanted = requests_flush(c), untold = requests_tell_failures(c);
        interrupts_look(c);
        if (now_s() - life->looked_s > 1) {
            life->looked_s = now_s();
            requests_give_up_copies(c, COPY_LOOKS);
        }
        bool tick = c->interrupted_count > 0, stopping = c->stopping, gone = c->gone, replacing = c->replacing;
        if (e && e->ready)
            life->grace_ends_s = 0;
        bool set_limits = e && e->ready && !c->limits_set;
        c->limits_set |= set_limits;
        pthread_mutex_unlock(&c->lock);
        if (set_limits)
            kernel_set_read_ahead(c);
        if ((stopping || gone) && !ending) {
            ending = true;
            if (!life->told_to_end) {
                begin_end(c, life, -ENOTCONN);
                if (gone && e)
                    kill(e->pid, SIGTERM);
            }
        }
        double now = now_s();
        if (e && replacing && life->kill_at_s == 0)
            life->kill_at_s = now + END_S; /* it has said so itself: readers wait, and it may not come to its end */
        if (ending && !e)
            return 0;
        if (e && life->kill_at_s > 0 && now >= life->kill_at_s) {
            say("the daemon %d does not end: killed", (int)e->pid);
            kill(e->pid, SIGKILL);
            life->kill_at_s = now + END_S;
        }
        if (!ending && life->grace_ends_s > 0 && now >= life->grace_ends_s) {
            say("no daemon within %g s: the mount ends", c->options.restart_grace_s);
            begin_end(c, life, -EIO);
            if (e) {
                kill(e->pid, SIGKILL);
                bury(c, life);
            }
            return 1;
        }
        if (!ending && !e && now >= life->start_at_s) {
            start(c, life);
            if (!c->epoch && life->epochs == 0)
                return 1; /* nothing is mounted, and who asked for it waits */
            continue;
        }
        double next = now + 1;
        if (e && life->kill_at_s > 0 && life->kill_at_s < next)
            next = life->kill_at_s;
        if (!ending && life->grace_ends_s > 0 && life->grace_ends_s < next)
            next = life->grace_ends_s;
        if (!ending && !e && life->start_at_s < next)
            next = life->start_at_s;
        int timeout = tick ? INTERRUPT_TICK_MS : (int)((next - now) * 1000) + 1;
        struct pollfd polled[5] = {
            {signals, POLLIN, 0}, {c->wake_fd, POLLIN, 0}, {e ? e->pidfd : -1, POLLIN, 0},
            {e ? e->control_socket : -1, (short)(POLLIN | (untold ? POLLOUT : 0)), 0}, {e && room_wanted ? e->fuse_socket : -1, POLLOUT, 0}};
        if (poll(polled, 5, timeout) < 0 && errno != EINTR)
            say("poll: %s", strerror(errno));
        uint64_t wakes;
        if (polled[1].revents && read(c->wake_fd, &wakes, sizeof wakes) < 0)
            say("eventfd: %s", strerror(errno));
        if (polled[0].revents)
            take_signals(c, life, signals);
        if (polled[3].revents & POLLIN) {
            pthread_mutex_lock(&c->lock);
            control_receive(c, e);
            pthread_mutex_unlock(&c->lock);
            control_close_dropped(c);
        } else if (polled[3].revents & ~POLLOUT) {
            poll(NULL, 0, 10); /* it has closed its end: it is about to die */
        }
        if (polled[2].revents) {
            bool was_mounted = c->mounted;
            int status = bury(c, life);
            if (!was_mounted && !ending && !c->stopping) /* it never got as far as mounting: its own words say why */
                return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
            if (!ending && !c->stopping && !c->replacing)
                say("the daemon died (status 0x%x): starting another in %.1f s", (unsigned)status, life->backoff_s);
        }
    }
}

int main(int argc, char **argv) {
    static struct channel channel;
    struct channel *c = &channel;
    char why[256] = "";
    parse_options(&c->options, argc, argv);
    pthread_mutex_init(&c->lock, NULL);
    raise_descriptor_limit();
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGTERM);
    sigaddset(&mask, SIGINT);
    sigaddset(&mask, SIGHUP);
    sigaddset(&mask, SIGCHLD);
    sigprocmask(SIG_BLOCK, &mask, NULL); /* before any thread is there */
    int signals = signalfd(-1, &mask, SFD_NONBLOCK | SFD_CLOEXEC);
    c->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    c->counters_fd = memfd_create("tierfs-counters", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    size_t bytes = COUNTERS * sizeof(uint64_t);
    if (signals < 0 || c->wake_fd < 0 || c->counters_fd < 0 || ftruncate(c->counters_fd, (off_t)bytes))
        why[0] = '?';
    void *counters = why[0] ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, c->counters_fd, 0);
    if (counters == MAP_FAILED) {
        say("cannot start: %s", strerror(errno));
        return 1;
    }
    c->counters = counters;
    fcntl(c->counters_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE);
    if (c->options.keep_fd >= 0)
        fcntl(c->options.keep_fd, F_SETFD, FD_CLOEXEC);
    if (kernel_open(c, why, sizeof why)) {
        say("%s", why);
        return 1;
    }
    c->passthrough_wanted = may_pass_through();
    find_devices(&c->options);
    drop_capabilities(&c->options);
    if (copiers_start(c)) {
        say("cannot start threads");
        return 1;
    }
    struct lifetime life = {0};
    start(c, &life);
    if (c->options.keep_fd >= 0)
        close(c->options.keep_fd); /* the daemon alone has it now: its death is seen by who waits */
    return supervise(c, &life, signals);
}
