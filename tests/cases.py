"""Tables of cases inside one test, where each case would be one parameter apart from the next."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable


def cases(names: str, values: Iterable) -> Callable:
    """Runs a test for every case of a table; a failure names the case.

    As `pytest.mark.parametrize`, but collected and set up once. Each case has a folder of its own
    in place of `tmp_path`, and what it patches with `monkeypatch` ends with it. It shares all
    other fixtures with the cases before it.

    Args:
      names: arguments of the test that a case gives, separated by commas.
      values: a tuple for each case; of a single argument, its values.
    """
    keys, table = [name.strip() for name in names.split(",")], list(values)
    rows = [dict(zip(keys, row if len(keys) > 1 else (row,), strict=True)) for row in table]

    def of_table(test: Callable) -> Callable:
        @functools.wraps(test)
        def each(**fixtures):
            for number, case in enumerate(rows):
                own = dict(fixtures)
                with contextlib.ExitStack() as stack:
                    if "tmp_path" in own:
                        own["tmp_path"] = own["tmp_path"] / f"case-{number}"
                        own["tmp_path"].mkdir()
                    if "monkeypatch" in own:
                        own["monkeypatch"] = stack.enter_context(own["monkeypatch"].context())
                    try:
                        test(**own, **case)
                    except Exception as error:
                        error.add_note(f"case: {case}")
                        raise

        signature = inspect.signature(test)
        left = [p for name, p in signature.parameters.items() if name not in keys]
        each.__signature__ = signature.replace(parameters=left)
        del each.__wrapped__  # pytest would look there for fixtures
        return each

    return of_table
