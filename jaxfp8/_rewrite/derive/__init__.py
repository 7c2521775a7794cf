"""Derivatives of a rewritten function."""
