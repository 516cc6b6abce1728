"""Compile the emulated device once per version of torch and of the source."""

from pathlib import Path

from torch.utils.cpp_extension import load

from fakecuda import BUILD

if __name__ == "__main__" and not (BUILD / "fakecuda_ext.so").exists():
    BUILD.mkdir(parents=True, exist_ok=True)
    load(
        "fakecuda_ext",
        [str(Path(__file__).parent / "fakecuda.cpp")],
        build_directory=str(BUILD),
        extra_cflags=["-O1", "-std=c++20", "-Wno-unused-parameter"],
    )
