/* One daemon: starting it, the tier files it lends, its pool and its leases. */
#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

#define SOCKET_BYTES (8 << 20)

/* What a daemon that runs as root keeps: reading sources and tiers of any owner, locked memory, descriptors. */
static const int DAEMON_KEEPS[] = {CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER, CAP_LEASE,
                                   CAP_IPC_LOCK, CAP_SYS_RESOURCE, CAP_NET_RAW};

static void set_capabilities(uint64_t keep) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {0};
    if (syscall(SYS_capget, &header, data))
        return;
    for (int i = 0; i < 2; i++) {
        uint32_t part = (uint32_t)(keep >> 32 * i);
        data[i].permitted &= part;
        data[i].effective &= part;
        data[i].inheritable = 0;
    }
    syscall(SYS_capset, &header, data);
}

/* The channel keeps what backing files need, and where the daemon has a user, what ends a process of that user and
 * makes one. No daemon can have more than what is left in the bounding set, which it inherits. */
void drop_capabilities(const struct options *options) {
    uint64_t keep = 0;
    for (size_t i = 0; i < sizeof DAEMON_KEEPS / sizeof *DAEMON_KEEPS && !options->has_user; i++)
        keep |= 1ull << DAEMON_KEEPS[i];
    for (int capability = 0; capability <= CAP_LAST_CAP + 8 && capability < 64; capability++)
        if (!(keep >> capability & 1))
            prctl(PR_CAPBSET_DROP, capability, 0, 0, 0);
    keep = 1ull << CAP_SYS_ADMIN;
    if (options->has_user)
        keep |= 1ull << CAP_KILL | 1ull << CAP_SETUID | 1ull << CAP_SETGID;
    set_capabilities(keep);
}

static void become_daemon(const struct options *options) {
    if (options->has_user && (setgroups(options->group_count, options->groups) || setgid(options->gid) || setuid(options->uid))) {
        say_in_child("cannot become user %u: %s", (unsigned)options->uid, strerror(errno));
        _exit(1);
    }
    if (options->has_user)
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); /* no setuid program gives it what it was denied */
}

/* Start a daemon. NULL: it could not even be started (errno). */
struct epoch *epoch_start(struct channel *c, unsigned number) {
    int fuse[2] = {-1, -1}, control[2] = {-1, -1};
    struct epoch *e = calloc(1, sizeof *e);
    if (!e || !(e->files = calloc(FILE_SLOTS, sizeof *e->files)) ||
        socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fuse) ||
        socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, control))
        goto failed;
    for (unsigned i = 0; i < FILE_SLOTS; i++)
        e->files[i].fd = -1;
    int size = SOCKET_BYTES; /* as far as net.core.wmem_max allows */
    setsockopt(fuse[0], SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    setsockopt(fuse[1], SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    char variable[96];
    snprintf(variable, sizeof variable, "TIERFS_CHANNEL=%d,%d,%u", fuse[1], control[1], number);
    size_t variables = 0;
    while (environ[variables])
        variables++;
    char **environment = calloc(variables + 2, sizeof *environment);
    if (!environment)
        goto failed;
    size_t kept = 0;
    for (size_t i = 0; i < variables; i++)
        if (strncmp(environ[i], "TIERFS_CHANNEL=", 15) != 0)
            environment[kept++] = environ[i];
    environment[kept] = variable;
    pid_t parent = getpid();
    pid_t pid = fork();
    if (pid == 0) { /* only async-signal-safe calls: this process has threads */
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        prctl(PR_SET_PDEATHSIG, SIGTERM); /* a daemon without its channel has nothing to serve */
        fcntl(fuse[1], F_SETFD, 0);
        fcntl(control[1], F_SETFD, 0);
        if (number == 1 && c->options.keep_fd >= 0)
            fcntl(c->options.keep_fd, F_SETFD, 0);
        become_daemon(&c->options);
        prctl(PR_SET_PDEATHSIG, SIGTERM); /* changing the user cleared it */
        if (getppid() != parent)
            _exit(1);
        execvpe(c->options.daemon[0], c->options.daemon, environment);
        int error = errno;
        say_in_child("%s cannot be run as user %u: %s", c->options.daemon[0], (unsigned)geteuid(), strerror(error));
        _exit(127);
    }
    free(environment);
    if (pid < 0)
        goto failed;
    e->pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (e->pidfd < 0) { /* nothing would tell of its death */
        int error = errno;
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        errno = error;
        goto failed;
    }
    close(fuse[1]);
    close(control[1]);
    e->channel = c;
    e->number = number;
    e->users = 1;
    e->pid = pid;
    e->fuse_socket = fuse[0];
    e->control_socket = control[0];
    fcntl(control[0], F_SETFL, O_NONBLOCK);
    count(c, COUNT_DAEMON_STARTS, 1);
    return e;
failed:
    for (int i = 0; i < 2; i++) {
        if (fuse[i] >= 0)
            close(fuse[i]);
        if (control[i] >= 0)
            close(control[i]);
    }
    if (e)
        free(e->files);
    free(e);
    return NULL;
}

/* One user fewer; lock held. The last one frees what the daemon lent. */
void epoch_release(struct epoch *e) {
    if (--e->users)
        return;
    for (unsigned i = 0; i < FILE_SLOTS; i++)
        if (e->files[i].fd >= 0)
            close(e->files[i].fd);
    if (e->pool)
        munmap(e->pool, e->pool_bytes);
    if (e->leases)
        munmap(e->leases, e->lease_count * sizeof *e->leases);
    close(e->fuse_socket);
    close(e->control_socket);
    if (e->pidfd >= 0)
        close(e->pidfd);
    free(e->files);
    free(e);
}

struct tier_file *file_take(struct epoch *e, uint32_t slot, uint32_t generation) {
    if (!e || slot >= FILE_SLOTS)
        return NULL;
    struct tier_file *file = &e->files[slot];
    if (file->fd < 0 || file->dropped || file->generation != generation)
        return NULL;
    file->users++;
    return file;
}

void file_give_back(struct tier_file *file) {
    if (--file->users == 0 && file->dropped) {
        close(file->fd);
        file->fd = -1;
        file->dropped = false;
    }
}

void epoch_lease_done(struct epoch *e, uint32_t lease) {
    if (e->leases && lease < e->lease_count)
        __atomic_store_n(&e->leases[lease], 1u, __ATOMIC_RELEASE);
}
