"""The option of the comparison with other programs."""


def pytest_addoption(parser):
    parser.addoption("--writers", default="build/writers/files", help="what write.py wrote")
