"""Optimizer states: whose they are, what is recorded of them, and whether their sizes and values can be."""
