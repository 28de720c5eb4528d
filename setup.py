"""Builds the extension mindspeed_kernels._C with CMake and Ninja; everything else is in pyproject.toml."""

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILD_INFO = "_build.json"  # written next to the extension; read by mindspeed_kernels/_loader.py


class CMakeBuild(build_ext):
    """Runs CMake where setuptools would run the compiler."""

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = Path(self.build_temp).resolve()
        (output / "_ascendc.so").unlink(missing_ok=True)  # of a former build, for a former torch
        configure = [
            *("cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja"),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DMINDSPEED_OUTPUT_DIRECTORY={output}",
        ]
        # A build directory that an isolated build left behind points to an environment that is gone.
        subprocess.run([*configure, "--fresh"], check=True)
        subprocess.run(["cmake", "--build", str(build)], check=True)

    def run(self) -> None:
        super().run()
        # `python -m mindspeed_llm.run` in a clone imports the clone's packages, so they need the extension as well.
        if not self.inplace:
            self.copy_extensions_to_source()

    def copy_extensions_to_source(self) -> None:
        """Put the extension, and what it was built with, next to the sources."""
        package = self.get_finalized_command("build_py").get_package_dir("mindspeed_kernels")
        for old in (*Path(package).glob("_C.*"), *Path(package).glob("_ascendc.so")):
            old.unlink()  # writing over it would crash the processes that have loaded it
        super().copy_extensions_to_source()
        built = Path(self.build_lib, "mindspeed_kernels")
        shutil.copy2(built / BUILD_INFO, package)
        for kernels in built.glob("_ascendc.so"):  # where CANN is
            shutil.copy2(kernels, package)


setup(ext_modules=[Extension("mindspeed_kernels._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
