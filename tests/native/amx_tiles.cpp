// The emulated tile instructions of native/amx.h one by one, for tests that hold them against Intel's manual.

#include "amx.h"

#if defined(SPMD_HAS_AMX_INT8)

namespace {

// Tile 0 is [rows][columns], tile 4 [rows][steps], tile 6 [steps][columns], each element of 4 bytes.
template <class Multiply>
void multiply(int rows, int steps, int columns, const void* left, const void* right, void* sums, Multiply instruction) {
  amx::Shapes shapes;
  shapes.set(0, rows, columns), shapes.set(4, rows, steps), shapes.set(6, steps, columns);
  amx::use(shapes);
  amx::load<0>(sums, 64), amx::load<4>(left, 64), amx::load<6>(right, 64);
  instruction();
  amx::store<0>(sums, 64);
  amx::release();
}

}  // namespace

extern "C" int64_t has_tiles() { return 1; }

extern "C" void tdpbf16ps(int64_t rows, int64_t steps, int64_t columns, const void* left, const void* right, void* sums) {
  multiply(int(rows), int(steps), int(columns), left, right, sums, [] { amx::multiply<0, 4, 6>(); });
}

extern "C" void tdpbssd(int64_t rows, int64_t steps, int64_t columns, const void* left, const void* right, void* sums) {
  multiply(int(rows), int(steps), int(columns), left, right, sums, [] { amx::multiply_bytes<0, 4, 6>(); });
}

#else

extern "C" int64_t has_tiles() { return 0; }

#endif
