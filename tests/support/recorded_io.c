// A library to preload: writes down, in order, everything that changes files below a folder, and every fsync.
//
//   gcc -shared -fPIC -O1 -o recorded_io.so recorded_io.c -ldl -lpthread    (tests/support/preloaded.py)
//   LD_PRELOAD=./recorded_io.so python ...
//
// recorded_io_start(folder, log) begins, recorded_io_stop() ends. A record is a line of ASCII, "KIND INODE OFFSET N M S",
// then N bytes of a path, M of another and S of data. One call is made and written down at a time, so the order of the
// log is the order in which things happened; calls that fail are left out. What else could change a file (mmap, writev,
// sendfile) is not seen: tests/support/power_loss_job.py compares what the log comes to with the files.
#include "preloaded_io.h"
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static char folder[4096];
static size_t folder_size;
static int log_descriptor = -1;

static void append(const void *data, size_t size) {
  while (size) {
    long done = syscall(SYS_write, log_descriptor, data, size);
    if (done <= 0) return;
    data = (const char *)data + done;
    size -= done;
  }
}

static void note(const char *kind, ino_t inode, off_t offset, const char *path, const char *other, const void *data,
                 size_t size) {
  char line[128];
  size_t lengths[] = {path ? strlen(path) : 0, other ? strlen(other) : 0};
  int length = snprintf(line, sizeof line, "%s %lu %ld %zu %zu %zu\n", kind, (unsigned long)inode, (long)offset,
                        lengths[0], lengths[1], size);
  append(line, length);
  append(path, lengths[0]);
  append(other, lengths[1]);
  append(data, size);
}

int recorded_io_start(const char *path, const char *log) {
  snprintf(folder, sizeof folder, "%s", path);
  folder_size = strlen(folder);
  int descriptor = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  __atomic_store_n(&log_descriptor, descriptor, __ATOMIC_SEQ_CST);
  return descriptor < 0 ? -1 : 0;
}

void recorded_io_stop(void) {
  pthread_mutex_lock(&turn);
  if (log_descriptor >= 0) close(log_descriptor);
  __atomic_store_n(&log_descriptor, -1, __ATOMIC_SEQ_CST);
  pthread_mutex_unlock(&turn);
}

static int is_ours(const char *path) {
  return __atomic_load_n(&log_descriptor, __ATOMIC_SEQ_CST) >= 0 && path && !strncmp(path, folder, folder_size);
}

static int is_our_descriptor(int descriptor) {
  if (__atomic_load_n(&log_descriptor, __ATOMIC_SEQ_CST) < 0) return 0;
  char path[4097];
  return is_ours(path_of(descriptor, path, sizeof path));
}

static ino_t inode_at(const char *path) {
  struct stat status;
  return lstat(path, &status) == 0 ? status.st_ino : 0;
}

static ino_t inode_of(int descriptor) {
  struct stat status;
  return fstat(descriptor, &status) == 0 ? status.st_ino : 0;
}

#define BEGIN pthread_mutex_lock(&turn)
#define END                      \
  do {                           \
    int saved = errno;           \
    pthread_mutex_unlock(&turn); \
    errno = saved;               \
    return result;               \
  } while (0)

#define OPENING(name)                                                                \
  int name(const char *path, int flags, ...) {                                       \
    REAL(int, name, const char *, int, ...);                                         \
    MODE_AFTER(flags)                                                                \
    if (!(flags & (O_CREAT | O_TRUNC)) || !is_ours(path)) return real(path, flags, mode); \
    BEGIN;                                                                           \
    ino_t before = inode_at(path);                                                   \
    int result = real(path, flags, mode);                                            \
    if (result >= 0 && !before) note("create", inode_of(result), 0, path, NULL, NULL, 0); \
    if (result >= 0 && before && (flags & O_TRUNC)) note("truncate", before, 0, NULL, NULL, NULL, 0); \
    END;                                                                             \
  }
OPENING(open)
OPENING(open64)

ssize_t write(int descriptor, const void *data, size_t size) {
  REAL(ssize_t, write, int, const void *, size_t);
  if (!is_our_descriptor(descriptor)) return real(descriptor, data, size);
  BEGIN;
  ssize_t result = real(descriptor, data, size);
  if (result > 0) note("write", inode_of(descriptor), lseek(descriptor, 0, SEEK_CUR) - result, NULL, NULL, data, result);
  END;
}

#define WRITING_AT(name)                                                                       \
  ssize_t name(int descriptor, const void *data, size_t size, off_t offset) {                  \
    REAL(ssize_t, name, int, const void *, size_t, off_t);                                     \
    if (!is_our_descriptor(descriptor)) return real(descriptor, data, size, offset);           \
    BEGIN;                                                                                     \
    ssize_t result = real(descriptor, data, size, offset);                                     \
    if (result > 0) note("write", inode_of(descriptor), offset, NULL, NULL, data, result);     \
    END;                                                                                       \
  }
WRITING_AT(pwrite)
WRITING_AT(pwrite64)

#define TRUNCATING(name)                                                                \
  int name(int descriptor, off_t size) {                                                \
    REAL(int, name, int, off_t);                                                        \
    if (!is_our_descriptor(descriptor)) return real(descriptor, size);                  \
    BEGIN;                                                                              \
    int result = real(descriptor, size);                                                \
    if (result == 0) note("truncate", inode_of(descriptor), size, NULL, NULL, NULL, 0); \
    END;                                                                                \
  }
TRUNCATING(ftruncate)
TRUNCATING(ftruncate64)

#define SYNCING(name)                                                             \
  int name(int descriptor) {                                                      \
    REAL(int, name, int);                                                         \
    if (!is_our_descriptor(descriptor)) return real(descriptor);                  \
    BEGIN;                                                                        \
    int result = real(descriptor);                                                \
    if (result == 0) note("sync", inode_of(descriptor), 0, NULL, NULL, NULL, 0);  \
    END;                                                                          \
  }
SYNCING(fsync)
SYNCING(fdatasync)

#define OF_TWO_PATHS(name)                                         \
  int name(const char *path, const char *other) {                  \
    REAL(int, name, const char *, const char *);                   \
    if (!is_ours(other)) return real(path, other);                 \
    BEGIN;                                                         \
    ino_t inode = inode_at(path);                                  \
    int result = real(path, other);                                \
    if (result == 0) note(#name, inode, 0, path, other, NULL, 0);  \
    END;                                                           \
  }
OF_TWO_PATHS(rename)
OF_TWO_PATHS(link)

#define OF_A_PATH(name, parameters, arguments)                     \
  int name parameters {                                            \
    static int(*real) parameters;                                  \
    if (!real) real = dlsym(RTLD_NEXT, #name);                     \
    if (!is_ours(path)) return real arguments;                     \
    BEGIN;                                                         \
    ino_t before = inode_at(path);                                 \
    int result = real arguments;                                   \
    ino_t inode = before ? before : inode_at(path);                \
    if (result == 0) note(#name, inode, 0, path, NULL, NULL, 0);   \
    END;                                                           \
  }
OF_A_PATH(mkdir, (const char *path, mode_t mode), (path, mode))
OF_A_PATH(rmdir, (const char *path), (path))
OF_A_PATH(unlink, (const char *path), (path))
