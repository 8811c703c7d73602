"""Kernels for lesser instruction sets, compiled as users compile them: the gate compiles those more quickly."""

import sys

import pytest
import ranks

FILES = ("ops/kernels/test_gemm_bits.py", "ops/kernels/test_cpu_rows.py", "ops/attention/test_cpu_attention.py")


@pytest.mark.stress
@pytest.mark.parametrize("name", FILES)
def test_kernels_with_flags_of_users_have_their_bits(name: str):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ranks.REPOSITORY / "tests" / name)]
    ranks.run_command([*command, "-m", "not stress and not gpu"], 1000.0, {"TESTS_FLAGS_OF_USERS": "1"}).checked()
