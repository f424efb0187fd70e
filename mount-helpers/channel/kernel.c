/* /dev/fuse and the mount. */
#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static int open_device(void) { return open("/dev/fuse", O_RDWR | O_CLOEXEC); }

int kernel_open(struct channel *c, char *why, size_t why_size) {
    c->clones[0] = c->options.fuse_fd >= 0 ? c->options.fuse_fd : open_device();
    if (c->clones[0] < 0) {
        int error = errno;
        snprintf(why, why_size, "/dev/fuse cannot be opened: %s", strerror(error));
        return error;
    }
    if (c->options.fuse_fd >= 0) {
        int flags = fcntl(c->clones[0], F_GETFL);
        if (flags < 0 || fcntl(c->clones[0], F_SETFD, FD_CLOEXEC) ||
            fcntl(c->clones[0], F_SETFL, flags & ~O_NONBLOCK)) { /* a thread waits in read() */
            int error = errno;
            snprintf(why, why_size, "the descriptor %d cannot be used: %s", c->clones[0], strerror(error));
            return error;
        }
    }
    return 0;
}

/* What the helper says, up to its end; its last line is left in `text`. */
static void last_line(int fd, char *text, size_t size) {
    size_t length = 0;
    ssize_t more;
    while ((more = read(fd, text + length, size - 1 - length)) > 0)
        length += (size_t)more;
    while (length > 0 && text[length - 1] == '\n')
        length--;
    text[length] = 0;
    char *start = strrchr(text, '\n');
    if (start)
        memmove(text, start + 1, strlen(start + 1) + 1);
}

/* mount(2) refused: fusermount3 does it for an unprivileged user, and sends its own descriptor of /dev/fuse. */
static int mount_by_helper(struct channel *c, char *why, size_t why_size) {
    int pair[2], words[2];
    char said[160] = "";
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
        return errno;
    if (pipe2(words, O_CLOEXEC)) {
        int error = errno;
        close(pair[0]);
        close(pair[1]);
        return error;
    }
    char options[256];
    snprintf(options, sizeof options, "ro,nosuid,nodev,noatime,default_permissions,fsname=tierfs,subtype=tierfs%s",
             c->options.allow_other ? ",allow_other" : "");
    char variable[64];
    snprintf(variable, sizeof variable, "%d", pair[0]);
    pid_t pid = fork();
    if (pid == 0) {
        fcntl(pair[0], F_SETFD, 0);
        dup2(words[1], STDERR_FILENO);
        setenv("_FUSE_COMMFD", variable, 1);
        execlp("fusermount3", "fusermount3", "-o", options, "--", c->options.mountpoint, (char *)NULL);
        _exit(127);
    }
    close(pair[0]);
    close(words[1]);
    char byte;
    struct iovec vector = {&byte, 1};
    char space[CMSG_SPACE(sizeof(int))];
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    ssize_t received = pid > 0 ? recvmsg(pair[1], &message, MSG_CMSG_CLOEXEC) : -1;
    close(pair[1]);
    int status = 127 << 8;
    if (pid > 0) {
        last_line(words[0], said, sizeof said);
        waitpid(pid, &status, 0);
    }
    close(words[0]);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127)
        snprintf(said, sizeof said, "it cannot be run");
    struct cmsghdr *control = received > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (!control || control->cmsg_type != SCM_RIGHTS || control->cmsg_len != CMSG_LEN(sizeof(int))) {
        snprintf(why, why_size, "mount(2) is not permitted, and fusermount3 could not mount on %.80s: %s%s",
                 c->options.mountpoint, said,
                 strstr(said, "allow_other") ? "; else set mount.allow_other = false" : "");
        return EPERM;
    }
    close(c->clones[0]);
    memcpy(&c->clones[0], CMSG_DATA(control), sizeof(int));
    return 0;
}

int kernel_mount(struct channel *c, char *why, size_t why_size) {
    if (c->options.fuse_fd < 0) {
        char options[256];
        snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=%u,group_id=%u,default_permissions%s",
                 c->clones[0], (unsigned)geteuid(), (unsigned)getegid(), c->options.allow_other ? ",allow_other" : "");
        if (mount("tierfs", c->options.mountpoint, "fuse.tierfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOATIME,
                  options)) {
            int error = errno;
            if (error != EPERM || (error = mount_by_helper(c, why, why_size))) {
                if (error != EPERM)
                    snprintf(why, why_size, "cannot mount on %s: %s", c->options.mountpoint, strerror(error));
                return error;
            }
        }
    }
    c->mounted = true;
    for (int i = 1; i < c->options.threads; i++) {
        uint32_t first = (uint32_t)c->clones[0];
        c->clones[i] = open_device();
        if (c->clones[i] < 0 || ioctl(c->clones[i], DEV_CLONE, &first)) {
            int error = errno;
            if (c->clones[i] >= 0)
                close(c->clones[i]);
            c->clones[i] = -1;
            if (c->options.fuse_fd >= 0) { /* a container has no /dev/fuse: the one descriptor is every thread's */
                c->clones[i] = c->clones[0];
                continue;
            }
            snprintf(why, why_size, "/dev/fuse cannot be cloned: %s", strerror(error));
            return error;
        }
    }
    return 0;
}

