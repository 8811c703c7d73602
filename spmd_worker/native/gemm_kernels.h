// Chooses the micro-kernel for an element type, by the instruction sets that this library is compiled for and by whether
// Linux lets the process use AMX.
#pragma once

#include "gemm_driver.h"
#include "gemm_epilogues.h"
#include "gemm_amx_stored.h"
#include "gemm_avx2.h"
#include "gemm_avx512.h"

namespace {

template <class Epilogue>
void multiply(const Gemm<float>& gemm, const Epilogue& epilogue, int64_t num_threads) {
#if defined(SPMD_HAS_AMX)
  if (amx::is_granted()) return run_gemm<AmxFloat32>(gemm, epilogue, num_threads);
#endif
#if defined(SPMD_AVX512)
  run_gemm<Avx512>(gemm, epilogue, num_threads);
#elif defined(SPMD_AVX2)
  run_gemm<Avx2>(gemm, epilogue, num_threads);
#else
  (void)gemm, (void)epilogue, (void)num_threads;  // `spmd_packs_float32` says so
#endif
}

template <class Epilogue>
void multiply(const Gemm<uint16_t>& gemm, const Epilogue& epilogue, int64_t num_threads) {
#if defined(SPMD_HAS_AMX)
  if (amx::is_granted()) return run_gemm<AmxBf16>(gemm, epilogue, num_threads);
#endif
#if defined(SPMD_BF16_DOTS)
  run_gemm<Avx512Bf16>(gemm, epilogue, num_threads);
#elif defined(SPMD_AVX512)
  run_gemm<Avx512Widened>(gemm, epilogue, num_threads);
#elif defined(SPMD_AVX2)
  run_gemm<Avx2Bf16>(gemm, epilogue, num_threads);
#else
  (void)gemm, (void)epilogue, (void)num_threads;  // `spmd_packs_bfloat16` says so
#endif
}

// A weight as files store it (stored.h), in the order of `spmd_stored_are_rows`.
template <class Epilogue>
void multiply_stored(const Gemm<uint16_t>& gemm, const Epilogue& epilogue, int64_t num_threads) {
#if defined(SPMD_HAS_AMX)
  if (amx::is_granted()) return run_gemm<AmxStored>(gemm, epilogue, num_threads);
#endif
  multiply(gemm, epilogue, num_threads);
}

template <class Epilogue>
void multiply(const Gemm<int8_t>& gemm, const Epilogue& epilogue, int64_t num_threads) {
#if defined(SPMD_HAS_AMX_INT8)
  if (amx::is_granted()) return run_gemm<AmxInt8>(gemm, epilogue, num_threads);
#endif
#if defined(SPMD_AVX512) && defined(__AVX512VNNI__)
  run_gemm<Vnni>(gemm, epilogue, num_threads);
#elif defined(SPMD_AVX512) || defined(SPMD_AVX2)
  run_gemm<Avx2Int8>(gemm, epilogue, num_threads);
#else
  run_gemm<Portable>(gemm, epilogue, num_threads);
#endif
}

}  // namespace
