"""The passes: trace a function, walk it, settle which products become calls."""
