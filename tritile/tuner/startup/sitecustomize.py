"""Adopt the kernels of a Python whose PYTHONPATH begins with this folder: `tritile run` puts it there.

Every Python that a command starts runs this file first, even one of another version or without tritile. So it
parses on any Python 3, imports nothing, and does nothing until Triton's autotuner is imported, or torch if
its products are to be batch-invariant. `tritile` itself imports it if TRITILE_ADOPT or TRITILE_ADOPT_FILE is
set.
"""

import os  # which every Python has imported by now
import sys

_NAME = "triton.runtime.autotuner"


def _package(without):
    """Return the file of the package, None if it is another than this file's; say then what goes without."""
    from importlib.util import find_spec

    tuner = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    package = find_spec("tritile")
    ours = os.path.join(os.path.dirname(tuner), "__init__.py")
    if package is None or package.origin is None:
        return None  # tritile is not installed
    if os.path.realpath(package.origin) != os.path.realpath(ours):
        sys.stderr.write("tritile: %s: tritile run is of %s, and import tritile finds %s\n"
                         % (without, ours, package.origin))  # fmt: skip
        return None
    return ours


def _make_invariant(module):
    """Make torch's products batch-invariant; `module` is torch, just imported."""
    if _package("torch's products are not batch-invariant") is not None:
        from tritile.invariant.overrides import install_for_process

        install_for_process()


def _adopt(module):
    """Adopt what the environment requests; `module` is Triton's autotuner, just imported."""
    from importlib.util import module_from_spec, spec_from_file_location

    ours = _package("no kernel is adopted")
    if ours is None:
        return
    # By their files: the package imports torch, and no kernel may ever run.
    for name in ("tritile.tuner.measure.server", "tritile.tuner.adoption"):
        if name not in sys.modules:
            path = os.path.join(os.path.dirname(ours), *name.split(".")[1:]) + ".py"
            spec = spec_from_file_location(name, path)
            sys.modules[name] = module_from_spec(spec)
            try:
                spec.loader.exec_module(sys.modules[name])
            except Exception:  # a Python that tritile does not run on
                del sys.modules[name]
                return
    if hasattr(module, "Autotuner"):
        sys.modules[name].install_later(os.environ, module)


class _Loader:
    """Load a module as its own loader does, and then call `done` with it."""

    def __init__(self, loader, done):
        self._loader, self._done = loader, done

    def create_module(self, spec):
        create = getattr(self._loader, "create_module", None)
        return None if create is None else create(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._done(module)


class _Finder:
    """Wait for the import of a module, to call `done` with it."""

    def __init__(self, name, done):
        self._name, self._done = name, done

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)  # some are older than that
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._done)
                return spec
        return None


def _chain():
    """Run the next sitecustomize on the path. One ahead of this has run already, and chained to it."""
    from _frozen_importlib import module_from_spec  # importlib itself takes a millisecond to import
    from _frozen_importlib_external import PathFinder

    folders = [os.path.abspath(path) for path in sys.path]
    here = os.path.dirname(os.path.abspath(__file__))
    behind = sys.path[folders.index(here) + 1 :] if here in folders else []
    spec = PathFinder.find_spec("sitecustomize", [path for path in behind if os.path.abspath(path) != here])
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if not hasattr(sys, "_tritile_adopts"):  # another sitecustomize may chain too, and come back here
    sys._tritile_adopts = True
    _wanted = os.environ.get("TRITILE_ADOPT") or os.environ.get("TRITILE_ADOPT_FILE", "")
    if _wanted.lower() not in ("", "0", "false", "off", "no"):
        for _path in ("TRITILE_ADOPT_FILE", "TRITILE_ADOPT_TABLE"):
            if os.environ.get(_path):  # before the program goes to another folder
                os.environ[_path] = os.path.abspath(os.environ[_path])
        if _NAME in sys.modules:
            _adopt(sys.modules[_NAME])
        else:
            sys.meta_path.insert(0, _Finder(_NAME, _adopt))
    if os.environ.get("TRITILE_BATCH_INVARIANT") == "torch" and "torch" not in sys.modules:
        sys.meta_path.insert(0, _Finder("torch", _make_invariant))
    if __name__ == "sitecustomize":
        _chain()
