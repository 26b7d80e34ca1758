"""The one part of Moorage that is compiled, if the machine has a C compiler: see src/moorage/node/runtime/launch.py.

Everything else that a build needs to know is in pyproject.toml.
"""

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_ALONE = ["-ffreestanding", "-fno-stack-protector", "-fno-pie"]  # no C library, hence nothing that would need one


class BuildProgram(build_ext):
    """Builds a program where others build a module to import."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/")

    def build_extension(self, ext: Extension) -> None:
        objects = self.compiler.compile(ext.sources, output_dir=self.build_temp, extra_postargs=ext.extra_compile_args)
        path = self.get_ext_fullpath(ext.name)
        self.mkpath(path.rpartition("/")[0])
        self.compiler.link_executable(objects, path, extra_postargs=ext.extra_link_args)


setup(
    cmdclass={"build_ext": BuildProgram},
    ext_modules=[
        Extension(
            "moorage.node.runtime.launcher",
            ["src/moorage/node/runtime/launch.c"],
            extra_compile_args=["-O2", *_ALONE],
            extra_link_args=["-nostdlib", "-static", "-no-pie", "-s"],
            optional=True,
        )
    ],
)
