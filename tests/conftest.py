"""Which tests may run beside each other: files do, but labs come one after another."""

import pytest

LABS = ("tests/lab/", "tests/runtime/test_links.py", "tests/test_cli.py", "tests/test_compare.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests stay in one process, as they share what is trained once; so do all tests
    that make labs, as they look for what others have left behind."""
    for item in items:
        path = item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group("labs" if path.startswith(LABS) else path))
