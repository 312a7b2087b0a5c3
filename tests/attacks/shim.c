/* Kills the process at the nth of its system calls of one kind on files below a folder. Loaded with LD_PRELOAD. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static char wanted[32], below[PATH_MAX];
static long nth, seen;

void arm(const char *call, const char *folder, long number) {
    snprintf(wanted, sizeof wanted, "%s", call);
    snprintf(below, sizeof below, "%s", folder);
    nth = number, seen = 0;
}

long calls(void) { return seen; }

static void count(const char *call, const char *path) {
    if (!wanted[0] || strcmp(call, wanted) || strncmp(path, below, strlen(below))) return;
    if (++seen == nth) kill(getpid(), SIGKILL);
}

static void count_file(const char *call, int file) {
    char link[64], path[PATH_MAX];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (length < 0) return;
    path[length] = 0;
    count(call, path);
}

int fsync(int file) {
    count_file("fsync", file);
    return (int)syscall(SYS_fsync, file);
}

int ftruncate(int file, off_t size) {
    count_file("truncate", file);
    return (int)syscall(SYS_ftruncate, file, size);
}

int ftruncate64(int file, off_t size) { return ftruncate(file, size); }

ssize_t write(int file, const void *data, size_t size) {
    count_file("write", file);
    return (ssize_t)syscall(SYS_write, file, data, size);
}

int unlink(const char *path) {
    count("unlink", path);
    return (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}

int mkdir(const char *path, mode_t mode) {
    count("mkdir", path);
    return (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}

int rename(const char *from, const char *to) {
    count("rename", to);
    return (int)syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to);
}
