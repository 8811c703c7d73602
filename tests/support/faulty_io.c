// A library to preload: the n-th call of one kind on a file whose path holds a word fails, or does half of its work.
//
//   gcc -shared -fPIC -O1 -o faulty_io.so faulty_io.c -ldl    (tests/support/preloaded.py)
//   LD_PRELOAD=./faulty_io.so python ...
//
// faulty_io_set(word, call, number, error) arms it (error 0: a write of half the bytes) and zeroes the count of matching
// calls; faulty_io_count() gives how many there have been since. Nothing is armed at the start. One thread at a time
// decides; other calls pass untouched.
#include "preloaded_io.h"

static char armed_word[256], armed_call[32];
static long armed_number, num_seen;
static int armed_error;

void faulty_io_set(const char *word, const char *call, long number, int error) {
  snprintf(armed_word, sizeof armed_word, "%s", word);
  snprintf(armed_call, sizeof armed_call, "%s", call);
  armed_number = number;
  armed_error = error;
  __atomic_store_n(&num_seen, 0, __ATOMIC_SEQ_CST);
}

long faulty_io_count(void) { return __atomic_load_n(&num_seen, __ATOMIC_SEQ_CST); }

static int strikes(const char *call, const char *path) {
  if (!armed_word[0] || strcmp(call, armed_call) != 0 || !path || !strstr(path, armed_word)) return 0;
  return __atomic_add_fetch(&num_seen, 1, __ATOMIC_SEQ_CST) == armed_number;
}

static int strikes_descriptor(const char *call, int descriptor) {
  char path[4096];
  if (!armed_word[0] || strcmp(call, armed_call) != 0) return 0;
  return strikes(call, path_of(descriptor, path, sizeof path));
}

ssize_t write(int descriptor, const void *data, size_t size) {
  REAL(ssize_t, write, int, const void *, size_t);
  if (!strikes_descriptor("write", descriptor)) return real(descriptor, data, size);
  if (armed_error == 0) return real(descriptor, data, size > 1 ? size / 2 : size);
  // Some of it may have come to the disk before the error.
  if (size > 1 && real(descriptor, data, size / 2) < 0) return -1;
  errno = armed_error;
  return -1;
}

#define OF_DESCRIPTOR(name, call, parameters, arguments)         \
  int name parameters {                                          \
    static int (*real) parameters;                               \
    if (!real) real = dlsym(RTLD_NEXT, #name);                   \
    if (!strikes_descriptor(call, descriptor)) return real arguments; \
    errno = armed_error;                                         \
    return -1;                                                   \
  }
OF_DESCRIPTOR(fsync, "fsync", (int descriptor), (descriptor))
OF_DESCRIPTOR(fdatasync, "fsync", (int descriptor), (descriptor))
OF_DESCRIPTOR(ftruncate, "truncate", (int descriptor, off_t size), (descriptor, size))
OF_DESCRIPTOR(ftruncate64, "truncate", (int descriptor, off64_t size), (descriptor, size))
OF_DESCRIPTOR(flock, "lock", (int descriptor, int operation), (descriptor, operation))

int rename(const char *from, const char *to) {
  REAL(int, rename, const char *, const char *);
  if (!strikes("rename", to)) return real(from, to);
  errno = armed_error;
  return -1;
}

int unlink(const char *path) {
  REAL(int, unlink, const char *);
  if (!strikes("unlink", path)) return real(path);
  errno = armed_error;
  return -1;
}

#define OPENING(name)                                            \
  int name(const char *path, int flags, ...) {                   \
    REAL(int, name, const char *, int, ...);                     \
    MODE_AFTER(flags)                                            \
    if (!strikes("open", path)) return real(path, flags, mode);  \
    errno = armed_error;                                         \
    return -1;                                                   \
  }
OPENING(open)
OPENING(open64)
