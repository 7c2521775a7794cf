"""The compiled libraries: what they take, and how they are asked."""
