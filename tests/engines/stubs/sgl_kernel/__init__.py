"""Stands in for SGLang's kernels, of which PyPI has no build for the CPU.

Every name exists, and every call raises. SGLang has paths in plain torch for what an API test needs;
where it has none, the test fails here instead of computing something else.
"""

import importlib.machinery
import sys
import types

# SGLang asks for at least this one.
__version__ = "0.4.10"


def _missing(name):
    def kernel(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: PyPI has no build for the CPU")

    kernel.__name__ = name
    return kernel


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)


class _Submodule(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{self.__name__.removeprefix('sgl_kernel.')}.{name}")


class _Finder:
    """Makes submodules up. It is asked last, so `scalar_type.py` beside this file is found first."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Submodule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
