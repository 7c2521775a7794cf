"""Functions inside the function: how facts cross into loops, branches and calls, and out."""
