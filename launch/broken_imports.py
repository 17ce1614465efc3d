"""Names a package that cannot be imported: it is missing or broken, or a file hides it.

Python looks for modules in the folder where it is started and on PYTHONPATH first. A `numpy.py` or
`json.py` there takes the place of the package, and the line that fails is one of HolmesJAX. So this
module imports only what Python has built in, or has imported before any such file is seen.
"""

import errno
import os
import sys
from types import ModuleType, TracebackType

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
EXIT_STATUS = 2  # of a mistake, as `HolmesError` has it
# Errors of the system that the next start may not have.
PASSING = (*(errno.ESTALE, errno.EIO, errno.ETIMEDOUT), *(errno.ENOMEM, errno.EMFILE, errno.ENFILE))


class Told:
    """A context manager that ends this process with one paragraph where an import fails in it."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and (paragraph := explain(error)):
            print(f"error: {paragraph}", file=sys.stderr)
            raise SystemExit(EXIT_STATUS) from None


def explain(error: BaseException) -> str | None:
    """Returns what is wrong with the package that an exception comes from, and what to do.

    None for any other exception: it may be a signal, or of a file server that comes back, and
    otherwise its traceback is wanted.
    """
    if not isinstance(error, ImportError | SyntaxError | AttributeError | NameError | TypeError):
        return None
    packages = [package for package in _packages_of(error) if not _is_here(package)]
    hidden = [package for package in packages if len(_places(package)) > 1]
    if not packages or _is_passing(error) or not (hidden or _is_of_imports(error)):
        return None
    name = (hidden or packages)[0]
    problem, fix = "cannot be imported", "correct it, or install it once more"
    if hidden:
        used, other, *_ = _places(name)
        problem = f"cannot be imported from {used}, which hides {other}"
        fix = f"rename {used}, or take its folder off PYTHONPATH, or start in another folder"
    elif isinstance(error, ModuleNotFoundError) and not _places(name):
        problem = "is not installed"
        fix = f"install it for {sys.executable}, which runs HolmesJAX (docs/installing.md)"
    found = f"{type(error).__name__}: {error}"
    return f"the package {name}: {problem}\n  found: {found}\n  fix: {fix}"


def _is_passing(error: BaseException) -> bool:
    """Whether an exception comes from an error of the system, which the next start may not have.

    The dynamic linker tells one as the ImportError of an extension module.
    """
    if isinstance(error, OSError) and error.errno in PASSING:
        return True
    if isinstance(error, ImportError) and any(os.strerror(n) in str(error) for n in PASSING):
        return True
    reason = error.__cause__ or error.__context__
    return reason is not None and _is_passing(reason)


def _is_of_imports(error: BaseException) -> bool:
    """Whether an exception says that a package cannot be imported, even if nothing hides it."""
    if isinstance(error, AttributeError):
        return bool(_importing(error.__traceback__))
    return isinstance(error, ImportError | SyntaxError)


def _packages_of(error: BaseException) -> list[str]:
    """Returns the packages that an exception may come from, and that are not ours alone."""
    names = _importing(error.__traceback__)
    if isinstance(error, ImportError):
        names.append(error.name or "")
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        names.append(error.obj.__name__)
    if isinstance(error, SyntaxError):
        names.append(os.path.splitext(os.path.basename(error.filename or ""))[0])
    return [name.partition(".")[0] for name in names if name]


def _importing(traceback: TracebackType | None) -> list[str]:
    """Returns the modules whose import has not ended where an exception came up."""
    found = []
    while traceback is not None:
        frame = traceback.tb_frame
        name = str(frame.f_globals.get("__name__", ""))
        if frame.f_code.co_name == "<module>" and name != "__main__":
            found.append(name)
        traceback = traceback.tb_next
    return found


def _is_here(package: str) -> bool:
    """Whether a package is one of this checkout, and is imported from it."""
    return _places(package)[:1] == [os.path.join(ROOT, package, "__init__.py")]


def _places(package: str) -> list[str]:
    """Returns the files of a package's name, in the order in which Python finds them."""
    names = (os.path.join(package, "__init__.py"), f"{package}.py")
    paths = (os.path.join(os.path.abspath(folder), name) for folder in sys.path for name in names)
    return list(dict.fromkeys(path for path in paths if os.path.isfile(path)))
