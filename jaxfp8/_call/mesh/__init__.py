"""How a mesh splits a call."""
