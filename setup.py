"""The part of the installation that pyproject.toml cannot say: C++ kernels, where there is a compiler for them.

Without one, or on another processor than x86-64, everything is installed but these, and torch computes instead.
"""

import platform

from setuptools import Extension, setup

# One library for each instruction set; worker/kernels/library.py takes the best that the processor has.
INSTRUCTION_SETS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl"],
}

extensions = [
    Extension(
        f"moeray.worker.kernels.gemm_{name}",
        sources=["worker/kernels/gemm.cpp"],
        # Where compilers differ in what they contract, bits do. And what g++ 12's own header leaves undefined on
        # purpose, it warns of.
        extra_compile_args=[
            "-O3",
            "-g0",
            "-ffp-contract=off",
            "-std=c++17",
            "-Wno-uninitialized",
            "-Wno-maybe-uninitialized",
            *flags,
        ],
        optional=True,
    )
    for name, flags in INSTRUCTION_SETS.items()
    if platform.machine() in ("x86_64", "AMD64")
]

setup(ext_modules=extensions)
