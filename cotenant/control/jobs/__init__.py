"""Decide when best-effort jobs start, what share they take, when they yield, and how they end."""
