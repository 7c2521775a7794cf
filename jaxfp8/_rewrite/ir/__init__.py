"""The program as a graph, and the facts about its values."""
