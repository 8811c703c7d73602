// What the libraries that tests preload share: the real function behind a name, and the arguments of one.
#pragma once
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

// Declares `real`: what the name means without us.
#define REAL(type, name, ...) \
  static type (*real)(__VA_ARGS__); \
  if (!real) real = dlsym(RTLD_NEXT, #name)

// Declares `mode`, which open has as its third argument when it may make a file.
#define MODE_AFTER(flags)               \
  mode_t mode = 0;                      \
  if (flags & (O_CREAT | O_TMPFILE)) {  \
    va_list rest;                       \
    va_start(rest, flags);              \
    mode = va_arg(rest, mode_t);        \
    va_end(rest);                       \
  }

// The path of an open file, or NULL. errno stays.
static const char *path_of(int descriptor, char *buffer, size_t size) {
  char link[64];
  int before = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, buffer, size - 1);
  errno = before;
  if (length < 0) return NULL;
  buffer[length] = 0;
  return buffer;
}
