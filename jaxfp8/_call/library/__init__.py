"""The compiled libraries: loading, supported problems and C calls."""
