"""Compiles the kernels of each instruction set that the gate runs, one after the other, where they are not on disk yet.

    PYTHONPATH=. python tests/support/compile_libraries.py

Each takes a core for most of a minute, and collecting the tests waits for the first two. Needs nothing but Python:
scripts/test.sh compiles while pip, which takes one core, installs the rest.
"""

from native_builds import INSTRUCTION_SETS, is_of_stress_tier, library_for


def main() -> None:
    for instruction_set in INSTRUCTION_SETS:
        if not is_of_stress_tier(instruction_set):
            library_for(instruction_set)


if __name__ == "__main__":
    main()
