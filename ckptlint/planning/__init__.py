"""Predicts whether a job of another shape can load a checkpoint, and what it reads."""
