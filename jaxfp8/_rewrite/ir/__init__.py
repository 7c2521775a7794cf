"""The program as a graph, and the facts beside its values."""