/* The device number of the mount. Where somebody else mounted, its place may be another thing here, or nothing: only
 * the descriptor knows (since Linux 6.16). */
static bool mount_device(struct channel *c, unsigned *major, unsigned *minor) {
    if (c->options.fuse_fd < 0) {
        struct statx status;
        if (statx(AT_FDCWD, c->options.mountpoint, AT_STATX_DONT_SYNC | AT_NO_AUTOMOUNT, 0, &status))
            return false;
        *major = status.stx_dev_major;
        *minor = status.stx_dev_minor;
        return true;
    }
    char text[512] = "", path[64];
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", c->clones[0]);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    const char *line = length > 0 ? strstr(text, "fuse_connection:") : NULL;
    *major = 0; /* of every file system without a disk */
    return line && sscanf(line, "fuse_connection: %u", minor) == 1;
}

/* Somebody aborted the connection (fusectl): the mount is still there, unless it is gone or covered too. */
static bool is_left_behind(struct channel *c) {
    unsigned major, minor;
    return c->aborted && (c->mount_major || c->mount_minor) && mount_device(c, &major, &minor) &&
           major == c->mount_major && minor == c->mount_minor;
}

void kernel_unmount(struct channel *c) {
    if (!c->mounted || c->options.fuse_fd >= 0 || (c->gone && !is_left_behind(c)))
        return;
    c->mounted = false;
    if (umount2(c->options.mountpoint, MNT_DETACH | UMOUNT_NOFOLLOW) == 0 || errno != EPERM)
        return;
    pid_t pid = fork();
    if (pid == 0) {
        execlp("fusermount3", "fusermount3", "-u", "-z", "--", c->options.mountpoint, (char *)NULL);
        _exit(127);
    }
    if (pid > 0)
        waitpid(pid, NULL, 0);
}

/* A reply goes through the clone its request came from. Returns 0 or an errno; ENOENT: nobody waits any more. */
int kernel_reply(struct channel *c, int clone, uint64_t unique, int error, const void *body, size_t length) {
    struct fuse_out_header header = {(uint32_t)(sizeof header + length), error, unique};
    struct iovec vector[2] = {{&header, sizeof header}, {(void *)(uintptr_t)body, length}};
    return writev(c->clones[clone], vector, length ? 2 : 1) < 0 ? errno : 0;
}

/* A backing id for an open file, or a negative errno. */
int kernel_backing_open(struct channel *c, int fd) {
    struct fuse_backing_map map = {fd, 0, 0};
    int id = ioctl(c->clones[0], DEV_BACKING_OPEN, &map);
    return id > 0 ? id : -(errno ? errno : EIO);
}

void kernel_backing_close(struct channel *c, int id) {
    uint32_t number = (uint32_t)id;
    if (ioctl(c->clones[0], DEV_BACKING_CLOSE, &number))
        say("backing id %d not closed: %s", id, strerror(errno));
}

#define MAX_PAGES 256 /* 1 MiB; requests of 4 MiB were measured at 0.93 of its speed (docs/PERFORMANCE.md) */

unsigned kernel_max_pages(void) {
    unsigned pages = 256; /* of kernels without the limit, and its default */
    FILE *file = fopen("/proc/sys/fs/fuse/max_pages_limit", "re");
    if (file) {
        if (fscanf(file, "%u", &pages) != 1)
            pages = 256;
        fclose(file);
    }
    return pages > MAX_PAGES ? MAX_PAGES : pages;
}

/* Larger than the kernel's default only through sysfs; the INIT reply can but lower it. */
void kernel_set_read_ahead(struct channel *c) {
    unsigned major, minor;
    if (!mount_device(c, &major, &minor))
        return;
    c->mount_major = major;
    c->mount_minor = minor;
    char path[128];
    snprintf(path, sizeof path, "/sys/class/bdi/%u:%u/read_ahead_kb", major, minor);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0) {
        char text[32];
        int length = snprintf(text, sizeof text, "%ld", c->options.read_ahead_bytes / 1024);
        if (write(fd, text, (size_t)length) != length)
            say("%s not set to %s: %s", path, text, strerror(errno));
        close(fd);
    }
    unsigned long kib = 0;
    FILE *file = fopen(path, "re");
    if (file) {
        if (fscanf(file, "%lu", &kib) != 1)
            kib = 0;
        fclose(file);
    }
    set_counter(c, COUNT_READ_AHEAD, (uint64_t)kib * 1024);
}
