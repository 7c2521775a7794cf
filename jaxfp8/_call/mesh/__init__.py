"""The split of a call over a mesh."""
