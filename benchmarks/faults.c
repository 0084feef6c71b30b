/* Counts what a process does to the files of one folder, and at a given step kills it or makes the disk full.

   Loaded with LD_PRELOAD by benchmarks/faults.py; fault_arm() begins the counting. A step is a call that changes the
   disk: open for writing, write, pwrite, fsync, fdatasync, rename, unlink, mkdir, rmdir, truncate.
   After fault_shadow() the database's files are copied aside whenever they are flushed: what a power cut cannot take. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static char folder[PATH_MAX], shadow[PATH_MAX];
static long at, count;
static int full; /* 0: kill at the step, 1: from the step on there is no room */

void fault_arm(const char *where, long step, int mode) {
    strncpy(folder, where, sizeof folder - 1);
    at = step;
    full = mode;
    count = 0;
}

void fault_shadow(const char *where) { strncpy(shadow, where, sizeof shadow - 1); }

long fault_count(void) { return count; }

static int inside(const char *path) { return folder[0] && path && strstr(path, folder) != NULL; }

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return 1;
}

static int inside_fd(int fd) {
    char path[PATH_MAX];
    return folder[0] && path_of(fd, path) && inside(path);
}

static int inside_at(int dir, const char *path) { return path && (path[0] == '/' || dir == AT_FDCWD ? inside(path) : inside_fd(dir)); }

/* 1: the call is refused with "no space left"; does not return where the process is to die. */
static int step(int takes_room) {
    count++;
    if (!at || count < at) return 0;
    if (!full) {
        kill(getpid(), SIGKILL);
        pause();
    }
    if (!takes_room) return 0;
    errno = ENOSPC;
    return 1;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* A write that a kill interrupts: at even steps half of it has reached the file. */
#define TORN(call) if (!full && at && count + 1 == at && at % 2 == 0) { call; }

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    if (inside_fd(fd)) {
        TORN(real(fd, data, size / 2))
        if (step(1)) return -1;
    }
    return real(fd, data, size);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    REAL(pwrite);
    if (inside_fd(fd)) {
        TORN(real(fd, data, size / 2, offset))
        if (step(1)) return -1;
    }
    return real(fd, data, size, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    REAL(pwrite64);
    if (inside_fd(fd)) {
        TORN(real(fd, data, size / 2, offset))
        if (step(1)) return -1;
    }
    return real(fd, data, size, offset);
}

/* Where the flushed bytes of one of the database's files are kept; 0 for other files. */
static int shadow_of(const char *path, char *copy) {
    const char *name = strrchr(path, '/');
    if (!shadow[0] || !name || strncmp(name, "/run.sqlite", 11) || strstr(name, "-shm")) return 0;
    snprintf(copy, PATH_MAX, "%.2000s%.200s", shadow, name);
    return 1;
}

static void keep_flushed(int fd) {
    char path[PATH_MAX], copy[PATH_MAX], draft[PATH_MAX];
    struct stat about;
    if (!path_of(fd, path) || !shadow_of(path, copy) || fstat(fd, &about)) return;
    char *content = malloc(about.st_size + 1);
    ssize_t size = pread(fd, content, about.st_size, 0);
    snprintf(draft, sizeof draft, "%.3000s.draft", copy);
    FILE *file = fopen(draft, "w");
    if (file && size >= 0 && fwrite(content, 1, size, file) == (size_t)size && !fclose(file)) rename(draft, copy);
    free(content);
}

#define ON_FD(name) \
    int name(int fd) { \
        REAL(name); \
        if (!inside_fd(fd)) return real(fd); \
        step(0); \
        int result = real(fd); \
        if (!result) keep_flushed(fd); \
        return result; \
    }
ON_FD(fsync)
ON_FD(fdatasync)

int unlink(const char *path) {
    REAL(unlink);
    char copy[PATH_MAX];
    if (inside(path)) {
        step(0);
        if (shadow_of(path, copy)) real(copy);
    }
    return real(path);
}

int rmdir(const char *path) {
    REAL(rmdir);
    if (inside(path)) step(0);
    return real(path);
}

int unlinkat(int dir, const char *path, int flags) {
    REAL(unlinkat);
    if (inside_at(dir, path)) step(0);
    return real(dir, path, flags);
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    if (inside(path) && step(1)) return -1;
    return real(path, mode);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    if (inside(to)) step(0);
    return real(from, to);
}

int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    if (inside_fd(fd) && step(size > 0)) return -1;
    return real(fd, size);
}

int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64);
    if (inside_fd(fd) && step(size > 0)) return -1;
    return real(fd, size);
}

#define ON_OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        if (flags & O_CREAT && inside(path) && step(access(path, F_OK) != 0)) return -1; \
        return real(path, flags, mode); \
    }
ON_OPEN(open)
ON_OPEN(open64)
