// Float32 numbers as the decimals of lines of JSON, and back. The standard library's own conversions: the shortest digits
// that tell a number from its neighbours, and of those the nearest. Where it has none (before GCC 11) the callers do it.

#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <system_error>

#if defined(__cpp_lib_to_chars)

namespace {

constexpr int kMostDigits = 9;   // tell any float32 from its neighbours
constexpr int kMostFixed = 16;   // Python writes numbers from 1e-4 to 1e16 without an exponent

char* put(char* to, const char* from, int64_t size) {
  std::memcpy(to, from, size_t(size));
  return to + size;
}

char* put_zeros(char* to, int64_t size) {
  std::memset(to, '0', size_t(size));
  return to + size;
}

// As Python's repr() of the same decimal: "0.0012", "12.0", "1.2e-05", "1e+16". At most 24 characters.
char* spell(float number, char* to) {
  char text[32];
  char* const end = std::to_chars(text, text + sizeof text - 1, number, std::chars_format::scientific).ptr;
  *end = 0;
  const char* from = text;
  if (*from == '-') *to++ = *from++;
  char digits[kMostDigits + 1];
  int num_digits = 0;
  for (; from < end && *from != 'e'; ++from) {
    if (*from != '.') digits[num_digits++] = *from;
  }
  const int exponent = std::atoi(from + 1);
  if (exponent < -4 || exponent >= kMostFixed) {
    *to++ = digits[0];
    if (num_digits > 1) {
      *to++ = '.';
      to = put(to, digits + 1, num_digits - 1);
    }
    *to++ = 'e';
    *to++ = exponent < 0 ? '-' : '+';
    const int size = std::abs(exponent);
    *to++ = char('0' + size / 10);
    *to++ = char('0' + size % 10);
    return to;
  }
  if (exponent < 0) {
    to = put(to, "0.", 2);
    to = put_zeros(to, -1 - exponent);
    return put(to, digits, num_digits);
  }
  const int num_whole = exponent + 1;
  if (num_digits <= num_whole) {
    to = put(to, digits, num_digits);
    to = put_zeros(to, num_whole - num_digits);
    return put(to, ".0", 2);
  }
  to = put(to, digits, num_whole);
  *to++ = '.';
  return put(to, digits + num_whole, num_digits - num_whole);
}

}  // namespace

// Into `to`, of 26 characters a number, with ", " between them. How many characters these are; -1 where one is not finite.
extern "C" int64_t spmd_spell_decimals(const float* numbers, int64_t num_numbers, char* to) {
  char* const start = to;
  for (int64_t index = 0; index < num_numbers; ++index) {
    if (!std::isfinite(numbers[index])) return -1;
    if (index) to = put(to, ", ", 2);
    to = spell(numbers[index], to);
  }
  return to - start;
}

// The nearest float32 of each of the decimals between commas and spaces. How many there are; -1 where one is none, or there
// are more than `most`.
extern "C" int64_t spmd_read_decimals(const char* text, int64_t size, float* to, int64_t most) {
  const char* const end = text + size;
  int64_t num_numbers = 0;
  while (true) {
    while (text < end && *text == ' ') ++text;
    if (num_numbers == most) return -1;
    const auto read = std::from_chars(text, end, to[num_numbers]);
    if (read.ec != std::errc()) return -1;
    ++num_numbers;
    text = read.ptr;
    while (text < end && *text == ' ') ++text;
    if (text == end) return num_numbers;
    if (*text++ != ',') return -1;
  }
}

#endif
